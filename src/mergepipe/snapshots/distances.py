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
    norms = tensor_norms(store, a, b, [name for name in a.tensors if name in b.tensors], on_tick)
    return math.hypot(*(difference for difference, _ in norms.values()))


def norm(store: Store, checkpoint: Checkpoint, on_tick: OnTick) -> float:
    """`||A||` over its float tensors; `on_tick` as in `distance`."""
    with _opened(store, checkpoint) as files:
        entries = filter(_is_float, checkpoint.tensors.values())
        return math.hypot(*(_norms(files, entry, None, on_tick)[1] for entry in entries))


def tensor_norms(
    store: Store, a: Checkpoint, b: Checkpoint, names: Iterable[str], on_tick: OnTick
) -> dict[str, tuple[float, float]]:
    """`||A - B||` and `||A||` of each named float tensor that both have in the same shape; `on_tick` as above."""
    with _opened(store, a, b) as files:
        pairs = ((name, a.tensors[name], b.tensors[name]) for name in names)
        return {
            name: _norms(files, entry, other, on_tick)
            for name, entry, other in pairs
            if other.shape == entry.shape and _is_float(entry) and _is_float(other)
        }


def _norms(
    files: Mapping[Location, RangeFile], entry: Readable, other: Readable | None, on_tick: OnTick
) -> tuple[float, float]:
    """Return `||entry - other||`, 0 without another, and `||entry||`."""
    difference = norm = 0.0
    for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
        elements_N = _elements(files, entry, span)
        norm += float(np.dot(elements_N, elements_N))
        if other is not None:
            elements_N -= _elements(files, other, span)
            difference += float(np.dot(elements_N, elements_N))
        on_tick(span.n_elements * (entry.dtype.itemsize + (0 if other is None else other.dtype.itemsize)))
    return math.sqrt(difference), math.sqrt(norm)


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
