"""Open a store by itself, with the base that it was packed with, which may be a store as well."""

from __future__ import annotations

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.deltastore.checkpoint import OpenedStore, open_store, read_header, read_store
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.header import is_store
from mergepipe.errors import MergePipeError, NotFoundError, RecipeError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

MOST_DEPTH = 32
"""A longer chain is taken for damage: each store of it is opened, and decoded for each block."""


def open_packed(
    store: Store, path: Location, base: Location | None = None
) -> tuple[OpenedStore, Checkpoint, tuple[Checkpoint, ...]]:
    """Open a packed expert by itself: header and index, the expert, and its bases, which lie where it was packed.

    There is no base for one that was packed without. That of a checkpoint in a chain is the store of the one before,
    which may have moved together with it, with its own bases behind it; or that one unpacked, if it is given as `base`.

    Raises:
        RecipeError: `option.pair`, a base for a store that was packed without one.
        NotFoundError, MismatchError: the store or its base is gone, or it is another base.
        CorruptError, UnsupportedError: header or index are damaged, or of another version.
    """
    opened = read_store(store, path)
    is_chained = opened.header.depth > 0 and (base is None or is_store(store, base))
    bases = _open_chain(store, opened, base) if is_chained else _open_base(store, opened, base)
    return opened, open_store(store, path, bases[0] if bases else None), bases


def _open_chain(store: Store, opened: OpenedStore, base: Location | None) -> tuple[Checkpoint, ...]:
    """Open the bases of a store that is packed on another one; that one's chain is shorter, so that none is endless."""
    _check_depth(opened.root, opened.header.depth)
    place = base or Location.parse(opened.header.base)
    if not is_store(store, place):
        place = opened.root.parent / place.name
    if not is_store(store, place):
        raise _missing(opened)
    depth = read_header(store, place).header.depth
    if depth != opened.header.depth - 1:  # before it is opened: it may name itself
        message = f"its base {place} is at depth {depth} of a chain, {opened.header.depth - 1} is needed"
        raise corrupt(opened.root, message)
    _, below, bases = open_packed(store, place)
    return below, *bases


def _open_base(store: Store, opened: OpenedStore, base: Location | None) -> tuple[Checkpoint, ...]:
    if not opened.header.base:
        if base is not None:
            raise RecipeError.of("option.pair", "--base", f"{opened.root} was packed without a base", "leave it out")
        return ()
    try:
        return (open_checkpoint(store, Location.parse(opened.header.base) if base is None else base),)
    except NotFoundError as error:
        if base is not None:
            raise
        raise _missing(opened) from error


def _check_depth(place: Location, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise corrupt(place, f"is at depth {depth} of a chain, {MOST_DEPTH} is the most")


def _missing(opened: OpenedStore) -> MergePipeError:
    message = f"its base is not at {opened.header.base} any more"
    return NotFoundError.of("store.base-missing", opened.root, message, "give it with --base")


def next_base(store: Store, last: Location, length: int) -> Location:
    """The base of the checkpoint after `last` in a chain: `last`, or what its chain begins on once that is long enough.

    `length` is the most stores that are decoded to restore a checkpoint.

    Raises:
        CorruptError, NotFoundError, UnsupportedError, StorageError: a store of the chain cannot be opened.
    """
    if not is_store(store, last):
        return last
    header = read_header(store, last).header
    if header.depth + 1 < length:
        return last
    _check_depth(last, header.depth)
    for depth in range(header.depth - 1, -1, -1):
        place = Location.parse(header.base)
        place = place if is_store(store, place) else last.parent / place.name
        header = read_header(store, place).header
        if header.depth != depth:
            raise corrupt(place, f"is at depth {header.depth} of a chain, {depth} is needed")
        last = place
    return Location.parse(header.base) if header.base else last
