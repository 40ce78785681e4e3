"""Range encoding of both stages of a block at once, sixteen states at a time in vector registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL, Halves
from mergepipe.deltastore.codec.symbols import BODY_SYMBOLS, FIRST_BODY_CODE, HEAD_SYMBOLS
from mergepipe.deltastore.codec.vector_registers import (
    I1,
    I8,
    I16,
    I32,
    I64,
    call,
    has_features,
    load,
    pointers_of,
    splat,
    spread,
)
from mergepipe.deltastore.codec.vector_registers import store as store_lanes
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, kernel
from mergepipe.kernels.compiler import intrinsic, ir, numba

_core: Any = numba.core  # untyped
_WIDTH = 16
_VECTORS = LANES // _WIDTH
_V8, _V16, _V32 = (ir.VectorType(scalar, _WIDTH) for scalar in (I8, I16, I32))
_VFLOAT = ir.VectorType(ir.FloatType(), _WIDTH)
_MASK = ir.VectorType(I1, _WIDTH)
_ROUND = ir.VectorType(I8, LANES)

# What a state needs of a symbol, in three bytes: the frequency less 1, and from this bit on where its range starts.
_START_BITS = 11
_PLANES = 3
_HEAD_BITS, _BODY_BITS = 3, 4
_HEAD_ROWS, _BODY_ROWS = 2, 4
HEAD_PLANE_BYTES, BODY_PLANE_BYTES = _HEAD_ROWS * LANES, _BODY_ROWS * LANES
PLANES_BYTES = _PLANES * (HEAD_PLANE_BYTES + BODY_PLANE_BYTES)
_EVERY = TOTAL - 1  # of who has no symbol: all of the range, so that the state stays as it is
_TWO_ROWS = "llvm.x86.avx512.vpermi2var.qi.512"  # takes the low seven bits of an index

HAS_VECTORS = has_features("avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2")
"""Whether this machine has the instructions of `push_by_16`."""


@kernel
def _fill_planes(frequencies: Halves, n_symbols: int, bits: int, planes: Bytes) -> None:
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
def fill_planes(head: Halves, body: Halves, planes: Bytes) -> None:
    """Fill the tables of `push_by_16` (`PLANES_BYTES`) from frequencies by context and symbol."""
    first = _PLANES * HEAD_PLANE_BYTES
    _fill_planes(head, HEAD_SYMBOLS, _HEAD_BITS, planes[:first])
    _fill_planes(body, BODY_SYMBOLS, _BODY_BITS, planes[first:])


def _looked_up(builder: Any, rows: list[Any], indices: Any) -> Any:
    found = [call(builder, _TWO_ROWS, _ROUND, rows[i], indices, rows[i + 1]) for i in range(0, len(rows), 2)]
    if len(found) == 1:
        return found[0]
    return builder.select(builder.icmp_unsigned("<", indices, splat(2 * LANES, _ROUND)), found[0], found[1])


def _entries(builder: Any, planes: list[list[Any]], indices: Any, has_symbol: Any) -> list[Any]:
    """What the states of a round need, in four vectors of 32 bits, from tables of each of the three bytes."""
    looked_up = []
    for plane, rows in enumerate(planes):
        none = splat((_EVERY >> (8 * plane)) & 0xFF, _ROUND)
        looked_up.append(builder.select(has_symbol, _looked_up(builder, rows, indices), none))
    entries = []
    for vector in range(_VECTORS):
        lanes = ir.Constant(_V32, list(range(vector * _WIDTH, (vector + 1) * _WIDTH)))
        entry = splat(0, _V32)
        for plane, own in enumerate(looked_up):
            part = builder.zext(builder.shuffle_vector(own, own, lanes), _V32)
            entry = builder.or_(entry, builder.shl(part, splat(8 * plane, _V32)))
        entries.append(entry)
    return entries


def _give_off(builder: Any, state: Any, is_full: Any, words: Any, at_place: Any) -> None:
    """Put the low halves of the states that are full before the word that `at_place` says, which moves there."""
    halves = builder.trunc(state, _V16)
    given = call(builder, "llvm.x86.avx512.mask.compress.v16i16", _V16, halves, splat(0, _V16), is_full)
    count = call(builder, "llvm.ctpop.i16", I16, builder.bitcast(is_full, I16))
    at = builder.sub(builder.load(at_place), builder.zext(count, I64))
    builder.store(at, at_place)
    lanes = ir.Constant(_V16, list(range(_WIDTH)))
    is_given = builder.icmp_unsigned("<", lanes, spread(builder, count, _V16))
    target = builder.gep(words, [at])
    signature = ir.FunctionType(ir.VoidType(), [_V16, target.type, I32, _MASK])
    put = _core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v16i16.p0")
    builder.call(put, [given, target, I32(2), is_given])


def _quotient(builder: Any, state: Any, frequency: Any) -> Any:
    """`state // frequency`, which is below 2**20: what float32 makes of it is at most one off."""
    divided = builder.fdiv(builder.sitofp(state, _VFLOAT), builder.sitofp(frequency, _VFLOAT))
    nearly = builder.fptosi(divided, _V32)
    left = builder.sub(state, builder.mul(nearly, frequency))
    more = builder.zext(builder.icmp_signed(">=", left, frequency), _V32)
    less = builder.zext(builder.icmp_signed("<", left, splat(0, _V32)), _V32)
    return builder.sub(builder.add(nearly, more), less)


def _push(builder: Any, entry: Any, state_place: Any, words: Any, at_place: Any) -> None:
    """Push 16 symbols on 16 states, which give off words first."""
    frequency = builder.add(builder.and_(entry, splat(TOTAL - 1, _V32)), splat(1, _V32))
    start = builder.lshr(entry, splat(_START_BITS, _V32))
    state = builder.load(state_place)
    is_full = builder.icmp_unsigned(">=", state, builder.shl(frequency, splat(31 - PRECISION_BITS, _V32)))
    _give_off(builder, state, is_full, words, at_place)
    state = builder.select(is_full, builder.lshr(state, splat(16, _V32)), state)
    moved = builder.mul(_quotient(builder, state, frequency), builder.sub(splat(TOTAL, _V32), frequency))
    builder.store(builder.add(builder.add(state, start), moved), state_place)


def _round_entries(builder: Any, tables: Any, contexts: Any, codes: Any) -> list[list[Any]]:
    """What both stages need of the symbols of a round."""
    is_head = builder.icmp_unsigned("<", codes, splat(FIRST_BODY_CODE, _ROUND))
    is_there = builder.icmp_unsigned("<", contexts, splat(SKIPPED, _ROUND))
    head = builder.select(is_head, codes, splat(0, _ROUND))
    body = builder.sub(codes, splat(FIRST_BODY_CODE, _ROUND))
    in_body = builder.and_(is_there, builder.not_(is_head))
    head_indices = builder.or_(builder.shl(contexts, splat(_HEAD_BITS, _ROUND)), head)
    body_indices = builder.or_(builder.shl(contexts, splat(_BODY_BITS, _ROUND)), body)
    return [
        _entries(builder, tables[0], head_indices, is_there),
        _entries(builder, tables[1], body_indices, in_body),
    ]


def _tables(builder: Any, planes: Any) -> list[list[list[Any]]]:
    """The registers of both stages' tables, by byte."""
    starts = ((0, _HEAD_ROWS), (_PLANES * HEAD_PLANE_BYTES, _BODY_ROWS))
    return [
        [
            [load(builder, planes, I64(first + (plane * n_rows + row) * LANES), _ROUND) for row in range(n_rows)]
            for plane in range(_PLANES)
        ]
        for first, n_rows in starts
    ]


def _rounds(
    _typing: Any, contexts: Any, codes: Any, n: Any, planes: Any, words: Any, states: Any, ends: Any
) -> tuple[Any, Callable[..., Any]]:
    """`words`, `states` and `ends` are of both stages, one after the other; `ends` become where words begin."""
    signature = _core.types.void(contexts, codes, n, planes, words, states, ends)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own_contexts, own_codes, own_n, own_planes, own_words, own_states, own_ends = pointers_of(
            context, builder, signature, arguments
        )
        once = _core.cgutils.alloca_once_value
        lanes = [I64(lane) for lane in range(0, 2 * LANES, _WIDTH)]
        state_places = [once(builder, load(builder, own_states, lane, _V32)) for lane in lanes]
        at_places = [once(builder, builder.load(builder.gep(own_ends, [I64(stage)]))) for stage in range(2)]
        tables = _tables(builder, own_planes)
        with _core.cgutils.for_range_slice(builder, I64(0), own_n, I64(LANES), I64) as (passed, _):
            element = builder.sub(own_n, builder.add(passed, I64(LANES)))
            own = (load(builder, array, element, _ROUND) for array in (own_contexts, own_codes))
            entries = _round_entries(builder, tables, *own)
            for vector in reversed(range(_VECTORS)):  # words stand as a decoder takes them: written from last to first
                for stage in range(2):
                    state_place = state_places[stage * _VECTORS + vector]
                    _push(builder, entries[stage][vector], state_place, own_words, at_places[stage])
        for lane, state_place in zip(lanes, state_places, strict=True):
            store_lanes(builder, builder.load(state_place), own_states, lane)
        for stage in range(2):
            builder.store(builder.load(at_places[stage]), builder.gep(own_ends, [I64(stage)]))
        return context.get_dummy_value()

    return signature, generate


_push_rounds: Any = intrinsic(_rounds)


@kernel
def push_by_16(
    contexts: Bytes, codes: Bytes, n: int, planes: Bytes, words: Halves, states: Bits32, ends: Counts
) -> None:
    """`rans.encode_symbols` of both stages at once, from contexts and codes (both padded to `n`) and `fill_planes`.

    `words` has two halves of `n` or more, filled from their ends; `ends` become the indices of the first words,
    `states` (two times `LANES`) what decoders start with.
    """
    states[:] = LOWEST_STATE
    ends[0], ends[1] = len(words) // 2, len(words)
    _push_rounds(contexts, codes, n, planes, words, states, ends)
