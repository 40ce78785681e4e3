"""Range decoding of sixteen states at a time in vector registers, as LLVM code: numba has no word for its gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL
from mergepipe.deltastore.codec.symbols import HEAD_SYMBOLS
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
    store,
)
from mergepipe.kernels.compiled import Bits32, Bytes, kernel
from mergepipe.kernels.compiler import intrinsic, ir, numba

_core: Any = numba.core  # untyped
_WIDTH = 16
_VECTORS = LANES // _WIDTH
_NEEDED = ("avx512bw", "avx512vl", "avx512vbmi2")
_PERMUTE = "llvm.x86.avx512.permvar.si.512"

_V8, _V16, _V32, _V64 = (ir.VectorType(scalar, _WIDTH) for scalar in (I8, I16, I32, I64))
_MASK = ir.VectorType(I1, _WIDTH)


def has_vectors() -> bool:
    """Whether this machine has the instructions that make `decode_symbols_by_16` fast; it is right without them."""
    return has_features(*_NEEDED)


def _all(value: int, vector: Any = _V32) -> Any:
    return splat(value, vector)


def _gathered(builder: Any, table: Any, index: Any) -> Any:
    """Entries (32 bits) of `table` at 16 indices."""
    pointers = ir.VectorType(I32.as_pointer(), _WIDTH)
    signature = ir.FunctionType(_V32, [pointers, I32, _MASK, _V32])
    gather = _core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.gather.v16i32.v16p0")
    firsts = spread(builder, builder.ptrtoint(table, I64), _V64)
    addresses = builder.add(firsts, builder.shl(builder.zext(index, _V64), _all(2, _V64)))
    return builder.call(gather, [builder.inttoptr(addresses, pointers), I32(4), _all(1, _MASK), _all(0)])


def _expanded(builder: Any, words: Any, position: Any, wanted: Any) -> Any:
    """The words from `position` on, one for each lane that is `wanted`, in order; 0 for the others."""
    signature = ir.FunctionType(_V16, [I16.as_pointer(), _MASK, _V16])
    expand = _core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.expandload.v16i16")
    return builder.call(expand, [builder.gep(words, [position]), wanted, _all(0, _V16)])


def _refilled(builder: Any, words: Any, state: Any, position_place: Any) -> Any:
    """States, those that are low with the next words; the position of the next one moves on."""
    wanted = builder.icmp_unsigned("<", state, _all(LOWEST_STATE))
    position = builder.load(position_place)
    taken = builder.zext(_expanded(builder, words, position, wanted), _V32)
    refilled = builder.or_(builder.shl(state, _all(16)), taken)
    count = builder.zext(builder.ctpop(builder.bitcast(wanted, I16)), I64)
    builder.store(builder.add(position, count), position_place)
    return builder.select(wanted, refilled, state)


def _find_in_table(builder: Any, table: Any, context: Any, slot: Any) -> tuple[Any, Any]:
    """What a table of all slots says: the symbol, with the frequency from bit 20 on; the place inside it."""
    entry = _gathered(builder, table, builder.add(builder.shl(context, _all(PRECISION_BITS)), slot))
    return entry, builder.and_(builder.lshr(entry, _all(8)), _all(0xFFF))


def _find_by_starts(builder: Any, starts: Any, context: Any, slot: Any) -> tuple[Any, Any]:
    """The same, from where each symbol starts: the last that is not past the slot."""
    place = builder.or_(builder.shl(slot, _all(20)), _all(0xFFFFF))
    found = call(builder, _PERMUTE, _V32, starts[0], context)
    for entries in starts[1:]:
        entry = call(builder, _PERMUTE, _V32, entries, context)
        found = builder.select(builder.icmp_unsigned(">=", place, entry), entry, found)
    found = builder.select(builder.icmp_unsigned("<", context, _all(SKIPPED)), found, _all(TOTAL << 8))
    offset = builder.sub(slot, builder.lshr(found, _all(20)))
    return builder.or_(builder.shl(found, _all(12)), builder.and_(found, _all(0xFF))), offset


def _rounds_with(prepare: Callable[[Any, Any], Any], find: Any) -> Callable[..., Any]:
    """What makes the loop over rounds of 64 elements; `find` looks symbols up in what `prepare` makes of a table."""

    def rounds(
        _typing: Any, stored: Any, first: Any, states: Any, contexts: Any, n: Any, table: Any, symbols: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """Decode `n` elements; returns the words taken. `states` become what is left."""
        signature = _core.types.int64(stored, first, states, contexts, n, table, symbols)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if find is _find_by_starts and not has_vectors():
                return I64(0)
            own_stored, first, own_states, own_contexts, n, own_table, own_symbols = pointers_of(
                context, builder, signature, arguments
            )
            words = builder.bitcast(builder.gep(own_stored, [first]), I16.as_pointer())
            prepared = prepare(builder, own_table)
            lanes = [I64(vector * _WIDTH) for vector in range(_VECTORS)]
            alloca = _core.cgutils.alloca_once_value
            places = [alloca(builder, load(builder, own_states, lane, _V32)) for lane in lanes]
            position_place = alloca(builder, I64(0))
            with _core.cgutils.for_range_slice(builder, I64(0), n, I64(LANES), I64) as (start, _):
                for lane, place in zip(lanes, places, strict=True):
                    element, state = builder.add(start, lane), builder.load(place)
                    own_context = builder.zext(load(builder, own_contexts, element, _V8), _V32)
                    slot = builder.and_(state, _all(TOTAL - 1))
                    entry, offset = find(builder, prepared, own_context, slot)
                    store(builder, builder.trunc(entry, _V8), own_symbols, element)
                    quotient = builder.lshr(state, _all(PRECISION_BITS))
                    popped = builder.add(builder.mul(builder.lshr(entry, _all(20)), quotient), offset)
                    builder.store(_refilled(builder, words, popped, position_place), place)
            for lane, place in zip(lanes, places, strict=True):
                store(builder, builder.load(place), own_states, lane)
            return builder.load(position_place)

        return signature, generate

    return rounds


def _loaded_starts(builder: Any, table: Any) -> list[Any]:
    return [load(builder, table, I64(symbol * _WIDTH), _V32) for symbol in range(HEAD_SYMBOLS)]


_decode_rounds: Any = intrinsic(_rounds_with(lambda _, table: table, _find_in_table))
_decode_head_rounds: Any = intrinsic(_rounds_with(_loaded_starts, _find_by_starts))


@kernel
def decode_symbols_by_16(
    stored: Bytes, first: int, states: Bits32, contexts: Bytes, n: int, table: Bits32, symbols: Bytes
) -> int:
    """`rans.decode_symbols`, 16 states at a time."""
    return int(_decode_rounds(stored, first, states, contexts, n, table, symbols))


@kernel
def decode_head_by_16(
    stored: Bytes, first: int, states: Bits32, contexts: Bytes, n: int, starts: Bits32, symbols: Bytes
) -> int:
    """`decode_symbols_by_16` of `HEAD_SYMBOLS` symbols, with a table of `rans.fill_starts`; only for `has_vectors`."""
    return int(_decode_head_rounds(stored, first, states, contexts, n, starts, symbols))
