"""The weight files that experts were packed from, as files to read: each block is decoded when bytes of it are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.contract import BaseBytes, Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.directory import stored_name
from mergepipe.checkpoints.open_files import allow_open_files, open_files
from mergepipe.checkpoints.safetensors import parse_header
from mergepipe.core.blocks import BlockGrid
from mergepipe.core.strict_json import digest_of, shown
from mergepipe.deltastore.checkpoint import ChainedTensor, OpenedStore, open_packed
from mergepipe.deltastore.codec.arrays import corrupt
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.index import HEADERS_NAME, OWN_NAMES, is_own_name
from mergepipe.deltastore.tensor import EncodedTensor, PlainTensor
from mergepipe.storage.contract import FileId, RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

# --- the headers of the weight files that a store was packed from ---
# read, and compared with what the store says of them


def read_original_header(store: Store, opened: OpenedStore, number: int) -> bytes:
    """Read the header of weight file `number`, length prefix included, and check it."""
    packed = opened.header.files
    start = sum(file.header_bytes for file in packed[:number])
    where = opened.root / HEADERS_NAME
    content = store.read_metadata(where, start, packed[number].header_bytes)
    if blake3(content).hexdigest(16) != packed[number].header_blake3:
        raise corrupt(where, f"the header of {shown(packed[number].name)} is damaged")
    header = parse_header(content, where, packed[number].size_bytes)
    name = packed[number].name
    of_file = [(stored_name(t.name, name), t.dtype, t.shape) for t in opened.header.tensors if t.file == number]
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


# --- the weight files that experts were packed from, as files to read ---
# each block is decoded when bytes of it are read


_FEWEST_KEPT_BYTES = 64 << 20
_KEPT_BYTES_OF_STORE = 3 << 20  # three blocks of fp32: those that readers of one place of each store are at


class OriginalFiles:
    """Open files and decoded blocks that the original files of packed experts share.

    Safe to use from many threads. Memory: decoded blocks of 64 MiB, or of 3 MiB for each store where that is more; the
    indexes of stores.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files = _SharedFiles(store)
        self._blocks = _DecodedBlocks()

    def folder(self, path: Location) -> OriginalFolder:
        """Open a packed expert with all that it is packed on."""
        opened, expert, bases = open_packed(self._store, path)
        self._blocks.add_stores(checkpoint.root for checkpoint in (expert, *bases))
        return OriginalFolder(self._store, opened, (expert, *bases), self._files, self._blocks)


class OriginalFolder:
    """The weight files of one packed expert; `chain` is the expert, the stores below it, and the first one's base.

    See `checkpoints.packed.OriginalFolder`.
    """

    own_names = OWN_NAMES

    def __init__(
        self,
        store: Store,
        opened: OpenedStore,
        chain: tuple[Checkpoint, ...],
        files: _SharedFiles,
        blocks: _DecodedBlocks,
    ) -> None:
        self.sizes_bytes: Mapping[str, int] = {file.name: file.size_bytes for file in opened.header.files}
        self.chain = chain
        self.files = files
        self.blocks = blocks
        self._opened = opened
        self._store = store
        entries = [tensor for tensor in original_checkpoint(opened).tensors.values() if isinstance(tensor, TensorEntry)]
        self._entries = {
            name: [entry for entry in entries if entry.nbytes and entry.file == opened.root / name]
            for name in self.sizes_bytes
        }

    @property
    def version(self) -> str:
        """Changes with every file that the weights are decoded from."""
        return digest_of([[str(checkpoint.root), file.name, file.version] for checkpoint, file in self._pinned()])

    @property
    def stored_files(self) -> tuple[Location, ...]:
        """The files that the weights are decoded from, of all stores of the chain and of the first one's base."""
        return tuple(checkpoint.root / file.name for checkpoint, file in self._pinned())

    def _pinned(self) -> list[tuple[Checkpoint, FileId]]:
        return [
            (checkpoint, file)
            for checkpoint in self.chain
            for file in checkpoint.files
            if checkpoint.encoded is None or is_own_name(file.name)
        ]

    def open(self, location: Location) -> OriginalFile:
        """Open one of the weight files."""
        number = list(self.sizes_bytes).index(location.name)
        header = read_original_header(self._store, self._opened, number)
        return OriginalFile(self, location, header, self._entries[location.name])


class OriginalFile:
    """One weight file as it was packed, open for reading: see `RangeFile`."""

    alignment = 1

    def __init__(self, folder: OriginalFolder, location: Location, header: bytes, entries: list[TensorEntry]) -> None:
        self.location = location
        self.size_bytes = folder.sizes_bytes[location.name]
        self.version = folder.version
        self._folder = folder
        self._header = header
        self._entries = entries
        self._ends = [entry.offset + entry.nbytes for entry in entries]
        self._lease = ExitStack()
        self._files = self._lease.enter_context(folder.files.open(folder.chain))

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; what is read of stores is charged to `purpose`, of the base to the base."""
        stop = max(offset, min(offset + len(buffer), self.size_bytes))
        out = np.frombuffer(buffer, np.uint8)
        head = self._header[offset:stop]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        place = bisect_right(self._ends, offset)
        while place < len(self._entries) and (entry := self._entries[place]).offset < stop:
            first, last = max(offset, entry.offset), min(stop, self._ends[place])
            self._copy(entry, first - entry.offset, out[first - offset : last - offset], purpose)
            place += 1
        return stop - offset

    def _copy(self, entry: TensorEntry, start: int, out: RawBytes, purpose: Purpose) -> None:
        """Copy the bytes of a tensor from byte `start` of it on."""
        tensor = self._folder.chain[0].tensors[entry.name]
        block_bytes = BLOCK_ELEMENTS * entry.dtype.itemsize
        done = 0
        while done < len(out):
            number, skipped = divmod(start + done, block_bytes)
            part = self._folder.blocks.block(tensor, number, self._files, purpose)[skipped:][: len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        """Close the files of the chain that no other original needs."""
        self._lease.close()


@dataclass(slots=True)
class _OpenCheckpoint:
    """The open files of a checkpoint, and how many need them."""

    files: Mapping[Location, RangeFile]
    stack: ExitStack
    users: int = 0


class _SharedFiles:
    """The files of checkpoints, open for as long as an original needs them; those that several need once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[Location, _OpenCheckpoint] = {}

    @contextmanager
    def open(self, chain: tuple[Checkpoint, ...]) -> Iterator[Mapping[Location, RangeFile]]:
        """Keep the files of checkpoints open, each at the version at which it was opened as a checkpoint."""
        with ExitStack() as stack:
            files: dict[Location, RangeFile] = {}
            for checkpoint in chain:
                files |= self._take(checkpoint)
                stack.callback(self._give_back, checkpoint)
            yield files

    def _take(self, checkpoint: Checkpoint) -> Mapping[Location, RangeFile]:
        with self._lock:
            if checkpoint.root not in self._open:
                encoded = checkpoint.encoded
                paths = files_of(checkpoint.tensors.values()) if encoded is None else encoded.files
                allow_open_files(len(paths) + sum(len(opened.files) for opened in self._open.values()))
                with ExitStack() as stack:
                    files = stack.enter_context(open_files(self._store, paths, (checkpoint,)))
                    self._open[checkpoint.root] = _OpenCheckpoint(files, stack.pop_all())
            self._open[checkpoint.root].users += 1
            return self._open[checkpoint.root].files

    def _give_back(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self._open[checkpoint.root].users -= 1
            if self._open[checkpoint.root].users == 0:
                self._open.pop(checkpoint.root).stack.close()


class _DecodedBlocks:
    """The blocks that were decoded last, of all stores: readers of neighbouring bytes, and upper stores, share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[Location, str, int], Future[RawBytes]] = OrderedDict()
        self._roots: set[Location] = set()
        self._kept_bytes = 0

    def add_stores(self, roots: Iterable[Location]) -> None:
        """Make room for blocks of these stores."""
        with self._lock:
            self._roots.update(roots)

    def block(self, tensor: Readable, number: int, files: Mapping[Location, RangeFile], purpose: Purpose) -> RawBytes:
        """Return the bytes of a block of a tensor, not to be changed; blocks below it are kept as well."""
        span = BlockGrid(tensor.n_elements, BLOCK_ELEMENTS).span(number)

        def decode() -> RawBytes:
            out = np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8)
            if isinstance(tensor, ChainedTensor):
                below = BaseBytes(self.block(tensor.base, number, files, purpose))
                tensor.packed.opened_on_base(files)(span, below, out, purpose)
            elif not isinstance(tensor, TensorEntry):
                tensor.opened(files)(span, out, purpose)
            return out

        return self._once((_root_of(tensor), tensor.name, number), decode)

    def _once(self, key: tuple[Location, str, int], decode: Callable[[], RawBytes]) -> RawBytes:
        """Return the block that is kept, or is being decoded by another thread; else decode it and keep it."""
        with self._lock:
            waiting = self._blocks.get(key)
            if waiting is not None:
                self._blocks.move_to_end(key)
            else:
                made = self._blocks[key] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            block = decode()
        except BaseException as error:
            with self._lock:
                del self._blocks[key]
            made.set_exception(error)
            raise
        made.set_result(block)
        self._keep(len(block))
        return block

    def _keep(self, nbytes: int) -> None:
        """Count a decoded block; drop those that were not asked for longest."""
        with self._lock:
            self._kept_bytes += nbytes
            limit = max(_FEWEST_KEPT_BYTES, _KEPT_BYTES_OF_STORE * len(self._roots))
            while self._kept_bytes > limit:
                oldest = next(iter(self._blocks))
                if not self._blocks[oldest].done():
                    return
                self._kept_bytes -= len(self._blocks.pop(oldest).result())


def _root_of(tensor: Readable) -> Location:
    """Return the store that holds a tensor."""
    encoded = tensor.packed if isinstance(tensor, ChainedTensor) else tensor
    if not isinstance(encoded, EncodedTensor | PlainTensor):
        raise TypeError(f"{tensor.name} is no tensor of a packed expert")
    return encoded.root
