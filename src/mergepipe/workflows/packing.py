"""PACK: experts into delta stores beside their base, together in one streaming pass, each published all or nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path

from mergepipe.asked import threads_asked
from mergepipe.budget import Purpose
from mergepipe.deltastore.header import OWN_NAMES, is_store
from mergepipe.deltastore.opening import read_store
from mergepipe.errors import MergePipeError, OutputError, RecipeError, UnsupportedError
from mergepipe.publish import check_free_space, check_target, remove_dead, staging_directory
from mergepipe.readers.base import Checkpoint, CheckpointKind, FileFingerprint
from mergepipe.readers.contained import require_text_path
from mergepipe.readers.hf import open_checkpoint, stat_present
from mergepipe.reports import PackedExpert, PackReport, Progress, ProgressCallback
from mergepipe.storage.file_version import version_of
from mergepipe.storage.local import LocalStore, os_error
from mergepipe.workflows.inputs import allow_open_files, open_files
from mergepipe.workflows.originals import (
    check_same,
    differing_base,
    differing_kept_file,
    differing_weights,
    remove_original,
    sync_store,
)
from mergepipe.workflows.pack_pass import EXPERTS_AT_ONCE, pack_all
from mergepipe.workflows.packed_facts import packed_facts
from mergepipe.workflows.store_building import FILES_OF_BUILDER, PackJob, StoreBuilder, building
from mergepipe.workflows.unpacking import verify_store

_SUFFIX = ".safetensors"


def pack(
    base: str | Path,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    replace: bool = False,
    threads: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> PackReport:
    """Pack each expert into a store `out/NAME`, bit for bit; one that is there already is left as it is.

    All are read in one pass with the base, eight at a time. Every element is decoded again and compared while it is
    packed. What a killed run left is gone on with.

    Memory: 100 MiB for reading, 16 MiB an expert, some 6 MiB a thread, whatever the size of the models.

    Args:
        experts: full weights in safetensors files, fine-tuned from `base`.
        replace: read each store back from disk and every file of every original again, compare them, and only if all
            are the same remove the originals' files.
        threads: encoding threads; default, one per processor.
        on_progress: called from the calling thread with the bytes of experts that are packed.

    Raises:
        RecipeError: two experts of one name, or an expert whose files must not be removed.
        UnsupportedError: an expert that is no full weights in safetensors files.
        OutputError, ConflictError, StorageError: the store cannot go there, or an input changed. A store is published
            whole or not at all.
    """
    started = time.perf_counter()
    store = LocalStore()
    workers = threads_asked(threads)
    base_checkpoint = open_base(store, Path(base))
    jobs = [job_of(base_checkpoint, open_checkpoint(store, Path(each)), Path(out)) for each in experts]
    check_names(jobs)
    if replace:
        for job in jobs:
            _check_removable(job)
    missing = [job for job in jobs if not is_packed(store, job, workers)]
    for job in jobs:
        if job not in missing:
            remove_dead(staging_directory(job.out.absolute()))  # of a run that was killed once all was done
    if missing:
        check_free_space(missing[0].out, max(job.expert.tensor_bytes for job in missing))
    packed: dict[Path, PackedExpert] = {}
    for first in range(0, len(missing), EXPERTS_AT_ONCE):
        packed |= _pack_together(store, missing[first : first + EXPERTS_AT_ONCE], workers, on_progress)
    done = tuple(packed.get(job.out) or packed_facts(store, job, is_new=False) for job in jobs)
    if replace:
        for job in jobs:
            _check_replaceable(store, job, workers)
        for job in jobs:
            remove_original(job)
        done = tuple(changed(each, is_original_removed=True) for each in done)
    usage = store.ledger.usage()
    expert_bytes = usage[Purpose.EXPERT] + usage[Purpose.ANALYSIS]
    return PackReport(Path(base), done, usage[Purpose.BASE], expert_bytes, time.perf_counter() - started)


def open_base(store: LocalStore, path: Path) -> Checkpoint:
    """Open what experts are packed beside.

    Raises:
        UnsupportedError: it holds differences.
    """
    require_text_path(path)
    base = open_checkpoint(store, path)
    if base.kind is not CheckpointKind.FULL:
        raise UnsupportedError.of("pack.kind", path, "holds differences from a base, not weights", "name its base")
    return base


def job_of(base: Checkpoint, expert: Checkpoint, out: Path) -> PackJob:
    """The job of packing an expert under its name in the directory `out`.

    Raises:
        UnsupportedError: its files are no plain safetensors weights, or one has a name that stores use.
        CorruptError: a file of its directory is no regular file, or a link out of it.
        OutputError: the store would lie in an input.
    """
    require_text_path(expert.path)
    reason = reason_against(expert)
    if reason:
        raise UnsupportedError.of("pack.kind", expert.path, reason, "pack full weights in .safetensors files")
    place = out / expert.path.resolve().name.removesuffix(_SUFFIX)
    inputs = (base.path, expert.path)
    if not is_store(place):
        check_target(place, inputs, force=None)
    return PackJob.of(base, expert, place, _kept_files(expert))


def reason_against(expert: Checkpoint) -> str:
    """Why a checkpoint cannot be packed, whatever its base; empty if it can."""
    if expert.kind is not CheckpointKind.FULL:
        return "holds differences from a base, not weights"
    odd = [file.name for file in expert.files if not file.name.endswith(_SUFFIX)]
    return f"{odd[0]} is no safetensors file" if odd else ""


def check_names(jobs: Iterable[PackJob]) -> None:
    """Refuse two experts of one name.

    Raises:
        RecipeError: naming it.
    """
    for place, count in Counter(job.out for job in jobs).items():
        if count > 1:
            raise RecipeError.of(
                "pack.name", place.parent, f"{count} experts are named {place.name!r}",
                "pack them into different directories",
            )  # fmt: skip


def is_packed(store: LocalStore, job: PackJob, threads: int) -> bool:
    """Whether `out` holds this very expert beside this very base.

    Weights are taken for what they were by their files' versions where these are the same; otherwise they are read and
    compared with the digests of what was packed. Other files are always compared so.

    Raises:
        OutputError: it holds another store; naming the file that differs.
    """
    if not is_store(job.out):
        return False
    opened = read_store(store, job.out)
    header = opened.header
    then = [(f.name, f.size_bytes, f.version, f.header_blake3) for f in header.files]
    now = [(f.name, f.size_bytes, f.version, f.header_digest) for f in job.expert.files]
    path = differing_kept_file(store, opened, job)
    if path is None and then != now:
        path = differing_weights(store, opened, job, threads)
    if path is None and header.base_files != job.base_files:
        path = differing_base(store, opened, job, threads)
    if path is None:
        job.check_unchanged()
        return True
    message = f"holds a store of {header.expert}, packed from other content than {path} has now"
    raise OutputError.of("output.exists", job.out, message, "remove it yourself, or choose another place")


def _pack_together(
    store: LocalStore, jobs: Sequence[PackJob], threads: int, on_progress: ProgressCallback | None
) -> dict[Path, PackedExpert]:
    """Pack some experts in one pass, and publish each; if one cannot be, the others are all the same.

    Raises:
        MergePipeError: the first one's, once all others are published.
    """
    started = time.perf_counter()
    total = sum(job.expert.tensor_bytes for job in jobs)
    inputs = set[Path]().union(*(job.weight_files for job in jobs))
    allow_open_files(len(inputs) + len(jobs) * FILES_OF_BUILDER)
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(building(job, store, resumes=True)) for job in jobs]
        counter = _Counter(on_progress, sum(builder.done_bytes for builder in builders), total)
        counter.add(0)
        checkpoints = [each for job in jobs for each in (job.base, job.expert)]
        with open_files(store, inputs, checkpoints) as files:
            pack_all(builders, files, threads, counter.add)
        published, errors = _published(builders)
        if errors:
            raise errors[0]  # inside, so that what is durable of it is kept where that helps
    seconds = time.perf_counter() - started
    facts = [packed_facts(store, builder.job, is_new=True) for builder in published]
    return {
        each.store: changed(each, seconds=seconds * each.tensor_bytes / max(total, 1), went_on_bytes=builder.done_bytes)
        for builder, each in zip(published, facts, strict=True)
    }


def _published(builders: Sequence[StoreBuilder]) -> tuple[list[StoreBuilder], list[MergePipeError]]:
    published, errors = [], []
    for builder in builders:
        try:
            builder.finish()
            builder.publish()
            published.append(builder)
        except MergePipeError as error:
            errors.append(error)
    return published, errors


class _Counter:
    """Reports bytes of experts as they are packed."""

    def __init__(self, on_progress: ProgressCallback | None, done_bytes: int, total_bytes: int) -> None:
        self._on_progress = on_progress
        self._done_bytes = done_bytes
        self._total_bytes = total_bytes

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(Progress("pack", self._done_bytes, self._total_bytes))


def _kept_files(expert: Checkpoint) -> tuple[FileFingerprint, ...]:
    """Every other file of the expert's directory, at any depth; none beside a bare file.

    Raises:
        CorruptError: one of them is no regular file, or a link out of the directory.
        NotFoundError: one is a link to nothing.
        UnsupportedError: one has a name that the store uses itself, or is a link to a directory.
    """
    if expert.path != expert.root:
        return ()
    weights = {file.name for file in expert.files}
    kept = []
    for name in sorted(name for name in _walk(expert.root) if name not in weights):
        if name in OWN_NAMES:
            raise UnsupportedError.of(
                "pack.file", expert.root / name, "has a name that delta stores use", "rename the file"
            )
        found = stat_present(expert.root, name)
        kept.append(FileFingerprint(name, found.st_size, version_of(expert.root / name, found), ""))
    return tuple(kept)


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise os_error(error, Path(error.filename), "listing it") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise UnsupportedError.of(
                    "pack.file", Path(folder) / name, "is a link to a directory, and stores keep files only",
                    "remove the link, or copy the directory into its place",
                )  # fmt: skip
        for name in names:
            yield (Path(folder) / name).relative_to(root).as_posix()


def _check_removable(job: PackJob) -> None:
    """Refuse to replace what is only linked from here, and what belongs to the base.

    Raises:
        RecipeError: naming the file.
    """
    expert = job.expert
    base_files = {(job.base.root / file.name).resolve() for file in job.base.files}
    names = [file.name for file in (*expert.files, *job.kept)]
    for place in (expert.path, *(expert.root / name for name in names)):
        if place.is_symlink():
            raise RecipeError.of(
                "pack.replace", place, "is a link: --replace removes only files that stand here", "pack without it"
            )
        if place.resolve() in base_files:
            raise RecipeError.of(
                "pack.replace", place, "is a file of the base, which the store needs", "pack without --replace"
            )


def _check_replaceable(store: LocalStore, job: PackJob, threads: int) -> None:
    """See that a store gives its original back to the byte, and is durable: nothing is removed before.

    Raises:
        CorruptError: the store is damaged.
        ConflictError: the original is not what it holds.
    """
    verify_store(store, job.out, job.base, threads)
    opened = read_store(store, job.out)
    check_same(store, opened, job, threads)
    job.check_unchanged()
    sync_store(opened)
