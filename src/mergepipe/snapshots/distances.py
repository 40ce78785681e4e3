"""Compute distances between checkpoints, summed in float64 over their float tensors, in bounded memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry
from mergepipe.checkpoints.open_files import read_span
from mergepipe.core.blocks import BlockGrid, DTypeKind, Span
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

CHUNK_ELEMENTS = 1 << 20
"""Elements held at a time: of two checkpoints, as stored and in float64, and their difference: 48 MiB at most."""

OnTick = Callable[[int], None]


def distance(store: Store, a: Checkpoint, b: Checkpoint, on_tick: OnTick) -> float:
    """`||A - B||` over the float tensors that both have in the same shape.

    `on_tick` is called from time to time with the bytes read since the last call.
    """
    total = 0.0
    with _opened(store, a, b) as files:
        for name, entry in a.tensors.items():
            other = b.tensors.get(name)
            if other is None or other.shape != entry.shape or not (_is_float(entry) and _is_float(other)):
                continue
            for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
                difference_N = _elements(files, entry, span)
                difference_N -= _elements(files, other, span)
                total += float(np.dot(difference_N, difference_N))
                on_tick(span.n_elements * (entry.dtype.itemsize + other.dtype.itemsize))
    return math.sqrt(total)


def norm(store: Store, checkpoint: Checkpoint, on_tick: OnTick) -> float:
    """`||A||` over its float tensors; `on_tick` as in `distance`."""
    total = 0.0
    with _opened(store, checkpoint) as files:
        for entry in checkpoint.tensors.values():
            if not _is_float(entry):
                continue
            for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
                elements_N = _elements(files, entry, span)
                total += float(np.dot(elements_N, elements_N))
                on_tick(span.n_elements * entry.dtype.itemsize)
    return math.sqrt(total)


def tensor_norms(
    store: Store, a: Checkpoint, b: Checkpoint, names: Iterable[str], on_tick: OnTick
) -> dict[str, tuple[float, float]]:
    """`||A - B||` and `||A||` of each named float tensor that both have in the same shape; `on_tick` as above."""
    norms = {}
    with _opened(store, a, b) as files:
        for name in names:
            entry, other = a.tensors[name], b.tensors[name]
            if other.shape != entry.shape or not (_is_float(entry) and _is_float(other)):
                continue
            difference = norm = 0.0
            for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
                elements_N = _elements(files, entry, span)
                norm += float(np.dot(elements_N, elements_N))
                elements_N -= _elements(files, other, span)
                difference += float(np.dot(elements_N, elements_N))
                on_tick(span.n_elements * (entry.dtype.itemsize + other.dtype.itemsize))
            norms[name] = (math.sqrt(difference), math.sqrt(norm))
    return norms


def _is_float(entry: Readable) -> bool:
    return entry.dtype.kind is DTypeKind.FLOAT


@contextlib.contextmanager
def _opened(store: Store, *checkpoints: Checkpoint) -> Iterator[Mapping[Location, RangeFile]]:
    """Open all files for cached reads: they were written or read recently."""
    with contextlib.ExitStack() as stack:
        files: dict[Location, RangeFile] = {}
        tensors = [tensor for checkpoint in checkpoints for tensor in checkpoint.tensors.values()]
        for path in sorted({entry.file for tensor in tensors for entry in tensor.stored}):
            files[path] = store.open(path)
            stack.callback(files[path].close)
        yield files


def _elements(files: Mapping[Location, RangeFile], entry: Readable, span: Span) -> NDArray[np.float64]:
    """Decode elements of a tensor into a new array."""
    from mergepipe.kernels.codec import CODE_F64, decode_all

    if isinstance(entry, TensorEntry):
        raw = read_span(entry, span, files, Purpose.ANALYSIS)
    else:
        raw = np.empty(span.n_elements * entry.dtype.itemsize, np.uint8)
        entry.opened(files)(span, raw, Purpose.ANALYSIS)
    if entry.dtype.kernel_code == CODE_F64:
        return np.asarray(raw.view(np.float64))
    elements_N = np.empty(span.n_elements, np.float32)
    decode_all(raw, entry.dtype.kernel_code, span.n_elements, elements_N)
    return np.asarray(elements_N, np.float64)
