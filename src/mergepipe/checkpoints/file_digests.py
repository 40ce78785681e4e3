"""Identify a model by content: the SHA-256 of its files, and one digest over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind
from mergepipe.checkpoints.open_files import check_unchanged, open_files
from mergepipe.core.canonical_json import digest_of
from mergepipe.storage.buffers import aligned_buffer
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.file_version import FileId
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import is_remote
from mergepipe.storage.ranges import read_exact, request_bytes

CHUNK_BYTES = 8 << 20
_CONTENT_FORMAT = "mergepipe-content/1"


def content_digest(checkpoint: Checkpoint) -> str | None:
    """Digest what a checkpoint's tensors depend on, 32 hex digits; None unless the SHA-256 of every file is known.

    It covers the files of weights with their headers, an adapter's configuration, and how they are read (as weights or
    as differences); not the names of files and folders, nor configuration and tokenizer of full weights. Files that
    lie outside `root`, those of an adapter that is applied, count apart from the weights they are applied to.

    Law: two checkpoints with the same digest, opened against the same base, have the same tensors.
    """
    return digest_of_files(checkpoint.kind, checkpoint.files)


def digest_of_files(kind: CheckpointKind, files: Sequence[FileId]) -> str | None:
    """Return the content digest of a checkpoint of these files; None unless the SHA-256 of every file is known."""
    if not files or any(file.sha256 is None for file in files):
        return None
    inside = sorted((f.sha256, f.header_digest) for f in files if f.sha256 and not is_outside(f))
    outside = sorted((f.sha256, f.header_digest) for f in files if f.sha256 and is_outside(f))
    return digest_of([_CONTENT_FORMAT, kind.value, inside, outside])


def is_outside(file: FileId) -> bool:
    """Whether a file lies outside the folder of its checkpoint, as those of an applied adapter do."""
    return PurePosixPath(file.name).is_absolute() or is_remote(file.name)


def with_digests(checkpoint: Checkpoint, digests: Mapping[str, str]) -> Checkpoint:
    """Add SHA-256 digests, by the names of files, to the fingerprints of a checkpoint."""
    files = tuple(replace(file, sha256=digests.get(file.name, file.sha256)) for file in checkpoint.files)
    return replace(checkpoint, files=files)


def read_digests(
    store: Store, checkpoint: Checkpoint, threads: int, on_read: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Read the files of a checkpoint whose SHA-256 is unknown, and return it by name; charged as analysis.

    Memory: 16 MiB a thread.
    """
    unknown = {checkpoint.root / file.name: file.name for file in checkpoint.files if file.sha256 is None}
    with (
        open_files(store, unknown, (checkpoint,)) as files,
        ThreadPoolExecutor(threads) as hashers,
        ThreadPoolExecutor(threads) as readers,
    ):
        running = {
            name: hashers.submit(_sha256_of, files[path], readers, on_read) for path, name in sorted(unknown.items())
        }
        digests = {name: digest.result() for name, digest in running.items()}
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
