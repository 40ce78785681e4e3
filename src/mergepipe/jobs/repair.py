"""Repair a snapshot: recompute damaged tensors from the inputs, check them, write only the damaged bytes."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.core.blocks import DTYPES
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import ConflictError, CorruptError, OutputError, Problem
from mergepipe.jobs.rebuild import RebuiltTensor, open_recorded, rebuild_tensors
from mergepipe.jobs.verify import Examination, examine
from mergepipe.reports import ProgressCallback, RepairReport
from mergepipe.runs.small_files import plan_small_files, sidecar_contents
from mergepipe.runs.snapshots import with_inputs_found
from mergepipe.runs.stored_plan import plan_of
from mergepipe.snapshots.layout import PlacedFile, SnapshotLayout, small_digest
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.shards import (
    BlockTable,
    ShardLayout,
    TensorSpec,
    block_digest,
    header_of,
    index_files,
)
from mergepipe.snapshots.staging import Staging, check_free_space
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.output import sync_directory
from mergepipe.storage.ranges import os_error, read_descriptor_range
from mergepipe.storage.stores import Stores

_HINT = "merge again"
_COPY_BYTES = 8 << 20
_STAGED_NAME = "mended"


@dataclass(frozen=True, slots=True)
class _Patch:
    """Bytes to write at `offset` of a file."""

    file: PlacedFile
    offset: int
    source: RebuiltTensor | bytes
    source_offset: int
    nbytes: int


def repair_snapshot(
    path: Path, engine: EngineOptions, home: Path | None, *, started: float, on_progress: ProgressCallback | None
) -> RepairReport:
    """Repair all damage that `verify` finds in the snapshot at `path`; sound bytes are not rewritten.

    Nothing is written before all of it was made again and is what the manifest says. Times of files stay as they are,
    so that what was made from the snapshot knows it again.
    """
    if path.is_symlink():
        message = f"is a link to {path.resolve()}, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the snapshot itself")
    path = path.resolve()
    store = Stores()
    examination = examine(store, Location.local(path), engine.threads, on_progress)
    examination = replace(examination, manifest=with_inputs_found(examination.manifest, store, home))
    written = 0
    names = examination.damaged
    if examination.damages:
        sizes = {tensor.name: tensor.nbytes for tensor in examination.layout.tensors}
        check_free_space(path, sum(sizes[name] for name in names))
        with Staging(path.with_name(f"{path.name}.repair"), force=False) as staging:
            rebuilt = rebuild_tensors(store, examination.manifest, names, staging.path, engine) if names else ()
            small = _small_files(store, examination)
            patches = [*_header_patches(examination), *_block_patches(examination, {r.digest.name: r for r in rebuilt})]
            written = _apply(path, examination.layout, patches, staging.directory)
            written += _write_small(path, small, staging.directory)
            written += _mend_table(store, path, engine, staging.directory)
        _check_mended(examine(store, Location.local(path), engine.threads, on_progress))
    return RepairReport(
        path, examination.manifest.sid, examination.damages, names, written, time.perf_counter() - started
    )


# --- what is to be written ---


def _header_patches(examination: Examination) -> Iterator[_Patch]:
    for damage in examination.damages:
        if damage.kind not in ("header", "missing"):
            continue
        file = next(file for file in examination.layout.files if file.name == damage.file)
        header = header_of(_specs(examination.manifest, file.name), {}, file.name)
        if len(header) != file.data_start or (
            examination.table and block_digest(header) != examination.table.headers[file.index]
        ):
            message = "its header was written by another version, and cannot be made again"
            raise CorruptError.of("snapshot.unrepairable", examination.path / file.name, message, _HINT)
        yield _Patch(file, 0, header, 0, len(header))


def _specs(manifest: Manifest, file: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, DTYPES[t.dtype], t.shape) for t in manifest.tensors if t.file == file)


def _block_patches(examination: Examination, rebuilt: Mapping[str, RebuiltTensor]) -> Iterator[_Patch]:
    """Return patches of every damaged tensor, recomputed and checked against the manifest."""
    placed = {tensor.name: (file, tensor) for file in examination.layout.files for tensor in file.tensors}
    wrong = [name for name, made in rebuilt.items() if made.digest.root != placed[name][1].root]
    if wrong:
        message = "recomputed from the inputs, it differs from the manifest: an input has changed"
        raise ConflictError(*(Problem("input.changed", name, message, "put the inputs back") for name in wrong))
    for damage in examination.damages:
        if damage.kind == "block" and damage.stop > damage.start:
            file, tensor = placed[damage.tensor]
            made = rebuilt[damage.tensor]
            yield _Patch(
                file, damage.start, made, made.offset + damage.start - tensor.offset, damage.stop - damage.start
            )


def _small_files(store: Store, examination: Examination) -> dict[str, bytes]:
    """Rebuild the damaged small files."""
    manifest = examination.manifest
    records = {record.name: record for record in manifest.sidecars}
    wanted = [damage.file for damage in examination.damages if damage.kind in ("small-file", "index", "config")]
    if not wanted:
        return {}
    inputs = open_recorded(manifest, store)
    bare = replace(manifest, sidecars=())
    plan = plan_of(manifest, f"{examination.path / MANIFEST_NAME}: plan")
    contents = sidecar_contents(plan_small_files(inputs, store), inputs, store, bare, plan)
    contents |= index_files(_shards(manifest))
    impossible = [
        Problem("snapshot.unrepairable", str(examination.path / name), "cannot be made again from the inputs", _HINT)
        for name in wanted
        if name not in contents or (name in records and small_digest(contents[name]) != records[name].blake3)
    ]
    if impossible:
        raise CorruptError(*impossible)
    return {name: contents[name] for name in wanted}


def _shards(manifest: Manifest) -> tuple[ShardLayout, ...]:
    return tuple(ShardLayout(file.name, _specs(manifest, file.name), b"") for file in manifest.files)


# --- writing it ---


def _apply(directory: Path, layout: SnapshotLayout, patches: Sequence[_Patch], staging: Path) -> int:
    """Write the patches file by file, set every file's size, and make them durable."""
    written = 0
    for file in layout.files:
        file_patches = [patch for patch in patches if patch.file.name == file.name]
        path = directory / file.name
        if file_patches or not path.exists() or path.stat().st_size != file.size_bytes:
            written += _patch_file(directory, file, file_patches, staging)
    for folder in {(directory / file.name).parent for file in layout.files}:
        sync_directory(folder)
    return written


def _patch_file(directory: Path, file: PlacedFile, patches: Sequence[_Patch], staging: Path) -> int:
    """Patch a file in place; replace a missing file, a link, or a file with another hard link."""
    path = directory / file.name
    try:
        owned.check_folders(path.parent, directory)
        owned.make_folders(path.parent)
        try:
            descriptor = owned.open_file(path)
        except FileNotFoundError:
            return _replace_file(directory, file, patches, staging, None)
        except OutputError as error:
            if error.code != "output.link" or not owned.is_there(path):
                raise
            with _linked(path) as source:
                return _replace_file(directory, file, patches, staging, source)
        try:
            times = os.fstat(descriptor)
            written = _patch(descriptor, file, patches)
            os.utime(descriptor, ns=(times.st_atime_ns, times.st_mtime_ns))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path, "repairing it") from error
    return written


@contextlib.contextmanager
def _linked(path: Path) -> Iterator[int | None]:
    """Open a link's target for reading; None if it is no regular file or missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def _patch(descriptor: int, file: PlacedFile, patches: Sequence[_Patch]) -> int:
    os.ftruncate(descriptor, file.size_bytes)
    written = sum(_write_patch(descriptor, patch) for patch in patches)
    owned.sync_file(descriptor)
    return written


def _replace_file(
    directory: Path, file: PlacedFile, patches: Sequence[_Patch], staging: Path, source: int | None
) -> int:
    """Write a new file in the folder `staging`, from the bytes of `source` and the patches, and move it into place."""
    staged = staging / _STAGED_NAME
    check_free_space(directory, file.size_bytes)
    copied = 0
    descriptor = owned.create_file(staged)
    try:
        while source is not None and copied < file.size_bytes:
            part = os.pread(source, min(_COPY_BYTES, file.size_bytes - copied), copied)
            if not part:
                break
            copied += _write_all(descriptor, part, copied)
        written = _patch(descriptor, file, patches)
    finally:
        os.close(descriptor)
    owned.rename(staged, directory / file.name)
    return copied + written


def _write_patch(descriptor: int, patch: _Patch) -> int:
    if isinstance(patch.source, bytes):
        return _write_all(descriptor, patch.source, patch.offset)
    done = 0
    with patch.source.file.open("rb", buffering=0) as stream:
        while done < patch.nbytes:
            nbytes = min(_COPY_BYTES, patch.nbytes - done)
            part = read_descriptor_range(stream.fileno(), patch.source.file, patch.source_offset + done, nbytes)
            done += _write_all(descriptor, part, patch.offset + done)
    return done


def _write_all(descriptor: int, content: bytes, offset: int) -> int:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
    return done


def _write_small(directory: Path, contents: Mapping[str, bytes], staging: Path) -> int:
    """Replace small files, each atomically; a link is replaced itself, not its target."""
    for name, content in contents.items():
        path, staged = directory / name, staging / _STAGED_NAME
        try:
            owned.check_folders(path.parent, directory)
            owned.make_folders(path.parent)
            owned.write_file(staged, content)
            owned.rename(staged, path)
            owned.sync_folder(path.parent)
        except OSError as error:
            raise os_error(error, path, "repairing it") from error
    return sum(map(len, contents.values()))


def _mend_table(store: Store, path: Path, engine: EngineOptions, staging: Path) -> int:
    """Rewrite a damaged table of block digests, after all blocks match the manifest's digests."""
    examination = examine(store, Location.local(path), engine.threads, None)
    record = examination.manifest.blocks
    if not any(damage.kind == "blocks-file" for damage in examination.damages):
        return 0
    blocks = tuple(tuple(b for b in tensor if b is not None) for tensor in examination.scan.blocks)
    headers = tuple(header for header in examination.scan.headers if header is not None)
    content = BlockTable(examination.layout.block_elements, headers, blocks).to_bytes()
    if small_digest(content) != record.blake3:
        message = "the table of block digests cannot be made again"
        raise CorruptError.of("snapshot.unrepairable", path / record.name, message, _HINT)
    return _write_small(path, {record.name: content}, staging)


def _check_mended(examination: Examination) -> None:
    if examination.damages:
        raise CorruptError(
            *(
                Problem("snapshot.damaged", str(examination.path / d.file), d.message, _HINT)
                for d in examination.damages
            )
        )
