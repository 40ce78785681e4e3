"""What commands that run long share: progress on the way, and the truth about the output when they are stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.cli.guard import Session
from mergepipe.cli.sizes import parse_size
from mergepipe.core.escaping import printable_lines

if TYPE_CHECKING:
    from mergepipe.reports import MergeReport, Progress

Report = TypeVar("Report")


@contextlib.contextmanager
def progress_shown(session: Session, *, silent: bool) -> Iterator[Callable[[Progress], None]]:
    """Show progress while the context lasts; what it gives is called with each report, and is where a run can stop."""
    from mergepipe.cli.progress import choose_display

    with choose_display(silent=silent) as display:

        def on_progress(progress: Progress) -> None:
            session.interrupts.report()
            display.update(progress)

        yield on_progress


@contextlib.contextmanager
def truthful_about(out: Path) -> Iterator[None]:
    """Let an error or an interruption say so if the output had been published by then."""
    from mergepipe.core.outcome import committed_places, published_but
    from mergepipe.errors import InterruptedRunError

    with committed_places() as committed:
        try:
            with published_but(out):
                yield
        except KeyboardInterrupt as error:
            if out.absolute() not in committed:
                raise
            raise InterruptedRunError.of("run.interrupted", out, "was complete by then, and is published") from error


@contextlib.contextmanager
def naming_what_stands() -> Iterator[None]:
    """Let an error of a command with several outputs name those that were published by then."""
    from mergepipe.core.outcome import committed_places
    from mergepipe.errors import InterruptedRunError

    with committed_places() as committed:
        try:
            yield
        except KeyboardInterrupt as error:
            if not committed:
                raise
            places = ", ".join(map(str, committed))
            raise InterruptedRunError.of("run.interrupted", places, "complete by then, and published") from error
        except Exception as error:
            for place in committed:
                error.add_note(f"{place} is complete and published")
            committed.clear()  # told; the command as a whole is not done
            raise


def optional_size(text: str | None, option: str) -> int | None:
    """Bytes in `text`, if there is any.

    Raises:
        RecipeError: it is not a size.
    """
    return None if text is None else parse_size(text, option)


def print_report(report: Report, table: Callable[[Report], str], *, as_json: bool, quiet: bool = False) -> None:
    """Tell what was found or done: as JSON, as `table` shows it, or not at all."""
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json(report))
    elif not quiet:
        print(printable_lines(table(report)))


def print_merge_report(report: MergeReport, *, as_json: bool, quiet: bool) -> None:
    """Tell what a merge did."""
    if as_json:
        from mergepipe.cli.render.json import merge_json

        print(merge_json(report))
    elif not quiet:
        from mergepipe.cli.render.merges import merge_table

        print(printable_lines(merge_table(report)))
