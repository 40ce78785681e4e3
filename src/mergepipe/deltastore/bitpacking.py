"""The loops that write fine numbers bit by bit, three streams at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.fines import EXCEPTION_BITS, STREAM_CODES, WIDTH_COUNTS, Exceptions
from mergepipe.deltastore.loops import FIRST_BODY_CODE, FIRST_REST_CODE, N_CODES, TILE
from mergepipe.deltastore.parts import joined
from mergepipe.deltastore.rans import Halves
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, Counts, kernel


@kernel
def _own_numbers(
    codes: Bytes, fines: Halves, own_widths: Bytes, first: np.uint8, last: np.uint8, numbers: Bits32, widths: Bits32
) -> None:
    """The numbers of the codes from `first` to `last` and their widths; for others nothing, in 0 bits."""
    for i in range(len(codes)):
        is_own = (codes[i] >= first) & (codes[i] <= last)
        widths[i] = np.uint32(own_widths[i]) if is_own else np.uint32(0)
        numbers[i] = np.uint32(fines[i]) if is_own else np.uint32(0)


@kernel
def _paired(numbers: Bits32, widths: Bits32, pairs: Bits32, pair_widths: Bits32) -> None:
    """Two numbers in one word: their widths are at most 15."""
    for i in range(len(pairs)):
        pairs[i] = np.uint32(numbers[2 * i] | np.uint32(numbers[2 * i + 1] << widths[2 * i]))
        pair_widths[i] = np.uint32(widths[2 * i] + widths[2 * i + 1])


@kernel
def _doubly_paired(pairs: Bits32, widths: Bits32, quads: Bits64, quad_widths: Bits64) -> None:
    """Four numbers in one word, from pairs."""
    for i in range(len(quads)):
        quads[i] = np.uint64(pairs[2 * i]) | (np.uint64(pairs[2 * i + 1]) << np.uint64(widths[2 * i]))
        quad_widths[i] = np.uint64(np.uint32(widths[2 * i] + widths[2 * i + 1]))


@kernel
def _put_quads(quads: Bits64, widths: Bits64, state: Bits64, words: Bits64) -> None:
    """Append quads to `words`; `state`: the next word, its bits so far, how many they are."""
    at, word, filled = state[0], state[1], state[2]
    one, full = np.uint64(1), np.uint64(63)
    for i in range(len(quads)):
        quad = quads[i]
        word |= quad << filled
        words[at] = word
        rest = (quad >> one) >> (full - filled)
        filled += widths[i]
        is_over = filled > full
        word = rest if is_over else word
        at += np.uint64(is_over)
        filled &= full
    state[0], state[1], state[2] = at, word, filled


@kernel
def pack_fines(codes: Bytes, fines: Halves, own_widths: Bytes, words: Bits64, n_bits: Counts) -> None:
    """Write the fine numbers of three streams (head, body, rest), lowest bit first, each from a third of `words` on.

    A third has room for 15 bits an element and two words more. `n_bits` become the lengths of the streams.
    """
    n, room = len(codes), len(words) // 3
    numbers, widths = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32)
    pairs, pair_widths = np.empty(TILE // 2, np.uint32), np.empty(TILE // 2, np.uint32)
    quads, quad_widths = np.empty(TILE // 4, np.uint64), np.empty(TILE // 4, np.uint64)
    edges = np.array([1, FIRST_BODY_CODE, FIRST_REST_CODE, N_CODES], np.uint8)
    for stream in range(3):
        state = np.zeros(3, np.uint64)
        own = words[stream * room : (stream + 1) * room]
        first, last = edges[stream], np.uint8(edges[stream + 1] - 1)
        for tile in range(0, n, TILE):
            stop = min(tile + TILE, n)
            if stop - tile < TILE:
                widths[:] = 0
                numbers[:] = 0
            _own_numbers(codes[tile:stop], fines[tile:stop], own_widths[tile:stop], first, last, numbers, widths)
            _paired(numbers, widths, pairs, pair_widths)
            _doubly_paired(pairs, pair_widths, quads, quad_widths)
            _put_quads(quads, quad_widths, state, own)
        own[state[0]] = state[1]
        n_bits[stream] = np.int64(state[0] * np.uint64(64) + state[2])


def cheapest_widths(counts_SW: Counts) -> NDArray[np.uint8]:
    """By `width_slot`: the bits that cost least, with exceptions for what does not fit. Counts by slot and width."""
    totals_S = counts_SW.sum(axis=1, keepdims=True)
    beyond_SW = totals_S - counts_SW.cumsum(axis=1)
    cost_SW = np.arange(WIDTH_COUNTS) * totals_S + EXCEPTION_BITS * beyond_SW
    return np.asarray(cost_SW[:, : WIDTH_COUNTS - 1].argmin(axis=1), np.uint8)


def packed_streams(codes: Bytes, fines: Halves, own_widths: Bytes) -> list[NDArray[np.uint8]]:
    """The fine numbers of the three streams, bit by bit."""
    room = len(fines) * 15 // 64 + 3
    words, n_bits = np.empty(3 * room, np.uint64), np.zeros(3, np.int64)
    pack_fines(codes, fines, own_widths, words, n_bits)
    packed = words.view(np.uint8)
    return [packed[i * room * 8 : i * room * 8 - (-bits // 8)] for i, bits in enumerate(n_bits.tolist())]


def fine_piece(
    packed: NDArray[np.uint8], widths: NDArray[np.uint8], stream: int, n_contexts: int, exceptions: Exceptions
) -> NDArray[np.uint8]:
    """One piece: widths (bands only), the number of exceptions, their positions and bits, the packed numbers."""
    first, last = STREAM_CODES[stream]
    own = widths.reshape(-1, N_CODES, 2)[:n_contexts, first : last + 1]
    stored = own if last < FIRST_REST_CODE else np.empty(0, np.uint8)
    if not len(packed) and not len(exceptions.positions):
        return np.empty(0, np.uint8)
    count = np.array([len(exceptions.positions)], np.uint32)
    return joined(stored, count, exceptions.positions, exceptions.bits, packed)
