"""Hypothesis strategies for tensors with hard values and for merges of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, F32, F64, DType
from mergepipe.testing.oracle import MergeCase
from mergepipe.testing.rounding import decode, encode

FLOATS = (F64, F32, F16, BF16)
DELTA_OPERATORS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, -3e-40, 6e-8, -6e-8, 1.0, -1.0, 65504.0, 1e30, -1e30],
    np.float32,
)


@dataclass(frozen=True, slots=True)
class Family:
    """One tensor in a base and in experts, as stored elements and as float32 numbers."""

    base_dtype: DType
    expert_dtypes: tuple[DType, ...]
    base: NDArray[Any]
    experts: tuple[NDArray[Any], ...]

    @property
    def base_N(self) -> NDArray[np.float32]:
        return decode(self.base.tobytes(), self.base_dtype)

    @property
    def experts_EN(self) -> NDArray[np.float32]:
        rows = [decode(e.tobytes(), d) for e, d in zip(self.experts, self.expert_dtypes, strict=True)]
        return np.stack(rows) if rows else np.zeros((0, len(self.base)), np.float32)


def make_family(
    rng: np.random.Generator, n: int, base_dtype: DType, expert_dtypes: tuple[DType, ...], special_share: float
) -> Family:
    """A base, and experts near it: some elements are equal, some far off, `special_share` of them special."""
    base_N = _with_specials(rng, (rng.standard_normal(n) * 0.05).astype(np.float32), special_share)
    base = encode(base_N, base_dtype)
    base_N = decode(base.tobytes(), base_dtype)
    experts = []
    for dtype in expert_dtypes:
        step = 10.0 ** rng.uniform(-4, -1)
        with np.errstate(all="ignore"):
            moved_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
        moved_N = np.where(rng.random(n) < 0.2, base_N, moved_N)
        moved_N = np.where(rng.random(n) < 0.05, np.float32(2) * base_N, moved_N)
        experts.append(encode(_with_specials(rng, moved_N, special_share), dtype))
    return Family(base_dtype, expert_dtypes, base, tuple(experts))


def _with_specials(rng: np.random.Generator, values: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    return np.where(rng.random(len(values)) < share, rng.choice(SPECIAL, len(values)), values).astype(np.float32)


@st.composite
def families(draw: st.DrawFn, n_experts: int, largest: int = 5000) -> Family:
    """Tensors of any size, dtypes in any mix."""
    n = draw(st.one_of(st.integers(1, 70), st.integers(1, largest)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtypes = tuple(draw(st.sampled_from(FLOATS)) for _ in range(n_experts))
    return make_family(rng, n, draw(st.sampled_from(FLOATS)), dtypes, draw(st.sampled_from([0.0, 0.02, 0.5])))


_WEIGHTS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, 0.25]), st.floats(-2, 2).filter(lambda w: abs(w) > 1e-3))
_DENSITIES = st.one_of(st.sampled_from([1e-9, 0.2, 0.5, 1.0]), st.floats(0.001, 1.0))


@st.composite
def merge_cases(draw: st.DrawFn, operator: str | None = None) -> MergeCase:
    """Any operator with any parameters it takes."""
    name = operator or draw(st.sampled_from(DELTA_OPERATORS))
    n_experts = 1 if name == "slerp" else draw(st.integers(1, 5))
    weights = tuple(draw(_WEIGHTS) for _ in range(n_experts))
    base_weight = draw(st.sampled_from([0.0, 1.0, 0.3])) if name == "linear" else 0.0
    normalize = draw(st.booleans()) and abs(sum(weights) + base_weight) > 0.01
    return MergeCase(
        operator=name,
        weights=weights,
        densities=tuple(draw(_DENSITIES) for _ in range(n_experts)),
        base_weight=base_weight,
        normalize=normalize or name == "ties",
        rescale=draw(st.booleans()),
        lambda_=draw(st.sampled_from([1.0, 0.5, 0.0, -1.3])),
        t=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
    )
