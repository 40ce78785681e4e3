"""Compute the bytes that reading blocks of a file costs: the one cost function of planner and engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Source, TensorEntry, Unchanged
from mergepipe.core.blocks import Span
from mergepipe.storage.buffers import PAGE_BYTES


def range_cost_bytes(start: int, stop: int, granularity_bytes: int = PAGE_BYTES) -> int:
    """Bytes requested to read `[start, stop)` of a file: rounded outwards at both ends, 0 if it is empty."""
    step = granularity_bytes
    return -(-stop // step) * step - start // step * step if stop > start else 0


def block_cost_bytes(entry: TensorEntry, span: Span) -> int:
    """Bytes requested to read the elements `span` of `entry` on their own.

    Law: blocks read together, in requests that are cut at block boundaries only, request at most the sum of their
    costs, since touching pages are joined.
    """
    start = entry.offset + span.start * entry.dtype.itemsize
    return range_cost_bytes(start, start + span.n_elements * entry.dtype.itemsize, entry.granularity_bytes)


def source_cost_bytes(source: Source, span: Span) -> int:
    """Bytes requested to have the elements `span` of any source on their own; none where nothing is read."""
    if isinstance(source, TensorEntry):
        return block_cost_bytes(source, span)
    return 0 if isinstance(source, Unchanged) else source.cost_bytes(span)


def block_costs_bytes(
    offset_B: NDArray[np.int64],
    itemsize_B: NDArray[np.int64],
    first_B: NDArray[np.int64],
    n_B: NDArray[np.int64],
    granularity_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """`block_cost_bytes` of many blocks.

    File offset and item size of their tensors, first element, elements (> 0), granularity of the files.
    """
    start_B = offset_B + first_B * itemsize_B
    stop_B = start_B + n_B * itemsize_B
    steps_B = -(-stop_B // granularity_B) - start_B // granularity_B
    return np.asarray(steps_B * granularity_B, np.int64)
