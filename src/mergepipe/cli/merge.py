"""`mergepipe merge`: merge as a recipe says, with progress, and report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import AsJson, Debug, RecipePath, ShardSize
from mergepipe.cli.sizes import parse_size

if TYPE_CHECKING:
    from mergepipe.reports import MergeReport, Progress

OutPath = Annotated[str, typer.Argument(metavar="OUT", help="The directory to create.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Compute threads.  [default: one per processor]"),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Cap on buffers, e.g. 4GiB.  [default: 4GiB, or half of the RAM if less]"
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the random operators.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT, if mergepipe made it.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no report; errors only.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("merge")(merge)


def merge(
    context: typer.Context,
    recipe: RecipePath,
    out: OutPath,
    *,
    threads: Threads = None,
    memory: Memory = None,
    seed: Seed = 0,
    force: Force = False,
    shard_size: ShardSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Merge the models of RECIPE into the directory OUT.

    OUT appears when it is complete, or not at all.
    """
    session: Session = context.obj
    memory_bytes = None if memory is None else parse_size(memory, "--memory")
    shard_bytes = None if shard_size is None else parse_size(shard_size, "--shard-size")
    from mergepipe import session as api
    from mergepipe.cli.progress import choose_display

    def on_progress(progress: Progress) -> None:
        session.interrupts.report()
        display.update(progress)

    with _truthful_about(Path(out)), choose_display(silent=quiet or as_json) as display:
        report = api.merge(
            recipe,
            out,
            threads=threads,
            memory_bytes=memory_bytes,
            seed=seed,
            force=force,
            shard_bytes=api.DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
            on_progress=on_progress,
        )
    _print_report(report, as_json=as_json, quiet=quiet)


def _print_report(report: MergeReport, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        from mergepipe.report.as_json import merge_json

        print(merge_json(report))
    elif not quiet:
        from mergepipe.report.tables import merge_table

        print(merge_table(report))


@contextlib.contextmanager
def _truthful_about(out: Path) -> Iterator[None]:
    """Let an interruption say so if the output had just been published, by looking at what stands there."""
    before = _identity(out)
    try:
        yield
    except KeyboardInterrupt as error:
        now = _identity(out)
        if now is None or now == before:
            raise
        from mergepipe.errors import InterruptedRunError

        raise InterruptedRunError.of("run.interrupted", out, "was complete by then, and is published") from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
