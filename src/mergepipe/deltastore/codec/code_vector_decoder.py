"""Decode the codes of BANDS with AVX-512, both stages of symbols at once, 32 states at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.element_codes import BODY_SYMBOLS, FIRST_BODY_CODE, HEAD_SYMBOLS
from mergepipe.deltastore.codec.llvm_vectors import (
    I8,
    I16,
    I32,
    I64,
    array_pointers,
    call_intrinsic,
    constant_vector,
    core,
    has_features,
    load_vector,
    store_vector,
)
from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL, Bits16
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, intrinsic, kernel

ROW = 32
"""Contexts of a row of starts, of which `SKIPPED` is the last in use."""
BODY_ROW = HEAD_SYMBOLS - 1
"""The first row of the body stage."""
N_STARTS = ROW * (BODY_ROW + BODY_SYMBOLS - 1)
"""Length of a table of starts: a row for each symbol but the first of each stage."""

_HALF = ROW // 2
_V8, _V16 = (ir.VectorType(scalar, ROW) for scalar in (I8, I16))
_STATES = ir.VectorType(I32, _HALF)
_LANES_OF_ROW = ir.VectorType(I32, ROW)
_GROUP = 4  # lanes of 16 bits that stay side by side when 32-bit lanes are packed and unpacked
_PACKED_ORDER = [_GROUP * (g // 2) + _HALF * (g % 2) + lane for g in range(ROW // _GROUP) for lane in range(_GROUP)]
_NATURAL_ORDER = [_PACKED_ORDER.index(lane) for lane in range(ROW)]


def has_vector_decoder() -> bool:
    """Whether this machine has the instructions of `decode_codes_vector`."""
    return has_features("avx512bw", "avx512vl", "avx512vbmi2")


@kernel
def fill_starts(frequencies: Bits32, context: int, first_row: int, starts: Bits16) -> None:
    """Write where the ranges of a stage's symbols start in one context, from symbol 1 on; `TOTAL` without elements.

    `first_row` is 0 for the head stage, `BODY_ROW` for the body stage.
    """
    start, total = np.uint32(0), np.uint32(0)
    for symbol in range(len(frequencies)):
        total += frequencies[symbol]
    for symbol in range(len(frequencies) - 1):
        start += frequencies[symbol]
        starts[(first_row + symbol) * ROW + context] = start if total else np.uint32(TOTAL)


def _constant(value: int) -> Any:
    return constant_vector(value, _V16)


def _reordered(builder: Any, lanes: Any, order: list[int]) -> Any:
    """LLVM: the 16-bit lanes in another order."""
    return builder.shuffle_vector(lanes, lanes, ir.Constant(_LANES_OF_ROW, order))


def _unpacked(builder: Any, lanes: Any, half: int) -> Any:
    """LLVM: half of the lanes as 32-bit lanes: those of one vector of states."""
    zero = ROW
    order = [
        index
        for group in range(half, ROW // _GROUP, 2)
        for lane in range(_GROUP)
        for index in (_GROUP * group + lane, zero)
    ]
    interleaved = builder.shuffle_vector(lanes, _constant(0), ir.Constant(_LANES_OF_ROW, order))
    return builder.bitcast(interleaved, _STATES)


class _Range:
    """LLVM: narrow the ranges of slots down to those of symbols, a comparison with starts at a time."""

    def __init__(self, builder: Any, slots: Any) -> None:
        self._builder, self._slots = builder, slots
        self.start, self.stop = _constant(0), _constant(TOTAL)

    def is_past(self, starts: Any) -> Any:
        """The mask of the slots that are not below some starts, which become a bound of their ranges."""
        mask = self._builder.icmp_unsigned(">=", self._slots, starts)
        self.start = self._builder.select(mask, starts, self.start)
        self.stop = self._builder.select(mask, self.stop, starts)
        return mask


def _find_head(builder: Any, rows: list[Any], contexts: Any, slots: Any) -> tuple[Any, _Range]:
    """LLVM: the symbols of slots in the head stage, and their ranges."""
    ranges, symbols = _Range(builder, slots), _constant(0)
    starts = [call_intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", _V16, row, contexts) for row in rows]
    masks = []
    for symbol, symbol_starts in enumerate(starts, 1):
        masks.append(builder.icmp_unsigned(">=", slots, symbol_starts))
        ranges.start = builder.select(masks[-1], symbol_starts, ranges.start)
        symbols = builder.select(masks[-1], _constant(symbol), symbols)
    for mask, symbol_starts in zip(reversed(masks), reversed(starts), strict=True):
        ranges.stop = builder.select(mask, ranges.stop, symbol_starts)
    return symbols, ranges


def _find_body(builder: Any, rows: list[Any], contexts: Any, slots: Any) -> tuple[Any, _Range]:
    """LLVM: the codes of slots in the body stage, and their ranges, by halving the symbols four times."""
    ranges = _Range(builder, slots)

    def one_of(low: int, high: int, indices: Any) -> Any:
        """The starts of one of two symbols: of `high` where `indices` have the bit above the context's."""
        name = "llvm.x86.avx512.vpermi2var.hi.512"
        return call_intrinsic(builder, name, _V16, rows[low - 1], indices, rows[high - 1])

    def indices_for(mask: Any) -> Any:
        return builder.select(mask, builder.or_(contexts, _constant(ROW)), contexts)

    is_past8 = ranges.is_past(call_intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", _V16, rows[7], contexts))
    is_past4 = ranges.is_past(one_of(4, 12, indices_for(is_past8)))
    indices = indices_for(is_past4)
    is_past2 = ranges.is_past(builder.select(is_past8, one_of(10, 14, indices), one_of(2, 6, indices)))
    indices = indices_for(is_past2)
    below = builder.select(is_past4, one_of(5, 7, indices), one_of(1, 3, indices))
    above = builder.select(is_past4, one_of(13, 15, indices), one_of(9, 11, indices))
    is_past1 = ranges.is_past(builder.select(is_past8, above, below))
    codes = _constant(FIRST_BODY_CODE)
    for mask, step in ((is_past8, 8), (is_past4, 4), (is_past2, 2), (is_past1, 1)):
        codes = builder.select(mask, builder.add(codes, _constant(step)), codes)
    return codes, ranges


class _Stage:
    """LLVM: the states of one stage, and its position in its words."""

    def __init__(self, builder: Any, stage: int, stored: Any, positions: Any, states: Any) -> None:
        self._builder = builder
        alloca = core.cgutils.alloca_once_value
        self._first = builder.gep(positions, [I64(stage)])
        self._words = builder.bitcast(builder.gep(stored, [builder.load(self._first)]), I16.as_pointer())
        self._position = alloca(builder, I64(0))
        self._places = [I64(stage * LANES + lane) for lane in range(0, LANES, _HALF)]
        self._stored_states = states
        self._states = [alloca(builder, load_vector(builder, states, place, _STATES)) for place in self._places]

    def slots(self, half: int) -> Any:
        """The slots of 32 states, in packed order."""
        slots = [
            self._builder.and_(self._builder.load(state), constant_vector(TOTAL - 1, _STATES))
            for state in self._states[2 * half : 2 * half + 2]
        ]
        return call_intrinsic(self._builder, "llvm.x86.avx512.packusdw.512", _V16, *slots)

    def advance(self, half: int, slots: Any, ranges: _Range) -> None:
        """Take the symbols out of 32 states, and refill low ones with the next words."""
        builder = self._builder
        frequencies, offsets = builder.sub(ranges.stop, ranges.start), builder.sub(slots, ranges.start)
        variables, states, masks = self._states[2 * half : 2 * half + 2], [], []
        for part, variable in enumerate(variables):
            quotient = builder.lshr(builder.load(variable), constant_vector(PRECISION_BITS, _STATES))
            product = builder.mul(_unpacked(builder, frequencies, part), quotient)
            states.append(builder.add(product, _unpacked(builder, offsets, part)))
            masks.append(builder.icmp_unsigned("<", states[-1], constant_vector(LOWEST_STATE, _STATES)))
        is_low = builder.shuffle_vector(*masks, ir.Constant(_LANES_OF_ROW, list(range(ROW))))
        position = builder.load(self._position)
        words = call_intrinsic(
            builder, "llvm.x86.avx512.mask.expand.v32i16", _V16,
            load_vector(builder, self._words, position, _V16), _constant(0), is_low,
        )  # fmt: skip
        for part, (variable, state, mask) in enumerate(zip(variables, states, masks, strict=True)):
            lanes = ir.Constant(ir.VectorType(I32, _HALF), list(range(part * _HALF, (part + 1) * _HALF)))
            words_of_part = builder.zext(builder.shuffle_vector(words, words, lanes), _STATES)
            refilled = builder.or_(builder.shl(state, constant_vector(16, _STATES)), words_of_part)
            builder.store(builder.select(mask, refilled, state), variable)
        count = builder.zext(builder.ctpop(builder.bitcast(is_low, I32)), I64)
        builder.store(builder.add(position, count), self._position)

    def finish(self) -> None:
        """Store states and position."""
        builder = self._builder
        for place, variable in zip(self._places, self._states, strict=True):
            store_vector(builder, builder.load(variable), self._stored_states, place)
        used_bytes = builder.shl(builder.load(self._position), I64(1))
        builder.store(builder.add(builder.load(self._first), used_bytes), self._first)


def _make_rounds(*, has_body: bool) -> Callable[..., Any]:
    """Make the intrinsic that decodes rounds of 64 elements, of the head stage alone or of both."""

    def rounds(
        _typing: Any, stored: Any, positions: Any, states: Any, contexts: Any, n: Any, starts: Any, codes: Any
    ) -> tuple[Any, Callable[..., Any]]:
        signature = core.types.void(stored, positions, states, contexts, n, starts, codes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if not has_vector_decoder():
                return context.get_dummy_value()
            stored_pointer, positions_pointer, states_pointer, contexts_pointer, n, starts_pointer, codes_pointer = (
                array_pointers(context, builder, signature, arguments)
            )
            stages = [
                _Stage(builder, stage, stored_pointer, positions_pointer, states_pointer)
                for stage in range(1 + has_body)
            ]
            n_rows = N_STARTS // ROW if has_body else BODY_ROW
            rows = [load_vector(builder, starts_pointer, I64(row * ROW), _V16) for row in range(n_rows)]
            with core.cgutils.for_range_slice(builder, I64(0), n, I64(LANES), I64) as (first, _):
                for half in range(LANES // ROW):
                    element = builder.add(first, I64(half * ROW))
                    element_contexts = builder.zext(load_vector(builder, contexts_pointer, element, _V8), _V16)
                    element_contexts = _reordered(builder, element_contexts, _PACKED_ORDER)
                    element_codes = _decode_half(builder, stages, half, rows, element_contexts)
                    stored_codes = builder.trunc(_reordered(builder, element_codes, _NATURAL_ORDER), _V8)
                    store_vector(builder, stored_codes, codes_pointer, element)
            for stage in stages:
                stage.finish()
            return context.get_dummy_value()

        return signature, generate

    return rounds


def _decode_half(builder: Any, stages: list[_Stage], half: int, rows: list[Any], contexts: Any) -> Any:
    """LLVM: the codes of 32 elements, in packed order; 0 for those that are skipped."""
    slots = stages[0].slots(half)
    codes, ranges = _find_head(builder, rows[:BODY_ROW], contexts, slots)
    stages[0].advance(half, slots, ranges)
    if len(stages) == 1:
        return codes
    is_in_body = builder.icmp_unsigned("==", codes, _constant(0))
    slots = stages[1].slots(half)
    body_contexts = builder.select(is_in_body, contexts, _constant(SKIPPED))
    body_codes, ranges = _find_body(builder, rows[BODY_ROW:], body_contexts, slots)
    stages[1].advance(half, slots, ranges)
    codes = builder.select(is_in_body, body_codes, codes)
    return builder.select(builder.icmp_unsigned("<", contexts, _constant(SKIPPED)), codes, _constant(0))


_decode_head_rounds: Any = intrinsic(_make_rounds(has_body=False))
_decode_all_rounds: Any = intrinsic(_make_rounds(has_body=True))


@kernel
def decode_codes_vector(
    stored: Bytes,
    positions: Bits64,
    states: Bits32,
    contexts: Bytes,
    n: int,
    starts: Bits16,
    has_body: bool,
    codes: Bytes,
) -> None:
    """Decode the codes of `n` (padded) elements, only where `has_vector_decoder()`; skipped ones get 0.

    `positions` are the offsets in `stored` of the next words of head and body, `states` those of both; all change.
    `starts` are filled by `fill_starts`. Without the body stage codes are head symbols. `stored` is readable for
    `n + 32` words from both positions on.
    """
    if has_body:
        _decode_all_rounds(stored, positions, states, contexts, n, starts, codes)
    else:
        _decode_head_rounds(stored, positions, states, contexts, n, starts, codes)
