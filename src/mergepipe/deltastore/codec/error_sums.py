"""Sum deltas and squared errors of a block in the same order on every machine.

Format: centroids (HEAD, BODY) and squared errors (index row) in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.element_codes import N_CODES
from mergepipe.deltastore.codec.llvm_vectors import (
    I32,
    I64,
    array_pointers,
    core,
    load_vector,
    store_vector,
)
from mergepipe.deltastore.codec.rans import MAX_CONTEXTS, Bits16
from mergepipe.kernels.compiled import Bytes, Doubles, Floats, intrinsic, kernel

N_KEYS = MAX_CONTEXTS * N_CODES
_CODE_BITS = N_CODES.bit_length() - 1
_LANES = 4
_PAIR = ir.VectorType(ir.DoubleType(), 2)
_FLOATS, _DOUBLES = (ir.VectorType(scalar, _LANES) for scalar in (ir.FloatType(), ir.DoubleType()))

SLOT = 4
N_SUMS = 2 * N_KEYS * SLOT
SUMS_SHAPE = (2, MAX_CONTEXTS, N_CODES, SLOT)
"""By parity of the element (equal neighbours would otherwise depend on each other), context and code: sums of the
deltas, of their squares, of ones, and padding."""
ERROR_SUMS = 4


@kernel
def _fill_pairs(deltas: Floats, contexts: Bytes, codes: Bytes, keys: Bits16, pairs: Doubles) -> None:
    """Write for each element its index into the sums, and the pair (delta, delta squared)."""
    for i in range(len(codes)):
        keys[i] = np.uint16(np.uint16(np.uint16(contexts[i]) << np.uint16(_CODE_BITS)) | np.uint16(codes[i]))
    for i in range(len(codes)):
        delta = np.float64(deltas[i])
        pairs[2 * i] = delta
        pairs[2 * i + 1] = delta * delta


def _add_one(builder: Any, arrays: list[Any], element: Any, parity: int) -> None:
    """LLVM: add one element to its sums."""
    keys, pairs, sums = arrays
    key = builder.zext(builder.load(builder.gep(keys, [element])), I64)
    index = builder.shl(builder.add(key, I64(parity * N_KEYS)), I64(2))
    pair, one = load_vector(builder, pairs, builder.shl(element, I64(1)), _PAIR), ir.Constant(_PAIR, [1.0, 0.0])
    summands = builder.shuffle_vector(pair, one, ir.Constant(ir.VectorType(I32, SLOT), list(range(SLOT))))
    store_vector(builder, builder.fadd(load_vector(builder, sums, index, _DOUBLES), summands), sums, index)


def _add_fours_intrinsic(
    _typing: Any, n: Any, keys: Any, pairs: Any, deltas: Any, estimates: Any, sums: Any, errors: Any
) -> tuple[Any, Callable[..., Any]]:
    """LLVM: add the elements of a tile, four in each iteration."""
    signature = core.types.void(n, keys, pairs, deltas, estimates, sums, errors)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, keys_pointer, pairs_pointer, deltas_pointer, estimates_pointer, sums_pointer, errors_pointer = (
            array_pointers(context, builder, signature, arguments)
        )
        arrays = [keys_pointer, pairs_pointer, sums_pointer]
        errors_variable = core.cgutils.alloca_once_value(
            builder, load_vector(builder, errors_pointer, I64(0), _DOUBLES)
        )
        with core.cgutils.for_range_slice(builder, I64(0), count, I64(_LANES), I64) as (first, _):
            for i in range(_LANES):
                _add_one(builder, arrays, builder.add(first, I64(i)), i % 2)
            delta, estimate = (
                builder.fpext(load_vector(builder, array, first, _FLOATS), _DOUBLES)
                for array in (deltas_pointer, estimates_pointer)
            )
            error = builder.fsub(delta, estimate)
            builder.store(builder.fadd(builder.load(errors_variable), builder.fmul(error, error)), errors_variable)
        store_vector(builder, builder.load(errors_variable), errors_pointer, I64(0))
        return context.get_dummy_value()

    return signature, generate


_add_fours: Any = intrinsic(_add_fours_intrinsic)


@kernel
def sum_tile(
    deltas: Floats, estimates: Floats, contexts: Bytes, codes: Bytes, keys: Bits16, pairs: Doubles,
    sums: Doubles, errors: Doubles,
) -> None:  # fmt: skip
    """Add the deltas of a tile (as many elements as `codes` has) to `sums` (flat, of `SUMS_SHAPE`).

    Their squared distances from `estimates` are added to the `ERROR_SUMS` entries of `errors` in turn, so that
    additions do not depend on each other. The length of every tile but the last is a multiple of that. `keys` and
    `pairs` are work arrays.
    """
    n = len(codes)
    n_vectorised = n // _LANES * _LANES
    _fill_pairs(deltas, contexts, codes, keys, pairs)
    _add_fours(n_vectorised, keys, pairs, deltas, estimates, sums, errors)
    for i in range(n_vectorised, n):
        index = ((i % 2) * N_KEYS + np.int64(keys[i])) * SLOT
        sums[index] += pairs[2 * i]
        sums[index + 1] += pairs[2 * i + 1]
        sums[index + 2] += 1.0
        error = np.float64(deltas[i]) - np.float64(estimates[i])
        errors[i % ERROR_SUMS] += error * error
