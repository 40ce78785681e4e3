"""The catalog: an index of snapshots, of what they were made from, and of the digests of files, in the home folder.

Each snapshot has a record in `snapshots/`, and each file of a model whose SHA-256 was taken one in `digests/`, named by
where it lies. A record is replaced in one step, so that any number of processes and threads may write at once. Damage
loses one record: it is passed over with a warning until a rebuild. Manifests and `analyze` make all of it again.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from blake3 import blake3

from mergepipe.catalog.snapshots import (
    CatalogStats,
    LineageNode,
    RebuildReport,
    SnapshotRow,
    find_manifests,
    read_manifest,
    row_of,
    sid_of_unchanged_input,
    trace,
)
from mergepipe.catalog.statistics_file import statistics_folder
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile
from mergepipe.core.records import RecordFormat
from mergepipe.errors import (
    CorruptError,
    MergePipeError,
    NotFoundError,
    Problem,
    RecipeError,
    StorageError,
    UnsupportedError,
    did_you_mean,
)
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest, record_folder
from mergepipe.storage import owned
from mergepipe.storage.contract import CATALOG_RECORD_BYTES, FileId, Store, modified_at, resolved
from mergepipe.storage.ranges import read_small
from mergepipe.storage.stores import Stores

MIN_PREFIX_DIGITS: Final = 4
_HINT: Final = "run `mergepipe catalog rebuild`"
_REMOVED: Final = "it is removed: name the folder of its snapshot, if `mergepipe ls` does not list it"
_SNAPSHOTS, _DIGESTS = "snapshots", "digests"  # the folders
_FORMAT_NAME = "mergepipe-catalog"
_VERSION: Final = 7
_SNAPSHOT: Final = RecordFormat(_FORMAT_NAME, _VERSION, SnapshotRow, _HINT, variant="snapshot")
_DIGEST: Final = RecordFormat(_FORMAT_NAME, _VERSION, FileId, _HINT, variant="digest")
"""The last version of a file that a digest was taken of; `name` is its location, links resolved."""

T = TypeVar("T")
_LOG: Final = logging.getLogger("mergepipe")


def is_catalog_error(error: MergePipeError) -> bool:
    """Whether only the catalog is unusable, so that work that needs no statistics can continue without it."""
    return all(problem.code.startswith("catalog.") for problem in error.problems)


class Catalog:
    """The catalog in the folder `home`, which need not exist; inputs are looked at through `store`.

    In addition to the errors listed, all methods raise StorageError, `catalog.io`, if the folder cannot be used. A
    record that cannot be read is passed over.
    """

    def __init__(self, home: Path, store: Store | None = None) -> None:
        with _typed_errors(home):
            file = next((path for path in (home, *home.parents) if path.is_file()), None)
        if file is not None:
            raise _unusable(file, "it is a file")
        self.home = home
        self._store = store or Stores()

    # --- digests of files ---

    def with_known_digests(self, checkpoint: Checkpoint) -> Checkpoint:
        """Add to a checkpoint's fingerprints the SHA-256 digests that are on record for these versions of its files."""
        digests = {}
        for file in checkpoint.files:
            if file.id.sha256 is None:
                place, known = self._place_of(file), None
                with suppress(MergePipeError):  # then it is taken again
                    known = _read(_DIGEST, self._record_path(_DIGESTS, place))
                wanted = place, file.id.size_bytes, file.id.version
                if known is not None and known.sha256 and (known.name, known.size_bytes, known.version) == wanted:
                    digests[file.location] = known.sha256
        return with_digests(checkpoint, digests) if digests else checkpoint

    def record_digests(self, checkpoint: Checkpoint) -> None:
        """Record the digests that a checkpoint's fingerprints hold; a location keeps that of its last version.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
        """
        for file in checkpoint.files:
            if file.id.sha256 is not None:
                record = replace(file.id, name=self._place_of(file))
                _write(self._record_path(_DIGESTS, record.name), _DIGEST.to_json(record))

    def _place_of(self, file: CheckpointFile) -> str:
        """Return the location of a file, links resolved."""
        return _recordable(str(resolved(self._store, file.location)), file.location)

    # --- snapshots ---

    def record_snapshot(self, manifest: Manifest, path: Path, *, created: datetime) -> SnapshotRow:
        """Index a published snapshot with its inputs, replacing the record of the same path.

        Damaged records of others do not keep it from being recorded.

        Raises:
            UnsupportedError: `catalog.path-encoding`.
            ValueError: `created` has no time zone.
        """
        digest = blake3(manifest.to_json()).hexdigest(16)
        earlier: list[SnapshotRow] = []
        for record in _records_in(self.home / _SNAPSHOTS):
            with suppress(MergePipeError):
                earlier += _of_manifest(filter(None, [_read(_SNAPSHOT, record)]), digest)
        return self._record(manifest, digest, path, created, sorted(earlier, key=_age, reverse=True))

    def adopt_snapshot(self, path: Path, known: Sequence[SnapshotRow], *, created: datetime) -> SnapshotRow:
        """Index a snapshot from its stored manifest; `created` is used if that is not among the `known` ones.

        Raises:
            CorruptError: `format.damaged`.
            NotFoundError: `snapshot.not-found`.
            StorageError: it cannot be read.
            UnsupportedError: `format.version`, `format.kind`, `catalog.path-encoding`.
        """
        manifest, digest = read_manifest(self._store, path)
        earlier = _of_manifest(known, digest)
        return self._record(manifest, digest, path, earlier[-1].created if earlier else created, earlier)

    def _record(
        self, manifest: Manifest, digest: str, path: Path, created: datetime, earlier: Sequence[SnapshotRow]
    ) -> SnapshotRow:
        """Write a record; from `earlier` ones of the manifest it keeps sids of inputs, which may be gone by now."""
        sids = []
        for i, source in enumerate(manifest.inputs):
            recorded = (row.inputs[i].sid for row in earlier)
            known = next((sid for sid in recorded if sid is not None), None)
            sids.append(known or sid_of_unchanged_input(self._store, source))
        row = row_of(manifest, digest, _real_path(path), created, sids)
        _write(self._record_path(_SNAPSHOTS, str(row.path)), _SNAPSHOT.to_json(row))
        return row

    def snapshots(self) -> tuple[SnapshotRow, ...]:
        """Return every recorded snapshot, newest first; records that cannot be read are logged."""
        rows, problems = self.read_snapshots()
        for problem in problems:
            _LOG.warning("warning: %s [%s]", problem, problem.code)
        return rows

    def read_snapshots(self) -> tuple[tuple[SnapshotRow, ...], tuple[Problem, ...]]:
        """Return every recorded snapshot, newest first, and what is wrong with records that cannot be read."""
        rows: list[SnapshotRow] = []
        problems: list[Problem] = []
        for path in _records_in(self.home / _SNAPSHOTS):
            try:
                row = _read(_SNAPSHOT, path)
            except MergePipeError as error:
                problems += error.problems
                continue
            if row is not None:
                rows.append(row)
        return tuple(sorted(rows, key=_age, reverse=True)), tuple(problems)

    def snapshot(self, reference: str | Path) -> SnapshotRow:
        """Find a snapshot by its path, its sid, or at least the first four digits of it; of several the newest.

        Raises:
            NotFoundError: `snapshot.not-found`.
            RecipeError: `snapshot.ambiguous`.
        """
        return _one_of(self.snapshots(), reference)

    def lineage(self, reference: str | Path, *, down: bool = False) -> tuple[LineageNode, ...]:
        """Return all that a snapshot was made from, or with `down` all that is made from it: a tree in preorder.

        Raises as `snapshot` does.
        """
        rows = self.snapshots()
        return trace(rows, _one_of(rows, reference), down=down)

    def forget(self, reference: str | Path | SnapshotRow) -> SnapshotRow:
        """Remove a snapshot from the catalog, not from the disk. Raises as `snapshot` does, but not for a row."""
        row = reference if isinstance(reference, SnapshotRow) else self.snapshot(reference)
        _remove(self._record_path(_SNAPSHOTS, str(row.path)))
        return row

    # --- maintenance ---

    def stats(self) -> CatalogStats:
        """Return counts and sizes."""
        snapshots = _sizes_in(self.home / _SNAPSHOTS)
        digests = _sizes_in(self.home / _DIGESTS)
        statistics = _sizes_in(statistics_folder(self.home))
        return CatalogStats(
            path=self.home,
            file_bytes=sum(snapshots) + sum(digests),
            snapshots=len(snapshots),
            digests=len(digests),
            statistics=len(statistics),
            statistics_bytes=sum(statistics),
        )

    def _record_path(self, folder: str, place: str) -> Path:
        """Return the record of what lies at a place."""
        return self.home / folder / f"{blake3(place.encode()).hexdigest(16)}.json"


# --- records ---


def _records_in(folder: Path) -> list[Path]:
    """List the records of a folder; none where there is no folder."""
    with _typed_errors(folder), suppress(FileNotFoundError):
        return [folder / name for name, _ in owned.list_folder(folder) if not name.startswith(".")]
    return []


def _sizes_in(folder: Path) -> list[int]:
    return [path.stat().st_size for path in _records_in(folder)]


def _read(record_format: RecordFormat[T], path: Path) -> T | None:
    """Read a record; None if there is none."""
    try:
        return record_format.parse(read_small(path, CATALOG_RECORD_BYTES), path)
    except NotFoundError:
        return None
    except (CorruptError, UnsupportedError) as error:
        message = f"is not a valid record: {error.problems[0].message}"
        raise CorruptError.of("catalog.damaged", path, message, _HINT) from error
    except StorageError as error:
        if not _is_regular(path):
            raise CorruptError.of("catalog.damaged", path, "is no file, where a record was", _HINT) from error
        raise _unusable(path, error.problems[0].message) from error


def _is_regular(path: Path) -> bool:
    """Whether a name is that of a regular file, and no link."""
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _write(path: Path, content: bytes) -> None:
    with _typed_errors(path):
        owned.make_folders(path.parent)
        owned.replace_file(path, content)


def _remove(path: Path) -> None:
    with _typed_errors(path), suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            owned.remove_tree(path)
        else:
            owned.remove_file(path)


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


def _unusable(path: Path, reason: str) -> MergePipeError:
    hint = "check the path, the permissions and the space, or use --home"
    return StorageError.of("catalog.io", path, f"cannot be used: {reason}", hint)


def _recordable(text: str, where: object) -> str:
    """Return the text of a path that a record can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "paths that are not UTF-8 are not recorded"
        raise UnsupportedError.of("catalog.path-encoding", ascii(str(where)), message, "rename it") from None
    return text


def _real_path(path: Path) -> Path:
    """Return the path of a snapshot with links resolved."""
    return Path(_recordable(os.path.realpath(path), path))


def _age(row: SnapshotRow) -> tuple[datetime, Path]:
    return row.created, row.path


def _of_manifest(rows: Iterable[SnapshotRow], digest: str) -> list[SnapshotRow]:
    return [row for row in rows if row.manifest_digest == digest]


def _one_of(rows: Sequence[SnapshotRow], reference: str | Path) -> SnapshotRow:
    """Find a snapshot by path, sid or a prefix of its sid; of several with that sid, the newest."""
    path = record_folder(_real_path(Path(reference)))
    at_path = next((row for row in rows if row.path == path), None)
    if at_path is not None:
        return at_path
    prefix = str(reference).lower()
    matching = [row for row in rows if row.sid.startswith(prefix)]
    sids = sorted({row.sid for row in matching})
    if not sids or not prefix:
        known = [text for row in rows for text in (row.sid, str(row.path))]
        hint = "it holds none: give a folder, or use --home"
        if known:
            hint = did_you_mean(str(reference), known, otherwise="`mergepipe ls` lists those on record")
        raise NotFoundError.of("snapshot.not-found", reference, "no such snapshot in the catalog", hint)
    common = (len(os.path.commonprefix([a, b])) + 1 for a, b in pairwise((*sids, "")))  # noqa: RUF071 - digits
    needed = max(MIN_PREFIX_DIGITS, *common)
    if len(prefix) < MIN_PREFIX_DIGITS:
        message = f"{len(prefix)} digits of a sid are too few"
        hint = f"give {needed}: {' or '.join(sid[:needed] for sid in sids[:5])}"
        raise NotFoundError.of("snapshot.not-found", reference, message, hint)
    if len(sids) > 1:
        message = f"could be {', '.join(sids[:5])}"
        raise RecipeError.of("snapshot.ambiguous", reference, message, f"give {needed} digits")
    return matching[0]


# --- the catalog made again from manifests ---


def rebuild(home: Path, roots: Sequence[Path]) -> RebuildReport:
    """Recreate snapshots and lineage from the manifests under `roots` and at recorded paths.

    Records that are damaged, or no files, are removed and listed as unreadable. Other digests of files are kept.
    """
    unreadable: list[Problem] = []
    manifest_paths = list(find_manifests(roots, unreadable))
    catalog = Catalog(home)
    formats: dict[str, RecordFormat[Any]] = {_SNAPSHOTS: _SNAPSHOT, _DIGESTS: _DIGEST}
    for folder, record_format in formats.items():
        for record in _records_in(home / folder):
            try:
                _read(record_format, record)
            except CorruptError as error:
                unreadable += (replace(problem, hint=_REMOVED) for problem in error.problems)
                _remove(record)
    recorded: list[SnapshotRow] = []
    missing: list[Path] = []
    composites: list[Path] = []
    known = catalog.snapshots()
    paths = [*manifest_paths, *(snapshot.path for snapshot in known)]
    for path in dict.fromkeys(Path(os.path.realpath(path)) for path in paths):
        try:
            recorded.append(catalog.adopt_snapshot(path, known, created=modified_at(path / MANIFEST_NAME)))
        except NotFoundError:
            missing.append(path)
        except MergePipeError as error:
            if error.code == "catalog.io":
                raise
            if error.code == "format.kind":
                composites.append(path)
            else:
                unreadable.extend(error.problems)
    return RebuildReport(
        snapshots=len(recorded),
        missing=_still_missing(catalog, {snapshot.manifest_digest for snapshot in recorded}, missing),
        unreadable=tuple(unreadable),
        composites=tuple(composites),
    )


def _still_missing(catalog: Catalog, digests: set[str], missing: list[Path]) -> tuple[Path, ...]:
    """Forget rows of snapshots that were found elsewhere; return the remaining paths without a manifest."""
    lost = list(missing)
    for snapshot in catalog.snapshots():
        is_elsewhere = snapshot.path in missing or os.path.realpath(snapshot.path) != str(snapshot.path)
        if is_elsewhere and snapshot.manifest_digest in digests:
            catalog.forget(snapshot)
            lost = [path for path in lost if path != snapshot.path]
    return tuple(lost)
