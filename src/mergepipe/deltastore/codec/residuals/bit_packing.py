"""Pack residuals into bit streams.

Format: HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import Bits16
from mergepipe.deltastore.codec.generic.byte_reader import concatenate_bytes
from mergepipe.deltastore.codec.residuals.streams import CHUNK_ELEMENTS, Exceptions
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.tiles.element_codes import FIRST_BODY_CODE, FIRST_CELL_CODE, N_CODES, TILE
from mergepipe.kernels.compilation.compiled import Bits32, Bits64, Bytes, Counts, kernel


@kernel
def _select_residuals(
    codes: Bytes,
    residuals: Bits16,
    residual_widths: Bytes,
    first: np.uint8,
    last: np.uint8,
    selected: Bits16,
    selected_widths: Bytes,
) -> None:
    """Select the residuals of the codes from `first` to `last`; other elements get residual 0 of width 0."""
    for i in range(len(codes)):
        is_selected = (codes[i] >= first) & (codes[i] <= last)
        selected_widths[i] = residual_widths[i] if is_selected else np.uint8(0)
        selected[i] = residuals[i] if is_selected else np.uint16(0)


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
    n, quarter = len(codes), TILE // 4
    selected, widths = np.empty(TILE, np.uint16), np.empty(TILE, np.uint8)
    selected32, width_pairs = selected.view(np.uint32), widths.view(np.uint16)
    pairs, pair_widths = np.empty(TILE // 2, np.uint32), np.empty(TILE // 2, np.uint16)
    pairs64, pair_widths32 = pairs.view(np.uint64), pair_widths.view(np.uint32)
    fours, widths4 = np.empty(quarter, np.uint64), np.empty(quarter, np.uint32)
    eights, widths8 = np.empty(quarter // 2, np.uint64), np.empty(quarter // 2, np.uint32)
    sixteens, widths16 = np.empty(quarter // 4, np.uint64), np.empty(quarter // 4, np.uint32)
    thirty_twos, widths32 = np.empty(quarter // 8, np.uint64), np.empty(quarter // 8, np.uint32)
    state = np.zeros(3, np.uint64)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        widths[stop - tile :] = 0
        selected[stop - tile :] = 0
        _select_residuals(
            codes[tile:stop], residuals[tile:stop], residual_widths[tile:stop], first, last, selected, widths
        )
        _concatenate_pairs(selected32, width_pairs, pairs, pair_widths)
        _concatenate_fours(pairs64, pair_widths32, fours, widths4)
        # Append the largest groups that fit into a word: appending costs more than the concatenation before it.
        if not _concatenate_words(fours, widths4, eights, widths8):
            _append_words(fours, widths4, state, words)
        elif not _concatenate_words(eights, widths8, sixteens, widths16):
            _append_words(eights, widths8, state, words)
        elif not _concatenate_words(sixteens, widths16, thirty_twos, widths32):
            _append_words(sixteens, widths16, state, words)
        else:
            _append_words(thirty_twos, widths32, state, words)
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


def pack_streams(codes: Bytes, residuals: Bits16, residual_widths: Bytes) -> list[Bytes]:
    """Pack the residuals of the three streams; the returned arrays are views of `scratch` memory."""
    stream_capacity = len(residuals) * 15 // 64 + 3
    words, n_bits = scratch("encode-packed", 3 * stream_capacity, np.uint64), np.zeros(3, np.int64)
    pack_residuals(codes, residuals, residual_widths, words, n_bits)
    packed = words.view(np.uint8)
    return [
        packed[i * stream_capacity * 8 : i * stream_capacity * 8 - (-bits // 8)]
        for i, bits in enumerate(n_bits.tolist())
    ]


def residual_piece(packed: Bytes, widths: Bytes, exceptions: Exceptions, n: int) -> Bytes:
    """Assemble one residual piece of a block of `n` elements.

    It consists of the widths (bands only), the exceptions by chunk and the packed residuals.
    """
    if not len(packed) and not len(exceptions.positions):
        return np.empty(0, np.uint8)
    packed_widths = (widths[::2] | (widths[1::2] << np.uint8(4))).astype(np.uint8)
    counts = np.bincount(exceptions.positions // CHUNK_ELEMENTS, minlength=-(-n // CHUNK_ELEMENTS)).astype(np.uint32)
    return concatenate_bytes(packed_widths, counts, exceptions.positions.astype(np.uint16), exceptions.bits, packed)
