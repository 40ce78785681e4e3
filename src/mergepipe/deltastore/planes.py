"""Words of a block as folded differences from the base, in planes of one byte of each; four bytes of a plane in one.

Format: "BYTES and STANDALONE" in docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.kernels.compiled import Bytes, exported

Words = NDArray[np.signedinteger]
UnsignedWords = NDArray[np.unsignedinteger]
_ITEMSIZES = (1, 2, 4, 8)

ESCAPE = 3
"""The least byte that is written apart where four are written as one."""


@exported("folded", itemsizes=_ITEMSIZES)
def fold_differences(base: Words, expert: Words, flip: np.signedinteger, folded: Words) -> None:
    """Write differences modulo their width in value order, zigzag-folded so that small magnitudes are small numbers.

    All are signed. `flip` is what puts negative elements in order: all bits but the sign of floats, 0 of integers; from
    a base of zeros floats become magnitudes above signs. Only elements of arrays are compared with 0, and each loop
    does so once: it is then vector code of their width.
    """
    for i in range(len(folded)):
        base_bits, expert_bits = base[i], expert[i]
        folded[i] = (expert_bits ^ (flip if expert_bits < 0 else 0)) - (base_bits ^ (flip if base_bits < 0 else 0))
    for i in range(len(folded)):
        folded[i] = (folded[i] << 1) ^ (-1 if folded[i] < 0 else 0)


@exported("expert", itemsizes=_ITEMSIZES)
def unfold_differences(base: Words, folded: UnsignedWords, flip: np.signedinteger, expert: Words) -> None:
    """Restore the expert's elements: the inverse of `fold_differences`; `folded` is unsigned, the others signed."""
    for i in range(len(expert)):
        base_bits, folded_bits = base[i], np.int64(folded[i])
        difference = ((folded_bits >> 1) & np.int64(0x7FFFFFFFFFFFFFFF)) ^ -(folded_bits & 1)
        expert[i] = (base_bits ^ (flip if base_bits < 0 else 0)) + difference
    for i in range(len(expert)):
        expert[i] ^= flip if expert[i] < 0 else 0


@exported("plane", itemsizes=_ITEMSIZES)
def extract_plane(words: Words, byte: int, plane: Bytes) -> None:
    """Extract byte number `byte` of every word."""
    shift = np.uint64(8 * byte)
    for i in range(len(plane)):
        plane[i] = np.uint8((np.uint64(words[i]) >> shift) & np.uint64(0xFF))


@exported("words", itemsizes=_ITEMSIZES)
def insert_plane(plane: Bytes, byte: int, words: UnsignedWords) -> None:
    """Set byte number `byte` of every word, which is 0 before."""
    shift = np.uint64(8 * byte)
    for i in range(len(words)):
        words[i] = np.uint64(words[i]) | (np.uint64(plane[i]) << shift)


@exported("quarters", "escapes")
def fold_quarters(plane: Bytes, quarters: Bytes, escapes: Bytes) -> int:
    """Write four bytes as one, those from `ESCAPE` on apart; return how many these are.

    `plane` is four times as long as `quarters`, `escapes` longer by one.
    """
    count = np.uint64(0)
    for i in range(len(quarters)):
        quarter = np.uint8(0)
        for j in range(4):
            byte = plane[4 * i + j]
            escapes[count] = np.uint8(byte - np.uint8(ESCAPE))  # overwritten by the next unless it is counted
            count += np.uint64(byte >= np.uint8(ESCAPE))
            quarter |= np.uint8(min(byte, np.uint8(ESCAPE)) << np.uint8(2 * j))
        quarters[i] = quarter
    return int(count)


@exported("plane")
def unfold_quarters(quarters: Bytes, escapes: Bytes, plane: Bytes) -> None:
    """Undo `fold_quarters`; `escapes` has one more byte than there are."""
    fours, count = plane.view(np.uint32), np.uint64(0)
    for i in range(len(fours)):
        four = np.uint32(quarters[i])
        spread = four | (four << np.uint32(6)) | (four << np.uint32(12)) | (four << np.uint32(18))
        fours[i] = np.uint32(spread & np.uint32(0x03030303))
    for j in range(len(plane)):
        byte, escape = plane[j], escapes[count]  # read in any case: escapes are too frequent to be predicted
        plane[j] = np.uint8(byte + escape) if byte == np.uint8(ESCAPE) else byte
        count += np.uint64(byte == np.uint8(ESCAPE))
