"""Track what a call has published, so that an error after the commit says that the output is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

from mergepipe.errors import InterruptedRunError, MergePipeError, Problem, PublishedError


class Place(Protocol):
    """The place of an output: a path, or a location of another store."""

    def absolute(self) -> Place:
        """The same place whatever the working directory is."""
        ...


_COMMITTED: ContextVar[list[Place] | None] = ContextVar("committed", default=None)


def note_committed(place: Place) -> None:
    """Record that the output at `place` is complete, whatever fails afterwards."""
    committed = _COMMITTED.get()
    if committed is not None:
        committed.append(place.absolute())


@contextlib.contextmanager
def committed_places() -> Iterator[list[Place]]:
    """Collect the outputs committed inside the context."""
    outer, committed = _COMMITTED.get(), list[Place]()
    token = _COMMITTED.set(committed)
    try:
        yield committed
    finally:
        _COMMITTED.reset(token)
        if outer is not None:
            outer.extend(committed)


@contextlib.contextmanager
def private_outputs() -> Iterator[None]:
    """Ignore the outputs committed inside the context, which are temporary."""
    with committed_places() as committed:
        try:
            yield
        finally:
            committed.clear()


@contextlib.contextmanager
def published_but(out: Place) -> Iterator[None]:
    """Convert any failure after `out` was committed to an error that says so; interrupts pass."""
    with committed_places() as committed:
        try:
            yield
        except PublishedError:
            raise
        except Exception as error:
            if out.absolute() not in committed:
                raise
            raise published_error(out, error) from error


@contextlib.contextmanager
def tell_what_is_published() -> Iterator[None]:
    """Let an error of a command with several outputs name those that were published by then."""
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


def published_error(out: Place, error: BaseException) -> MergePipeError:
    """Make the error that says that `out` is complete, and what failed afterwards."""
    message = "is complete and published, but something failed afterwards"
    problem = Problem("output.published-but", str(out), message, "use it; it need not be made again")
    return PublishedError(problem, *_problems_of(error))


def _problems_of(error: BaseException) -> tuple[Problem, ...]:
    if isinstance(error, MergePipeError):
        return error.problems
    if isinstance(error, MemoryError):
        return (Problem("storage.exhausted", "", "the system has no more memory"),)
    if isinstance(error, OSError):
        return (Problem("storage.io", str(error.filename or ""), error.strerror or str(error)),)
    return (Problem("internal", "", f"{type(error).__name__}: {error}", "report it"),)
