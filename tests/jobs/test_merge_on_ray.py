"""A merge on a cluster is that of one machine, byte for byte, whatever ends it in between. Ray is played by a fake:
`tests/cluster` does the same on Ray itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import mergepipe
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import (
    LimitError,
    MergePipeError,
    NotFoundError,
    OutputError,
    Problem,
    RecipeError,
    UnsupportedError,
)
from mergepipe.jobs import merge_on_ray
from mergepipe.jobs.merge_on_ray import PartTask, RayCluster, make_part_of_plan, task_shape
from mergepipe.options import OutputOptions
from mergepipe.reports import Progress
from mergepipe.snapshots.manifest import Manifest, parse_manifest
from support.bucket_outputs import new_prefix, objects_below
from support.disk_families import DiskFamily, make_models, weights_digest, write_family
from support.families import FamilyShape
from support.families import write_family as write_large_family
from support.public_names import MANIFEST_NAME
from support.ray_merges import merge_options, write_recipe
from support.refusals import refuses
from support.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("exact_reads")

SMALL_BYTES = 4096
GIB = 1 << 30
SAMPLED = FamilyShape(
    hidden=512, layers=1, heads=8, kv_heads=8, head_dim=64, intermediate=1024, vocab=2000, tied=True
)  # fmt: skip
"""Of tensors that are large enough to be read in part."""


class FakeCluster:
    """Plays `RayCluster` in this process: makes every task twice, as if its node were lost, counts what is passed."""

    def __init__(self) -> None:
        self.passed: list[int] = []
        self.before: Callable[[PartTask], None] = lambda _: None

    def __call__(self, address: str | None) -> FakeCluster:
        return self

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def nodes(self) -> tuple[EngineOptions, ...]:
        return (EngineOptions(1, GIB), EngineOptions(0, 0), EngineOptions(2, GIB))

    def run(
        self,
        function: str,
        payloads: Sequence[bytes],
        shape: EngineOptions,
        on_outcome: Callable[[bytes | MergePipeError | None], None],
    ) -> None:
        assert shape.threads == 1
        assert function == f"{make_part_of_plan.__module__}:{make_part_of_plan.__name__}"
        for payload in payloads:
            try:
                self.before(pickle.loads(payload))
                make_part_of_plan(payload)
                result = make_part_of_plan(payload)
            except MergePipeError as error:
                on_outcome(pickle.loads(pickle.dumps(error)))
            else:
                self.passed += [len(payload), len(result)]
                on_outcome(result)
            on_outcome(None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(merge_on_ray, "RayCluster", fake)
    return fake


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> DiskFamily:
    return write_family(tmp_path_factory.mktemp("family"), make_models(2))


@pytest.fixture(scope="module")
def whole(family: DiskFamily) -> str:
    """The digest of what one machine makes."""
    place = family.places[0].parent
    out = place / "whole"
    mergepipe.merge(write_recipe(place / "w.yml", family, "dare_ties"), out, options=merge_options("threads"))
    return weights_digest(out)


@pytest.fixture
def recipe(family: DiskFamily, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "r.yml", family, "dare_ties")


def hidden(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(".")]


def test_merge__on_ray_makes_what_one_machine_makes(
    cluster: FakeCluster, recipe: Path, family: DiskFamily, whole: str, tmp_path: Path
) -> None:
    told: list[Progress] = []
    options = replace(merge_options("ray"), paths="absolute")
    report = mergepipe.merge(recipe, tmp_path / "out", options=options, on_progress=told.append)
    assert weights_digest(tmp_path / "out") == whole
    assert str(family.places[1]) in parse_manifest((tmp_path / "out" / MANIFEST_NAME).read_bytes()).recipe
    assert hidden(tmp_path) == []
    on_ray = [progress for progress in told if progress.total_bytes == told[0].total_bytes]
    assert report.base_bytes + report.expert_bytes <= on_ray[-1].done_bytes <= on_ray[-1].total_bytes
    assert len(cluster.passed) == 2 * len(list((tmp_path / "out").glob("*.safetensors"))) == 10
    assert max(cluster.passed) < SMALL_BYTES


@pytest.mark.usefixtures("cluster")
def test_merge__on_ray_is_resumed_within_its_budget(recipe: Path, tmp_path: Path) -> None:
    told: list[Progress] = []

    def stop_once(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 6:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as caught:
        mergepipe.merge(recipe, out, budget="60%", options=merge_options("ray"), on_progress=stop_once)
    (kept,) = hidden(tmp_path)
    assert caught.value.__notes__ == [
        f"3 of 5 files are made: the same command resumes there; to give up, remove {kept}"
    ]
    assert not out.exists()
    report = mergepipe.merge(recipe, out, budget="60%", options=merge_options("ray"), on_progress=told.append)
    assert told[6].earlier_bytes > 0
    assert hidden(tmp_path) == []
    alone = mergepipe.merge(recipe, tmp_path / "alone", budget="60%", options=merge_options("threads"))
    assert weights_digest(out) == weights_digest(tmp_path / "alone")
    assert report.expert_bytes + report.analysis_bytes == alone.expert_bytes + alone.analysis_bytes


@pytest.mark.thorough
def test_merge__on_ray_into_a_bucket_is_resumed_there(
    server: S3Server, cluster: FakeCluster, recipe: Path, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []
    homes: set[object] = set()
    cluster.before = lambda task: homes.add(task.options.home)

    def stop_once(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 6:
            raise KeyboardInterrupt

    out, options = new_prefix(server, monkeypatch), replace(merge_options("ray"), home=tmp_path / "home")
    with pytest.raises(KeyboardInterrupt) as caught:
        mergepipe.merge(recipe, out, options=options, on_progress=stop_once)
    assert caught.value.__notes__ == [
        f"3 of 5 files are made: the same command resumes there; to give up, remove what lies at {out}"
    ]
    assert MANIFEST_NAME not in objects_below(out)
    report = mergepipe.merge(recipe, out, options=options, on_progress=told.append)
    assert str(report.out) == out
    assert told[6].earlier_bytes > 0
    for name, content in objects_below(out).items():
        place = tmp_path / "copy" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    assert weights_digest(tmp_path / "copy") == whole
    assert homes == {tmp_path / "home"}
    assert not list((tmp_path / "home").rglob("*"))


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("operator", ["ties", "dare_ties"])
def test_merge__on_ray_under_a_budget_reads_what_threads_read(tmp_path: Path, operator: str) -> None:
    family = write_large_family(tmp_path, SAMPLED, 2)
    recipe = write_recipe(tmp_path / "r.yml", DiskFamily((), (family.base, *family.experts)), operator)
    options = replace(merge_options("ray"), block_elements=16384, shard_bytes=2 << 20)

    def read_by(executor: str) -> tuple[int, int, int]:
        out = tmp_path / executor
        mergepipe.merge(recipe, out, budget="60%", options=replace(options, executor=executor))
        usage = manifest_of(out).realized
        return usage.base, usage.expert, usage.analysis

    assert read_by("ray") == read_by("threads")
    assert weights_digest(tmp_path / "ray") == weights_digest(tmp_path / "threads")


@pytest.mark.usefixtures("cluster")
def test_merge__on_ray_reads_indices_of_packed_experts_once(family: DiskFamily, tmp_path: Path) -> None:
    mergepipe.pack(family.places[0], family.places[1:], tmp_path / "packed")
    recipe = write_recipe(tmp_path / "r.yml", family, "linear", tuple(sorted((tmp_path / "packed").iterdir())))
    for executor in ("threads", "ray"):
        mergepipe.merge(recipe, tmp_path / executor, budget="50%", options=merge_options(executor))
    on_ray, alone = (manifest_of(tmp_path / executor).realized for executor in ("ray", "threads"))
    assert (on_ray.base, on_ray.expert, on_ray.analysis) == (alone.base, alone.expert, alone.analysis)
    assert weights_digest(tmp_path / "ray") == weights_digest(tmp_path / "threads")


def manifest_of(out: Path) -> Manifest:
    return parse_manifest((out / MANIFEST_NAME).read_bytes())


def test_merge__on_ray_reports_errors_of_tasks_as_its_own(cluster: FakeCluster, recipe: Path, tmp_path: Path) -> None:
    def lose_the_parts(_: PartTask) -> None:
        (place,) = tmp_path.glob(".out.*")
        place.rename(tmp_path / "elsewhere")

    cluster.before = lose_the_parts
    with refuses(NotFoundError, "ray.not-shared"):
        mergepipe.merge(recipe, tmp_path / "out", options=merge_options("ray"))
    assert not (tmp_path / "out").exists()


def test_merge__on_ray_that_begins_nothing_leaves_nothing(cluster: FakeCluster, recipe: Path, tmp_path: Path) -> None:
    def fail(task: PartTask) -> None:
        raise LimitError.of("test.failure", task.out, "fails")

    cluster.before = fail
    with pytest.raises(LimitError, match="fails"):
        mergepipe.merge(recipe, tmp_path / "out", options=merge_options("ray"))
    assert hidden(tmp_path) == []


@pytest.mark.usefixtures("cluster")
def test_run__on_ray_refuses_what_it_cannot_do(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = mergepipe.plan(recipe, everything=True, allow_dropped=("*",), home=tmp_path / "home")
    options = OutputOptions(catalog=False)
    with pytest.raises(NotFoundError, match="no part of it is made"):
        mergepipe.run(plan, out, options=replace(options, executor="ray", resume=True))
    mergepipe.run(plan, out, options=replace(options, executor="ray", shard_bytes=30_000))
    for force in (False, True):
        with refuses(OutputError, "output.exists"):
            mergepipe.run(plan, out, force=force, options=replace(options, executor="ray"))
    with refuses(RecipeError, "option.conflict"):
        mergepipe.run(plan, out, options=replace(options, address="127.0.0.1:1"))


def test_merge__without_ray_says_what_to_install(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(UnsupportedError, "extra.missing", r'pip install "\.\[ray\]"'):
        mergepipe.merge(recipe, tmp_path / "out", options=merge_options("ray"))
    with pytest.raises(UnsupportedError):
        RayCluster(None)


# --- what is chosen for a cluster ---


def test_task_shape__uses_every_node_and_half_of_its_memory() -> None:
    small, large = EngineOptions(4, 16 * GIB), EngineOptions(64, 512 * GIB)
    assert task_shape([small, large], None, None) == EngineOptions(4, 4 * GIB)
    assert task_shape([large], None, None) == EngineOptions(8, 4 * GIB)
    assert task_shape([EngineOptions(0, 0), EngineOptions(8, 2 * GIB)], 2, None) == EngineOptions(2, GIB // 4)


@pytest.mark.parametrize(
    ("nodes", "threads", "memory_bytes"),
    [([], None, None), ([EngineOptions(0, GIB)], None, None), ([EngineOptions(4, GIB)], 5, None),
     ([EngineOptions(4, GIB), EngineOptions(1, 8 * GIB)], 2, 2 * GIB)],
)  # fmt: skip
def test_task_shape__no_node_that_fits_is_refused(
    nodes: list[EngineOptions], threads: int | None, memory_bytes: int | None
) -> None:
    with refuses(LimitError, "ray.resources"):
        task_shape(nodes, threads, memory_bytes)


def test_errors__pickle_with_their_problems_and_notes() -> None:
    error = LimitError(Problem("a.b", "x", "is --force", "c"), Problem("d.e", "y", "f"))
    error.add_note("kept")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.problems, str(again), again.__notes__) == (
        LimitError, error.problems, str(error), ["kept"],
    )  # fmt: skip
