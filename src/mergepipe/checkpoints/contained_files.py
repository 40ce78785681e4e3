"""Which files a checkpoint directory may name: regular ones inside it, or blobs of the same hub cache folder."""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path

from mergepipe.checkpoints.formats.strict_json import shown
from mergepipe.errors import CorruptError, StorageError, UnsupportedError


def is_plain_name(name: str) -> bool:
    """Whether `name` is one file name: no separator of any system, no `.` or `..`, printable as UTF-8."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    return not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)


def require_text_path(path: Path) -> None:
    """Check that the absolute form of a path can be written into a record of what was read.

    Raises:
        UnsupportedError: `path.encoding`, it has bytes that are not UTF-8.
    """
    text = os.path.abspath(path)  # noqa: PTH100 - without following links
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "has bytes that are not UTF-8, which no record of ours can state"
        raise UnsupportedError.of("path.encoding", ascii(text), message, "rename it") from None


def stat_regular(root: Path, name: str) -> os.stat_result | None:
    """Stat the file `name` (relative, posix) of the checkpoint directory `root`; None if there is none.

    Raises:
        CorruptError: the name cannot be used, a link leads out of the checkpoint, or it is not a regular file.
        StorageError: the operating system refused to look.
    """
    if not all(is_plain_name(part) for part in name.split("/")):
        raise CorruptError.of("checkpoint.files.name", root, f"the file name {shown(name)} cannot be used")
    path = root / name
    try:
        target = Path(os.path.realpath(path, strict=True))
        found = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError.of("storage.stat", path, f"cannot be looked at: {error.strerror}") from error
    _check_contained(path, target, Path(os.path.realpath(root)))
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError.of("checkpoint.files.not_regular", path, "must be a regular file")
    return found


def _check_contained(path: Path, target: Path, root: Path) -> None:
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


def _hub_blobs(root: Path) -> Path | None:
    """The blob folder that links of a hub cache snapshot (`models--X/snapshots/REV[/...]`) point into."""
    for folder in (root, *root.parents):
        snapshots, repository = folder.parent, folder.parent.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return repository / "blobs"
    return None
