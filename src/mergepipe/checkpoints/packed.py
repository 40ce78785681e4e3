"""Packed experts as others read them: what opens them is named here, and loaded with the first of them."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location

_OPENER: Final = "mergepipe.deltastore.checkpoint"


def is_packed(store: Store, path: Location) -> bool:
    """Whether `path` is the folder of a packed expert."""
    return is_file(store, path / STORE_HEADER_NAME)


def open_packed_expert(store: Store, path: Location, base: Checkpoint | None) -> Checkpoint:
    """Open a packed expert as the full checkpoint that was packed, relative to `base` if any; reads its header."""
    opened: Checkpoint = import_module(_OPENER).open_store(store, path, base)
    return opened
