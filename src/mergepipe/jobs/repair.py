"""Repair a snapshot: recompute damaged tensors from the inputs, check them, replace the damaged files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.core.blocks import DTYPES
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import ConflictError, CorruptError, OutputError, Problem
from mergepipe.jobs.replay import RebuiltTensor, open_recorded, rebuild_tensors
from mergepipe.jobs.verify import Examination, examine
from mergepipe.reports import ProgressCallback, RepairReport
from mergepipe.runs.small_files import plan_small_files, sidecar_contents
from mergepipe.runs.snapshots import with_inputs_found
from mergepipe.runs.stored_plan import plan_of
from mergepipe.snapshots.layout import PlacedFile, SnapshotLayout, small_digest
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.shards import BlockTable, ShardLayout, TensorSpec, block_digest, header_of, index_files
from mergepipe.snapshots.staging import Staging, check_free_space
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
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
    """Repair all damage that `verify` finds in the snapshot at `path`: each damaged file is replaced by a whole one.

    Nothing is written before all of it was made again and is what the manifest says. Times of files stay as they are.
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
        mended = examine(store, Location.local(path), engine.threads, on_progress)
        if mended.damages:
            left = (Problem("snapshot.damaged", str(path / d.file), d.message, _HINT) for d in mended.damages)
            raise CorruptError(*left)
    return RepairReport(
        path=path,
        sid=examination.manifest.sid,
        repaired=examination.damages,
        rebuilt_tensors=names,
        written_bytes=written,
        seconds=time.perf_counter() - started,
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
    contents |= index_files([ShardLayout(file.name, _specs(manifest, file.name), b"") for file in manifest.files])
    impossible = [
        Problem("snapshot.unrepairable", str(examination.path / name), "cannot be made again from the inputs", _HINT)
        for name in wanted
        if name not in contents or (name in records and small_digest(contents[name]) != records[name].blake3)
    ]
    if impossible:
        raise CorruptError(*impossible)
    return {name: contents[name] for name in wanted}


# --- writing it ---


def _apply(directory: Path, layout: SnapshotLayout, patches: Sequence[_Patch], staging: Path) -> int:
    """Make every damaged weight file anew, durably, from its sound bytes and the patches; return the patched bytes."""
    for file in layout.files:
        path = Path(os.path.normpath(directory / file.name))  # which may lie beside the folder
        of_file = [patch for patch in patches if patch.file.name == file.name]
        if of_file or not path.is_file() or path.stat().st_size != file.size_bytes:
            check_free_space(directory, file.size_bytes)
            try:
                _make_anew(path, file, of_file, staging / _STAGED_NAME)
                _move(staging / _STAGED_NAME, path)
            except OSError as error:
                raise os_error(error, path, "repairing it") from error
    return sum(patch.nbytes for patch in patches)


def _make_anew(path: Path, file: PlacedFile, patches: Sequence[_Patch], staged: Path) -> None:
    times = None
    descriptor = owned.create_file(staged)
    try:
        if path.is_file():
            with path.open("rb", buffering=0) as source:
                times = os.fstat(source.fileno())
                copied = 0
                while part := source.read(min(_COPY_BYTES, file.size_bytes - copied)):
                    copied += _write_all(descriptor, part, copied)
        os.ftruncate(descriptor, file.size_bytes)
        for patch in patches:
            _write_patch(descriptor, patch)
        if times is not None:
            os.utime(descriptor, ns=(times.st_atime_ns, times.st_mtime_ns))
        owned.sync_file(descriptor)
    finally:
        os.close(descriptor)


def _move(staged: Path, path: Path) -> None:
    """Put a file in its place: of a link, in place of the link itself; never into a folder that is one."""
    if path.parent.resolve() != path.parent:
        message, hint = "is a link, and nothing is written through links", "remove the link, and run again"
        raise OutputError.of("output.link", path.parent, message, hint)
    owned.make_folders(path.parent)
    owned.rename(staged, path)
    owned.sync_folder(path.parent)


def _write_patch(descriptor: int, patch: _Patch) -> None:
    if isinstance(patch.source, bytes):
        _write_all(descriptor, patch.source, patch.offset)
        return
    with patch.source.file.open("rb", buffering=0) as stream:
        for done in range(0, patch.nbytes, _COPY_BYTES):
            nbytes = min(_COPY_BYTES, patch.nbytes - done)
            part = read_descriptor_range(stream.fileno(), patch.source.file, patch.source_offset + done, nbytes)
            _write_all(descriptor, part, patch.offset + done)


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
            owned.write_file(staged, content)
            _move(staged, path)
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
