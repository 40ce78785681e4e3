"""Build the store of one expert in its staging directory, block by block, and publish it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import mergepipe
from mergepipe.checkpoints.content_id import PassingContentId
from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, Readable, TensorEntry, files_of
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.checkpoints.stacked_experts import pieces_of
from mergepipe.core.blocks import BlockGrid
from mergepipe.core.strict_json import digest_of
from mergepipe.deltastore.checkpoint import OpenedStore, read_store
from mergepipe.deltastore.index import (
    HEADER_FORMAT,
    HEADER_NAME,
    HEADERS_NAME,
    KeptFile,
    PackedEntry,
    PackedFile,
    StoreHeader,
    is_own_name,
)
from mergepipe.deltastore.pieces import BANDED_DTYPES, BLOCK_ELEMENTS, EncodedBlock, RawBytes, can_be_base_of
from mergepipe.deltastore.writer import GROWING_FILES, PackProgress, StoreWriter, find_progress, note_progress
from mergepipe.snapshots.layout import small_digest
from mergepipe.snapshots.manifest import file_without_paths, relative_reference
from mergepipe.snapshots.object_upload import HubUpload, ObjectContent, ObjectUpload, OutputContent, Upload
from mergepipe.snapshots.staging import Staging, kept_note
from mergepipe.snapshots.work_log import WORTH_KEEPING, WorkLog
from mergepipe.storage.contract import FileId, Store, files_below, sidecar_limit
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.output import OutputFile, make_folders
from mergepipe.storage.remote.objects import BucketFolder

# --- copy the files that a delta store holds unchanged: read in parts, written durably ---


_PART_BYTES = 8 << 20


def file_parts(store: Store, path: Location, size_bytes: int) -> Iterator[bytes]:
    """Read the first `size_bytes` of a file in parts of 8 MiB, charged as metadata."""
    for start in range(0, size_bytes, _PART_BYTES):
        yield store.read_metadata(path, start, min(_PART_BYTES, size_bytes - start))


def write_kept(store: Store, target: Path, parts: Iterable[bytes], size_bytes: int) -> None:
    """Write a new file of `size_bytes` durably, with its folders."""
    make_folders(target.parent)
    with OutputFile(target, size_bytes, store.ledger) as output:
        for part in parts:
            output.append(part)
        output.close()


# --- describe a packed expert of this machine as others get it: its files by digests that its header implies ---


_IN_MEMORY_BYTES: Final = 1 << 20  # files up to this size are sent in one request


def portable_store(
    store: Store, opened: OpenedStore, changed: Mapping[str, bytes] = MappingProxyType({})
) -> OutputContent:
    """Describe a store of this machine; of a local base and expert the header keeps the last names, as hints.

    `changed` files of the original take the place of those that the store keeps.
    """
    kept = tuple(
        KeptFile(file.name, len(changed[file.name]), small_digest(changed[file.name])) if file.name in changed else file
        for file in opened.header.kept
    )
    header = replace(opened.header, kept=kept)
    paths = [path for path in (header.base, header.expert) if path and Location.parse(path).is_local]
    names = {path: PurePath(path).name for path in paths if PurePath(path).name != path}
    base, expert = (names.get(path, path) for path in (header.base, header.expert))
    objects = {
        file.name: _object(store, opened.root / file.name, file.size_bytes, _digest(header, file.name))
        for file in opened.fingerprints
        if file.name != HEADER_NAME
    }
    objects |= {name: ObjectContent(raw, len(raw), small_digest(raw)) for name, raw in changed.items()}
    record = HEADER_FORMAT.to_json(replace(header, base=base, expert=expert))
    return OutputContent(HEADER_NAME, record, objects)


def published_store(store: Store, opened: OpenedStore) -> OutputContent:
    """Describe a store as it is published: kept files that name paths of this machine are without them."""
    names = [file.name for file in opened.header.kept if file.name.endswith(".json")]
    contents = {name: store.read_small(opened.root / name, sidecar_limit(name)) for name in names}
    cleaned = {name: file_without_paths(name, raw) for name, raw in contents.items()}
    return portable_store(store, opened, {name: raw for name, raw in cleaned.items() if raw != contents[name]})


PACK_MESSAGE: Final = f"Expert packed as its difference from its base (mergepipe {mergepipe.__version__})"
"""The message of the Hub's commit of a packed expert."""


def _open_upload(place: Location) -> Upload:
    """Open the upload of a new packed expert to a bucket or to the Hub."""
    if place.scheme == HUB_SCHEME:
        return HubUpload(place, HEADER_NAME, force=False, message=PACK_MESSAGE, packed_names=packed_names)
    return ObjectUpload(BucketFolder(place), HEADER_NAME)


def packed_names(store: Store, place: Location) -> set[str]:
    """Return the names of the files that a packed expert holds at a place."""
    kept = {file.name for file in read_store(store, place).header.kept}
    return kept | set(filter(is_own_name, files_below(store, place)))


def _object(store: Store, place: Location, size_bytes: int, digest: str) -> ObjectContent:
    is_small = size_bytes <= _IN_MEMORY_BYTES
    source = store.read_metadata(place, 0, size_bytes) if is_small else place.local_path
    return ObjectContent(source, size_bytes, digest)


def _digest(header: StoreHeader, name: str) -> str:
    """Identify the bytes of a file without reading it: the index has a checksum of every piece of the others."""
    if name == HEADERS_NAME:
        return digest_of([file.header_blake3 for file in header.files])
    digest = next((file.blake3 for file in header.kept if file.name == name), None)
    return digest or digest_of([header.index_blake3, name])


# --- build the store of one expert in its staging directory, block by block, and publish it ---


NOTE_BLOCKS = 512
"""Blocks between two units of the log, 256 MiB of bf16: the most work that a crash loses."""
FILES_OF_BUILDER = len(GROWING_FILES) + 1
"""Open files of one builder: those of the store, and the lock."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of the expert: its counterpart in the base (or None), its file, its first row of the index.

    `stays_plain`: merges may cut it into tensors of the base's layout, which needs its bytes as they are.
    """

    entry: TensorEntry
    base: Readable | None
    file: int
    first_row: int
    stays_plain: bool

    @property
    def n_rows(self) -> int:
        return BlockGrid(self.entry.n_elements, BLOCK_ELEMENTS).n_blocks

    @property
    def can_have_bands(self) -> bool:
        """Whether its blocks may be encoded in bands."""
        is_same_dtype = self.base is not None and self.base.dtype is self.entry.dtype
        return is_same_dtype and self.entry.dtype in BANDED_DTYPES and self.entry.n_elements > 0


@dataclass(frozen=True, slots=True)
class PackJob:
    """One expert to be packed, relative to its base if any: the store grows beside `out`, and is published at `place`.

    The two are the same unless `place` is in a bucket. `kept` are its files other than weights; `places` describes its
    tensors in the order of the store.
    """

    base: Checkpoint | None
    expert: Checkpoint
    out: Path
    place: Location
    kept: tuple[FileId, ...]
    places: tuple[Place, ...]
    depth: int = 0  # see `StoreHeader`

    @classmethod
    def of(
        cls,
        base: Checkpoint | None,
        expert: Checkpoint,
        out: Path,
        place: Location,
        kept_files: tuple[FileId, ...],
        depth: int = 0,
    ) -> PackJob:
        numbers = {file.location: number for number, file in enumerate(expert.files)}
        places: dict[str, Place] = {}
        row = 0
        for name, entry in sorted(expert.tensors.items()):
            if not isinstance(entry, TensorEntry):
                raise TypeError(f"not one byte range: {entry!r}")
            matching = _matching_tensor(base, entry)
            stays_plain = base is not None and matching is None and bool(pieces_of(entry.name, entry.shape))
            places[name] = Place(entry, matching, numbers[entry.file], row, stays_plain)
            row += places[name].n_rows
        return cls(base, expert, out, place, kept_files, tuple(places[name] for name in expert.tensors), depth)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the tensors in the order of their rows: by name, as all experts of a base have them."""
        return sorted(range(len(self.places)), key=lambda number: self.places[number].entry.name)

    @property
    def n_rows(self) -> int:
        """The number of blocks."""
        return sum(place.n_rows for place in self.places)

    @property
    def bases(self) -> tuple[Checkpoint, ...]:
        """The base, if there is one."""
        return () if self.base is None else (self.base,)

    @property
    def weight_files(self) -> set[Location]:
        """The weight files of the expert and of the base."""
        bases = [place.base for place in self.places if place.base is not None]
        return {file.location for file in self.expert.files} | files_of(bases)

    @property
    def base_files(self) -> str:
        """A digest of the fingerprints of the base's files."""
        return digest_of([] if self.base is None else self.base.fingerprints)

    @property
    def key(self) -> str:
        """A digest of everything that must be unchanged to resume another run's unfinished store."""
        roots = [str(checkpoint.path.absolute()) for checkpoint in (*self.bases, self.expert)]
        kept_files = [[file.name, file.size_bytes, file.version] for file in self.kept]
        fingerprints = [checkpoint.fingerprints for checkpoint in (*self.bases, self.expert)]
        return digest_of(
            [mergepipe.__version__, HEADER_FORMAT.title, BLOCK_ELEMENTS, *roots, *fingerprints, kept_files]
        )

    def check_unchanged(self, store: Store) -> None:
        """Refuse inputs that are not those that were opened."""
        kept = [CheckpointFile(self.expert.root / file.name, file) for file in self.kept]
        check_unchanged(store, (*self.bases, replace(self.expert, files=(*self.expert.files, *kept))))


def _matching_tensor(base: Checkpoint | None, entry: TensorEntry) -> Readable | None:
    """The base's tensor of the same name and shape, of the same dtype or one that is converted; computed in stores."""
    candidate = None if base is None else base.tensors.get(entry.name)
    if base is None or candidate is None or candidate.shape != entry.shape:
        return None
    if not isinstance(candidate, TensorEntry) and base.encoded is None:
        return None
    return candidate if can_be_base_of(candidate.dtype, entry.dtype) else None


@contextlib.contextmanager
def open_builder(job: PackJob, store: Store) -> Iterator[StoreBuilder]:
    """Open a builder in a staging directory next to `job.out`; only its `publish` makes anything visible.

    A place in a bucket is claimed while the context lasts; one on the Hub is refused here where nothing can be written.

    It resumes what an interrupted run of the same job left, and if interrupted itself leaves its durable part for the
    next run.
    """
    resumable: list[PackProgress] = []

    def can_continue(directory: Path) -> bool:
        progress = find_progress(directory, job.key)
        resumable.extend([] if progress is None else [progress])
        return progress is not None

    growing = Staging(job.out, force=False, can_continue=can_continue)
    uploading = contextlib.nullcontext() if job.place.is_local else _open_upload(job.place)
    with growing as staging, uploading as upload:
        builder = None
        try:
            builder = StoreBuilder(job, store, staging, upload, resumable[0] if resumable else None)
            yield builder
        except BaseException as error:
            is_noted = bool(resumable) if builder is None else builder.is_noted
            if is_noted and isinstance(error, WORTH_KEEPING) and staging.path.is_dir():
                staging.keep()
                note = kept_note(
                    job.out, resumable[0].durable.n_rows / job.n_rows if builder is None else builder.noted_share
                )
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            raise
        finally:
            if builder is not None:
                builder.close()


class StoreBuilder:
    """Builds the store of one job in its staging directory; made by `open_builder`.

    Memory: 8 MiB of write buffers.
    """

    def __init__(
        self, job: PackJob, store: Store, staging: Staging, upload: Upload | None, progress: PackProgress | None
    ) -> None:
        self.job = job
        self.n_done = 0 if progress is None else progress.durable.n_rows
        self.is_noted = progress is not None
        self._store = store
        self._staging = staging
        self._upload = upload
        self._noted_rows = self.n_done
        self._log = WorkLog(staging.directory, job.key, None if progress is None else progress.logged)
        cuts = () if progress is None else progress.cuts
        self._n_noted_cuts = len(cuts)
        self._numbers = job.numbers
        self._cuts = dict(zip(self._numbers, cuts, strict=False))
        self._content_id = PassingContentId(job.expert)
        durable = None if progress is None else progress.durable
        self._writer = StoreWriter(staging.path, store.ledger, durable)
        try:
            for file in () if self.is_noted else job.expert.files:
                header = self._store.read_metadata(file.location, 0, self._header_bytes(file))
                self._writer.append_header(header)
        except BaseException:  # also on an interrupt: no other code closes them
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
        self._log.close()

    @property
    def done_bytes(self) -> int:
        """Bytes of the expert that an earlier run packed."""
        sizes = ((p.entry, min(max(self.n_done - p.first_row, 0), p.n_rows)) for p in self.job.places)
        return sum(min(n * BLOCK_ELEMENTS * entry.dtype.itemsize, entry.nbytes) for entry, n in sizes)

    @property
    def noted_share(self) -> float:
        """The share of blocks that is durable and recorded as such."""
        return self._noted_rows / self.job.n_rows

    def cut(self, number: int) -> float | None:
        """The cut of tensor `number`; None until it is set."""
        return self._cuts.get(number)

    def lacks_cut(self, number: int) -> bool:
        """Whether the cut of tensor `number` must still be set."""
        return self.job.places[number].can_have_bands and number not in self._cuts

    def set_cut(self, number: int, cut: float) -> None:
        """Set the cut of tensor `number`, before its first block is put."""
        self._cuts[number] = cut

    def show(self, number: int, block: int, content: RawBytes) -> None:
        """See the bytes of a block of tensor `number`; called from many threads."""
        entry = self.job.places[number].entry
        self._content_id.show(entry.name, block * BLOCK_ELEMENTS * entry.dtype.itemsize, content)

    def append(self, encoded: EncodedBlock, row: NDArray[np.void]) -> None:
        """Write the next block. Once it failed nothing may be appended: what is on disk is unknown then."""
        self._writer.append(row, encoded.pieces)
        if self._writer.n_rows - self._noted_rows >= NOTE_BLOCKS:
            self._note()

    def _note(self) -> None:
        """Make the blocks written so far durable, and record the progress."""
        durable = self._writer.sync()
        n_begun = sum(place.first_row < durable.n_rows for place in self.job.places)
        cuts = [self._cuts.get(number) for number in self._numbers[self._n_noted_cuts : n_begun]]
        note_progress(self._log, self._staging.directory, durable, cuts)
        self._n_noted_cuts = n_begun
        self._noted_rows = durable.n_rows
        self.is_noted = True

    def finish(self) -> None:
        """Write the remaining files once every block was put, make all durable, and check that no input changed."""
        if self._writer.n_rows != self.job.n_rows:
            raise ValueError(f"{self.job.out}: {self._writer.n_rows} of {self.job.n_rows} blocks were written")
        if self._upload is not None:  # what is packed is not packed again if the upload fails
            self._note()
        kept_files = tuple(self._keep(file.name) for file in self.job.kept)
        with open_files(self._store, self._content_id.missing_files, (self.job.expert,)) as files:
            content_id = self._content_id.value(files)
        self._writer.finish(self._header(kept_files, content_id))
        self.job.check_unchanged(self._store)

    def read(self) -> OpenedStore:
        """Read header and index of the finished store, before it is published."""
        return read_store(self._store, Location.local(self._staging.path))

    def publish(self) -> None:
        """Make the finished store visible; on the Hub by a commit of its own, which follows those of other experts."""
        if self._upload is None:
            self._staging.publish()
        elif isinstance(self._upload, HubUpload):
            with _open_upload(self.job.place) as upload:
                published_store(self._store, self.read()).send_by(upload)
        else:
            portable_store(self._store, self.read()).send_by(self._upload)

    def _header(self, kept_files: tuple[KeptFile, ...], content_id: str) -> StoreHeader:
        job = self.job
        return StoreHeader(
            base="" if job.base is None else relative_reference(str(job.base.path.absolute()), job.out),
            base_files=job.base_files,
            expert=relative_reference(str(job.expert.path.absolute()), job.out),
            is_bare_file=job.expert.path != job.expert.root,
            index_blake3=self._writer.index_blake3,
            files=tuple(
                PackedFile(
                    file.id.name, file.id.size_bytes, file.id.version, self._header_bytes(file), file.id.header_digest
                )
                for file in job.expert.files
            ),
            kept=kept_files,
            tensors=tuple(self._entry(place) for place in job.places),
            content_id=content_id,
            depth=job.depth,
        )

    def _entry(self, place: Place) -> PackedEntry:
        entry = place.entry
        return PackedEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            file=place.file,
            first_row=place.first_row,
            base_dtype=None if place.base is None else place.base.dtype,
            is_plain=place.base is None and self._writer.are_raw(place.first_row, place.first_row + place.n_rows),
        )

    def _header_bytes(self, file: CheckpointFile) -> int:
        """The bytes of a weight file before its tensors: the header, with its length prefix."""
        tensors = [place.entry for place in self.job.places if place.entry.file == file.location]
        return file.id.size_bytes - sum(tensor.nbytes for tensor in tensors)

    def _keep(self, name: str) -> KeptFile:
        """Copy a file unchanged."""
        source, target = self.job.expert.root / name, self._staging.path / name
        size = self._store.size_bytes(source)
        hasher = blake3()

        def hashed() -> Iterator[bytes]:
            for part in file_parts(self._store, source, size):
                hasher.update(part)
                yield part

        write_kept(self._store, target, hashed(), size)
        return KeptFile(name, size, hasher.hexdigest(16))
