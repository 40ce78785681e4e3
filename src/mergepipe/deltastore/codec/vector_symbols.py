"""Encode and decode the codes of BANDS with AVX-512, both stages of symbols at once, as LLVM code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.element_codes import BODY_SYMBOLS, FIRST_BODY_CODE, HEAD_SYMBOLS
from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL, Bits16
from mergepipe.deltastore.codec.vectors import (
    I1,
    I8,
    I16,
    I32,
    I64,
    array_pointers,
    broadcast,
    call_intrinsic,
    constant_vector,
    core,
    has_features,
    load_vector,
    store_vector,
)
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, intrinsic, kernel

# --- encode the rANS symbols of both stages of a block at once, 16 states at a time with AVX-512 ---


_WIDTH = 16
_VECTORS = LANES // _WIDTH
_OCTETS, _HALVES, _V32 = (ir.VectorType(scalar, _WIDTH) for scalar in (I8, I16, I32))
_VFLOAT = ir.VectorType(ir.FloatType(), _WIDTH)
_MASK = ir.VectorType(I1, _WIDTH)
_ROUND = ir.VectorType(I8, LANES)

# A table entry has three bytes: the frequency less 1, and from this bit on the start of the symbol's range.
_START_BITS = 11
_PLANES = 3
_HEAD_BITS, _BODY_BITS = 3, 4
_HEAD_ROWS, _BODY_ROWS = 2, 4
HEAD_PLANE_BYTES, BODY_PLANE_BYTES = _HEAD_ROWS * LANES, _BODY_ROWS * LANES
FREQUENCY_PLANES_BYTES = _PLANES * (HEAD_PLANE_BYTES + BODY_PLANE_BYTES)
_SKIPPED_ENTRY = TOTAL - 1  # entry of skipped elements: the whole range, which keeps the state unchanged
_PERMUTE_TWO_REGISTERS = "llvm.x86.avx512.vpermi2var.qi.512"  # takes the low seven bits of an index

HAS_VECTOR_ENCODER = has_features("avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2")
"""Whether this machine has the instructions of `encode_codes_vector`."""


@kernel
def _fill_stage_planes(frequencies: Bits16, n_symbols: int, bits: int, planes: Bytes) -> None:
    room = len(planes) // _PLANES
    for context in range(len(frequencies) // n_symbols):
        start = 0
        for symbol in range(n_symbols):
            frequency = int(frequencies[context * n_symbols + symbol])
            entry = np.uint32(max(frequency - 1, 0) | (start << _START_BITS))
            for plane in range(_PLANES):
                at = plane * room + (context << bits) + symbol
                planes[at] = np.uint8((entry >> np.uint32(8 * plane)) & np.uint32(0xFF))
            start += frequency


@kernel
def fill_frequency_planes(head: Bits16, body: Bits16, planes: Bytes) -> None:
    """Fill the tables of `encode_codes_vector` (`FREQUENCY_PLANES_BYTES`) from frequencies by context and symbol."""
    first = _PLANES * HEAD_PLANE_BYTES
    _fill_stage_planes(head, HEAD_SYMBOLS, _HEAD_BITS, planes[:first])
    _fill_stage_planes(body, BODY_SYMBOLS, _BODY_BITS, planes[first:])


def _look_up(builder: Any, rows: list[Any], indices: Any) -> Any:
    """LLVM: look up 64 bytes in a table of two or four registers."""
    halves = [
        call_intrinsic(builder, _PERMUTE_TWO_REGISTERS, _ROUND, rows[i], indices, rows[i + 1])
        for i in range(0, len(rows), 2)
    ]
    if len(halves) == 1:
        return halves[0]
    return builder.select(builder.icmp_unsigned("<", indices, constant_vector(2 * LANES, _ROUND)), halves[0], halves[1])


def _entries(builder: Any, planes: list[list[Any]], indices: Any, has_symbol: Any) -> list[Any]:
    """LLVM: look up the entries (32 bits) of 64 elements in the planes of a table, as vectors of 16."""
    looked_up = []
    for plane, rows in enumerate(planes):
        none = constant_vector((_SKIPPED_ENTRY >> (8 * plane)) & 0xFF, _ROUND)
        looked_up.append(builder.select(has_symbol, _look_up(builder, rows, indices), none))
    entries = []
    for vector in range(_VECTORS):
        lanes = ir.Constant(_V32, list(range(vector * _WIDTH, (vector + 1) * _WIDTH)))
        entry = constant_vector(0, _V32)
        for plane, plane_bytes in enumerate(looked_up):
            part = builder.zext(builder.shuffle_vector(plane_bytes, plane_bytes, lanes), _V32)
            entry = builder.or_(entry, builder.shl(part, constant_vector(8 * plane, _V32)))
        entries.append(entry)
    return entries


def _emit_words(builder: Any, state: Any, is_full: Any, words: Any, position_variable: Any) -> None:
    """LLVM: store the low halves of full states before the current word, and move the position there."""
    halves = builder.trunc(state, _HALVES)
    emitted = call_intrinsic(
        builder, "llvm.x86.avx512.mask.compress.v16i16", _HALVES, halves, constant_vector(0, _HALVES), is_full
    )
    count = call_intrinsic(builder, "llvm.ctpop.i16", I16, builder.bitcast(is_full, I16))
    at = builder.sub(builder.load(position_variable), builder.zext(count, I64))
    builder.store(at, position_variable)
    lanes = ir.Constant(_HALVES, list(range(_WIDTH)))
    is_emitted = builder.icmp_unsigned("<", lanes, broadcast(builder, count, _HALVES))
    target = builder.gep(words, [at])
    signature = ir.FunctionType(ir.VoidType(), [_HALVES, target.type, I32, _MASK])
    put = core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v16i16.p0")
    builder.call(put, [emitted, target, I32(2), is_emitted])


def _quotient(builder: Any, state: Any, frequency: Any) -> Any:
    """LLVM: `state // frequency`, which is below 2**20: the float32 estimate is off by at most one, and corrected.

    The reciprocal is exact to 14 bits, and to 22 after one step of Newton: a division takes several times as long.
    """
    divisor, zero = builder.sitofp(frequency, _VFLOAT), constant_vector(0, _VFLOAT)
    reciprocal = call_intrinsic(builder, "llvm.x86.avx512.rcp14.ps.512", _VFLOAT, divisor, zero, I16(-1))
    left_over = call_intrinsic(
        builder, "llvm.fma.v16f32", _VFLOAT, builder.fneg(divisor), reciprocal, constant_vector(2.0, _VFLOAT)
    )
    dividend = builder.sitofp(state, _VFLOAT)
    estimate = builder.fptosi(builder.fmul(dividend, builder.fmul(reciprocal, left_over)), _V32)
    left = builder.sub(state, builder.mul(estimate, frequency))
    more = builder.zext(builder.icmp_signed(">=", left, frequency), _V32)
    less = builder.zext(builder.icmp_signed("<", left, constant_vector(0, _V32)), _V32)
    return builder.sub(builder.add(estimate, more), less)


def _encode_round(builder: Any, entry: Any, state_variable: Any, words: Any, position_variable: Any) -> None:
    """LLVM: encode 16 symbols into 16 states, which emit words first."""
    frequency = builder.add(builder.and_(entry, constant_vector(TOTAL - 1, _V32)), constant_vector(1, _V32))
    start = builder.lshr(entry, constant_vector(_START_BITS, _V32))
    state = builder.load(state_variable)
    is_full = builder.icmp_unsigned(">=", state, builder.shl(frequency, constant_vector(31 - PRECISION_BITS, _V32)))
    _emit_words(builder, state, is_full, words, position_variable)
    state = builder.select(is_full, builder.lshr(state, constant_vector(16, _V32)), state)
    moved = builder.mul(_quotient(builder, state, frequency), builder.sub(constant_vector(TOTAL, _V32), frequency))
    builder.store(builder.add(builder.add(state, start), moved), state_variable)


def _round_entries(builder: Any, tables: Any, contexts: Any, codes: Any) -> list[list[Any]]:
    """LLVM: look up the table entries of both stages for the symbols of a round."""
    is_head = builder.icmp_unsigned("<", codes, constant_vector(FIRST_BODY_CODE, _ROUND))
    is_there = builder.icmp_unsigned("<", contexts, constant_vector(SKIPPED, _ROUND))
    head = builder.select(is_head, codes, constant_vector(0, _ROUND))
    body = builder.sub(codes, constant_vector(FIRST_BODY_CODE, _ROUND))
    in_body = builder.and_(is_there, builder.not_(is_head))
    head_indices = builder.or_(builder.shl(contexts, constant_vector(_HEAD_BITS, _ROUND)), head)
    body_indices = builder.or_(builder.shl(contexts, constant_vector(_BODY_BITS, _ROUND)), body)
    return [
        _entries(builder, tables[0], head_indices, is_there),
        _entries(builder, tables[1], body_indices, in_body),
    ]


def _tables(builder: Any, planes: Any) -> list[list[list[Any]]]:
    """LLVM: load the tables of both stages into registers, by byte."""
    starts = ((0, _HEAD_ROWS), (_PLANES * HEAD_PLANE_BYTES, _BODY_ROWS))
    return [
        [
            [load_vector(builder, planes, I64(first + (plane * n_rows + row) * LANES), _ROUND) for row in range(n_rows)]
            for plane in range(_PLANES)
        ]
        for first, n_rows in starts
    ]


def _rounds(
    _typing: Any, contexts: Any, codes: Any, n: Any, planes: Any, words: Any, states: Any, ends: Any
) -> tuple[Any, Callable[..., Any]]:
    """Make the intrinsic. `words`, `states`, `ends` are of both stages; `ends` are set to where words begin."""
    signature = core.types.void(contexts, codes, n, planes, words, states, ends)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        contexts_pointer, codes_pointer, count, planes_pointer, words_pointer, states_pointer, ends_pointer = (
            array_pointers(context, builder, signature, arguments)
        )
        alloca = core.cgutils.alloca_once_value
        lanes = [I64(lane) for lane in range(0, 2 * LANES, _WIDTH)]
        state_variables = [alloca(builder, load_vector(builder, states_pointer, lane, _V32)) for lane in lanes]
        position_variables = [
            alloca(builder, builder.load(builder.gep(ends_pointer, [I64(stage)]))) for stage in range(2)
        ]
        tables = _tables(builder, planes_pointer)
        with core.cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (passed, _):
            element = builder.sub(count, builder.add(passed, I64(LANES)))
            round_inputs = (load_vector(builder, array, element, _ROUND) for array in (contexts_pointer, codes_pointer))
            entries = _round_entries(builder, tables, *round_inputs)
            for vector in reversed(range(_VECTORS)):  # words are stored in decoding order: written from last to first
                for stage in range(2):
                    state_variable = state_variables[stage * _VECTORS + vector]
                    _encode_round(
                        builder, entries[stage][vector], state_variable, words_pointer, position_variables[stage]
                    )
        for lane, state_variable in zip(lanes, state_variables, strict=True):
            store_vector(builder, builder.load(state_variable), states_pointer, lane)
        for stage in range(2):
            builder.store(builder.load(position_variables[stage]), builder.gep(ends_pointer, [I64(stage)]))
        return context.get_dummy_value()

    return signature, generate


_push_rounds: Any = intrinsic(_rounds)


@kernel
def encode_codes_vector(
    contexts: Bytes, codes: Bytes, n: int, planes: Bytes, words: Bits16, states: Bits32, ends: Counts
) -> None:
    """Encode both stages at once like `rans.encode_symbols`, from contexts, codes (padded to `n`), frequency planes.

    `words` has two halves of `n` or more, filled from their ends; `ends` are set to the indices of the first words,
    `states` (two times `LANES`) to the decoder's initial states.
    """
    states[:] = LOWEST_STATE
    ends[0], ends[1] = len(words) // 2, len(words)
    _push_rounds(contexts, codes, n, planes, words, states, ends)


# --- decode the codes of BANDS with AVX-512, both stages of symbols at once, 32 states at a time ---


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
