"""The headers of the weight files that a store was packed from: read, and compared with what the store says of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from blake3 import blake3

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.checkpoints.formats.safetensors import parse_header
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.checkpoint import OpenedStore
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.header import HEADERS_NAME
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location


def read_original_header(store: Store, opened: OpenedStore, number: int) -> bytes:
    """Read the header of weight file `number`, length prefix included, and check it.

    Raises:
        CorruptError: it is damaged, or has other tensors than the store.
        StorageError: the read failed.
    """
    packed = opened.header.files
    start = sum(file.header_bytes for file in packed[:number])
    where = opened.root / HEADERS_NAME
    content = store.read_metadata(where, start, packed[number].header_bytes)
    if blake3(content).hexdigest(16) != packed[number].header_blake3:
        raise corrupt(where, f"the header of {shown(packed[number].name)} is damaged")
    header = parse_header(content, where, packed[number].size_bytes)
    of_file = [(t.name, t.dtype, t.shape) for t in opened.header.tensors if t.file == number]
    if [(entry.name, entry.dtype, entry.shape) for entry in header.entries] != of_file:
        raise corrupt(where, f"the header of {shown(packed[number].name)} has other tensors than the store")
    return content


def check_original_headers(store: Store, opened: OpenedStore) -> None:
    """Check the headers of all weight files. Raises as `read_original_header`."""
    for number in range(len(opened.header.files)):
        read_original_header(store, opened, number)


def original_checkpoint(opened: OpenedStore) -> Checkpoint:
    """Return the tensors as they lay in the original files, which need not be there any more."""
    tensors = {entry.name: entry for entry in _original_entries(opened)}
    return Checkpoint(opened.root, opened.root, MappingProxyType(tensors), (), ())


def _original_entries(opened: OpenedStore) -> Iterator[TensorEntry]:
    ends = [file.header_bytes for file in opened.header.files]
    for tensor in opened.header.tensors:
        file: Location = opened.root / opened.header.files[tensor.file].name
        yield TensorEntry(tensor.name, tensor.dtype, tensor.shape, file, ends[tensor.file], tensor.nbytes)
        ends[tensor.file] += tensor.nbytes
