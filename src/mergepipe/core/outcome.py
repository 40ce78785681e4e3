"""What a call tells besides its report: what it has published when an error comes after the commit, and notices."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from mergepipe.errors import InterruptedRunError, MergePipeError, MergePipeWarning, Problem, PublishedError


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


# --- notices: parts of a recipe, and tensors, that have no effect, or another than it seems. Told, not refused ---


_POSITION = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?: (?P<key>.*))?")


@dataclass(frozen=True, slots=True)
class Notice:
    """One part of a recipe that is ignored or changed: `message` says how, `elsewhere` what it would mean elsewhere.

    `key` is its place (`models[1].parameters.lambda`) in `line` of `file`; `other_lines` say the same thing again.
    `changes_result`: the result is another than what is written there asks for. Such a notice is a warning, which
    `--quiet` does not silence; any other only says that something has no effect.
    """

    code: str
    file: str
    line: int
    key: str
    message: str
    elsewhere: str = ""
    other_lines: tuple[int, ...] = ()
    changes_result: bool = False

    @property
    def kind(self) -> str:
        """The word that it is shown with."""
        return "warning" if self.changes_result else "notice"

    @property
    def where(self) -> str:
        """The position, as error messages write it."""
        return f"{self.file}:{self.line} {self.key}".rstrip() if self.line else self.file

    @property
    def text(self) -> str:
        """Everything but the position."""
        again = f" (also in line{'s' * (len(self.other_lines) > 1)} {', '.join(map(str, self.other_lines))})"
        return self.message + (f"; {self.elsewhere}" if self.elsewhere else "") + (again if self.other_lines else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor of an expert that no task uses: `model` is the path as the recipe writes it."""

    model: str
    tensor: str
    reason: str


def notice_at(code: str, where: str, message: str, elsewhere: str = "", *, changes_result: bool = False) -> Notice:
    """Make a notice at a position as error messages write it: `recipe.yml:7 models[1].parameters.lambda`."""
    position = _POSITION.fullmatch(where)
    if position is None:
        return Notice(code, where, 0, "", message, elsewhere, changes_result=changes_result)
    file, line, key = position["file"], int(position["line"]), position["key"] or ""
    return Notice(code, file, line, key, message, elsewhere, changes_result=changes_result)


def warn_of(notices: Iterable[Notice]) -> None:
    """Warn a caller in Python, once each, of notices that the result is not what the recipe asks for."""
    texts = dict.fromkeys(f"{notice} [{notice.code}]" for notice in notices if notice.changes_result)
    for text in texts:
        warnings.warn(text, MergePipeWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the `stacklevel` at which `warn_of` names the line outside of this package that made the call."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "mergepipe":
        frame = frame.f_back
        level += 1
    return level


def told_once(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Join notices that say the same of several lines of a file, in order of their first line's report."""
    first: dict[tuple[str, str, str, str], Notice] = {}
    for notice in notices:
        same = (notice.code, notice.file, notice.message, notice.elsewhere)
        earlier = first.setdefault(same, notice)
        if notice.line not in (earlier.line, *earlier.other_lines):
            first[same] = replace(earlier, other_lines=(*earlier.other_lines, notice.line))
    return tuple(first.values())
