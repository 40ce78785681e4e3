"""Rows of models, identified by path and file fingerprints; what is known of them belongs to their contents."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from mergepipe.catalog.contents import (
    FileDigest,
    add_content,
    all_digests,
    content_of,
    content_with_digest,
    drop_unused,
    forget_digests,
    known_sha256,
)
from mergepipe.catalog.database import REBUILD_HINT
from mergepipe.catalog.rows import ModelKind, ModelRow, StaleModel, Staleness
from mergepipe.checkpoints.contract import Checkpoint, FileFingerprint
from mergepipe.checkpoints.file_digests import content_digest, with_digests
from mergepipe.core.canonical_json import canonical_json, digest_of
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, StorageError, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.storage.places import resolved

_SELECT = """
    SELECT m.id, m.path, m.kind, c.content_id, m.n_tensors, m.n_parameters, m.tensor_bytes, m.dtypes, m.files, c.digest
    FROM models AS m JOIN contents AS c ON c.pk = m.content
"""


def location_text(store: Store, location: Location) -> str:
    """Return a location with links resolved, in the form that is stored.

    Raises:
        UnsupportedError: `catalog.path-encoding`, it is not valid UTF-8 text.
    """
    try:
        return utf8_text(str(resolved(store, location)))
    except ValueError:
        raise bad_path(location) from None


def utf8_text(text: str) -> str:
    """Return a text that can be stored; raise ValueError if it is not UTF-8 or holds a NUL."""
    text.encode()
    if "\0" in text:
        raise ValueError("a NUL")
    return text


def bad_path(path: object) -> MergePipeError:
    """Make the error for a path that cannot be stored."""
    return UnsupportedError.of(
        "catalog.path-encoding", ascii(str(path)), "paths that are not UTF-8 are not recorded", "rename it"
    )


def model_row(store: Store, checkpoint: Checkpoint, content_id: str | None) -> ModelRow:
    """Describe a checkpoint; the only access to storage is to its path, for the kind."""
    parameters: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        parameters[entry.dtype.name] += entry.n_elements
    path = location_text(store, checkpoint.path)
    files = tuple(sorted(checkpoint.files, key=lambda file: file.name))
    return ModelRow(
        id=row_id(path, files),
        path=Location.parse(path),
        kind=_kind_of(store, checkpoint),
        content_id=content_id,
        n_tensors=len(checkpoint.tensors),
        n_parameters=sum(parameters.values()),
        tensor_bytes=checkpoint.tensor_bytes,
        dtypes=tuple(sorted(parameters.items())),
        files=files,
        content_digest=content_digest(checkpoint),
    )


def known_digests(connection: sqlite3.Connection, store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Add to a checkpoint's fingerprints the digests that are on record for the versions of its files."""
    digests = {}
    for file in checkpoint.files:
        if file.sha256 is None:
            digest = known_sha256(connection, _file_text(store, checkpoint, file), file.version, file.size_bytes)
            if digest is not None:
                digests[file.name] = digest
    return with_digests(checkpoint, digests) if digests else checkpoint


def digests_of(store: Store, checkpoint: Checkpoint) -> tuple[FileDigest, ...]:
    """Return the digests that a checkpoint's fingerprints hold, in the form that is recorded."""
    return tuple(
        FileDigest(_file_text(store, checkpoint, file), file.version, file.size_bytes, file.sha256)
        for file in checkpoint.files
        if file.sha256 is not None
    )


def _file_text(store: Store, checkpoint: Checkpoint, file: FileFingerprint) -> str:
    return location_text(store, checkpoint.root / file.name)


def row_id(path: str, files: tuple[FileFingerprint, ...]) -> str:
    """Digest a resolved path and what the files there look like, sorted by name."""
    return digest_of([path, [[f.name, f.size_bytes, f.version, f.header_digest] for f in files]])


def _kind_of(store: Store, checkpoint: Checkpoint) -> ModelKind:
    path = checkpoint.path
    if path != checkpoint.root:
        return ModelKind.FILE
    is_snapshot = path.is_local and is_file(store, path / MANIFEST_NAME)
    return ModelKind.SNAPSHOT if is_snapshot else ModelKind.DIRECTORY


def has_its_id(model: ModelRow) -> bool:
    """Whether path and files digest to the id: false for a damaged row."""
    return model.id == row_id(str(model.path), model.files)


def register(connection: sqlite3.Connection, model: ModelRow, digests: Iterable[FileDigest] = ()) -> ModelRow:
    """Insert the model, or find it and add what was unknown of its content so far.

    The same fingerprint with another content id means that the files changed undetected: the old row is removed with
    its statistics, and `digests`, those of the model's files, are forgotten.
    """
    present = find(connection, model.id)
    if present is not None and _contradicts(present, model):
        forget(connection, [present])
        forget_digests(connection, digests)
        model = replace(model, content_digest=None)
        present = None
    if present is None:
        _insert(connection, model)
    elif model.content_id is not None and present.content_id is None:
        connection.execute(
            "UPDATE contents SET content_id = ? WHERE pk = ?", (model.content_id, _content_key(connection, model))
        )
    return model_with_id(connection, model.id)


def _contradicts(present: ModelRow, model: ModelRow) -> bool:
    """Whether two records of one fingerprint are of different bytes."""
    ids = (present.content_id, model.content_id)
    digests = (present.content_digest, model.content_digest)
    return any(None not in pair and pair[0] != pair[1] for pair in (ids, digests))


def _insert(connection: sqlite3.Connection, model: ModelRow) -> None:
    content = content_of(connection, model)
    (content_id,) = connection.execute("SELECT content_id FROM contents WHERE pk = ?", (content,)).fetchone()
    if model.content_id is not None and content_id != model.content_id:  # its digest is not to be trusted
        content = add_content(connection, replace(model, content_digest=None))
    connection.execute(
        """
        INSERT INTO models (id, content, path, kind, n_tensors, n_parameters, tensor_bytes, dtypes, files)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        _values(model, content),
    )


def set_digest(connection: sqlite3.Connection, model: ModelRow, digest: str) -> tuple[int, int] | None:
    """Record the digest of a registered model's content, unless another content has it.

    Returns the keys of the model's content and of that other one, in which it is to be merged. Contents whose content
    ids differ are not the same, whatever was said of their digests.
    """
    content = _content_key(connection, model)
    other = content_with_digest(connection, digest)
    if other is None:
        connection.execute("UPDATE contents SET digest = ? WHERE pk = ? AND digest IS NULL", (digest, content))
        return None
    (other_id,) = connection.execute("SELECT content_id FROM contents WHERE pk = ?", (other,)).fetchone()
    is_other = None not in (model.content_id, other_id) and model.content_id != other_id
    return None if other == content or is_other else (content, other)


def twins(connection: sqlite3.Connection, model: ModelRow, content_id: str) -> tuple[ModelRow, ...]:
    """Return models of known content that may be the same: equal content id, sizes and headers in any order."""
    rows = connection.execute(
        f"{_SELECT} WHERE c.content_id = ? AND c.digest IS NOT NULL AND m.id != ? ORDER BY m.pk", (content_id, model.id)
    )
    shape = _shape(model)
    return tuple(row for row in map(from_columns, rows) if _shape(row) == shape)


def _shape(model: ModelRow) -> list[tuple[int, str]]:
    return sorted((file.size_bytes, file.header_digest) for file in model.files)


def find(connection: sqlite3.Connection, model_id: str) -> ModelRow | None:
    """Return the row with this id, None if there is none."""
    row = connection.execute(f"{_SELECT} WHERE m.id = ?", (model_id,)).fetchone()
    return None if row is None else from_columns(row)


def model_with_id(connection: sqlite3.Connection, model_id: str) -> ModelRow:
    """Return the row with this id.

    Raises:
        ConflictError: `catalog.model-gone`, another process removed it.
    """
    model = find(connection, model_id)
    if model is None:
        raise _gone(model_id)
    return model


def _content_key(connection: sqlite3.Connection, model: ModelRow) -> int:
    """Return the key of the content of a registered model.

    Raises:
        ConflictError: `catalog.model-gone`, another process removed it.
    """
    row = connection.execute("SELECT content FROM models WHERE id = ?", (model.id,)).fetchone()
    if row is None:
        raise _gone(str(model.path))
    return int(row[0])


def content_key_and_id(connection: sqlite3.Connection, model: ModelRow) -> tuple[int, str]:
    """Return the key and the id of a registered model's content.

    Raises:
        ConflictError: `catalog.model-gone`, another process removed it.
    """
    key = _content_key(connection, model)
    (content,) = connection.execute("SELECT id FROM contents WHERE pk = ?", (key,)).fetchone()
    return key, str(content)


def _gone(where: str) -> MergePipeError:
    return ConflictError.of("catalog.model-gone", where, "is not, or no longer, in the catalog", "register it again")


def all_models(connection: sqlite3.Connection) -> tuple[ModelRow, ...]:
    """Return every row, oldest first."""
    rows = connection.execute(f"{_SELECT} ORDER BY m.pk").fetchall()  # a row may be refused: no cursor stays open
    return tuple(from_columns(row) for row in rows)


def forget(connection: sqlite3.Connection, models: Iterable[ModelRow]) -> int:
    """Remove models, and the statistics of contents that no other model has; return how many models were removed."""
    removed = 0
    contents = []
    for model in models:
        row = connection.execute("SELECT content FROM models WHERE id = ?", (model.id,)).fetchone()
        if row is not None:
            contents.append(int(row[0]))
            removed += connection.execute("DELETE FROM models WHERE id = ?", (model.id,)).rowcount
    if removed:
        drop_unused(connection, contents)
    return removed


def staleness(store: Store, model: ModelRow) -> StaleModel | None:
    """Compare the row with the present sizes and versions of the files; None if they agree."""
    if not model.path.is_local:
        return None  # whoever opens it compares the versions
    for file in model.files:
        try:
            status = store.stat(model.root / file.name)
        except StorageError:
            status = None
        if status is None:
            return StaleModel(model, Staleness.MISSING)
        if (status.size_bytes, status.version) != (file.size_bytes, file.version):
            return StaleModel(model, Staleness.CHANGED)
    return None


def gone_digests(connection: sqlite3.Connection, store: Store) -> tuple[FileDigest, ...]:
    """Return the digests of local files that are gone or changed, and that no recorded snapshot was made from.

    Those of a snapshot's inputs tell what its blocks were made from. Where the folder that held a model is not there
    either, it may be on a disk that is not mounted: its digests are not returned.
    """
    paths = [
        Location.parse(str(path))
        for (path,) in connection.execute("SELECT DISTINCT path FROM snapshot_inputs").fetchall()
    ]
    inputs = {place for path in paths for place in (path, resolved(store, path))}
    gone = []
    for digest in all_digests(connection):
        location = Location.parse(digest.location)
        if (
            location.is_local
            and inputs.isdisjoint((location, *location.parents))
            and is_folder(store, location.parent.parent)
        ):
            status = store.stat(location)
            if status is None or (status.size_bytes, status.version) != (digest.size_bytes, digest.version):
                gone.append(digest)
    return tuple(gone)


def check_rows(connection: sqlite3.Connection) -> None:
    """Validate every row.

    Raises:
        CorruptError: `catalog.corrupt`, a row is invalid.
    """
    for model in all_models(connection):
        if not has_its_id(model):
            raise _damaged(model.path, "its id does not match its content")


def _values(model: ModelRow, content: int) -> tuple[str | int, ...]:
    files = [[f.name, f.size_bytes, f.version, f.header_digest] for f in model.files]
    return (
        model.id,
        content,
        str(model.path),
        model.kind.value,
        model.n_tensors,
        model.n_parameters,
        model.tensor_bytes,
        canonical_json([list(pair) for pair in model.dtypes]).decode(),
        canonical_json(files).decode(),
    )


def from_columns(row: tuple[object, ...]) -> ModelRow:
    """Build a row from the selected columns.

    Raises:
        CorruptError: `catalog.corrupt`.
    """
    model_id, path, kind, content_id, n_tensors, n_parameters, tensor_bytes, dtypes, files, digest = row
    try:
        if "\0" in f"{path}{json.loads(str(files))}":
            raise ValueError("a NUL in a path")
        return ModelRow(
            id=str(model_id),
            path=Location.parse(str(path)),
            kind=ModelKind(str(kind)),
            content_id=None if content_id is None else str(content_id),
            n_tensors=int(str(n_tensors)),
            n_parameters=int(str(n_parameters)),
            tensor_bytes=int(str(tensor_bytes)),
            dtypes=tuple((str(name), int(n)) for name, n in json.loads(str(dtypes))),
            files=tuple(
                FileFingerprint(str(name), int(size), str(version), str(header))
                for name, size, version, header in json.loads(str(files))
            ),
            content_digest=None if digest is None else str(digest),
        )
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: object, what: str) -> MergePipeError:
    return CorruptError.of("catalog.corrupt", path, f"the model's row is damaged: {what}", REBUILD_HINT)
