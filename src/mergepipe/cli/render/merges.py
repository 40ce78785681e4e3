"""Reports as text tables for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from mergepipe.cli.render.layout import Fact, facts_text, notice_facts
from mergepipe.cli.render.verdicts import verdict_facts
from mergepipe.core.units import format_bytes, format_percent, format_rate, format_seconds, plural
from mergepipe.reports import (
    AnalyzedExpert,
    AnalyzeReport,
    CheckReport,
    MergeReport,
)
from mergepipe.storage.traffic import Traffic

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
            ("snapshot", report.sid),
            *notice_facts(report.recipe_notices),
            *(("notice", notice) for notice in report.notices),
            *(("not copied", line) for line in grouped_names((file.reason, file.name) for file in report.left_out)),
            ("output", str(report.out)),
        ]
    )


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
