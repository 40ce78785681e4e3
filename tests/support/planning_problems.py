"""Small planning problems from real arrays: statistics worked out in numpy, file offsets that fall on no page."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, TensorEntry
from mergepipe.core.blocks import F32, BlockGrid
from mergepipe.operators.registry import operator_specs
from mergepipe.operators.statistics import (
    BLOCK_RECORD,
    COMMON_DENSITIES,
    N_OCTAVES,
    N_SKETCH,
    Cut,
    TensorStatistics,
    encode_octaves,
    rank_of_density,
)
from mergepipe.planning.problem import PlanningModel, PlanningProblem
from mergepipe.recipes.recipe import ModelInput, Recipe, Scalar
from mergepipe.recipes.resolution import resolve
from mergepipe.storage.contract import FileId
from mergepipe.storage.location import Location

BLOCK = 4096
Arrays = Mapping[str, NDArray[np.float32]]


def block_record(base: NDArray[np.float32], expert: NDArray[np.float32]) -> NDArray[np.void]:
    """The statistics of one block."""
    record = np.zeros((), BLOCK_RECORD)
    delta = (expert - base).astype(np.float64)
    magnitude = np.abs(delta)
    largest = magnitude.max(initial=0.0)
    record["hash"] = np.frombuffer(blake3(expert.tobytes()).digest(16), np.uint8)
    norm = np.float32(np.linalg.norm(delta))
    record["norm"] = np.nextafter(norm, np.float32(np.inf)) if norm else norm
    record["largest"] = largest
    record["changed"] = np.count_nonzero(delta)
    if largest > 0:
        moved = magnitude > 0
        octave = np.clip(np.floor(-np.log2(magnitude[moved] / largest)), 0, N_OCTAVES - 1).astype(np.int64)
        energies = np.bincount(octave, weights=magnitude[moved] ** 2, minlength=N_OCTAVES).astype(np.float64)
        record["octaves"] = encode_octaves(energies[None])[0]
        signs = np.random.default_rng(7).choice((-1.0, 1.0), len(delta))
        record["sketch"] = np.bincount(np.arange(len(delta)) % N_SKETCH, signs * delta, N_SKETCH) / norm
    return record


def tensor_statistics(base: NDArray[np.float32], expert: NDArray[np.float32], block: int = BLOCK) -> TensorStatistics:
    """The statistics of one tensor."""
    grid = BlockGrid(len(base), block)
    spans = [slice(span.start, span.stop) for span in grid.spans()]
    records = np.array([block_record(base[inside], expert[inside]) for inside in spans], BLOCK_RECORD)
    delta = expert - base
    falling = np.sort(np.abs(delta))[::-1]
    ranks = [rank_of_density(density, len(base)) for density in COMMON_DENSITIES]
    last_D = np.array([falling[rank - 1] if rank else np.float32(np.nan) for rank in ranks], np.float32)
    cuts_D3 = np.array([Cut(bits) for bits in last_D.view(np.uint32).tolist()], np.uint32)  # no two deltas are equal
    products = np.array([base @ base, delta @ delta, base @ delta], np.float64)
    return TensorStatistics(grid, records, np.array(COMMON_DENSITIES), cuts_D3, products)


def checkpoint(name: str, arrays: Arrays, first_offset: int = 1000) -> Checkpoint:
    """All arrays in one file of float32, one after the other."""
    entries, offset = {}, first_offset
    for tensor, values in arrays.items():
        entry = TensorEntry(tensor, F32, (len(values),), Location.local(Path("/models") / name), offset, values.nbytes)
        entries[tensor] = entry
        offset += entry.nbytes
    identity = FileId(name, offset, "17", blake3(name.encode()).hexdigest(16))
    file = CheckpointFile(Location.local(Path("/models") / name), identity)
    return Checkpoint(Location.local(Path("/models") / name), Location.local(Path("/models")), entries, (file,), ())


@dataclass(frozen=True, slots=True)
class Given:
    """A problem with the arrays it is about."""

    problem: PlanningProblem
    base: Arrays
    experts: tuple[Arrays, ...]

    def without_statistics(self, missing: Collection[tuple[int, str]]) -> Given:
        """The same, with nothing known of some (expert, tensor)."""
        kept = tuple(
            {name: each for name, each in known.items() if (e, name) not in missing}
            for e, known in enumerate(self.problem.statistics)
        )
        return replace(self, problem=replace(self.problem, statistics=kept))

    def with_content_ids(self) -> Given:
        """The same, with the content ids of all experts known."""
        base, *others = self.problem.models
        experts = tuple(replace(model, content_id=f"{e:032x}") for e, model in enumerate(others))
        return replace(self, problem=replace(self.problem, models=(base, *experts)))


DEFAULT_SIZES = {
    "embed.weight": 3 * BLOCK + 5,
    "layers.0.attn.weight": 2 * BLOCK,
    "layers.0.norm.weight": 7,
    "layers.1.attn.weight": 2 * BLOCK,
    "empty": 0,
}


def random_arrays(n_experts: int, seed: int, sizes: Mapping[str, int]) -> tuple[Arrays, tuple[Arrays, ...]]:
    """A base and experts whose blocks differ from it by very different amounts."""
    rng = np.random.default_rng(seed)
    base = {name: rng.standard_normal(n).astype(np.float32) for name, n in sizes.items()}
    experts = []
    for _ in range(n_experts):
        arrays = {}
        for name, values in base.items():
            scale = np.repeat(rng.lognormal(-4, 1, len(values) // BLOCK + 1), BLOCK)[: len(values)]
            arrays[name] = (values + scale * rng.standard_normal(len(values))).astype(np.float32)
        experts.append(arrays)
    return base, tuple(experts)


PARAMETERS: Mapping[str, Mapping[str, Scalar]] = {
    "linear": {"weight": 0.5}, "task_arithmetic": {"weight": 0.5}, "ties": {"weight": 0.5, "density": 0.2},
    "dare_linear": {"weight": 0.5, "density": 0.5}, "dare_ties": {"weight": 0.5, "density": 0.5}, "slerp": {"t": 0.3},
}  # fmt: skip


def make(
    operator: str = "task_arithmetic",
    n_experts: int = 3,
    seed: int = 0,
    *,
    sizes: Mapping[str, int] = DEFAULT_SIZES,
    arrays: tuple[Arrays, tuple[Arrays, ...]] | None = None,
    parameters: Mapping[str, Scalar] | None = None,
    weights: tuple[float, ...] | None = None,
) -> Given:
    """A problem in which everything is known."""
    base, experts = arrays or random_arrays(n_experts, seed, sizes)
    shared = dict(PARAMETERS[operator] if parameters is None else parameters)
    if operator == "linear" and weights is None and "weight" in shared:  # the base itself has none
        weights = (float(shared.pop("weight")),) * len(experts)
    models = [checkpoint(f"expert-{e}", each, 1000 + 24 * e) for e, each in enumerate(experts)]
    anchor = checkpoint("base", base)
    inputs = tuple(
        ModelInput(f"./expert-{e}", model.path, {} if weights is None else {"weight": weights[e]}, "")
        for e, model in enumerate(models)
    )
    recipe = Recipe(
        Location.local(Path("/r.yml")),
        "",
        operator_specs()[operator],
        ModelInput("./base", anchor.path, {}, ""),
        inputs,
        shared,
        None,
        None,
    )
    known = tuple({name: tensor_statistics(base[name], each[name]) for name in base} for each in experts)
    problem = PlanningProblem(
        operator=operator,
        recipe="the recipe",
        seed=1,
        block_elements=BLOCK,
        resolution=resolve(recipe, (anchor, *models)),
        models=(
            PlanningModel("./base", anchor),
            *(PlanningModel(each.text, model) for each, model in zip(inputs, models, strict=True)),
        ),
        statistics=known,
    )
    return Given(problem, base, experts)
