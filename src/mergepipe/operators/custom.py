"""A user's own merge rule: a Python function over numpy blocks, known to recipes by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import RawBlock
from mergepipe.errors import UnsupportedError
from mergepipe.operators.base import NOTHING_REDUCED, AllAlike, OperatorInput, Reduced, Scalar
from mergepipe.operators.registry import add_operator, has_operator, operator_specs
from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope

ENTRY_POINTS = "mergepipe.operators"
CHUNK_ELEMENTS = 1 << 16

Values = NDArray[np.float32]
Given = Mapping[str, "Scalar | NDArray[np.float64]"]
MergeFunction = Callable[[Values, Values, Given], Values]
"""`f(base_N, deltas_EN, parameters) -> merged_N`, all float32, element by element.

`deltas_EN` has a row for every expert of the recipe: one that is omitted or equal to the base is a row of zeros.
`parameters` has a number or flag for each global parameter, and an array with one entry per expert for each parameter
of a model.
"""


@dataclass(frozen=True, slots=True)
class CustomOperator(AllAlike):
    """The operator of a user's function. The function must work element by element: blocks are cut anywhere."""

    spec: OperatorSpec
    function: MergeFunction

    def block_function(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> CustomRule:
        named = [p.name for p in self.spec.parameters if p.scope is Scope.MODEL and not p.ignored]
        of_models = {
            name: np.array([float(p[name]) for p in inputs.experts])
            for name in named
            if all(name in p for p in inputs.experts)
        }
        return CustomRule(self.spec.name, self.function, {**inputs.globals, **of_models}, len(inputs.experts))


@dataclass(frozen=True, slots=True, eq=False)
class CustomRule:
    """Decodes a block, calls the function, checks and encodes what it returns. Memory: 256 KiB a model."""

    name: str
    function: MergeFunction
    parameters: Given
    n_experts: int

    def __call__(self, block: RawBlock) -> None:
        """Merge one block into `block.out`."""
        for skip in range(0, block.n_elements, CHUNK_ELEMENTS):
            self._merge(block.part(skip, min(CHUNK_ELEMENTS, block.n_elements - skip)))

    def _merge(self, block: RawBlock) -> None:
        from mergepipe.kernels.merge import decode_arrays, encode_array

        n = block.n_elements
        base_N, deltas_EN = np.empty(n, np.float32), np.zeros((self.n_experts, n), np.float32)
        decode_arrays(block, base_N, deltas_EN)
        merged_N = np.asarray(self.function(base_N, deltas_EN, self.parameters))
        if merged_N.dtype != np.float32 or merged_N.shape != (n,):
            returned = f"{merged_N.dtype} of shape {list(merged_N.shape)}"
            message = f"the function returned {returned}, float32 of shape [{n}] is needed"
            raise UnsupportedError.of("operator.unsupported", self.name, message, "return one float32 for each element")
        encode_array(block, np.ascontiguousarray(merged_N))


def operator(
    name: str,
    *,
    parameters: Sequence[ParameterSpec] = (),
    title: str = "",
    min_experts: int = 1,
    max_experts: int | None = None,
) -> Callable[[MergeFunction], CustomOperator]:
    """Make a function a merge method that recipes can name; its docstring's first line is its title.

    Raises:
        UnsupportedError: there is a merge method of that name.
    """

    def decorate(function: MergeFunction) -> CustomOperator:
        first_line = (function.__doc__ or name).strip().splitlines()[0]
        spec = OperatorSpec(
            name,
            title or first_line,
            f"{function.__module__}.{function.__qualname__}",
            BaseRole.REQUIRED,
            tuple(parameters),
            min_experts,
            max_experts,
        )
        made = CustomOperator(spec, function)
        add_operator(made)
        return made

    return decorate


def load_entry_points() -> tuple[str, ...]:
    """Register the operators that installed packages offer, in the order of their names; the names of those added.

    An entry point of the group `mergepipe.operators` names an `Operator`, or a module that makes some when imported.
    """
    from importlib.metadata import entry_points

    before = set(operator_specs())
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        loaded = point.load()
        if hasattr(loaded, "spec") and not has_operator(loaded.spec.name):
            add_operator(loaded)
    return tuple(name for name in operator_specs() if name not in before)


def parameter(name: str, help: str, *, default: float | bool | None = None, per_model: bool = False) -> ParameterSpec:
    """One parameter of a user's operator: a flag if the default is one; required if there is no default."""
    scope = Scope.MODEL if per_model else Scope.GLOBAL
    return ParameterSpec(name, scope, help, default=default, required=default is None)
