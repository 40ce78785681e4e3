"""Commands that are killed: nothing half made is visible, and the same command finishes the output, to the byte.

One table for everything that goes on by the log of its work: the command, where its output lies, how the process dies.
At each point of failure the laws are the same, see `check_finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from commands import (
    COMMANDS,
    SHARD_BYTES,
    Command,
    Report,
    check_finished,
    made,
    make_plan,
    merge_command,
    recording_often,
)

import mergepipe
from mergepipe.cli.printing import report_text
from mergepipe.errors import NotFoundError
from mergepipe.options import OutputOptions
from mergepipe.runs import parts as worker_module
from mergepipe.snapshots import work_log
from mergepipe.snapshots.staging import staging_directory
from mergepipe.snapshots.work_log import merge_state, read_work_log
from support.bucket_outputs import Killed, files_below, new_prefix, objects_below, watch_buckets
from support.crashes import Death, count_operations, run_killed
from support.public_names import MANIFEST_NAME
from support.refusals import refuses
from support.s3_server import S3Server
from support.slow_cases import slow_unless

pytestmark = pytest.mark.usefixtures("exact_reads")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("mergepipe.deltastore.builder.NOTE_BLOCKS", 1)
    with recording_often():
        yield


def check_recorded(command: Command) -> None:
    """The catalog knows the snapshot, once, if need be after it was rebuilt, and it is sound."""
    home, (name, *_) = command.home, sorted(command.wanted)
    out = command.results / name
    if out not in [each.path for each in mergepipe.list_snapshots(home=home)]:
        mergepipe.rebuild_catalog([command.results], home=home)
    assert [each.path for each in mergepipe.list_snapshots(home=home)].count(out) == 1
    report = mergepipe.verify(out)
    assert (report.damages, report.notices) == ((), ())


# The fast form looks at so many operations and at one kind of death, the slow one at all.
FEW = {"merge": (5, Death.TORN), "merge --force": (5, Death.BEFORE), "pack": (5, Death.TORN),
       "compose": (4, Death.TORN), "fold": (4, Death.BEFORE),
       "merge of one file": (4, Death.BEFORE), "merge --force of one file": (4, Death.BEFORE),
       "merge of GPTQ": (3, Death.TORN), "merge of adapters": (3, Death.BEFORE), "merge of documents": (3, Death.TORN),
       "part": (3, Death.BEFORE), "part --budget": (3, Death.BEFORE)}  # fmt: skip
ROWS = [(name, death, points) for name, (points, death) in FEW.items()]
ROWS += [(name, death, 0) for name, death in product(COMMANDS, Death) if name != "merge of ties"]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "death", "points"), slow_unless(lambda row: row[2] > 0, ROWS))
def test_command__killed_at_any_operation_is_finished_by_the_same_command(
    tmp_path: Path, name: str, death: Death, points: int
) -> None:
    command = COMMANDS[name](tmp_path).undisturbed()
    command.prepare()
    operations = count_operations(command.run)
    step = max(1, len(operations) // points) if points else 1
    crashes = unfinished = resumed = 0
    for at in range(step // 2, len(operations), step):
        command.prepare()
        if not run_killed(command.run, at, death):
            continue  # there are fewer operations when threads meet otherwise
        crashes += 1
        unfinished += command.made() != command.wanted
        resumed += check_finished(command)
        if name.startswith("merge"):
            check_recorded(command)
    assert crashes > 0.7 * len(operations) / step
    assert resumed >= unfinished // 4 or name in ("compose", "fold")


# --- in a bucket: the process dies at one of its requests ---


@dataclass(frozen=True, slots=True)
class Upload:
    """A merge or a part whose output lies in a bucket, and the same output of one machine."""

    run: Callable[[str], Report]
    wanted: dict[str, bytes]
    home: Path


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Upload]:
    """A merge and a part of one plan, by these names."""
    root = tmp_path_factory.mktemp("uploads")

    @cache
    def of_plan() -> dict[str, Upload]:
        plan = make_plan(root, None)
        options = OutputOptions(home=root / "home", threads=2, shard_bytes=SHARD_BYTES)
        mergepipe.run(plan, root / "wanted", options=replace(options, catalog=False))
        wanted = made(files_below(root / "wanted"))
        runs: dict[str, Callable[[str], Report]] = {
            "merge": lambda out: mergepipe.run(plan, out, options=options),
            "part": lambda out: mergepipe.run_part(plan, out, (1, 1), options=options),
        }
        return {name: Upload(run, wanted, root / "home") for name, run in runs.items()}

    return lambda name: of_plan()[name]


AT = {"merge": ("00002-of", "config.json", MANIFEST_NAME), "part": ("00002-of", "done-00001", MANIFEST_NAME)}
UPLOADS = [(name, at, after) for name, points in AT.items() for at in (*points, "") for after in (False, True)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "at", "after"), slow_unless(lambda row: row[1] != "" and row[2] == (row[1] != "done-00001"), UPLOADS)
)
def test_upload__killed_at_any_request_is_finished_by_the_same_command(
    server: S3Server, uploads: Callable[[str], Upload], monkeypatch: pytest.MonkeyPatch, name: str, at: str, after: bool
) -> None:
    """Killed before or after an object of that name was made; without a name at every request."""
    monkeypatch.setattr(worker_module, "FACTS_SECONDS", 0.5)  # the killed worker seems to live on: it is this process
    upload, out = uploads(name), new_prefix(server, monkeypatch)
    requests = watch_buckets(monkeypatch)
    upload.run(f"{out}-whole")
    changes = list(requests.changes)
    if at:
        points = [next(n for n, (kind, key) in enumerate(changes) if kind == "create" and at in key)]
    else:
        points = list(range(len(changes) - 1))  # the last one removes the marker, whose failure is no failure
    for number in points:
        place = f"{out}-{number}"
        requests.changes.clear()
        requests.fails_at, requests.after = number, after
        with pytest.raises(Killed):
            upload.run(place)
        requests.fails_at, requests.is_dead = None, False
        if MANIFEST_NAME not in objects_below(place) or name == "part":
            upload.run(place)
        objects = {name: raw for name, raw in objects_below(place).items() if not name.startswith(".mergepipe-")}
        assert MANIFEST_NAME in objects
        assert made(objects) == upload.wanted
        assert mergepipe.verify(place, home=upload.home, threads=2).is_sound


# --- what a killed merge tells ---


def test_merge__resuming_where_there_is_nothing_says_so(tmp_path: Path) -> None:
    command = merge_command(tmp_path)
    with refuses(NotFoundError, "resume.nothing"):
        command.run(resume=True)
    assert not command.results.exists()


def test_merge__killed_counts_what_it_read_and_says_why_it_starts_over(tmp_path: Path) -> None:
    work_log.UNIT_BYTES = 1 << 30  # as a user has it, not as the tests above do; `recording_often` sets it back
    job = merge_command(tmp_path).undisturbed()
    full = mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "full", catalog=False)
    operations = count_operations(job.run)
    last = len(operations) - 1 - operations[::-1].index("ftruncate")  # every expert is read by then, or nearly
    job.prepare()
    killed_bytes = 0
    for _ in range(2):
        assert run_killed(job.run, last, Death.BEFORE)
        logged = read_work_log(staging_directory(job.out))
        assert logged is not None
        state = merge_state(logged)
        assert state is not None
        assert killed_bytes < state.expert_bytes <= killed_bytes + full.expert_bytes
        killed_bytes = state.expert_bytes
    report = job.merge()
    assert report.earlier_expert_bytes == killed_bytes
    assert report.expert_bytes == killed_bytes + full.expert_bytes
    (snapshot,) = (each for each in mergepipe.list_snapshots(home=job.home) if each.path == job.out)
    assert snapshot.expert_bytes + snapshot.analysis_bytes == report.expert_bytes
    (notice,) = (notice for notice in report.notices if "started over" in notice)
    assert "since it was stopped before any of its tensors was durable" in notice
    assert "of it, by interrupted runs" in report_text(report)
