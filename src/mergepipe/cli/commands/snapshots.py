"""Commands that look after published snapshots: list, show, compare, verify, repair, make again, publish elsewhere."""

from __future__ import annotations

from datetime import date
from typing import Annotated

import typer

from mergepipe.cli.printing import PrintOptions, ReportOptions, print_report, print_text, report_json
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import OutPath, SnapshotName, Without, add_command
from mergepipe.core.escaping import printable_lines
from mergepipe.core.flags import Flag
from mergepipe.core.outcome import note_committed, tell_if_published
from mergepipe.errors import RecipeError
from mergepipe.options import FORCE, HOME, PushOptions, RunOptions, VerifyOptions
from mergepipe.storage.location import Location

DAMAGED_EXIT_CODE = 4
SECTION = "Snapshots"


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise RecipeError.of("option.invalid", name, f"'{text}' is no day", "write it as 2026-11-23") from None


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    contained = "mergepipe ls --with models/math --operator ties --since 2026-11-01"
    add_command(app, list_snapshots, "mergepipe ls", contained, name="ls", section=SECTION)
    add_command(app, show, "mergepipe show merged/", "mergepipe show 7b3a2e50", section=SECTION)
    graph = "mergepipe lineage merged/ --dot | dot -Tsvg > lineage.svg"
    add_command(app, lineage, "mergepipe lineage merged/", "mergepipe lineage merged/ --down", graph, section=SECTION)
    add_command(app, diff, "mergepipe diff merged/ other/", "mergepipe diff merged/ other/ --fast", section=SECTION)
    add_command(
        app,
        verify,
        "mergepipe verify merged/",
        "mergepipe verify merged/ --deep 20%",
        "mergepipe verify packs/math --base models/base",
        section=SECTION,
    )
    add_command(app, repair, "mergepipe repair merged/", section=SECTION)
    add_command(app, replay, "mergepipe replay 7b3a2e50 again/", section=SECTION)
    add_command(
        app,
        push,
        "mergepipe push merged/ org/name --create",
        "mergepipe push merged/ s3://bucket/merged",
        section=SECTION,
    )


def list_snapshots(
    *,
    contained: Annotated[
        str | None,
        Flag(
            "Only those that this model is in, directly or through earlier merges: a path, a name, hf://org/name, or "
            "the first digits of a commit, a content digest or a sid.",
            name="--with",
            metavar="EXPERT",
        ),
    ] = None,
    operator: Annotated[str | None, Flag("Only those that this operator made.", metavar="NAME")] = None,
    since: Annotated[
        date | None, Flag("Only those made on this day or later.", metavar="YYYY-MM-DD", read=_day)
    ] = None,
    until: Annotated[
        date | None, Flag("Only those made on this day or before.", metavar="YYYY-MM-DD", read=_day)
    ] = None,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """List the snapshots that the catalog knows, newest first."""
    from mergepipe import api

    snapshots = api.list_snapshots(contained=contained, operator=operator, since=since, until=until, home=home)
    if printing.as_json:
        print(report_json({"snapshots": snapshots}))
    else:
        from mergepipe.cli.render.snapshots import snapshots_table

        print_text(snapshots_table(snapshots))


def show(snapshot: SnapshotName, *, home: Annotated[str | None, HOME] = None, printing: PrintOptions) -> None:
    """Show one snapshot: how it was made, from what, what was read."""
    from mergepipe import api

    report = api.show(snapshot, home=home)
    print_report(report, printing)


def lineage(
    snapshot: SnapshotName,
    *,
    down: Annotated[bool, Flag("Show what was made from the snapshot instead.")] = False,
    dot: Annotated[bool, Flag("Print a graph in the DOT language.")] = False,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """Show all that went into a snapshot, or all that was made from it, through all generations."""
    from mergepipe import api

    nodes = api.lineage(snapshot, down=down, home=home)
    if printing.as_json:
        print(report_json({"nodes": nodes}))
    elif dot:
        from mergepipe.cli.render.snapshots import lineage_dot

        print(printable_lines(lineage_dot(nodes, down=down)))
    else:
        from mergepipe.cli.render.snapshots import lineage_tree

        print(printable_lines(lineage_tree(nodes, down=down)))


def diff(
    context: typer.Context,
    a: SnapshotName,
    b: SnapshotName,
    *,
    fast: Annotated[bool, Flag("Compare manifests only, and read no tensors.")] = False,
    home: Annotated[str | None, HOME] = None,
    printing: ReportOptions,
) -> None:
    """Compare two snapshots.

    Recipes, settings, inputs, coverage, and the tensors that differ, with norms.
    """
    from mergepipe import api

    with progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.diff(a, b, reads_tensors=not fast, home=home, on_progress=on_progress)
    print_report(report, printing)


def verify(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    options: Annotated[VerifyOptions, Without("catalog")],
    printing: ReportOptions,
) -> None:
    """Compare every byte of a snapshot or a pack with its record.

    Names the damaged tensors and bytes. Exit code 0: sound; 4: damaged.
    """
    from mergepipe import api

    with progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.verify(snapshot, options=options, on_progress=on_progress)
    if printing.as_json:
        print(report_json({"is_sound": report.is_sound, "report": report}))
    elif not printing.quiet or not report.is_sound:
        from mergepipe.cli.render.snapshots import verify_table

        print_text(verify_table(report))
    if not report.is_sound:
        raise typer.Exit(DAMAGED_EXIT_CODE)


def repair(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    options: Annotated[RunOptions, Without("catalog")],
    printing: ReportOptions,
) -> None:
    """Repair a damaged snapshot from its inputs.

    Makes damaged blocks and files again, compares them with the manifest, and writes nothing else.
    """
    from mergepipe import api

    with progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.repair(snapshot, options=options, on_progress=on_progress)
    note_committed(report.path)
    print_report(report, printing)


def replay(
    context: typer.Context,
    snapshot: SnapshotName,
    out: OutPath,
    *,
    force: Annotated[bool, FORCE] = False,
    options: RunOptions,
    printing: ReportOptions,
) -> None:
    """Make a snapshot again at OUT, from its manifest alone.

    Publishes the same bytes, or fails and names the input that is missing or has changed.
    """
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.replay(snapshot, out, force=force, options=options, on_progress=on_progress)
    print_report(report, printing)


def push(
    context: typer.Context,
    snapshot: SnapshotName,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DEST",
            help="org/name on the Hub (or hf://org/name[@branch][/folder]), s3://bucket/prefix, gs:// or az://.",
        ),
    ],
    *,
    options: PushOptions,
    printing: ReportOptions,
) -> None:
    """Publish a snapshot, a packed expert or a composed checkpoint on the Hub or in a bucket.

    It is visible there whole or not at all: one commit, or a manifest that is written last. Paths of this machine are
    left out. After an interruption the same command uploads only what is missing.
    """
    from mergepipe import api
    from mergepipe.jobs.push import push_destination

    place = push_destination(destination)
    with tell_if_published(place), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.push(snapshot, destination, options=options, on_progress=on_progress)
    print_report(report, printing)
