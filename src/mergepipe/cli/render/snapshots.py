"""Snapshots, lineage, verification, comparison, garbage and the catalog as text for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from mergepipe.catalog.rows import CatalogStats, LineageNode, RebuildReport
from mergepipe.cli.render.layout import columns_text, facts_text, number_text
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, format_rate, format_seconds, plural
from mergepipe.reports import Damage, GcReport, PushReport, RepairReport, SnapshotDiff, SnapshotReport, VerifyReport

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


def snapshots_table(snapshots: Sequence[SnapshotReport]) -> str:
    """Return a table with one line for each snapshot."""
    if not snapshots:
        return "no snapshots"
    rows = [
        [
            snapshot.sid[:SHORT_SID],
            f"{snapshot.created:%Y-%m-%d %H:%M}",
            snapshot.operator,
            _place_text(snapshot),
            str(sum(source.role == "expert" for source in snapshot.inputs)),
            format_bytes(snapshot.expert_bytes + snapshot.analysis_bytes),
            "no" if snapshot.plan_digest is None else "yes",
        ]
        for snapshot in snapshots
    ]
    return columns_text(["sid", "made (UTC)", "operator", "path", "experts", "read of them", "budget"], rows, left=4)


def _place_text(snapshot: SnapshotReport) -> str:
    return str(snapshot.path) if snapshot.is_present else f"{snapshot.path} (gone)"


def snapshot_table(snapshot: SnapshotReport) -> str:
    """Return the facts of one snapshot."""
    inputs = [
        (source.role, f"{source.model} ({format_bytes(source.read_bytes)} read){_sid_text(source.sid)}")
        for source in snapshot.inputs
    ]
    facts = [
        ("snapshot", snapshot.sid),
        ("path", _place_text(snapshot)),
        ("made (UTC)", f"{snapshot.created:%Y-%m-%d %H:%M:%S}"),
        ("operator", snapshot.operator),
        ("plan", snapshot.plan_digest or "none: a full merge"),
        *inputs,
        ("read", f"base {format_bytes(snapshot.base_bytes)}, experts {format_bytes(snapshot.expert_bytes)}"),
        ("written", format_bytes(snapshot.output_bytes)),
        *([] if snapshot.is_recorded else [("notice", "not in the catalog: `mergepipe catalog rebuild` adds it")]),
    ]
    return facts_text(facts)


def _sid_text(sid: str | None) -> str:
    return "" if sid is None else f", snapshot {sid[:SHORT_SID]}"


def lineage_tree(nodes: Sequence[LineageNode], *, down: bool = False) -> str:
    """The tree, one line a node; `down` from a snapshot to what was made from it."""
    texts = (_node_text(node, " of" if down and node.depth else "") for node in nodes)
    return "\n".join(f"{_branch(nodes, i)}{printable(text)}" for i, text in enumerate(texts))


def _branch(nodes: Sequence[LineageNode], index: int) -> str:
    depth = nodes[index].depth
    if depth == 0:
        return ""
    bars = ["│  " if _goes_on(nodes, index, level) else "   " for level in range(1, depth)]
    return "".join(bars) + ("├─ " if _goes_on(nodes, index, depth) else "└─ ")


def _goes_on(nodes: Sequence[LineageNode], index: int, depth: int) -> bool:
    """Whether another node of this depth follows under the same parent."""
    for node in nodes[index + 1 :]:
        if node.depth <= depth:
            return node.depth == depth
    return False


def _node_text(node: LineageNode, of: str) -> str:
    name = node.model if node.depth else str(node.path)
    made = f" = {node.operator} {node.sid[:SHORT_SID]}" if node.operator and node.sid else ""
    read = f", {format_bytes(node.read_bytes)} read" if node.read_bytes is not None else ""
    return f"{node.role}{of} {name}{made}{read}{', unfolded above' if node.is_repeated else ''}"


def catalog_table(stats: CatalogStats) -> str:
    """Show what the home folder holds, and its size."""
    return facts_text([
        ("catalog", str(stats.path)),
        ("size", format_bytes(stats.file_bytes)),
        ("snapshots", str(stats.snapshots)),
        ("digests", f"of {plural(stats.digests, 'file')}"),
        ("statistics", f"of {plural(stats.statistics, 'expert')}, {format_bytes(stats.statistics_bytes)}"),
    ])  # fmt: skip


def rebuild_table(report: RebuildReport) -> str:
    """Show the snapshots that a rebuild found, and those it did not."""
    moved = [("moved aside", str(report.moved_aside))] if report.moved_aside is not None else []
    return facts_text([
        ("snapshots", str(report.snapshots)),
        *(("missing", str(path)) for path in report.missing),
        *(("unreadable", str(problem)) for problem in report.unreadable),
        *(("composite", f"{path}: a training checkpoint, no snapshot") for path in report.composites),
        *moved,
    ])  # fmt: skip
