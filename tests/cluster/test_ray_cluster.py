"""Merges on a Ray cluster of two nodes on this machine. Needs the environment of `make test-ray`."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import ConflictError, LimitError, MergePipeError, StorageError
from mergepipe.jobs import merge_on_ray
from mergepipe.jobs.merge_on_ray import RayCluster
from mergepipe.reports import Progress
from support.bucket_outputs import files_below, objects_below
from support.disk_families import DiskFamily, make_models, weights_digest, write_family
from support.ray_merges import NEEDS_RAY, NODE, SHARD_BYTES, merge_options, two_nodes, write_recipe
from support.refusals import refuses
from support.remote_stores import set_environment
from support.s3_server import s3_server

pytestmark = NEEDS_RAY
SHAPE = EngineOptions(1, 64 << 20)
TASKS = "cluster.slow_parts"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that slow tasks look at."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEPIPE_TEST_PLACE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket that this process and all nodes find."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        server.make_bucket("bucket")
        set_environment(patch, server.url)
        yield "s3://bucket"


@pytest.fixture(scope="module")
def nodes(place: Path, bucket: str) -> Iterator[Any]:  # noqa: ARG001 - they set the environment of nodes
    """A cluster of two nodes with a processor each, to which this process is connected."""
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def address(nodes: Any) -> str:
    found: str = nodes.address
    return found


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder in memory: what is read of a file on a disk depends on what the system has dropped from its cache."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def family(root: Path) -> DiskFamily:
    return write_family(root / "family", make_models(2))


@pytest.fixture(scope="module")
def packed(root: Path, family: DiskFamily) -> tuple[Path, ...]:
    mergepipe.pack(family.places[0], family.places[1:], root / "packed")
    return tuple(sorted((root / "packed").iterdir()))


Outcomes = list[bytes | MergePipeError]


def run_tasks(address: str, name: str, payloads: list[bytes], on_tick: Callable[[], None] = lambda: None) -> Outcomes:
    outcomes: Outcomes = []

    def take(outcome: bytes | MergePipeError | None) -> None:
        if outcome is not None:
            outcomes.append(outcome)
        on_tick()

    with RayCluster(address) as cluster:
        cluster.run(f"{TASKS}:{name}", payloads, SHAPE, take)
    return outcomes


@pytest.mark.parametrize(
    ("operator", "budget", "is_packed"),
    [("linear", None, False), ("ties", None, False), ("dare_ties", None, False),
     ("dare_ties", "60%", False), ("linear", "50%", True)],
)  # fmt: skip
def test_merge__on_two_nodes_makes_what_one_machine_makes(
    address: str, family: DiskFamily, packed: tuple[Path, ...], tmp_path: Path, operator: str, budget: str | None,
    is_packed: bool,
) -> None:  # fmt: skip
    recipe = write_recipe(tmp_path / "r.yml", family, operator, packed if is_packed else ())
    alone = mergepipe.merge(recipe, tmp_path / "alone", budget=budget, options=merge_options("threads"))
    report = mergepipe.merge(recipe, tmp_path / "out", budget=budget, options=merge_options("ray", address))
    assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "alone")
    assert (report.base_bytes, report.planned_bytes is None) == (alone.base_bytes, False)
    assert report.expert_bytes + report.analysis_bytes == alone.expert_bytes + alone.analysis_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out", "r.yml"]
    mergepipe.verify(tmp_path / "out")


def test_merge__on_two_nodes_into_a_bucket(address: str, bucket: str, family: DiskFamily, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path / "r.yml", family, "ties"), f"{bucket}/out"
    mergepipe.merge(recipe, tmp_path / "alone", options=merge_options("threads"))
    options = replace(merge_options("ray", address), home=tmp_path / "home")
    report = mergepipe.merge(recipe, out, options=options)
    assert str(report.out) == out
    made, wanted = objects_below(out), files_below(tmp_path / "alone")
    assert made.keys() == wanted.keys()
    assert [name for name in wanted if name.endswith(".safetensors") and made[name] != wanted[name]] == []
    mergepipe.verify(out)


def test_run__tasks_are_spread_over_nodes_and_their_errors_are_ours(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(map(bytes, run_tasks(address, "name_node", [b""] * 4)))) == 2  # type: ignore[arg-type]
    (error,) = run_tasks(address, "refuse", [b"where"])
    assert isinstance(error, LimitError)
    assert (error.code, error.problems[0].where) == ("test.failure", "where")
    monkeypatch.setattr(mergepipe, "__version__", "0.0.0")
    (refusal,) = run_tasks(address, "refuse", [b"where"])
    assert isinstance(refusal, ConflictError)
    assert (refusal.code, "this is version 0.0.0" in str(refusal)) == ("ray.version", True)


def test_run__tasks_that_are_lost_again_and_again_end_in_one_error(address: str) -> None:
    with refuses(StorageError, "ray.lost") as caught:
        run_tasks(address, "die", [b""])
    assert "\n" not in str(caught.value)


def test_merge__interrupted_leaves_nothing_visible_and_is_resumed(
    address: str, family: DiskFamily, place: Path, tmp_path: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "r.yml", family, "ties"), tmp_path / "out"
    command = ["merge", recipe, out, "--executor", "ray", "--address", address, "--shard-size", f"{SHARD_BYTES}B"]
    code = (
        "import sys; from mergepipe.cli import main; from mergepipe.jobs import merge_on_ray as m\n"
        f"m._TASK = '{TASKS}:make_slowly'; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, [*command, "--allow-dropped", "*", "--no-catalog"])],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and len(list(place.glob("at-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing was published; 0 of 5 files are made: the same command resumes there" in told
    assert not out.exists()
    (parts,) = tmp_path.glob(".out.*")
    assert not list(parts.glob("work-*"))
    mergepipe.merge(recipe, out, options=merge_options("ray", address))
    mergepipe.merge(recipe, tmp_path / "alone", options=merge_options("threads"))
    assert weights_digest(out) == weights_digest(tmp_path / "alone")


Removal = Callable[[Progress], None]


@pytest.fixture
def removal(nodes: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Removal]:
    """Adds a node, which the returned function removes as soon as it has read for a file; tasks wait for that."""
    monkeypatch.setattr(merge_on_ray, "_TASK", f"{TASKS}:make_slowly")
    for path in place.iterdir():
        path.unlink()
    doomed = nodes.add_node(**NODE)
    stored: list[int] = []

    def remove_in_the_middle(_: Progress) -> None:
        lost = place / f"at-{doomed.node_id}"
        if lost.exists() and not stored:
            stored.append(stored_bytes())
            nodes.remove_node(doomed, allow_graceful=False)
            while Path("/proc", lost.read_text()).exists():
                time.sleep(0.05)
            (place / "go").touch()

    yield remove_in_the_middle
    assert stored == [0]


def test_merge__survives_a_node_that_is_removed(
    address: str, family: DiskFamily, removal: Removal, tmp_path: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "r.yml", family, "dare_ties"), tmp_path / "out"
    report = mergepipe.merge(recipe, out, options=merge_options("ray", address), on_progress=removal)
    alone = mergepipe.merge(recipe, tmp_path / "alone", options=merge_options("threads"))
    assert weights_digest(out) == weights_digest(tmp_path / "alone")
    assert report.expert_bytes > alone.expert_bytes  # with all that the lost task may have read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out", "r.yml"]


def test_merge__of_a_lost_node_is_finished_beyond_the_budget_and_says_so(
    address: str, family: DiskFamily, removal: Removal, tmp_path: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "r.yml", family, "ties"), tmp_path / "out"
    report = mergepipe.merge(recipe, out, budget="60%", options=merge_options("ray", address), on_progress=removal)
    mergepipe.merge(recipe, tmp_path / "alone", budget="60%", options=merge_options("threads"))
    assert weights_digest(out) == weights_digest(tmp_path / "alone")
    assert report.budget_bytes is not None
    assert report.earlier_expert_bytes > 0
    assert report.expert_bytes + report.analysis_bytes <= report.earlier_expert_bytes + report.budget_bytes
    assert any("was read over 2 runs" in notice for notice in report.notices)


def stored_bytes() -> int:
    """What the object stores of all nodes hold."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return int(total["object_store_memory"] - free["object_store_memory"])
