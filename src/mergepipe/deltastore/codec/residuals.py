"""Residuals of elements: the widths of their streams, packed into bits and unpacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mergepipe.deltastore.codec.element_codes import (
    CHUNK_ELEMENTS,
    EDGE_CLASSES,
    EXCEPTION_BITS,
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    MAX_CELL_BITS,
    N_CODES,
    N_WIDTHS,
    NEAR_CELLS,
    QUANTILE_BUCKETS,
    TILE,
    WIDTH_COUNTS,
    WIDTHS_PER_CLASS,
)
from mergepipe.deltastore.codec.rans import MAX_CONTEXTS, Bits16
from mergepipe.deltastore.codec.stream_elements import ROUND, STREAM_ROOM, collect
from mergepipe.deltastore.codec.vectors import I64, array_pointers, call_intrinsic, copy_bytes, core, has_features
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, intrinsic, kernel

# --- choose the widths of residuals, in bits, from a sample of a block ---
#
# Format: `bits` and "Widths of bands" in docs/internals/formats/delta-store.md.


_QUANTILE_PER_MILLE = 996
_UNSEEN = 255
FIRST_STEP_COUNT = N_WIDTHS * WIDTH_COUNTS
N_SAMPLE_COUNTS = FIRST_STEP_COUNT + MAX_CONTEXTS * QUANTILE_BUCKETS
"""Counts of a sample: first of residuals in bands, by `width_index` and the bits they need (16: more than any width);
then of ordinal differences outside the bands, by context and bucket: exact up to 15, then eighths of octaves."""


@kernel
def _cheapest_width(counts: Bits32) -> np.uint8:
    """The width with the least cost in bits, counting an exception for each residual that does not fit."""
    total = np.int64(0)
    for width in range(WIDTH_COUNTS):
        total += np.int64(counts[width])
    best_width, least_cost, exceptions = 0, np.int64(-1), total
    for width in range(WIDTH_COUNTS - 1):
        exceptions -= np.int64(counts[width])
        cost = width * total + EXCEPTION_BITS * exceptions
        if least_cost < 0 or cost < least_cost:
            best_width, least_cost = width, cost
    return np.uint8(best_width)


@kernel
def _cell_bits_of(counts: Bits32) -> np.uint8:
    """The width of residuals in cells with which few cells hold nearly all differences."""
    total = np.int64(0)
    for bucket in range(QUANTILE_BUCKETS):
        total += np.int64(counts[bucket])
    needed = (total * _QUANTILE_PER_MILLE + 999) // 1000
    quantile_bucket, reached = 0, np.int64(counts[0])
    while reached < needed:
        quantile_bucket += 1
        reached += np.int64(counts[quantile_bucket])
    shift = max(quantile_bucket - 8, 0) // 8
    largest, bits = (quantile_bucket - shift * 8) << shift, 0
    while largest >> bits > NEAR_CELLS:
        bits += 1
    return np.uint8(min(bits, MAX_CELL_BITS))


@kernel
def _fill_unseen(widths: Bytes) -> None:
    """Give an edge class that the sample lacks the width of the next finer class it has, else of the coarser one."""
    for column in range(WIDTHS_PER_CLASS):
        nearest = np.uint8(0)
        for edge in range(EDGE_CLASSES):
            width = widths[edge * WIDTHS_PER_CLASS + column]
            nearest = nearest if width == _UNSEEN else width
        for edge in range(EDGE_CLASSES - 1, -1, -1):
            index = edge * WIDTHS_PER_CLASS + column
            nearest = nearest if widths[index] == _UNSEEN else widths[index]
            widths[index] = nearest


@kernel
def choose_widths(counts: Bits32, n_contexts: int, cell_bits: Bytes, widths: Bytes) -> None:
    """Choose `cell_bits` by context and `widths` of bands from the counts of a sample; tables of 256 bytes."""
    widths[:] = 0
    for index in range(N_WIDTHS):
        width_counts = counts[index * WIDTH_COUNTS : (index + 1) * WIDTH_COUNTS]
        widths[index] = _cheapest_width(width_counts) if width_counts.any() else np.uint8(_UNSEEN)
    _fill_unseen(widths)
    cell_bits[:] = 0
    for context in range(n_contexts):
        first = FIRST_STEP_COUNT + context * QUANTILE_BUCKETS
        cell_bits[context] = _cell_bits_of(counts[first : first + QUANTILE_BUCKETS])


# --- pack residuals into bit streams ---
#
# Format: HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.


_GROUP = 32
"""Residuals that are concatenated at most before they are appended to a stream."""


class _Tile(NamedTuple):
    """Work arrays: copies of a tile, padded, and the residuals of one of its streams with their widths."""

    codes: Bytes
    all_widths: Bytes
    all_residuals: Bits16
    widths: Bytes
    residuals: Bits16


@kernel
def _make_tile() -> _Tile:
    """Allocate the work arrays."""
    return _Tile(
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint16),
        np.empty(STREAM_ROOM, np.uint8),
        np.empty(STREAM_ROOM, np.uint16),
    )


@kernel
def _collect_residuals(
    codes: Bytes, residuals: Bits16, residual_widths: Bytes, first: int, last: int, tile: _Tile
) -> int:
    """Collect the residuals of the codes from `first` to `last` of a tile, and residuals of width 0 up to a group.

    Returns their number, a multiple of `_GROUP`.
    """
    n = len(codes)
    padded = -(-n // ROUND) * ROUND
    if padded > n:  # the last tile of a block: whole vectors are read
        for i in range(n):
            tile.codes[i], tile.all_widths[i], tile.all_residuals[i] = codes[i], residual_widths[i], residuals[i]
        tile.codes[n:padded] = 0
        codes, residual_widths, residuals = tile.codes[:padded], tile.all_widths[:padded], tile.all_residuals[:padded]
    count = collect(codes, padded, first, last, residual_widths, residuals, tile.widths, tile.residuals)
    n_grouped = -(-count // _GROUP) * _GROUP
    tile.widths[count:n_grouped] = 0
    tile.residuals[count:n_grouped] = 0
    return n_grouped


@kernel
def _concatenate_pairs(residuals: Bits32, widths: Bits16, pairs: Bits32, pair_widths: Bits16) -> None:
    """Concatenate residuals of at most 15 bits in pairs; an input word holds two residuals, or two widths."""
    for i in range(len(residuals)):
        low = np.uint16(widths[i] & np.uint16(0xFF))
        pair_widths[i] = np.uint16(low + np.uint16(widths[i] >> np.uint16(8)))
        second = np.uint32(np.uint32(residuals[i] >> np.uint32(16)) << np.uint32(low & np.uint16(31)))
        pairs[i] = np.uint32(residuals[i] & np.uint32(0xFFFF)) | second


@kernel
def _concatenate_fours(pairs: Bits64, widths: Bits32, quads: Bits64, quad_widths: Bits32) -> None:
    """Concatenate pairs into fours; an input word holds two pairs, or two widths."""
    for i in range(len(pairs)):
        low = np.uint32(widths[i] & np.uint32(0xFFFF))
        quad_widths[i] = np.uint32(low + np.uint32(widths[i] >> np.uint32(16)))
        shift = np.uint64(low & np.uint32(63))
        quads[i] = (pairs[i] & np.uint64(0xFFFFFFFF)) | ((pairs[i] >> np.uint64(32)) << shift)


@kernel
def _concatenate_words(words: Bits64, widths: Bits32, merged: Bits64, merged_widths: Bits32) -> bool:
    """Concatenate neighbouring words in pairs; return whether every result fits into 63 bits."""
    largest = np.uint32(0)
    for i in range(len(merged)):
        low = widths[2 * i]
        width = np.uint32(low + widths[2 * i + 1])
        merged_widths[i] = width
        largest = width if width > largest else largest
        merged[i] = words[2 * i] | (words[2 * i + 1] << np.uint64(low & np.uint32(63)))
    return bool(largest < np.uint32(64))


@kernel
def _append_words(groups: Bits64, widths: Bits32, state: Bits64, words: Bits64) -> None:
    """Append bit groups of at most 63 bits to `words`.

    `state` holds the index of the current word, its bits so far and their number.
    """
    index, word, n_bits = state[0], state[1], state[2]
    one, full = np.uint64(1), np.uint64(63)
    for i in range(len(groups)):
        group = groups[i]
        word |= group << n_bits
        words[index] = word
        overflow = (group >> one) >> (full - n_bits)
        n_bits += np.uint64(widths[i])
        is_full = n_bits > full
        word = overflow if is_full else word
        index += np.uint64(is_full)
        n_bits &= full
    state[0], state[1], state[2] = index, word, n_bits


@kernel
def _pack_stream(
    codes: Bytes, residuals: Bits16, residual_widths: Bytes, first: np.uint8, last: np.uint8, words: Bits64
) -> np.int64:
    """Pack the residuals of the codes from `first` to `last`; return the length of the stream in bits."""
    n, quarter, tile = len(codes), TILE // 4, _make_tile()
    pairs, pair_widths = np.empty(TILE // 2, np.uint32), np.empty(TILE // 2, np.uint16)
    fours, widths4 = np.empty(quarter, np.uint64), np.empty(quarter, np.uint32)
    eights, widths8 = np.empty(quarter // 2, np.uint64), np.empty(quarter // 2, np.uint32)
    sixteens, widths16 = np.empty(quarter // 4, np.uint64), np.empty(quarter // 4, np.uint32)
    thirty_twos, widths32 = np.empty(quarter // 8, np.uint64), np.empty(quarter // 8, np.uint32)
    state = np.zeros(3, np.uint64)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        count = _collect_residuals(
            codes[start:stop], residuals[start:stop], residual_widths[start:stop], int(first), int(last), tile
        )
        residual_pairs, width_pairs = tile.residuals[:count].view(np.uint32), tile.widths[:count].view(np.uint16)
        _concatenate_pairs(residual_pairs, width_pairs, pairs, pair_widths)
        n4, n8, n16, n32 = count // 4, count // 8, count // 16, count // 32
        _concatenate_fours(
            pairs[: count // 2].view(np.uint64), pair_widths[: count // 2].view(np.uint32), fours, widths4
        )
        # Append the largest groups that fit into a word: appending costs more than the concatenation before it.
        if not _concatenate_words(fours, widths4, eights[:n8], widths8):
            _append_words(fours[:n4], widths4, state, words)
        elif not _concatenate_words(eights, widths8, sixteens[:n16], widths16):
            _append_words(eights[:n8], widths8, state, words)
        elif not _concatenate_words(sixteens, widths16, thirty_twos[:n32], widths32):
            _append_words(sixteens[:n16], widths16, state, words)
        else:
            _append_words(thirty_twos[:n32], widths32, state, words)
    words[state[0]] = state[1]
    return np.int64(state[0] * np.uint64(64) + state[2])


@kernel
def pack_residuals(codes: Bytes, residuals: Bits16, residual_widths: Bytes, words: Bits64, n_bits: Counts) -> None:
    """Pack the residuals of the streams head, body and rest, lowest bit first, each into a third of `words`.

    A third holds 15 bits per element and two more words. `n_bits` is set to the lengths of the streams.
    """
    third = len(words) // 3
    first_codes = np.array([1, FIRST_BODY_CODE, FIRST_CELL_CODE, N_CODES], np.uint8)
    for stream in range(3):
        stream_words = words[stream * third : (stream + 1) * third]
        last = np.uint8(first_codes[stream + 1] - np.uint8(1))
        n_bits[stream] = _pack_stream(codes, residuals, residual_widths, first_codes[stream], last, stream_words)


@kernel
def packed_capacity(n: int) -> int:
    """The words of one stream of a block of `n` elements in `pack_residuals`."""
    return n * 15 // 64 + 3


@kernel
def write_residual_piece(packed: Bytes, band_widths: Bytes, exceptions: Bits32, expert: Bits16, out: Bytes) -> int:
    """Write a residual piece: widths (of bands only, in pairs), exceptions by chunk, packed residuals.

    `exceptions` are the positions of those of the stream. Returns the bytes of the piece; it is empty where there is
    neither a residual nor an exception.
    """
    n, count = len(expert), len(exceptions)
    if not len(packed) and not count:
        return 0
    n_widths = len(band_widths) // 2
    for i in range(n_widths):
        out[i] = band_widths[2 * i] | np.uint8(band_widths[2 * i + 1] << np.uint8(4))
    chunks, positions = np.zeros(-(-n // CHUNK_ELEMENTS), np.uint32), np.empty(2 * count, np.uint16)
    for e in range(count):
        position = np.uint64(exceptions[e])
        chunks[position // np.uint64(CHUNK_ELEMENTS)] += np.uint32(1)
        positions[e], positions[count + e] = np.uint16(position % np.uint64(CHUNK_ELEMENTS)), expert[position]
    counted = n_widths + 4 * len(chunks)
    listed = counted + 4 * count
    copy_bytes(chunks.view(np.uint8), counted - n_widths, out, n_widths)
    copy_bytes(positions.view(np.uint8), listed - counted, out, counted)
    copy_bytes(packed, len(packed), out, listed)
    return listed + len(packed)


# --- unpack a residual stream four residuals at a time with the BMI2 instruction PDEP ---
#
# Format: the residuals at the end of HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.


_MIN_LOADED_BITS = 57
"""A 64-bit load holds at least this many bits of the stream, at whichever bit of a byte it begins."""


HAS_PDEP = has_features("bmi2")


def _load_word_intrinsic(_typing: Any, stored: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: load 64 bits from any byte offset."""
    signature = core.types.uint64(stored, core.types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = array_pointers(context, builder, signature, arguments)
        loaded = builder.load(builder.bitcast(builder.gep(array, [at]), I64.as_pointer()))
        loaded.align = 1
        return loaded

    return signature, generate


def _deposit_bits_intrinsic(_typing: Any, bits: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: deposit the lowest bits of `bits` at the ones of `mask`; a constant 0 on machines without PDEP."""
    signature = core.types.uint64(bits, mask)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if not HAS_PDEP:
            return I64(0)
        return call_intrinsic(builder, "llvm.x86.bmi.pdep.64", I64, *arguments)

    return signature, generate


def _count_ones_intrinsic(_typing: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: count the ones of `mask`."""
    return core.types.uint64(mask), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


_load_word: Any = intrinsic(_load_word_intrinsic)
_deposit_bits: Any = intrinsic(_deposit_bits_intrinsic)
count_ones: Any = intrinsic(_count_ones_intrinsic)


@kernel
def unpack_stream(stored: Bytes, position: np.uint64, masks: Bits16, residuals: Bits16) -> np.uint64:
    """Unpack the residuals of one stream, from bit `position` of `stored` on.

    `masks` has as many low ones as each residual has bits, at most 15. Returns the bit position after the last one.
    """
    bit_position, seven = np.uint64(position), np.uint64(7)
    for i in range(len(masks)):
        byte = bit_position >> np.uint64(3)
        loaded = np.uint64(stored[byte]) | (np.uint64(stored[byte + np.uint64(1)]) << np.uint64(8))
        loaded |= np.uint64(stored[byte + np.uint64(2)]) << np.uint64(16)
        residuals[i] = np.uint16((loaded >> (bit_position & seven)) & np.uint64(masks[i]))
        bit_position += count_ones(np.uint64(masks[i]))
    return bit_position


@kernel
def unpack_stream_by_4(stored: Bytes, position: np.uint64, masks: Bits16, residuals: Bits16) -> np.uint64:
    """Unpack like `unpack_stream`, four residuals at a time, where `HAS_PDEP`.

    The length of both arrays is a multiple of 4. `stored` is readable for 16 bytes past the last residual.
    """
    masks64, residuals64 = masks.view(np.uint64), residuals.view(np.uint64)
    bit_position, seven = np.uint64(position), np.uint64(7)
    for i in range(len(masks64)):
        byte, skipped_bits, count = bit_position >> np.uint64(3), bit_position & seven, count_ones(masks64[i])
        bits = _load_word(stored, byte) >> skipped_bits
        if count > np.uint64(_MIN_LOADED_BITS):  # rare
            bits |= (_load_word(stored, byte + np.uint64(8)) << np.uint64(1)) << (np.uint64(63) - skipped_bits)
        residuals64[i] = _deposit_bits(bits, masks64[i])
        bit_position += count
    return bit_position
