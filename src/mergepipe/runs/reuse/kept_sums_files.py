"""Keep the file of a snapshot's sums beside the snapshot, where no upload of its folder takes it along.

The sums of the snapshot `OUT` of id SID are `OUT.sums/SID.mergepipe-sums`. What binds them is in the
snapshot; where they are missing, a later merge only reads more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from mergepipe.errors import MergePipeError
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.local import os_error
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, sync_directory

_SUFFIX = ".sums"
_ENDING = ".mergepipe-sums"
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(_ENDING)}")


def sums_folder(out: Path) -> Path:
    """Return the folder of the sums of the snapshot at `out`."""
    return out.with_name(f"{out.name}{_SUFFIX}")


def find_sums(store: Store, snapshot: Location, sid: str) -> Location:
    """Return where the sums of a snapshot are, if they were kept."""
    real = store.real_path(snapshot) or snapshot.normal()
    return real.with_name(f"{real.name}{_SUFFIX}") / f"{sid}{_ENDING}"


def snapshots_with_sums(parent: Path) -> tuple[Path, ...]:
    """List the places of the snapshots in a folder beside which sums are, or were, kept."""
    return tuple(
        path.with_name(path.name.removesuffix(_SUFFIX))
        for path in sorted(parent.glob(f"?*{_SUFFIX}"))
        if path.is_dir() and not path.is_symlink()
    )


def move_sums(staged: Path, out: Path, sid: str) -> None:
    """Move a finished file of sums to its place beside `out`, durably, before the snapshot is published.

    Raises:
        OutputError: something that is not ours is in its place.
        StorageError: the operating system refused.
    """
    folder = sums_folder(out)
    target = folder / f"{sid}{_ENDING}"
    make_folders(folder)
    try:
        owned.rename(staged, target)
    except OSError as error:
        raise os_error(error, target, "moving the kept sums there") from error
    sync_directory(folder)
    sync_directory(folder.parent)


def remove_old_sums(out: Path, sid: str | None) -> None:
    """Remove the sums of other snapshots that were at `out`; their folder, too, if nothing else is in it."""
    old = list(old_sums(out, sid))
    for path in old:
        with contextlib.suppress(OSError, MergePipeError):
            owned.remove_file(path)
    if not old:
        return
    with contextlib.suppress(OSError, MergePipeError):
        owned.remove_folder(sums_folder(out))


def old_sums(out: Path, sid: str | None) -> Iterator[Path]:
    """Yield the files of sums beside `out` that are not those of the snapshot `sid`."""
    with contextlib.suppress(OSError):
        for path in sorted(sums_folder(out).iterdir()):
            if _NAME.fullmatch(path.name) and path.name != f"{sid}{_ENDING}":
                yield path
