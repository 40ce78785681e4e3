"""A merge whose system calls fail, one at a time: a typed error, and no trace of the attempt."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import mergepipe
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, StorageError
from mergepipe.options import MergeOptions
from mergepipe.storage import owned
from support.disk_families import DiskFamily, make_models, tree_digest, weights_digest, write_family, write_recipe
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
from support.oracle import MergeCase

CASE = MergeCase("dare_ties", (0.7, 0.5), (0.5, 0.3), normalize=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A merge that works when nothing interferes."""

    folder: Path
    family: DiskFamily
    recipe: Path
    inputs_digest: str
    wanted: str

    @property
    def out(self) -> Path:
        return self.folder / "results" / "out"

    def run(self) -> None:
        mergepipe.merge(self.recipe, self.out, options=MergeOptions(threads=2, shard_bytes=100_000, catalog=False))

    def check_nothing_left(self, descriptors: set[tuple[str, str]]) -> None:
        """No output, no staging, no thread, no open file, and untouched inputs."""
        assert not self.out.exists()
        assert not self.out.parent.exists()
        assert [p.name for p in self.folder.iterdir() if p.name.startswith(".")] == []
        assert worker_threads() == []
        assert open_descriptors() <= descriptors
        assert tree_digest(*self.family.places) == self.inputs_digest


@pytest.fixture
def job(tmp_path: Path) -> Job:
    family = write_family(tmp_path, make_models(2))
    recipe = write_recipe(tmp_path / "recipe.yml", CASE, family)
    mergepipe.merge(recipe, tmp_path / "wanted")
    digest = tree_digest(*family.places)
    return Job(tmp_path, family, recipe, digest, weights_digest(tmp_path / "wanted"))


def _note_existence(path: Path, seen: list[bool]) -> None:
    seen.append(path.exists())


def count_calls(job: Job, owner: object, name: str) -> int:
    counter = Fault()
    with replaced(owner, name, counter.wrap):
        job.run()
    assert weights_digest(job.out) == job.wanted
    shutil.rmtree(job.out.parent)
    return counter.calls


# What may fail, how, whether the inputs are cold, and whether a failure may be got over: by doing without direct I/O,
# or because the folder exists.
CALLS = [
    (os, "preadv", errno.EIO, False, False),
    (os, "preadv", errno.EIO, True, True),
    (os, "pread", errno.EIO, False, False),
    (os, "pwrite", errno.ENOSPC, False, False),
    (os, "fsync", errno.EIO, False, False),
    (os, "posix_fallocate", errno.ENOSPC, False, False),
    (os, "ftruncate", errno.EIO, False, False),
    (os, "posix_fadvise", errno.EIO, False, False),
    (os, "mkdir", errno.EACCES, False, True),
    (os, "open", errno.EMFILE, False, True),
    (owned, "renameat2", errno.EIO, False, False),
]


FEW = 9  # the fast form looks at about so many calls of each function, the slow one at every


@pytest.mark.parametrize("most", [FEW, pytest.param(sys.maxsize, marks=pytest.mark.slow)], ids=["few", "every"])
@pytest.mark.parametrize(
    ("owner", "name", "number", "is_cold", "may_recover"), CALLS, ids=[f"{c[1]}{'-cold' * c[3]}" for c in CALLS]
)
def test_merge__survives_a_failure_of_any_call(
    job: Job, owner: object, name: str, number: int, is_cold: bool, may_recover: bool, most: int
) -> None:
    n_calls = count_calls(job, owner, name)
    assert n_calls > 0
    step = max(1, n_calls // most)
    recovered = 0
    for at in range(0, n_calls, step):
        if is_cold:
            drop_from_page_cache(*job.family.places)
        published: list[bool] = []
        fault = Fault(at, system_error(number), on_fire=partial(_note_existence, job.out, published))
        descriptors = open_descriptors()
        error: MergePipeError | None = None
        with replaced(owner, name, fault.wrap):
            try:
                job.run()
            except MergePipeError as caught:
                error = caught
        assert fault.fired or is_cold
        if error is not None and not any(published):
            assert isinstance(error, StorageError)
            job.check_nothing_left(descriptors)
        else:  # it was got over, or it came after the output had appeared: then that is whole
            recovered += error is None and fault.fired
            assert weights_digest(job.out) == job.wanted
            assert [p.name for p in job.out.parent.iterdir()] == ["out"]
            shutil.rmtree(job.out.parent)
    assert recovered == 0 or may_recover
    assert recovered < len(range(0, n_calls, step))


@pytest.mark.parametrize("name", ["posix_fallocate", "pwrite"])
def test_merge__says_when_the_disk_is_full(job: Job, name: str) -> None:
    fault = Fault(0, system_error(errno.ENOSPC))
    with replaced(os, name, fault.wrap), pytest.raises(StorageError) as caught:
        job.run()
    assert caught.value.code == "storage.no-space"


def test_merge__looks_at_the_free_space_first(job: Job) -> None:
    descriptors = open_descriptors()

    writes = Fault()
    with (
        replaced(shutil, "disk_usage", lambda _: lambda _: SimpleNamespace(total=100, used=90, free=10)),
        replaced(os, "mkdir", writes.wrap),
        pytest.raises(StorageError, match="10 are free") as caught,
    ):
        job.run()
    assert (caught.value.code, writes.calls) == ("storage.no-space", 0)
    job.check_nothing_left(descriptors)


@pytest.mark.parametrize("is_cold", [False, True])
def test_merge__is_the_same_with_short_reads_and_writes(job: Job, is_cold: bool) -> None:
    if is_cold:
        drop_from_page_cache(*job.family.places)
    with replaced(os, "preadv", short_reads), replaced(os, "pwrite", short_writes):
        job.run()
    assert weights_digest(job.out) == job.wanted


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _alter(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")


def _touch(path: Path) -> None:
    os.utime(path)


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


CHANGES: list[tuple[Callable[[Path], None], type[MergePipeError], str]] = [
    (_truncate, CorruptError, "storage.shrunk"),
    (_alter, ConflictError, "input.changed"),
    (_touch, ConflictError, "input.changed"),
    (_remove, ConflictError, "input.changed"),
    (_replace, ConflictError, "input.changed"),
]


@pytest.mark.parametrize(("change", "kind", "code"), CHANGES, ids=[c[0].__name__ for c in CHANGES])
@pytest.mark.parametrize("is_cold", [False, True])
def test_merge__notices_an_input_that_changes_meanwhile(
    job: Job, change: Callable[[Path], None], kind: type[MergePipeError], code: str, is_cold: bool
) -> None:
    victim = sorted(job.family.places[0].rglob("*.safetensors"))[0]
    if is_cold:
        drop_from_page_cache(*job.family.places)
    descriptors = open_descriptors()
    fault = Fault(0, on_fire=lambda: change(victim))

    def change_first(posix_fallocate: Callable[..., None]) -> Callable[..., None]:
        """The inputs are open by the time the first output is reserved, and no tensor has been merged."""
        armed = fault.wrap(posix_fallocate)

        def reserve(*args: int) -> None:
            try:
                armed(*args)
            except OSError:
                posix_fallocate(*args)

        return reserve

    with replaced(os, "posix_fallocate", change_first), pytest.raises(kind) as caught:
        job.run()
    assert fault.fired
    assert caught.value.code == code
    assert not job.out.parent.exists()
    assert worker_threads() == []
    assert open_descriptors() <= descriptors
