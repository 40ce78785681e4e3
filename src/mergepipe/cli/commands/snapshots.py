"""Commands that look after published snapshots: list, show, compare, verify, repair, make again, publish elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

import mergepipe
from mergepipe.cli.app import OutDirectory, OutPath, SnapshotHere, SnapshotName, Without, command
from mergepipe.cli.printing import PrintOptions, ReportOptions, columns_text, print_report, report_json
from mergepipe.cli.progress import OnProgress
from mergepipe.core.display import Displayed, Table, printable, printable_lines, text_of
from mergepipe.core.flags import Argument, Flag
from mergepipe.core.outcome import note_committed
from mergepipe.core.units import format_bytes
from mergepipe.errors import RecipeError
from mergepipe.options import FORCE, HOME, PushOptions, RunOptions, VerifyOptions

if TYPE_CHECKING:
    from mergepipe.catalog.snapshots import LineageNode

DAMAGED_EXIT_CODE = 4
SHORT_SID = 12


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise RecipeError.of("option.invalid", name, f"'{text}' is not a date", "write it as 2026-11-23") from None


@command(
    "mergepipe ls",
    "mergepipe ls --with models/math --operator ties --since 2026-11-01",
    "mergepipe ls --with models/math --touched model.embed_tokens.weight",
    name="ls",
)
def list_snapshots(
    *,
    contained: Annotated[
        str | None,
        Flag(
            "Only snapshots made from this model, directly or through earlier merges: a path, a name, hf://org/name, "
            "or the first digits of a commit, a content digest or a sid.",
            name="--with",
            metavar="EXPERT",
        ),
    ] = None,
    operator: Annotated[str | None, Flag("Only snapshots made with this operator.", metavar="NAME")] = None,
    since: Annotated[
        date | None, Flag("Only snapshots made on this day or later.", metavar="YYYY-MM-DD", read=_day)
    ] = None,
    touched: Annotated[
        str | None,
        Flag(
            "Only snapshots in which experts, or the one of --with, contributed to these tensors; prints the blocks.",
            metavar="GLOB",
        ),
    ] = None,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """List the snapshots in the catalog, newest first."""
    snapshots = mergepipe.list_snapshots(
        contained=contained, operator=operator, since=since, touched=touched, home=home
    )
    if printing.as_json:
        print(report_json({"snapshots": snapshots}))
        return
    if touched is not None:
        held = tuple(
            (snapshot.sid[:SHORT_SID], snapshot.place, tensor.name, use.model, use.blocks, str(tensor.blocks))
            for snapshot in snapshots
            for tensor in snapshot.touched
            for use in tensor.uses
        )
        table = Table(("sid", "path", "tensor", "from", "blocks", "of"), held)
        print(printable_lines(columns_text(table)) if held else "no snapshots")
        return
    rows = tuple(
        (
            snapshot.sid[:SHORT_SID],
            text_of("created", snapshot.created),
            snapshot.summary.rpartition(": ")[0] or snapshot.summary or snapshot.operator,
            snapshot.place,
            str(sum(source.is_expert for source in snapshot.inputs)),
            format_bytes(snapshot.expert_bytes + snapshot.analysis_bytes),
            text_of("budget", snapshot.plan_digest is not None),
        )
        for snapshot in snapshots
    )
    head = ("sid", "made (UTC)", "operator", "path", "experts", "experts read", "budget")
    print(printable_lines(columns_text(Table(head, rows))) if rows else "no snapshots")


@command("mergepipe show merged/", "mergepipe show 7b3a2e50")
def show(snapshot: SnapshotName, *, home: Annotated[str | None, HOME] = None) -> Displayed:
    """Show one snapshot: its recipe, its inputs, and what was read."""
    return mergepipe.show(snapshot, home=home)


@command(
    "mergepipe lineage merged/",
    "mergepipe lineage merged/ --down",
    "mergepipe lineage models/math --down",
    "mergepipe lineage merged/ --dot | dot -Tsvg > lineage.svg",
)
def lineage(
    snapshot: Annotated[
        str,
        Argument(
            "SID|PATH",
            "A snapshot's directory or address (s3://, hf://org/name), its sid, or the first digits of it. With --down "
            "also a model, as `mergepipe ls --with` takes it.",
        ),
    ],
    *,
    down: Annotated[bool, Flag("Show what was made from the snapshot, or from a model, instead.")] = False,
    dot: Annotated[bool, Flag("Print a graph in the DOT language.")] = False,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """Show the inputs of a snapshot, or what was made from it, through all generations.

    Copies of a model on this machine are found, too: a merge in full records content ids of what it reads.
    """
    nodes = mergepipe.lineage(snapshot, down=down, home=home)
    if printing.as_json:
        print(report_json({"nodes": nodes}))
    else:
        print(printable_lines((lineage_dot if dot else lineage_tree)(nodes, down=down)))


def lineage_dot(nodes: Sequence[LineageNode], *, down: bool = False) -> str:
    """The lineage as a graph in the DOT language: every input points to what was made from it."""
    lines = ["digraph lineage {", "  rankdir=LR;", "  node [shape=box];"]
    parents: list[str] = []
    labelled: set[str] = set()
    for node in nodes:
        name = _quoted(node.sid or str(node.path))
        if name not in labelled:
            labelled.add(name)
            made = [f"{node.operator} {node.sid[:SHORT_SID]}"] if node.operator and node.sid else []
            lines.append(f"  {name} [label={_quoted(node.model if node.depth else str(node.path), *made)}];")
        del parents[node.depth :]
        if parents:
            start, end = (parents[-1], name) if down else (name, parents[-1])
            lines.append(f"  {start} -> {end} [label={_quoted(node.role)}];")
        parents.append(name)
    return "\n".join([*lines, "}"])


def _quoted(*lines: str) -> str:
    """A string of the DOT language."""
    return json.dumps("\n".join(printable(line) for line in lines), ensure_ascii=False, allow_nan=False)


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
    return f"{node.role}{of} {name}{made}{read}{', expanded above' if node.is_repeated else ''}"


@command("mergepipe diff merged/ other/", "mergepipe diff merged/ other/ --fast")
def diff(
    a: SnapshotName,
    b: SnapshotName,
    *,
    fast: Annotated[bool, Flag("Compare only the manifests, and read no tensors.")] = False,
    home: Annotated[str | None, HOME] = None,
    on_progress: OnProgress,
) -> Displayed:
    """Compare two snapshots.

    Recipes, settings, inputs, coverage, and the tensors that differ, with norms.
    """
    return mergepipe.diff(a, b, reads_tensors=not fast, home=home, on_progress=on_progress)


@command(
    "mergepipe verify merged/", "mergepipe verify merged/ --deep 20%", "mergepipe verify packs/math --base models/base"
)
def verify(
    snapshot: SnapshotName,
    *,
    options: Annotated[VerifyOptions, Without("catalog")],
    printing: ReportOptions,
    on_progress: OnProgress,
) -> None:
    """Compare every byte of a snapshot or a pack with its record.

    Names the damaged tensors and bytes. Exit code 0: sound; 4: damaged.
    """
    report = mergepipe.verify(snapshot, options=options, on_progress=on_progress)
    if printing.as_json:
        print(report_json({"is_sound": report.is_sound, "report": report}))
    else:
        print_report(report, replace(printing, quiet=printing.quiet and report.is_sound))
    if not report.is_sound:
        raise Exit(DAMAGED_EXIT_CODE)


@command("mergepipe repair merged/")
def repair(
    snapshot: SnapshotHere, *, options: Annotated[RunOptions, Without("catalog")], on_progress: OnProgress
) -> Displayed:
    """Repair a damaged snapshot from its inputs.

    Recomputes damaged blocks and files, compares them with the manifest, and writes nothing else.
    """
    report = mergepipe.repair(snapshot, options=options, on_progress=on_progress)
    note_committed(report.path)
    return report


@command("mergepipe replay 7b3a2e50 again/")
def replay(
    snapshot: SnapshotName,
    out: OutPath,
    *,
    force: Annotated[bool, FORCE] = False,
    options: RunOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Recompute a snapshot at OUT, from its manifest alone.

    Publishes the same bytes, or fails and names the input that is missing or has changed.
    """
    return mergepipe.replay(snapshot, out, force=force, options=options, on_progress=on_progress)


@command(
    "mergepipe without models/math merged/ -o without-math/ --dry-run",
    "mergepipe without models/math merged/ -o without-math/",
)
def without(
    expert: Annotated[str, Argument("EXPERT", "The model to leave out, as `mergepipe ls --with` takes it.")],
    snapshots: Annotated[
        list[str], Argument("SNAPSHOT...", "Snapshots that hold it: their directories, or sids of the catalog.")
    ],
    *,
    out: OutDirectory,
    dry_run: Annotated[bool, Flag("Say what would be read and written, and make nothing.")] = False,
    options: RunOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Make snapshots again without a model, with all that was made from them, parents first.

    Follows the lineage in the catalog. Each snapshot gets a folder in DIR, and keeps its recipe, seed and budget, but
    for the entries of EXPERT. What cannot be made again is listed with the reason.
    """
    return mergepipe.without(expert, snapshots, out, dry_run=dry_run, options=options, on_progress=on_progress)


@command("mergepipe push merged/ org/name --create", "mergepipe push merged/ s3://bucket/merged")
def push(
    snapshot: SnapshotHere,
    destination: Annotated[
        str,
        Argument(
            "DEST",
            "org/name on the Hub (or hf://org/name[@branch][/folder]), s3://bucket/prefix, gs:// or az://.",
        ),
    ],
    *,
    options: PushOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Publish a snapshot, a packed expert or a composed checkpoint on the Hub or in a bucket.

    It appears there complete or not at all: in one commit, or by a manifest that is written last. Paths of this
    machine are removed. After an interruption the same command uploads only what is missing.
    """
    return mergepipe.push(snapshot, destination, options=options, on_progress=on_progress)
