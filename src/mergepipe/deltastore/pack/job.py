"""Decide which experts can be packed, into which store, and whether a store holds one already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mergepipe.checkpoints.contained_files import is_linked_folder, require_text_path
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, FileFingerprint
from mergepipe.checkpoints.directory import open_checkpoint, stat_present
from mergepipe.deltastore.chain import MOST_DEPTH, open_packed
from mergepipe.deltastore.checkpoint import read_header, read_store
from mergepipe.deltastore.header import is_own_name, is_store
from mergepipe.deltastore.pack.builder import PackJob
from mergepipe.deltastore.pack.originals import (
    differing_base,
    differing_kept_file,
    differing_weights,
)
from mergepipe.errors import OutputError, RecipeError, UnsupportedError
from mergepipe.snapshots.object_upload import check_apart, staging_place
from mergepipe.snapshots.staging import check_target
from mergepipe.storage.contract import FileKind, Store
from mergepipe.storage.location import Location

_SUFFIX = ".safetensors"


def open_base(store: Store, path: Location) -> Checkpoint:
    """Open the checkpoint that experts are packed relative to; it may be packed itself.

    Raises:
        UnsupportedError: it holds deltas.
    """
    require_text_path(path)
    if is_store(store, path):
        return open_packed(store, path)[1]
    base = open_checkpoint(store, path)
    if base.kind is not CheckpointKind.FULL:
        raise UnsupportedError.of("pack.kind", path, "holds differences from a base, not weights", "name its base")
    return base


def job_of(store: Store, base: Checkpoint | None, expert: Checkpoint, folder: Location, home: Path) -> PackJob:
    """The job of packing an expert, relative to `base` if any, under its name in `folder`.

    One in a bucket is staged in `home`.

    Raises:
        UnsupportedError: its files are not plain safetensors weights, one has a name that stores use, or the chain that
            the base is in is too long.
        CorruptError: a file of its directory is not a regular file, or a link out of it.
        OutputError: the store would lie in an input.
    """
    require_text_path(expert.path)
    reason = reason_against(expert)
    if reason:
        raise UnsupportedError.of("pack.kind", expert.path, reason, "pack full weights in .safetensors files")
    real_path = store.real_path(expert.path) or expert.path
    place = folder / (real_path.name or real_path.root.rpartition("/")[2]).removesuffix(_SUFFIX)
    out = place.local_path if place.is_local else staging_place(place, home)
    inputs = (expert.path,) if base is None else (base.path, expert.path)
    if not place.is_local:
        check_apart(place, inputs)
    elif not is_store(store, place):
        check_target(out, inputs, force=None)
    is_chained = base is not None and base.encoded is not None
    depth = read_header(store, base.path).header.depth + 1 if base is not None and is_chained else 0
    if base is not None and depth > MOST_DEPTH:
        message = f"is at depth {depth - 1} of a chain, stores are packed on those at {MOST_DEPTH - 1} at most"
        raise UnsupportedError.of("pack.kind", base.path, message, "name what the chain begins on, or add --chain 8")
    return PackJob.of(base, expert, out, place, _kept_files(store, expert), depth)


def reason_against(expert: Checkpoint) -> str:
    """The reason why a checkpoint cannot be packed with any base; empty if it can."""
    if expert.kind is not CheckpointKind.FULL:
        return "holds differences from a base, not weights"
    unsupported = [file.name for file in expert.files if not file.name.endswith(_SUFFIX)]
    return f"{unsupported[0]} is not a safetensors file" if unsupported else ""


def check_names(jobs: Iterable[PackJob]) -> None:
    """Refuse two experts of the same name.

    Raises:
        RecipeError: naming it.
    """
    for place, count in Counter(job.place for job in jobs).items():
        if count > 1:
            raise RecipeError.of(
                "pack.name", place.parent, f"{count} experts are named {place.name!r}",
                "pack them into different directories",
            )  # fmt: skip


def is_packed(store: Store, job: PackJob, threads: int) -> bool:
    """Whether `job.place` holds this expert packed with this base.

    Weights count as unchanged if their files' versions are the same; otherwise they are read and compared with the
    digests in the store. Other files are always compared by content.

    Raises:
        OutputError: it holds another store; naming the file that differs.
    """
    if not is_store(store, job.place):
        return False
    opened = read_store(store, job.place)
    header = opened.header
    packed_files = [(f.name, f.size_bytes, f.version, f.header_blake3) for f in header.files]
    present_files = [(f.name, f.size_bytes, f.version, f.header_digest) for f in job.expert.files]
    path = differing_kept_file(store, opened, job)
    if path is None and packed_files != present_files:
        path = differing_weights(store, opened, job, threads)
    if path is None and header.base_files != job.base_files:
        path = differing_base(store, opened, job, threads)
    if path is None:
        job.check_unchanged(store)
        return True
    message = f"holds a store of {header.expert}, packed from other content than {path} has now"
    raise OutputError.of("output.exists", job.place, message, "remove it yourself, or choose another place")


def _kept_files(store: Store, expert: Checkpoint) -> tuple[FileFingerprint, ...]:
    """Every other file of the expert's directory, at any depth; none beside a bare file.

    Raises:
        CorruptError: one of them is not a regular file, or a link out of the directory.
        NotFoundError: one is a broken link.
        UnsupportedError: one has a name that the store uses itself, or is a link to a directory.
    """
    if expert.path != expert.root:
        return ()
    weights = {file.name for file in expert.files}
    fingerprints = []
    for name in sorted(name for name in _walk(store, expert.root) if name not in weights):
        if is_own_name(name):
            raise UnsupportedError.of(
                "pack.file", expert.root / name, "has a name that delta stores use", "rename the file"
            )
        status = stat_present(store, expert.root, name)
        fingerprints.append(FileFingerprint(name, status.size_bytes, status.version, ""))
    return tuple(fingerprints)


def _walk(store: Store, root: Location, prefix: str = "") -> Iterator[str]:
    """Names of files below `root/prefix`, at any depth."""
    folder = root / prefix
    for entry in store.list(folder):
        if entry.kind is not FileKind.FOLDER:
            yield prefix + entry.name
            continue
        if is_linked_folder(store, folder, entry.name):
            raise UnsupportedError.of(
                "pack.file", folder / entry.name, "is a link to a directory, and stores keep files only",
                "remove the link, or copy the directory into its place",
            )  # fmt: skip
        yield from _walk(store, root, f"{prefix}{entry.name}/")
