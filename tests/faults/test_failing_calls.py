"""Commands whose system calls fail, or that are interrupted, one call at a time: a typed error, and no trace of it.

What is killed is in `test_crashes`, what goes on behind what was durable in `test_going_on`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import COMMANDS, Command, check_finished, merge_command

import mergepipe
from mergepipe.engine import pipeline
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, StorageError
from mergepipe.jobs import merge_run as merging
from mergepipe.snapshots import staging
from mergepipe.storage import owned
from mergepipe.storage.output import OutputFile
from support.disk_families import tree_digest
from support.faults import (
    Fault,
    drop_from_page_cache,
    open_descriptors,
    replaced,
    short_reads,
    short_writes,
    system_error,
    worker_threads,
)
from support.refusals import refuses

Call = tuple[object, str]


Counted = Callable[[str], tuple[Command, Mapping[Call, int]]]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Commands by name, and how often each calls what may fail when nothing does; their inputs stay as they are."""

    @cache
    def count(name: str) -> tuple[Command, Mapping[Call, int]]:
        command = COMMANDS[name](tmp_path_factory.mktemp("command")).undisturbed()
        counters: dict[Call, Fault] = {(owner, name): Fault() for _, owner, name, *_ in CALLS}
        counters |= {place: Fault() for place in PLACES}
        with ExitStack() as stack:
            for (owner, function), counter in counters.items():
                stack.enter_context(replaced(owner, function, counter.wrap))
            command.run()
        assert command.made() == command.wanted
        return command, {call: counter.calls for call, counter in counters.items()}

    return count


@pytest.fixture
def job(counted: Counted) -> Iterator[Command]:
    """A merge whose inputs are shared, and left as they are."""
    command, _ = counted("merge of ties")
    inputs_digest = tree_digest(command.root / "family")
    command.prepare()
    yield command
    command.prepare()
    assert tree_digest(command.root / "family") == inputs_digest


def spread(n_calls: int, most: int) -> list[int]:
    """The first and the last of so many calls and some between, or all of them."""
    n_points = min(n_calls, most)
    return sorted({place * (n_calls - 1) // max(1, n_points - 1) for place in range(n_points)})


# The command, what may fail, how in turn, whether the inputs are cold, and whether a failure may be got over: by doing
# without direct I/O, or because the folder exists, or what is removed is removed another time.
EITHER = (errno.ENOSPC, errno.EIO)
CALLS = [
    ("merge of ties", os, "preadv", (errno.EIO,), False, False),
    ("merge of ties", os, "preadv", (errno.EIO,), True, True),
    ("merge of ties", os, "pread", (errno.EIO,), False, False),
    ("merge of ties", os, "pwrite", (errno.ENOSPC,), False, False),
    ("merge of ties", os, "fsync", (errno.EIO,), False, False),
    ("merge of ties", os, "posix_fallocate", (errno.ENOSPC,), False, False),
    ("merge of ties", os, "ftruncate", (errno.EIO,), False, False),
    ("merge of ties", os, "posix_fadvise", (errno.EIO,), False, False),
    ("merge of ties", os, "mkdir", (errno.EACCES,), False, True),
    ("merge of ties", os, "open", (errno.EMFILE,), False, True),
    ("merge of ties", owned, "renameat2", (errno.EIO,), False, False),
    *(("compose", os, name, (errno.EIO,), False, False) for name in ("preadv", "pread", "fsync", "ftruncate")),
    *(("compose", os, name, (errno.ENOSPC,), False, False) for name in ("pwrite", "posix_fallocate")),
    ("compose", owned, "renameat2", (errno.EIO,), False, False),
    *(("pack", os, name, EITHER, False, True) for name in ("write", "fsync", "open", "preadv", "mkdir")),
]
FEW = 3  # the fast form looks at so many calls of each function, the slow one at every


@pytest.mark.thorough
@pytest.mark.parametrize("most", [FEW, pytest.param(sys.maxsize, marks=pytest.mark.slow)], ids=["few", "every"])
@pytest.mark.parametrize(
    ("command_name", "owner", "name", "numbers", "is_cold", "may_recover"),
    CALLS,
    ids=[f"{c[0].partition(' ')[0]}-{c[2]}{'-cold' * c[4]}" for c in CALLS],
)
def test_command__on_a_failing_call_ends_in_an_error_of_ours_and_is_finished_by_the_same_command(
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
    command_name: str,
    owner: object,
    name: str,
    numbers: tuple[int, ...],
    is_cold: bool,
    may_recover: bool,
    most: int,
) -> None:
    """A merge of which nothing was durable leaves nothing at all; a pack, which notes every block, what it made."""
    monkeypatch.setattr("mergepipe.deltastore.builder.NOTE_BLOCKS", 1)
    command, calls = counted(command_name)
    inputs_digest = tree_digest(command.root / "family")
    tried = spread(calls[owner, name], most)
    assert tried
    fired = recovered = 0
    for place, at in enumerate(tried):
        command.prepare()
        if is_cold:
            drop_from_page_cache(command.root / "family")
        published: list[Path] = []
        found = lambda: published.extend(path for path in (command.out,) if path.exists())  # noqa: B023, E731
        fault = Fault(at, system_error(numbers[place % len(numbers)]), on_fire=found)
        descriptors = open_descriptors()
        error: MergePipeError | None = None
        is_unrecorded = False
        with replaced(owner, name, fault.wrap):
            try:
                is_unrecorded = any(
                    "the catalog is not used" in notice for notice in getattr(command.run(), "notices", ())
                )
            except MergePipeError as caught:
                error = caught
        assert worker_threads() == []
        assert open_descriptors() <= descriptors
        fired += fault.fired
        recovered += error is None and fault.fired and not is_unrecorded
        if error is not None and not published and command_name != "pack":
            assert isinstance(error, StorageError)
            assert not command.results.exists()
        assert tree_digest(command.root / "family") == inputs_digest  # and all is in memory again
        check_finished(command)
    assert fired >= (len(tried) if command_name != "pack" and not is_cold else min(len(tried), 2))
    assert may_recover or recovered == 0
    assert recovered < len(tried)


@pytest.mark.parametrize("name", ["posix_fallocate", "pwrite"])
def test_merge__says_when_the_disk_is_full(job: Command, name: str) -> None:
    fault = Fault(0, system_error(errno.ENOSPC))
    with replaced(os, name, fault.wrap), refuses(StorageError, "storage.no-space"):
        job.run()


def test_merge__looks_at_the_free_space_first(job: Command) -> None:
    writes = Fault()
    with (
        replaced(shutil, "disk_usage", lambda _: lambda _: SimpleNamespace(total=100, used=90, free=10)),
        replaced(os, "mkdir", writes.wrap),
        pytest.raises(StorageError, match="10 B are free") as caught,
    ):
        job.run(catalog=False)
    assert (caught.value.code, writes.calls, job.results.exists()) == ("storage.no-space", 0, False)


@pytest.mark.parametrize("is_cold", [False, True])
def test_merge__is_the_same_with_short_reads_and_writes(job: Command, is_cold: bool) -> None:
    if is_cold:
        drop_from_page_cache(job.root / "family")
    with replaced(os, "preadv", short_reads), replaced(os, "pwrite", short_writes):
        job.run()
    assert job.made() == job.wanted


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _alter(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


CHANGES: list[tuple[Callable[[Path], None], type[MergePipeError], str]] = [
    (_truncate, CorruptError, "storage.shrunk"),
    (_alter, ConflictError, "input.changed"),
    (os.utime, ConflictError, "input.changed"),
    (Path.unlink, ConflictError, "input.changed"),
    (_replace, ConflictError, "input.changed"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("change", "kind", "code"), CHANGES, ids=[c[0].__name__ for c in CHANGES])
@pytest.mark.parametrize("is_cold", [False, True])
def test_merge__notices_an_input_that_changes_meanwhile(
    tmp_path: Path, change: Callable[[Path], None], kind: type[MergePipeError], code: str, is_cold: bool
) -> None:
    """The inputs are open by the time the first output is reserved, and no tensor has been merged."""
    job = merge_command(tmp_path, "ties")
    victim = sorted((job.root / "family/base").rglob("*.safetensors"))[0]
    if is_cold:
        drop_from_page_cache(job.root / "family")
    descriptors = open_descriptors()
    changed: list[Path] = []

    def change_first(posix_fallocate: Callable[..., None]) -> Callable[..., None]:
        def reserve(*arguments: int) -> None:
            if not changed:
                change(victim)
                changed.append(victim)
            posix_fallocate(*arguments)

        return reserve

    with replaced(os, "posix_fallocate", change_first), refuses(kind, code):
        job.run()
    assert changed
    assert not job.results.exists()
    assert worker_threads() == []
    assert open_descriptors() <= descriptors


# --- Ctrl-C at any moment: it comes through ---


def check_no_trace(job: Command) -> None:
    """No output at all, or the whole of it where the interrupt came after the last step."""
    assert worker_threads(patience_seconds=60) == []
    assert not job.results.exists() or (job.made(), [path.name for path in job.results.iterdir()]) == (
        job.wanted,
        ["out"],
    )
    job.prepare()


PLACES: list[Call] = [
    (pipeline.Pipeline, "_start"), (pipeline.Pipeline, "_admit"), (pipeline.Pipeline, "_begin_pass"),
    (pipeline.Pipeline, "_handle"), (pipeline.Pipeline, "_after_compute"), (OutputFile, "_open"),
    (merging, "make_part"), (merging, "write_durably"), (staging, "sync_directory"), (owned, "renameat2"),
    (fcntl, "flock"), (os, "mkdir"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "more"])
def test_merge__interrupted_at_a_call_leaves_no_trace(
    job: Command, counted: Counted, owner: object, name: str, afterwards: bool, is_short: bool
) -> None:
    n_calls = counted("merge of ties")[1][owner, name]
    assert n_calls > 0
    few = {0 if afterwards else 1, n_calls // 2, n_calls - 1}
    for at in sorted((few if is_short else few | {0, 1, 2, 7}) & set(range(n_calls))):
        descriptors = open_descriptors()
        fault = Fault(at, KeyboardInterrupt(), afterwards=afterwards)
        with replaced(owner, name, fault.wrap), pytest.raises(KeyboardInterrupt):
            job.run()
        check_no_trace(job)
        if (afterwards, name) != (True, "_open"):  # there the interrupt takes the descriptor on its way to its owner
            assert open_descriptors() <= descriptors


@pytest.mark.parametrize("at", [0, 1, 3, 10])
def test_merge__interrupted_from_the_progress_callback_leaves_no_trace(
    job: Command, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe.engine.pipeline.TICK_SECONDS", 0.0)  # a report at every event
    seen: list[mergepipe.Progress] = []

    def interrupt(progress: mergepipe.Progress) -> None:
        seen.append(progress)
        if len(seen) > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(on_progress=interrupt, shard_bytes=2000)
    check_no_trace(job)
