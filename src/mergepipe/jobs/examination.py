"""Compare a snapshot with its manifest: every block, header, digest and small file. Differences are damage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePosixPath

from mergepipe.checkpoints.config_files import parse_config
from mergepipe.checkpoints.directory import stored_name
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, DTypeKind
from mergepipe.core.display import shortened
from mergepipe.core.strict_json import parse_object
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.jobs.snapshots import read_manifest_value
from mergepipe.recipes.output_config import shape_contradictions
from mergepipe.reports import ByteProgress, Damage, ProgressCallback
from mergepipe.snapshots.layout import (
    PlacedFile,
    PlacedTensor,
    Scan,
    SnapshotLayout,
    file_digest,
    layout_of,
    read_table,
    scan_snapshot,
)
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, OutputTensor
from mergepipe.snapshots.shards import BlockTable, index_map, index_name, root_of
from mergepipe.storage.contract import CONFIG_BYTES, MANIFEST_BYTES, Digested, Store, files_below
from mergepipe.storage.location import Location


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
    entries = {(entry.name, entry.dtype, entry.shape, entry.offset) for entry in header.entries if entry.nbytes}
    wanted = {(stored_name(t.name, file.name), t.dtype, t.shape, t.offset) for t in file.tensors if t.nbytes}
    if entries != wanted:
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
        first = numbers[0]
        last = numbers[-1]
        start = tensor.offset + first * block_bytes
        stop = tensor.offset + min(tensor.nbytes, (last + 1) * block_bytes)
        blocks = f"block {first}" if last == first else f"blocks {first} to {last}"
        is_there = all(digests[number] is not None for number in numbers)
        what = "the bytes have changed since they were written" if is_there else "cannot be read"
        yield Damage("block", file.name, tensor.name, start, stop, f"{blocks}: {reason or what}")


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
        content = parse_object(store.read_small(path, MANIFEST_BYTES), where=path, code="checkpoint.damaged")
    except MergePipeError as error:
        return error.problems[0].message
    tensors = ((tensor.name, tensor.file) for tensor in manifest.tensors if index_name(tensor.file) == name)
    return "" if content.get("weight_map") == index_map(tensors) else "does not say where the manifest's tensors are"


def _strangers(store: Store, directory: Location, manifest: Manifest) -> Iterator[str]:
    """List files that the merge did not write."""
    listed = {file.name for file in manifest.files} | {record.name for record in manifest.sidecars}
    listed |= {MANIFEST_NAME, manifest.blocks.name}
    for name in sorted(files_below(store, directory), key=lambda name: PurePosixPath(name).parts):
        if name not in listed:
            yield f"{name}: is not part of the snapshot"


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


def damage_of(store: Store, directory: Location, file: Digested) -> Damage | None:
    """Compare a file with its recorded size and digest; return the damage, None if both agree."""
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
