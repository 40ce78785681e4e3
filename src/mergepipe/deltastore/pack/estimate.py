"""Estimate what a pack of an expert would take, from blocks of it that are encoded and not written."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import accumulate

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.deltastore.band_sample import bands_of, read_sample
from mergepipe.deltastore.codec.block import RawBytes, encode_block, encode_converted
from mergepipe.deltastore.codec.element_codes import Bands
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BLOCK_ELEMENTS, can_be_base_of
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

SAMPLED_BLOCKS = 32


def estimate_packed_bytes(
    base: Checkpoint, expert: Checkpoint, files: Mapping[Location, RangeFile], purpose: Purpose
) -> int | None:
    """Estimate the bytes of the tensors in a pack on `base`; None for what is not packed.

    Encodes `SAMPLED_BLOCKS` blocks as `pack` does, at equal distances over the bytes of all tensors, and extrapolates.
    Reads at most 1 MiB and a few pages for each block of two bytes an element: 32 MiB; a tensor's sample for its bands
    once.
    """
    names = sorted(name for name, tensor in expert.tensors.items() if tensor.n_elements)
    entries = [entry for name in names if isinstance(entry := expert.tensors[name], TensorEntry)]
    ends = list(accumulate(entry.nbytes for entry in entries))
    if len(entries) < len(names) or not ends:
        return None
    drawn: Counter[tuple[int, int]] = Counter()  # a small model's blocks are drawn several times, and read once
    for number in range(SAMPLED_BLOCKS):
        at = ends[-1] * (2 * number + 1) // (2 * SAMPLED_BLOCKS)
        place = bisect_right(ends, at)
        entry = entries[place]
        element = (at - (ends[place] - entry.nbytes)) // entry.dtype.itemsize
        drawn[place, element // BLOCK_ELEMENTS] += 1
    sampled_bytes = encoded_bytes = 0

    @cache
    def bands(place: int) -> Bands | None:
        entry = entries[place]
        other = base.tensors[entry.name]
        if entry.dtype not in BANDED_DTYPES or not isinstance(other, TensorEntry):
            return None
        return bands_of(*(read_sample(tensor, files[tensor.file], purpose) for tensor in (other, entry)))

    for (place, block), times in drawn.items():
        entry = entries[place]
        span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
        content = _read(entry, span, files, purpose)
        sampled_bytes += times * len(content)
        encoded_bytes += times * _encoded_bytes(
            base, entry, content, partial(_read, span=span, files=files, purpose=purpose), partial(bands, place)
        )
    return round(encoded_bytes / sampled_bytes * ends[-1])


def _encoded_bytes(
    base: Checkpoint,
    entry: TensorEntry,
    content: RawBytes,
    read: Callable[[TensorEntry], RawBytes],
    bands: Callable[[], Bands | None],
) -> int:
    """The bytes of a block of `entry`; `read` reads the same elements of another tensor."""
    other = base.tensors.get(entry.name)
    is_base = isinstance(other, TensorEntry) and other.shape == entry.shape and can_be_base_of(other.dtype, entry.dtype)
    if not is_base or not isinstance(other, TensorEntry):
        return encode_block(None, content, entry.dtype, None).nbytes
    if other.dtype is not entry.dtype:
        return encode_converted(read(other), other.dtype, content, entry.dtype).nbytes
    return encode_block(read(other), content, entry.dtype, bands()).nbytes


def _read(entry: TensorEntry, span: Span, files: Mapping[Location, RangeFile], purpose: Purpose) -> RawBytes:
    start = entry.offset + span.start * entry.dtype.itemsize
    return read_exact(files[entry.file], start, start + span.n_elements * entry.dtype.itemsize, purpose)
