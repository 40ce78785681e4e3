"""Families with frozen, shared and odd blocks for merges under a budget, and what may be asked of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe import Plan, run
from mergepipe.catalog.statistics_file import parse_statistics, statistics_folder
from mergepipe.core.blocks import BF16, F16, F32, F64, BlockGrid, DType
from mergepipe.errors import LimitError
from mergepipe.options import RunOptions
from mergepipe.planning.plan import PlannedTensor
from support.disk_families import FLOAT_NAMES, Model
from support.rounding import decode, encode

GRAIN = 16 * 1024
_SIZES = (0, 1, 7, 4097, GRAIN - 1, GRAIN, GRAIN + 1, 3 * GRAIN, 70_001)
_FLOATS = (BF16, F32, F16, F64)


@dataclass(frozen=True, slots=True)
class TensorPlanOf:
    """How to make one tensor: its shape, the dtypes of base and experts, and the shares of blocks that coincide.

    `frozen_share` of an expert's blocks equal the base's, `twin_share` equal the first expert's bytes. The standard
    deviation of its deltas is between ten to the `delta_powers`; that of the base is 0.05.
    """

    name: str
    shape: tuple[int, ...]
    base_dtype: DType
    expert_dtypes: tuple[DType, ...]
    frozen_share: float = 0.0
    twin_share: float = 0.0
    delta_powers: tuple[float, float] = (-3, -1)


AWKWARD = (
    TensorPlanOf("layers.0.wide", (5 * GRAIN + 37,), BF16, (BF16,)),
    TensorPlanOf("layers.0.mixed", (3 * GRAIN + 1,), BF16, (F32, BF16, F16)),
    TensorPlanOf("layers.1.frozen", (3 * GRAIN + 5,), BF16, (BF16,), frozen_share=0.6),
    TensorPlanOf("layers.1.twins", (4 * GRAIN - 3,), F32, (F32,), twin_share=0.7),
    TensorPlanOf("layers.2.both", (GRAIN // 16, 50), F16, (F16,), frozen_share=0.3, twin_share=0.5),
    TensorPlanOf("layers.2.double", (GRAIN + 9,), F64, (F64, F32)),
    TensorPlanOf("layers.3.norm", (333,), F32, (F32, BF16)),
    TensorPlanOf("layers.3.one", (1,), BF16, (F32,)),
    TensorPlanOf("scalar", (), F32, (BF16, F32)),
    TensorPlanOf("empty", (0, 5), BF16, (F32,)),
)


def make_budget_models(n_experts: int, seed: int = 0, plans: Sequence[TensorPlanOf] = AWKWARD) -> tuple[Model, ...]:
    """The tensors of a base and of experts near it, all finite, whose delta sizes differ between blocks."""
    rng = np.random.default_rng(seed)
    models: list[dict[str, NDArray[Any]]] = [{} for _ in range(n_experts + 1)]
    for plan in plans:
        for model, stored in zip(models, _make_tensor(rng, plan, n_experts), strict=True):
            model[plan.name] = stored.reshape(plan.shape)
    for e, model in enumerate(models):
        model["buffer.ids"] = np.arange(7, dtype=np.int64) + e
    return tuple(models)


def _make_tensor(rng: np.random.Generator, plan: TensorPlanOf, n_experts: int) -> list[NDArray[Any]]:
    n = int(np.prod(plan.shape))
    base = encode((rng.standard_normal(n) * 0.05).astype(np.float32), plan.base_dtype)
    base_N = decode(base.tobytes(), plan.base_dtype)
    experts: list[NDArray[Any]] = []
    for e in range(n_experts):
        dtype = plan.expert_dtypes[e % len(plan.expert_dtypes)]
        values_N = base_N + (rng.standard_normal(n) * 10.0 ** rng.uniform(*plan.delta_powers)).astype(np.float32)
        first_N = decode(experts[0].tobytes(), plan.expert_dtypes[0]) if experts else values_N
        for span in BlockGrid(n, GRAIN).spans():
            inside = slice(span.start, span.stop)
            lot = rng.random()
            if lot < plan.frozen_share:
                values_N[inside] = base_N[inside]
            elif lot < plan.frozen_share + plan.twin_share:
                values_N[inside] = first_N[inside]
            else:
                values_N[inside] += ((values_N[inside] - base_N[inside]) * rng.uniform(0, 4)).astype(np.float32)
        experts.append(encode(values_N, dtype))
    return [base, *experts]


@st.composite
def tensor_plans(draw: st.DrawFn, n_experts: int) -> tuple[TensorPlanOf, ...]:
    """A few tensors of odd sizes, dtypes in any mix, any share of blocks frozen or shared."""
    plans = []
    for i in range(draw(st.integers(1, 5))):
        size = draw(st.one_of(st.sampled_from(_SIZES), st.integers(1, 40_000)))
        dtypes = tuple(draw(st.sampled_from(_FLOATS)) for _ in range(n_experts))
        if draw(st.booleans()):
            dtypes = dtypes[:1] * n_experts
        frozen, twin = draw(st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.0, 0.6), (0.3, 0.4), (1.0, 0.0), (0.0, 1.0)]))
        base_dtype = draw(st.sampled_from(_FLOATS))
        plans.append(TensorPlanOf(f"layers.{i}.weight", (size,), base_dtype, dtypes, frozen, twin))
    return tuple(plans)


def as_float32(model: Model, name: str) -> NDArray[np.float32]:
    """A stored tensor as flat float32 numbers."""
    stored = model[name]
    return decode(stored.tobytes(), FLOAT_NAMES[stored.dtype.name])


def smallest_memory(plan: Plan, out: Path) -> int:
    """The least `memory_bytes` that the engine accepts for this plan, as its own refusal says."""
    try:
        run(plan, out, options=RunOptions(memory_bytes=1, catalog=False))
    except LimitError as refusal:
        found = re.search(r"at least (\d+) are needed", str(refusal))
        if found is None:
            raise
        return int(found.group(1))
    raise AssertionError("a merge in one byte of memory")


def forget_statistics(home: Path, rng: np.random.Generator, share: float) -> None:
    """Drop about `share` of the tensors from the files of statistics under `home`."""
    for path in sorted(statistics_folder(home).glob("*")):
        file = parse_statistics(path.read_bytes(), path)
        kept = {name: statistics for name, statistics in file.tensors.items() if rng.random() >= share}
        path.write_bytes(replace(file, tensors=kept).to_bytes())


def planned_tensor(plan: Plan, name: str) -> PlannedTensor:
    """The tensor of that name."""
    return next(tensor for tensor in plan.tensors if tensor.name == name)
