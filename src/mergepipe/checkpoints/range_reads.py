"""Reads of one stretch of a tensor outside the engine's buffers, rounded outwards to what its file can serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Readable, TensorEntry
from mergepipe.checkpoints.read_cost import block_cost_bytes
from mergepipe.core.blocks import ITEMSIZE_BY_KERNEL_CODE, Span
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact


def read_span(
    entry: TensorEntry, span: Span, files: Mapping[Location, RangeFile], purpose: Purpose
) -> NDArray[np.uint8]:
    """The stored bytes (uint8) of the elements `span`. Holds them, and less than two pages more.

    Requests at most `block_cost_bytes(entry, span)`.

    Raises:
        CorruptError: `storage.shrunk`, the file ends before the tensor does.
        StorageError: the read failed.
    """
    start = entry.offset + span.start * entry.dtype.itemsize
    stop = start + span.n_elements * entry.dtype.itemsize
    return read_exact(files[entry.file], start, stop, purpose)


def read_elements(
    tensor: Readable, span: Span, files: Mapping[Location, RangeFile], purpose: Purpose
) -> NDArray[np.uint8]:
    """The bytes (uint8) of the elements `span` of a tensor, stored or computed."""
    if isinstance(tensor, TensorEntry):
        return read_span(tensor, span, files, purpose)
    content = np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8)
    tensor.opened(files)(span, content, purpose)
    return content


def read_matrix(entry: TensorEntry, files: Mapping[Location, RangeFile], purpose: Purpose) -> NDArray[np.float32]:
    """All of a tensor in float32, in its shape."""
    raw = read_span(entry, Span(0, entry.n_elements), files, purpose)
    return decoded(raw, entry.dtype.kernel_code).reshape(entry.shape)


def decoded(raw: NDArray[np.uint8], code: int) -> NDArray[np.float32]:
    """Stored bytes (uint8) of the dtype with kernel code `code` in float32."""
    return decoded_into(raw, code, np.empty(len(raw) // ITEMSIZE_BY_KERNEL_CODE[code], np.float32))


def decoded_into(raw: NDArray[np.uint8], code: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Decode `raw` into `out` (float32), one element each."""
    from mergepipe.kernels.codec import decode_all  # compiled: nothing that only opens waits for it

    decode_all(raw, code, len(out), out)
    return out


def whole_cost_bytes(entries: Sequence[TensorEntry]) -> int:
    """Bytes requested to read each of the entries in full on its own, in whole pages."""
    return sum(block_cost_bytes(entry, Span(0, entry.n_elements)) for entry in entries)
