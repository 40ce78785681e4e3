"""Repair a snapshot: recompute what is damaged from its inputs, check it against the manifest, replace the files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe.core.blocks import DTYPES
from mergepipe.core.flags import public_call
from mergepipe.errors import ConflictError, CorruptError, OutputError, Problem, UnsupportedError
from mergepipe.jobs.examination import Examination, examine
from mergepipe.jobs.replay import RebuiltTensor, cause_of_change, open_recorded, rebuild_tensors
from mergepipe.jobs.snapshots import find_published, refuse_elsewhere, with_inputs_found
from mergepipe.options import MergeOptions, RunOptions, catalog_home, engine_options
from mergepipe.reports import ProgressCallback, RepairReport
from mergepipe.runs.small_files import plan_small_files, sidecar_contents
from mergepipe.runs.stored_plan import plan_of
from mergepipe.snapshots.layout import PlacedFile, SnapshotLayout, small_digest
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.shards import BlockTable, ShardLayout, TensorSpec, block_digest, header_of, index_files
from mergepipe.snapshots.staging import Staging, check_free_space
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors, read_descriptor_range
from mergepipe.storage.stores import Stores

_HINT = "merge again"
_COPY_BYTES = 8 << 20
_STAGED_NAME = "mended"


@dataclass(frozen=True, slots=True)
class _Patch:
    """Bytes to be written into a file, from an offset on; `parts` together have `nbytes`."""

    file: str
    offset: int
    nbytes: int
    parts: Iterable[bytes]


@public_call(RunOptions)
def repair(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that; see `verify`."""
    started = time.perf_counter()
    made = RunOptions.of(options, fields)
    refuse_elsewhere(snapshot)
    engine = engine_options(made)
    store = Stores()
    place, is_pack = find_published(snapshot, made.home, store)
    if is_pack:
        hint = "pack the expert again, or unpack the store and repair the snapshot"
        raise UnsupportedError.of(
            "pack.unsupported", place, "is a packed expert, which cannot be repaired in place", hint
        )
    path = place.local_path
    if path.is_symlink():
        message = f"is a link to {path.resolve()}, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the snapshot itself")
    path = path.resolve()
    examination = examine(store, Location.local(path), engine.threads, on_progress)
    examination = replace(examination, manifest=with_inputs_found(examination.manifest, store, catalog_home(made)))
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
            mended = examine(store, Location.local(path), engine.threads, on_progress)
            if any(damage.kind == "blocks-file" for damage in mended.damages):
                written += _write_small(path, {mended.manifest.blocks.name: _block_table(mended)}, staging.directory)
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


def _header_patches(examination: Examination) -> Iterator[_Patch]:
    for damage in examination.damages:
        if damage.kind not in ("header", "missing"):
            continue
        file = next(file for file in examination.layout.files if file.name == damage.file)
        header = header_of(_specs(examination.manifest, file.name), file.name)
        if len(header) != file.data_start or (
            examination.table and block_digest(header) != examination.table.headers[file.index]
        ):
            message = "its header was written by another version, and cannot be recomputed"
            raise CorruptError.of("snapshot.unrepairable", examination.path / file.name, message, _HINT)
        yield _Patch(file.name, 0, len(header), [header])


def _specs(manifest: Manifest, file: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, DTYPES[t.dtype], t.shape) for t in manifest.tensors if t.file == file)


def _block_patches(examination: Examination, rebuilt: Mapping[str, RebuiltTensor]) -> Iterator[_Patch]:
    """Return patches of every damaged tensor, recomputed and checked against the manifest."""
    placed = {tensor.name: (file, tensor) for file in examination.layout.files for tensor in file.tensors}
    wrong = [name for name, made in rebuilt.items() if made.digest.root != placed[name][1].root]
    if wrong:
        message = f"recomputed from the inputs, it differs: {cause_of_change(examination.manifest)}"
        raise ConflictError(*(Problem("input.changed", name, message, "restore the inputs") for name in wrong))
    for damage in examination.damages:
        if damage.kind == "block" and damage.stop > damage.start:
            file, tensor = placed[damage.tensor]
            nbytes = damage.stop - damage.start
            parts = _rebuilt_parts(rebuilt[damage.tensor], damage.start - tensor.offset, nbytes)
            yield _Patch(file.name, damage.start, nbytes, parts)


def _rebuilt_parts(made: RebuiltTensor, start: int, nbytes: int) -> Iterator[bytes]:
    """Read bytes of a recomputed tensor, from its byte `start` on."""
    with made.file.open("rb", buffering=0) as stream:
        for done in range(0, nbytes, _COPY_BYTES):
            count = min(_COPY_BYTES, nbytes - done)
            yield read_descriptor_range(stream.fileno(), made.file, made.offset + start + done, count)


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
    contents = sidecar_contents(plan_small_files(inputs, store, MergeOptions()), inputs, store, bare, plan)
    contents |= index_files([ShardLayout(file.name, _specs(manifest, file.name), b"") for file in manifest.files])
    impossible = [
        Problem("snapshot.unrepairable", str(examination.path / name), "cannot be recomputed from the inputs", _HINT)
        for name in wanted
        if name not in contents or (name in records and small_digest(contents[name]) != records[name].blake3)
    ]
    if impossible:
        raise CorruptError(*impossible)
    return {name: contents[name] for name in wanted}


def _apply(directory: Path, layout: SnapshotLayout, patches: Sequence[_Patch], staging: Path) -> int:
    """Make every damaged weight file anew, durably, from its sound bytes and the patches; return the patched bytes."""
    for file in layout.files:
        path = Path(os.path.normpath(directory / file.name))  # which may lie beside the folder
        of_file = [patch for patch in patches if patch.file == file.name]
        if of_file or not path.is_file() or path.stat().st_size != file.size_bytes:
            check_free_space(directory, file.size_bytes)
            with os_errors(path, "repairing it"):
                _make_anew(path, file, of_file, staging / _STAGED_NAME)
                _move(staging / _STAGED_NAME, path)
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
                    owned.write_at(descriptor, part, copied)
                    copied += len(part)
        os.ftruncate(descriptor, file.size_bytes)
        for patch in patches:
            offset = patch.offset
            for part in patch.parts:
                owned.write_at(descriptor, part, offset)
                offset += len(part)
        if times is not None:
            os.utime(descriptor, ns=(times.st_atime_ns, times.st_mtime_ns))
        owned.sync_file(descriptor)
    finally:
        os.close(descriptor)


def _move(staged: Path, path: Path) -> None:
    """Put a file in its place: of a link, in place of the link itself; never into a folder that is one."""
    if path.parent.resolve() != path.parent:
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path.parent, message, "remove the link, and run again")
    owned.make_folders(path.parent)
    owned.rename(staged, path)
    owned.sync_folder(path.parent)


def _write_small(directory: Path, contents: Mapping[str, bytes], staging: Path) -> int:
    """Replace small files, each atomically; a link is replaced itself, not its target."""
    for name, content in contents.items():
        path = directory / name
        staged = staging / _STAGED_NAME
        with os_errors(path, "repairing it"):
            owned.write_file(staged, content)
            _move(staged, path)
    return sum(map(len, contents.values()))


def _block_table(examination: Examination) -> bytes:
    """Make the table of block digests again, once all blocks match the manifest's digests."""
    record = examination.manifest.blocks
    blocks = tuple(tuple(b for b in tensor if b is not None) for tensor in examination.scan.blocks)
    headers = tuple(header for header in examination.scan.headers if header is not None)
    content = BlockTable(examination.layout.block_elements, headers, blocks).to_bytes()
    if small_digest(content) != record.blake3:
        message = "the table of block digests cannot be made again"
        raise CorruptError.of("snapshot.unrepairable", examination.path / record.name, message, _HINT)
    return content
