"""`mergepipe verify`, `repair`, `replay`, `materialise`, `diff` and `gc`: snapshots as things that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.commands.snapshots import SnapshotName
from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, Force, Home, Memory, NoCatalog, OutPath, Quiet, Threads
from mergepipe.cli.running import optional_size, print_merge_report, print_report, progress_shown, truthful_about
from mergepipe.core.escaping import printable_lines
from mergepipe.core.outcome import note_committed

DAMAGED_EXIT_CODE = 4
Deep = Annotated[bool, typer.Option("--deep", help="Make a sample again from the inputs too, and compare.")]
Sample = Annotated[
    float | None, typer.Option("--sample", metavar="SHARE", help="How much --deep makes again.  [default: 0.05]")
]
WholePath = Annotated[
    str | None, typer.Argument(metavar="[OUT]", help="The directory to create.  [default: the overlay's, with --force]")
]
MovedBase = Annotated[
    str | None, typer.Option("--base", metavar="DIR", help="Where the base is now.  [default: where it was]")
]
Fast = Annotated[bool, typer.Option("--fast", help="Compare manifests only, and read no tensors.")]
Roots = Annotated[list[str] | None, typer.Argument(metavar="[DIR]...", help="Where else staging of dead runs may lie.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("verify")(verify)
    app.command("repair")(repair)
    app.command("replay")(replay)
    app.command("materialise")(materialise)
    app.command("diff")(diff)
    app.command("gc")(gc)


def verify(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    deep: Deep = False,
    sample: Sample = None,
    home: Home = None,
    threads: Threads = None,
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Hold every byte of a snapshot against its manifest.

    Names the damaged tensors and bytes. Exit code 0: it is sound; 4: it is damaged.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    if sample is not None and not deep:
        from mergepipe.errors import RecipeError

        raise RecipeError.of("option.pair", "--sample", "it has no meaning by itself", "add --deep")
    from mergepipe import api

    fraction = (api.DEFAULT_DEEP_FRACTION if sample is None else sample) if deep else 0.0
    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.verify(
            snapshot,
            deep_fraction=fraction,
            threads=threads,
            memory_bytes=memory_bytes,
            home=home,
            on_progress=on_progress,
        )
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json({"is_sound": report.is_sound, "report": report}))
    elif not quiet or not report.is_sound:
        from mergepipe.cli.render.snapshots import verify_table

        print(printable_lines(verify_table(report)))
    if not report.is_sound:
        raise typer.Exit(DAMAGED_EXIT_CODE)


def repair(
    context: typer.Context,
    snapshot: SnapshotName,
    *,
    home: Home = None,
    threads: Threads = None,
    memory: Memory = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Mend a damaged snapshot from its inputs.

    What is damaged is made again, compared with the manifest, and nothing else is written.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.repair(snapshot, threads=threads, memory_bytes=memory_bytes, home=home, on_progress=on_progress)
    note_committed(report.path)
    from mergepipe.cli.render.snapshots import repair_table

    print_report(report, repair_table, as_json=as_json, quiet=quiet)


def replay(
    context: typer.Context,
    snapshot: SnapshotName,
    out: OutPath,
    *,
    home: Home = None,
    no_catalog: NoCatalog = False,
    threads: Threads = None,
    memory: Memory = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Make a snapshot again at OUT, from its manifest alone.

    The same bytes, or nothing: then it says which input is gone or is not what it was.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    from mergepipe import api

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.replay(
            snapshot,
            out,
            threads=threads,
            memory_bytes=memory_bytes,
            force=force,
            home=home,
            catalog=not no_catalog,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=as_json, quiet=quiet)


def materialise(
    context: typer.Context,
    overlay: SnapshotName,
    out: WholePath = None,
    *,
    base: MovedBase = None,
    home: Home = None,
    no_catalog: NoCatalog = False,
    threads: Threads = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Make the whole snapshot of an overlay.

    From its own blocks and its base's, each compared with its digest: the bytes of the merge without --overlay, or
    nothing.
    """
    session: Session = context.obj
    from mergepipe import api

    target = Path(overlay if out is None else out)
    with truthful_about(target), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.materialise(
            overlay,
            out,
            base=base,
            threads=threads,
            force=force,
            home=home,
            catalog=not no_catalog,
            on_progress=on_progress,
        )
    from mergepipe.cli.render.snapshots import materialise_table

    print_report(report, materialise_table, as_json=as_json, quiet=quiet)


def diff(
    context: typer.Context,
    a: SnapshotName,
    b: SnapshotName,
    *,
    fast: Fast = False,
    home: Home = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Compare two snapshots.

    Recipes, settings, inputs, coverage, and the tensors that differ, with norms.
    """
    session: Session = context.obj
    from mergepipe import api

    with progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.diff(a, b, reads_tensors=not fast, home=home, on_progress=on_progress)
    from mergepipe.cli.render.snapshots import diff_table

    print_report(report, diff_table, as_json=as_json)


def gc(
    roots: Roots = None,
    *,
    dry_run: DryRun = False,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Remove what dead runs left, and rows about what is gone.

    Nothing that a living process works on, and no snapshot, is ever removed.
    """
    from mergepipe import api

    report = api.gc(roots or (), dry_run=dry_run, home=home)
    from mergepipe.cli.render.snapshots import gc_table

    print_report(report, gc_table, as_json=as_json)
