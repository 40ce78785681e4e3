"""A library: a folder of packed experts, which share files of equal tensors as hard links.

Nothing else makes a library: each member is a store that is complete without the others. See decision 021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mergepipe.deltastore.checkpoint import OpenedStore, read_header
from mergepipe.deltastore.header import is_store
from mergepipe.storage.contract import FileKind, Store, is_folder
from mergepipe.storage.location import Location


def member_places(store: Store, folder: Location) -> tuple[Location, ...]:
    """The packed experts in a folder, by name; empty where there is no such folder.

    Raises:
        StorageError: the store refused.
    """
    if not is_folder(store, folder):
        return ()
    names = sorted(entry.name for entry in store.list(folder) if entry.kind is FileKind.FOLDER)
    places = (folder / name for name in names if not name.startswith("."))
    return tuple(place for place in places if is_store(store, place))


def recorded_bases(store: Store, folder: Location) -> tuple[Location, ...]:
    """The bases of the experts in a library that are where they were, in the order of the experts' names.

    Raises:
        CorruptError, UnsupportedError, StorageError: a header cannot be read.
    """
    headers = [read_header(store, place).header for place in member_places(store, folder)]
    bases = [Location.parse(text) for text in dict.fromkeys(header.base for header in headers if header.base)]
    return tuple(base for base in bases if store.stat(base) is not None)


def shared_bytes(members: Sequence[OpenedStore]) -> tuple[list[int], int]:
    """Return the bytes of each member that others have too, and the bytes of all members, each file counted once.

    Files are the same if their versions are: those name the file, whatever it is called.
    """
    sizes = {file.version: file.size_bytes for member in members for file in member.fingerprints}
    holders = Counter(version for member in members for version in {file.version for file in member.fingerprints})
    shared = [
        sum(sizes[version] for version in {file.version for file in member.fingerprints} if holders[version] > 1)
        for member in members
    ]
    return shared, sum(sizes.values())
