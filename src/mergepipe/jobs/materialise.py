"""Materialise an overlay: write the full snapshot, check every block, publish it atomically."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from mergepipe.checkpoints.formats.weight_files import OVERLAY_NAME
from mergepipe.core.blocks import DTYPES
from mergepipe.core.values import dataclass
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, OutputError
from mergepipe.reports import Damage, MaterialiseReport, Progress, ProgressCallback
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.block_digests import BlockTable, block_digest, root_of
from mergepipe.snapshots.layout import SnapshotLayout, read_table
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.overlay.reader import FoundBlock, Overlay, completed, open_overlay, read_blocks, small_files
from mergepipe.snapshots.recorded_paths import relative_reference, with_changed_paths
from mergepipe.snapshots.scan import Scan
from mergepipe.snapshots.shards import ShardLayout, ShardWriter, TensorSpec, header_of
from mergepipe.snapshots.staging import Staging, check_free_space, check_target
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, write_durably
from mergepipe.storage.stores import Stores

_MARGIN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MaterialiseSettings:
    """Settings of a materialisation. `home` is the catalog's directory; None runs without a catalog.

    `base` is the directory in which the base's files are by now, None where they have stayed.
    """

    threads: int
    force: bool
    home: Path | None
    base: Location | None = None


def materialise_overlay(
    path: Path, out: Path, settings: MaterialiseSettings, *, started: float, on_progress: ProgressCallback | None
) -> MaterialiseReport:
    """Write the full snapshot of the overlay at `path` to `out`, replacing the overlay if they are the same.

    Raises:
        ConflictError: `overlay.base-changed`: a file of the base is gone or holds other bytes.
        CorruptError: `overlay.damaged`, `overlay.digest`, `overlay.header`: the overlay is not what was written.
        OutputError: `overlay.in-place`, or as `check_target`.
        UnsupportedError: `snapshot.not-overlay`.
    """
    store = Stores()
    overlay = open_overlay(store, Location.local(path), read_manifest_value(store, Location.local(path)))
    overlay = overlay if settings.base is None else overlay.on_base(settings.base)
    is_in_place = out.resolve() == path.resolve()
    if is_in_place and not settings.force:
        hint = "name another directory, or add --force"
        raise OutputError.of("overlay.in-place", out, "the whole snapshot would replace the overlay", hint)
    sources = {Location.parse(file.path).parent for file in overlay.table.files}
    check_target(out, () if is_in_place else (overlay.path, *sorted(sources)), force=settings.force)
    small, digests = small_files(store, overlay), _digests(store, overlay)
    manifest = completed(overlay.manifest)
    recorded = with_changed_paths(manifest, lambda path: relative_reference(path, out))
    n_bytes = sum(file.size_bytes for file in manifest.files)
    check_free_space(out, n_bytes + sum(map(len, small.values())) + _MARGIN_BYTES)
    with closing(CatalogLink(settings.home)) as link:
        with Staging(out, force=settings.force) as staging:
            _write_weights(staging.path, overlay, digests, store, settings.threads, on_progress)
            for name, content in {**small, MANIFEST_NAME: recorded.to_json()}.items():
                target = staging.path / name
                make_folders(target.parent)
                write_durably(target, content, store.ledger)
            staging.publish()
        link.use(lambda catalog: catalog.adopt_snapshot(out.absolute(), created=datetime.now(UTC)))
        notices = tuple(link.notices)
    stored = overlay.table.stored_bytes
    tensor_bytes = sum(tensor.nbytes for tensor in overlay.layout.tensors)
    seconds = time.perf_counter() - started
    return MaterialiseReport(path, out, manifest.sid, stored, tensor_bytes - stored, n_bytes, seconds, notices)


def _digests(store: Store, overlay: Overlay) -> BlockTable:
    """Return the digests of all blocks, and the shard headers.

    Raises:
        CorruptError: `overlay.header`, a header cannot be made again; `blocks.*`.
    """
    table = read_table(store, overlay.path, overlay.manifest)
    for shard, wanted in zip(shards_of(overlay.manifest), table.headers, strict=True):
        if block_digest(shard.header) != wanted:
            message = f"the header of {shard.name} was written by another version, and cannot be made again"
            raise CorruptError.of("overlay.header", overlay.path, message, "`mergepipe replay` it with that version")
    return table


def shards_of(manifest: Manifest) -> tuple[ShardLayout, ...]:
    """Lay out the weight files of a manifest, with the headers that this version writes."""
    shards = []
    for file in manifest.files:
        specs = tuple(TensorSpec(t.name, DTYPES[t.dtype], t.shape) for t in manifest.tensors if t.file == file.name)
        shards.append(ShardLayout(file.name, specs, header_of(specs, {})))
    return tuple(shards)


def _write_weights(
    directory: Path,
    overlay: Overlay,
    digests: BlockTable,
    store: Store,
    threads: int,
    on_progress: ProgressCallback | None,
) -> None:
    """Write every weight file; raise for the first block that does not match the overlay's manifest."""
    total = sum(tensor.nbytes for tensor in overlay.layout.tensors)
    done = 0
    with ShardWriter(directory, shards_of(overlay.manifest), store.ledger) as writer:
        for block in read_blocks(overlay, store, threads):
            if block.content is None or block.digest != digests.tensors[block.block.tensor.index][block.block.index]:
                raise _wrong_block(overlay, block)
            writer.append(block.content)
            done += len(block.content)
            if on_progress is not None:
                on_progress(Progress("materialise", done, total))
        writer.finish()


def _wrong_block(overlay: Overlay, read_block: FoundBlock) -> MergePipeError:
    where, block = overlay.file_of(read_block.place), read_block.block
    reason = read_block.failure or f"the bytes from {read_block.place.offset} on are not what the overlay was made with"
    message = f"block {block.index} of '{block.tensor.name}': {reason}"
    if read_block.place.is_stored:
        return CorruptError.of("overlay.damaged", where, message, "merge again, or `mergepipe replay` the overlay")
    return ConflictError.of("overlay.base-changed", where, message, "put the base back as it was, or name it: --base")


# --- looking at one without writing ---


def scan_overlay(
    store: Store,
    overlay: Overlay,
    layout: SnapshotLayout,
    table: BlockTable | None,
    threads: int,
    on_bytes: Callable[[int], None],
) -> tuple[Scan, tuple[Damage, ...]]:
    """Read every block of an overlay and report those that do not match `table`, by tensor and file.

    Without a table tensors are compared as a whole.
    """
    headers: list[bytes | None] = [block_digest(shard.header) for shard in shards_of(overlay.manifest)]
    scan = Scan([[None] * -(-t.n_elements // layout.block_elements) for t in layout.tensors], headers)
    wrong: dict[tuple[str, Location], list[FoundBlock]] = {}
    for read_block in read_blocks(overlay, store, threads):
        tensor, index = read_block.block.tensor, read_block.block.index
        scan.blocks[tensor.index][index] = read_block.digest
        if read_block.n_not_finite:
            scan.not_finite[tensor.name] = scan.not_finite.get(tensor.name, 0) + read_block.n_not_finite
        n_bytes = read_block.block.stop - read_block.block.start
        if read_block.content is not None:
            scan.n_bytes += n_bytes
        on_bytes(n_bytes)
        if read_block.digest is None or (table is not None and read_block.digest != table.tensors[tensor.index][index]):
            bare = replace(read_block, content=None)
            wrong.setdefault((tensor.name, overlay.file_of(read_block.place)), []).append(bare)
    roots = () if table is not None else _wrong_roots(layout, scan)
    return scan, (*_header_damages(overlay, table, scan), *_damages(overlay, wrong), *roots)


def _header_damages(overlay: Overlay, table: BlockTable | None, scan: Scan) -> Iterator[Damage]:
    for file, header, wanted in zip(overlay.layout.files, scan.headers, table.headers if table else (), strict=False):
        if header != wanted:
            message = "its header was written by another version, and cannot be made again"
            yield Damage("header", file.name, "", 0, file.data_start, message)


def _wrong_roots(layout: SnapshotLayout, scan: Scan) -> Iterator[Damage]:
    for tensor in layout.tensors:
        whole = [digest for digest in scan.blocks[tensor.index] if digest is not None]
        if root_of(whole) != tensor.root:
            yield Damage("block", OVERLAY_NAME, tensor.name, 0, 0, "its digest is not what was written")


def _damages(overlay: Overlay, wrong: dict[tuple[str, Location], list[FoundBlock]]) -> Iterator[Damage]:
    for (tensor, where), blocks in wrong.items():
        first, last = blocks[0], blocks[-1]
        reason = next((read.failure for read in blocks if read.failure), "not what the overlay was made with")
        is_own = first.place.is_stored
        what = f"{len(blocks)} of the blocks that {'it holds' if is_own else 'are taken from it'}: {reason}"
        name = where.relative_to(overlay.path).as_posix() if is_own else str(where)
        stop = last.place.offset + last.block.stop - last.block.start
        yield Damage("block", name, tensor, first.place.offset, stop, what)
