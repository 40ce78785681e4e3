"""Tensors whose elements lie in several byte ranges, as training frameworks shard them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.open_files import read_span
from mergepipe.core.blocks import DType, Span
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


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
        stored = self.stored
        if any(entry.dtype != self.dtype for entry in stored):
            raise ValueError(f"{self.name}: shards of different dtypes")
        if sum(entry.n_elements for entry in stored) != self.n_elements:
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
            cost += sum(entry.cost_bytes(Span(top * entry.shape[1], bottom * entry.shape[1])) for entry in band)
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
    columns = [
        read_span(entry, Span(top * entry.shape[1], bottom * entry.shape[1]), files, purpose).reshape(bottom - top, -1)
        for entry in band
    ]
    rows = np.concatenate(columns, axis=1)
    itemsize = band[0].dtype.itemsize
    start = span.start * itemsize - top * rows.shape[1]
    return rows.reshape(-1)[start : start + span.n_elements * itemsize]
