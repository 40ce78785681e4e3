"""Find the recorded inputs of a snapshot that was moved away from them, by what the catalog knows of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.errors import MergePipeError
from mergepipe.recipes.references import referenced_paths
from mergepipe.snapshots.manifest import InputRecord, Manifest
from mergepipe.storage.contract import Store


def with_inputs_found(manifest: Manifest, store: Store, home: Path | None) -> Manifest:
    """Return the manifest with inputs at the paths that the catalog knows, where its own lead nowhere.

    A manifest names inputs relative to its snapshot, so they are lost where the snapshot alone is moved. The catalog
    recorded where they were when it was made.
    """
    if home is None or not (home / CATALOG_NAME).exists():
        return manifest
    if all(_is_there(record.path, store) for record in manifest.inputs):
        return manifest
    with Catalog.open(home) as catalog:
        rows = [row for row in catalog.snapshots() if row.sid == manifest.sid]
    for row in rows:
        if [source.model for source in row.inputs] == [record.model for record in manifest.inputs]:
            places = [source.path for source in row.inputs]
            pairs = zip(manifest.inputs, places, strict=True)
            manifest = replace(manifest, inputs=tuple(_at_one_of(record, path, store) for record, path in pairs))
    return manifest


def _at_one_of(record: InputRecord, known_path: str, store: Store) -> InputRecord:
    return (
        record
        if _is_there(record.path, store) or not _is_there(known_path, store)
        else replace(record, path=known_path)
    )


def _is_there(reference: str, store: Store) -> bool:
    try:
        return all(store.stat(path) is not None for path in referenced_paths(reference, store))
    except MergePipeError:  # what is wrong with it is said where it is opened
        return False
