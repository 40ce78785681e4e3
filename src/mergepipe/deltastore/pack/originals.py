"""Compare original weights with their delta store byte by byte, and remove them once they are verified."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.open_files import open_files, read_elements
from mergepipe.core.blocks import BlockGrid
from mergepipe.deltastore.checkpoint import OpenedStore
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.index import digest
from mergepipe.deltastore.pack.builder import PackJob, file_parts
from mergepipe.errors import ConflictError
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import FileId, version_of
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_error


def differing_kept_file(store: Store, opened: OpenedStore, job: PackJob) -> Location | None:
    """Find the first file, other than weights, that differs from its copy in the store; reads all of them."""
    present = {file.name: file.size_bytes for file in job.kept}
    kept_files = {file.name: file for file in opened.header.kept}
    for name in sorted(present.keys() | kept_files.keys()):
        path = job.expert.root / name
        if name not in present or name not in kept_files or present[name] != kept_files[name].size_bytes:
            return path
        hasher = blake3()
        for part in file_parts(store, path, present[name]):
            hasher.update(part)
        if hasher.hexdigest(16) != kept_files[name].blake3:
            return path
    return None


def differing_weights(store: Store, opened: OpenedStore, job: PackJob, threads: int) -> Location | None:
    """Find the first weight file of an expert that differs from what the store was packed from; reads all of them."""
    header = opened.header
    present = {file.name: file for file in job.expert.files}
    packed = {file.name: file for file in header.files}
    for name in sorted(present.keys() | packed.keys()):
        path = job.expert.root / name
        if name not in present or name not in packed or present[name].size_bytes != packed[name].size_bytes:
            return path
        content = store.read_metadata(path, 0, packed[name].header_bytes)
        if blake3(content).hexdigest(16) != packed[name].header_blake3:
            return path
    # Equal headers: both have the same tensors, in the same order.
    entries = [place.entry for place in job.places]
    rows = [place.first_row for place in job.places]
    return _differing_file(store, job.expert, opened.index.rows["expert"], entries, rows, threads)


def differing_base(store: Store, opened: OpenedStore, job: PackJob, threads: int) -> Location | None:
    """Find the first file of the base with a block that differs from what the store was packed with."""
    if [place.base is not None for place in job.places] != [tensor.has_base for tensor in opened.header.tensors]:
        return (job.base or job.expert).path
    if job.base is None:
        return None
    beside = [(place.base, place.first_row) for place in job.places if place.base is not None]
    entries, rows = [base for base, _ in beside], [row for _, row in beside]
    return _differing_file(store, job.base, opened.index.rows["base"], entries, rows, threads)


def _differing_file(
    store: Store,
    checkpoint: Checkpoint,
    digests: NDArray[np.void],
    entries: Sequence[Readable],
    rows: Sequence[int],
    threads: int,
) -> Location | None:
    """Find the file of the first tensor with a block of another digest; `rows` holds the first rows of the tensors.

    Memory: `threads` blocks.
    """
    with open_files(store, files_of(entries), (checkpoint,)) as files, ThreadPoolExecutor(threads) as pool:
        for entry, first_row in zip(entries, rows, strict=True):

            def is_same(block: int, entry: Readable = entry, first_row: int = first_row) -> bool:
                span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
                content = read_elements(entry, span, files, Purpose.ANALYSIS)
                return bool(digest(content) == digests[first_row + block].tobytes())

            if not all(pool.map(is_same, range(BlockGrid(entry.n_elements, BLOCK_ELEMENTS).n_blocks))):
                return entry.file if isinstance(entry, TensorEntry) else checkpoint.path
    return None


def check_same(store: Store, opened: OpenedStore, job: PackJob, threads: int) -> None:
    """Read all files of an expert and check that the store at `opened` holds each of them, before any is removed."""
    path = differing_kept_file(store, opened, job) or differing_weights(store, opened, job, threads)
    if path is not None:
        message = f"is not what the store in {opened.root} holds: nothing was removed"
        raise ConflictError.of("input.changed", path, message, "pack again, into another place")


def sync_store(opened: OpenedStore) -> None:
    """Make a store and its directories durable, whichever process wrote it."""
    folders = {opened.root, opened.root.parent}
    for file in opened.fingerprints:
        path = opened.root / file.name
        _sync(path.local_path)
        folders.update(parent for parent in path.parents if opened.root in parent.parents)
    for folder in sorted(folders, reverse=True):
        _sync(folder.local_path)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            owned.sync_file(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "making it durable") from error


def remove_original(job: PackJob) -> None:
    """Remove the files of an expert whose content was verified, and directories that become empty.

    Each is checked right before it is removed: files modified or created since the job was made stay.
    """
    expert, removed = job.expert, set[tuple[int, int]]()
    root = expert.root.local_path.resolve()
    files = (*expert.files, *job.kept)
    for file in files:
        _check_version(expert, file, removed)
    for file in files:
        status = _check_version(expert, file, removed)
        try:
            owned.check_folders((root / file.name).parent, root)
            owned.remove_file(root / file.name)
        except OSError as error:
            raise os_error(error, expert.root / file.name, "removing the original") from error
        removed.add((status.st_dev, status.st_ino))
    if expert.path == expert.root:
        for folder, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):  # somebody put something there meanwhile
                owned.remove_folder(Path(folder))


def _check_version(expert: Checkpoint, file: FileId, removed: set[tuple[int, int]]) -> os.stat_result:
    """Check that a file is unchanged; removing another hard link of it changed its version, and nothing else."""
    path = expert.root.local_path / file.name
    try:
        status = path.lstat()
    except OSError as error:
        raise os_error(error, path, "checking it before its removal") from error
    is_known = (status.st_dev, status.st_ino) in removed or version_of(path, status) == file.version
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size_bytes or not is_known:
        raise ConflictError.of(
            "input.changed", path, "was written to after it had been compared with its store: it was not removed",
            "pack again, into another place",
        )  # fmt: skip
    return status
