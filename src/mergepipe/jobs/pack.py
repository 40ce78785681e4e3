"""Pack experts into delta stores in one streaming pass with their base; each store is published all or nothing."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import allow_open_files, open_files
from mergepipe.core.blocks import BlockGrid, element_count
from mergepipe.core.units import positive
from mergepipe.deltastore.checkpoint import MOST_DEPTH, OpenedStore, next_base, read_store
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BANDED_FROM_ELEMENTS, BLOCK_ELEMENTS, Codec
from mergepipe.deltastore.header import PackedEntry
from mergepipe.deltastore.pack.builder import FILES_OF_BUILDER, PackJob, StoreBuilder, open_builder
from mergepipe.deltastore.pack.encode_pass import EXPERTS_AT_ONCE, pack_all
from mergepipe.deltastore.pack.job import check_names, doubt_about, is_done, job_of, match_base, open_base
from mergepipe.errors import MergePipeError, MismatchError, Problem, RecipeError
from mergepipe.options import PackOptions, home_of, threads_of
from mergepipe.reports import BaseMatch, PackedExpert, PackReport, Progress, ProgressCallback
from mergepipe.snapshots.staging import check_free_space, remove_dead, staging_directory
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def pack_experts(
    bases: Sequence[Location] | None,
    experts: Sequence[Location],
    folder: Location,
    options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackReport:
    """Pack each expert into a store `folder/NAME`, on the nearest of `bases` or on its own; see `api.pack`."""
    started = time.perf_counter()
    home, threads = home_of(options.home), threads_of(options.threads)
    store = Stores()
    if bases is not None and not bases:
        raise RecipeError.of("option.missing", folder, "no base was named", "give one as BASE, or more as --base")
    distinct = {base.normal(): base for base in reversed(bases or ())}  # one named twice would not be told from itself
    candidates = [open_base(store, store.pin(base)) for base in reversed(distinct.values())]
    checkpoints = [open_checkpoint(store, store.pin(location)) for location in experts]
    choices = [match_base(store, checkpoint, candidates) for checkpoint in checkpoints] if candidates else []
    chosen: list[Checkpoint | None] = [None] * len(checkpoints)
    if candidates:
        chosen = [candidates[number] for number, _ in choices]
    jobs = [job_of(store, base, checkpoint, folder, home) for base, checkpoint in zip(chosen, checkpoints, strict=True)]
    matches = {job.place: match for job, (_, match) in zip(jobs, choices, strict=False)}
    check_names(jobs)
    _check_bases(jobs, matches, on_progress, strict=options.strict)
    missing = [job for job in jobs if not is_done(store, job, threads)]
    for job in jobs:
        if job not in missing:
            remove_dead(staging_directory(job.out.absolute()))  # of a run that was killed once all was done
    if missing:
        check_free_space(missing[0].out, max(job.expert.tensor_bytes for job in missing))
    packed: dict[Location, PackedExpert] = {}
    for first in range(0, len(missing), EXPERTS_AT_ONCE):
        packed |= _pack_together(store, missing[first : first + EXPERTS_AT_ONCE], threads, on_progress)
    done = tuple(
        packed.get(job.place) or _packed_facts(job, read_store(store, job.place), is_new=False) for job in jobs
    )
    done = tuple(replace(expert, match=matches.get(job.place)) for job, expert in zip(jobs, done, strict=True))
    usage = store.ledger.usage()
    expert_bytes = usage[Purpose.EXPERT] + usage[Purpose.ANALYSIS]
    return PackReport(
        base=bases[0] if bases else None,
        experts=done,
        base_bytes=usage[Purpose.BASE],
        expert_bytes=expert_bytes,
        seconds=time.perf_counter() - started,
    )


def pack_chain(
    bases: Sequence[Location] | None,
    steps: Sequence[Location],
    folder: Location,
    options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackReport:
    """Pack checkpoints of one run in order, each relative to the one before as packed; see `api.pack`.

    Every `chain`-th is relative to what the chain begins on, so that at most `chain` stores restore one.
    """
    started = time.perf_counter()
    length = positive("--chain", options.chain or 1, MOST_DEPTH)
    if bases is None or len(bases) != 1 or not folder.is_local:
        message = "needs one base, named, and a folder of this machine"
        raise RecipeError.of("option.conflict", "--chain", message, "name what the first checkpoint is packed on")
    reports: list[PackReport] = []
    last = bases[0]
    for step in steps:
        report = pack_experts([next_base(Stores(), last, length)], [step], folder, options, on_progress)
        reports.append(report)
        last = Location.of(report.experts[0].store)
    return PackReport(
        base=bases[0],
        experts=tuple(expert for report in reports for expert in report.experts),
        base_bytes=sum(report.base_bytes for report in reports),
        expert_bytes=sum(report.expert_bytes for report in reports),
        seconds=time.perf_counter() - started,
    )


def _check_bases(
    jobs: Sequence[PackJob],
    matches: Mapping[Location, BaseMatch],
    on_progress: ProgressCallback | None,
    *,
    strict: bool,
) -> None:
    """Tell of bases that are hardly the experts' or were not told from others, before anything is written."""
    doubts = [
        Problem("base.mismatch", str(job.expert.path), doubt, "name its base")
        for job in jobs
        if job.place in matches and (doubt := doubt_about(matches[job.place]))
    ]
    if doubts and strict:
        raise MismatchError(*doubts)
    if doubts and on_progress is not None:
        total = sum(job.expert.tensor_bytes for job in jobs)
        on_progress(Progress("pack", 0, total, tuple(f"{doubt.where}: {doubt.message}" for doubt in doubts)))


def _pack_together(
    store: Store, jobs: Sequence[PackJob], threads: int, on_progress: ProgressCallback | None
) -> dict[Location, PackedExpert]:
    """Pack some experts in one pass and publish each; if one fails, the others are still published."""
    started = time.perf_counter()
    total = sum(job.expert.tensor_bytes for job in jobs)
    inputs = set[Location]().union(*(job.weight_files for job in jobs))
    allow_open_files(len(inputs) + len(jobs) * FILES_OF_BUILDER)
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(open_builder(job, store)) for job in jobs]
        counter = _Counter(on_progress, sum(builder.done_bytes for builder in builders), total)
        counter.add(0)
        checkpoints = [checkpoint for job in jobs for checkpoint in (*job.bases, job.expert)]
        with open_files(store, inputs, checkpoints) as files:
            pack_all(builders, files, threads, counter.add)
        published, errors = _published(builders)
        if errors:
            raise errors[0]  # inside, so that what is durable of it is kept where that helps
    seconds = time.perf_counter() - started
    return {
        place: replace(expert, seconds=seconds * expert.tensor_bytes / max(total, 1))
        for place, expert in published.items()
    }


def _published(builders: Sequence[StoreBuilder]) -> tuple[dict[Location, PackedExpert], list[MergePipeError]]:
    published: dict[Location, PackedExpert] = {}
    errors = []
    for builder in builders:
        try:
            builder.finish()
            expert = _packed_facts(builder.job, builder.read(), is_new=True)
            builder.publish()
            published[builder.job.place] = replace(expert, resumed_bytes=builder.done_bytes)
        except MergePipeError as error:
            errors.append(error)
    return published, errors


class _Counter:
    """Reports packed bytes of experts as progress."""

    def __init__(self, on_progress: ProgressCallback | None, done_bytes: int, total_bytes: int) -> None:
        self._on_progress = on_progress
        self._done_bytes = done_bytes
        self._total_bytes = total_bytes

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(Progress("pack", self._done_bytes, self._total_bytes))


def _packed_facts(job: PackJob, opened: OpenedStore, *, is_new: bool) -> PackedExpert:
    """Describe the store of a job, by its header and index."""
    return PackedExpert(
        expert=job.expert.path,
        store=job.place.local_path if job.place.is_local else job.place,
        tensor_bytes=job.expert.tensor_bytes,
        store_bytes=sum(file.size_bytes for file in opened.fingerprints),
        blocks=_blocks_by_codec(opened),
        outside_bands=_blocks_outside_bands(opened),
        seconds=0.0,
        is_new=is_new,
    )


def _blocks_by_codec(opened: OpenedStore) -> dict[str, int]:
    """Count the blocks of each codec."""
    codecs, counts = np.unique(opened.index.rows["codec"], return_counts=True)
    named = zip((Codec(int(codec)).name.lower() for codec in codecs), counts, strict=True)
    return {name: int(count) for name, count in sorted(named)}


def _blocks_outside_bands(opened: OpenedStore) -> dict[str, int]:
    """Count the blocks of the simpler codecs by reason."""
    reasons: Counter[str] = Counter()
    for tensor in opened.header.tensors:
        for block, span in enumerate(BlockGrid(element_count(tensor.shape), BLOCK_ELEMENTS).spans()):
            codec = opened.index.codec(tensor.first_row + block)
            if codec not in (Codec.SAME, Codec.BANDS) and opened.header.base:
                reasons[_reason_outside_bands(tensor, span.n_elements, codec)] += 1
    return dict(sorted(reasons.items()))


def _reason_outside_bands(tensor: PackedEntry, n_elements: int, codec: Codec) -> str:
    if not tensor.has_base:
        return "no such tensor in the base"
    if tensor.dtype not in BANDED_DTYPES:
        return f"{tensor.dtype.name}, which has no bands"
    if n_elements < BANDED_FROM_ELEMENTS:
        return f"fewer than {BANDED_FROM_ELEMENTS} elements"
    if codec is Codec.STANDALONE:
        return "smaller without the base"
    return "not finite, or no smaller in levels" if codec is Codec.BYTES else "no smaller in any codec"
