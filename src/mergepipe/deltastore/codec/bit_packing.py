"""The loops that write fine numbers bit by bit, three streams at once."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.byte_parts import joined
from mergepipe.deltastore.codec.rans import Halves
from mergepipe.deltastore.codec.residual_streams import CHUNK_ELEMENTS, Exceptions
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.symbols import FIRST_BODY_CODE, FIRST_REST_CODE, N_CODES, TILE
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, kernel


@kernel
def _own_numbers(
    codes: Bytes, fines: Halves, own_widths: Bytes, first: np.uint8, last: np.uint8, numbers: Halves, widths: Bytes
) -> None:
    """The numbers of the codes from `first` to `last` and their widths; for others nothing, in 0 bits."""
    for i in range(len(codes)):
        is_own = (codes[i] >= first) & (codes[i] <= last)
        widths[i] = own_widths[i] if is_own else np.uint8(0)
        numbers[i] = fines[i] if is_own else np.uint16(0)


@kernel
def _paired(numbers: Bits32, widths: Halves, pairs: Bits32, pair_widths: Halves) -> None:
    """Two numbers of at most 15 bits in one word, from words of two numbers and of two widths."""
    for i in range(len(numbers)):
        low = np.uint16(widths[i] & np.uint16(0xFF))
        pair_widths[i] = np.uint16(low + np.uint16(widths[i] >> np.uint16(8)))
        second = np.uint32(np.uint32(numbers[i] >> np.uint32(16)) << np.uint32(low & np.uint16(31)))
        pairs[i] = np.uint32(numbers[i] & np.uint32(0xFFFF)) | second


@kernel
def _doubly_paired(pairs: Bits64, widths: Bits32, quads: Bits64, quad_widths: Bits32) -> None:
    """Four numbers in one word, from words of two pairs and of two widths."""
    for i in range(len(pairs)):
        low = np.uint32(widths[i] & np.uint32(0xFFFF))
        quad_widths[i] = np.uint32(low + np.uint32(widths[i] >> np.uint32(16)))
        shift = np.uint64(low & np.uint32(63))
        quads[i] = (pairs[i] & np.uint64(0xFFFFFFFF)) | ((pairs[i] >> np.uint64(32)) << shift)


@kernel
def _merge(words: Bits64, widths: Bits32, merged: Bits64, merged_widths: Bits32) -> bool:
    """Twice as many numbers in each word; whether all of them fit into 63 bits."""
    largest = np.uint32(0)
    for i in range(len(merged)):
        low = widths[2 * i]
        width = np.uint32(low + widths[2 * i + 1])
        merged_widths[i] = width
        largest = width if width > largest else largest
        merged[i] = words[2 * i] | (words[2 * i + 1] << np.uint64(low & np.uint32(63)))
    return bool(largest < np.uint32(64))


@kernel
def _put_words(numbers: Bits64, widths: Bits32, state: Bits64, words: Bits64) -> None:
    """Append numbers of at most 63 bits to `words`; `state`: the next word, its bits so far, how many they are."""
    at, word, filled = state[0], state[1], state[2]
    one, full = np.uint64(1), np.uint64(63)
    for i in range(len(numbers)):
        number = numbers[i]
        word |= number << filled
        words[at] = word
        rest = (number >> one) >> (full - filled)
        filled += np.uint64(widths[i])
        is_over = filled > full
        word = rest if is_over else word
        at += np.uint64(is_over)
        filled &= full
    state[0], state[1], state[2] = at, word, filled


@kernel
def _pack_stream(
    codes: Bytes, fines: Halves, own_widths: Bytes, first: np.uint8, last: np.uint8, words: Bits64
) -> np.int64:
    """Write the numbers of the codes from `first` to `last`; returns their bits."""
    n, quarter = len(codes), TILE // 4
    numbers, widths = np.empty(TILE, np.uint16), np.empty(TILE, np.uint8)
    numbers32, width_pairs = numbers.view(np.uint32), widths.view(np.uint16)
    pairs, pair_widths = np.empty(TILE // 2, np.uint32), np.empty(TILE // 2, np.uint16)
    pairs64, pair_widths32 = pairs.view(np.uint64), pair_widths.view(np.uint32)
    of4, widths4 = np.empty(quarter, np.uint64), np.empty(quarter, np.uint32)
    of8, widths8 = np.empty(quarter // 2, np.uint64), np.empty(quarter // 2, np.uint32)
    of16, widths16 = np.empty(quarter // 4, np.uint64), np.empty(quarter // 4, np.uint32)
    of32, widths32 = np.empty(quarter // 8, np.uint64), np.empty(quarter // 8, np.uint32)
    state = np.zeros(3, np.uint64)
    for tile in range(0, n, TILE):
        stop = min(tile + TILE, n)
        widths[stop - tile :] = 0
        numbers[stop - tile :] = 0
        _own_numbers(codes[tile:stop], fines[tile:stop], own_widths[tile:stop], first, last, numbers, widths)
        _paired(numbers32, width_pairs, pairs, pair_widths)
        _doubly_paired(pairs64, pair_widths32, of4, widths4)
        # As many numbers at a time as fit into a word: appending one takes longer than all that comes before.
        if not _merge(of4, widths4, of8, widths8):
            _put_words(of4, widths4, state, words)
        elif not _merge(of8, widths8, of16, widths16):
            _put_words(of8, widths8, state, words)
        elif not _merge(of16, widths16, of32, widths32):
            _put_words(of16, widths16, state, words)
        else:
            _put_words(of32, widths32, state, words)
    words[state[0]] = state[1]
    return np.int64(state[0] * np.uint64(64) + state[2])


@kernel
def pack_fines(codes: Bytes, fines: Halves, own_widths: Bytes, words: Bits64, n_bits: Counts) -> None:
    """Write the fine numbers of three streams (head, body, rest), lowest bit first, each from a third of `words` on.

    A third has room for 15 bits an element and two words more. `n_bits` become the lengths of the streams.
    """
    third = len(words) // 3
    edges = np.array([1, FIRST_BODY_CODE, FIRST_REST_CODE, N_CODES], np.uint8)
    for stream in range(3):
        own = words[stream * third : (stream + 1) * third]
        last = np.uint8(edges[stream + 1] - np.uint8(1))
        n_bits[stream] = _pack_stream(codes, fines, own_widths, edges[stream], last, own)


def packed_streams(codes: Bytes, fines: Halves, own_widths: Bytes) -> list[Bytes]:
    """The fine numbers of the three streams, bit by bit. In `scratch`."""
    room = len(fines) * 15 // 64 + 3
    words, n_bits = scratch("encode-fines", 3 * room, np.uint64), np.zeros(3, np.int64)
    pack_fines(codes, fines, own_widths, words, n_bits)
    packed = words.view(np.uint8)
    return [packed[i * room * 8 : i * room * 8 - (-bits // 8)] for i, bits in enumerate(n_bits.tolist())]


def fine_piece(packed: Bytes, widths: Bytes, exceptions: Exceptions, n: int) -> Bytes:
    """One piece of a block of `n` elements: widths (of bands), exceptions by chunk, the packed numbers."""
    if not len(packed) and not len(exceptions.positions):
        return np.empty(0, np.uint8)
    halves = (widths[::2] | (widths[1::2] << np.uint8(4))).astype(np.uint8)
    counts = np.bincount(exceptions.positions // CHUNK_ELEMENTS, minlength=-(-n // CHUNK_ELEMENTS)).astype(np.uint32)
    return joined(halves, counts, exceptions.positions.astype(np.uint16), exceptions.bits, packed)
