"""Whole merges through the public API: right by the oracle, and the same bytes however they are run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.engine.segments import choose_buffer_sizes
from mergepipe.engine.work import plan_output
from mergepipe.errors import LimitError
from mergepipe.reports import MergeReport
from mergepipe.storage.output import CHUNK_BYTES
from support.disk_families import (
    DiskFamily,
    Model,
    make_models,
    read_snapshot,
    tree_digest,
    weights_digest,
    write_bare,
    write_family,
    write_recipe,
    write_sharded,
    write_single,
    wrong_elements,
)
from support.local_models import open_recipe
from support.oracle import CASES as USUAL_CASES
from support.oracle import DENSITIES, WEIGHTS, MergeCase
from support.refusals import refuses

CASES = {
    **USUAL_CASES,
    "ties_whole": MergeCase("ties", (1.0, 0.5, 0.25), (1.0, 1.0, 1.0), normalize=True),
    "ties_sum": MergeCase("ties", (1.0, 0.5, 0.25), (0.01, 0.5, 0.9)),
    "dare_plain": MergeCase("dare_linear", WEIGHTS, DENSITIES, normalize=True, rescale=False),
    "passthrough": MergeCase("passthrough"),
    "passthrough_scaled": MergeCase("passthrough", scale=-1.7),
}
WITH_REDUCTION = ("ties", "slerp")


def family_for(case: MergeCase, folder: Path, layout: int = 0) -> DiskFamily:
    """The awkward family with as many experts as the case has."""
    return write_family(folder, make_models(len(case.weights)), layout)


def smallest_memory(recipe: Path) -> int:
    """The least `memory_bytes` with which this merge runs when it gathers no statistics."""
    tasks = plan_output(open_recipe(recipe).resolution.tasks, 1 << 40).tasks
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            choose_buffer_sizes(tasks, middle)
            high = middle
        except LimitError:
            low = middle
    return high + CHUNK_BYTES


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("out_dtype", "catalog"), [(None, False), ("bfloat16", True)])
def test_merge__agrees_with_the_oracle(tmp_path: Path, name: str, out_dtype: str | None, catalog: bool) -> None:
    case = CASES[name]
    family = family_for(case, tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family, out_dtype)
    before = tree_digest(*family.places)
    report = mergepipe.merge(recipe, tmp_path / "out", seed=5, catalog=catalog)
    assert wrong_elements(case, family, tmp_path / "out", 5, out_dtype) == {}
    assert tree_digest(*family.places) == before
    assert (report.merged_tensors, report.copied_tensors) == (11, 3)
    assert report.analysis_bytes == 0 or case.is_random


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ties", "slerp", "dare_ties", "linear"])
@pytest.mark.parametrize("threads", [1, 5])
def test_merge__in_the_smallest_memory_is_right_too(tmp_path: Path, name: str, threads: int) -> None:
    case = CASES[name]
    family = family_for(case, tmp_path, layout=1)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    memory = smallest_memory(recipe)
    report = mergepipe.merge(recipe, tmp_path / "out", threads=threads, memory_bytes=memory, catalog=False)
    assert wrong_elements(case, family, tmp_path / "out", 0, None) == {}
    assert (report.analysis_bytes > 0) == (name != "linear")
    with refuses(LimitError, "memory.too-small"):
        mergepipe.merge(recipe, tmp_path / "out2", threads=threads, memory_bytes=memory - 1, catalog=False)
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("name", ["linear", "ties", "dare_linear", "dare_ties", "slerp"])
def test_merge__makes_the_same_bytes_however_it_is_run(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    digests, streamed = set(), 0
    for layout in (0, 1, 2):
        folder = tmp_path / f"layout{layout}"
        family = family_for(case, folder, layout)
        recipe = write_recipe(folder / "recipe.yml", case, family)
        smallest = smallest_memory(recipe)
        runs = [
            (1, None, 1 << 40, True),
            (2, smallest, 1 << 40, False),
            (5, smallest + 300_000, 20_000, False),
            (2, smallest * 3, 70_000, True),
        ]
        for number in (1, (0, 2, 3)[layout]):
            threads, memory, shard_bytes, catalog = runs[number]
            out = folder / f"out{number}"
            report = mergepipe.merge(
                recipe, out, seed=11, threads=threads, memory_bytes=memory, shard_bytes=shard_bytes, catalog=catalog
            )
            digests.add(weights_digest(out))
            streamed += report.analysis_bytes > 0 and name in WITH_REDUCTION
    assert len(digests) == 1
    assert streamed >= (3 if name in WITH_REDUCTION else 0)


def _run_twice(tmp_path: Path, case: MergeCase, *, second_seed: int = 0) -> tuple[MergeReport, MergeReport]:
    family = family_for(case, tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    first = mergepipe.merge(recipe, tmp_path / "one")
    return first, mergepipe.merge(recipe, tmp_path / "two", seed=second_seed)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_merge__with_another_seed_draws_other_masks(tmp_path: Path, name: str) -> None:
    _run_twice(tmp_path, CASES[name], second_seed=1)
    one, two = read_snapshot(tmp_path / "one"), read_snapshot(tmp_path / "two")
    assert not np.array_equal(one["layers.0.odd"], two["layers.0.odd"])
    assert np.array_equal(one["buffer.ids"], two["buffer.ids"])


def test_merge__with_another_seed_changes_nothing_where_nothing_is_random(tmp_path: Path) -> None:
    _run_twice(tmp_path, CASES["ties"], second_seed=1)
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")


@pytest.mark.parametrize("name", ["dare_linear", "ties"])
def test_merge__takes_an_expert_with_a_file_of_nothing_but_dropped_tensors(tmp_path: Path, name: str) -> None:
    case = MergeCase(CASES[name].operator, (1.0,), (0.5,), normalize=True)
    model = {"w": np.arange(100, dtype=np.float32)}
    expert = {"w": np.ones(100, np.float32), "extra": np.ones(9, np.float32)}
    places = (write_bare(tmp_path / "base.safetensors", model), write_sharded(tmp_path / "expert", expert, 2))
    family = DiskFamily((model, expert), places)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    report = mergepipe.merge(recipe, tmp_path / "out", seed=3, allow_dropped=("extra",))
    assert wrong_elements(case, family, tmp_path / "out", 3, None) == {}
    assert report.dropped_tensors == 1


@pytest.mark.parametrize("operator", ["ties", "slerp", "linear"])
def test_merge__of_nothing_but_empty_tensors_and_buffers_works(tmp_path: Path, operator: str) -> None:
    case = MergeCase(operator, (1.0,), (0.5,), normalize=True)
    model: Model = {"none": np.zeros((0, 3), np.float32), "nothing": np.zeros(0, np.float16), "ids": np.arange(3)}
    places = (write_single(tmp_path / "base", model), write_bare(tmp_path / "expert.safetensors", model))
    family = DiskFamily((model, model), places)
    mergepipe.merge(write_recipe(tmp_path / "recipe.yml", case, family), tmp_path / "out")
    assert wrong_elements(case, family, tmp_path / "out", 0, None) == {}


def test_merge__of_small_tensors_alone_runs_in_the_smallest_memory(tmp_path: Path) -> None:
    case = MergeCase("ties", (1.0,), (0.5,), normalize=True)
    rng = np.random.default_rng(0)
    models = tuple({f"t{i}": rng.standard_normal(1250).astype(np.float32) for i in range(40)} for _ in range(2))
    family = write_family(tmp_path, models)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    mergepipe.merge(recipe, tmp_path / "out", memory_bytes=smallest_memory(recipe), catalog=False)
    assert wrong_elements(case, family, tmp_path / "out", 0, None) == {}


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder on a file system in memory, which knows no direct I/O or another kind of it."""
    root = Path("/dev/shm")
    if not root.is_dir():
        pytest.skip("no file system in memory here")
    folder = Path(tempfile.mkdtemp(dir=root))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("inputs_in_memory", "output_in_memory"), [(True, False), (False, True), (True, True)])
def test_merge__works_from_and_to_a_file_system_in_memory(
    tmp_path: Path, shared_memory: Path, inputs_in_memory: bool, output_in_memory: bool
) -> None:
    case = CASES["ties"]
    family = family_for(case, shared_memory if inputs_in_memory else tmp_path / "in")
    out = (shared_memory if output_in_memory else tmp_path) / "out"
    mergepipe.merge(write_recipe(tmp_path / "recipe.yml", case, family), out)
    assert wrong_elements(case, family, out, 0, None) == {}


def test_merge__reports_and_records_what_it_read_and_wrote(tmp_path: Path) -> None:
    case = CASES["task_arithmetic"]
    family = family_for(case, tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    planned = mergepipe.check(recipe)
    report = mergepipe.merge(recipe, tmp_path / "out")
    assert report.base_bytes >= planned.base_bytes
    assert report.expert_bytes >= planned.expert_bytes
    manifest = json.loads((tmp_path / "out" / "mergepipe.json").read_text())
    assert manifest["sid"] == report.sid
    assert manifest["realized"]["expert"] == report.expert_bytes
    assert sum(i["read_bytes"] for i in manifest["inputs"]) == report.base_bytes + report.expert_bytes
    on_disk = sum(f.stat().st_size for f in (tmp_path / "out").rglob("*") if f.is_file())
    assert report.output_bytes == on_disk
    assert {t["name"] for t in manifest["tensors"]} == set(family.models[0])
    assert {d["tensor"] for d in manifest["dropped"]} == {
        name for m in family.models[1:] for name in m if name.startswith(("extra", "buffer"))
    }
    written = read_snapshot(tmp_path / "out")
    held = {t["name"]: np.sum(~np.isfinite(written[t["name"]])) for t in manifest["tensors"]}
    first, n_values = next((name, n) for name, n in held.items() if n)
    where = f"{np.count_nonzero(list(held.values()))} of {len(held)} tensors"
    first_values = f"{n_values} of {written[first].size} values of '{first}'"
    told = f"infinities or NaN in {where}, first {first_values}: a model has them"
    assert report.notices == (told,)


@pytest.mark.parametrize(("dtype", "n_notices"), [(np.float16, 1), (np.float32, 0)])
def test_merge__says_that_results_are_beyond_their_dtype(tmp_path: Path, dtype: type, n_notices: int) -> None:
    models: tuple[Model, ...] = ({"w": np.array([3e4, 1], dtype)}, {"w": np.array([6e4, 2], dtype)})
    case, family = MergeCase("task_arithmetic", (2.0,), (1.0,)), write_family(tmp_path, models)
    report = mergepipe.merge(write_recipe(tmp_path / "recipe.yml", case, family), tmp_path / "out")
    told = "infinities or NaN in 1 of 1 tensor, first 1 of 2 values of 'w': a model has them, or results are beyond F16"
    assert report.notices == (told,) * n_notices
