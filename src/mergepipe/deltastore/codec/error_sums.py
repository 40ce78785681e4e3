"""Sums over deltas and over errors, in an order that is the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mergepipe.deltastore.codec.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.codec.symbols import N_CODES
from mergepipe.deltastore.codec.vector_registers import I32, I64, load, pointers_of, store
from mergepipe.kernels.compiled import Bytes, Doubles, Floats, kernel
from mergepipe.kernels.compiler import intrinsic, ir, numba

_core: Any = numba.core  # untyped
_N_KEYS = MAX_CONTEXTS * N_CODES
_CODE_BITS = N_CODES.bit_length() - 1
_AT_ONCE = 4
_PAIR = ir.VectorType(ir.DoubleType(), 2)
_FLOATS, _DOUBLES = (ir.VectorType(scalar, _AT_ONCE) for scalar in (ir.FloatType(), ir.DoubleType()))

_SLOT = 4
SUMS_SHAPE = (2, MAX_CONTEXTS, N_CODES, _SLOT)
"""For even and odd elements (neighbours are often alike, and would wait for each other), by context and code: sums of
the deltas, of their squares, of ones, and nothing."""
ERROR_SUMS = 4


@kernel
def _fill_pairs(deltas: Floats, contexts: Bytes, codes: Bytes, keys: Halves, pairs: Doubles) -> None:
    """By element: where its sums stand; its delta and the square of that."""
    for i in range(len(codes)):
        keys[i] = np.uint16(np.uint16(np.uint16(contexts[i]) << np.uint16(_CODE_BITS)) | np.uint16(codes[i]))
    for i in range(len(codes)):
        delta = np.float64(deltas[i])
        pairs[2 * i] = delta
        pairs[2 * i + 1] = delta * delta


def _add_one(builder: Any, arrays: list[Any], element: Any, parity: int) -> None:
    """Add one element to its sums."""
    keys, pairs, sums = arrays
    key = builder.zext(builder.load(builder.gep(keys, [element])), I64)
    place = builder.shl(builder.add(key, I64(parity * _N_KEYS)), I64(2))
    pair, one = load(builder, pairs, builder.shl(element, I64(1)), _PAIR), ir.Constant(_PAIR, [1.0, 0.0])
    own = builder.shuffle_vector(pair, one, ir.Constant(ir.VectorType(I32, _SLOT), list(range(_SLOT))))
    store(builder, builder.fadd(load(builder, sums, place, _DOUBLES), own), sums, place)


def _fours(
    _typing: Any, n: Any, keys: Any, pairs: Any, deltas: Any, estimates: Any, sums: Any, errors: Any
) -> tuple[Any, Callable[..., Any]]:
    signature = _core.types.void(n, keys, pairs, deltas, estimates, sums, errors)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own_n, own_keys, own_pairs, own_deltas, own_estimates, own_sums, own_errors = pointers_of(
            context, builder, signature, arguments
        )
        arrays = [own_keys, own_pairs, own_sums]
        errors_place = _core.cgutils.alloca_once_value(builder, load(builder, own_errors, I64(0), _DOUBLES))
        with _core.cgutils.for_range_slice(builder, I64(0), own_n, I64(_AT_ONCE), I64) as (first, _):
            for i in range(_AT_ONCE):
                _add_one(builder, arrays, builder.add(first, I64(i)), i % 2)
            delta, estimate = (
                builder.fpext(load(builder, array, first, _FLOATS), _DOUBLES) for array in (own_deltas, own_estimates)
            )
            error = builder.fsub(delta, estimate)
            builder.store(builder.fadd(builder.load(errors_place), builder.fmul(error, error)), errors_place)
        store(builder, builder.load(errors_place), own_errors, I64(0))
        return context.get_dummy_value()

    return signature, generate


_add_fours: Any = intrinsic(_fours)


@kernel
def sum_tile(
    deltas: Floats, estimates: Floats, contexts: Bytes, codes: Bytes, keys: Halves, pairs: Doubles,
    sums: Doubles, errors: Doubles,
) -> None:  # fmt: skip
    """Add the deltas of as many elements as there are `codes` to `sums` (flat, of `SUMS_SHAPE`).

    Their squared distances from `estimates` go to `errors`: `ERROR_SUMS` of them in turn, so that none waits for the
    one before. Tiles have lengths that are multiples of that, but for the last. `keys` and `pairs` are room to work in.
    """
    n = len(codes)
    whole = n // _AT_ONCE * _AT_ONCE
    _fill_pairs(deltas, contexts, codes, keys, pairs)
    _add_fours(whole, keys, pairs, deltas, estimates, sums, errors)
    for i in range(whole, n):
        place = ((i % 2) * _N_KEYS + np.int64(keys[i])) * _SLOT
        sums[place] += pairs[2 * i]
        sums[place + 1] += pairs[2 * i + 1]
        sums[place + 2] += 1.0
        error = np.float64(deltas[i]) - np.float64(estimates[i])
        errors[i % ERROR_SUMS] += error * error
