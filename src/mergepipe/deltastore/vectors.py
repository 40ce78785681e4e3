"""Range decoding of sixteen states at a time in vector registers, as LLVM code: numba has no word for its gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.core
from llvmlite import binding, ir
from numba.extending import intrinsic

from mergepipe.deltastore.rans import LANES, LOWEST_STATE, PRECISION_BITS, TOTAL, Halves
from mergepipe.kernels.compiled import Bits32, Bytes, kernel

_core: Any = numba.core  # untyped
_WIDTH = 16
_VECTORS = LANES // _WIDTH
_NEEDED = ("avx512bw", "avx512vl", "avx512vbmi2")

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_V8, _V16, _V32, _V64 = (ir.VectorType(scalar, _WIDTH) for scalar in (_I8, _I16, _I32, _I64))
_MASK = ir.VectorType(ir.IntType(1), _WIDTH)


def has_vectors() -> bool:
    """Whether this machine has the instructions that make `decode_symbols_by_16` fast; it is right without them."""
    if (
        _core.config.CPU_NAME is not None or _core.config.CPU_FEATURES is not None
    ):  # numba was told to compile for another
        return False
    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in _NEEDED)


def _all(value: int, vector: Any = _V32) -> Any:
    return ir.Constant(vector, [value] * _WIDTH)


def _at(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(array, [index]), vector.as_pointer())


def _load(builder: Any, array: Any, index: Any, vector: Any) -> Any:
    loaded = builder.load(_at(builder, array, index, vector))
    loaded.align = vector.element.width // 8
    return loaded


def _store(builder: Any, value: Any, array: Any, index: Any) -> None:
    builder.store(value, _at(builder, array, index, value.type)).align = value.type.element.width // 8


def _gathered(builder: Any, table: Any, index: Any) -> Any:
    """Entries (32 bits) of `table` at 16 indices."""
    pointers = ir.VectorType(_I32.as_pointer(), _WIDTH)
    signature = ir.FunctionType(_V32, [pointers, _I32, _MASK, _V32])
    gather = _core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.gather.v16i32.v16p0")
    undefined = ir.Constant(_V64, ir.Undefined)
    first = builder.insert_element(undefined, builder.ptrtoint(table, _I64), _I32(0))
    firsts = builder.shuffle_vector(first, undefined, _all(0))
    addresses = builder.add(firsts, builder.shl(builder.zext(index, _V64), _all(2, _V64)))
    return builder.call(gather, [builder.inttoptr(addresses, pointers), _I32(4), _all(1, _MASK), _all(0)])


def _expanded(builder: Any, words: Any, position: Any, wanted: Any) -> Any:
    """The words from `position` on, one for each lane that is `wanted`, in order; 0 for the others."""
    signature = ir.FunctionType(_V16, [_I16.as_pointer(), _MASK, _V16])
    expand = _core.cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.expandload.v16i16")
    return builder.call(expand, [builder.gep(words, [position]), wanted, _all(0, _V16)])


def _popped(builder: Any, entry: Any, state: Any) -> Any:
    quotient = builder.lshr(state, _all(PRECISION_BITS))
    offset = builder.and_(builder.lshr(entry, _all(8)), _all(0xFFF))
    return builder.add(builder.mul(builder.lshr(entry, _all(20)), quotient), offset)


def _decode_vector(builder: Any, arrays: Any, element: Any, state_place: Any, position_place: Any) -> None:
    """Decode the symbols of 16 elements from `element` on; the state and the position of the next word move on."""
    words, contexts, table, symbols = arrays
    state = builder.load(state_place)
    context = builder.zext(_load(builder, contexts, element, _V8), _V32)
    slot = builder.and_(state, _all(TOTAL - 1))
    entry = _gathered(builder, table, builder.add(builder.shl(context, _all(PRECISION_BITS)), slot))
    _store(builder, builder.trunc(entry, _V8), symbols, element)
    state = _popped(builder, entry, state)
    wanted = builder.icmp_unsigned("<", state, _all(LOWEST_STATE))
    position = builder.load(position_place)
    words = builder.zext(_expanded(builder, words, position, wanted), _V32)
    refilled = builder.or_(builder.shl(state, _all(16)), words)
    builder.store(builder.select(wanted, refilled, state), state_place)
    taken = builder.zext(builder.ctpop(builder.bitcast(wanted, _I16)), _I64)
    builder.store(builder.add(position, taken), position_place)


def _rounds(
    _typing: Any, words: Any, states: Any, contexts: Any, n: Any, table: Any, symbols: Any
) -> tuple[Any, Callable[..., Any]]:
    """Decode `n` elements; returns the words taken. `states` become what is left."""
    signature = _core.types.int64(words, states, contexts, n, table, symbols)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own_words, own_states, own_contexts, _, own_table, own_symbols = (
            context.make_array(kind)(context, builder, argument).data
            if isinstance(kind, _core.types.Array)
            else argument
            for kind, argument in zip(signature.args, arguments, strict=True)
        )
        arrays = own_words, own_contexts, own_table, own_symbols
        lanes = [_I64(vector * _WIDTH) for vector in range(_VECTORS)]
        places = [_core.cgutils.alloca_once_value(builder, _load(builder, own_states, lane, _V32)) for lane in lanes]
        position_place = _core.cgutils.alloca_once_value(builder, _I64(0))
        with _core.cgutils.for_range_slice(builder, _I64(0), arguments[3], _I64(LANES), _I64) as (element, _):
            for lane, place in zip(lanes, places, strict=True):
                _decode_vector(builder, arrays, builder.add(element, lane), place, position_place)
        for lane, place in zip(lanes, places, strict=True):
            _store(builder, builder.load(place), own_states, lane)
        return builder.load(position_place)

    return signature, generate


_decode_rounds: Any = intrinsic(_rounds)


@kernel
def decode_symbols_by_16(words: Halves, states: Bits32, contexts: Bytes, n: int, table: Bits32, symbols: Bytes) -> int:
    """`rans.decode_symbols`, 16 states at a time."""
    return int(_decode_rounds(words, states, contexts, n, table, symbols))
