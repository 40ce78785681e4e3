"""Entropy-code bytes with one rANS state and a compact table, for planes whose length does not pay for 64 states.

Format: form 4 of the planes of "BYTES" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.entropy.rans import LOWEST_STATE, PRECISION_BITS, TOTAL, Bits16
from mergepipe.kernels.compilation.compiled import Bytes, Counts, kernel

N_BYTES = 256
TWO_BYTES_FROM = 128
"""Frequencies from this on take two bytes."""


@kernel
def encode_single(symbols: Bytes, frequencies: Bits16, words: Bits16, ends: Counts) -> None:
    """Encode from the last byte to the first; `words` (one more than symbols) is filled from its end.

    `ends` are set to the index of the first word and the decoder's initial state.
    """
    starts = np.zeros(N_BYTES, np.uint32)
    for byte in range(1, N_BYTES):
        starts[byte] = starts[byte - 1] + np.uint32(frequencies[byte - 1])
    state, word = np.uint32(LOWEST_STATE), len(words)
    for i in range(len(symbols) - 1, -1, -1):
        symbol = np.uint64(symbols[i])
        frequency = np.uint32(frequencies[symbol])
        if state >= frequency << np.uint32(31 - PRECISION_BITS):
            word -= 1
            words[word] = np.uint16(state & np.uint32(0xFFFF))
            state = np.uint32(state >> np.uint32(16))
        quotient = np.uint32(state // frequency)
        left = np.uint32(state - np.uint32(quotient * frequency))
        state = np.uint32(np.uint32(quotient << np.uint32(PRECISION_BITS)) + np.uint32(left + starts[symbol]))
    ends[0], ends[1] = word, np.int64(state)


@kernel
def decode_single(words: Bits16, first_state: int, frequencies: Bits16, symbols: Bytes) -> bool:
    """Decode all of `symbols`; return whether words and state end where they should. Frequencies add up to `TOTAL`."""
    table, offsets = np.empty(TOTAL, np.uint8), np.empty(TOTAL, np.uint16)
    slot = 0
    for byte in range(N_BYTES):
        for offset in range(int(frequencies[byte])):
            table[slot], offsets[slot] = byte, offset
            slot += 1
    state, word = np.uint32(first_state), 0
    for i in range(len(symbols)):
        at = np.uint64(state & np.uint32(TOTAL - 1))
        symbol = table[at]
        symbols[i] = symbol
        frequency = np.uint32(frequencies[np.uint64(symbol)])
        state = np.uint32(np.uint32(frequency * np.uint32(state >> np.uint32(PRECISION_BITS))) + np.uint32(offsets[at]))
        if state < np.uint32(LOWEST_STATE):
            if word == len(words):
                return False
            state = np.uint32(np.uint32(state << np.uint32(16)) | np.uint32(words[word]))
            word += 1
    return word == len(words) and state == np.uint32(LOWEST_STATE)


def stored_frequencies(frequencies: Bits16) -> bytes:
    """The table as stored: a bit for each byte that occurs, then the frequencies of these in one or two bytes."""
    present = np.packbits(frequencies > 0, bitorder="little")
    table = bytearray(present.tobytes())
    for frequency in frequencies[frequencies > 0].tolist():
        is_small = frequency < TWO_BYTES_FROM
        table += bytes([frequency] if is_small else [TWO_BYTES_FROM | frequency >> 8, frequency & 0xFF])
    return bytes(table)
