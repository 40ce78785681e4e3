"""Feeds damaged inputs to readers, in processes that may die: only typed errors, in bounded time and memory."""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, NoReturn

from mergepipe.errors import MergePipeError
from support.mutations import Mutator, Shape

_PROGRESS: Final = struct.Struct("<QQ")  # inputs begun, bytes of the last
_MOST_SHOWN_BYTES = 16 << 20
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of one format, and how its inputs are made."""

    name: str
    read: Callable[[bytes], object]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Limits:
    """What one input may cost. `hung_seconds` are of the clock, for what does not come back to the interpreter."""

    cpu_seconds: float = 5.0
    hung_seconds: float = 60.0
    memory_bytes: int = 512 << 20


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that did not end in a value or a typed error. `kind` is equal for failures at the same place."""

    target: str
    kind: str
    content: bytes
    trace: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of the inputs of one target. `codes` are those of the typed errors."""

    target: str
    accepted: int = 0
    refused: int = 0
    codes: frozenset[str] = frozenset()
    failures: tuple[Failure, ...] = ()

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused + len(self.failures)

    def plus(self, other: Tally) -> Tally:
        """Both together; of failures of one kind the smaller input stays."""
        known = {failure.kind: failure for failure in self.failures}
        for failure in other.failures:
            if failure.kind not in known or len(failure.content) < len(known[failure.kind].content):
                known[failure.kind] = failure
        return Tally(
            self.target,
            self.accepted + other.accepted,
            self.refused + other.refused,
            self.codes | other.codes,
            tuple(known.values()),
        )


class TookTooLongError(BaseException):
    """An input took more time than it may; not an `Exception`, so that no reader catches it."""


def check_input(target: Target, content: bytes, limits: Limits = DEFAULT_LIMITS) -> str | Failure:
    """Read one input: the code of the typed error, "" for a value, or the failure."""
    try:
        with _cpu_limit(limits.cpu_seconds):
            target.read(content)
    except MergePipeError as error:
        return error.code
    except (Exception, TookTooLongError) as error:
        return Failure(target.name, _kind(error), content, "".join(traceback.format_exception(error)[-12:]))
    return ""


def fuzz(
    target: Target, seed: int, n_inputs: int, deadline: float = float("inf"), limits: Limits = DEFAULT_LIMITS
) -> Tally:
    """Feed `n_inputs` inputs, or as many as `time.monotonic()` allows, in child processes; one that dies is replaced.

    Memory of a child: that of this process, and `limits.memory_bytes`.
    """
    tally, attempt = Tally(target.name), 0
    while tally.inputs < n_inputs and time.monotonic() < deadline and attempt < 50:
        found = _fuzz_apart(target, seed + attempt * 1_000_003, n_inputs - tally.inputs, deadline, limits)
        tally, attempt = tally.plus(found), attempt + 1
    return tally


def _kind(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "mergepipe" in frame.filename and "testing" not in frame.filename]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {place}"


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TookTooLongError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- one child process ---


@dataclass(slots=True)
class _Shared:
    """Memory that outlives the child: how many inputs it began, and the last one."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _PROGRESS.size + _MOST_SHOWN_BYTES))

    def begin(self, number: int, content: bytes) -> None:
        shown = content[:_MOST_SHOWN_BYTES]
        _PROGRESS.pack_into(self.memory, 0, number, len(shown))
        self.memory[_PROGRESS.size : _PROGRESS.size + len(shown)] = shown

    @property
    def begun(self) -> int:
        return int(_PROGRESS.unpack_from(self.memory)[0])

    @property
    def last(self) -> bytes:
        nbytes = int(_PROGRESS.unpack_from(self.memory)[1])
        return self.memory[_PROGRESS.size : _PROGRESS.size + nbytes]


def _fuzz_apart(target: Target, seed: int, n_inputs: int, deadline: float, limits: Limits) -> Tally:
    shared = _Shared()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as answers:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _limit_memory(limits.memory_bytes)
                pickle.dump(
                    _fuzz_here(target, Mutator(target.shape, seed), n_inputs, deadline, limits, shared), answers
                )
                answers.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = _wait(child, shared, limits.hung_seconds)
        if status == 0:
            return _answer(answers)
    end = "hung" if status is None else f"exit status {status}"
    failure = Failure(target.name, f"the process ended: {end}", shared.last, "")
    return Tally(target.name, max(0, shared.begun - 1), failures=(failure,))


def _answer(answers: BinaryIO) -> Tally:
    answers.seek(0)
    found = pickle.load(answers)
    if not isinstance(found, Tally):
        raise TypeError(f"a child answered {type(found).__name__}")
    return found


def _wait(child: int, shared: _Shared, hung_seconds: float) -> int | None:
    """The exit code of the child, minus its signal, or None where it hung and was killed."""
    begun, since = -1, time.monotonic()
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if shared.begun != begun:
            begun, since = shared.begun, time.monotonic()
        elif time.monotonic() - since > hung_seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_SECONDS)


def _fuzz_here(
    target: Target, mutator: Mutator, n_inputs: int, deadline: float, limits: Limits, shared: _Shared
) -> Tally:
    kinds, codes, accepted, refused = dict[str, Failure](), set[str](), 0, 0
    for number in range(1, n_inputs + 1):
        content = mutator.next()
        shared.begin(number, content)
        found = check_input(target, content, limits)
        if isinstance(found, Failure):
            refused += found.kind in kinds  # counted once a kind
            if found.kind not in kinds or len(content) < len(kinds[found.kind].content):
                kinds[found.kind] = found
        elif found:
            refused += 1
            codes.add(found)
        else:
            accepted += 1
        if time.monotonic() > deadline:
            break
    return Tally(target.name, accepted, refused, frozenset(codes), tuple(kinds.values()))


def _limit_memory(allowance_bytes: int) -> None:
    faulthandler.enable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + allowance_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
