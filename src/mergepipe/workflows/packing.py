"""PACK: experts into delta stores beside their base, each in one streaming pass, published all or nothing."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.blocks import BF16, BlockGrid, DType, Span
from mergepipe.budget import Purpose
from mergepipe.canonical import digest_of
from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.block import EncodedBlock, RawBytes, encode_block
from mergepipe.deltastore.header import OWN_NAMES, KeptFile, PackedEntry, PackedFile, StoreHeader, is_store
from mergepipe.deltastore.index import make_row
from mergepipe.deltastore.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.opening import read_store
from mergepipe.deltastore.packed import read_range
from mergepipe.deltastore.sampling import sample_bands
from mergepipe.deltastore.writer import StoreWriter, index_digest
from mergepipe.errors import OutputError, RecipeError, UnsupportedError
from mergepipe.publish import Staging, check_free_space, check_target
from mergepipe.readers.base import Checkpoint, FileFingerprint, TensorEntry
from mergepipe.readers.contained import stat_regular
from mergepipe.readers.hf import open_checkpoint
from mergepipe.reports import Progress, ProgressCallback
from mergepipe.storage.base import RangeFile
from mergepipe.storage.local import LocalStore, os_error
from mergepipe.workflows.inputs import check_unchanged, open_files
from mergepipe.workflows.unpacking import remove_original, verify_store

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert as packed: its tensors' bytes, its store's bytes, blocks by codec. `is_new`: it was not there yet."""

    expert: Path
    store: Path
    tensor_bytes: int
    store_bytes: int
    blocks: Mapping[str, int]
    seconds: float
    is_new: bool
    is_original_removed: bool


@dataclass(frozen=True, slots=True)
class PackReport:
    """What `pack` did, expert by expert."""

    base: Path
    experts: tuple[PackedExpert, ...]


def pack(
    base: str | Path,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    replace: bool = False,
    threads: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> PackReport:
    """Pack each expert into a store `out/NAME`; one that is there already, of the same files, is left as it is.

    Every element is decoded again and compared while it is packed. With `replace`, the store is read back from disk
    and compared with the digests of the original, and then the original's files are removed.

    Memory: the blocks in flight, some 3 MiB for each of `2 * threads`, and an index of 140 bytes a block.

    Raises:
        RecipeError: two experts of one name, or an expert whose files must not be removed.
        OutputError, ConflictError, StorageError: the store cannot go there, or an input changed.
    """
    store = LocalStore()
    paths = [Path(expert) for expert in experts]
    targets = _targets(paths, Path(out))
    base_checkpoint = open_checkpoint(store, Path(base))
    checkpoints = [open_checkpoint(store, path) for path in paths]
    kept = [_kept_names(checkpoint) for checkpoint in checkpoints]
    if replace:
        for checkpoint, names in zip(checkpoints, kept, strict=True):
            _check_removable(checkpoint, names)
    workers = threads or os.cpu_count() or 1
    jobs = [
        _Job(store, base_checkpoint, checkpoint, target, names, workers, on_progress)
        for checkpoint, target, names in zip(checkpoints, targets, kept, strict=True)
    ]
    return PackReport(Path(base), tuple(_pack_one(job, replace=replace) for job in jobs))


def _targets(experts: Sequence[Path], out: Path) -> list[Path]:
    names = [path.resolve().name.removesuffix(".safetensors") for path in experts]
    for name, count in Counter(names).items():
        if count > 1:
            raise RecipeError.of(
                "pack.name", out, f"{count} experts are named {name!r}", "pack them into different directories"
            )
    return [out / name for name in names]


@dataclass(frozen=True, slots=True)
class _Job:
    """One expert to pack; `kept` are the names of its files that are no weights."""

    store: LocalStore
    base: Checkpoint
    expert: Checkpoint
    out: Path
    kept: tuple[str, ...]
    threads: int
    on_progress: ProgressCallback | None

    @property
    def base_files(self) -> str:
        return digest_of([[f.name, f.size_bytes, f.mtime_ns, f.header_digest] for f in self.base.files])


def _pack_one(job: _Job, *, replace: bool) -> PackedExpert:
    started = time.perf_counter()
    is_new = not _is_packed(job)
    if is_new:
        check_target(job.out, (job.base.path, job.expert.path), force=False)
        check_free_space(job.out, job.expert.tensor_bytes)
        with Staging(job.out, force=False) as staging:
            _write_store(job, staging.path)
            check_unchanged((job.base, job.expert))
            staging.publish()
    if replace:
        verify_store(job.store, job.out, job.base, job.threads)
        check_unchanged((job.base, job.expert))
        remove_original(job.expert, job.kept)
    opened = read_store(job.store, job.out)
    blocks = Counter(opened.index.codec(row).name.lower() for row in range(len(opened.index.rows)))
    return PackedExpert(
        job.expert.path, job.out, job.expert.tensor_bytes, sum(f.size_bytes for f in opened.fingerprints),
        dict(sorted(blocks.items())), time.perf_counter() - started, is_new, replace,
    )  # fmt: skip


def _is_packed(job: _Job) -> bool:
    """Whether `out` holds this very expert beside this very base, by what their files looked like then."""
    if not is_store(job.out):
        return False
    header = read_store(job.store, job.out).header
    then = [(f.name, f.size_bytes, f.mtime_ns, f.header_blake3) for f in header.files]
    now = [(f.name, f.size_bytes, f.mtime_ns, f.header_digest) for f in job.expert.files]
    if then == now and header.base_files == job.base_files:
        return True
    raise OutputError.of(
        "output.exists", job.out, f"holds a store of {header.expert}, packed from other files", "choose another place"
    )


def _write_store(job: _Job, directory: Path) -> None:
    inputs = {job.base.root / file.name for file in job.base.files}
    inputs |= {job.expert.root / file.name for file in job.expert.files}
    with (
        open_files(job.store, inputs) as files,
        ThreadPoolExecutor(job.threads) as pool,
        StoreWriter(directory, job.store.ledger) as writer,
    ):
        packed = tuple(_pack_header(job, file, writer) for file in job.expert.files)
        numbers = {job.expert.root / file.name: number for number, file in enumerate(job.expert.files)}
        entries = [_as_stored(tensor) for tensor in job.expert.tensors.values()]
        packer = _Packer(job, files, pool, writer)
        tensors = tuple(packer.pack(entry, numbers[entry.file]) for entry in entries)
        kept = tuple(_keep(job, name, directory / name) for name in job.kept)
        header = StoreHeader(
            base=str(job.base.path.absolute()),
            base_files=job.base_files,
            expert=str(job.expert.path.absolute()),
            is_bare_file=job.expert.path != job.expert.root,
            index_blake3=index_digest(writer.index()),
            files=packed,
            kept=kept,
            tensors=tensors,
        )
        writer.finish(header)


def _as_stored(tensor: object) -> TensorEntry:
    if not isinstance(tensor, TensorEntry):
        raise TypeError(f"not one byte range: {tensor!r}")
    return tensor


def _pack_header(job: _Job, file: FileFingerprint, writer: StoreWriter) -> PackedFile:
    """Keep the header of a weight file: what its tensors do not take up."""
    path = job.expert.root / file.name
    tensor_bytes = sum(entry.nbytes for entry in map(_as_stored, job.expert.tensors.values()) if entry.file == path)
    size = file.size_bytes - tensor_bytes
    writer.append_header(job.store.read_metadata(path, 0, size))
    return PackedFile(file.name, file.size_bytes, file.mtime_ns, size, file.header_digest)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A block with its row of the index; `nbytes` of the expert's."""

    block: EncodedBlock
    row: NDArray[np.void]
    nbytes: int

    @classmethod
    def of(cls, base: RawBytes | None, expert: RawBytes, dtype: DType, bands: Bands | None) -> _Encoded:
        block = encode_block(base, expert, dtype, bands)
        return cls(block, make_row(block, base, expert), len(expert))


class _Packer:
    """Packs tensor after tensor: reads in order, encodes in threads, writes in order."""

    def __init__(
        self, job: _Job, files: Mapping[Path, RangeFile], pool: ThreadPoolExecutor, writer: StoreWriter
    ) -> None:
        self._job = job
        self._files = files
        self._pool = pool
        self._writer = writer
        self._done_bytes = 0

    def pack(self, entry: TensorEntry, file: int) -> PackedEntry:
        """Append all blocks of one tensor."""
        base = self._base_of(entry)
        bands = self._bands(base, entry)
        first_row = self._writer.n_rows
        pending: deque[Future[_Encoded]] = deque()
        for span in BlockGrid(entry.n_elements, BLOCK_ELEMENTS).spans():
            pending.append(self._start(base, entry, span, bands))
            if len(pending) > 2 * self._job.threads:
                self._finish(pending.popleft().result())
        while pending:
            self._finish(pending.popleft().result())
        cuts = None if bands is None else bands.cuts
        return PackedEntry(entry.name, entry.dtype, entry.shape, file, first_row, base is not None, cuts)

    def _base_of(self, entry: TensorEntry) -> TensorEntry | None:
        found = self._job.base.tensors.get(entry.name)
        if isinstance(found, TensorEntry) and (found.dtype, found.shape) == (entry.dtype, entry.shape):
            return found
        return None

    def _bands(self, base: TensorEntry | None, entry: TensorEntry) -> Bands | None:
        if base is None or entry.dtype is not BF16 or entry.n_elements == 0:
            return None
        return sample_bands(base, self._files[base.file], entry, self._files[entry.file])

    def _start(self, base: TensorEntry | None, entry: TensorEntry, span: Span, bands: Bands | None) -> Future[_Encoded]:
        expert = self._read(entry, span, Purpose.EXPERT)
        own = None if base is None else self._read(base, span, Purpose.BASE)
        return self._pool.submit(_Encoded.of, own, expert, entry.dtype, bands)

    def _read(self, entry: TensorEntry, span: Span, purpose: Purpose) -> RawBytes:
        start = entry.offset + span.start * entry.dtype.itemsize
        stop = start + span.n_elements * entry.dtype.itemsize
        return read_range(self._files[entry.file], start, stop, purpose)

    def _finish(self, encoded: _Encoded) -> None:
        self._writer.append(encoded.block, encoded.row)
        self._done_bytes += encoded.nbytes
        if self._job.on_progress is not None:
            self._job.on_progress(Progress("pack", self._done_bytes, self._job.expert.tensor_bytes))


def _kept_names(expert: Checkpoint) -> tuple[str, ...]:
    """Every other file of the expert's directory, at any depth; none beside a bare file.

    Raises:
        CorruptError: one of them is no regular file, or a link out of the directory.
        UnsupportedError: one has a name that the store uses itself.
    """
    if expert.path != expert.root:
        return ()
    weights = {file.name for file in expert.files}
    names = sorted(name for name in _walk(expert.root) if name not in weights)
    for name in names:
        if name in OWN_NAMES:
            raise UnsupportedError.of(
                "pack.file", expert.root / name, "has a name that delta stores use", "rename the file"
            )
        stat_regular(expert.root, name)
    return tuple(names)


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise os_error(error, Path(error.filename), "listing it") from error

    for folder, _, names in os.walk(root, onerror=refuse):
        for name in names:
            yield (Path(folder) / name).relative_to(root).as_posix()


def _keep(job: _Job, name: str, target: Path) -> KeptFile:
    """Copy a file as it is."""
    source = job.expert.root / name
    size = job.store.size_bytes(source)
    hasher = blake3()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            for start in range(0, size, _COPY_BYTES):
                part = job.store.read_metadata(source, start, min(_COPY_BYTES, size - start))
                hasher.update(part)
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise os_error(error, target, f"copying {source}") from error
    job.store.ledger.charge(str(target), Purpose.OUTPUT, size)
    return KeptFile(name, size, hasher.hexdigest(16))


def _check_removable(expert: Checkpoint, kept: Sequence[str]) -> None:
    """Refuse to replace what is only linked from here.

    Raises:
        RecipeError: naming the link.
    """
    places = [expert.path, *(expert.root / name for name in (*(f.name for f in expert.files), *kept))]
    for place in places:
        if place.is_symlink():
            raise RecipeError.of(
                "pack.replace", place, "is a link: --replace removes only files that stand here", "pack without it"
            )
