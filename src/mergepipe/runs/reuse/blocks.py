"""Find blocks of earlier snapshots with equal keys: a merge copies them and reads no expert for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, BlockGrid, Span, element_count
from mergepipe.engine.pipeline.segments import Reusable
from mergepipe.engine.tensor_work import can_reuse
from mergepipe.engine.work import MergeWork
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, Problem, StorageError
from mergepipe.planning.plan import Plan, ReusedSnapshot
from mergepipe.recipes.parse.references import referenced_paths
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.runs.reuse.keys import KEYS_NAME, NO_KEY, NamedKeys, RecordedFile, SourceFile
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.block_digests import BLOCKS_NAME, BlockTable, block_table_of
from mergepipe.snapshots.manifest import FileRecord, Manifest
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage.contract import FileStatus, Store, is_file
from mergepipe.storage.limits import BLOCK_TABLE_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.places import resolved

MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class ReusableTensor:
    """The reusable spans of one output tensor in an earlier snapshot, with that tensor's block digests."""

    reusable: Reusable
    digests: tuple[bytes, ...]
    snapshot: EarlierSnapshot

    @property
    def n_elements(self) -> int:
        """Number of reusable elements."""
        return sum(span.n_elements for span in self.reusable.spans)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The parts of an output that earlier snapshots hold, by tensor."""

    known: Mapping[str, ReusableTensor]

    @property
    def reusable(self) -> Mapping[str, Reusable]:
        """The reusable spans by tensor, as `MergeWork.reusable` takes them."""
        return {name: tensor.reusable for name, tensor in self.known.items()}

    @property
    def files(self) -> set[Location]:
        """The files that blocks are copied from."""
        return {tensor.reusable.entry.file for tensor in self.known.values()}

    @property
    def sids(self) -> tuple[str, ...]:
        """Ids of the snapshots that blocks are copied from."""
        return tuple(sorted({tensor.snapshot.sid for tensor in self.known.values()}))

    def without(self, lost: Collection[Location]) -> Reuse:
        """Return the reuse without blocks of the given files."""
        return Reuse({n: tensor for n, tensor in self.known.items() if tensor.reusable.entry.file not in lost})

    def check(self, written: Iterable[TensorDigest]) -> None:
        """Compare the digests of copied blocks with those that the earlier snapshot recorded.

        Raises:
            CorruptError: `reuse.damaged`, naming snapshot and tensor.
        """
        for digest in written:
            reused = self.known.get(digest.name)
            if reused is None:
                continue
            for block in _whole_blocks(reused.reusable):
                if digest.blocks[block] != reused.digests[block]:
                    entry = reused.reusable.entry
                    message = f"block {block} of '{entry.name}' is not what the manifest records: nothing was published"
                    hint = "`mergepipe repair` that snapshot, or run again with --no-reuse"
                    raise CorruptError.of("reuse.damaged", entry.file, message, hint)


def find_reuse(work: MergeWork, tasks: Sequence[MergeTask], keys: NamedKeys, snapshots: EarlierSnapshots) -> Reuse:
    """Find the blocks of `tasks` in earlier snapshots by their `keys`, under the names of files that those have.

    For each tensor one snapshot is used: the one with the most blocks, the first of equals.
    """
    wanted = {
        task.name: (t, task)
        for t, (task, blocks) in enumerate(zip(tasks, keys.own.tensors, strict=True))
        if any(key != NO_KEY for key in blocks)
    }
    matches: dict[str, ReusableTensor] = {}
    open_names = set(wanted)
    for earlier in snapshots if open_names else ():
        recorded = keys.as_recorded(earlier.inputs)
        for name in sorted(open_names):
            t, task = wanted[name]
            match = earlier.match(task, recorded.tensors[t], recorded.block_elements)
            if match is None or (name in matches and match.n_elements <= matches[name].n_elements):
                continue
            if can_reuse(replace(work, reusable={name: match.reusable}), task):
                matches[name] = match
                if match.reusable.is_whole:
                    open_names.discard(name)
        if not open_names:
            break
    return Reuse(matches)


def limit_to_plan(reuse: Reuse, plan: Plan) -> Reuse:
    """Limit reuse to exactly the blocks that the plan names.

    Raises:
        ConflictError: `plan.reuse-gone`, naming every snapshot that no longer holds those blocks.
    """
    limited: dict[str, ReusableTensor] = {}
    gone: set[int] = set()
    for tensor in plan.tensors:
        if not tensor.reused:
            continue
        grid = BlockGrid(tensor.n_elements, plan.block_elements)
        spans = tuple(Span(grid.span(a).start, grid.span(b - 1).stop) for a, b, _ in tensor.reused)
        source = tensor.reused[0][2]
        reusable = reuse.known.get(tensor.name)
        if (
            reusable is None
            or reusable.snapshot.sid != plan.reuse[source].sid
            or not _contains_spans(reusable.reusable.spans, spans)
        ):
            gone.add(source)
        else:
            limited[tensor.name] = replace(reusable, reusable=replace(reusable.reusable, spans=spans))
    if gone:
        raise ConflictError(*(_missing_snapshot_problem(plan.reuse[source]) for source in sorted(gone)))
    return Reuse(limited)


def _contains_spans(spans: Sequence[Span], wanted: Sequence[Span]) -> bool:
    return all(any(a.start <= b.start and b.stop <= a.stop for a in spans) for b in wanted)


def _missing_snapshot_problem(snapshot: ReusedSnapshot) -> Problem:
    message = f"the plan takes blocks of snapshot {snapshot.sid[:8]} there, which is gone or has changed"
    return Problem("plan.reuse-gone", snapshot.path, message, "put it back, or plan again")


def reuse_candidates(link: CatalogLink, replaced: Path | None = None) -> tuple[Path, ...]:
    """List the snapshots to search for reusable blocks: the one to be replaced, then the catalog's, newest first."""
    rows = link.use(lambda catalog: catalog.snapshots()) or ()
    return (*((replaced,) if replaced is not None else ()), *(row.path for row in rows))


class EarlierSnapshots:
    """Earlier snapshots with block keys, each read once, on first use.

    A snapshot that cannot be read is skipped. `link` tells the digests of the files that they were made from.
    """

    def __init__(self, store: Store, paths: Iterable[Path], link: CatalogLink) -> None:
        self.store = store
        self._link = link
        self._paths = list(dict.fromkeys(resolved(store, Location.local(path)) for path in paths))[:MAX_CANDIDATES]
        self._read: dict[Location, EarlierSnapshot | None] = {}

    def __iter__(self) -> Iterator[EarlierSnapshot]:
        for path in self._paths:
            if path not in self._read:
                self._read[path] = _read_snapshot(self.store, path, self._link)
            earlier = self._read[path]
            if earlier is not None:
                yield earlier


def _read_snapshot(store: Store, path: Location, link: CatalogLink) -> EarlierSnapshot | None:
    try:
        if not is_file(store, path / KEYS_NAME):
            return None
        # Before the contents: a snapshot replaced during this read is then recognised as changed.
        files = [path / entry.name for entry in store.list(path)]
        statuses = {file: status for file in files if (status := _status(store, file)) is not None}
        manifest = read_manifest_value(store, path)
        checkpoint = open_checkpoint(store, path)
        keys = _table(store, path, manifest, KEYS_NAME, 0)
        digests = _table(store, path, manifest, BLOCKS_NAME, len(manifest.files))
    except MergePipeError:
        return None
    return EarlierSnapshot(path, manifest, checkpoint, keys, digests, statuses, _recorded_files(store, manifest, link))


def _recorded_files(store: Store, manifest: Manifest, link: CatalogLink) -> tuple[RecordedFile, ...]:
    """Return the files of a snapshot's inputs whose content is known, from its manifest or from the catalog."""
    try:
        return tuple(
            recorded
            for source in manifest.inputs
            for path in referenced_paths(source.path, store)
            for file in source.files
            for root in (path, path.parent)  # of a directory, and of a bare file
            if (recorded := _recorded_file(str(resolved(store, root / file.name)), file, link)) is not None
        )
    except (MergePipeError, ValueError):  # a place that cannot be looked at, or that no path leads to
        return ()


def _recorded_file(location: str, file: FileRecord, link: CatalogLink) -> RecordedFile | None:
    sha256 = file.sha256
    if sha256 is None:
        sha256 = link.use(lambda catalog: catalog.known_sha256(location, file.version, file.size_bytes))
    if sha256 is None:
        return None
    recorded = SourceFile(location, file.size_bytes, file.version, file.header_blake3, sha256)
    return RecordedFile(recorded, recorded.place if file.sha256 is None else recorded.name)


def changed_files(files: Iterable[Location], snapshots: EarlierSnapshots) -> set[Location]:
    """Return the files that changed since the snapshots were read."""
    earlier_status = {path: status for snapshot in snapshots for path, status in snapshot.statuses.items()}
    return {file for file in files if file in earlier_status and _status(snapshots.store, file) != earlier_status[file]}


def _status(store: Store, path: Location) -> FileStatus | None:
    try:
        return store.stat(path)
    except StorageError:
        return None


def _table(store: Store, directory: Location, manifest: Manifest, name: str, n_files: int) -> BlockTable:
    """Read a block table and check it against the manifest."""
    path = directory / name
    raw = store.read_small(path, BLOCK_TABLE_BYTES)
    records = (*manifest.sidecars, manifest.blocks)
    if not any(record.name == name and record.blake3 == blake3(raw).hexdigest(16) for record in records):
        raise CorruptError.of("reuse.table", path, "is not what the manifest records", "`mergepipe repair` it")
    return block_table_of(raw, path, n_files, [element_count(tensor.shape) for tensor in manifest.tensors])


@dataclass(frozen=True)
class EarlierSnapshot:
    """An earlier snapshot with its block keys and block digests, and the inputs that are known by content."""

    path: Location
    manifest: Manifest
    checkpoint: Checkpoint
    keys: BlockTable
    digests: BlockTable
    statuses: Mapping[Location, FileStatus]
    inputs: tuple[RecordedFile, ...]

    @property
    def sid(self) -> str:
        """The snapshot's id."""
        return self.manifest.sid

    @cached_property
    def place_of(self) -> Mapping[bytes, tuple[int, ...]]:
        """Maps a block key to the tensors that have it; the key includes the block's index."""
        places: dict[bytes, tuple[int, ...]] = {}
        for t, keys in enumerate(self.keys.tensors):
            for key in keys:
                if key != NO_KEY:
                    places[key] = (*places.get(key, ()), t)
        return places

    def match(self, task: MergeTask, wanted: Sequence[bytes], block_elements: int) -> ReusableTensor | None:
        """Find the tensor here that holds most of a task's blocks, and its reusable spans."""
        if block_elements != self.keys.block_elements:
            return None
        counts = Counter(t for key in wanted for t in self.place_of.get(key, ()))
        if not counts:
            return None
        t = min(counts, key=lambda snapshot_tensor: (-counts[snapshot_tensor], snapshot_tensor))
        entry = self.checkpoint.tensors.get(self.manifest.tensors[t].name)
        if not isinstance(entry, TensorEntry) or (entry.dtype, entry.shape) != (task.dtype, task.shape):
            return None
        is_here = [t in self.place_of.get(key, ()) for key in wanted]
        spans = tuple(_spans(is_here, entry.n_elements, block_elements))
        return ReusableTensor(Reusable(entry, spans), self.digests.tensors[t], self) if spans else None


def _spans(is_here: Sequence[bool], n_elements: int, block_elements: int) -> Iterator[Span]:
    """Yield runs of present blocks on the coarser grid of keys and digests, so that copies can be checked."""
    grid = BlockGrid(n_elements, math.lcm(block_elements, DEFAULT_BLOCK_ELEMENTS))
    whole = [all(is_here[span.start // block_elements : -(-span.stop // block_elements)]) for span in grid.spans()]
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(whole), 1) if a != b), len(whole)]
    for first, last in pairwise(edges):
        if first < last and whole[first]:
            yield Span(grid.span(first).start, grid.span(last - 1).stop)


def _whole_blocks(reusable: Reusable) -> Iterator[int]:
    """Yield the copied blocks on the digests' grid, to which spans are aligned."""
    for span in reusable.spans:
        yield from range(span.start // DEFAULT_BLOCK_ELEMENTS, -(-span.stop // DEFAULT_BLOCK_ELEMENTS))
