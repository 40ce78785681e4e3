"""Reports of checks, merges, analyses, packing and extraction as text tables for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mergepipe.cli.render.budgets import verdict_facts
from mergepipe.cli.render.layout import Fact, columns_text, facts_text, notice_facts
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, format_percent, format_rate, format_seconds, plural
from mergepipe.reports import (
    AnalyzedExpert,
    AnalyzeReport,
    AppliedAdapter,
    CheckReport,
    ExtractLoraReport,
    MergeLoraReport,
    MergeReport,
    PackedExpert,
    PackReport,
    PartReport,
    PartsStatus,
    UnpackReport,
)
from mergepipe.storage.contract import Traffic

MAX_PATTERNS = 4
MAX_NAME_CHARACTERS = 60

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


def merge_table(report: MergeReport) -> str:
    """Show what a merge read and wrote, and its time."""
    analysis = [("read again", format_bytes(report.analysis_bytes))] if report.analysis_bytes else []
    earlier_bytes = report.earlier_expert_bytes
    earlier = f", {format_bytes(earlier_bytes)} of it at most by interrupted runs" if earlier_bytes else ""
    counts = _counts(report.merged_tensors, report.copied_tensors, report.dropped_tensors)
    return facts_text(
        [
            *verdict_facts(report.verdict),
            ("operator", report.operator),
            ("base read", format_bytes(report.base_bytes)),
            ("experts read", format_bytes(report.expert_bytes) + earlier),
            *analysis,
            *_budget_facts(report),
            *_tried_facts(report),
            ("written", format_bytes(report.output_bytes)),
            *_traffic_facts(report.traffic),
            ("time", format_seconds(report.seconds)),
            ("speed", format_rate(report.bytes_per_second)),
            ("peak memory", format_bytes(report.peak_rss_bytes)),
            ("tensors", counts),
            *(("kept", f"{format_percent(one.share)} of {one.model}, by size of difference") for one in report.kept),
            *(("adapter", _applied_text(adapter, several=len(report.adapters) > 1)) for adapter in report.adapters),
            ("snapshot", report.sid),
            *notice_facts(report.recipe_notices),
            *(("notice", notice) for notice in report.notices),
            *(("not copied", line) for line in grouped_names((file.reason, file.name) for file in report.left_out)),
            ("output", str(report.out)),
        ]
    )


def _applied_text(adapter: AppliedAdapter, *, several: bool) -> str:
    """Count an adapter's modules, and name those that were left over."""
    saved = plural(adapter.saved_modules, "saved module")
    text = (
        f"{adapter.applied_modules} of {plural(adapter.adapted_modules, 'adapted module')} applied, {saved} replaced, "
        f"{len(adapter.left_over)} left over"
    )
    left = f": {shorten_names(adapter.left_over)}" if adapter.left_over else ""
    base = f"; trained on {printable(adapter.trained_on)}" if adapter.trained_on else ""
    return f"{adapter.model}: {text}{left}{base}" if several else f"{text}{left}{base}"


def _traffic_facts(traffic: Traffic) -> list[Fact]:
    """Requests for remote files, what retries cost, and the bytes of each host."""
    counts = traffic.counts
    if not counts.requests:
        return []
    retries = f", {counts.retries} of them retries" if counts.retries else ""
    lost = f" ({format_bytes(counts.retried_bytes)} lost)" if counts.retried_bytes else ""
    hosts = [("from", f"{host}: {format_bytes(nbytes)}") for host, nbytes in traffic.bytes_by_host.items()]
    return [("requests", f"{counts.requests}{retries}{lost}"), *hosts]


def _budget_facts(report: MergeReport) -> list[Fact]:
    """Planned against realized: everything requested of expert files but headers."""
    if report.planned_bytes is None or report.budget_bytes is None:
        return []
    realized = report.expert_bytes + report.analysis_bytes
    text = f"{format_bytes(realized)} read of {format_bytes(report.planned_bytes)} planned"
    return [("budget", f"{format_bytes(report.budget_bytes)}: {text}")]


def _tried_facts(report: MergeReport) -> list[Fact]:
    """The budgets that a target loss was tried with, and what all of them read."""
    if not report.tried:
        return []
    texts = (
        f"{one.budget}: loss {one.loss:.6g}, {format_bytes(one.expert_bytes)} of the experts" for one in report.tried
    )
    total = format_bytes(sum(one.expert_bytes for one in report.tried))
    return [*(("tried", text) for text in texts), ("read in all", f"{total} of the experts, the base each time")]


def analyze_table(report: AnalyzeReport) -> str:
    """Show what an analysis read, expert by expert."""
    again = [("read again", format_bytes(report.analysis_bytes))] if report.analysis_bytes else []
    return facts_text(
        [
            *(("expert", _analyzed_text(expert)) for expert in report.experts),
            ("base read", format_bytes(report.base_bytes)),
            ("experts read", format_bytes(report.expert_bytes)),
            *again,
            *(("statistics", str(expert.statistics)) for expert in report.experts if expert.statistics is not None),
            ("time", format_seconds(report.seconds)),
            *(("notice", notice) for notice in report.notices),
        ]
    )


def _analyzed_text(expert: AnalyzedExpert) -> str:
    n_known = expert.comparable_tensors - expert.analyzed_tensors
    parts = [f"{expert.analyzed_tensors} read now", f"{n_known} known before"]
    if expert.packed_bytes is not None:
        parts.append(f"a pack would take about {format_bytes(expert.packed_bytes)}")
    if expert.incomparable:
        parts.append(f"not comparable: {shorten_names(expert.incomparable)}")
    return f"{expert.model} ({plural(expert.comparable_tensors, 'tensor')}: {', '.join(parts)})"


def check_table(report: CheckReport, free_bytes: int) -> str:
    """Show what a merge would read and write, model by model, and what happens to every tensor."""
    counts = _counts(report.merged_tensors, len(report.copied), len(report.dropped))
    enough = "" if free_bytes >= report.disk_bytes else ": not enough"
    files = plural(report.shards, "file")
    facts = [
        ("operator", report.operator),
        *((model.role, _model_text(model.model, model.tensors, model.bytes)) for model in report.models),
        ("reads", f"base {format_bytes(report.base_bytes)}, experts {format_bytes(report.expert_bytes)}"),
        ("writes", f"{format_bytes(report.output_bytes)} in {files}"),
        ("disk", f"{format_bytes(report.disk_bytes)} needed, {format_bytes(free_bytes)} free here{enough}"),
        ("tensors", counts),
        *(("copied", line) for line in grouped_names((reason, name) for name, reason in report.copied)),
        *(("dropped", line) for line in grouped_names((f"{d.model}, {d.reason}", d.tensor) for d in report.dropped)),
        *notice_facts(report.recipe_notices),
    ]
    return facts_text(facts)


def shorten_names(names: Iterable[str]) -> str:
    """List names with their numbers replaced by `*`: `model.layers.*.bias (28), rotary.inv_freq`."""
    patterns = Counter(_NUMBER.sub("*", name) for name in names)
    listed = [
        _shorten(pattern) + (f" ({count})" if count > 1 else "")
        for pattern, count in list(patterns.items())[:MAX_PATTERNS]
    ]
    n_more = sum(list(patterns.values())[MAX_PATTERNS:])
    return ", ".join(listed) + (f", and {n_more} more" if n_more else "")


def _model_text(model: str, tensors: int, nbytes: int) -> str:
    return f"{model} ({plural(tensors, 'tensor')}, {format_bytes(nbytes)})"


def _counts(merged: int, copied: int, dropped: int) -> str:
    return f"{merged} merged, {copied} copied, {dropped} dropped"


def grouped_names(reasons_and_names: Iterable[tuple[str, str]]) -> list[str]:
    """Write one line a reason, with the names that it holds for."""
    groups: dict[str, list[str]] = {}
    for reason, name in reasons_and_names:
        groups.setdefault(reason, []).append(name)
    return [f"{reason}: {shorten_names(names)}" for reason, names in groups.items()]


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 3]}..."


def part_table(report: PartReport) -> str:
    """Show the shards that a worker made, and whether the output is complete."""
    if report.merge is not None:
        return (
            f"part {report.part}: the last one\n{merge_table(report.merge)}"
            if report.part
            else merge_table(report.merge)
        )
    state = "published" if report.is_published else f"{report.done_shards} of {report.n_shards} shards are done"
    return facts_text(
        [
            ("part", report.part or "-"),
            ("shards made", str(len(report.made_shards))),
            ("done before", str(len(report.found_shards))),
            ("base read", format_bytes(report.base_bytes)),
            ("experts read", format_bytes(report.expert_bytes)),
            ("written", format_bytes(report.output_bytes)),
            ("time", format_seconds(report.seconds)),
            ("whole output", state),
            ("output", str(report.out)),
        ]
    )


def status_table(status: PartsStatus) -> str:
    """Show the state of an output, shard by shard."""
    limit = "no limit" if status.limit_bytes is None else f"a budget of {format_bytes(status.limit_bytes)}"
    read = f"{format_bytes(status.read_bytes)} of {format_bytes(status.planned_bytes)} planned, {limit}"
    state = "published" if status.is_published else f"{status.done_shards} of {len(status.shards)} shards are done"
    facts = [("output", str(status.out)), ("state", state)]
    if not status.is_published:
        facts.append(("experts read", read))
    if status.n_parts is not None:
        missing = ", ".join(f"{number}/{status.n_parts}" for number in status.missing_parts)
        facts.append(("missing parts", missing or "none"))
    if not status.shards:
        return facts_text(facts)
    rows = [[s.name, s.state, s.part or "-", s.worker or "-", format_bytes(s.size_bytes)] for s in status.shards]
    return facts_text(facts) + "\n\n" + columns_text(("shard", "state", "part", "worker", "size"), rows, left=4)


_CODEC_WORDS = {
    "same": "equal to the base",
    "bands": "in levels",
    "bytes": "without levels",
    "raw": "unencoded",
    "standalone": "without the base",
}


def pack_table(report: PackReport) -> str:
    """A row for each expert, and the base that it took of several."""
    head = ("store", "blocks", "expert", "packed", "of it", "time", "speed")
    table = columns_text(head, [_packed_row(expert) for expert in report.experts], left=2)
    facts = [fact for expert in report.experts for fact in _base_of_choice(expert)]
    return f"{table}\n\n{facts_text(facts)}" if facts else table


def _base_of_choice(expert: PackedExpert) -> list[Fact]:
    """Show the base that was chosen among several for an expert, and how sure that is."""
    match = expert.match
    if match is None or match.next_base is None or match.next_delta is None:
        return []
    sure = "" if match.is_sure else "; not sure"
    text = (
        f"{expert.store}: {match.base}, deltas of {format_percent(match.relative_delta)} of the weights, nearest at "
        f"{format_percent(match.nearest_fraction)} of {match.n_samples} samples; next is {match.next_base} with "
        f"{format_percent(match.next_delta)}{sure}"
    )
    return [("base", text)]


def _packed_row(expert: PackedExpert) -> tuple[str, ...]:
    """Return the store, how its blocks can be read, sizes, time and speed."""
    sizes = (format_bytes(expert.tensor_bytes), format_bytes(expert.store_bytes), f"{expert.share:.1%}")
    if not expert.is_new:
        return (str(expert.store), "was packed before, left as it is", *sizes, "-", "-")
    speed = format_rate(expert.tensor_bytes / expert.seconds) if expert.seconds else "-"
    before = f"; {format_bytes(expert.resumed_bytes)} by an interrupted run" if expert.resumed_bytes else ""
    return (str(expert.store), _blocks_text(expert) + before, *sizes, format_seconds(expert.seconds), speed)


def _blocks_text(expert: PackedExpert) -> str:
    """Return how the blocks can be read, and why some have no levels."""
    blocks = ", ".join(f"{plural(count, 'block')} {_CODEC_WORDS[codec]}" for codec, count in expert.blocks.items())
    reasons = ", ".join(f"{count} {reason}" for reason, count in expert.outside_bands.items())
    return (blocks or "no blocks") + (f" (without levels: {reasons})" if reasons else "")


def unpack_line(report: UnpackReport) -> str:
    """Show the restored files in one line."""
    speed = format_rate(report.tensor_bytes / report.seconds) if report.seconds else "no time"
    out = printable(str(report.out))
    return f"{out}: {format_bytes(report.tensor_bytes)} restored, {format_seconds(report.seconds)}, {speed}"


def merged_adapter_table(report: MergeLoraReport) -> str:
    """Ranks, and the share of the merged deltas that is kept."""
    ranks = sorted({module.rank for module in report.modules})
    worst = min(report.modules, key=lambda module: module.kept_energy, default=None)
    kept = f"{format_percent(report.kept_energy)} of the square sum of the merged deltas"
    least = (
        f", at least {format_percent(worst.kept_energy)} ({worst.module})" if worst and worst.kept_energy < 1 else ""
    )
    return facts_text(
        [
            ("method", report.method),
            ("adapted", plural(len(report.modules), "module")),
            ("rank", _span(ranks)),
            ("kept", kept + least),
            *([("saved whole", ", ".join(report.saved_modules))] if report.saved_modules else []),
            ("read", f"{format_bytes(report.read_bytes)} in {format_seconds(report.seconds)}"),
            ("adapter", f"{format_bytes(report.adapter_bytes)}, {report.out}"),
        ]
    )


def _span(ranks: Sequence[int]) -> str:
    return "-" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def extraction_table(report: ExtractLoraReport) -> str:
    """Ranks, errors, and what was left out."""
    ranks = sorted({tensor.rank for tensor in report.tensors})
    worst = max(report.tensors, key=lambda tensor: tensor.relative_error, default=None)
    worst_fact = [] if worst is None else [("largest error", f"{format_percent(worst.relative_error)} of {worst.name}")]
    return facts_text(
        [
            ("adapted", plural(len(report.tensors), "tensor")),
            ("rank", _span(ranks)),
            ("error", f"{format_percent(report.relative_error)} of the difference's norm is not in the adapter"),
            *worst_fact,
            *([("saved whole", ", ".join(report.saved_modules))] if report.saved_modules else []),
            *(("not held", line) for line in grouped_names((skipped.reason, skipped.name) for skipped in report.left)),
            ("base model", report.base_model_id or "unknown on the Hub; --base-model-id names it"),
            ("read", f"{format_bytes(report.base_bytes + report.model_bytes)} in {format_seconds(report.seconds)}"),
            ("adapter", f"{format_bytes(report.adapter_bytes)}, {report.out}"),
        ]
    )
