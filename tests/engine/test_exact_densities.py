"""Rules that trim keep exactly the share asked, and the same elements of many equal ones however a merge runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers small dtypes for the safetensors library
import numpy as np
import pytest
from numpy.typing import NDArray

import mergepipe
from mergepipe.core.blocks import BF16, F8_E4M3, F16, F32, DType
from mergepipe.operators.sparse import band_ranks
from mergepipe.options import MergeOptions, PlanOptions
from mergepipe.storage.output import CHUNK_BYTES
from support.disk_families import read_snapshot, weights_digest, write_sharded, write_single
from support.oracle import order_of_ranks
from support.rounding import NUMPY_DTYPES

SHAPES = {"wide": (300, 229), "odd": (1001,), "small": (7,)}
WEIGHTS, DENSITIES = (0.5, 0.25), (0.2, 0.43)
GAMMA = 0.05
RULES = ("ties", "breadcrumbs")
DTYPES = (BF16, F16, F32, F8_E4M3)
GRAIN = 16384


@dataclass(frozen=True, slots=True)
class Case:
    """Models whose numbers are small multiples of 1/8, exact in every dtype: differences take five magnitudes."""

    folder: Path
    rule: str
    models: tuple[dict[str, NDArray[Any]], ...]

    @classmethod
    def write(cls, folder: Path, rule: str, dtype: DType) -> Case:
        rng = np.random.default_rng(7)
        base = {name: rng.integers(-8, 9, shape) for name, shape in SHAPES.items()}
        experts = [{name: base[name] + rng.integers(-4, 5, shape) for name, shape in SHAPES.items()} for _ in WEIGHTS]
        stored = tuple(
            {name: (eighths / 8).astype(NUMPY_DTYPES[dtype.name]) for name, eighths in model.items()}
            for model in (base, *experts)
        )
        for model, name in zip(stored, ("base", "one", "two"), strict=True):
            write_single(folder / name, model) if name != "two" else write_sharded(folder / name, model, 2)
        return cls(folder, rule, stored)

    def recipe(self, experts: tuple[str, ...] = ("one", "two")) -> dict[str, object]:
        gamma = {"gamma": GAMMA} if self.rule == "breadcrumbs" else {}
        models = [
            {"model": str(self.folder / expert), "parameters": {"weight": weight, "density": density, **gamma}}
            for expert, weight, density in zip(experts, WEIGHTS, DENSITIES, strict=True)
        ]
        return {
            "merge_method": self.rule, "base_model": str(self.folder / "base"), "models": models,
            "parameters": {"normalize": False}, "dtype": "auto", "out_dtype": "float32",
        }  # fmt: skip

    def ranks(self, n_elements: int) -> list[tuple[int, int]]:
        """The rank after the last element kept, and that of the first, of each expert."""
        gamma = GAMMA if self.rule == "breadcrumbs" else 0.0
        return [band_ranks(n_elements, density, gamma) for density in DENSITIES]

    def expected(self, name: str) -> NDArray[np.float32]:
        """The merged tensor: every sum is exact, so it is one number for each element."""
        base_N = self.models[0][name].ravel().astype(np.float32)
        weighted = []
        for expert, weight, (stop, start) in zip(self.models[1:], WEIGHTS, self.ranks(len(base_N)), strict=True):
            delta_N = expert[name].ravel().astype(np.float32) - base_N
            kept_N = order_of_ranks(delta_N)[start:stop]
            trimmed_N = np.zeros_like(base_N)
            trimmed_N[kept_N] = np.float32(weight) * delta_N[kept_N]
            weighted.append(trimmed_N)
        sum_N = np.sum(weighted, axis=0)
        if self.rule == "ties":
            agreeing = [np.where((one > 0) == (sum_N >= 0), one, np.float32(0)) for one in weighted]
            sum_N = np.sum(agreeing, axis=0)
        return np.asarray(base_N + sum_N)


@pytest.fixture(params=[(rule, dtype) for rule in RULES for dtype in DTYPES], ids=lambda p: f"{p[0]}-{p[1].name}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    rule, dtype = request.param
    return Case.write(tmp_path, rule, dtype)


def without_catalog(**options: Any) -> MergeOptions:
    return MergeOptions(catalog=False, **options)


def test_merge__changes_exactly_the_elements_of_the_oracle(case: Case) -> None:
    mergepipe.merge(case.recipe(), case.folder / "out", options=without_catalog())
    for name, merged in read_snapshot(case.folder / "out").items():
        np.testing.assert_array_equal(merged.ravel(), case.expected(name), name)


def small_memory(case: Case) -> int:
    """Room for three buffers of one grain each, which the largest tensor does not fit into."""
    n_bytes = sum(model["wide"].dtype.itemsize for model in case.models) + F32.itemsize
    return CHUNK_BYTES + 3 * (GRAIN * n_bytes + 3 * 8192)  # two pages around each read


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [("ties", BF16), ("ties", F8_E4M3), ("breadcrumbs", F32)],
    indirect=True,
    ids=lambda p: f"{p[0]}-{p[1].name}",
)
def test_merge__keeps_the_same_elements_however_it_is_run(case: Case) -> None:
    analyzed_bytes, small = [], small_memory(case)
    for number, options in enumerate(
        (
            without_catalog(threads=1),
            without_catalog(threads=1, memory_bytes=small),
            without_catalog(threads=3, memory_bytes=small, shard_bytes=5000),
        )
    ):
        report = mergepipe.merge(case.recipe(), case.folder / f"out{number}", options=options)
        analyzed_bytes.append(report.analysis_bytes)
    assert analyzed_bytes[0] == 0 < min(analyzed_bytes[1:])  # streamed: read again
    outs = [case.folder / f"out{number}" for number in range(3)]
    outs += [*in_parts(case), packed(case), *under_a_full_budget(case)]
    assert len({weights_digest(out) for out in outs}) == 1


def in_parts(case: Case) -> Iterator[Path]:
    out = case.folder / "parts"
    plan = mergepipe.plan(case.recipe(), everything=True, home=case.folder / "home")
    for number in (2, 1):
        mergepipe.run_part(plan, out, (number, 2), catalog=False, shard_bytes=5000)
    yield out


def packed(case: Case) -> Path:
    folder = case.folder / "packed"
    mergepipe.pack(case.folder / "base", [case.folder / "one", case.folder / "two"], folder, threads=2)
    out = case.folder / "out-packed"
    mergepipe.merge(case.recipe(("packed/one", "packed/two")), out, options=without_catalog())
    return out


def under_a_full_budget(case: Case) -> Iterator[Path]:
    """Without statistics, and with those of `analyze`."""
    home, options = case.folder / "home", PlanOptions(block_elements=GRAIN)
    merge_options = options.common(MergeOptions, home=home)
    for number in range(2):
        out = case.folder / f"out-budget{number}"
        mergepipe.merge(case.recipe(), out, budget="100%", options=merge_options)
        yield out
        experts = [case.folder / "one", case.folder / "two"]
        mergepipe.analyze(case.folder / "base", experts, block_elements=GRAIN, home=home)


def test_merge__states_the_share_kept_of_each_expert(tmp_path: Path) -> None:
    for rule in RULES:
        case = Case.write(tmp_path / rule, rule, BF16)
        report = mergepipe.merge(case.recipe(), case.folder / "out", options=without_catalog())
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
        kept = [sum(stop - start for stop, start in each) for each in zip(*map(case.ranks, sizes), strict=True)]
        assert [(Path(one.model).name, one.kept_elements, one.elements) for one in report.kept] == [
            ("one", kept[0], sum(sizes)),
            ("two", kept[1], sum(sizes)),
        ]
        run = json.loads((case.folder / "out" / "mergepipe.json").read_text())["run"]
        assert run["kept_elements"] == f"{kept[0]}/{sum(sizes)},{kept[1]}/{sum(sizes)}"


@pytest.mark.parametrize("rule", ["task_arithmetic", "dare_linear"])
def test_merge__states_no_share_where_nothing_is_cut_by_size(tmp_path: Path, rule: str) -> None:
    recipe = Case.write(tmp_path, "ties", BF16).recipe() | {"merge_method": rule}
    if rule == "task_arithmetic":
        for model in recipe["models"]:  # type: ignore[attr-defined]
            del model["parameters"]["density"]
    assert mergepipe.merge(recipe, tmp_path / "out", options=without_catalog()).kept == ()
