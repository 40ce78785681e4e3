"""Test the laws of every merge operator: a suite that authors of operators run on theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, DELTA_FLAG, F32, GRAIN_ELEMENTS, DType, RawBlock, Span
from mergepipe.engine.jobs import Reduction
from mergepipe.engine.staged_reduction import StagedReduction
from mergepipe.operators.base import BlockFunction, MagnitudeCut, Operator, OperatorInput, Reduced, Scalar
from mergepipe.operators.spec import Scope

# --- an operator's reductions and its block function on one tensor in memory, cut as a test wants it ---

MOST_LOOKS = 9


class StoredTensor:
    """The stored bytes of a family in one buffer, `gap` bytes apart so that any alignment occurs, and its blocks.

    With `is_delta` the stored elements of the experts are their deltas. `present` are the experts that are read.
    """

    def __init__(
        self,
        family: Family,
        out_dtype: DType,
        gap: int = 0,
        *,
        is_delta: bool = False,
        present: Sequence[int] | None = None,
    ) -> None:
        self.family = family
        self.out_dtype = out_dtype
        self.n_elements = len(family.base)
        everyone = range(len(family.experts))
        self._present_E = np.array(everyone if present is None else present, np.int64)
        self._codes_E = np.array([dtype.kernel_code for dtype in family.expert_dtypes], np.int64)
        if is_delta:
            self._codes_E |= DELTA_FLAG
        position, self._offsets = gap, []
        for stored in (family.base, *family.experts):
            self._offsets.append(position)
            position += stored.nbytes + gap
        self._raw = np.full(position, 0xEE, np.uint8)
        for offset, stored in zip(self._offsets, (family.base, *family.experts), strict=True):
            self._raw[offset : offset + stored.nbytes] = stored.view(np.uint8)
        self._out = np.full(self.n_elements * out_dtype.itemsize, 0xEE, np.uint8)

    @property
    def result(self) -> NDArray[Any]:
        """The output's elements, bfloat16 as bits; see `STORED_DTYPES`."""
        return np.frombuffer(self._out.tobytes(), STORED_DTYPES[self.out_dtype.name])

    def block(self, span: Span) -> RawBlock:
        """The block of the elements of `span`."""
        family = self.family
        sizes = [dtype.itemsize for dtype in family.expert_dtypes]
        offsets = [offset + span.start * size for offset, size in zip(self._offsets[1:], sizes, strict=True)]
        return RawBlock(
            raw=self._raw,
            base_offset=self._offsets[0] + span.start * family.base_dtype.itemsize,
            base_code=family.base_dtype.kernel_code,
            present_E=self._present_E,
            counted_E=self._present_E,
            offsets_E=np.array(offsets, np.int64)[self._present_E],
            codes_E=self._codes_E[self._present_E],
            first_element=span.start,
            n_elements=span.n_elements,
            out=self._out,
            out_offset=span.start * self.out_dtype.itemsize,
            out_code=self.out_dtype.kernel_code,
            rounding_key=np.uint64(0),
            sums_G2=np.empty((0, 2)),
            first_grain=span.start // GRAIN_ELEMENTS,
        )

    def spans(self, cuts: Sequence[int]) -> list[Span]:
        """The tensor cut at `cuts`."""
        edges = sorted({0, self.n_elements, *(cut for cut in cuts if 0 < cut < self.n_elements)})
        return [Span(start, stop) for start, stop in pairwise(edges)]


def run_reduction(reduction: Reduction, blocks: Sequence[RawBlock], sample: Sequence[RawBlock] = ()) -> Reduced:
    """Drive a reduction as the engine does; with a `sample`, as it does where the tensor is not kept in memory."""
    if sample:
        reduction.survey(sample)
        reduction.narrow()
    reduction.accumulate(blocks)
    looks = 0
    while not reduction.finish():
        looks += 1
        if looks > MOST_LOOKS:
            raise AssertionError("a reduction that does not come to an end")
        reduction.refine(blocks)
    return reduction.result()


def apply_operator(
    operator: Operator, inputs: OperatorInput, tensor: StoredTensor, cuts: Sequence[int], grains: Sequence[int] = ()
) -> NDArray[Any]:
    """Merge a whole tensor block by block, last block first; reductions see it cut at `grains`.

    Cuts that the operator does not allow are moved to the next lower one that it does.
    """
    step = operator.granularity(inputs)
    cuts, grains = [cut // step * step for cut in cuts], [grain // step * step for grain in grains]
    staged = StagedReduction(operator, inputs)
    if staged.is_open:
        run_reduction(staged, [tensor.block(span) for span in reversed(tensor.spans(grains))])
    function = operator.block_function(inputs, staged.result())
    for span in reversed(tensor.spans(cuts)):
        function(tensor.block(span))
    return tensor.result


# --- the laws ---

SHAPES = ((1,), (77,), (3, 20_000), (130, 300))
N_THREADS = 4
COMBINED_ELEMENTS = 10_000  # of fewer elements any rule may look like a sum
RELATIVE_ERROR = 1e-5  # some roundings to float32
_STREAM_KEYS = (11, 12, 13, 14, 15, 16, 17, 18)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One tensor, and what the operator is told of it."""

    shape: tuple[int, ...]
    family: Family
    inputs: OperatorInput


def check_operator(
    operator: Operator,
    parameters: Mapping[str, Scalar] | None = None,
    model_parameters: Sequence[Mapping[str, Scalar]] | None = None,
) -> None:
    """Run the whole suite. Parameters without a default must be given; by default each is 0.5.

    Raises:
        AssertionError: the operator breaks the contract; the message says which law, and for which tensor.
    """
    for seed, shape in enumerate(SHAPES):
        setting = _setting(operator, shape, seed, dict(parameters or {}), model_parameters)
        _check_cuts(operator, setting)
        _check_threads(operator, setting)
        _check_omission(operator, setting)
        _check_numbers(operator, setting)
        _check_influence(operator, setting)
    _check_empty(operator, dict(parameters or {}), model_parameters)


def _setting(
    operator: Operator,
    shape: tuple[int, ...],
    seed: int,
    shared: Mapping[str, Scalar],
    models: Sequence[Mapping[str, Scalar]] | None,
    special_share: float = 0.0,
) -> _Setting:
    n_experts = len(models) if models else max(1, operator.spec.min_experts, min(3, operator.spec.max_experts or 3))
    n = int(np.prod(shape))
    defaults: dict[Scope, dict[str, Scalar]] = {scope: {} for scope in Scope}
    for p in operator.spec.parameters:
        defaults[p.scope][p.name] = 0.5 if p.default is None else p.default
    model_parameters = models or [{}] * n_experts
    inputs = OperatorInput(
        {**defaults[Scope.GLOBAL], **shared},
        {},
        tuple({**defaults[Scope.MODEL], **parameters} for parameters in model_parameters),
        n,
        _STREAM_KEYS[:n_experts],
        shape=shape,
    )
    return _Setting(shape, make_family(np.random.default_rng(seed), n, F32, (F32,) * n_experts, special_share), inputs)


def _check_cuts(operator: Operator, setting: _Setting) -> None:
    n = setting.inputs.n_elements
    whole = _merge(operator, setting)
    parts = _merge(operator, setting, [1, 7, n // 3, n // 2, n - 1], [GRAIN_ELEMENTS, 2 * GRAIN_ELEMENTS])
    _same(whole, parts, operator, setting, "the result must not depend on how the tensor is cut")
    _same(whole, _merge(operator, setting), operator, setting, "the same inputs must give the same result")


def _check_threads(operator: Operator, setting: _Setting) -> None:
    tensor = StoredTensor(setting.family, BF16)
    step = operator.granularity(setting.inputs)
    cuts = [cut // step * step for cut in range(0, setting.inputs.n_elements, max(1, setting.inputs.n_elements // 16))]
    function = _block_function(operator, setting, tensor)
    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(function, [tensor.block(span) for span in tensor.spans(cuts)]))
    law = "blocks must be independent, so that threads can merge them"
    _same(_merge(operator, setting), tensor.result, operator, setting, law)


def _check_omission(operator: Operator, setting: _Setting) -> None:
    family = setting.family
    tensor = StoredTensor(family, BF16, present=range(1, len(family.experts)))
    omitted = apply_operator(operator, setting.inputs, tensor, [])
    unchanged = Family(family.base_dtype, family.expert_dtypes, family.base, (family.base, *family.experts[1:]))
    as_base = apply_operator(operator, setting.inputs, StoredTensor(unchanged, BF16), [])
    _same(as_base, omitted, operator, setting, "an omitted expert must count as one that equals the base")


def _check_numbers(operator: Operator, setting: _Setting) -> None:
    """NaN, infinities, zeros of both signs: any result will do, the same for any cuts."""
    rng = np.random.default_rng(9)
    dtypes = setting.family.expert_dtypes
    hard = _Setting(setting.shape, make_family(rng, setting.inputs.n_elements, F32, dtypes, 0.2), setting.inputs)
    with np.errstate(all="ignore"):
        whole, parts = _merge(operator, hard), _merge(operator, hard, [5, hard.inputs.n_elements // 2])
    _same(whole, parts, operator, hard, "NaN and infinities must not make the result depend on cuts")


def _check_influence(operator: Operator, setting: _Setting) -> None:
    """Check that the influence is told of every expert and is true, and that what trims asks for a cut.

    What planners take from it is a ratio of experts: where the merged delta is a fixed combination of the experts'
    deltas, the coefficients must be those of the combination, times one positive number.
    """
    influence, n_experts = operator.influence(setting.inputs, None), len(setting.inputs.experts)
    name = operator.spec.name
    shapes = {influence.coefficients_E.shape, influence.energy_factor_E.shape}
    assert shapes == {(n_experts,)}, f"{name}: the influence must have one entry for each of {n_experts} experts"
    if influence.trims:
        request = operator.reduction(setting.inputs)
        law = "an operator that trims must ask for a magnitude cut, or nothing"
        is_cut = isinstance(request, MagnitudeCut) and not request.dropped_E
        assert request is None or is_cut, f"{name}: {law}"
    if influence.is_known and setting.inputs.n_elements >= COMBINED_ELEMENTS:
        measured_E = _combination(operator, setting)
        claimed_E = influence.coefficients_E * np.sqrt(influence.energy_factor_E)
        is_true = measured_E is None or np.allclose(_direction(claimed_E), _direction(measured_E), atol=RELATIVE_ERROR)
        law = "the influence must be that of the experts on the result"
        assert is_true, f"{name}: {law}: it is in the ratio {measured_E}, {claimed_E} is claimed"


def _combination(operator: Operator, setting: _Setting) -> NDArray[np.float64] | None:
    """Return the coefficients if the merged delta is a fixed combination of the experts' deltas; None if it is not."""
    family, experts = setting.family, range(len(setting.inputs.experts))
    deltas_EN = (family.experts_EN - family.base_N).astype(np.float64)

    def merged(present: Sequence[int]) -> NDArray[np.float64]:
        return apply_operator(operator, setting.inputs, StoredTensor(family, F32, present=present), []).astype(float)

    unchanged_N = merged(())
    alone_EN = np.array([merged([e]) - unchanged_N for e in experts]).reshape(deltas_EN.shape)
    coefficients_E = (alone_EN * deltas_EN).sum(axis=1) / (deltas_EN**2).sum(axis=1)
    combined_EN = coefficients_E[:, None] * deltas_EN
    sum_N = unchanged_N + combined_EN.sum(axis=0)
    errors_N = np.abs(alone_EN - combined_EN).sum(axis=0) + np.abs(merged(experts) - sum_N)
    sizes_N = np.abs(unchanged_N) + np.abs(combined_EN).sum(axis=0)
    return coefficients_E if (errors_N <= RELATIVE_ERROR * sizes_N).all() else None


def _direction(values_E: NDArray[np.float64]) -> NDArray[np.float64]:
    return values_E / (np.linalg.norm(values_E) or 1.0)


def _check_empty(
    operator: Operator, shared: Mapping[str, Scalar], models: Sequence[Mapping[str, Scalar]] | None
) -> None:
    """The function of a tensor made for other blocks is never called on none, and may be made for it."""
    setting = _setting(operator, (0,), 0, shared, models)
    assert len(_merge(operator, setting)) == 0, f"{operator.spec.name}: an empty tensor must stay empty"


def _block_function(operator: Operator, setting: _Setting, tensor: StoredTensor) -> BlockFunction:
    staged = StagedReduction(operator, setting.inputs)
    if staged.is_open:
        run_reduction(staged, [tensor.block(span) for span in tensor.spans([])])
    return operator.block_function(setting.inputs, staged.result())


def _merge(operator: Operator, setting: _Setting, cuts: Sequence[int] = (), grains: Sequence[int] = ()) -> NDArray[Any]:
    return apply_operator(operator, setting.inputs, StoredTensor(setting.family, BF16), cuts, grains)


def _same(first: NDArray[Any], second: NDArray[Any], operator: Operator, setting: _Setting, law: str) -> None:
    differing = np.flatnonzero(first.view(np.uint16) != second.view(np.uint16))
    if len(differing):
        where = f"element {int(differing[0])} of {list(setting.shape)}"
        raise AssertionError(f"{operator.spec.name}: {law}: {where} is {first[differing[0]]} or {second[differing[0]]}")


STORED_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),  # numpy has none: the upper half of a float32
}
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, -3e-40, 6e-8, -6e-8, 1.0, -1.0, 65504.0, 1e30, -1e30],
    np.float32,
)
_QUIET_NAN = np.uint32(0x7FC0)


@dataclass(frozen=True, slots=True)
class Family:
    """One tensor in a base and in experts, as stored elements and as float32 numbers."""

    base_dtype: DType
    expert_dtypes: tuple[DType, ...]
    base: NDArray[Any]
    experts: tuple[NDArray[Any], ...]

    @property
    def base_N(self) -> NDArray[np.float32]:
        return decode_elements(self.base, self.base_dtype)

    @property
    def experts_EN(self) -> NDArray[np.float32]:
        rows = [decode_elements(e, d) for e, d in zip(self.experts, self.expert_dtypes, strict=True)]
        return np.stack(rows) if rows else np.zeros((0, len(self.base)), np.float32)


def make_family(
    rng: np.random.Generator, n: int, base_dtype: DType, expert_dtypes: tuple[DType, ...], special_share: float
) -> Family:
    """A base, and experts near it: some elements are equal, some far off, `special_share` of them special."""
    base_N = _with_specials(rng, (rng.standard_normal(n) * 0.05).astype(np.float32), special_share)
    base = encode_elements(base_N, base_dtype)
    base_N = decode_elements(base, base_dtype)
    experts = []
    for dtype in expert_dtypes:
        step = 10.0 ** rng.uniform(-4, -1)
        with np.errstate(all="ignore"):
            moved_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
        moved_N = np.where(rng.random(n) < 0.2, base_N, moved_N)
        moved_N = np.where(rng.random(n) < 0.05, np.float32(2) * base_N, moved_N)
        experts.append(encode_elements(_with_specials(rng, moved_N, special_share), dtype))
    return Family(base_dtype, expert_dtypes, base, tuple(experts))


def _with_specials(rng: np.random.Generator, values: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    return np.where(rng.random(len(values)) < share, rng.choice(SPECIAL, len(values)), values).astype(np.float32)


def decode_elements(stored: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """The stored elements of `dtype` as float32."""
    elements = np.frombuffer(stored.tobytes(), STORED_DTYPES[dtype.name])
    if dtype.name == "BF16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return elements.astype(np.float32)


def encode_elements(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Float32 numbers rounded to nearest even into `dtype`; NaN becomes the quiet one of its sign in bfloat16."""
    if dtype.name != "BF16":
        with np.errstate(all="ignore"):
            return values.astype(STORED_DTYPES[dtype.name])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    nan = (upper & np.uint32(0x8000)) | _QUIET_NAN
    return np.where(np.isnan(values), nan, rounded).astype(np.uint16)
