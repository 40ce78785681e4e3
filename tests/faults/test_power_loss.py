"""Power loss: of what was not made durable any part may be gone, in any order; what is visible is whole even so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from commands import Command, is_resumed, merge_command, recording_often

from mergepipe.snapshots import work_log as work_log
from support.bucket_outputs import files_below
from support.power import Kind, Trace, Traced, leave, undurable
from support.public_names import CONTENT_NAME

DRAWN = 3  # random subsets beside the systematic ones, at every point


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with recording_often():
        # What is left is written to new directories, so that their inodes say nothing.
        identity = lambda directory: (1, 1) if (directory / CONTENT_NAME).is_dir() else None  # noqa: E731
        monkeypatch.setattr(work_log, "content_identity", identity)
        yield


def trace_of(job: Command) -> Sequence[Traced]:
    trace = Trace(job.out.parent)
    with trace.recording():
        job.run()
    assert {Kind.WRITE, Kind.SYNC, Kind.CREATE, Kind.RENAME} <= {each.kind for each in trace.operations}
    return trace.operations


def losses(lost: list[int], rng: random.Random) -> Iterator[frozenset[int]]:
    """Nothing, everything, all after some point, each one alone, all but each one, and some drawn at random."""
    everything = frozenset(lost)
    yield from {
        frozenset(),
        everything,
        *(frozenset(lost[i:]) for i in range(len(lost))),
        *(frozenset({each}) for each in lost),
        *(everything - {each} for each in lost),
        *(frozenset(each for each in lost if rng.random() < 0.5) for _ in range(DRAWN)),
    }


def check_all_losses(tmp_path: Path, *, step: int) -> tuple[int, int]:
    """Lose power after every `step`-th operation, in all ways; return how many there were and how often it went on."""
    job = merge_command(tmp_path).undisturbed()
    operations = trace_of(job)
    results, rng = job.out.parent, random.Random(1)
    outcomes: dict[str, bool] = {}
    n_losses = went_on = 0
    for stop in range(0, len(operations) + 1, step):
        done = operations[:stop]
        for lost in sorted(losses(undurable(done), rng), key=sorted):
            n_losses += 1
            job.prepare()
            leave(done, lost, results, results)
            if job.out.exists():
                job.check_whole()
                continue
            left = left_there(results)
            if left not in outcomes:
                outcomes[left] = is_resumed(job.run())
                assert job.made() == job.wanted
            went_on += outcomes[left]
    return n_losses, went_on


def left_there(folder: Path) -> str:
    """What is there, to run each state once."""
    files = sorted(path for path in folder.rglob("*") if path.name != "owner.json")
    return json.dumps([[str(path), hash(path.read_bytes()) if path.is_file() else 0] for path in files])


@pytest.mark.thorough
def test_merge__survives_a_loss_of_power(tmp_path: Path) -> None:
    n_losses, went_on = check_all_losses(tmp_path, step=25)
    assert n_losses > 30
    assert went_on > 3


@pytest.mark.slow
def test_merge__survives_any_loss_of_power_at_any_time(tmp_path: Path) -> None:
    n_losses, went_on = check_all_losses(tmp_path, step=1)
    print(f"{n_losses} losses, {went_on} went on")
    assert went_on > 100


def test_leave__without_a_loss_gives_what_is_there(tmp_path: Path) -> None:
    job = merge_command(tmp_path).undisturbed()
    operations = trace_of(job)
    leave(operations, (), job.out.parent, tmp_path / "model")
    assert files_below(tmp_path / "model") == files_below(job.out.parent)


def test_undurable__is_what_no_later_sync_covers() -> None:
    file, folder = "/r/a/f", "/r/a"
    operations = [
        Traced(Kind.CREATE, file),
        Traced(Kind.WRITE, file, "", 0, b"x"),
        Traced(Kind.SYNC, file),
        Traced(Kind.WRITE, file, "", 1, b"y"),
    ]
    assert undurable(operations) == [0, 3]
    assert undurable([*operations, Traced(Kind.SYNC, folder)]) == [3]
