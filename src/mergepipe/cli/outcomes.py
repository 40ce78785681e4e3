"""Tell the truth about outputs that stand when a command fails or is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergepipe.core.outcome import Place


@contextlib.contextmanager
def tell_if_published(out: Place) -> Iterator[None]:
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
def tell_what_is_published() -> Iterator[None]:
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
