"""Look after snapshots: list them, show one, find it by its path or sid, trace lineage; the catalog, and garbage.

A missing catalog counts as empty and is not made.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Final

from mergepipe.catalog.catalog import Catalog, rebuild
from mergepipe.catalog.snapshots import (
    CatalogStats,
    LineageNode,
    RebuildReport,
    SnapshotRow,
    containing,
    is_named,
    read_manifest,
    row_of,
    sid_of_unchanged_input,
    trace_model,
)
from mergepipe.checkpoints.directory import is_packed
from mergepipe.core.flags import several
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.options import home_of
from mergepipe.recipes.model_location import missing_path, no_path_and_no_hub_model, path_exists, resolve_model_name
from mergepipe.recipes.references import referenced_paths
from mergepipe.reports import BlockUse, Garbage, GcReport, SnapshotReport, TensorUse
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    NOTICES_KEY,
    Input,
    Manifest,
    parse_manifest,
    record_folder,
    with_absolute_paths,
)
from mergepipe.snapshots.object_upload import UPLOADS_NAME
from mergepipe.snapshots.parts_places import FolderParts, read_job
from mergepipe.snapshots.staging import allocated_bytes, find_staging, is_dead, remove_dead
from mergepipe.snapshots.work_log import merge_state, read_work_log
from mergepipe.storage import owned
from mergepipe.storage.contract import BESIDE, MANIFEST_BYTES, Store, modified_at
from mergepipe.storage.location import Location
from mergepipe.storage.owners import is_alive, newest_change
from mergepipe.storage.stores import Stores

ABANDONED_SECONDS: Final = 7 * 24 * 3600.0
"""Parts of an output that nobody has written to for so long are garbage: jobs may wait in a queue for days."""
BIRTH_SECONDS: Final = 60.0


def list_snapshots(
    *,
    contained: str | Path | None = None,
    operator: str | None = None,
    since: date | None = None,
    touched: str | None = None,
    home: str | Path | None = None,
) -> tuple[SnapshotReport, ...]:
    """List the snapshots that the catalog knows, newest first.

    Args:
        contained: only those that this model is in, directly or through snapshots that they were made from: its path,
            that of a file in it, its name, its address on the Hub (`hf://org/name`, with or without a commit), or seven
            or more first digits of a commit, a content digest or a sid.
        operator: only those that this operator made.
        since: only those that were made on this day (UTC) or later.
        touched: a shell pattern of tensors (`model.layers.0.*`): only those in which experts, or `contained`, have
            contributed to such a tensor, by the touch maps of their manifests, with the blocks. Snapshots that are gone
            are left out.
    """
    rows = Catalog(home_of(home)).snapshots()
    touches = None if touched is None else _Touches(rows, touched, None if contained is None else str(contained))
    since = since.date() if isinstance(since, datetime) else since
    if contained is not None:
        rows = containing(rows, str(contained), content_id_at(contained))
    rows = tuple(
        row for row in rows if operator in (None, row.operator) and (since is None or row.created.date() >= since)
    )
    if touches is None:
        return tuple(_report(row, is_recorded=True) for row in rows)
    held = ((row, touches.of(row)) for row in rows)
    return tuple(replace(_report(row, is_recorded=True), touched=uses) for row, uses in held if uses)


class _Touches:
    """What snapshots hold of experts in some tensors: of all, or of the model that `reference` names.

    A snapshot holds in a tensor what an expert contributes to it, if that is the model, or a snapshot that holds it
    there; and all that its base, if that is a snapshot, holds there. Manifests are read once.
    """

    def __init__(self, rows: Sequence[SnapshotRow], pattern: str, reference: str | None) -> None:
        self._rows = {row.sid: row for row in reversed(rows)}
        self._pattern = pattern
        self._reference = reference
        self._content_id = None if reference is None else content_id_at(reference)
        self._uses: dict[Path, tuple[TensorUse, ...]] = {}

    def of(self, row: SnapshotRow) -> tuple[TensorUse, ...]:
        """Return what a snapshot holds; nothing of one that is not there."""
        if row.path not in self._uses:
            self._uses[row.path] = ()  # a snapshot that was replaced by one made from it ends there
            self._uses[row.path] = self._found(row)
        return self._uses[row.path]

    def _of_input(self, source: Input) -> tuple[TensorUse, ...]:
        """Return what an input holds that is a snapshot; nothing of any other."""
        row = self._rows.get(source.sid or "")
        return () if row is None else self.of(row)

    def _found(self, row: SnapshotRow) -> tuple[TensorUse, ...]:
        from mergepipe.runs.touch_map import touched_tensors

        if not _has_manifest(row.path):
            return ()
        manifest = read_manifest_value(Stores(), Location.local(row.path))
        if manifest.sid != row.sid:
            return ()
        experts = [source for source in row.inputs if source.is_expert]

        def counts(expert: int, tensor: str) -> bool:
            source = experts[expert]
            if self._reference is None or is_named(source, self._reference, self._content_id):
                return True
            return tensor in {use.name for use in self._of_input(source)}

        uses = list(touched_tensors(manifest, self._pattern, counts))
        if self._reference is not None:
            for base in (source for source in row.inputs if not source.is_expert):
                uses += [_of_base(base, use) for use in self._of_input(base)]
        return tuple(uses)


def _of_base(base: Input, use: TensorUse) -> TensorUse:
    """Return what a snapshot has of a tensor from its base, by the blocks that the base says."""
    return replace(use, uses=(BlockUse(base.model, "base", use.touched, "of the base, a snapshot itself"),))


def show(snapshot: str | Path, *, home: str | Path | None = None) -> SnapshotReport:
    """Look a snapshot up: a directory, in a bucket or repository, a sid or four first digits of it; in full if there.

    Raises:
        NotFoundError, RecipeError: no snapshot is known by that name, or several are.
    """
    report = _found(snapshot, home)
    if not report.is_present:
        return report
    manifest = read_manifest_value(Stores(), Location.of(report.path))
    return replace(
        report,
        version=manifest.version,
        seed=manifest.seed,
        dtypes=tuple(sorted({tensor.dtype for tensor in manifest.tensors})),
        notices=tuple(text for text in str(manifest.run.get(NOTICES_KEY, "")).split("\n") if text),
        recipe=manifest.recipe,
    )


def _found(snapshot: str | Path, home: str | Path | None) -> SnapshotReport:
    """Find what `show` looks up, without the contents of its manifest."""
    place = find_elsewhere(snapshot)
    if place is not None:
        return _report_elsewhere(Stores(), place)
    try:
        return _report(Catalog(home_of(home)).snapshot(str(snapshot)), is_recorded=True)
    except NotFoundError:
        path = record_folder(Path(snapshot))
        if not _has_manifest(path):
            path = find_snapshot_path(snapshot, home_of(home))
        created, store = modified_at(path / MANIFEST_NAME), Stores()
        manifest, digest = read_manifest(store, path)
        sids = [sid_of_unchanged_input(store, source) for source in manifest.inputs]
        return _report(row_of(manifest, digest, path.absolute(), created, sids), is_recorded=False)


def lineage(snapshot: str | Path, *, down: bool = False, home: str | Path | None = None) -> tuple[LineageNode, ...]:
    """Trace all that went into a snapshot through all generations: a tree in preorder. Raises as `show` does.

    A copy in another folder, in a bucket or on the Hub is known by its sid.

    Args:
        down: trace what was made from the snapshot instead, or from a model, named as `list_snapshots` takes it. The
            bytes of a node are those that it read of its parent.
    """
    catalog = Catalog(home_of(home))
    with contextlib.suppress(NotFoundError):
        return catalog.lineage(str(snapshot), down=down)
    if down:
        made = trace_model(catalog.snapshots(), str(snapshot), content_id_at(snapshot))
        if made:
            return made
    place = find_elsewhere(snapshot)
    hint = "`mergepipe show` lists its inputs"
    if place is None:
        path = record_folder(Path(snapshot))
        if not _has_manifest(path):
            path = find_snapshot_path(snapshot, home_of(home))
        place = Location.local(path)
        hint = f"run `mergepipe catalog rebuild {snapshot}`"
    sid = read_manifest_value(Stores(), place).sid
    try:
        return catalog.lineage(sid, down=down)
    except NotFoundError:
        message = "a snapshot that is not in the catalog"
        raise NotFoundError.of("snapshot.not-found", snapshot, message, hint) from None


def content_id_at(reference: str | Path) -> str | None:
    """Return the content id of a model on this machine, which its copies share; None where there is none to read."""
    from mergepipe.checkpoints.content_id import content_id
    from mergepipe.checkpoints.directory import open_checkpoint
    from mergepipe.checkpoints.open_files import open_files

    store = Stores()
    with contextlib.suppress(MergePipeError):
        place = Location.of(reference)
        if place.is_local and store.stat(place) is not None:
            checkpoint = open_checkpoint(store, place)
            with open_files(store, {file.location for file in checkpoint.files}, (checkpoint,)) as files:
                return content_id(checkpoint, files)
    return None


def catalog_stats(*, home: str | Path | None = None) -> CatalogStats:
    """Count what the catalog holds.

    Raises:
        NotFoundError: there is none.
    """
    folder = home_of(home)
    if not folder.exists():
        hint = "`mergepipe analyze` or a merge makes one; --home names another place"
        raise NotFoundError.of("catalog.not-found", folder, "there is no catalog", hint)
    return Catalog(folder).stats()


def rebuild_catalog(roots: Sequence[str | Path] = (), *, home: str | Path | None = None) -> RebuildReport:
    """Make the catalog again from the manifests under `roots` and at known paths.

    Raises:
        NotFoundError: a root does not exist.
    """
    return rebuild(home_of(home), [Path(root) for root in several(roots)])


def find_snapshot_path(reference: str | Path, home: Path) -> Path:
    """Find the directory of a snapshot by its directory, its manifest, its sid or a prefix of the sid."""
    path = Path(reference)
    if path.name == MANIFEST_NAME and path.is_file():
        return path.parent
    record = record_folder(path)
    if path.is_file() and _has_manifest(record):
        manifest = read_manifest_value(Stores(), Location.local(record))
        if BESIDE + path.name not in {file.name for file in (*manifest.files, *manifest.sidecars)}:
            hint = "rename it back to the name that it was made under, or merge again"
            raise NotFoundError.of("snapshot.not-found", path, f"{record.name} is the record of another file", hint)
        return record
    if _has_manifest(path):
        return path
    if path.exists():
        message = f"holds no {MANIFEST_NAME}: not a snapshot"
        if path.is_file():
            message = "is a file without the record of a snapshot"
        raise NotFoundError.of("snapshot.not-found", path, message, "give a snapshot, or its sid")
    try:
        return Catalog(home).snapshot(str(reference)).path
    except NotFoundError:
        if "/" not in str(reference):
            raise
    problem = missing_path(Stores(), str(reference), Location.local(path)).problems[0]
    raise NotFoundError.of("snapshot.not-found", "", problem.message, problem.hint)


def find_snapshot(reference: str | Path, home: str | Path | None) -> Location:
    """Find a snapshot as `find_snapshot_path` does, or in a bucket or repository by its address or `org/name`."""
    return find_elsewhere(reference) or Location.local(find_snapshot_path(reference, home_of(home)))


def find_elsewhere(reference: str | Path) -> Location | None:
    """Return the location of a snapshot named by an address or an id of the Hub; None for any other name."""
    store = Stores()
    name = resolve_model_name(str(reference), lambda path: path_exists(store, Location.of(path)))
    if name.remote is None:
        return None
    try:
        return store.pin(name.remote)
    except NotFoundError as error:
        if name.is_hub_id:
            raise no_path_and_no_hub_model(str(reference), error) from error
        raise


def refuse_elsewhere(reference: str | Path) -> None:
    """Refuse a snapshot that is not on this machine by its name alone, without a request.

    Raises:
        RecipeError: `location.invalid`.
    """
    store = Stores()
    name = resolve_model_name(str(reference), lambda path: path_exists(store, Location.of(path)))
    if name.remote is not None:
        _ = name.remote.local_path


def find_published(reference: str | Path, home: str | Path | None, store: Store) -> tuple[Location, bool]:
    """Find a packed expert by its place, or a snapshot, which may be packed itself; and whether it is packed."""
    place = find_elsewhere(reference) or Location.of(reference)
    if is_packed(store, place):
        return place, True
    if not place.is_local:
        return place, False
    place = find_snapshot(reference, home)
    return place, is_packed(store, place)


def read_manifest_value(store: Store, directory: Location) -> Manifest:
    """Read the whole manifest of a snapshot, with absolute paths."""
    path = directory / MANIFEST_NAME
    return with_absolute_paths(parse_manifest(store.read_small(path, MANIFEST_BYTES), path), directory)


def is_snapshot_of(place: Path | Location, plan_digest: str) -> bool:
    """Whether a snapshot by this plan is published at a place."""
    try:
        return read_manifest_value(Stores(), Location.of(place)).plan_digest == plan_digest
    except NotFoundError:
        return False


def with_inputs_found(manifest: Manifest, store: Store, home: Path | None) -> Manifest:
    """Return the manifest with inputs at the paths that the catalog knows, where its own lead nowhere.

    A manifest names inputs relative to its snapshot, so they are lost where the snapshot alone is moved. The catalog
    recorded where they were when it was made.
    """
    if home is None or all(_is_there(record.path, store) for record in manifest.inputs):
        return manifest
    for row in Catalog(home).snapshots():
        names = [source.model for source in row.inputs]
        if row.sid == manifest.sid and names == [record.model for record in manifest.inputs]:
            moved = (
                replace(record, path=source.path)
                if _is_there(source.path, store) and not _is_there(record.path, store)
                else record
                for record, source in zip(manifest.inputs, row.inputs, strict=True)
            )
            manifest = replace(manifest, inputs=tuple(moved))
    return manifest


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def _report(row: SnapshotRow, *, is_recorded: bool) -> SnapshotReport:
    return SnapshotReport(
        sid=row.sid,
        path=row.path,
        summary=row.summary,
        operator=row.operator,
        created=row.created,
        plan_digest=row.plan_digest,
        base_bytes=row.realized.base,
        expert_bytes=row.realized.expert,
        analysis_bytes=row.realized.analysis,
        output_bytes=row.realized.output,
        inputs=row.inputs,
        is_present=_has_manifest(row.path),
        is_recorded=is_recorded,
    )


def _report_elsewhere(store: Store, place: Location) -> SnapshotReport:
    """Describe a snapshot in a bucket or repository by its manifest; no catalog knows it."""
    manifest = read_manifest_value(store, place)
    return SnapshotReport(
        sid=manifest.sid,
        path=place,
        operator=manifest.operator,
        created=None,
        plan_digest=manifest.plan_digest,
        base_bytes=manifest.realized.base,
        expert_bytes=manifest.realized.expert,
        analysis_bytes=manifest.realized.analysis,
        output_bytes=manifest.realized.output,
        inputs=manifest.inputs,
        is_present=True,
        is_recorded=False,
    )


def _is_there(reference: str, store: Store) -> bool:
    try:
        return all(store.stat(path) is not None for path in referenced_paths(reference, store))
    except MergePipeError:  # what is wrong with it is said where it is opened
        return False


# --- garbage: staging of dead runs, parts of finished outputs, and catalog rows of deleted snapshots ---


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, next to known snapshots and under `roots`, and catalog rows of what is gone."""
    folder, places = home_of(home), [Location.of(root).local_path for root in several(roots)]
    for root in places:
        if not root.is_dir():
            raise NotFoundError.of("storage.not-found", root, "no such directory", "check the path")
    catalog, uploads = Catalog(folder), folder / UPLOADS_NAME
    folders = _folders(catalog.snapshots(), [*places, *([uploads] if uploads.is_dir() else [])])
    living: list[str] = []
    garbage = [*_staging(folders, living, dry_run=dry_run), *_parts(folders, dry_run=dry_run)]
    garbage += _snapshot_rows(catalog, dry_run=dry_run)
    return GcReport(garbage=tuple(garbage), living=tuple(living), is_dry_run=dry_run)


def _folders(snapshots: Iterable[SnapshotRow], roots: Iterable[Path]) -> list[Path]:
    """List folders that may hold staging: the system's for temporary files, the parents of known snapshots, the roots
    with all below them.
    """
    parents = (Path(tempfile.gettempdir()), *(snapshot.path.parent for snapshot in snapshots))
    folders = {parent for parent in parents if parent.is_dir()}
    for root in roots:
        for folder, children, _ in os.walk(root):
            children[:] = [name for name in children if not name.startswith(".")]
            folders.add(Path(folder))
    return sorted(folders)


def _staging(folders: Iterable[Path], living: list[str], *, dry_run: bool) -> Iterator[Garbage]:
    for folder in folders:
        for directory, owner in find_staging(folder):
            if owner is not None:
                living.append(f"{directory}: {owner}")
                continue
            if _is_just_made(directory):
                continue
            nbytes = allocated_bytes(directory)
            logged = read_work_log(directory)
            state = None if logged is None else merge_state(logged)
            durable = 0 if state is None else len(state.digests)
            reason = f"left by a dead run, {durable} tensors could be resumed" if durable else "left by a dead run"
            is_removed = not dry_run and remove_dead(directory)
            if not is_removed and not is_dead(directory):
                continue  # another process removed it, or works there by now
            yield Garbage("staging", str(directory), reason, nbytes, is_removed)


def _is_just_made(directory: Path) -> bool:
    """Whether a staging directory is empty and new, as it is for a moment before its maker locks and records it."""
    with contextlib.suppress(OSError):
        return not any(directory.glob("*")) and time.time() - directory.stat().st_mtime < BIRTH_SECONDS
    return True  # it is gone


def _parts(folders: Iterable[Path], *, dry_run: bool) -> Iterator[Garbage]:
    """Find parts directories whose output is published, or that are abandoned; others wait for their workers."""
    for folder in folders:
        for path in sorted(folder.glob(f".*{owned.PARTS_MARK}*")):
            if not owned.is_parts_name(path.name) or path.is_symlink():
                continue
            silent_seconds = time.time() - max(newest_change(path), path.stat().st_mtime)
            is_finished = _is_finished(path, silent_seconds)
            if not is_finished and (silent_seconds < ABANDONED_SECONDS or _has_worker(path)):
                continue
            nbytes = allocated_bytes(path)
            if not dry_run:
                owned.remove_tree(path, ignore_errors=True)
            reason = "its output is published" if is_finished else "no process has worked on it for a week"
            yield Garbage("parts", str(path), reason, nbytes, not dry_run)


def _has_worker(directory: Path) -> bool:
    """Whether a process of this machine reads for a part, whatever the clock says, which may have jumped."""
    try:
        job = read_job(directory)
        claims = () if job is None else FolderParts(directory.parent / job.out, job).account().claims
    except MergePipeError:
        return False
    return any(claim.is_open and is_alive(claim.owner, ABANDONED_SECONDS) for claim in claims)


def _is_finished(directory: Path, silent_seconds: float) -> bool:
    """Whether its output is published, or its job is gone, which a worker removes first and makes first."""
    try:
        job = read_job(directory)
        if job is None:
            return silent_seconds > BIRTH_SECONDS
        return is_snapshot_of(directory.parent / job.out, job.plan_digest)
    except MergePipeError:  # damaged: not ours to judge
        return False


def _snapshot_rows(catalog: Catalog, *, dry_run: bool) -> Iterator[Garbage]:
    """Find rows of deleted snapshots that no other snapshot was made from.

    A snapshot on a disk that is not mounted does not count as deleted: a row goes only if the folder that held it is
    there and it is not. None goes while a record cannot be read, whose snapshot may have been made from any.
    """
    rows, problems = catalog.read_snapshots()
    if problems:
        return
    needed = {source.sid for row in rows for source in row.inputs if source.sid is not None}
    for row in rows:
        if row.sid in needed or (row.path / MANIFEST_NAME).exists() or not row.path.parent.is_dir():
            continue
        if not dry_run:
            catalog.forget(row)
        yield Garbage("snapshot-row", f"{row.sid} {row.path}", "the snapshot no longer exists", 0, not dry_run)
