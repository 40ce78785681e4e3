"""Unpack a delta store to the files it was made from, byte for byte; or verify that this can be done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from mergepipe.checkpoints.content_id import PassingContentId
from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.open_files import check_unchanged, open_files, read_span
from mergepipe.core.blocks import BlockGrid, Span, element_count
from mergepipe.deltastore.checkpoint import OpenedStore, open_packed
from mergepipe.deltastore.codec.arrays import corrupt
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.header import HEADER_NAME, HEADERS_NAME, PackedEntry
from mergepipe.deltastore.index import digest
from mergepipe.deltastore.original_files import original_checkpoint, read_original_header
from mergepipe.deltastore.pack.builder import file_parts, write_kept
from mergepipe.deltastore.tensor import PackedFetch
from mergepipe.errors import CorruptError
from mergepipe.reports import Damage, Progress, ProgressCallback, UnpackReport, VerifyReport
from mergepipe.snapshots.staging import Staging, check_free_space, check_target
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import OutputFile, make_folders
from mergepipe.storage.ranges import aligned_buffer
from mergepipe.storage.stores import Stores

BlockSink = Callable[[RawBytes], None]

_ROOM_BYTES = 8 * BLOCK_ELEMENTS
"""Room for a block of the largest elements, or for several of smaller ones."""


def unpack_store(
    root: Location, out: Path, *, base: Location | None, threads: int, on_progress: ProgressCallback | None
) -> UnpackReport:
    """Write the files that the store in `root` was made from into the new directory `out`; see `api.unpack`."""
    started = time.perf_counter()
    store = Stores()
    opened, checkpoint, bases = open_packed(store, root, base)
    check_target(out, (root, *(base_checkpoint.path for base_checkpoint in bases)), force=None)
    tensor_bytes = sum(entry.nbytes for entry in opened.header.tensors)
    check_free_space(out, tensor_bytes)
    progress = _Counter(on_progress, tensor_bytes)
    reader = _Reader(opened, checkpoint, threads, checks_pieces=False)
    inputs = open_files(store, files_of(checkpoint.tensors.values()), (*bases, checkpoint))
    with inputs as files, Staging(out, force=False) as staging:
        _write_weights(reader, files, staging.path, store, progress)
        for file in opened.header.kept:
            parts = _kept_parts(opened, file.name, file.size_bytes, file.blake3, store)
            write_kept(store, staging.path / file.name, parts, file.size_bytes, "writing it")
        check_unchanged(store, (*bases, checkpoint))
        staging.publish()
    return UnpackReport(root, bases[0].path if bases else None, out, tensor_bytes, time.perf_counter() - started)


def verify_pack(
    path: Location, *, base: Location | None, threads: int, started: float, on_progress: ProgressCallback | None
) -> VerifyReport:
    """Decode a packed expert and compare it with the digests of the original, tensor by tensor; see `api.verify`."""
    store = Stores()
    opened, checkpoint, bases = open_packed(store, path, base)
    reader = _Reader(opened, checkpoint, threads, checks_pieces=True)
    progress = _Counter(on_progress, sum(entry.nbytes for entry in opened.header.tensors), "verify")
    damages: list[Damage] = []
    with open_files(store, files_of(checkpoint.tensors.values()), (*bases, checkpoint)) as files:
        for check in _checks(reader, files, store):
            try:
                check.run()
            except CorruptError as error:
                damages.append(Damage("pack", check.file, check.tensor, 0, 0, error.problems[0].message))
            progress.add(check.nbytes)
        check_unchanged(store, (*bases, checkpoint))
    usage = store.ledger.usage()
    return VerifyReport(
        path=path.local_path if path.is_local else path,
        sid=opened.header.content_id,
        files=len(opened.header.files) + len(opened.header.kept),
        tensors=len(opened.header.tensors),
        blocks=len(opened.index.rows),
        read_bytes=usage.total_bytes,
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )


@dataclass(frozen=True, slots=True)
class _Check:
    """One comparison with the original: of the headers, of a tensor with `nbytes`, or of a kept file."""

    file: str
    tensor: str
    nbytes: int
    run: Callable[[], object]


def _checks(reader: _Reader, files: Mapping[Location, RangeFile], store: Store) -> Iterator[_Check]:
    header = reader.opened.header
    for number in range(len(header.files)):
        yield _Check(HEADERS_NAME, "", 0, partial(read_original_header, store, reader.opened, number))
    for entry in header.tensors:
        name = header.files[entry.file].name
        yield _Check(name, entry.name, entry.nbytes, partial(reader.read, files, [entry], lambda _: None))
    for file in header.kept:
        parts = _kept_parts(reader.opened, file.name, file.size_bytes, file.blake3, store)
        yield _Check(file.name, "", 0, partial(deque, parts, 0))
    yield _Check(HEADER_NAME, "", 0, reader.check_content_id)


class _Counter:
    """Reports restored or compared bytes as progress."""

    def __init__(self, on_progress: ProgressCallback | None, total_bytes: int, phase: str = "unpack") -> None:
        self._on_progress = on_progress
        self._phase = phase
        self._total_bytes = total_bytes
        self._done_bytes = 0

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(Progress(self._phase, self._done_bytes, self._total_bytes))


class _Reader:
    """Reads a store in order, decoding ahead in several threads. Memory: `2 * threads + 1` rooms.

    All blocks are compared with the digests of the original's; with `checks_pieces` what they are decoded from as well,
    which also finds damage in bytes that only approximations need.
    """

    def __init__(self, opened: OpenedStore, checkpoint: Checkpoint, threads: int, *, checks_pieces: bool) -> None:
        self.opened = opened
        self._checkpoint = checkpoint
        self._threads = threads
        self._checks_pieces = checks_pieces
        self._identity = PassingContentId(original_checkpoint(opened))

    def check_content_id(self) -> None:
        """Compare the id on record with that of the tensors, once all were read."""
        if self._identity.missing_files:
            return  # a tensor is damaged: that was told
        content_id, claimed = self._identity.value({}), self.opened.header.content_id
        if content_id != claimed:
            raise corrupt(self.opened.root / HEADER_NAME, f"content_id is {claimed}, that of its tensors {content_id}")

    def read(self, files: Mapping[Location, RangeFile], entries: Iterable[PackedEntry], sink: BlockSink) -> None:
        """Pass the blocks of tensors to `sink` in order, each checked against the original's digest.

        A block is valid until `sink` returns.
        """
        pending: deque[tuple[RawBytes, Future[RawBytes]]] = deque()
        rooms = [aligned_buffer(_ROOM_BYTES) for _ in range(2 * self._threads + 1)]  # fresh ones cost page faults
        with ThreadPoolExecutor(self._threads) as pool:
            for entry, block, span in _runs_of(entries):
                if not rooms:
                    rooms.append(_pass_on(*pending.popleft(), sink))
                tensor, room = self._checkpoint.tensors[entry.name], rooms.pop()
                content = room[: span.n_elements * tensor.dtype.itemsize]
                row = entry.first_row + block
                pending.append((room, pool.submit(self._blocks, files, tensor, span, row, content)))
            while pending:
                _pass_on(*pending.popleft(), sink)

    def _blocks(
        self, files: Mapping[Location, RangeFile], tensor: Readable, span: Span, row: int, content: RawBytes
    ) -> RawBytes:
        """Read blocks from `row` on."""
        if self._checks_pieces or not self._is_restored(files, tensor, span, row, content):
            if isinstance(tensor, TensorEntry):
                content[:] = read_span(tensor, span, files, Purpose.EXPERT)
            else:
                tensor.opened(files)(span, content, Purpose.EXPERT)
            self._check(tensor, span, row, content)
        self._identity.show(tensor.name, span.start * tensor.dtype.itemsize, content)
        return content

    def _is_restored(
        self, files: Mapping[Location, RangeFile], tensor: Readable, span: Span, row: int, content: RawBytes
    ) -> bool:
        """Whether encoded blocks decode to what was packed; otherwise reading them again tells what is damaged."""
        fetch = None if isinstance(tensor, TensorEntry) else tensor.opened(files)
        if not isinstance(fetch, PackedFetch):
            return False
        try:
            fetch.unchecked(span, content, Purpose.EXPERT)
            self._check(tensor, span, row, content)
        except CorruptError:
            return False
        return True

    def _check(self, tensor: Readable, span: Span, row: int, content: RawBytes) -> None:
        """Compare blocks with the digests of the original's."""
        block_bytes = BLOCK_ELEMENTS * tensor.dtype.itemsize
        for block, start in enumerate(range(0, len(content), block_bytes)):
            if digest(content[start : start + block_bytes]) != self.opened.index.rows["expert"][row + block].tobytes():
                element = span.start + block * BLOCK_ELEMENTS
                raise corrupt(
                    self.opened.root, f"tensor {tensor.name!r} from element {element} on is not what was packed"
                )


def _runs_of(entries: Iterable[PackedEntry]) -> Iterator[tuple[PackedEntry, int, Span]]:
    """The blocks of tensors in order, as many at a time as a room holds, with the number of the first."""
    for entry in entries:
        n_elements, step = element_count(entry.shape), _ROOM_BYTES // (BLOCK_ELEMENTS * entry.dtype.itemsize)
        for run, span in enumerate(BlockGrid(n_elements, step * BLOCK_ELEMENTS).spans()):
            yield entry, run * step, span


def _pass_on(room: RawBytes, block: Future[RawBytes], sink: BlockSink) -> RawBytes:
    """Wait for a block and pass it on; return its room."""
    sink(block.result())
    return room


def _write_weights(
    reader: _Reader, files: Mapping[Location, RangeFile], directory: Path, store: Store, progress: _Counter
) -> None:
    header = reader.opened.header
    for number, packed in enumerate(header.files):
        target = directory / packed.name
        make_folders(target.parent)
        with OutputFile(target, packed.size_bytes, store.ledger) as output:
            output.append(read_original_header(store, reader.opened, number))

            def take(content: RawBytes, output: OutputFile = output) -> None:
                output.append(content)
                progress.add(len(content))

            reader.read(files, [entry for entry in header.tensors if entry.file == number], take)
            output.close()


def _kept_parts(opened: OpenedStore, name: str, size_bytes: int, blake3_hex: str, store: Store) -> Iterator[bytes]:
    """Yield the content of a kept file; check its digest at the end."""
    hasher = blake3()
    for part in file_parts(store, opened.root / name, size_bytes):
        hasher.update(part)
        yield part
    if hasher.hexdigest(16) != blake3_hex:
        raise corrupt(opened.root / name, "is not the file that was packed")
