"""Fine numbers and exceptions: what turns codes into exact values, in one piece a stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.loops import (
    FIRST_BODY_CODE,
    FIRST_REST_CODE,
    LAST_REST_CODE,
    N_CODES,
    Integers,
)
from mergepipe.deltastore.parts import Parts, corrupt
from mergepipe.deltastore.rans import MAX_CONTEXTS, Halves
from mergepipe.deltastore.taking import STREAM_BITS, take_values
from mergepipe.kernels.compiled import Bits64, Bytes

EXCEPTION_BITS = 48
WIDTH_COUNTS = 17
STREAM_CODES = ((1, FIRST_BODY_CODE - 1), (FIRST_BODY_CODE, FIRST_REST_CODE - 1), (FIRST_REST_CODE, LAST_REST_CODE))
"""First and last code of the streams: head, body, rest."""

WIDTH_SLOTS = (MAX_CONTEXTS + 1) * N_CODES * 2


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Elements that codes and fine numbers do not give: where in the block, and their bits."""

    positions: NDArray[np.uint32]
    bits: Halves

    def apply(self, values: Halves) -> None:
        """Put the right bits in their places."""
        values[self.positions] = self.bits

    @classmethod
    def none(cls) -> Exceptions:
        return cls(np.empty(0, np.uint32), np.empty(0, np.uint16))


@dataclass(frozen=True, slots=True)
class FineStream:
    """One piece of fine numbers, taken apart. `widths` of bands are by context, code and direction."""

    widths: NDArray[np.uint8]
    exceptions: Exceptions
    packed: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ValueTables:
    """What turns codes and fine numbers into values: widths by `width_slot`, signed cuts by code, starts of cells."""

    widths: NDArray[np.uint8]
    cuts: NDArray[np.float32]
    cell_starts: Integers


def take_stream(content: NDArray[np.uint8], stream: int, n: int, n_contexts: int, where: str) -> FineStream:
    """Take one piece apart.

    Raises:
        CorruptError: it is not what `encode_fines` writes.
    """
    first, last = STREAM_CODES[stream]
    n_widths = n_contexts * (last - first + 1) * 2 if last < FIRST_REST_CODE else 0
    if not len(content):
        return FineStream(np.zeros(n_widths, np.uint8), Exceptions.none(), content)
    parts = Parts(content, where)
    widths = parts.take(np.uint8, n_widths)
    if (widths > 15).any():
        raise corrupt(where, "a fine number of more than 15 bits")
    count = int(parts.take(np.uint32, 1)[0])
    exceptions = Exceptions(parts.take(np.uint32, count), parts.take(np.uint16, count))
    if (exceptions.positions >= n).any():
        raise corrupt(where, f"an exception past the {n} elements of the block")
    packed = parts.rest(np.uint8)
    if len(packed) > 2 * n:
        raise corrupt(where, f"{len(packed)} bytes of fine numbers for {n} elements")
    return FineStream(widths, exceptions, packed)


def slot_entries(widths: NDArray[np.uint8]) -> Bits64:
    """By `width_slot`: the width; from bit 8 on, the place of the stream's position; bit 63: numbers lead down."""
    codes = np.arange(len(widths)) // 2 % N_CODES
    streams = (codes >= FIRST_BODY_CODE).astype(np.uint64) + (codes >= FIRST_REST_CODE).astype(np.uint64)
    downs = (codes < FIRST_REST_CODE) & (codes % 2 == 0)
    entries = widths.astype(np.uint64)
    entries |= (streams * np.uint64(STREAM_BITS)) << np.uint64(8)
    entries |= downs.astype(np.uint64) << np.uint64(63)
    return entries


def decode_values(
    base: Halves, rows: Bytes, codes: Bytes, tables: ValueTables, packed: list[NDArray[np.uint8]], where: str
) -> Halves:
    """The bf16 of all elements from their codes and the packed fine numbers of the three streams.

    Raises:
        CorruptError: a stream does not end where it should.
    """
    n = len(base)
    firsts = np.zeros(4, np.int64)
    np.cumsum([-(-len(part) // 4) * 4 for part in packed], out=firsts[1:])
    words = np.zeros((int(firsts[3]) + 2 * n) // 4 + 4, np.uint32)
    for part, first in zip(packed, firsts, strict=False):
        words.view(np.uint8)[first : first + len(part)] = part
    ends = firsts[:3] * 8
    values = base.copy()
    cuts = np.tile(tables.cuts.repeat(2), MAX_CONTEXTS + 1)
    cell_starts = tables.cell_starts.repeat(2)
    take_values(base, rows, codes, slot_entries(tables.widths), cuts, cell_starts, words, ends, n, values)
    for part, first, end in zip(packed, firsts, ends, strict=False):
        if -(-(int(end) - int(first) * 8) // 8) != len(part):
            raise corrupt(where, "fine numbers do not end where they should")
    return values
