"""Reports as text tables for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mergepipe.report.text import printable
from mergepipe.report.units import format_bytes, format_rate, format_seconds, plural
from mergepipe.reports import CheckReport, MergeReport

MAX_PATTERNS = 4
MAX_NAME_CHARACTERS = 60

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
Fact = tuple[str, str]


def merge_table(report: MergeReport) -> str:
    """What a merge read, wrote and took."""
    analysis = [("read again", format_bytes(report.analysis_bytes))] if report.analysis_bytes else []
    counts = _counts(report.merged_tensors, report.copied_tensors, report.dropped_tensors)
    return _facts(
        [
            ("operator", report.operator),
            ("base read", format_bytes(report.base_bytes)),
            ("experts read", format_bytes(report.expert_bytes)),
            *analysis,
            ("written", format_bytes(report.output_bytes)),
            ("time", format_seconds(report.seconds)),
            ("speed", format_rate(report.bytes_per_second)),
            ("peak memory", format_bytes(report.peak_rss_bytes)),
            ("tensors", counts),
            ("snapshot", report.sid),
            ("output", str(report.out)),
        ]
    )


def check_table(report: CheckReport, free_bytes: int) -> str:
    """What a merge would read and write, model by model, and what happens to every tensor."""
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
        *(("copied", line) for line in _grouped((reason, name) for name, reason in report.copied)),
        *(("dropped", line) for line in _grouped((f"{d.model}, {d.reason}", d.tensor) for d in report.dropped)),
    ]
    return _facts(facts)


def shorten_names(names: Iterable[str]) -> str:
    """List names with their numbers replaced by `*`: `model.layers.*.bias (28), rotary.inv_freq`."""
    patterns = Counter(_NUMBER.sub("*", name) for name in names)
    listed = [
        _shorten(pattern) + (f" ({count})" if count > 1 else "")
        for pattern, count in list(patterns.items())[:MAX_PATTERNS]
    ]
    rest = sum(list(patterns.values())[MAX_PATTERNS:])
    return ", ".join(listed) + (f", and {rest} more" if rest else "")


def _model_text(model: str, tensors: int, nbytes: int) -> str:
    return f"{model} ({plural(tensors, 'tensor')}, {format_bytes(nbytes)})"


def _counts(merged: int, copied: int, dropped: int) -> str:
    return f"{merged} merged, {copied} copied, {dropped} dropped"


def _grouped(reasons_and_names: Iterable[tuple[str, str]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for reason, name in reasons_and_names:
        groups.setdefault(reason, []).append(name)
    return [f"{reason}: {shorten_names(names)}" for reason, names in groups.items()]


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 3]}..."


def _facts(facts: Sequence[Fact]) -> str:
    width = max(len(label) for label, _ in facts)
    return "\n".join(f"{label:<{width}}  {printable(value)}" for label, value in facts)
