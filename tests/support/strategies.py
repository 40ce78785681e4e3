"""Hypothesis strategies for tensors with hard values and for merges of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from mergepipe.core.blocks import BF16, F16, F32, F64
from mergepipe.testing import Family, make_family
from support.oracle import MergeCase

FLOATS = (F64, F32, F16, BF16)
DELTA_OPERATORS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")


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
