"""Verify a snapshot against its manifest: blocks, digests and small files; repair what is damaged from its inputs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from mergepipe.checkpoints.config_files import parse_config
from mergepipe.checkpoints.directory import stored_name
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, DTypeKind
from mergepipe.core.display import shortened
from mergepipe.core.flags import public_call
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import (
    ConflictError,
    CorruptError,
    MergePipeError,
    NotFoundError,
    OutputError,
    Problem,
    RecipeError,
    StorageError,
    UnsupportedError,
)
from mergepipe.jobs.replay import RebuiltTensor, cause_of_change, open_recorded, rebuild_tensors, sampled_tensors
from mergepipe.jobs.snapshots import find_published, read_manifest_value, refuse_elsewhere, with_inputs_found
from mergepipe.options import MergeOptions, RunOptions, VerifyOptions, catalog_home, engine_options
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.output_tensors import shape_contradictions
from mergepipe.reports import ByteProgress, Damage, ProgressCallback, RepairReport, VerifyReport
from mergepipe.runs.small_files import plan_small_files, sidecar_contents
from mergepipe.runs.stored_plan import plan_of
from mergepipe.snapshots.layout import (
    PlacedFile,
    PlacedTensor,
    Scan,
    SnapshotLayout,
    file_digest,
    layout_of,
    read_table,
    scan_snapshot,
    small_digest,
)
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, OutputTensor, is_composite, read_composite
from mergepipe.snapshots.shards import (
    BlockTable,
    ShardLayout,
    TensorSpec,
    block_digest,
    header_of,
    index_files,
    index_map,
    index_name,
    root_of,
)
from mergepipe.snapshots.staging import Staging, check_free_space, temporary_folder
from mergepipe.storage import owned
from mergepipe.storage.contract import CONFIG_BYTES, MANIFEST_BYTES, Digested, Store, files_below
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors, read_descriptor_range
from mergepipe.storage.stores import Stores


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of verifying a snapshot, from which it can be repaired.

    `table` is the table of block digests if it is sound. `damaged` are the tensors with a wrong block.
    """

    path: Location
    manifest: Manifest
    layout: SnapshotLayout
    table: BlockTable | None
    scan: Scan
    damages: tuple[Damage, ...]
    notices: tuple[str, ...]

    @property
    def damaged(self) -> tuple[str, ...]:
        """Names of the tensors that have a damaged block, in the manifest's order."""
        return tuple(dict.fromkeys(damage.tensor for damage in self.damages if damage.kind == "block"))


@public_call(VerifyOptions)
def verify(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> VerifyReport:
    """Read a whole snapshot and compare every block, digest and file with its manifest; damage is in the report.

    A packed expert is decoded, and every block compared with the digest of the original.

    Args:
        snapshot: its directory, where it is in a bucket or repository, its sid, or first digits of it.
        options: `VerifyOptions`: how much is made again, threads, memory, the catalog's home, where sids are looked up.
    """
    started, made = time.perf_counter(), VerifyOptions.of(options, fields)
    engine, store = engine_options(made), Stores()
    path, is_pack = find_published(snapshot, made.home, store)
    if is_pack:
        if made.deep_fraction > 0:
            raise RecipeError.of("option.conflict", "--deep", f"{snapshot} is a packed expert", "leave it out")
        from mergepipe.jobs.pack import verify_pack

        base = None if made.base is None else locate_model(store, made.base)
        return verify_pack(path, base=base, threads=engine.threads, on_progress=on_progress)
    if made.base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{snapshot} is not a packed expert", "leave it out")
    if is_composite(store, path):
        if made.deep_fraction > 0:
            message = "a composite of tailor cannot be recomputed from its sources"
            raise UnsupportedError.of("snapshot.composite", path, message, "verify it without --deep")
        return _verify_composite(store, path, engine.threads, on_progress)
    examination = examine(store, path, engine.threads, on_progress)
    if made.deep_fraction > 0 and not examination.manifest.files:
        raise UnsupportedError.of("model.unsupported", path, "is the record of a GGUF file", "verify it without --deep")
    names = sampled_tensors(examination.manifest, made.deep_fraction) if made.deep_fraction > 0 else ()
    if names:
        examination = replace(examination, manifest=with_inputs_found(examination.manifest, store, catalog_home(made)))
    replayed = tuple(_replayed(store, examination, names, engine)) if names else ()
    return VerifyReport(
        path=path.as_reported,
        sid=examination.manifest.sid,
        files=len(examination.manifest.files) + len(examination.manifest.sidecars),
        tensors=len(examination.manifest.tensors),
        blocks=sum(map(len, examination.scan.blocks)),
        read_bytes=examination.scan.n_bytes,
        seconds=time.perf_counter() - started,
        damages=(*examination.damages, *replayed),
        notices=examination.notices,
        replayed=names,
        replayed_bytes=sum(t.nbytes for t in examination.layout.tensors if t.name in set(names)),
    )


def examine(store: Store, directory: Location, threads: int, on_progress: ProgressCallback | None) -> Examination:
    """Read a whole snapshot and compare it with the manifest."""
    manifest = read_manifest_value(store, directory)
    damages: list[Damage] = []
    table: BlockTable | None = None
    try:
        table = read_table(store, directory, manifest)
    except (CorruptError, NotFoundError, StorageError) as error:
        record = manifest.blocks
        damages.append(Damage("blocks-file", record.name, "", 0, record.size_bytes, error.problems[0].message))
    layout = layout_of(manifest, directory / MANIFEST_NAME, table.block_elements if table else DEFAULT_BLOCK_ELEMENTS)
    total = sum(tensor.nbytes for tensor in layout.tensors)
    if table is not None and not all(root_of(table.tensors[tensor.index]) == tensor.root for tensor in layout.tensors):
        damages.append(Damage("blocks-file", "", "", 0, 0, "its digests are not those of the manifest's tensors"))
        table = None
    scan = scan_snapshot(store, directory, layout, threads, ByteProgress(on_progress, "verify", total).add)
    for file in layout.files:
        damages.extend(_file_damages(directory, store, file, layout, table, scan))
    damages.extend(_small_damages(store, directory, manifest))
    unusual = [f"{name}: {n} values are infinite or not a number" for name, n in sorted(scan.not_finite.items())]
    notices = [*unusual, *_strangers(store, directory, manifest)]
    config, config_notices = config_findings(store, directory / CONFIG_NAME, manifest)
    damages.extend(config)
    return Examination(directory, manifest, layout, table, scan, tuple(damages), (*notices, *config_notices))


# --- weight files ---


def _file_damages(
    directory: Location, store: Store, file: PlacedFile, layout: SnapshotLayout, table: BlockTable | None, scan: Scan
) -> Iterator[Damage]:
    path = directory / file.name
    status = store.stat(path)
    if status is None or not status.is_file:
        yield Damage("missing", file.name, "", 0, file.size_bytes, "the file is missing")
    else:
        size = status.size_bytes
        if size != file.size_bytes:
            first, last = sorted((size, file.size_bytes))
            yield Damage("size", file.name, "", first, last, f"has {size} bytes, {file.size_bytes} were written")
        yield from _header_damages(store, path, file, table, scan)
    for tensor in file.tensors:
        yield from _tensor_damages(file, tensor, layout, table, scan)


def _header_damages(
    store: Store, path: Location, file: PlacedFile, table: BlockTable | None, scan: Scan
) -> Iterator[Damage]:
    """Check a header by its digest, or, without one, by its content."""
    if table is not None:
        if scan.headers[file.index] != table.headers[file.index]:
            yield Damage("header", file.name, "", 0, file.data_start, "its digest differs from the recorded one")
        return
    try:
        header = read_header(store, path)
    except MergePipeError as error:
        yield Damage("header", file.name, "", 0, file.data_start, error.problems[0].message)
        return
    entries = sorted((entry.name, entry.dtype, entry.shape, entry.offset) for entry in header.entries if entry.nbytes)
    wanted = sorted((stored_name(t.name, file.name), t.dtype, t.shape, t.offset) for t in file.tensors if t.nbytes)
    if [(*row[:1], row[1].name, *row[2:]) for row in entries] != [(*row[:1], row[1].name, *row[2:]) for row in wanted]:
        yield Damage("header", file.name, "", 0, file.data_start, "its tensors differ from those in the manifest")


def _tensor_damages(
    file: PlacedFile, tensor: PlacedTensor, layout: SnapshotLayout, table: BlockTable | None, scan: Scan
) -> Iterator[Damage]:
    """Report runs of damaged blocks; without a table the whole tensor."""
    digests = scan.blocks[tensor.index]
    whole = [digest for digest in digests if digest is not None]
    reason = scan.unreadable.get(file.name, "")
    if table is None:
        if len(whole) < len(digests) or root_of(whole) != tensor.root:
            message = reason or "its digest differs from the recorded one"
            yield Damage("block", file.name, tensor.name, tensor.offset, tensor.offset + tensor.nbytes, message)
        return
    block_bytes = layout.block_elements * tensor.dtype.itemsize
    wrong = [i for i, (a, b) in enumerate(zip(digests, table.tensors[tensor.index], strict=True)) if a != b]
    for _, pairs in groupby(enumerate(wrong), lambda pair: pair[1] - pair[0]):  # neighbouring blocks together
        numbers = [number for _, number in pairs]
        first, last = numbers[0], numbers[-1] + 1
        start, stop = tensor.offset + first * block_bytes, tensor.offset + min(tensor.nbytes, last * block_bytes)
        blocks = f"block {first}" if last == first + 1 else f"blocks {first} to {last - 1}"
        is_there = all(digests[i] is not None for i in range(first, last))
        what = "the bytes have changed since they were written" if is_there else "cannot be read"
        yield Damage("block", file.name, tensor.name, start, stop, f"{blocks}: {reason or what}")


# --- the other files ---


def _small_damages(store: Store, directory: Location, manifest: Manifest) -> Iterator[Damage]:
    for record in manifest.sidecars:
        damage = damage_of(store, directory, record)
        if damage is not None:
            yield replace(damage, kind="small-file")
    names = dict.fromkeys(index_name(file.name) for file in manifest.files)
    for name in filter(None, names):
        if not manifest.sidecars or store.stat(directory / name) is not None:
            reason = _index_trouble(store, directory / name, manifest, name)
            if reason:
                yield Damage("index", name, "", 0, 0, reason)


def _index_trouble(store: Store, path: Location, manifest: Manifest, name: str) -> str:
    try:
        content = json.loads(store.read_small(path, MANIFEST_BYTES))
    except MergePipeError as error:
        return error.problems[0].message
    except (ValueError, RecursionError):
        return "is not JSON"
    recorded = content.get("weight_map") if isinstance(content, dict) else None
    tensors = ((tensor.name, tensor.file) for tensor in manifest.tensors if index_name(tensor.file) == name)
    return "" if recorded == index_map(tensors) else "does not say where the manifest's tensors are"


def _strangers(store: Store, directory: Location, manifest: Manifest) -> Iterator[str]:
    """List files that the merge did not write."""
    listed = {file.name for file in manifest.files} | {record.name for record in manifest.sidecars}
    listed |= {MANIFEST_NAME, manifest.blocks.name}
    for name in sorted(files_below(store, directory), key=lambda name: PurePosixPath(name).parts):
        if name not in listed:
            yield f"{name}: is not part of the snapshot"


# --- from the inputs ---


def _replayed(
    store: Store, examination: Examination, names: tuple[str, ...], engine: EngineOptions
) -> Iterator[Damage]:
    """Recompute tensors from the inputs, and compare them with the manifest."""
    by_name = {tensor.name: (file, tensor) for file in examination.layout.files for tensor in file.tensors}
    with temporary_folder("verify") as work:
        for made in rebuild_tensors(store, examination.manifest, names, work, engine):
            file, tensor = by_name[made.digest.name]
            if made.digest.root != tensor.root:
                message = f"recomputed from the inputs, it differs: {cause_of_change(examination.manifest)}"
                start, stop = tensor.offset, tensor.offset + tensor.nbytes
                yield Damage("replay", file.name, tensor.name, start, stop, message)


_DTYPE_KEYS = ("torch_dtype", "dtype")


def config_findings(store: Store, path: Location, manifest: Manifest) -> tuple[tuple[Damage, ...], tuple[str, ...]]:
    """List damage where the configuration cannot be read, and notices where it contradicts the tensors."""
    try:
        content = parse_config(store.read_small(path, CONFIG_BYTES), path)
    except NotFoundError:
        return (), ()  # a merge of bare files has none; one that was written and is gone is found by its digest
    except MergePipeError as error:
        return (Damage("config", path.name, "", 0, 0, error.problems[0].message),), ()
    return (), tuple(f"{path.name}: {contradiction}" for contradiction in _contradictions(content, manifest.tensors))


def _contradictions(config: Mapping[str, object], tensors: Sequence[OutputTensor]) -> Iterator[str]:
    merged = {t.dtype for t in tensors if DTYPES[t.dtype].kind is DTypeKind.FLOAT}
    stated = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), None)
    names = {DTYPES[name].recipe_name for name in merged}
    if stated is not None and merged and stated not in names:
        yield f"says {shortened(str(stated))}, the tensors are {', '.join(sorted(names))}"
    yield from shape_contradictions(config, {tensor.name: tensor.shape for tensor in tensors})


# --- composites of tailor: every written file, by its digest ---


def _verify_composite(store: Store, path: Location, threads: int, on_progress: ProgressCallback | None) -> VerifyReport:
    """Read every file of a composite and compare it with the manifest."""
    started, record = time.perf_counter(), read_composite(store, path)
    files = record.files
    damages: list[Damage] = []
    progress = ByteProgress(on_progress, "verify", sum(file.size_bytes for file in files))
    with ThreadPoolExecutor(max(2, threads), "mergepipe-verify") as pool:
        for file, damage in zip(files, pool.map(lambda recorded: damage_of(store, path, recorded), files), strict=True):
            damages.extend([damage] if damage is not None else [])
            progress.add(file.size_bytes)
    return VerifyReport(
        path=path.as_reported,
        sid=record.sid,
        files=len(files),
        tensors=0,
        blocks=len(files),
        read_bytes=progress.done_bytes,
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )


def damage_of(store: Store, directory: Location, file: Digested) -> Damage | None:
    """Compare a file of a composite with its recorded size and digest; return the damage, None if both agree."""
    try:
        size, digest = file_digest(store, directory / file.name, file.size_bytes)
    except MergePipeError as error:
        return Damage("missing", file.name, "", 0, file.size_bytes, error.problems[0].message)
    if size != file.size_bytes:
        first, last = sorted((size, file.size_bytes))
        return Damage("size", file.name, "", first, last, f"has {size} bytes, {file.size_bytes} were written")
    if digest != file.blake3:
        return Damage("small-file", file.name, "", 0, file.size_bytes, "has changed since it was written")
    return None


# --- repair: make what is damaged again from the inputs, compare it with the manifest, replace the damaged files ---


_HINT = "merge again"
_COPY_BYTES = 8 << 20
_STAGED_NAME = "mended"


_Patch = tuple[str, int, int, Iterable[bytes]]
"""The name of a file, the offset at which bytes are to be written there, how many, and the bytes."""


@public_call(RunOptions)
def repair(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that; see `verify`."""
    started, made = time.perf_counter(), RunOptions.of(options, fields)
    refuse_elsewhere(snapshot)
    engine, store = engine_options(made), Stores()
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


# --- what is to be written ---


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
        yield file.name, 0, len(header), [header]


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
            yield file.name, damage.start, nbytes, parts


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


# --- writing it ---


def _apply(directory: Path, layout: SnapshotLayout, patches: Sequence[_Patch], staging: Path) -> int:
    """Make every damaged weight file anew, durably, from its sound bytes and the patches; return the patched bytes."""
    for file in layout.files:
        path = Path(os.path.normpath(directory / file.name))  # which may lie beside the folder
        of_file = [patch for patch in patches if patch[0] == file.name]
        if of_file or not path.is_file() or path.stat().st_size != file.size_bytes:
            check_free_space(directory, file.size_bytes)
            with os_errors(path, "repairing it"):
                _make_anew(path, file, of_file, staging / _STAGED_NAME)
                _move(staging / _STAGED_NAME, path)
    return sum(nbytes for _, _, nbytes, _ in patches)


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
        for _, offset, _, parts in patches:
            for part in parts:
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
        message, hint = "is a link, and nothing is written through links", "remove the link, and run again"
        raise OutputError.of("output.link", path.parent, message, hint)
    owned.make_folders(path.parent)
    owned.rename(staged, path)
    owned.sync_folder(path.parent)


def _write_small(directory: Path, contents: Mapping[str, bytes], staging: Path) -> int:
    """Replace small files, each atomically; a link is replaced itself, not its target."""
    for name, content in contents.items():
        path, staged = directory / name, staging / _STAGED_NAME
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
