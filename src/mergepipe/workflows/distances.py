"""Distances between checkpoints, summed in float64 over their tensors of floats, in bounded memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.blocks import BF16, F16, F32, F64, BlockGrid, DType, DTypeKind, Span
from mergepipe.budget import Purpose
from mergepipe.errors import CorruptError
from mergepipe.readers.base import Checkpoint, TensorEntry
from mergepipe.storage.base import RangeFile, Store

CHUNK_ELEMENTS = 1 << 20
"""Elements held at a time: of two checkpoints, as stored and in float64, and their difference: 48 MiB at most."""

_STORED: dict[DType, np.dtype[np.generic]] = {
    F64: np.dtype("<f8"),
    F32: np.dtype("<f4"),
    F16: np.dtype("<f2"),
    BF16: np.dtype("<u2"),
}

OnTick = Callable[[int], None]


def distance(store: Store, a: Checkpoint, b: Checkpoint, on_tick: OnTick) -> float:
    """`||A - B||` over the tensors of floats that both have in the same shape.

    `on_tick` is called now and then with the bytes read since the last call.
    """
    total = 0.0
    with _opened(store, a, b) as files:
        for name, entry in a.tensors.items():
            other = b.tensors.get(name)
            if other is None or other.shape != entry.shape or not (_is_float(entry) and _is_float(other)):
                continue
            for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
                difference_N = _elements(files[entry.file], entry, span)
                difference_N -= _elements(files[other.file], other, span)
                total += float(np.dot(difference_N, difference_N))
                on_tick(span.n_elements * (entry.dtype.itemsize + other.dtype.itemsize))
    return math.sqrt(total)


def norm(store: Store, checkpoint: Checkpoint, on_tick: OnTick) -> float:
    """`||A||` over its tensors of floats; `on_tick` as in `distance`."""
    total = 0.0
    with _opened(store, checkpoint) as files:
        for entry in checkpoint.tensors.values():
            if not _is_float(entry):
                continue
            for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
                elements_N = _elements(files[entry.file], entry, span)
                total += float(np.dot(elements_N, elements_N))
                on_tick(span.n_elements * entry.dtype.itemsize)
    return math.sqrt(total)


def _is_float(entry: TensorEntry) -> bool:
    return entry.dtype.kind is DTypeKind.FLOAT


@contextlib.contextmanager
def _opened(store: Store, *checkpoints: Checkpoint) -> Iterator[Mapping[Path, RangeFile]]:
    """Open all files for ordinary reads: what is compared was written or read a moment ago."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, RangeFile] = {}
        for path in sorted({entry.file for each in checkpoints for entry in each.tensors.values()}):
            files[path] = store.open(path)
            stack.callback(files[path].close)
        yield files


def _elements(file: RangeFile, entry: TensorEntry, span: Span) -> NDArray[np.float64]:
    """Decode elements of a tensor into a new array.

    Raises:
        CorruptError: `checkpoint.truncated`.
    """
    itemsize = entry.dtype.itemsize
    stored_N = np.empty(span.n_elements, _STORED[entry.dtype])
    buffer = stored_N.view(np.uint8).data
    if file.read_into(entry.offset + span.start * itemsize, buffer, Purpose.ANALYSIS) < len(buffer):
        raise CorruptError.of("checkpoint.truncated", entry.file, f"ends inside tensor '{entry.name}'", "merge again")
    if entry.dtype is BF16:
        return np.asarray((stored_N.astype(np.uint32) << np.uint32(16)).view(np.float32), np.float64)
    return np.asarray(stored_N, np.float64)
