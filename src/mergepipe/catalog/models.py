"""Rows of models, identified by path and file fingerprints, so that changed files never match old statistics."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable

from mergepipe.catalog.database import REBUILD_HINT
from mergepipe.catalog.rows import ModelKind, ModelRow, StaleModel, Staleness
from mergepipe.checkpoints.contract import Checkpoint, FileFingerprint
from mergepipe.core.canonical_json import canonical_json, digest_of
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.file_version import version_of
from mergepipe.storage.location import Location

_COLUMNS = "id, path, kind, content_id, n_tensors, n_parameters, tensor_bytes, dtypes, files"


def path_text(path: Location) -> str:
    """Return the path with links resolved, in the form that is stored.

    Raises:
        UnsupportedError: `catalog.path-encoding`, the path is not valid UTF-8 text.
    """
    try:
        text = os.path.realpath(path.local_path) if path.is_local else str(path)
        text.encode()
    except ValueError:  # a NUL, or bytes that are not UTF-8
        raise UnsupportedError.of(
            "catalog.path-encoding", ascii(str(path)), "paths that are not UTF-8 are not recorded", "rename it"
        ) from None
    return text


def model_row(checkpoint: Checkpoint, content_id: str | None) -> ModelRow:
    """Describe a checkpoint; the only access to storage is to its path, for the kind."""
    parameters: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        parameters[entry.dtype.name] += entry.n_elements
    path = path_text(checkpoint.path)
    files = tuple(sorted(checkpoint.files, key=lambda file: file.name))
    return ModelRow(
        id=_model_id(path, files),
        path=Location.parse(path),
        kind=_kind_of(checkpoint),
        content_id=content_id,
        n_tensors=len(checkpoint.tensors),
        n_parameters=sum(parameters.values()),
        tensor_bytes=checkpoint.tensor_bytes,
        dtypes=tuple(sorted(parameters.items())),
        files=files,
    )


def _model_id(path: str, files: tuple[FileFingerprint, ...]) -> str:
    return digest_of([path, [[f.name, f.size_bytes, f.version, f.header_digest] for f in files]])


def _kind_of(checkpoint: Checkpoint) -> ModelKind:
    path = checkpoint.path
    if path != checkpoint.root:
        return ModelKind.FILE
    is_snapshot = path.is_local and (path / MANIFEST_NAME).local_path.is_file()
    return ModelKind.SNAPSHOT if is_snapshot else ModelKind.DIRECTORY


def has_its_id(model: ModelRow) -> bool:
    """Whether path and files digest to the id: false for a damaged row."""
    return model.id == _model_id(str(model.path), model.files)


def register(connection: sqlite3.Connection, model: ModelRow) -> ModelRow:
    """Insert the model, or find it and add a content id unknown so far.

    The same fingerprint with another content id means that the files changed undetected: the old row is removed with
    its statistics.
    """
    present = find(connection, model.id)
    if present is not None:
        if model.content_id is None or present.content_id == model.content_id:
            return present
        if present.content_id is None:
            connection.execute("UPDATE models SET content_id = ? WHERE id = ?", (model.content_id, model.id))
            return model_with_id(connection, model.id)
        forget(connection, [present])
    connection.execute(f"INSERT INTO models ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _values(model))
    return model


def find(connection: sqlite3.Connection, model_id: str) -> ModelRow | None:
    """Return the row with this id, None if there is none."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM models WHERE id = ?", (model_id,)).fetchone()
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


def key_of(connection: sqlite3.Connection, model: ModelRow) -> int:
    """Return the primary key of a registered model.

    Raises:
        ConflictError: `catalog.model-gone`, another process removed it.
    """
    row = connection.execute("SELECT pk FROM models WHERE id = ?", (model.id,)).fetchone()
    if row is None:
        raise _gone(str(model.path))
    return int(row[0])


def _gone(where: str) -> MergePipeError:
    return ConflictError.of("catalog.model-gone", where, "is not, or no longer, in the catalog", "register it again")


def all_models(connection: sqlite3.Connection) -> tuple[ModelRow, ...]:
    """Return every row, oldest first."""
    return tuple(from_columns(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM models ORDER BY pk"))


def forget(connection: sqlite3.Connection, models: Iterable[ModelRow]) -> int:
    """Remove models, their statistics and unused tensor names; return how many models were removed."""
    removed = 0
    for model in models:
        removed += connection.execute("DELETE FROM models WHERE id = ?", (model.id,)).rowcount
    if removed:
        connection.execute("DELETE FROM tensor_names WHERE pk NOT IN (SELECT tensor FROM tensor_statistics)")
    return removed


def staleness(model: ModelRow) -> StaleModel | None:
    """Compare the row with the present sizes and versions of the files; None if they agree."""
    if not model.path.is_local:
        return None  # whoever opens it compares the versions
    for file in model.files:
        try:
            path = model.root.local_path / file.name
            status = path.stat()
        except OSError:
            return StaleModel(model, Staleness.MISSING)
        if (status.st_size, version_of(path, status)) != (file.size_bytes, file.version):
            return StaleModel(model, Staleness.CHANGED)
    return None


def check_rows(connection: sqlite3.Connection) -> None:
    """Validate every row.

    Raises:
        CorruptError: `catalog.corrupt`, a row is invalid.
    """
    for model in all_models(connection):
        if not has_its_id(model):
            raise _damaged(model.path, "its id does not match its content")


def _values(model: ModelRow) -> tuple[str | int | None, ...]:
    files = [[f.name, f.size_bytes, f.version, f.header_digest] for f in model.files]
    return (
        model.id,
        str(model.path),
        model.kind.value,
        model.content_id,
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
    model_id, path, kind, content_id, n_tensors, n_parameters, tensor_bytes, dtypes, files = row
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
                FileFingerprint(str(name), int(size), str(version), str(digest))
                for name, size, version, digest in json.loads(str(files))
            ),
        )
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: object, what: str) -> MergePipeError:
    return CorruptError.of("catalog.corrupt", path, f"the model's row is damaged: {what}", REBUILD_HINT)
