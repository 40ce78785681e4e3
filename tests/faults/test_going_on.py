"""What was interrupted goes on: whatever stopped it, the bytes are the same, and what was read counts."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import IntEnum
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import SHARD_BYTES, Command, is_resumed, merge_command, recording_often

import mergepipe
from mergepipe.errors import ConflictError, LimitError, MergePipeError, NotFoundError, StorageError
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport, Progress
from mergepipe.runs import progress
from mergepipe.snapshots import shards, staging
from mergepipe.snapshots.staging import staging_directory
from mergepipe.snapshots.work_log import MergeState, WorkLog, merge_state, read_work_log, usage_of
from mergepipe.storage.ledger import Purpose
from support.crashes import Death, count_operations, run_forked, run_killed
from support.disk_families import write_single
from support.faults import Fault, replaced, system_error
from support.local_models import manifest_of
from support.public_names import CONTENT_NAME, LOG_NAME, OWNER_NAME
from support.refusals import refuses
from support.slow_cases import slow_unless


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    with recording_often():
        yield


@pytest.fixture
def job(tmp_path: Path) -> Command:
    return merge_command(tmp_path).undisturbed()


def state_of(job: Command) -> MergeState:
    """What the log of an unfinished merge tells."""
    logged = read_work_log(staging_directory(job.out))
    state = MergeState() if logged is None else merge_state(logged)
    assert state is not None
    return state


def interrupt_late(job: Command, error: BaseException) -> None:
    """Stop a run once two of its three files are durable."""
    assert sum(name.endswith(".safetensors") for name in job.wanted["out"]) == 3
    fault = Fault(2, error)
    with (
        replaced(os, "ftruncate", fault.wrap),
        pytest.raises(type(error) if not isinstance(error, OSError) else StorageError) as caught,
    ):
        job.run()
    assert fault.fired
    assert [note.partition("%")[2] for note in caught.value.__notes__].count(staging.kept_note(job.out, 0)[2:]) == 1


ERRORS = [KeyboardInterrupt(), system_error(errno.ENOSPC), system_error(errno.EDQUOT), system_error(errno.EIO)]


@pytest.mark.thorough
@pytest.mark.parametrize("error", ERRORS, ids=["ctrl-c", "full", "quota", "io"])
def test_merge__stopped_goes_on_where_it_was(
    job: Command, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "count_not_finite", lambda *_: 1)
    interrupt_late(job, error)
    state = state_of(job)
    assert state.expert_bytes == usage_of(state.usage).expert_bytes > 0
    held = sum(path.stat().st_size for path in (staging_directory(job.out) / CONTENT_NAME).iterdir())
    before = {(file, purpose): nbytes for file, purpose, nbytes in state.usage}
    report = job.merge()
    assert is_resumed(report)
    job.check_whole()
    assert report.base_bytes > sum(n for (_, purpose), n in before.items() if purpose is Purpose.BASE)
    full = mergepipe.merge(job.root / "recipe.yml", job.root / "again", shard_bytes=30_000, catalog=False)
    assert report.expert_bytes < 2 * full.expert_bytes
    assert set(full.notices) < set(report.notices)
    assert [notice.partition(" in ")[0] for notice in full.notices] == ["infinities or NaN"]
    assert 0 < held < full.output_bytes


def change_input(job: Command) -> None:
    os.utime(next((job.root / "family" / "expert-1").glob("*.safetensors")))


def change_recipe(job: Command) -> None:
    path = job.root / "recipe.yml"
    path.write_text(path.read_text() + "# another\n")


def lose_file(job: Command) -> None:
    sorted((staging_directory(job.out) / CONTENT_NAME).glob("*.safetensors"))[0].unlink()


def cut_file(job: Command) -> None:
    path = sorted((staging_directory(job.out) / CONTENT_NAME).glob("*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 1)


def swap_content(job: Command) -> None:
    """What an exchange that was killed half way leaves: the log, and beside it the snapshot that was replaced."""
    content = staging_directory(job.out) / CONTENT_NAME
    content.rename(content.with_name("was"))
    mergepipe.merge(job.root / "recipe.yml", content, shard_bytes=SHARD_BYTES, catalog=False)


CHANGES: list[Callable[[Command], None]] = [change_input, change_recipe, lose_file, cut_file, swap_content]


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
def test_merge__does_not_go_on_with_something_else(job: Command, change: Callable[[Command], None]) -> None:
    interrupt_late(job, KeyboardInterrupt())
    change(job)
    with refuses(NotFoundError, "resume.nothing"):
        job.run(resume=True)
    assert state_of(job).digests
    assert not is_resumed(job.run())
    job.check_whole()


def test_merge__an_interrupted_run_is_garbage_until_it_is_gone_on_with(job: Command) -> None:
    interrupt_late(job, KeyboardInterrupt())
    (found,) = mergepipe.gc([job.root / "results"], dry_run=True, home=job.home).garbage
    assert (found.kind, found.what) == ("staging", str(staging_directory(job.out)))
    assert "could be resumed" in found.reason
    assert found.nbytes > 0
    assert staging_directory(job.out).exists()
    assert mergepipe.gc([job.root / "results"], home=job.home).freed_bytes == found.nbytes
    assert not staging_directory(job.out).exists()
    assert mergepipe.gc([job.root / "results"], home=job.home).garbage == ()


def test_merge__of_two_to_one_place_one_wins(job: Command) -> None:
    inside: list[MergePipeError] = []

    def again(_: Progress) -> None:
        if not inside and staging_directory(job.out).exists():
            with refuses(ConflictError, "output.busy") as caught:
                job.run()
            inside.append(caught.value)

    job.run(on_progress=again)
    assert inside
    job.check_whole()


# --- under a budget ---


def is_of_expert(descriptor: int, offset: int) -> bool:
    """Whether a read is of tensors of an expert, behind the header of the file."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if "/expert-" not in str(path):
        return False
    with path.open("rb") as stream:
        return offset >= 8 + int.from_bytes(stream.read(8), "little")


def counted(total: mmap.mmap, preadv: Callable[..., int]) -> Callable[..., int]:
    """`os.preadv` that adds what is asked of files of experts to a counter that other processes see."""

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if is_of_expert(descriptor, offset):
            (before,) = struct.unpack("<Q", total[:8])
            total[:8] = struct.pack("<Q", before + sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    return read


def failing_on_experts(fault: Fault, preadv: Callable[..., int]) -> Callable[..., int]:
    """`os.preadv` with a fault that hits files of experts only, after the read was requested."""
    faulty = fault.wrap(preadv)

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return int((faulty if is_of_expert(descriptor, offset) else preadv)(descriptor, buffers, offset))

    return read


class Ending(IntEnum):
    """How a run ended, for a counter that other processes see."""

    FAILED = 0
    BEGAN_ANEW = 1
    WENT_ON = 2


# The fast form kills at few operations, the slow one at more, and under another budget.
TWO_DEATHS = slow_unless(
    lambda case: case[1] > 31, [("40%", 37), ("700000B", 31), ("40%", 7), ("100%", 7), ("700000B", 7)]
)


def noted(job: Command, total: mmap.mmap) -> None:
    """Merge, and leave behind how that ended."""
    total[8] = Ending.FAILED
    total[8] = Ending.WENT_ON if is_resumed(job.run()) else Ending.BEGAN_ANEW


def requested(total: mmap.mmap) -> int:
    """Bytes asked of experts, in all processes."""
    return int(struct.unpack("<Q", total[:8])[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("budget", "step"), TWO_DEATHS)
def test_merge__killed_twice_under_a_budget_is_finished_and_tells_what_was_read_in_all(
    tmp_path: Path, budget: str, step: int
) -> None:
    """What the system is asked for in three runs is told; each run alone stays within the budget."""
    job = merge_command(tmp_path, budget=budget).undisturbed()
    limit = mergepipe.plan(job.root / "recipe.yml", budget, home=job.home).budget_bytes
    n_operations = len(count_operations(job.run))
    endings = set()
    for at in range(n_operations // 6, n_operations, step):
        job.prepare()
        total = mmap.mmap(-1, 4096)
        reads = [0]
        with replaced(os, "preadv", partial(counted, total)):
            for death_at in (at, at // 2):
                if not job.out.exists():
                    run_killed(partial(noted, job, total), death_at, Death.BEFORE)
                    reads.append(requested(total))
            if job.out.exists():
                continue
            state = state_of(job)
            assert requested(total) <= state.expert_bytes or not state.expert_bytes  # killed before it logged anything
            assert run_forked(partial(noted, job, total)) == 0
            reads.append(requested(total))
        assert all(after - before <= limit for before, after in pairwise(reads))
        endings.add(Ending(total[8]))
        job.check_whole()
        manifest = manifest_of(job.out)
        assert manifest.run.get("earlier_runs_expert_bytes", 0) == state.expert_bytes
        assert manifest.realized.expert + manifest.realized.analysis <= state.expert_bytes + limit
        if state.expert_bytes:
            assert requested(total) <= manifest.realized.expert + manifest.realized.analysis
            assert manifest.run["earlier_runs"] in (1, 2)
    assert endings == {Ending.BEGAN_ANEW, Ending.WENT_ON}


def test_merge__that_fails_twice_under_a_budget_tells_every_read(tmp_path: Path) -> None:
    """Read errors, which leave nothing to continue: the log alone stays, and is exact."""
    job = merge_command(tmp_path, budget="100%").undisturbed()
    staging = staging_directory(job.out)
    total = mmap.mmap(-1, 4096)
    sums = []
    plan = mergepipe.plan(job.root / "recipe.yml", "100%", home=job.home)
    (tmp_path / "plan.json").write_bytes(plan.to_json())

    def run() -> MergeReport:
        return mergepipe.run(tmp_path / "plan.json", job.out, threads=2, home=job.home)

    for at in (5, 3):
        fault = Fault(at, system_error(errno.EIO), afterwards=True)
        with (
            replaced(os, "preadv", partial(counted, total)),
            replaced(os, "preadv", partial(failing_on_experts, fault)),
            pytest.raises(StorageError) as caught,
        ):
            run()
        assert progress.READS_KEPT in caught.value.__notes__
        assert sorted(path.name for path in staging.iterdir()) == [LOG_NAME, OWNER_NAME]
        sums.append(requested(total))
        assert state_of(job).expert_bytes == sums[-1]
    assert 0 < sums[0] < sums[1]
    with replaced(os, "preadv", partial(counted, total)):
        report = run()
    assert report.earlier_expert_bytes == sums[1] < requested(total)
    assert report.expert_bytes + report.analysis_bytes == requested(total) > plan.budget_bytes
    assert any("started over" in notice for notice in report.notices)
    share = requested(total) / plan.budget_bytes
    assert f"{share:.2f} x the budget was read over 3 runs: what a crash lost was read again" in report.notices
    facts = manifest_of(job.out).run
    assert (facts["earlier_runs"], facts["earlier_runs_expert_bytes"]) == (2, sums[1])
    assert not staging.exists()


def test_merge__that_is_strict_does_not_go_beyond_the_budget(tmp_path: Path) -> None:
    job = merge_command(tmp_path, budget="100%").undisturbed()
    interrupt_late(job, KeyboardInterrupt())
    staging = staging_directory(job.out)
    logged = read_work_log(staging)
    assert logged is not None
    with closing(WorkLog(staging, logged.key, logged)) as log:
        log.append({"kind": "read", "expert_bytes": 10**9}, is_durable=True)
    with refuses(LimitError, "resume.budget", "earlier runs may have read 1.00 GB of"):
        job.run(strict=True)
    report = job.merge()
    assert is_resumed(report)
    assert report.earlier_expert_bytes == 10**9
    assert any("x the budget was read over 3 runs" in notice for notice in report.notices)
    job.check_whole()


def test_merge__begun_anew_forgets_what_was_read(tmp_path: Path) -> None:
    job = merge_command(tmp_path, budget="100%").undisturbed()
    interrupt_late(job, KeyboardInterrupt())
    report = job.merge(resume=False)
    assert (is_resumed(report), report.earlier_expert_bytes) == (False, 0)
    job.check_whole()
    assert [path.name for path in job.out.parent.iterdir()] == ["out"]


SMALL, LARGE, N_SMALL = 65_536, 1 << 19, 6
UNPREPARED = """\
merge_method: ties
base_model: base
models:
- {model: expert-0, parameters: {density: 0.2}}
- {model: expert-1, parameters: {density: 0.2}}
parameters: {weight: 1.0}
"""


def unprepared_command(root: Path) -> Command:
    """All but one block of experts of which nothing is known: what the budget leaves over, a crash may waste."""
    rng = np.random.default_rng(5)
    base = {f"layers.{t}.w": rng.standard_normal(SMALL).astype(np.float32) for t in range(N_SMALL)}
    base["zz.large"] = rng.standard_normal(LARGE).astype(np.float32)
    write_single(root / "base", base)
    for e in range(2):
        moved = {
            name: (values + (1e-6 if name == "zz.large" else 0.01) * rng.standard_normal(len(values))).astype("f4")
            for name, values in base.items()
        }
        write_single(root / f"expert-{e}", moved)
    (root / "recipe.yml").write_text(UNPREPARED)
    budget, home = f"{2 * N_SMALL * SMALL * 4 + 900_000}B", root / "home"
    options = MergeOptions(threads=2, shard_bytes=300_000, home=home, budget=budget, block_elements=LARGE)
    return Command(root, partial(mergepipe.merge, root / "recipe.yml", root / "results/out", options=options), {})


@pytest.mark.thorough
def test_merge__unprepared_and_killed_is_resumed_with_the_plan_that_it_was_begun_with(tmp_path: Path) -> None:
    job = unprepared_command(tmp_path)
    n_operations = len(count_operations(job.run))
    wanted, plan_digest = job.made(), plan_digest_of(job.out)
    n_resumed = 0
    for at in range(n_operations // 2, n_operations, n_operations // 6):
        job.prepare()
        run_killed(job.run, at, Death.BEFORE)
        if job.out.exists():
            continue
        logged = read_work_log(staging_directory(job.out))
        state = None if logged is None else merge_state(logged)
        is_durable = state is not None and bool(state.digests)
        assert is_resumed(job.run()) == is_durable
        n_resumed += is_durable
        if is_durable:
            assert (job.made(), plan_digest_of(job.out)) == (wanted, plan_digest)
    assert n_resumed > 0


def plan_digest_of(out: Path) -> str | None:
    return manifest_of(out).plan_digest
