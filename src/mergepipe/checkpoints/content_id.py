"""Identify a model by its content: the SHA-256 of its files, and a content id from a small sample.

The content id of an expert, and a stream key of each of its tensors, key randomness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, LeveledTensor, Readable, TensorEntry
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.core.blocks import Span
from mergepipe.core.strict_json import canonical_json, digest_of
from mergepipe.storage.contract import FileId, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import aligned_buffer, read_exact, request_bytes

CHUNK_BYTES = 8 << 20
_ROUNDING = "rounding"  # in the place of a content id, which is of hex digits
_CONTENT_FORMAT = "mergepipe-content/1"


def content_digest(checkpoint: Checkpoint) -> str | None:
    """Digest what a checkpoint's tensors depend on, 32 hex digits; None unless the SHA-256 of every file is known.

    It covers the files of weights with their headers, an adapter's configuration, and how they are read (as weights or
    as differences); not the names of files and folders, nor configuration and tokenizer of full weights. Files that
    lie outside `root`, those of an adapter that is applied, count apart from the weights they are applied to.

    Law: two checkpoints with the same digest, opened against the same base, have the same tensors.
    """
    return digest_of_files(checkpoint.kind, checkpoint.file_ids)


def digest_of_files(kind: CheckpointKind, files: Sequence[FileId]) -> str | None:
    """Return the content digest of a checkpoint of these files; None unless the SHA-256 of every file is known."""
    if not files or any(file.sha256 is None for file in files):
        return None
    inside = sorted((f.sha256, f.header_digest) for f in files if f.sha256 and not f.is_outside)
    outside = sorted((f.sha256, f.header_digest) for f in files if f.sha256 and f.is_outside)
    return digest_of([_CONTENT_FORMAT, kind.value, inside, outside])


def with_digests(checkpoint: Checkpoint, digests: Mapping[Location, str]) -> Checkpoint:
    """Add SHA-256 digests, by the locations of files, to the fingerprints of a checkpoint."""
    files = [
        replace(file, id=replace(file.id, sha256=digests.get(file.location, file.id.sha256)))
        for file in checkpoint.files
    ]
    return replace(checkpoint, files=tuple(files))


def read_digests(
    store: Store, checkpoint: Checkpoint, threads: int, on_read: Callable[[], None] = lambda: None
) -> dict[Location, str]:
    """Read the files of a checkpoint whose SHA-256 is unknown, and return it by location; charged as analysis.

    Memory: 16 MiB a thread.
    """
    unknown = sorted({file.location for file in checkpoint.files if file.id.sha256 is None})
    with (
        open_files(store, unknown, (checkpoint,)) as files,
        ThreadPoolExecutor(threads) as hashers,
        ThreadPoolExecutor(threads) as readers,
    ):
        running = {path: hashers.submit(_sha256_of, files[path], readers, on_read) for path in unknown}
        digests = {path: digest.result() for path, digest in running.items()}
    check_unchanged(store, (checkpoint,))
    return digests


def _sha256_of(file: RangeFile, readers: ThreadPoolExecutor, on_read: Callable[[], None]) -> str:
    """Hash one chunk while the next is read."""
    hasher = hashlib.sha256()
    buffers = [aligned_buffer(request_bytes(file, 0, CHUNK_BYTES)) for _ in range(2)]
    pending: Future[NDArray[np.uint8]] | None = None
    for number, start in enumerate(range(0, file.size_bytes, CHUNK_BYTES)):
        stop = min(start + CHUNK_BYTES, file.size_bytes)
        coming = readers.submit(read_exact, file, start, stop, Purpose.ANALYSIS, buffers[number % 2])
        if pending is not None:
            hasher.update(pending.result().data)
            on_read()
        pending = coming
    if pending is not None:
        hasher.update(pending.result().data)
        on_read()
    return hasher.hexdigest()


N_SAMPLES = 32
SAMPLE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes `[first, stop)` of the elements of a tensor."""

    tensor: Readable
    first: int
    stop: int

    @property
    def span(self) -> Span:
        """The elements that they lie in."""
        size = self.tensor.dtype.itemsize
        return Span(self.first // size, -(-self.stop // size))


def content_id(checkpoint: Checkpoint, files: Mapping[Location, RangeFile]) -> str:
    """Identify a checkpoint by its tensor table and 32 samples of 2 KiB, 32 hex digits.

    Samples are spread evenly over the tensors' bytes in order of name, so the id does not depend on sharding, file
    names or times, nor on whether the tensors are packed. At most 32 * 3 pages are read, as analysis; of packed ones
    the blocks that the samples lie in; nothing where the checkpoint knows its id. Two checkpoints that agree in every
    sample share an id: their random masks are then the same, nothing else follows from it.
    """
    if checkpoint.content_id is not None:
        return checkpoint.content_id
    return _id_of(checkpoint, (_bytes_of(sample, files) for sample in samples(checkpoint)))


def _id_of(checkpoint: Checkpoint, contents: Iterable[bytes]) -> str:
    """The id, given the content of each sample."""
    tensors = _sampled_tensors(checkpoint)
    hasher = blake3(canonical_json([[tensor.name, tensor.dtype.name, list(tensor.shape)] for tensor in tensors]))
    for content in contents:
        hasher.update(content)
    return hasher.hexdigest(16)


class PassingContentId:
    """The content id of a checkpoint of stored tensors, taken from their bytes as they pass by, in any order.

    Safe to use from many threads; bytes may pass by several times.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._samples = [(sample, bytearray(sample.stop - sample.first)) for sample in samples(checkpoint)]
        self._unseen = [bytearray(b"\x01" * (sample.stop - sample.first)) for sample, _ in self._samples]
        self._by_name: dict[str, list[int]] = {}
        for i, (sample, _) in enumerate(self._samples):
            self._by_name.setdefault(sample.tensor.name, []).append(i)

    def show(self, tensor: str, first: int, content: NDArray[np.uint8]) -> None:
        """Look at bytes of a tensor from byte `first` on."""
        for i in self._by_name.get(tensor, ()):
            sample, sampled = self._samples[i]
            low, high = max(first, sample.first), min(first + len(content), sample.stop)
            if low < high:
                sampled[low - sample.first : high - sample.first] = content[low - first : high - first].tobytes()
                self._unseen[i][low - sample.first : high - sample.first] = bytes(high - low)

    @property
    def missing_files(self) -> set[Location]:
        """Return the files whose samples were not among the bytes read so far."""
        seen = zip(self._samples, self._unseen, strict=True)
        return {entry.file for (sample, _), unseen in seen if any(unseen) for entry in sample.tensor.stored}

    @property
    def tensors(self) -> tuple[Readable, ...]:
        """Return the tensors that are sampled."""
        return tuple({id(sample.tensor): sample.tensor for sample, _ in self._samples}.values())

    def value(self, files: Mapping[Location, RangeFile]) -> str:
        """The id; samples that did not pass by are read from `files`."""
        seen = zip(self._samples, self._unseen, strict=True)
        contents = (_bytes_of(sample, files) if any(unseen) else bytes(sampled) for (sample, sampled), unseen in seen)
        return _id_of(self._checkpoint, contents)


class _WatchedFile:
    """A file whose bytes are shown to content ids as they are read."""

    def __init__(self, file: RangeFile, sampled: Sequence[tuple[TensorEntry, PassingContentId]]) -> None:
        self._file = file
        self._sampled = sampled
        self.location = file.location
        self.size_bytes = file.size_bytes
        self.alignment = file.alignment
        self.version = file.version
        self.close = file.close

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        nbytes = self._file.read_into(offset, buffer, purpose)
        for entry, identity in self._sampled:
            start = max(offset, entry.offset)
            stop = min(offset + nbytes, entry.offset + entry.nbytes)
            if start < stop:
                content = np.frombuffer(buffer[start - offset : stop - offset], np.uint8)
                identity.show(entry.name, start - entry.offset, content)
        return nbytes


class WatchedContentIds:
    """Content ids of checkpoints, from what is read of their files anyway; of some it is not enough."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._known = [checkpoint.content_id for checkpoint in checkpoints]
        self._passing = [PassingContentId(checkpoint) for checkpoint in checkpoints]

    def watch(self, files: Mapping[Location, RangeFile]) -> Mapping[Location, RangeFile]:
        """Return the files, which show what is read of them."""
        sampled: dict[Location, list[tuple[TensorEntry, PassingContentId]]] = {}
        for identity in self._passing:
            for tensor in identity.tensors:
                if isinstance(tensor, TensorEntry):
                    sampled.setdefault(tensor.file, []).append((tensor, identity))
        watched = dict(files)
        for place in sampled.keys() & files.keys():
            watched[place] = _WatchedFile(files[place], sampled[place])
        return watched

    def values(self) -> dict[int, str]:
        """Return the ids of the checkpoints whose samples all were read, by their places."""
        ids = {}
        for place, (known, identity) in enumerate(zip(self._known, self._passing, strict=True)):
            if known is not None:
                ids[place] = known
            elif identity.tensors and not identity.missing_files:
                ids[place] = identity.value({})
        return ids


def samples(checkpoint: Checkpoint) -> Iterator[Sample]:
    """Return the ranges that the content id is computed from; none where it is known."""
    if checkpoint.content_id is not None:
        return
    tensors = _sampled_tensors(checkpoint)
    total = sum(map(_element_bytes, tensors))
    targets = [max(0, total - SAMPLE_BYTES) * i // (N_SAMPLES - 1) for i in range(N_SAMPLES)]
    start = 0
    for tensor in tensors:
        nbytes = _element_bytes(tensor)
        while targets and targets[0] < start + nbytes:
            first = targets.pop(0) - start
            yield Sample(tensor, first, min(first + SAMPLE_BYTES, nbytes))
        start += nbytes


def _element_bytes(tensor: Readable) -> int:
    return tensor.n_elements * tensor.dtype.itemsize


def _sampled_tensors(checkpoint: Checkpoint) -> list[Readable]:
    """Return the stored tensors by name; of encoded tensors those that they represent."""
    sampled: dict[tuple[str, str, int], Readable] = {}
    for tensor in checkpoint.tensors.values():
        if isinstance(tensor, LeveledTensor) and not tensor.is_delta:
            sampled[tensor.name, "", 0] = tensor
        else:
            sampled.update({(entry.name, str(entry.file), entry.offset): entry for entry in tensor.stored})
    return [sampled[key] for key in sorted(sampled)]


def stored_entries(checkpoint: Checkpoint) -> list[TensorEntry]:
    """The byte ranges behind a checkpoint's tensors, each once, by name."""
    entries = {(e.name, str(e.file), e.offset): e for tensor in checkpoint.tensors.values() for e in tensor.stored}
    return [entries[key] for key in sorted(entries)]


def _bytes_of(sample: Sample, files: Mapping[Location, RangeFile]) -> bytes:
    tensor = sample.tensor
    if not isinstance(tensor, TensorEntry):
        out = np.empty(sample.span.n_elements * tensor.dtype.itemsize, np.uint8)
        tensor.opened(files)(sample.span, out, Purpose.ANALYSIS)
        skip = sample.first - sample.span.start * tensor.dtype.itemsize
        return out[skip : skip + sample.stop - sample.first].tobytes()
    start, stop = tensor.offset + sample.first, tensor.offset + sample.stop
    return read_exact(files[tensor.file], start, stop, Purpose.ANALYSIS).tobytes()


def stream_key(seed: int, expert_content_id: str, tensor: str, repeat: int = 0) -> int:
    """64-bit key of one expert's random stream for one tensor; `repeat` sets apart entries that name one expert."""
    parts = [seed, expert_content_id, tensor, *([repeat] if repeat else [])]
    return int.from_bytes(blake3(canonical_json(parts)).digest(8), "little")


def rounding_key(seed: int, tensor: str) -> int:
    """64-bit key of the random bits by which the results of one tensor are rounded; never 0, which means to nearest."""
    return stream_key(seed, _ROUNDING, tensor) | 1
