"""Describe a packed expert of this machine as others get it: its files by digests that its header implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

from mergepipe.core.canonical_json import digest_of
from mergepipe.deltastore.checkpoint import OpenedStore
from mergepipe.deltastore.header import HEADER_NAME, HEADERS_NAME, KeptFile, StoreHeader
from mergepipe.snapshots.layout import small_digest
from mergepipe.snapshots.object_upload import ObjectContent, OutputContent
from mergepipe.snapshots.recorded_paths import file_without_paths
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import sidecar_limit
from mergepipe.storage.location import Location

_IN_MEMORY_BYTES: Final = 1 << 20  # files up to this size are sent in one request


def portable_store(
    store: Store, opened: OpenedStore, changed: Mapping[str, bytes] = MappingProxyType({})
) -> OutputContent:
    """Describe a store of this machine; of a local base and expert the header keeps the last names, as hints.

    `changed` files of the original take the place of those that the store keeps.

    Raises:
        StorageError: a small file cannot be read.
    """
    kept = tuple(
        KeptFile(file.name, len(changed[file.name]), small_digest(changed[file.name])) if file.name in changed else file
        for file in opened.header.kept
    )
    header = replace(opened.header, kept=kept)
    paths = [path for path in (header.base, header.expert) if path and Location.parse(path).is_local]
    names = {path: PurePath(path).name for path in paths if PurePath(path).name != path}
    base, expert = (names.get(path, path) for path in (header.base, header.expert))
    objects = {
        file.name: _object(store, opened.root / file.name, file.size_bytes, _digest(header, file.name))
        for file in opened.fingerprints
        if file.name != HEADER_NAME
    }
    objects |= {name: ObjectContent(raw, len(raw), small_digest(raw)) for name, raw in changed.items()}
    record = replace(header, base=base, expert=expert).to_json()
    return OutputContent(HEADER_NAME, record, objects)


def published_store(store: Store, opened: OpenedStore) -> OutputContent:
    """Describe a store as it is published: kept files that name paths of this machine are without them.

    Raises:
        CorruptError: `storage.too-large`, a small file of the original.
        StorageError: a small file cannot be read.
    """
    names = [file.name for file in opened.header.kept if file.name.endswith(".json")]
    contents = {name: store.read_small(opened.root / name, sidecar_limit(name)) for name in names}
    cleaned = {name: file_without_paths(name, raw) for name, raw in contents.items()}
    return portable_store(store, opened, {name: raw for name, raw in cleaned.items() if raw != contents[name]})


def _object(store: Store, place: Location, size_bytes: int, digest: str) -> ObjectContent:
    is_small = size_bytes <= _IN_MEMORY_BYTES
    source = store.read_metadata(place, 0, size_bytes) if is_small else place.local_path
    return ObjectContent(source, size_bytes, digest)


def _digest(header: StoreHeader, name: str) -> str:
    """Identify the bytes of a file without reading it: the index has a checksum of every piece of the others."""
    if name == HEADERS_NAME:
        return digest_of([file.header_blake3 for file in header.files])
    digest = next((file.blake3 for file in header.kept if file.name == name), None)
    return digest or digest_of([header.index_blake3, name])
