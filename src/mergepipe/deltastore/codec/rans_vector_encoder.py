"""Encode the rANS symbols of both stages of a block at once, 16 states at a time with AVX-512."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.element_codes import BODY_SYMBOLS, FIRST_BODY_CODE, HEAD_SYMBOLS
from mergepipe.deltastore.codec.llvm_vectors import (
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
from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL, Bits16
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, intrinsic, kernel

_WIDTH = 16
_VECTORS = LANES // _WIDTH
_V8, _V16, _V32 = (ir.VectorType(scalar, _WIDTH) for scalar in (I8, I16, I32))
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
    halves = builder.trunc(state, _V16)
    emitted = call_intrinsic(
        builder, "llvm.x86.avx512.mask.compress.v16i16", _V16, halves, constant_vector(0, _V16), is_full
    )
    count = call_intrinsic(builder, "llvm.ctpop.i16", I16, builder.bitcast(is_full, I16))
    at = builder.sub(builder.load(position_variable), builder.zext(count, I64))
    builder.store(at, position_variable)
    lanes = ir.Constant(_V16, list(range(_WIDTH)))
    is_emitted = builder.icmp_unsigned("<", lanes, broadcast(builder, count, _V16))
    target = builder.gep(words, [at])
    signature = ir.FunctionType(ir.VoidType(), [_V16, target.type, I32, _MASK])
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
