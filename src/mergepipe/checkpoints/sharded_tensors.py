"""Tensors whose elements lie in several byte ranges, as training frameworks shard them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.open_files import read_span
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.core.strict_json import shown
from mergepipe.errors import damaged, unsupported
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile


@dataclass(frozen=True, slots=True)
class ShardedTensor(ComputedTensor):
    """A tensor of `dtype` made of `bands` that follow one another, each some whole rows of it.

    A band is one entry that holds its elements in order, or entries of shape (rows, columns) that hold its columns,
    from left to right.
    Law: fetching a span gives the bytes that it has in the tensor put together.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    bands: tuple[tuple[TensorEntry, ...], ...]
    is_delta: bool = False  # the stored values are differences from the base

    def __post_init__(self) -> None:
        n_stored = 0
        for entry in self.stored:
            if entry.dtype != self.dtype:
                raise ValueError(f"{self.name}: shards of different dtypes")
            n_stored += entry.n_elements
        if n_stored != self.n_elements:
            raise ValueError(f"{self.name}: the shards do not make {self.shape}")

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for band in self.bands for entry in band)

    def _inside(self, span: Span) -> list[tuple[tuple[TensorEntry, ...], Span]]:
        """List the bands that a span touches, with its elements inside each."""
        inside = []
        start = 0
        for band in self.bands:
            stop = start + sum(entry.n_elements for entry in band)
            if start < span.stop and span.start < stop:
                inside.append((band, Span(max(span.start, start) - start, min(span.stop, stop) - start)))
            start = stop
        return inside

    def cost_bytes(self, span: Span) -> int:
        """Bytes requested to read the elements `span` on their own, in whole pages; of columns, whole rows."""
        cost = 0
        for band, inside in self._inside(span):
            if len(band) == 1:
                cost += band[0].cost_bytes(inside)
                continue
            top, bottom = _rows(band, inside)
            for entry in band:
                rows = Span(top * entry.shape[1], bottom * entry.shape[1])
                cost += entry.cost_bytes(rows)
        return cost

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps nothing."""

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            done = 0
            for band, inside in self._inside(span):
                nbytes = inside.n_elements * self.dtype.itemsize
                out[done : done + nbytes] = _read_band(band, inside, files, purpose)
                done += nbytes

        return fetch


StoredTensor: TypeAlias = TensorEntry | ShardedTensor
"""A tensor of which each element is stored, in one range or in several."""


def joined_shards(name: str, shards: Sequence[tuple[tuple[int, ...], TensorEntry]], where: object) -> StoredTensor:
    """Put a tensor together of shards, each with the place of its first element by dimension.

    They are cut along the first dimension, along another one, or along both.

    Raises:
        CorruptError: shards are missing, overlap, or are of different dtypes.
        UnsupportedError: they are cut in more ways.
    """
    placed = sorted(shards, key=lambda shard: shard[0])
    _, first = placed[0]
    for _, entry in placed:
        if entry.dtype != first.dtype or len(entry.shape) != len(first.shape):
            raise damaged(where, f"the shards of {shown(name)} differ in dtype or number of dimensions")
    ends = []
    for offsets, entry in placed:
        ends.append(tuple(map(sum, zip(offsets, entry.shape, strict=True))))
    shape = tuple(map(max, zip(*ends, strict=True)))
    rows: dict[int, list[tuple[tuple[int, ...], TensorEntry]]] = {}
    for offsets, entry in placed:
        if entry.n_elements:
            rows.setdefault(offsets[0] if offsets else 0, []).append((offsets, entry))
    bands = []
    end = 0
    for start, shards_of_band in rows.items():
        height = shards_of_band[0][1].shape[0] if shape else 1
        if start != end:
            raise damaged(where, f"rows [{end}, {start}) of {shown(name)} are in no shard, or in two")
        bands.append(_band(name, shards_of_band, (height, *shape[1:]), where))
        end = start + height
    if len(bands) == 1 and len(bands[0]) == 1:
        return replace(bands[0][0], shape=shape)
    return ShardedTensor(name, first.dtype, shape, tuple(bands))


def _band(
    name: str, shards: Sequence[tuple[tuple[int, ...], TensorEntry]], shape: tuple[int, ...], where: object
) -> tuple[TensorEntry, ...]:
    """Return the shards of some whole rows of a tensor, which may be cut along one more dimension."""
    if len(shards) == 1:
        if shards[0][1].n_elements != element_count(shape):
            raise damaged(where, f"a part of {shown(name)} is in no shard")
        return (shards[0][1],)
    cut = next(n for n in range(len(shape)) if shards[0][1].shape[n] != shape[n])
    columns = []
    end = 0
    for offsets, entry in shards:
        others = (*entry.shape[:cut], *entry.shape[cut + 1 :])
        if others != (*shape[:cut], *shape[cut + 1 :]):
            raise unsupported(where, f"{shown(name)} is cut along more than two dimensions")
        if offsets[cut] != end:
            raise damaged(where, f"a part of {shown(name)} is in no shard, or in two")
        end += entry.shape[cut]
        columns.append(replace(entry, shape=(element_count(entry.shape[:cut]), element_count(entry.shape[cut:]))))
    if end != shape[cut]:
        raise damaged(where, f"a part of {shown(name)} is in no shard")
    return tuple(columns)


def _rows(band: tuple[TensorEntry, ...], span: Span) -> tuple[int, int]:
    """Return the rows of a band of columns that a span touches."""
    width = sum(entry.shape[1] for entry in band)
    return span.start // width, -(-span.stop // width)


def _read_band(
    band: tuple[TensorEntry, ...], span: Span, files: Mapping[Location, RangeFile], purpose: Purpose
) -> NDArray[np.uint8]:
    """Read some elements of a band."""
    if len(band) == 1:
        return read_span(band[0], span, files, purpose)
    top, bottom = _rows(band, span)
    columns = []
    for entry in band:
        inside = Span(top * entry.shape[1], bottom * entry.shape[1])
        columns.append(read_span(entry, inside, files, purpose).reshape(bottom - top, -1))
    rows = np.concatenate(columns, axis=1)
    itemsize = band[0].dtype.itemsize
    start = span.start * itemsize - top * rows.shape[1]
    return rows.reshape(-1)[start : start + span.n_elements * itemsize]
