"""Verification, repair, comparison and garbage as text for people, and lineage as a graph."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from mergepipe.catalog.rows import LineageNode
from mergepipe.cli.render.layout import columns_text, facts_text, number_text
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, format_rate, format_seconds, plural
from mergepipe.reports import Damage, GcReport, PushReport, RepairReport, SnapshotDiff, VerifyReport

SHORT_SID = 12
MOST_TENSORS = 40


def verify_table(report: VerifyReport) -> str:
    """Show what was read and which problems were found."""
    speed = format_rate(report.read_bytes / max(report.seconds, 1e-9))
    replayed = f"{plural(len(report.replayed), 'tensor')}, {format_bytes(report.replayed_bytes)}"
    facts = [
        ("snapshot", f"{report.sid} {report.path}"),
        ("read", f"{format_bytes(report.read_bytes)} in {format_seconds(report.seconds)}, {speed}"),
        ("checked", _checked_text(report)),
        *([("made again", replayed)] if report.replayed else []),
        *(("notice", notice) for notice in report.notices),
        *(("damaged", damage_text(damage)) for damage in report.damages),
        ("result", "sound" if report.is_sound else f"DAMAGED in {plural(len(report.damages), 'place')}"),
    ]
    return facts_text(facts)


def _checked_text(report: VerifyReport) -> str:
    """Return what was compared: blocks, or of a composite whole files."""
    files = plural(report.files, "file")
    if not report.tensors:
        return f"{files}, every byte"
    return f"{plural(report.blocks, 'block')} of {plural(report.tensors, 'tensor')} in {files}"


def damage_text(damage: Damage) -> str:
    """One damage: the file, the bytes, the tensor, what is wrong."""
    place = f" bytes {damage.start} to {damage.stop - 1}" if damage.stop > damage.start else ""
    tensor = f", tensor {damage.tensor}" if damage.tensor else ""
    return f"{damage.file}{place}{tensor}: {damage.message}"


def push_table(report: PushReport) -> str:
    """Show the published files and their place."""
    kept_rows = [("there already", format_bytes(report.kept_bytes))] if report.kept_bytes else []
    return facts_text([
        ("snapshot", f"{report.sid} {report.snapshot}"),
        ("pushed", f"{plural(report.files, 'file')}, {format_bytes(report.total_bytes)}"),
        *kept_rows,
        ("time", format_seconds(report.seconds)),
        *([("commit", report.commit)] if report.commit else []),
        ("output", str(report.destination)),
    ])  # fmt: skip


def repair_table(report: RepairReport) -> str:
    """Show the repaired blocks and files."""
    if not report.repaired:
        return facts_text([("snapshot", f"{report.sid} {report.path}"), ("result", "sound: nothing to repair")])
    return facts_text([
        ("snapshot", f"{report.sid} {report.path}"),
        *(("repaired", damage_text(damage)) for damage in report.repaired),
        ("made again", plural(len(report.rebuilt_tensors), "tensor")),
        ("written", format_bytes(report.written_bytes)),
        ("result", "sound"),
    ])  # fmt: skip


def gc_table(report: GcReport) -> str:
    """Show garbage, and directories in use."""
    verb = "would remove" if report.is_dry_run else "removed"
    lines = [
        (verb if item.is_removed or report.is_dry_run else "could not remove",
         f"{item.kind} {item.what} ({item.reason}{', ' + format_bytes(item.nbytes) if item.nbytes else ''})")
        for item in report.garbage
    ]  # fmt: skip
    return facts_text([
        *lines,
        *(("living", path) for path in report.living),
        *(("notice", notice) for notice in report.notices),
        ("would free" if report.is_dry_run else "freed", format_bytes(report.freed_bytes)),
    ])  # fmt: skip


def diff_table(report: SnapshotDiff) -> str:
    """Show the differences of two snapshots; the tensors that changed most first."""
    facts = [
        ("a", f"{report.a_sid} {report.a}"),
        ("b", f"{report.b_sid} {report.b}"),
        *(("setting", line) for line in report.settings),
        *(("input", line) for line in report.inputs),
        ("tensors", f"{report.equal_tensors} equal, {len(report.tensors)} different"),
        *([("||a - b||", number_text(report.norm))] if report.norm is not None else []),
    ]
    parts = [facts_text(facts)]
    if report.recipe:
        parts.append("\n".join(printable(line) for line in report.recipe.splitlines()))
    if report.tensors:
        parts.append(_changes_table(report))
    return "\n\n".join(parts)


def _changes_table(report: SnapshotDiff) -> str:
    ordered = sorted(report.tensors, key=lambda change: -(change.norm or 0.0))
    rows = [
        [change.name, change.kind, number_text(change.norm), number_text(change.relative)]
        for change in ordered[:MOST_TENSORS]
    ]
    table = columns_text(["tensor", "what differs", "||a - b||", "/ ||a||"], rows, left=2)
    more = len(ordered) - MOST_TENSORS
    return table if more <= 0 else f"{table}\nand {plural(more, 'tensor')} more"


def lineage_dot(nodes: Sequence[LineageNode], *, down: bool = False) -> str:
    """The lineage as a graph in the DOT language: every input points to what was made from it."""
    lines = _dot_lines(nodes, down=down)
    return "\n".join(["digraph lineage {", "  rankdir=LR;", "  node [shape=box];", *lines, "}"])


def _dot_lines(nodes: Sequence[LineageNode], *, down: bool) -> Iterator[str]:
    parents: list[str] = []
    labelled: set[str] = set()
    for node in nodes:
        name = _quoted(node.sid or str(node.path))
        if name not in labelled:
            labelled.add(name)
            made = [f"{node.operator} {node.sid[:SHORT_SID]}"] if node.operator and node.sid else []
            yield f"  {name} [label={_quoted(node.model if node.depth else str(node.path), *made)}];"
        del parents[node.depth :]
        if parents:
            start, end = (parents[-1], name) if down else (name, parents[-1])
            yield f"  {start} -> {end} [label={_quoted(node.role)}];"
        parents.append(name)


def _quoted(*lines: str) -> str:
    """A string of the DOT language."""
    return json.dumps("\n".join(printable(line) for line in lines), ensure_ascii=False, allow_nan=False)
