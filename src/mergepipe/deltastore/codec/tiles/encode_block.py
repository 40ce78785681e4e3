"""Encode one block of codec BANDS in two compiled calls: choose the widths of residuals, then write all pieces.

Format: "BANDS" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import LANES, MAX_CONTEXTS, Bits16, scale_rows
from mergepipe.deltastore.codec.entropy.symbol_stages import encode_stages
from mergepipe.deltastore.codec.error_sums import ERROR_SUMS, N_KEYS, N_SUMS, SLOT
from mergepipe.deltastore.codec.generic.byte_copy import copy_bytes
from mergepipe.deltastore.codec.residuals.bit_packing import pack_residuals, packed_capacity, write_residual_piece
from mergepipe.deltastore.codec.residuals.streams import EXCEPTION_BITS
from mergepipe.deltastore.codec.residuals.widths import N_SAMPLE_COUNTS, choose_widths
from mergepipe.deltastore.codec.tiles.element_codes import (
    BODY_SYMBOLS,
    EDGE_CLASSES,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    HEAD_SYMBOLS,
    N_CODES,
    WIDTHS_PER_CLASS,
    Integers,
)
from mergepipe.deltastore.codec.tiles.encode import count_sample, encode_tiles
from mergepipe.kernels.compilation.compiled import Bits32, Bits64, Bytes, Counts, Doubles, Floats, kernel

_TABLE_BYTES = 4096
"""More than the tables, states and widths of a block take."""
N_LOOKED_UP = 256
"""Entries of the tables of widths."""
COUNTS_SHAPE = (MAX_CONTEXTS, N_CODES)
_SUM, _SQUARE, _COUNT = range(3)


class WorkArrays(NamedTuple):
    """Parts of the work array: by element (`codes` padded), words of both stages, packed residuals, pieces."""

    codes: Bytes
    residual_widths: Bytes
    residuals: Bits16
    exceptions: Bits32
    words: Bits16
    packed: Bits64
    pieces: Bytes


class Sums(NamedTuple):
    """Sums over the elements, by context (C) and code (K), and the squared error of the middles of cells."""

    counts_CK: Counts
    deltas_CK: Doubles
    squares_CK: Doubles
    cell_error: float


def work_bytes(n: int) -> int:
    """The work array that `encode_pieces` needs for `n` elements; at worst a piece has ten bytes for each of them."""
    padded = -(-n // LANES) * LANES
    return 12 * padded + 4 * LANES + 24 * (padded * 15 // 64 + 3) + 10 * padded + _TABLE_BYTES + n // 5000


@kernel
def choose_tables(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, stride: int,
    cell_bits: Bytes, widths: Bytes,
) -> None:  # fmt: skip
    """Choose the widths of residuals from every `stride`th tile: of cells by context, of bands by `width_index`."""
    counts = np.zeros(N_SAMPLE_COUNTS, np.uint32)
    count_sample(base, expert, mantissa_bits, contexts, int(lows[0]), cuts, stride, counts)
    choose_widths(counts, len(lows), cell_bits, widths)


@kernel
def _added_up(sums: Doubles, errors: Doubles) -> Sums:
    """Add up what `encode_tiles` accumulated."""
    counts_CK, deltas_CK = np.empty((MAX_CONTEXTS, N_CODES), np.int64), np.empty((MAX_CONTEXTS, N_CODES))
    squares_CK = np.empty((MAX_CONTEXTS, N_CODES))
    for key in range(N_KEYS):
        even, odd = key * SLOT, (N_KEYS + key) * SLOT
        context, code = key // N_CODES, key % N_CODES
        deltas_CK[context, code] = sums[even + _SUM] + sums[odd + _SUM]
        squares_CK[context, code] = sums[even + _SQUARE] + sums[odd + _SQUARE]
        counts_CK[context, code] = np.int64(sums[even + _COUNT] + sums[odd + _COUNT])
    return Sums(counts_CK, deltas_CK, squares_CK, (errors[0] + errors[1]) + (errors[2] + errors[3]))


@kernel
def _record_errors(sums: Sums, recorded: Doubles) -> None:
    """Write the squared errors at NOTHING, HEAD, HEAD_EXACT, BODY, BODY_EXACT."""
    squares, spreads = np.zeros(3), np.zeros(3)
    for context in range(MAX_CONTEXTS):
        for code in range(1, N_CODES):
            stream = 0 if code < FIRST_BODY_CODE else 1 if code < FIRST_CELL_CODE else 2
            square, delta = sums.squares_CK[context, code], sums.deltas_CK[context, code]
            squares[stream] += square
            spreads[stream] += max(square - delta * delta / max(sums.counts_CK[context, code], 1), 0.0)
    unread = squares[1] + squares[2]
    recorded[0], recorded[1], recorded[2] = squares[0] + unread, spreads[0] + unread, unread
    recorded[3], recorded[4] = spreads[0] + spreads[1] + sums.cell_error, sums.cell_error


@kernel
def _record_counts(sums: Sums, counts: Counts) -> None:
    """Write how many deltas are at or above each of the three cuts."""
    n_above = 0
    for band in range(3):
        for context in range(MAX_CONTEXTS):
            n_above += sums.counts_CK[context, 2 * band + 1] + sums.counts_CK[context, 2 * band + 2]
        counts[band] = n_above


@kernel
def _put(out: Bytes, at: int, content: Bytes) -> int:
    """Copy bytes to `out`; return the position after them."""
    copy_bytes(content, len(content), out, at)
    return at + len(content)


@kernel
def _centroids(sums: Sums, n_contexts: int, first: int, stop: int) -> Floats:
    """The mean deltas of the codes from `first` to before `stop`, by context."""
    centroids = np.empty(n_contexts * (stop - first), np.float32)
    for i in range(len(centroids)):
        context, code = i // (stop - first), first + i % (stop - first)
        centroids[i] = np.float32(sums.deltas_CK[context, code] / max(sums.counts_CK[context, code], 1))
    return centroids


@kernel
def _frequencies(sums: Sums, n_contexts: int) -> tuple[Bits16, Bits16]:
    """The frequencies of the symbols of the head stage, and of the body stage, by context."""
    head_counts = np.zeros(n_contexts * HEAD_SYMBOLS, np.int64)
    body_counts = np.zeros(n_contexts * BODY_SYMBOLS, np.int64)
    for context in range(n_contexts):
        for code in range(1, FIRST_BODY_CODE + BODY_SYMBOLS):
            count, is_head = sums.counts_CK[context, code], code < FIRST_BODY_CODE
            head_counts[context * HEAD_SYMBOLS + (code if is_head else 0)] += count
            if not is_head:
                body_counts[context * BODY_SYMBOLS + code - FIRST_BODY_CODE] = count
    head, body = np.empty(len(head_counts), np.uint16), np.empty(len(body_counts), np.uint16)
    scale_rows(head_counts, HEAD_SYMBOLS, head)
    scale_rows(body_counts, BODY_SYMBOLS, body)
    return head, body


@kernel
def _work_arrays(work: Bytes, n: int) -> WorkArrays:
    """Divide the work array of a block of `n` elements."""
    padded = -(-n // LANES) * LANES
    widths, residuals, exceptions, words = padded, 2 * padded, 4 * padded, 8 * padded
    packed = words + 4 * (padded + LANES)
    pieces = packed + 24 * packed_capacity(padded)
    return WorkArrays(
        work[:widths],
        work[widths : widths + n],
        work[residuals : residuals + 2 * n].view(np.uint16),
        work[exceptions:words].view(np.uint32),
        work[words:packed].view(np.uint16),
        work[packed:pieces].view(np.uint64),
        work[pieces:],
    )


@kernel
def _put_stage(frequencies: Bits16, states: Bits32, words: Bits16, out: Bytes, at: int) -> int:
    """Write one stage of symbols; return the position after it."""
    at = _put(out, at, frequencies.view(np.uint8))
    at = _put(out, at, states.view(np.uint8))
    return _put(out, at, words.view(np.uint8))


@kernel
def _write_residuals(
    expert: Bits16, arrays: WorkArrays, n_exceptions: int, widths: Bytes, stream: int, n_bits: int, out: Bytes
) -> int:
    """Write the residual piece of one stream; return its length."""
    first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_CELL_CODE
    stop = FIRST_BODY_CODE if stream == 0 else FIRST_CELL_CODE if stream == 1 else N_CODES
    positions, count = np.empty(n_exceptions + 1, np.uint32), 0
    for e in range(n_exceptions):
        code = arrays.codes[arrays.exceptions[e]]
        positions[count] = arrays.exceptions[e]
        count += int((code >= first) & (code < stop))
    n_columns = stop - first if stream < 2 else 0
    band_widths = np.empty(EDGE_CLASSES * n_columns, np.uint8)
    for i in range(len(band_widths)):
        band_widths[i] = widths[i // n_columns * WIDTHS_PER_CLASS + first - 1 + i % n_columns]
    third = len(arrays.packed) // 3
    packed = arrays.packed[stream * third : (stream + 1) * third].view(np.uint8)[: (n_bits + 7) // 8]
    return int(write_residual_piece(packed, band_widths, positions[:count], expert, out))


@kernel
def _encode_elements(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, cell_bits: Bytes,
    widths: Bytes, arrays: WorkArrays,
) -> tuple[int, Sums]:  # fmt: skip
    """Compute codes and residuals; return the number of exceptions, -1 where a delta is not finite, and the sums."""
    sums, cell_errors = np.zeros(N_SUMS), np.zeros(ERROR_SUMS)
    limit = np.int32(cuts[2] - np.int32(1)).view(np.float32)  # the largest float32 outside the bands
    arrays.codes[len(base) :] = 0
    n_exceptions = encode_tiles(
        base, expert, mantissa_bits, contexts, int(lows[0]), cuts, limit, cell_bits, widths, arrays.codes,
        arrays.residuals, arrays.residual_widths, arrays.exceptions, sums, cell_errors,
    )  # fmt: skip
    return n_exceptions, _added_up(sums, cell_errors)


@kernel
def count_bits(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, cell_bits: Bytes,
    widths: Bytes, work: Bytes, counts_CK: Counts,
) -> int:  # fmt: skip
    """Count the codes by context (`COUNTS_SHAPE`), and return the bits of residuals and exceptions.

    -1 where a delta is not finite. Arguments are those of `encode_pieces`, and the tables of `choose_tables`.
    """
    arrays, n_bits = _work_arrays(work, len(base)), 0
    n_exceptions, sums = _encode_elements(base, expert, mantissa_bits, contexts, lows, cuts, cell_bits, widths, arrays)
    if n_exceptions < 0:
        return -1
    for i in range(len(base)):
        n_bits += arrays.residual_widths[i]
    for context in range(MAX_CONTEXTS):
        for code in range(N_CODES):
            counts_CK[context, code] = sums.counts_CK[context, code]
    return n_bits + EXCEPTION_BITS * n_exceptions


@kernel
def encode_pieces(
    base: Bits16, expert: Bits16, mantissa_bits: int, contexts: Bytes, lows: Bytes, cuts: Integers, stride: int,
    work: Bytes, ends: Counts, errors: Doubles, counts: Counts,
) -> bool:  # fmt: skip
    """Write the pieces of a block to the end of `work`; return whether all deltas are finite, as is needed.

    `contexts` (padded) are those of the base, with the lowest exponents `lows`; every `stride`th tile is a sample for
    the widths of residuals; `work` has `work_bytes`. Sets the `ends` of the pieces (first the place where they begin),
    the squared `errors` at each recorded level, and the `counts` of deltas at or above each cut.
    """
    cell_bits, widths = np.empty(N_LOOKED_UP, np.uint8), np.empty(N_LOOKED_UP, np.uint8)
    choose_tables(base, expert, mantissa_bits, contexts, lows, cuts, stride, cell_bits, widths)
    arrays, n, n_contexts = _work_arrays(work, len(base)), len(base), len(lows)
    n_exceptions, totals = _encode_elements(
        base, expert, mantissa_bits, contexts, lows, cuts, cell_bits, widths, arrays
    )
    if n_exceptions < 0:
        return False
    _record_errors(totals, errors)
    _record_counts(totals, counts)
    head, body = _frequencies(totals, n_contexts)
    states, word_ends, n_bits = np.empty(2 * LANES, np.uint32), np.empty(2, np.int64), np.empty(3, np.int64)
    encode_stages(contexts, arrays.codes, len(contexts), head, body, arrays.words, states, word_ends)
    pack_residuals(arrays.codes[:n], arrays.residuals, arrays.residual_widths, arrays.packed, n_bits)
    out, half = arrays.pieces, len(arrays.words) // 2
    ends[0] = len(work) - len(out)
    out[0] = n_contexts
    at = _put(out, 1, lows)
    at = _put(out, at, _centroids(totals, n_contexts, 1, FIRST_BODY_CODE).view(np.uint8))
    at = _put_stage(head, states[:LANES], arrays.words[word_ends[0] : half], out, at)
    ends[1] = ends[0] + at
    at += _write_residuals(expert, arrays, n_exceptions, widths, 0, n_bits[0], out[at:])
    ends[2] = ends[0] + at
    at = _put(out, at, cell_bits[:n_contexts])
    at = _put(out, at, _centroids(totals, n_contexts, FIRST_BODY_CODE, FIRST_CELL_CODE).view(np.uint8))
    at = _put_stage(body, states[LANES:], arrays.words[word_ends[1] :], out, at)
    for stream in range(1, 3):
        ends[2 + stream] = ends[0] + at
        at += _write_residuals(expert, arrays, n_exceptions, widths, stream, n_bits[stream], out[at:])
    ends[5] = ends[0] + at
    return True
