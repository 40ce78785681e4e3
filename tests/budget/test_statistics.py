"""What ANALYZE puts on record, against numpy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from budget_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import mergepipe
from mergepipe import Catalog
from mergepipe.catalog.statistics_file import statistics_folder
from mergepipe.core.blocks import BF16, F32
from mergepipe.engine.pipeline import Pipeline
from mergepipe.errors import MergePipeError, StorageError
from mergepipe.operators.statistics import COMMON_DENSITIES, TensorStatistics, rank_of_density
from support.budgets import GRAIN, TensorPlanOf, as_float32, make_budget_models, tensor_plans
from support.disk_families import DiskFamily, Model, make_models, write_family, write_recipe
from support.faults import Fault, replaced
from support.octaves import decode_octaves
from support.oracle import order_of_ranks, reaching
from support.recorded_statistics import statistics_on_record
from support.refusals import refuses

DENSITIES = tuple(sorted({*COMMON_DENSITIES, 0.001, 0.37, 1.0}))


def recorded(family: DiskFamily, home: Path) -> list[Any]:
    """Per expert the statistics on record by tensor."""
    files = [statistics_on_record(home, family.places[0], place) for place in family.places[1:]]
    return [{} if file is None else dict(file.tensors) for file in files]


def analyze(family: DiskFamily, home: Path, **options: Any) -> Any:
    """ANALYZE on small blocks."""
    options = {"block_elements": GRAIN, "threads": 2, **options}
    return mergepipe.analyze(family.places[0], family.places[1:], home=home, **options)


def deltas(base: Model, expert: Model, name: str) -> NDArray[np.float32]:
    """Float32 differences, zero where the two are equal."""
    base_N, expert_N = as_float32(base, name), as_float32(expert, name)
    with np.errstate(all="ignore"):
        return np.where(base_N == expert_N, np.float32(0), expert_N - base_N)


def check_statistics(base: Model, expert: Model, name: str, found: TensorStatistics) -> None:
    """Everything recorded of one tensor is what numpy says."""
    delta_N = deltas(base, expert, name)
    stored_N = expert[name].reshape(-1)
    for record, span in zip(found.blocks_B, found.grid.spans(), strict=True):
        check_block(record, delta_N[span.start : span.stop], stored_N[span.start : span.stop].tobytes())
    order_N = order_of_ranks(delta_N)
    for density, cut_3 in zip(found.densities_D.tolist(), found.cuts_D3.tolist(), strict=True):
        first, is_first_N = order_N[: rank_of_density(density, len(delta_N))], reaching(delta_N, cut_3)
        assert is_first_N[first].all()
        assert not delta_N[is_first_N].all() or np.count_nonzero(is_first_N) == len(first)  # zeros are all kept or none
    base_N = as_float32(base, name).astype(np.float64)
    with np.errstate(all="ignore"):
        delta64_N = delta_N.astype(np.float64)
        products = [base_N @ base_N, delta64_N @ delta64_N, base_N @ delta64_N]
    if np.isfinite(products).all():
        scale = float(np.abs(base_N) @ np.abs(delta64_N))
        np.testing.assert_allclose(found.products_3[:2], products[:2], rtol=1e-12)
        assert abs(found.products_3[2] - products[2]) <= 1e-12 * scale
    else:
        assert not np.isfinite(found.products_3).all()


def check_block(record: Any, delta_N: NDArray[np.float32], stored: bytes) -> None:
    """One block record."""
    assert bytes(record["hash"]) == blake3(stored).digest(16)
    assert int(record["changed"]) == np.count_nonzero(delta_N)
    magnitudes_N = np.abs(delta_N.astype(np.float64))
    if not np.isfinite(magnitudes_N).all():
        assert record["norm"] == record["largest"] == np.inf
        return
    norm = float(np.sqrt(np.square(magnitudes_N).sum()))
    assert float(record["norm"]) >= norm * (1 - 1e-15)
    # Two steps of float32 above at most, or float32 cannot hold it.
    assert float(record["norm"]) <= norm * (1 + 2.0**-22) + 2.0**-149 or norm > float(np.finfo(np.float32).max)
    assert float(record["largest"]) == magnitudes_N.max()
    shares_O = decode_octaves(record["octaves"][None])[0]
    if norm == 0:
        assert not shares_O.any()
    elif norm > 1e-15:
        check_octaves(shares_O, magnitudes_N)


def check_octaves(shares_O: NDArray[np.float64], magnitudes_N: NDArray[np.float64]) -> None:
    """Cumulated shares of energy by octave, within 12 %: counts are by bins of magnitude, bytes by steps of 19 %."""
    largest = magnitudes_N.max()
    some_N = magnitudes_N[magnitudes_N > 0]
    octave_N = np.clip(np.floor(np.log2(largest / some_N)), 0, len(shares_O) - 1).astype(int)
    wanted_O = np.bincount(octave_N, np.square(some_N), len(shares_O)) / np.square(some_N).sum()
    np.testing.assert_allclose(np.cumsum(shares_O), np.cumsum(wanted_O), atol=0.12)
    assert abs(shares_O.sum() - 1) < 1e-9


def check_family(family: DiskFamily, found: list[Mapping[str, TensorStatistics]]) -> int:
    """All statistics of all experts; how many there are."""
    checked = 0
    for expert, of_expert in zip(family.models[1:], found, strict=True):
        floats = [n for n, a in family.models[0].items() if a.dtype.kind in "fV" and a.size and n in expert]
        assert sorted(of_expert) == sorted(floats)
        for name, statistics in of_expert.items():
            check_statistics(family.models[0], expert, name, statistics)
            checked += 1
    return checked


@pytest.mark.thorough
def test_analyze__is_right_in_every_dtype_with_special_values_and_the_same_in_every_layout(tmp_path: Path) -> None:
    models = tuple({**model, "large": np.full(99, 1e38 * e, np.float32)} for e, model in enumerate(make_models(3)))
    of_layouts = []
    for layout in (0, 1, 2):
        folder = tmp_path / str(layout)
        family = write_family(folder, models, layout)
        analyze(family, folder / "home", densities=(0.001, 0.37, 1.0))
        of_layouts.append(recorded(family, folder / "home"))
    assert all({*s.densities_D.tolist()} >= {*DENSITIES} for each in of_layouts[0] for s in each.values())
    assert check_family(family, of_layouts[0]) >= 27
    assert all(same_records(of_layouts[0], others) for others in of_layouts[1:])


@pytest.mark.thorough
def test_analyze__in_little_memory_reads_twice_and_is_right(tmp_path: Path) -> None:
    plans = (TensorPlanOf("w", (16 * GRAIN + 3,), F32, (F32,)), TensorPlanOf("v", (12 * GRAIN,), BF16, (F32,)))
    family = write_family(tmp_path, make_budget_models(2, 5, plans))
    ample = analyze(family, tmp_path / "ample", threads=4)
    tight = analyze(family, tmp_path / "tight", threads=1, memory_bytes=1_000_000)
    n_bytes = sum(array.nbytes for model in family.models for array in model.values())
    assert 0 <= ample.analysis_bytes < 300_000  # samples for content ids
    assert tight.analysis_bytes - ample.analysis_bytes >= 0.9 * n_bytes
    check_family(family, recorded(family, tmp_path / "tight"))
    assert same_records(recorded(family, tmp_path / "ample"), recorded(family, tmp_path / "tight"))


@given(data=st.data(), n_experts=st.integers(1, 3), factor=st.sampled_from([1, 2, 16]))
@settings(max_examples=settings.default.max_examples // 3)  # type: ignore[union-attr]
def test_analyze__is_right_for_any_family(data: st.DataObject, n_experts: int, factor: int) -> None:
    plans = data.draw(tensor_plans(n_experts))
    models = make_budget_models(n_experts, data.draw(st.integers(0, 999)), plans)
    with tempfile.TemporaryDirectory() as folder:
        family = write_family(Path(folder), models, data.draw(st.integers(0, 2)))
        analyze(family, Path(folder) / "home", block_elements=factor * GRAIN)
        check_family(family, recorded(family, Path(folder) / "home"))


def test_sketches__give_cosines_without_bias(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n_blocks, n = 64, GRAIN
    base_N = rng.standard_normal(n_blocks * n).astype(np.float32)
    one_N = rng.standard_normal(len(base_N)).astype(np.float32)
    for wanted in (0.8, 0.0, -0.5):
        other_N = wanted * one_N + np.sqrt(1 - wanted**2) * rng.standard_normal(len(base_N)).astype(np.float32)
        models = [{"w": base_N}, {"w": base_N + one_N}, {"w": base_N + other_N.astype(np.float32)}]
        folder = tmp_path / f"cosine{wanted}"
        family = write_family(folder, models)
        analyze(family, folder / "home")
        one_BS, other_BS = (
            each["w"].blocks_B["sketch"].astype(np.float64) for each in recorded(family, folder / "home")
        )
        estimates_B = (one_BS * other_BS).sum(axis=1)
        # The mean of 64 estimates, each with a deviation of at most sqrt(2 / 16).
        assert abs(estimates_B.mean() - wanted) < 4 * np.sqrt(2 / 16 / n_blocks)
        assert abs(np.square(one_BS).sum(axis=1).mean() - 1) < 4 * np.sqrt(2 / 16 / n_blocks)


def same_statistics(one: TensorStatistics, two: TensorStatistics) -> bool:
    """Whether they are equal, bit for bit."""
    arrays = [
        (one.blocks_B, two.blocks_B),
        (one.densities_D, two.densities_D),
        (one.cuts_D3, two.cuts_D3),
        (one.products_3, two.products_3),
    ]
    return one.grid == two.grid and all(a.tobytes() == b.tobytes() for a, b in arrays)


def same_records(one: list[Any], two: list[Any]) -> bool:
    """Whether two readings of the catalog are equal."""
    return all(
        a.keys() == b.keys() and all(same_statistics(a[n], b[n]) for n in a) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("name", ["linear", "ties", "dare_ties", "slerp"])
def test_merge__records_no_statistics_that_a_plan_would_depend_on(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    family = write_family(tmp_path, make_models(len(case.weights)))
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    home = tmp_path / "merged"
    for number, budget in enumerate((None, "40%")):
        mergepipe.merge(recipe, tmp_path / f"out-{number}", budget=budget, home=home, threads=2)
    stats = Catalog(home).stats()
    assert (stats.snapshots, stats.digests, stats.statistics) == (2, 0, 0)


def test_analyze__is_idempotent_and_adds_what_is_missing(tmp_path: Path) -> None:
    family, home = write_family(tmp_path, make_budget_models(3)), tmp_path / "home"
    first = analyze(family, home)
    before = recorded(family, home)
    again = analyze(family, home)
    assert first.expert_bytes > 0
    assert (again.base_bytes, again.expert_bytes, again.analysis_bytes) == (0, 0, 0)
    assert same_records(before, recorded(family, home))
    more = analyze(family, home, densities=(0.123,))
    assert more.expert_bytes == first.expert_bytes
    assert all(0.123 in s.densities_D for each in recorded(family, home) for s in each.values())


def test_analyze__after_a_crash_begins_again_with_nothing_left(tmp_path: Path) -> None:
    family = write_family(tmp_path, make_budget_models(3))
    analyze(family, tmp_path / "whole")
    counter = Fault()
    with replaced(Pipeline, "_after_compute", counter.wrap):
        analyze(family, tmp_path / "counted")
    n_blocks = counter.calls
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "statistics").touch()
    with replaced(Pipeline, "_after_compute", counter.wrap), refuses(StorageError, "storage.io"):
        analyze(family, tmp_path / "file")
    assert counter.calls == n_blocks  # where nothing can be kept, nothing is read
    home = tmp_path / "crashed"
    fault = Fault(n_blocks - 1, RuntimeError("the power went"))
    with replaced(Pipeline, "_after_compute", fault.wrap), pytest.raises(RuntimeError, match="the power went"):
        analyze(family, home)
    assert list(statistics_folder(home).iterdir()) == []
    analyze(family, home)
    assert same_records(recorded(family, home), recorded(family, tmp_path / "whole"))


def test_analyze__notices_that_a_file_changed(tmp_path: Path) -> None:
    models = make_budget_models(2)
    family, home = write_family(tmp_path, models), tmp_path / "home"
    analyze(family, home)
    changed = make_budget_models(2, seed=8)[1]
    shutil.rmtree(family.places[1])
    other = write_family(tmp_path / "other", [models[0], changed])
    shutil.copytree(other.places[1], family.places[1])
    after = DiskFamily((models[0], changed, models[2]), family.places)
    assert recorded(after, home)[0] == {}
    report = analyze(after, home)
    assert [expert.analyzed_tensors for expert in report.experts] == [9, 0]
    check_family(DiskFamily(after.models[:2], after.places[:2]), recorded(after, home)[:1])


def test_analyze__refuses_a_file_that_changes_meanwhile_and_records_nothing_of_it(tmp_path: Path) -> None:
    family, home = write_family(tmp_path, make_budget_models(2)), tmp_path / "home"
    victim = sorted(family.places[1].rglob("*.safetensors"))[0]
    fault = Fault(0, RuntimeError(), on_fire=victim.touch)

    def touch_first(function: Any) -> Any:
        armed = fault.wrap(function)

        def step(*arguments: Any) -> Any:
            try:
                return armed(*arguments)
            except RuntimeError:
                return function(*arguments)

        return step

    with replaced(Pipeline, "_after_compute", touch_first), refuses(MergePipeError, "input.changed"):
        analyze(family, home)
    assert recorded(family, home)[0] == {}
