"""Snapshots, lineage and the catalog as text tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.catalog.rows import CatalogStats, LineageNode, RebuildReport
from mergepipe.cli.render.layout import columns_text, facts_text
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, plural
from mergepipe.reports import SnapshotReport

SHORT_SID = 12


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
