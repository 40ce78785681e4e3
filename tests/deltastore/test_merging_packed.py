"""Merges of packed experts: the same bytes as those of the originals, for the stores' bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import mergepipe
from mergepipe.api import pack
from mergepipe.checkpoints.contract import range_cost_bytes
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, Level, Piece
from mergepipe.deltastore.index import PIECE_NAMES
from mergepipe.deltastore.tensor import PackedTensor
from mergepipe.errors import MismatchError
from mergepipe.operators.base import OperatorInput
from mergepipe.operators.registry import operator_named
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.planning.levels import sufficient_levels
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.inputs import open_inputs, open_path
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.budgets import smallest_memory
from support.disk_families import DiskFamily, make_models, weights_digest, write_family, write_recipe
from support.oracle import MergeCase
from support.recorded_statistics import statistics_on_record
from support.rounding import decode, encode
from support.slow_cases import slow_unless

WIDE = "layers.0.wide"
N_WIDE = 3 * BLOCK_ELEMENTS + 5001
WEIGHTS, DENSITIES = (0.7, 0.5, -0.3), (0.2, 0.05, 0.19)
CASES = {
    "linear": MergeCase("linear", WEIGHTS, DENSITIES, base_weight=0.4, normalize=True),
    "task_arithmetic": MergeCase("task_arithmetic", WEIGHTS, DENSITIES, lambda_=0.8),
    "ties": MergeCase("ties", WEIGHTS, DENSITIES, normalize=True, lambda_=1.1),
    "ties_dense": MergeCase("ties", (1.0, 0.5, 0.25), (0.5, 0.3, 1.0)),
    "dare_linear": MergeCase("dare_linear", WEIGHTS, DENSITIES),
    "dare_ties": MergeCase("dare_ties", (0.7, 0.5, 0.3), DENSITIES, normalize=True),
    "slerp": MergeCase("slerp", (1.0,), (1.0,), t=0.3),
}
SMALL, LARGE = 40 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A family, and the same with its experts packed."""

    raw: DiskFamily
    packed: DiskFamily


def wide_values(seed: int, std: float) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(N_WIDE) * std).astype(np.float32)


@pytest.fixture(scope="module", name="pair")
def packed_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Awkward tensors, and one of several blocks whose deltas are small; one of its blocks is the base's."""
    folder = tmp_path_factory.mktemp("pair")
    base = encode(wide_values(0, 0.02), BF16)
    models = []
    for e, model in enumerate(make_models(3)):
        moved = encode(decode(base.tobytes(), BF16) + wide_values(e, 2e-4 * e), BF16) if e else base
        wide = np.where(np.arange(N_WIDE) // BLOCK_ELEMENTS == 1, base, moved) if e == 2 else moved
        models.append({**model, WIDE: wide.reshape(1, N_WIDE)})
    raw = write_family(folder / "raw", models)
    (raw.places[0] / "config.json").write_text(json.dumps({"model_type": "test", "num_hidden_layers": 4}))
    stores = pack(raw.places[0], raw.places[1:], folder / "stores", threads=2)
    return Pair(raw, replace(raw, places=(raw.places[0], *(expert.folder for expert in stores.experts))))


@pytest.fixture(name="folder")
def make_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mergepipe-packed-"))
    yield folder
    shutil.rmtree(folder)


def some(family: DiskFamily, case: MergeCase) -> DiskFamily:
    """As many experts as the case has."""
    return replace(family, places=family.places[: len(case.weights) + 1])


def merged(family: DiskFamily, case: MergeCase, folder: Path, **options: Any) -> str:
    recipe = write_recipe(folder / "recipe.yml", case, some(family, case))
    shutil.rmtree(folder / "out", ignore_errors=True)
    mergepipe.merge(recipe, folder / "out", catalog=False, **options)
    return weights_digest(folder / "out")


@pytest.mark.parametrize("name", CASES)
def test_merge__of_packed_experts_gives_the_bytes_of_the_originals(pair: Pair, folder: Path, name: str) -> None:
    assert merged(pair.packed, CASES[name], folder) == merged(pair.raw, CASES[name], folder)


@given(name=st.sampled_from([*CASES]), memory=st.integers(SMALL, LARGE), threads=st.integers(1, 4), mixed=st.booleans())
@settings(deadline=None, max_examples=8)
def test_merge__of_packed_experts_does_not_depend_on_how_it_is_run(
    pair: Pair, name: str, memory: int, threads: int, mixed: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        places = pair.packed.places
        family = replace(pair.raw, places=(*places[:2], *pair.raw.places[2:])) if mixed else pair.packed
        found = merged(family, CASES[name], Path(place), memory_bytes=memory, threads=threads)
        assert found == merged(pair.raw, CASES[name], Path(place))


BREADCRUMBS = MergeCase("breadcrumbs", WEIGHTS, (0.4, 0.1, 0.7))


@pytest.mark.parametrize("name", slow_unless({"ties"}.__contains__, ("ties", "ties_dense", "breadcrumbs")))
def test_plan__with_unknown_cuts_needs_no_tensor_whole_in_memory(pair: Pair, folder: Path, name: str) -> None:
    case = CASES.get(name, BREADCRUMBS)
    recipe = write_recipe(folder / "recipe.yml", case, pair.packed)
    for budget in ("80%", "100%"):
        plan = mergepipe.plan(recipe, budget, home=folder / "home", options=PlanOptions(block_elements=BLOCK_ELEMENTS))
        outs = (folder / f"{budget}-small", folder / f"{budget}-large")
        memories = (smallest_memory(plan, folder / "refused"), LARGE)
        small, large = (
            mergepipe.run(plan, out, options=RunOptions(catalog=False, memory_bytes=memory))
            for out, memory in zip(outs, memories, strict=True)
        )
        assert max(small.expert_bytes, large.expert_bytes) <= plan.planned_bytes
        assert small.analysis_bytes == large.analysis_bytes == 0
        assert small.base_bytes > large.base_bytes  # that of the tensor is read again, the experts are not
        assert weights_digest(outs[0]) == weights_digest(outs[1])
    assert weights_digest(outs[1]) == merged(pair.raw, case, folder)


PEAK_OF = """
import re, sys, mergepipe
from pathlib import Path
plan, out, memory = sys.argv[1:]
options = mergepipe.RunOptions(catalog=False, memory_bytes=int(memory), threads=2)
mergepipe.run(plan, out, options=options)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_plan__of_a_tensor_far_above_the_memory_cap_keeps_the_process_small(folder: Path) -> None:
    peaks = []
    for n_elements in (4 << 20, 24 << 20):
        place = folder / str(n_elements)
        rng = np.random.default_rng(1)
        base = encode(rng.standard_normal(n_elements, np.float32) * 0.02, BF16)
        deltas = (rng.standard_normal(n_elements, np.float32) * 1e-3 for _ in range(2))
        models = [{"w": base}, *({"w": encode(decode(base.tobytes(), BF16) + delta, BF16)} for delta in deltas)]
        family = write_family(place / "raw", models)
        stores = pack(family.places[0], family.places[1:], place / "stores", threads=2)
        packed = replace(family, places=(family.places[0], *(expert.folder for expert in stores.experts)))
        recipe = write_recipe(place / "recipe.yml", MergeCase("ties", (0.6, 0.4), (0.3, 0.1)), packed)
        plan = mergepipe.plan(recipe, "100%", home=place / "home", options=PlanOptions(block_elements=BLOCK_ELEMENTS))
        (place / "plan.json").write_bytes(plan.to_json())
        command = [sys.executable, "-c", PEAK_OF, f"{place}/plan.json", f"{place}/out", str(SMALL)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(answer) << 10)
        mergepipe.run(plan, place / "large", options=RunOptions(catalog=False, memory_bytes=2 << 30))
        assert weights_digest(place / "out") == weights_digest(place / "large")
        shutil.rmtree(place)
    assert peaks[1] < peaks[0] + (64 << 20)  # held, the tensor would take 240 MiB


def test_merge__in_full_reads_what_the_stores_hold(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["task_arithmetic"], pair.packed)
    report = mergepipe.merge(recipe, folder / "out", options=MergeOptions(catalog=False, memory_bytes=LARGE))
    inputs = open_inputs(Location.local(recipe), LocalStore())
    used = [source for task in inputs.resolution.tasks for source in task.experts]
    exact = sum(entry.nbytes for source in used for entry in source.stored)
    assert exact <= sum(file.stat().st_size for place in pair.packed.places[1:] for file in place.glob("*.bin"))
    rounded = sum(range_cost_bytes(e.offset, e.offset + e.nbytes) for source in used for e in source.stored)
    assert exact <= report.expert_bytes + report.analysis_bytes <= rounded
    base_bytes = sum(task.base.nbytes for task in inputs.resolution.tasks)
    assert report.base_bytes <= base_bytes + 8192 * len(inputs.resolution.tasks)


def head_bytes(store: Path) -> int:
    return sum((store / PIECE_NAMES[piece]).stat().st_size for piece in (Piece.HEAD, Piece.WHOLE))


def test_merge__of_the_largest_deltas_reads_nothing_else(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["ties"], pair.packed)
    report = mergepipe.merge(recipe, folder / "out", options=MergeOptions(catalog=False, memory_bytes=LARGE))
    tensor = open_inputs(Location.local(recipe), LocalStore()).checkpoints[1].tensors[WIDE]
    assert isinstance(tensor, PackedTensor)
    assert tensor.at_level(Level.HEAD).nbytes < 0.7 * tensor.nbytes
    pages = 4096 * 2 * 3 * 3 * len(pair.raw.models[0])
    assert report.expert_bytes <= sum(map(head_bytes, pair.packed.places[1:])) + pages
    assert report.analysis_bytes == 0


def levels_of(operator: str, task: MergeTask, density: float, **shared: bool | float) -> tuple[tuple[int, int], ...]:
    each = {"weight": 1.0, "density": density}
    parameters = {"normalize": True, "rescale": False, "lambda": 1.0, **shared}
    given_task = OperatorInput(parameters, {}, (each,) * len(task.experts), task.base.n_elements, ())
    return sufficient_levels(operator_named(operator), given_task, task)


def test_sufficient_levels__are_below_the_last_only_where_nothing_else_matters(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["ties"], pair.packed)
    tasks = {task.name: task for task in open_inputs(Location.local(recipe), LocalStore()).resolution.tasks}
    wide = tasks[WIDE]
    tensor = wide.experts[0]
    assert isinstance(tensor, PackedTensor)
    head = tensor.head_elements / tensor.n_elements
    assert levels_of("ties", wide, head)[0] == (0, Level.HEAD)
    assert 0 not in dict(levels_of("ties", wide, head + 2 / tensor.n_elements))
    assert levels_of("ties", wide, 0.05, rescale=True) == ()
    assert levels_of("dare_ties", wide, 0.05) == ()
    assert levels_of("task_arithmetic", wide, 0.05) == ()
    assert levels_of("ties", tasks["layers.0.norm"], 0.05) == ()


def test_analyze__of_packed_experts_records_what_it_records_of_the_originals(pair: Pair, folder: Path) -> None:
    found = []
    for name, family in (("raw", pair.raw), ("packed", pair.packed)):
        home = folder / name
        mergepipe.analyze(family.places[0], family.places[1:], options=RunOptions(home=home))
        for place in family.places[1:]:
            file = statistics_on_record(home, family.places[0], place)
            assert file is not None
            assert WIDE in file.tensors
            tensors = {n: (s.blocks_B.tobytes(), s.cuts_D3.tobytes()) for n, s in file.tensors.items()}
            found.append((file.expert.content_id, tensors))
    assert found[:3] == found[3:]


def part(model: Path, first: int, stop: int, **parameters: float) -> dict[str, object]:
    return {"model": str(model), "layer_range": [first, stop], "parameters": parameters}


@pytest.mark.parametrize("name", ["passthrough", "task_arithmetic"])
def test_merge__of_slices_of_packed_experts_gives_the_bytes_of_the_originals(
    pair: Pair, folder: Path, name: str
) -> None:
    digests = []
    for family in (pair.raw, pair.packed):
        base, first, second, third = family.places
        if name == "passthrough":
            slices = [[part(base, 1, 2)], [part(first, 0, 1)], [part(second, 0, 1)], [part(base, 2, 3)]]
        else:
            own = part(base, 0, 1)
            slices = [
                [own, part(first, 0, 1, weight=0.5)],
                [own, part(second, 0, 1, weight=0.5), part(third, 0, 1, weight=0.25)],
                [part(base, 1, 3), part(first, 1, 3, weight=0.5)],
            ]
        recipe: dict[str, object] = {"merge_method": name, "slices": [{"sources": sources} for sources in slices]}
        if name != "passthrough":
            recipe["base_model"] = str(base)
        (folder / "recipe.yml").write_text(json.dumps(recipe))
        shutil.rmtree(folder / "out", ignore_errors=True)
        mergepipe.merge(
            folder / "recipe.yml", folder / "out", options=MergeOptions(catalog=False, allow_dropped=("*",))
        )
        digests.append(weights_digest(folder / "out"))
    assert digests[0] == digests[1]


def test_open_model__refuses_a_store_as_the_base_and_a_foreign_base(pair: Pair, folder: Path) -> None:
    with pytest.raises(MismatchError, match="was packed relative to its base, which is not named; name its base"):
        open_path(LocalStore(), Location.local(pair.packed.places[1]))
    other = folder / "other"
    other.mkdir()
    models = make_models(1)
    family = write_family(folder / "other", [{**model, WIDE: np.zeros((2, 3), np.float32)} for model in models])
    with pytest.raises(MismatchError, match="give the base that it was packed with"):
        open_path(
            LocalStore(),
            Location.local(pair.packed.places[1]),
            open_path(LocalStore(), Location.local(family.places[0])),
        )
