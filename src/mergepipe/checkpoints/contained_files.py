"""Check the files that a checkpoint directory names: regular ones inside it, or blobs of the same hub cache folder."""

from __future__ import annotations

import unicodedata

from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.contract import FileStatus, Store
from mergepipe.storage.location import Location


def is_plain_name(name: str) -> bool:
    """Whether `name` is one file name: no separator of any system, no `.` or `..`, printable as UTF-8."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    return not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)


def require_text_path(path: Location) -> None:
    """Check that the absolute form of a path can be written into a record of what was read.

    Raises:
        UnsupportedError: `path.encoding`, it has bytes that are not UTF-8.
    """
    text = str(path.normal())
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "has bytes that are not UTF-8, which no record of ours can state"
        raise UnsupportedError.of("path.encoding", ascii(text), message, "rename it") from None


def stat_regular(store: Store, root: Location, name: str) -> FileStatus | None:
    """Look up the file `name` (relative, posix) of the checkpoint directory `root`; None if there is none.

    Raises:
        CorruptError: the name cannot be used, a link leads out of the checkpoint, or it is not a regular file.
        StorageError: the store refused to look.
    """
    if not all(is_plain_name(part) for part in name.split("/")):
        raise CorruptError.of("checkpoint.files.name", root, f"the file name {shown(name)} cannot be used")
    path = root / name
    target = store.real_path(path)
    status = None if target is None else store.stat(target)
    if target is None or status is None:
        return None
    _check_contained(path, target, store.real_path(root) or root)
    if not status.is_file:
        raise CorruptError.of("checkpoint.files.not_regular", path, "must be a regular file")
    return status


def is_linked_folder(store: Store, folder: Location, name: str) -> bool:
    """Whether the folder `name` of `folder` is a link, so that what is below it lies elsewhere too."""
    return store.real_path(folder / name) != (store.real_path(folder) or folder) / name


def _check_contained(path: Location, target: Location, root: Location) -> None:
    """Check that what the link `path` leads to belongs to the checkpoint in `root` (both resolved)."""
    if target.is_relative_to(root):
        return
    blobs = _hub_blobs(root)
    if blobs is not None and target.is_relative_to(blobs):
        return
    raise CorruptError.of(
        "checkpoint.files.link_outside", path, f"is a link to {target}, outside of the checkpoint {root}",
        "copy the file into the checkpoint",
    )  # fmt: skip


def _hub_blobs(root: Location) -> Location | None:
    """The blob folder that links of a hub cache snapshot (`models--X/snapshots/REV[/...]`) point into."""
    for folder in (root, *root.parents):
        snapshots, repository = folder.parent, folder.parent.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return repository / "blobs"
    return None
