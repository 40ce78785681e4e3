"""Input files during a run: pinned to a version, opened together, read, checked for having stayed as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, Tensor, TensorEntry
from mergepipe.core.blocks import ITEMSIZE_BY_KERNEL_CODE, Span
from mergepipe.errors import ConflictError, MergePipeError, StorageError
from mergepipe.storage.contract import FileId, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import allow_open_files, read_exact


def pin_files(store: Store, paths: Iterable[Location], checkpoints: Iterable[Checkpoint]) -> dict[Location, str]:
    """Pin files to the versions at which `checkpoints` were opened, others to what the store holds now.

    The versions by location are a value by which any process can open the same files again.
    """
    versions = {path: file.version for path, file in _files_of(checkpoints)}
    for path in (ordered := sorted(set(paths))):
        if path not in versions:
            status = store.stat(path)
            if status is None:
                raise _changed(path)
            versions[path] = status.version
    return {path: versions[path] for path in ordered}


@contextlib.contextmanager
def open_pinned(store: Store, versions: Mapping[Location, str]) -> Iterator[Mapping[Location, RangeFile]]:
    """Open files for direct reads, and close them all at the end."""
    with open_files(store, versions) as files:
        for path, file in files.items():
            if file.version != versions[path]:
                raise _changed(path)
        yield files


@contextlib.contextmanager
def open_files(
    store: Store, paths: Iterable[Location], checkpoints: Iterable[Checkpoint] = (), *, direct: bool = True
) -> Iterator[Mapping[Location, RangeFile]]:
    """Open files, which are those of `checkpoints` still, and close them all at the end; `direct` as `Store.open`."""
    ordered = sorted(set(paths))
    allow_open_files(len(ordered))
    with contextlib.ExitStack() as stack:
        files: dict[Location, RangeFile] = {}
        for path in ordered:
            files[path] = store.open(path, direct=direct)
            stack.callback(files[path].close)
        for path, file in _files_of(checkpoints):
            if path in files and files[path].version != file.version:
                raise _changed(path)
        yield files


def check_unchanged(store: Store, checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse files that changed after they were opened."""
    for path, file in _files_of(checkpoints):
        try:
            status = store.stat(path)
        except StorageError:
            raise _changed(path) from None
        if status is None or (status.size_bytes, status.version) != (file.size_bytes, file.version):
            raise _changed(path)


def _changed(path: Location) -> MergePipeError:
    return ConflictError.of("input.changed", path, "changed while it was being read", "run again")


def _files_of(checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Location, FileId]]:
    for checkpoint in checkpoints:
        for file in checkpoint.files:
            yield file.location, file.id


T = TypeVar("T")


def once(read: Callable[[Purpose], T]) -> Callable[[Purpose], T]:
    """Return a function that gives what `read` gave at its first call; safe to call from many threads."""
    lock, kept = threading.Lock(), list[T]()

    def value(purpose: Purpose) -> T:
        with lock:
            if not kept:
                kept.append(read(purpose))
            return kept[0]

    return value


# --- reads of one stretch of a tensor outside the engine's buffers, rounded outwards to what its file can serve ---


def read_span(
    entry: TensorEntry, span: Span, files: Mapping[Location, RangeFile], purpose: Purpose
) -> NDArray[np.uint8]:
    """The stored bytes (uint8) of the elements `span`. Holds them, and less than two pages more.

    Requests at most `entry.cost_bytes(span)`.
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


def read_matrix(tensor: Readable, files: Mapping[Location, RangeFile], purpose: Purpose) -> NDArray[np.float32]:
    """All of a tensor in float32, in its shape."""
    raw = read_elements(tensor, Span(0, tensor.n_elements), files, purpose)
    return decoded(raw, tensor.dtype.kernel_code).reshape(tensor.shape)


def decoded(raw: NDArray[np.uint8], code: int) -> NDArray[np.float32]:
    """Stored bytes (uint8) of the dtype with kernel code `code` in float32."""
    return decoded_into(raw, code, np.empty(len(raw) // ITEMSIZE_BY_KERNEL_CODE[code], np.float32))


def decoded_into(raw: NDArray[np.uint8], code: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Decode `raw` into `out` (float32), one element each."""
    from mergepipe.kernels.codec import decode_all  # compiled: nothing that only opens waits for it

    decode_all(raw, code, len(out), out)
    return out


def encoded(values: NDArray[np.float32], code: int) -> NDArray[np.uint8]:
    """Return numbers (float32, any shape) as stored bytes (uint8) of the dtype with kernel code `code`, to nearest."""
    return encoded_into(values.reshape(-1), code, np.empty(values.size * ITEMSIZE_BY_KERNEL_CODE[code], np.uint8))


def encoded_into(values: NDArray[np.float32], code: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Encode numbers (float32) to the start of `out` (uint8)."""
    from mergepipe.kernels.codec import encode_all  # loads the library: nothing that only opens waits for it

    encode_all(np.ascontiguousarray(values), out, code)
    return out


def whole_cost_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes requested to read each of some tensors in full on its own, in whole pages."""
    return sum(tensor.cost_bytes(Span(0, tensor.n_elements)) for tensor in tensors)
