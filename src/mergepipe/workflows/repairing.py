"""Repairs a snapshot: makes what is damaged again from the inputs, checks it, and writes only the damaged bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.block_digests import BlockTable, block_digest
from mergepipe.blocks import DTYPES
from mergepipe.budget import Ledger
from mergepipe.engine.execute import EngineOptions
from mergepipe.errors import ConflictError, CorruptError, Problem
from mergepipe.manifest import Manifest
from mergepipe.publish import Staging, check_free_space
from mergepipe.reports import ProgressCallback, RepairReport
from mergepipe.storage.local import LocalStore, os_error
from mergepipe.storage.output import sync_directory, write_durably
from mergepipe.workflows.block_keys import KEYS_NAME
from mergepipe.workflows.overlays import refuse_overlay
from mergepipe.workflows.rebuilding import Rebuilt, open_recorded, rebuild_keys, rebuild_tensors
from mergepipe.workflows.sidecars import sidecar_contents
from mergepipe.workflows.snapshot_layout import PlacedFile, SnapshotLayout, small_digest
from mergepipe.workflows.snapshots import read_manifest_value
from mergepipe.workflows.verifying import Examination, examine
from mergepipe.writer import INDEX_NAME, ShardLayout, TensorSpec, header_of, index_json

_HINT = "merge again"
_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Patch:
    """Bytes to be put at `offset` of a file."""

    file: PlacedFile
    offset: int
    source: Rebuilt | bytes
    source_offset: int
    nbytes: int


def repair_snapshot(
    path: Path, engine: EngineOptions, *, started: float, on_progress: ProgressCallback | None
) -> RepairReport:
    """Mend whatever `verify` finds in the snapshot at `path`; what is sound is not written to.

    Nothing is written before all of it was made again and is what the manifest says. Times of files stay as they are,
    so that what was made from the snapshot knows it again.

    Raises:
        NotFoundError, ConflictError: an input is gone or changed; `repair.differs`, it makes other bytes by now.
        CorruptError: the manifest is damaged; `repair.impossible`, something that cannot be made again.
        UnsupportedError: `snapshot.overlay`.
    """
    path = path.resolve()
    refuse_overlay(path, read_manifest_value(path), "mended")
    found = examine(path, engine.threads, on_progress)
    written = 0
    names = found.damaged
    if found.damages:
        sizes = {tensor.name: tensor.nbytes for tensor in found.layout.tensors}
        check_free_space(path, sum(sizes[name] for name in names))
        with Staging(path.with_name(f"{path.name}.repair"), force=False) as staging:
            rebuilt = rebuild_tensors(found.manifest, names, staging.path, engine) if names else ()
            small = _small_files(found)
            patches = [*_header_patches(found), *_block_patches(found, {r.digest.name: r for r in rebuilt})]
            written = _apply(path, found.layout, patches) + _write_small(path, small)
        written += _mend_table(path, engine)
        _check_mended(examine(path, engine.threads, on_progress))
    return RepairReport(path, found.manifest.sid, found.damages, names, written, time.perf_counter() - started)


# --- what is to be written ---


def _header_patches(found: Examination) -> Iterator[_Patch]:
    for damage in found.damages:
        if damage.kind not in ("header", "missing"):
            continue
        file = next(file for file in found.layout.files if file.name == damage.file)
        header = header_of(_specs(found.manifest, file.name), {})
        if len(header) != file.data_start or (found.table and block_digest(header) != found.table.headers[file.index]):
            message = "its header was written by another version, and cannot be made again"
            raise CorruptError.of("repair.impossible", found.path / file.name, message, _HINT)
        yield _Patch(file, 0, header, 0, len(header))


def _specs(manifest: Manifest, file: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, DTYPES[t.dtype], t.shape) for t in manifest.tensors if t.file == file)


def _block_patches(found: Examination, rebuilt: Mapping[str, Rebuilt]) -> Iterator[_Patch]:
    """The damaged bytes of every damaged tensor, each made again and found to be what the manifest says."""
    placed = {tensor.name: (file, tensor) for file in found.layout.files for tensor in file.tensors}
    wrong = [name for name, made in rebuilt.items() if made.digest.root != placed[name][1].root]
    if wrong:
        message = "made again from the inputs it is not what the manifest says: an input has other values by now"
        raise ConflictError(*(Problem("repair.differs", name, message, "put the inputs back") for name in wrong))
    for damage in found.damages:
        if damage.kind == "block" and damage.stop > damage.start:
            file, tensor = placed[damage.tensor]
            made = rebuilt[damage.tensor]
            yield _Patch(
                file, damage.start, made, made.offset + damage.start - tensor.offset, damage.stop - damage.start
            )


def _small_files(found: Examination) -> dict[str, bytes]:
    """The damaged small files, made again."""
    manifest = found.manifest
    records = {record.name: record for record in manifest.sidecars}
    wanted = [each.file for each in found.damages if each.kind in ("small-file", "index", "config")]
    if not wanted:
        return {}
    inputs = open_recorded(manifest, LocalStore())
    bare = replace(manifest, sidecars=())
    contents = sidecar_contents(inputs, LocalStore(), bare)
    contents[INDEX_NAME] = index_json(_shards(manifest))
    if KEYS_NAME in wanted:
        contents[KEYS_NAME] = rebuild_keys(manifest, inputs, LocalStore())
    impossible = [
        Problem("repair.impossible", str(found.path / name), "cannot be made again from the inputs", _HINT)
        for name in wanted
        if name not in contents or (name in records and small_digest(contents[name]) != records[name].blake3)
    ]
    if impossible:
        raise CorruptError(*impossible)
    return {name: contents[name] for name in wanted}


def _shards(manifest: Manifest) -> tuple[ShardLayout, ...]:
    return tuple(ShardLayout(file.name, _specs(manifest, file.name), b"") for file in manifest.files)


# --- writing it ---


def _apply(directory: Path, layout: SnapshotLayout, patches: Sequence[_Patch]) -> int:
    """Write the patches file by file and make them durable; also give every file its size."""
    written = 0
    for file in layout.files:
        own = [patch for patch in patches if patch.file.name == file.name]
        path = directory / file.name
        if own or not path.exists() or path.stat().st_size != file.size_bytes:
            written += _patch_file(path, file.size_bytes, own)
    sync_directory(directory)
    return written


def _patch_file(path: Path, size_bytes: int, patches: Sequence[_Patch]) -> int:
    try:
        times = path.stat() if path.exists() else None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, size_bytes)
            written = sum(_write_patch(descriptor, patch) for patch in patches)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if times is not None:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    except OSError as error:
        raise os_error(error, path, "repairing it") from error
    return written


def _write_patch(descriptor: int, patch: _Patch) -> int:
    if isinstance(patch.source, bytes):
        return _write_all(descriptor, patch.source, patch.offset)
    done = 0
    with patch.source.file.open("rb", buffering=0) as stream:
        while done < patch.nbytes:
            part = os.pread(stream.fileno(), min(_COPY_BYTES, patch.nbytes - done), patch.source_offset + done)
            done += _write_all(descriptor, part, patch.offset + done)
    return done


def _write_all(descriptor: int, content: bytes, offset: int) -> int:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
    return done


def _write_small(directory: Path, contents: Mapping[str, bytes]) -> int:
    """Replace small files, each in one step."""
    for name, content in contents.items():
        path = directory / name
        beside = path.with_name(f".{path.name}.repair")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        write_durably(beside, content, Ledger())
        try:
            beside.replace(path)
        except OSError as error:
            raise os_error(error, path, "repairing it") from error
        sync_directory(path.parent)
    return sum(map(len, contents.values()))


def _mend_table(path: Path, engine: EngineOptions) -> int:
    """Write the table of block digests again where it is damaged, once all blocks are what the roots say."""
    found = examine(path, engine.threads, None)
    record = found.manifest.blocks
    if not any(each.kind == "blocks-file" for each in found.damages):
        return 0
    blocks = tuple(tuple(b for b in tensor if b is not None) for tensor in found.scan.blocks)
    headers = tuple(header for header in found.scan.headers if header is not None)
    content = BlockTable(found.layout.block_elements, headers, blocks).to_bytes()
    if small_digest(content) != record.blake3:
        message = "the table of block digests cannot be made again"
        raise CorruptError.of("repair.impossible", path / record.name, message, _HINT)
    return _write_small(path, {record.name: content})


def _check_mended(found: Examination) -> None:
    if found.damages:
        raise CorruptError(
            *(Problem("repair.failed", str(found.path / d.file), d.message, _HINT) for d in found.damages)
        )
