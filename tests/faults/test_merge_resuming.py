"""An interrupted merge goes on: whatever stopped it, the bytes are the same, and what was read counts."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from crash_cases import CrashJob, make_job, note_often

import mergepipe
from mergepipe import keeping
from mergepipe.budget import Purpose
from mergepipe.errors import ConflictError, LimitError, MergePipeError, NotFoundError, StorageError
from mergepipe.journal import JOURNAL_NAME, read_journal
from mergepipe.publish import CONTENT_NAME, staging_directory
from mergepipe.reports import Progress
from mergepipe.testing.crashes import Death, count_operations, run_forked, run_killed
from mergepipe.testing.faults import Fault, open_descriptors, replaced, system_error, worker_threads
from mergepipe.workflows import resuming
from mergepipe.workflows.snapshots import read_manifest_value


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    before = note_often()
    yield
    resuming.INTERVAL_BYTES, resuming.RESERVED_BYTES = before


@pytest.fixture
def job(tmp_path: Path) -> CrashJob:
    return make_job(tmp_path)


def went_on(notices: tuple[str, ...]) -> bool:
    return any("went on" in notice for notice in notices)


def interrupt_late(job: CrashJob, error: BaseException) -> None:
    """Stop a run once two of its three files are durable."""
    operation = [i for i, name in enumerate(count_operations(job.run)) if name == "ftruncate"]
    assert len(operation) == 3
    shutil.rmtree(job.out.parent)
    shutil.rmtree(job.home, ignore_errors=True)
    fault = Fault(2, error)
    with (
        replaced(os, "ftruncate", fault.wrap),
        pytest.raises(type(error) if not isinstance(error, OSError) else StorageError) as caught,
    ):
        job.run()
    assert fault.fired
    assert caught.value.__notes__.count(resuming.KEPT) == 1


ERRORS = [KeyboardInterrupt(), system_error(errno.ENOSPC), system_error(errno.EDQUOT), system_error(errno.EIO)]


@pytest.mark.parametrize("error", ERRORS, ids=["ctrl-c", "full", "quota", "io"])
def test_merge__stopped_goes_on_where_it_was(job: CrashJob, error: BaseException) -> None:
    interrupt_late(job, error)
    staging = staging_directory(job.out)
    state = read_journal(staging / JOURNAL_NAME)
    assert state is not None
    assert state.uncounted_expert_bytes == 0
    held = sum(path.stat().st_size for path in (staging / CONTENT_NAME).iterdir())
    before = {(file, purpose): nbytes for file, purpose, nbytes in state.usage}
    report = job.run()
    assert went_on(report.notices)
    job.check_whole()
    assert report.base_bytes > sum(n for (_, purpose), n in before.items() if purpose is Purpose.BASE)
    full = mergepipe.merge(job.root / "recipe.yml", job.root / "again", shard_bytes=30_000, catalog=False)
    assert report.expert_bytes < 2 * full.expert_bytes
    assert 0 < held < full.output_bytes


def test_merge__reads_only_what_was_not_durable(job: CrashJob) -> None:
    interrupt_late(job, KeyboardInterrupt())
    state = read_journal(staging_directory(job.out) / JOURNAL_NAME)
    assert state is not None
    before = sum(nbytes for _, purpose, nbytes in state.usage if purpose is Purpose.EXPERT)
    report = job.run()
    full = mergepipe.merge(job.root / "recipe.yml", job.root / "again", shard_bytes=30_000, catalog=False)
    assert report.expert_bytes - before < full.expert_bytes / 2


def test_merge__by_request_begins_anew(job: CrashJob) -> None:
    interrupt_late(job, KeyboardInterrupt())
    report = mergepipe.merge(job.root / "recipe.yml", job.out, shard_bytes=30_000, home=job.home, resume=False)
    assert not went_on(report.notices)
    job.check_whole()
    assert [path.name for path in job.out.parent.iterdir()] == ["out"]


def change_input(job: CrashJob) -> None:
    os.utime(next((job.root / "family" / "expert-1").glob("*.safetensors")))


def change_recipe(job: CrashJob) -> None:
    path = job.root / "recipe.yml"
    path.write_text(path.read_text() + "# another\n")


def lose_file(job: CrashJob) -> None:
    sorted((staging_directory(job.out) / CONTENT_NAME).glob("*.safetensors"))[0].unlink()


def cut_file(job: CrashJob) -> None:
    path = sorted((staging_directory(job.out) / CONTENT_NAME).glob("*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 1)


def swap_content(job: CrashJob) -> None:
    """What an exchange that was killed half way leaves: the journal, and beside it the snapshot that was replaced."""
    content = staging_directory(job.out) / CONTENT_NAME
    content.rename(content.with_name("was"))
    shutil.copytree(job.root / "wanted", content)


CHANGES: list[Callable[[CrashJob], None]] = [change_input, change_recipe, lose_file, cut_file, swap_content]


@pytest.mark.parametrize("change", CHANGES)
def test_merge__does_not_go_on_with_something_else(job: CrashJob, change: Callable[[CrashJob], None]) -> None:
    interrupt_late(job, KeyboardInterrupt())
    change(job)
    with pytest.raises(NotFoundError) as caught:
        mergepipe.merge(job.root / "recipe.yml", job.out, shard_bytes=30_000, home=job.home, resume=True)
    assert caught.value.code == "resume.nothing"
    assert read_journal(staging_directory(job.out) / JOURNAL_NAME) is not None
    assert not went_on(job.run().notices)
    job.check_whole()


def test_merge__an_interrupted_run_is_garbage_until_it_is_gone_on_with(job: CrashJob) -> None:
    interrupt_late(job, KeyboardInterrupt())
    (found,) = keeping.gc([job.root / "results"], dry_run=True, home=job.home).garbage
    assert (found.kind, found.what) == ("staging", str(staging_directory(job.out)))
    assert "could be gone on with" in found.reason
    assert found.nbytes > 0
    assert staging_directory(job.out).exists()
    assert keeping.gc([job.root / "results"], home=job.home).freed_bytes == found.nbytes
    assert not staging_directory(job.out).exists()
    assert keeping.gc([job.root / "results"], home=job.home).garbage == ()


def test_merge__of_two_to_one_place_one_wins(job: CrashJob) -> None:
    inside: list[MergePipeError] = []

    def again(_: Progress) -> None:
        if not inside and staging_directory(job.out).exists():
            with pytest.raises(ConflictError) as caught:
                job.run()
            inside.append(caught.value)

    mergepipe.merge(job.root / "recipe.yml", job.out, shard_bytes=30_000, home=job.home, on_progress=again)
    assert [error.code for error in inside] == ["output.busy"]
    job.check_whole()


# --- under a budget ---


def counted(total: mmap.mmap, preadv: Callable[..., int]) -> Callable[..., int]:
    """`os.preadv` that adds what is asked of files of experts to a counter that other processes see."""

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if "/expert-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and offset >= 0:
            (before,) = struct.unpack("<Q", total[:8])
            total[:8] = struct.pack("<Q", before + sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    return read


def noted(job: CrashJob, total: mmap.mmap) -> None:
    """Merge, and leave behind whether that went on with what was there."""
    total[8] = went_on(job.run().notices)


@pytest.mark.parametrize("budget", ["40%", "100%", "320000"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_merge__killed_under_a_budget_never_reads_more_in_all(tmp_path: Path, budget: str, step: int) -> None:
    job = make_job(tmp_path, budget=budget)
    n_operations = len(count_operations(job.run))
    gone_on = 0
    for at in range(n_operations // 3, n_operations, step):
        shutil.rmtree(job.out.parent, ignore_errors=True)
        shutil.rmtree(job.home, ignore_errors=True)
        total = mmap.mmap(-1, 4096)
        with replaced(os, "preadv", partial(counted, total)):
            if not run_killed(job.run, at, Death.BEFORE) or job.out.exists():
                continue
            state = read_journal(staging_directory(job.out) / JOURNAL_NAME)
            before = struct.unpack("<Q", total[:8])[0]
            if state is not None and state.digests:
                assert before <= state.reserved_expert_bytes
            total[:8] = bytes(8)
            assert run_forked(partial(noted, job, total)) == 0
        read = struct.unpack("<Q", total[:8])[0]
        manifest = read_manifest_value(job.out)
        plan = manifest.plan or {}
        limit = int(str(plan["budget_bytes"]))
        realized = manifest.realized.expert + manifest.realized.analysis
        assert read <= realized <= limit
        if total[8]:
            gone_on += 1
            assert before + read <= realized
        job.check_whole()
    assert gone_on or budget != "320000"


def test_merge__that_the_budget_does_not_cover_any_more_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, budget="100%")
    interrupt_late(job, KeyboardInterrupt())
    state = read_journal(staging_directory(job.out) / JOURNAL_NAME)
    assert state is not None
    monkeypatch.setattr(resuming, "expert_bytes_of", lambda _: 10**9)
    with pytest.raises(LimitError) as caught:
        mergepipe.merge(job.root / "recipe.yml", job.out, shard_bytes=30_000, home=job.home, budget="100%", resume=True)
    assert caught.value.code == "resume.budget"
    assert "1000000000 of" in str(caught.value)
    report = job.run()
    assert any("began anew" in notice for notice in report.notices)
    job.check_whole()


# --- faults while going on ---

CALLS: list[tuple[str, int]] = [
    ("open", errno.EMFILE),
    ("pwrite", errno.ENOSPC),
    ("write", errno.EDQUOT),
    ("fsync", errno.EIO),
    ("ftruncate", errno.EIO),
    ("truncate", errno.EIO),
    ("posix_fallocate", errno.ENOSPC),
    ("pread", errno.EIO),
    ("unlink", errno.EACCES),
]


@pytest.mark.parametrize(("name", "number"), CALLS, ids=[name for name, _ in CALLS])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_merge__going_on_survives_a_failure_of_any_call(job: CrashJob, name: str, number: int, step: int) -> None:
    """However often it fails, it can be gone on with or made anew, and is never wrong."""
    interrupt_late(job, KeyboardInterrupt())
    staging = staging_directory(job.out)
    kept = job.root / "kept"
    shutil.copytree(staging, kept)
    for at in range(0, 200, step):
        descriptors = open_descriptors()
        fault = Fault(at, system_error(number))
        error: MergePipeError | None = None
        with replaced(os, name, fault.wrap):
            try:
                job.run()
            except MergePipeError as caught:
                error = caught
        assert isinstance(error, StorageError | None)
        if not fault.fired:
            break
        assert worker_threads(patience_seconds=5) == []
        assert open_descriptors() == descriptors
        if not job.out.exists():
            job.run()
        job.check_whole()
        shutil.rmtree(job.out)
        shutil.rmtree(staging, ignore_errors=True)
        interrupt_again(job)
    assert at > 0


def interrupt_again(job: CrashJob) -> None:
    """Leave an interrupted run as before."""
    with replaced(os, "ftruncate", Fault(2, KeyboardInterrupt()).wrap), pytest.raises(KeyboardInterrupt):
        job.run()
