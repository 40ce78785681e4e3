"""Decode rANS symbols 16 states at a time with AVX-512, as LLVM code: numba has no expand-load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from mergepipe.deltastore.codec.llvm_vectors import (
    I1,
    I8,
    I16,
    I32,
    I64,
    array_pointers,
    broadcast,
    constant_vector,
    core,
    has_features,
    load_vector,
    store_vector,
)
from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, TOTAL
from mergepipe.kernels.compiled import Bits32, Bytes, intrinsic, kernel

_WIDTH = 16
_VECTORS = LANES // _WIDTH
_NEEDED = ("avx512bw", "avx512vl", "avx512vbmi2")

_V8, _V16, _V32, _V64 = (ir.VectorType(scalar, _WIDTH) for scalar in (I8, I16, I32, I64))
_MASK = ir.VectorType(I1, _WIDTH)


def has_vector_decoder() -> bool:
    """Whether this machine has the instructions that make `decode_symbols_vector` fast; it is correct without them."""
    return has_features(*_NEEDED)


def _constant(value: int, vector: Any = _V32) -> Any:
    return constant_vector(value, vector)


def _gather(builder: Any, table: Any, index: Any) -> Any:
    """LLVM: load the 32-bit entries of `table` at 16 indices."""
    pointers = ir.VectorType(I32.as_pointer(), _WIDTH)
    signature = ir.FunctionType(_V32, [pointers, I32, _MASK, _V32])
    gather = core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.gather.v16i32.v16p0")
    firsts = broadcast(builder, builder.ptrtoint(table, I64), _V64)
    addresses = builder.add(firsts, builder.shl(builder.zext(index, _V64), _constant(2, _V64)))
    return builder.call(gather, [builder.inttoptr(addresses, pointers), I32(4), _constant(1, _MASK), _constant(0)])


def _expand_words(builder: Any, words: Any, position: Any, is_low: Any) -> Any:
    """LLVM: load one word for each lane of the mask, in order, from `position` on; 0 for the other lanes."""
    signature = ir.FunctionType(_V16, [I16.as_pointer(), _MASK, _V16])
    expand = core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.expandload.v16i16")
    return builder.call(expand, [builder.gep(words, [position]), is_low, _constant(0, _V16)])


def _refill(builder: Any, words: Any, state: Any, position_variable: Any) -> Any:
    """LLVM: refill low states with the next words and advance the position."""
    is_low = builder.icmp_unsigned("<", state, _constant(LOWEST_STATE))
    position = builder.load(position_variable)
    loaded_words = builder.zext(_expand_words(builder, words, position, is_low), _V32)
    refilled = builder.or_(builder.shl(state, _constant(16)), loaded_words)
    count = builder.zext(builder.ctpop(builder.bitcast(is_low, I16)), I64)
    builder.store(builder.add(position, count), position_variable)
    return builder.select(is_low, refilled, state)


def _find_in_table(builder: Any, table: Any, context: Any, slot: Any) -> tuple[Any, Any]:
    """LLVM: look slots up in a table of all slots; return entry (symbol, frequency from bit 20 on) and offset."""
    entry = _gather(builder, table, builder.add(builder.shl(context, _constant(PRECISION_BITS)), slot))
    return entry, builder.and_(builder.lshr(entry, _constant(8)), _constant(0xFFF))


def _rounds(
    _typing: Any, stored: Any, first: Any, states: Any, contexts: Any, n: Any, table: Any, symbols: Any
) -> tuple[Any, Callable[..., Any]]:
    """LLVM: decode `n` elements; returns the words taken. `states` become what is left."""
    signature = core.types.int64(stored, first, states, contexts, n, table, symbols)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored_pointer, first, states_pointer, contexts_pointer, n, table_pointer, symbols_pointer = array_pointers(
            context, builder, signature, arguments
        )
        words = builder.bitcast(builder.gep(stored_pointer, [first]), I16.as_pointer())
        lanes = [I64(vector * _WIDTH) for vector in range(_VECTORS)]
        alloca = core.cgutils.alloca_once_value
        state_variables = [alloca(builder, load_vector(builder, states_pointer, lane, _V32)) for lane in lanes]
        position_variable = alloca(builder, I64(0))
        with core.cgutils.for_range_slice(builder, I64(0), n, I64(LANES), I64) as (start, _):
            for lane, state_variable in zip(lanes, state_variables, strict=True):
                element, state = builder.add(start, lane), builder.load(state_variable)
                context_vector = builder.zext(load_vector(builder, contexts_pointer, element, _V8), _V32)
                slot = builder.and_(state, _constant(TOTAL - 1))
                entry, offset = _find_in_table(builder, table_pointer, context_vector, slot)
                store_vector(builder, builder.trunc(entry, _V8), symbols_pointer, element)
                quotient = builder.lshr(state, _constant(PRECISION_BITS))
                next_state = builder.add(builder.mul(builder.lshr(entry, _constant(20)), quotient), offset)
                builder.store(_refill(builder, words, next_state, position_variable), state_variable)
        for lane, state_variable in zip(lanes, state_variables, strict=True):
            store_vector(builder, builder.load(state_variable), states_pointer, lane)
        return builder.load(position_variable)

    return signature, generate


_decode_rounds: Any = intrinsic(_rounds)


@kernel
def decode_symbols_vector(
    stored: Bytes, first: int, states: Bits32, contexts: Bytes, n: int, table: Bits32, symbols: Bytes
) -> int:
    """Decode symbols like `rans.decode_symbols`, 16 states at a time."""
    return int(_decode_rounds(stored, first, states, contexts, n, table, symbols))
