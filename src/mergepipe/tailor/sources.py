"""Open the source checkpoints of a composition, and list the files of the skeleton that belong to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from mergepipe.checkpoints.directory import is_linked_folder, require_text_path, stat_regular
from mergepipe.errors import CorruptError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.contract import FileKind, Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.registry import open_training_checkpoint

# --- list the files of the skeleton that belong to the checkpoint ---


_MAX_DEPTH = 8
_MAX_FILES = 200_000


@dataclass(frozen=True, slots=True)
class SkeletonFile:
    """One file: its name relative to the composite, with slashes, where it is, and its size."""

    name: str
    path: Location
    size_bytes: int


def list_skeleton(store: Store, checkpoint: TrainingCheckpoint) -> tuple[SkeletonFile, ...]:
    """List the files of a checkpoint, in order of their names.

    Of a DeepSpeed save directory: what lies in it directly and the tag that `latest` names, no other tag. An earlier
    composite's manifest is left out.
    """
    base = checkpoint.path
    if checkpoint.root == base:
        names = list(_walk(store, base, "", _MAX_DEPTH))
    else:
        tag = checkpoint.root.relative_to(base).as_posix()
        names = [*_walk(store, base, "", 0), *_walk(store, base, f"{tag}/", _MAX_DEPTH)]
    names = sorted(name for name in names if name != MANIFEST_NAME)
    if len(names) > _MAX_FILES:
        raise CorruptError.of("checkpoint.damaged", base, f"more than {_MAX_FILES} files")
    return tuple(_file(store, base, name) for name in names)


def _walk(store: Store, base: Location, prefix: str, depth: int) -> Iterator[str]:
    """Names of files below `base/prefix`; directories are entered down to `depth`."""
    for entry in store.list(base / prefix):
        if entry.kind is not FileKind.FOLDER or is_linked_folder(store, base / prefix, entry.name):
            yield prefix + entry.name
        elif depth > 0:
            yield from _walk(store, base, f"{prefix}{entry.name}/", depth - 1)


def _file(store: Store, base: Location, name: str) -> SkeletonFile:
    status = stat_regular(store, base, name)
    if status is None:
        raise CorruptError.of("checkpoint.damaged", base / name, "is a link to nothing")
    return SkeletonFile(name, base / name, status.size_bytes)


# --- open the source checkpoints of a composition ---


_OPENED_AT_ONCE = 8


def open_source_checkpoints(store: Store, paths: Sequence[Location]) -> list[TrainingCheckpoint]:
    """Open many checkpoints, several at a time: each takes some hundred small reads, one after another."""
    with ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(paths)), "mergepipe-tailor-open") as pool:
        return list(pool.map(lambda path: open_source_checkpoint(store, path), paths))


def open_source_checkpoint(store: Store, path: Location) -> TrainingCheckpoint:
    """Open a checkpoint, of a remote one its present version; a partial one never counts as complete.

    No framework can resume a partial one.
    """
    require_text_path(path)
    opened = open_training_checkpoint(store, store.pin(path))
    if not opened.is_partial:
        return opened
    return replace(opened, missing=(*opened.missing, "the files of its framework: it is a partial checkpoint"))
