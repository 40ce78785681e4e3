"""Runs the operator of a case on one tensor in memory; elements come back in the dtypes of `ml_dtypes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mergepipe import testing
from mergepipe.operators.base import Operator, OperatorInput
from mergepipe.operators.registry import operator_named
from mergepipe.testing import StoredTensor
from support.oracle import MergeCase
from support.rounding import NUMPY_DTYPES


def operator_input(case: MergeCase, n_elements: int, stream_keys: Sequence[int] = ()) -> OperatorInput:
    """The case as the engine would pass it on."""
    experts: tuple[dict[str, float | bool], ...] = tuple(
        {"weight": w, "density": d} for w, d in zip(case.weights, case.densities, strict=True)
    )
    shared: dict[str, float | bool] = {
        "normalize": case.normalize, "lambda": case.lambda_, "rescale": case.rescale and case.is_random, "t": case.t
    }  # fmt: skip
    return OperatorInput(
        globals=shared,
        anchor={"weight": case.base_weight, "scale": case.scale},
        experts=experts,
        n_elements=n_elements,
        stream_keys=tuple(stream_keys),
    )


def merge_in_memory(
    case: MergeCase, tensor: StoredTensor, stream_keys: Sequence[int], cuts: Sequence[int], grains: Sequence[int] = ()
) -> NDArray[Any]:
    """Merge a whole tensor as the case says; see `mergepipe.testing.apply_operator`."""
    inputs = operator_input(case, tensor.n_elements, stream_keys)
    return apply_operator(operator_named(case.operator), inputs, tensor, cuts, grains)


def apply_operator(
    operator: Operator, inputs: OperatorInput, tensor: StoredTensor, cuts: Sequence[int], grains: Sequence[int] = ()
) -> NDArray[Any]:
    """As that of `mergepipe.testing`, with typed elements."""
    merged = testing.apply_operator(operator, inputs, tensor, cuts, grains)
    return merged.view(NUMPY_DTYPES[tensor.out_dtype.name])
