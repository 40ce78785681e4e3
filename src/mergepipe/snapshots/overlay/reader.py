"""Convert a snapshot's manifest to an overlay's, open overlays, and read their blocks from overlay and base files."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.checkpoints.formats.weight_files import OVERLAY_NAME, OVERLAY_TABLE_NAME
from mergepipe.checkpoints.open_files import allow_open_files
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, DTYPES, BlockGrid, element_count
from mergepipe.core.values import dataclass
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, UnsupportedError
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.snapshots.block_digests import block_digest
from mergepipe.snapshots.layout import (
    PlacedBlock,
    SnapshotLayout,
    layout_of,
    read_small_file,
    small_digest,
)
from mergepipe.snapshots.manifest import CARD_NAME, MANIFEST_NAME, Manifest, record_of
from mergepipe.snapshots.overlay.table import (
    SIDECAR_FOLDER,
    STORED,
    BaseFile,
    BlockPlace,
    OverlayTable,
    overlay_table_of,
)
from mergepipe.snapshots.recorded_paths import absolute_reference
from mergepipe.snapshots.scan import count_not_finite
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact

FEWEST_READERS = 4
_READS_PER_READER = 4
_PREFIX = f"{SIDECAR_FOLDER}/"


# --- making an overlay ---


def base_places(
    tasks: Iterable[MergeTask], checkpoints: Iterable[Checkpoint]
) -> tuple[tuple[BaseFile, ...], dict[str, BlockPlace]]:
    """The base's files, and the offset of the base's bytes of each tensor in them.

    Tensors with another dtype than the base's, or whose base is computed, have none.
    """
    inputs = {checkpoint.root / file.name: file for checkpoint in checkpoints for file in checkpoint.files}
    starts: dict[str, tuple[Location, int]] = {}
    for task in tasks:
        base = task.base
        if not isinstance(base, TensorEntry) or base.is_delta or base.dtype != task.dtype:
            continue
        if base.file in inputs:
            starts[task.name] = (base.file, base.offset)
    paths = sorted({path for path, _ in starts.values()})
    source_of = {path: STORED + 1 + number for number, path in enumerate(paths)}
    files = tuple(
        BaseFile(str(path.absolute()), inputs[path].size_bytes, inputs[path].version, inputs[path].header_digest)
        for path in paths
    )
    return files, {name: BlockPlace(source_of[path], offset) for name, (path, offset) in starts.items()}


def as_overlay(
    manifest: Manifest, contents: Mapping[str, bytes], table: OverlayTable
) -> tuple[Manifest, dict[str, bytes]]:
    """Make the manifest and small files of an overlay.

    The small files of the whole snapshot are moved aside, so that no loader mistakes it for a model.
    """
    small = {f"{_PREFIX}{name}": content for name, content in contents.items()}
    small[OVERLAY_TABLE_NAME] = table.to_bytes()
    small[CARD_NAME] = _card(manifest, table)
    return replace(manifest, sidecars=tuple(record_of(name, small[name]) for name in sorted(small))), small


def completed(manifest: Manifest) -> Manifest:
    """Restore the manifest of the whole snapshot from an overlay's.

    Law: `completed(as_overlay(m, contents, table)[0]) == m` for a manifest whose sidecars are `contents`.
    """
    stored = (record for record in manifest.sidecars if record.name.startswith(_PREFIX))
    sidecars = (replace(record, name=record.name.removeprefix(_PREFIX)) for record in stored)
    return replace(manifest, sidecars=tuple(sidecars))


def _card(manifest: Manifest, table: OverlayTable) -> bytes:
    bases = "\n".join(f"- `{file.path}`" for file in table.files) or "- none"
    text = f"""# Not a model: an overlay

This directory holds only the blocks in which snapshot `{manifest.sid}` differs from the files below, which it needs.
Nothing can load it. The whole model is made by

    mergepipe materialise OVERLAY OUT

Blocks are taken from

{bases}
"""
    return text.encode()


def overlay_notice(table: OverlayTable) -> str:
    """The notice to show after a merge."""
    stored = sum(place.is_stored for place in table.places)
    return (
        f"an overlay: {stored} of {len(table.places)} blocks are stored, the others are taken from the base, "
        "which it needs; `mergepipe materialise` makes the whole snapshot"
    )


# --- opening an overlay ---


def is_overlay(manifest: Manifest) -> bool:
    """Whether a manifest is an overlay's."""
    return any(record.name == OVERLAY_TABLE_NAME for record in manifest.sidecars)


def refuse_overlay(path: object, manifest: Manifest, what: str) -> None:
    """Refuse an overlay where a whole snapshot is needed.

    Raises:
        UnsupportedError: `snapshot.overlay`.
    """
    if is_overlay(manifest):
        message = f"is an overlay: it cannot be {what}"
        hint = "make the whole snapshot with `mergepipe materialise`, or from its inputs with `mergepipe replay`"
        raise UnsupportedError.of("snapshot.overlay", path, message, hint)


@dataclass(frozen=True, slots=True)
class Overlay:
    """An opened overlay: the layout of its snapshot, and the location of each block."""

    path: Location
    manifest: Manifest
    layout: SnapshotLayout
    table: OverlayTable

    def on_base(self, base: Location) -> Overlay:
        """The same overlay with the base's files at their present place, the directory `base`."""
        files = tuple(
            replace(file, path=str(base.absolute() / Location.parse(file.path).name)) for file in self.table.files
        )
        return replace(self, table=replace(self.table, files=files))

    def file_of(self, place: BlockPlace) -> Location:
        """The file that holds a block."""
        return self.path / OVERLAY_NAME if place.is_stored else Location.parse(self.table.files[place.source - 1].path)


def open_overlay(store: Store, path: Location, manifest: Manifest) -> Overlay:
    """Read the table of an overlay.

    Raises:
        UnsupportedError: `overlay.newer`; `snapshot.not-overlay`.
        CorruptError: `overlay.digest`, `overlay.format`, or the manifest is damaged.
        NotFoundError, StorageError: the table cannot be read.
    """
    record = next((candidate for candidate in manifest.sidecars if candidate.name == OVERLAY_TABLE_NAME), None)
    if record is None:
        message = "is a whole snapshot: there is nothing to complete"
        raise UnsupportedError.of("snapshot.not-overlay", path, message, "use it as it is")
    where = path / record.name
    raw = read_small_file(store, where, record.size_bytes)
    if small_digest(raw) != record.blake3:
        hint = "merge again, or `mergepipe replay` it"
        raise CorruptError.of("overlay.digest", where, "its digest is not the manifest's", hint)
    layout = layout_of(manifest, path / MANIFEST_NAME)
    table = overlay_table_of(raw, where, block_sizes(manifest))
    return Overlay(path, manifest, layout, table.with_paths(lambda text: absolute_reference(text, path)))


def block_sizes(manifest: Manifest) -> list[int]:
    """Bytes of every block, in the manifest's order."""
    sizes: list[int] = []
    for tensor in manifest.tensors:
        itemsize = DTYPES[tensor.dtype].itemsize
        grid = BlockGrid(element_count(tensor.shape), DEFAULT_BLOCK_ELEMENTS)
        sizes += [span.n_elements * itemsize for span in grid.spans()]
    return sizes


# --- reading blocks ---


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block read from its location, or the reason why it could not be read."""

    block: PlacedBlock
    place: BlockPlace
    content: NDArray[np.uint8] | None
    digest: bytes | None
    n_not_finite: int
    failure: str = ""


def read_blocks(overlay: Overlay, store: Store, threads: int) -> Iterator[FoundBlock]:
    """Read and digest every block of the snapshot with several threads, in the order of its files.

    Memory: `4 max(4, 2 threads)` blocks.
    """
    readers = max(FEWEST_READERS, 2 * threads)
    allow_open_files(len(overlay.table.files) + 1)
    with contextlib.ExitStack() as stack:
        opened = _opened(overlay, store, stack)
        pool = stack.enter_context(ThreadPoolExecutor(readers, "mergepipe-overlay"))
        reads = (_reader(opened, block, place) for block, place in _places(overlay))
        yield from _in_order(pool, reads, _READS_PER_READER * readers)


def _places(overlay: Overlay) -> Iterator[tuple[PlacedBlock, BlockPlace]]:
    grids = (BlockGrid(element_count(t.shape), DEFAULT_BLOCK_ELEMENTS) for t in overlay.manifest.tensors)
    firsts = list(accumulate((grid.n_blocks for grid in grids), initial=0))
    for file in overlay.layout.files:
        for block in overlay.layout.blocks(file):
            yield block, overlay.table.places[firsts[block.tensor.index] + block.index]


def _opened(overlay: Overlay, store: Store, stack: contextlib.ExitStack) -> list[RangeFile | str]:
    """Open the files of overlay and base; for unusable ones give the reason."""
    wanted = [(overlay.path / OVERLAY_NAME, overlay.table.stored_bytes)]
    wanted += [(Location.parse(file.path), file.size_bytes) for file in overlay.table.files]
    opened: list[RangeFile | str] = []
    for path, size_bytes in wanted:
        try:
            file = store.open(path)
        except MergePipeError as error:
            opened.append("the file is gone" if isinstance(error, NotFoundError) else error.problems[0].message)
            continue
        stack.callback(file.close)
        opened.append(file if file.size_bytes == size_bytes else _other_size(file.size_bytes, size_bytes))
    return opened


def _other_size(found_bytes: int, size_bytes: int) -> str:
    return f"the file has {found_bytes} bytes, {size_bytes} are needed"


def _reader(opened: Sequence[RangeFile | str], block: PlacedBlock, place: BlockPlace) -> Callable[[], FoundBlock]:
    def read() -> FoundBlock:
        file = opened[STORED if place.is_stored else place.source]
        if isinstance(file, str):
            return FoundBlock(block, place, None, None, 0, file)
        try:
            content = read_exact(file, place.offset, place.offset + block.stop - block.start, Purpose.ANALYSIS)
        except MergePipeError as error:
            return FoundBlock(block, place, None, None, 0, error.problems[0].message)
        not_finite = count_not_finite(content, block.tensor.dtype)
        return FoundBlock(block, place, content, block_digest(content.data), not_finite)

    return read


def _in_order(
    pool: ThreadPoolExecutor, reads: Iterator[Callable[[], FoundBlock]], most_waiting: int
) -> Iterator[FoundBlock]:
    waiting: deque[Future[FoundBlock]] = deque()
    try:
        for read in reads:
            waiting.append(pool.submit(read))
            if len(waiting) == most_waiting:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:  # the consumer stopped early
            future.cancel()


def small_files(store: Store, overlay: Overlay) -> dict[str, bytes]:
    """Read the small files of the whole snapshot, by their names there, with its table of digests.

    Raises:
        CorruptError: `overlay.digest`, naming the file that differs from its digest.
        NotFoundError, StorageError: one cannot be read.
    """
    records = [record for record in overlay.manifest.sidecars if record.name.startswith(_PREFIX)]
    records.append(overlay.manifest.blocks)
    contents = {}
    for record in records:
        content = read_small_file(store, overlay.path / record.name, record.size_bytes)
        if small_digest(content) != record.blake3:
            hint = "merge again, or `mergepipe replay` it"
            where = overlay.path / record.name
            raise CorruptError.of("overlay.digest", where, "its digest is not the manifest's", hint)
        contents[record.name.removeprefix(_PREFIX)] = content
    return contents
