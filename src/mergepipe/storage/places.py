"""Resolve the links of a location, also where nothing is there (any more)."""

from __future__ import annotations

from mergepipe.errors import StorageError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location


def resolved(store: Store, location: Location) -> Location:
    """Follow the links in a location; of one that cannot be looked at, those in the folders above it that can.

    Locations of other machines have none.
    """
    if not location.is_local:
        return location
    try:
        real = store.real_path(location)
    except StorageError:
        real = None
    if real is not None or location.parent == location:
        return location if real is None else real
    return resolved(store, location.parent) / location.name
