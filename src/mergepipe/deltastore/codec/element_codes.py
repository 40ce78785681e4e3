"""Bands, codes, contexts and symbols of elements, and their residual streams: what encoder and decoder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from mergepipe.deltastore.codec.rans import MAX_CONTEXTS, SKIPPED, Bits16
from mergepipe.deltastore.codec.vectors import I32, I64, array_pointers, core, load_vector, look_up, store_vector
from mergepipe.kernels.compiled import Bytes, Counts, Doubles, Floats, intrinsic, kernel, template

# --- codes, ordinals, contexts and symbols of elements: the definitions that encoder and decoder of BANDS share ---
#
# Format: "BANDS" in docs/internals/formats/delta-store.md.


Integers = NDArray[np.int32]

# Fields of a float of 16 bits, by the bits of its mantissa: bf16 or fp16. Its value is a float32 with the same
# magnitude bits, shifted, times a power of two.
BF16_MANTISSA_BITS, F16_MANTISSA_BITS = 7, 10
_FLOAT32_MANTISSA_BITS = 23
_F16_SCALE, _F16_EXPONENT_OFFSET = 2.0**112, 112

# Codes of an element. 1 ... 4: first and second band; 5, 6: third band; each up, then down. 7 ... 20: cells of
# 2**low ordinal differences; difference 0 is the first of the cell ZERO_CELL.
N_CODES = 32
HEAD_SYMBOLS = 5
FIRST_BODY_CODE = 5
FIRST_CELL_CODE = 7
BODY_SYMBOLS = 16
ZERO_CELL = 7
LAST_CELL_CODE = FIRST_BODY_CODE + BODY_SYMBOLS - 1
NEAR_CELLS = 2  # cells on either side of ZERO_CELL that hold nearly all differences

MAX_CELL_BITS = 15
"""The largest width of residuals in cells."""

EDGE_CLASSES = 40
"""Number of edge exponents that have a class of their own; lower ones share the last."""
WIDTHS_PER_CLASS = FIRST_CELL_CODE - 1
"""Widths of one class: by band, and whether the residual leads towards zero."""
N_WIDTHS = EDGE_CLASSES * WIDTHS_PER_CLASS

N_EXPONENTS = 256
TILE = 2048
QUANTILE_BUCKETS = 128


@template
def value_shift(mantissa_bits: int) -> np.int32:
    """Bits by which a magnitude is shifted to be that of a float32."""
    return np.int32(_FLOAT32_MANTISSA_BITS - mantissa_bits)


@template
def value_scale(mantissa_bits: int) -> np.float32:
    """The power of two by which a float32 with a shifted magnitude is multiplied."""
    return np.float32(_F16_SCALE if mantissa_bits == F16_MANTISSA_BITS else 1.0)


@template
def float_value(bits: np.int32, shift: np.int32, scale: np.float32) -> np.float32:
    """The float32 value of 16 bits. Infinities and NaNs of fp16 are taken for finite values, which no block has."""
    magnitude = np.int32(np.int32(bits & np.int32(0x7FFF)) << shift)
    sign = np.int32(np.int32(bits << np.int32(16)) & np.int32(-0x80000000))
    return np.float32(np.int32(magnitude | sign).view(np.float32) * scale)


@template
def ordinal_of(bits: np.int32) -> np.int32:
    """The rank of 16 bits among all values of their dtype, monotonic in the value; both zeros have 0."""
    sign = np.int32(-np.int32(bits >> np.int32(15)))
    return np.int32(np.int32(np.int32(bits & np.int32(0x7FFF)) ^ sign) - sign)


@template
def first_ordinal_past(edge: np.float32, down: np.int32, shift: np.int32, scale: np.float32) -> np.int32:
    """The ordinal of the first value at or past a float32: upwards, or downwards where `down` is -1.

    `scale` is 1 divided by `value_scale`.
    """
    bits = np.float32(edge * scale).view(np.int32)
    past = np.int32(np.int32(np.int32(1) << shift) - np.int32(1))
    sign = np.int32(bits >> np.int32(31))
    whole = np.int32(np.int32(np.int32(bits & np.int32(0x7FFFFFFF)) ^ sign) - sign)
    return np.int32(np.int32(whole + np.int32(past & np.int32(~down))) >> shift)


@kernel
def top_edge_exponent(first_low: int, largest_cut: int, mantissa_bits: int) -> np.int32:
    """The exponent of the first class of edges; hardly any edge has a larger one.

    `first_low` is the lowest exponent of the first context, `largest_cut` the bits of the first cut.
    """
    offset = np.int32(_F16_EXPONENT_OFFSET + 2 if mantissa_bits == F16_MANTISSA_BITS else 2)
    context_bound, cut_bound = np.int32(first_low) + offset, (np.int32(largest_cut) >> np.int32(23)) + np.int32(1)
    return np.int32(context_bound if context_bound > cut_bound else cut_bound)


@kernel
def width_index(code: np.int32, edge: np.int32, top: np.int32) -> np.int32:
    """The index of the residual width of a band: by exponent of the band's edge (its bits), band and direction.

    The exponent determines how many values the band has; residuals that lead towards zero may reach finer exponents.
    """
    steps = np.int32(top - np.int32(np.int32(edge >> np.int32(23)) & np.int32(0xFF)))
    steps = np.int32(0) if steps < np.int32(0) else steps
    steps = np.int32(EDGE_CLASSES - 1) if steps > np.int32(EDGE_CLASSES - 1) else steps
    towards = np.int32(np.int32(np.int32(code ^ edge >> np.int32(31)) ^ np.int32(1)) & np.int32(1))
    pair = np.int32(np.int32(code - np.int32(1)) & np.int32(-2))
    return np.int32(np.int32(np.int32(steps * np.int32(WIDTHS_PER_CLASS)) + pair) + towards)


@kernel
def count_exponents(base: Bits16, mantissa_bits: int, stride: int, counts: Counts) -> None:
    """Add the exponents of every `stride`th element of `base` to `counts`."""
    # Four counters for each exponent: equal neighbours would otherwise depend on each other's store.
    partial_counts = np.zeros(4 * N_EXPONENTS, np.uint32)
    n, shift = (len(base) + stride - 1) // stride, np.uint16(mantissa_bits)
    for i in range(n):
        exponent = np.uint64((base[np.uint64(i) * np.uint64(stride)] & np.uint16(0x7FFF)) >> shift)
        partial_counts[(np.uint64(i) & np.uint64(3)) * np.uint64(N_EXPONENTS) + exponent] += np.uint32(1)
    for i in range(4 * N_EXPONENTS):
        counts[i % N_EXPONENTS] += np.int64(partial_counts[i])


@kernel
def choose_context_bounds(counts: Counts, enough: int, lows: Bytes) -> int:
    """Merge neighbouring exponents, from the largest down, until each context has `enough` elements.

    Writes the lowest exponent of each to `lows`, the last 0; returns their number, at most the length of `lows`.
    """
    n_contexts, n_elements = 0, 0
    for exponent in range(N_EXPONENTS - 1, 0, -1):
        n_elements += counts[exponent]
        if n_elements >= enough and n_contexts < len(lows) - 1:
            lows[n_contexts] = exponent
            n_contexts, n_elements = n_contexts + 1, 0
    lows[n_contexts] = 0
    return n_contexts + 1


@template
def _fill_exponents(base: Bits16, mantissa_bits: int, n: int, exponents: Bytes) -> None:
    """Write the exponents of floats of 16 bits."""
    for i in range(n):
        exponents[i] = np.uint8((base[i] & np.uint16(0x7FFF)) >> np.uint16(mantissa_bits))


@kernel
def fill_contexts(base: Bits16, mantissa_bits: int, n: int, context_of: Bytes, contexts: Bytes) -> None:
    """Write the context of every element, by its base's exponent; padding gets `SKIPPED`."""
    if mantissa_bits == F16_MANTISSA_BITS:
        _fill_exponents(base, F16_MANTISSA_BITS, n, contexts)
    else:
        _fill_exponents(base, BF16_MANTISSA_BITS, n, contexts)
    look_up(context_of, contexts, n, contexts)
    for i in range(n, len(contexts)):
        contexts[i] = SKIPPED


@kernel
def are_finite(stored: Bits16, mantissa_bits: int) -> bool:
    """Whether no element is an infinity or a NaN: these have the largest exponent."""
    first = np.uint16(0x7FFF) >> np.uint16(mantissa_bits) << np.uint16(mantissa_bits)
    is_beyond = np.uint8(0)
    for i in range(len(stored)):
        is_beyond |= np.uint8((stored[i] & np.uint16(0x7FFF)) >= first)
    return bool(is_beyond == 0)


@kernel
def fill_body_contexts(contexts: Bytes, head_symbols: Bytes, n: int, body_contexts: Bytes) -> None:
    """Write the contexts of the body stage: elements in the head stage's bands are skipped."""
    for i in range(n):
        context = contexts[i]  # read in any case, so that the loop becomes vector code
        body_contexts[i] = context if head_symbols[i] == np.uint8(0) else np.uint8(SKIPPED)


@kernel
def split_codes(codes: Bytes, n: int, head_symbols: Bytes, body_symbols: Bytes) -> None:
    """Split codes into the symbols of both stages; the body symbol is 0 for elements of the head stage's bands."""
    for i in range(n):
        is_head = codes[i] < np.uint8(FIRST_BODY_CODE)
        head_symbols[i] = codes[i] if is_head else np.uint8(0)
        body_symbols[i] = np.uint8(0) if is_head else np.uint8(codes[i] - np.uint8(FIRST_BODY_CODE))


# --- residual streams: which codes each holds, and how exceptions are stored with them ---
#
# Format: HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.


EXCEPTION_BITS = 32
CHUNK_ELEMENTS = 1 << 16
"""Positions of exceptions are stored within chunks of this many elements, in 16 bits."""
WIDTH_COUNTS = 17
STREAM_CODES = ((1, FIRST_BODY_CODE - 1), (FIRST_BODY_CODE, FIRST_CELL_CODE - 1), (FIRST_CELL_CODE, LAST_CELL_CODE))
"""First and last code of the streams: head, body, rest."""


# --- the cuts that divide the deltas of one bf16 tensor into three bands of magnitude ---
#
# Format: `cuts` of the header, and "Levels", in docs/internals/formats/delta-store.md.


@dataclass(frozen=True, slots=True)
class Bands:
    """Lower bounds of a tensor's three bands: positive magnitudes, descending."""

    cuts: tuple[float, float, float]

    def __post_init__(self) -> None:
        first, second, third = (np.float32(cut) for cut in self.cuts)
        if not (np.isfinite(first) and first >= second >= third > 0):
            raise ValueError(f"cuts must be positive, finite and descending, found {self.cuts}")

    @property
    def bits(self) -> Integers:
        """The cuts as float32 bit patterns (int32)."""
        return np.array(self.cuts, np.float32).view(np.int32)

    @property
    def limit(self) -> np.float32:
        """The largest float32 outside the bands: the predecessor of the third cut."""
        return np.float32(np.nextafter(np.float32(self.cuts[2]), np.float32(0)))


# --- sum deltas and squared errors of a block in the same order on every machine ---
#
# Format: centroids (HEAD, BODY) and squared errors (index row) in docs/internals/formats/delta-store.md.


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
