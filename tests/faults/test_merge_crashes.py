"""kill -9 at every storage operation of a merge: nothing partial is ever visible, nothing old is lost, it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_cases import CrashJob, make_job, recording_often

import mergepipe
from mergepipe.cli.render.merges import merge_table
from mergepipe.errors import NotFoundError
from mergepipe.options import MergeOptions
from mergepipe.snapshots import work_log as work_log
from mergepipe.snapshots.staging import staging_directory
from mergepipe.snapshots.work_log import merge_state, read_work_log
from support.crashes import Death, count_operations, run_killed
from support.disk_families import weights_digest

FEW = 10  # the fast form looks at every tenth operation and at one kind of death, the slow one at all


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    with recording_often():
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def check_visible(job: CrashJob, old: str | None) -> bool:
    """After a crash: the old snapshot or none, or the whole new one; whether it is the new one."""
    if not job.out.exists():
        assert old is None
        return False
    if old is not None and weights_digest(job.out) == old:
        return False
    job.check_whole()
    return True


def check_recorded(job: CrashJob) -> None:
    """The catalog knows the snapshot, once, if need be after it was rebuilt."""
    if job.out not in [each.path for each in mergepipe.list_snapshots(home=job.home)]:
        mergepipe.rebuild_catalog([job.out.parent], home=job.home)
    assert [each.path for each in mergepipe.list_snapshots(home=job.home)].count(job.out) == 1


def crash_everywhere(job: CrashJob, old: Path | None, *, step: int, death: Death) -> tuple[int, int, int]:
    """Crash at every `step`-th operation; return how many crashes there were, how often it went on, and operations."""
    old_digest = None if old is None else weights_digest(old)

    def prepare() -> None:
        shutil.rmtree(job.out.parent, ignore_errors=True)
        shutil.rmtree(job.home, ignore_errors=True)
        if old is not None:
            shutil.copytree(old, job.out)

    prepare()
    operations = count_operations(job.run)
    crashes = resumed = 0
    for at in range(0, len(operations), step):
        prepare()
        if not run_killed(job.run, at, death):
            continue  # there are fewer operations when threads meet otherwise
        crashes += 1
        if not check_visible(job, old_digest):
            report = job.run()
            resumed += any("resumed" in notice for notice in report.notices)
        elif old is not None:
            job.run()
        job.check_whole()
        check_recorded(job)
        assert names(job.out.parent) in (["out"], [".out.mergepipe-staging", "out"])
    return crashes, resumed, len(operations)


def test_merge__killed_at_any_operation_goes_on(tmp_path: Path) -> None:
    crashes, resumed, operations = crash_everywhere(make_job(tmp_path), None, step=FEW, death=Death.TORN)
    assert crashes > 0.8 * operations / FEW
    assert resumed > 3


def test_merge__by_force_killed_at_any_operation_never_loses_the_old_snapshot(tmp_path: Path) -> None:
    job = make_job(tmp_path, force=True)
    other = tmp_path / "other.yml"
    other.write_text((tmp_path / "recipe.yml").read_text().replace("0.6", "0.1"))
    mergepipe.merge(other, tmp_path / "old", options=MergeOptions(catalog=False))
    crashes, resumed, operations = crash_everywhere(job, tmp_path / "old", step=FEW, death=Death.BEFORE)
    assert crashes > 0.8 * operations / FEW
    assert resumed > 3


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize("death", list(Death))
@pytest.mark.parametrize("force", [False, True])
def test_merge__killed_at_every_operation(tmp_path: Path, budget: str | None, death: Death, force: bool) -> None:
    job = make_job(tmp_path, budget=budget, force=force)
    old = tmp_path / "wanted" if force else None
    crashes, resumed, operations = crash_everywhere(job, old, step=1, death=death)
    print(f"{operations} operations, {crashes} crashes, {resumed} went on")
    assert crashes > 0.9 * operations
    assert force or resumed > operations // 3


def test_merge__resuming_where_there_is_nothing_says_so(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        mergepipe.merge(tmp_path / "recipe.yml", job.out, options=MergeOptions(resume=True, catalog=False))
    assert caught.value.code == "resume.nothing"
    assert not job.out.parent.exists()


def test_merge__killed_counts_what_it_read_and_says_why_it_starts_over(tmp_path: Path) -> None:
    work_log.UNIT_BYTES = 1 << 30  # as a user has it, not as the tests above do; `recording_often` sets it back
    job = make_job(tmp_path)
    full = mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "full", options=MergeOptions(catalog=False))
    operations = count_operations(job.run)
    last = len(operations) - 1 - operations[::-1].index("ftruncate")  # every expert is read by then, or nearly
    shutil.rmtree(job.out.parent)
    shutil.rmtree(job.home)
    killed_bytes = 0
    for _ in range(2):
        assert run_killed(job.run, last, Death.BEFORE)
        logged = read_work_log(staging_directory(job.out))
        assert logged is not None
        state = merge_state(logged)
        assert state is not None
        account = state.expert_bytes
        assert killed_bytes < account <= killed_bytes + full.expert_bytes
        killed_bytes = account
    report = job.run()
    assert report.earlier_expert_bytes == killed_bytes
    assert report.expert_bytes == killed_bytes + full.expert_bytes
    (snapshot,) = (each for each in mergepipe.list_snapshots(home=job.home) if each.path == job.out)
    assert snapshot.expert_bytes + snapshot.analysis_bytes == report.expert_bytes
    (notice,) = (notice for notice in report.notices if "started over" in notice)
    assert "since it was stopped before any of its tensors was durable" in notice
    assert "of it at most by interrupted runs" in merge_table(report)
