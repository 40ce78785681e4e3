"""Pack experts into delta stores in one streaming pass with their base; each store is published all or nothing.

Unpack a store to the files that it was made from, byte for byte, or verify that this can be done.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.content_id import PassingContentId
from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import check_unchanged, open_files, read_span
from mergepipe.core.blocks import BlockGrid, Span, element_count
from mergepipe.core.flags import public_call, several
from mergepipe.core.units import positive
from mergepipe.deltastore.builder import FILES_OF_BUILDER, PackJob, file_parts, open_builder, write_kept
from mergepipe.deltastore.checkpoint import (
    MOST_DEPTH,
    OpenedStore,
    next_base,
    open_packed,
    original_checkpoint,
    read_original_header,
    read_store,
)
from mergepipe.deltastore.encode_pass import EXPERTS_AT_ONCE, pack_all
from mergepipe.deltastore.index import HEADER_NAME, HEADERS_NAME, PackedEntry, digest
from mergepipe.deltastore.job import check_names, doubt_about, is_done, job_of, match_base, open_base, refuse_shards
from mergepipe.deltastore.pieces import BANDED_DTYPES, BANDED_FROM_ELEMENTS, BLOCK_ELEMENTS, Codec, RawBytes, corrupt
from mergepipe.deltastore.tensor import PackedFetch
from mergepipe.errors import CorruptError, MergePipeError, MismatchError, Problem, RecipeError
from mergepipe.jobs.pack_sparse import is_sparse, pack_sparse, unpack_sparse
from mergepipe.options import PackOptions, UnpackOptions, home_of, threads_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.reports import (
    BaseMatch,
    ByteProgress,
    Damage,
    PackedExpert,
    PackReport,
    Progress,
    ProgressCallback,
    UnpackReport,
    VerifyReport,
)
from mergepipe.snapshots.staging import Staging, check_free_space, check_target, remove_dead, staging_directory
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.output import OutputFile, make_folders
from mergepipe.storage.output_places import ANYWHERE, folder_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.ranges import aligned_buffer, allow_open_files
from mergepipe.storage.remote.hub_commit import HubRepository
from mergepipe.storage.stores import Stores

SPARSE_FORM = "sparse"


@public_call(PackOptions)
def pack(
    base: str | Path | Sequence[str | Path] | None,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    options: PackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PackReport:
    """Pack each expert into a store `out/NAME`, bit for bit; one that is there already is left as it is.

    With `form` "sparse" it is a patch instead: the values that differ and their positions, as TRL sends them to vLLM.

    With `out` in a bucket or on the Hub the stores grow in `home`, which needs room for those of eight experts, and are
    uploaded when they are complete. In a bucket each is visible with its header, which is written last, on the Hub by a
    commit of its own, where the files that it keeps name no paths of this machine.

    All are read in one pass with the base, eight at a time. Every element is decoded again and compared while it is
    packed. An interrupted run is resumed. `on_progress` tells the bytes of experts that are packed.

    Of several bases each expert is packed relative to the nearest one, found from samples: 0.1 % of its bytes, or
    128 KiB. A base that is hardly an expert's is a notice to `on_progress` before anything is written.

    Memory: 100 MiB for reading and as much for what is encoded, 8 MiB an expert, some 6 MiB a thread, whatever the size
    of the models.

    Args:
        base: full weights, or several candidates; a packed expert, too. None packs the models on their own (exponents
            coded, sign and mantissa as they are).
        experts: full weights in safetensors files, fine-tuned from `base`.

    Raises:
        RecipeError: two experts of one name.
        MismatchError: `base.mismatch`, refused by `strict`.
        UnsupportedError: an expert that is no full weights in safetensors files.
        OutputError, ConflictError, StorageError: the store cannot go there, or an input changed. A store is published
            whole or not at all.
    """
    made = PackOptions.of(options, fields)
    place = folder_place(out, ANYWHERE)
    if place.scheme == HUB_SCHEME:
        HubRepository(place)  # refused offline, and without a token, before anything is asked
    threads_of(made.threads)  # refused before anything is looked for
    store = Stores()
    bases = None if base is None else [locate_model(store, model) for model in several(base)]
    paths = [locate_model(store, expert) for expert in several(experts)]
    if made.form == SPARSE_FORM:
        if made.chain is not None:
            message = "sparse patches are each made on the base"
            raise RecipeError.of("option.conflict", "--chain", message, "leave it out, or pack without --to sparse")
        return pack_sparse(bases or [], paths, place, made, on_progress)
    pack_models = _pack_experts if made.chain is None else _pack_chain
    return pack_models(bases, paths, place, made, on_progress)


def _pack_experts(
    bases: Sequence[Location] | None,
    experts: Sequence[Location],
    folder: Location,
    options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackReport:
    """Pack each expert into a store `folder/NAME`, on the nearest of `bases` or on its own."""
    started = time.perf_counter()
    home, threads = home_of(options.home), threads_of(options.threads)
    store = Stores()
    if bases is not None and not bases:
        raise RecipeError.of("option.missing", folder, "no base was named", "give one as BASE, or more as --base")
    distinct = {base.normal(): base for base in reversed(bases or ())}  # one named twice would not be told from itself
    candidates = [open_base(store, store.pin(base)) for base in reversed(distinct.values())]
    checkpoints = [open_checkpoint(store, store.pin(location)) for location in experts]
    for checkpoint in checkpoints:
        refuse_shards(checkpoint)
    choices = [match_base(store, checkpoint, candidates) for checkpoint in checkpoints] if candidates else []
    chosen: list[Checkpoint | None] = [candidates[number] for number, _ in choices] or [None] * len(checkpoints)
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
    return PackReport(
        base=bases[0] if bases else None,
        experts=done,
        base_bytes=usage[Purpose.BASE],
        expert_bytes=usage[Purpose.EXPERT] + usage[Purpose.ANALYSIS],
        seconds=time.perf_counter() - started,
    )


def _pack_chain(
    bases: Sequence[Location] | None,
    steps: Sequence[Location],
    folder: Location,
    options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackReport:
    """Pack checkpoints of one run in order, each relative to the one before as packed.

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
        report = _pack_experts([next_base(Stores(), last, length)], [step], folder, options, on_progress)
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
        counter = ByteProgress(on_progress, "pack", total, sum(builder.done_bytes for builder in builders))
        counter.add(0)
        checkpoints = [checkpoint for job in jobs for checkpoint in (*job.bases, job.expert)]
        with open_files(store, inputs, checkpoints) as files:
            pack_all(builders, files, threads, counter.add)
        published: dict[Location, PackedExpert] = {}
        errors: list[MergePipeError] = []
        for builder in builders:
            try:
                builder.finish()
                expert = _packed_facts(builder.job, builder.read(), is_new=True)
                builder.publish()
                published[builder.job.place] = replace(expert, resumed_bytes=builder.done_bytes)
            except MergePipeError as error:
                errors.append(error)
        if errors:
            raise errors[0]  # inside, so that what is durable of it is kept where that helps
    seconds = time.perf_counter() - started
    return {
        place: replace(expert, seconds=seconds * expert.tensor_bytes / max(total, 1))
        for place, expert in published.items()
    }


def _packed_facts(job: PackJob, opened: OpenedStore, *, is_new: bool) -> PackedExpert:
    """Describe the store of a job, by its header and index."""
    codecs = np.unique(opened.index.rows["codec"], return_counts=True)
    return PackedExpert(
        expert=job.expert.path,
        store=job.place.as_reported,
        tensor_bytes=job.expert.tensor_bytes,
        store_bytes=sum(file.size_bytes for file in opened.fingerprints),
        blocks=dict(sorted((Codec(int(codec)).name.lower(), int(count)) for codec, count in zip(*codecs, strict=True))),
        outside_bands=_blocks_outside_bands(opened),
        seconds=0.0,
        is_new=is_new,
    )


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


# --- unpack a store, or verify it ---


BlockSink = Callable[[RawBytes], None]

_ROOM_BYTES = 8 * BLOCK_ELEMENTS
"""Room for a block of the largest elements, or for several of smaller ones."""


@public_call(UnpackOptions)
def unpack(
    path: str | Path,
    out: str | Path,
    *,
    options: UnpackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> UnpackReport:
    """Write the files that the store in `path` was made from into the new directory `out`, byte for byte.

    Every block is compared with the digest of the original. Of a sparse patch the weights are restored, next to the
    other files of its base. `on_progress` tells the bytes of tensors that are restored.

    Raises:
        NotFoundError: the store, or its base.
        MismatchError: another base.
        CorruptError: the store is damaged.
        OutputError, StorageError: the files cannot go there; nothing was published.
    """
    started, made = time.perf_counter(), UnpackOptions.of(options, fields)
    threads, store = threads_of(made.threads), Stores()
    target = folder_place(out).local_path
    root = locate_model(store, path)
    if is_sparse(store, root):
        return unpack_sparse(root, out, made, on_progress)
    base = None if made.base is None else locate_model(store, made.base)
    opened, checkpoint, bases = open_packed(store, root, base)
    check_target(target, (root, *(base_checkpoint.path for base_checkpoint in bases)), force=None)
    tensor_bytes = sum(entry.nbytes for entry in opened.header.tensors)
    check_free_space(target, tensor_bytes)
    progress = ByteProgress(on_progress, "unpack", tensor_bytes)
    reader = _Reader(opened, checkpoint, threads, checks_pieces=False)
    inputs = open_files(store, files_of(checkpoint.tensors.values()), (*bases, checkpoint))
    with inputs as files, Staging(target, force=False) as staging:
        _write_weights(reader, files, staging.path, store, progress)
        for file in opened.header.kept:
            parts = _kept_parts(opened, file.name, file.size_bytes, file.blake3, store)
            write_kept(store, staging.path / file.name, parts, file.size_bytes)
        check_unchanged(store, (*bases, checkpoint))
        staging.publish()
    return UnpackReport(root, bases[0].path if bases else None, target, tensor_bytes, time.perf_counter() - started)


def verify_pack(
    path: Location, *, base: Location | None, threads: int, on_progress: ProgressCallback | None
) -> VerifyReport:
    """Decode a packed expert and compare it with the digests of the original, tensor by tensor."""
    started, store = time.perf_counter(), Stores()
    opened, checkpoint, bases = open_packed(store, path, base)
    reader = _Reader(opened, checkpoint, threads, checks_pieces=True)
    progress = ByteProgress(on_progress, "verify", sum(entry.nbytes for entry in opened.header.tensors))
    damages: list[Damage] = []
    with open_files(store, files_of(checkpoint.tensors.values()), (*bases, checkpoint)) as files:
        for name, tensor, nbytes, check in _checks(reader, files, store):
            try:
                check()
            except CorruptError as error:
                damages.append(Damage("pack", name, tensor, 0, 0, error.problems[0].message))
            progress.add(nbytes)
        check_unchanged(store, (*bases, checkpoint))
    usage = store.ledger.usage()
    return VerifyReport(
        path=path.as_reported,
        sid=opened.header.content_id,
        files=len(opened.header.files) + len(opened.header.kept),
        tensors=len(opened.header.tensors),
        blocks=len(opened.index.rows),
        read_bytes=usage.total_bytes,
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )


def _checks(
    reader: _Reader, files: Mapping[Location, RangeFile], store: Store
) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Yield the comparisons with the original: of which file, tensor if any, and bytes, and what compares them."""
    header = reader.opened.header
    for number in range(len(header.files)):
        yield (HEADERS_NAME, "", 0, partial(read_original_header, store, reader.opened, number))
    for entry in header.tensors:
        name = header.files[entry.file].name
        yield (name, entry.name, entry.nbytes, partial(reader.read, files, [entry], lambda _: None))
    for file in header.kept:
        parts = _kept_parts(reader.opened, file.name, file.size_bytes, file.blake3, store)
        yield (file.name, "", 0, partial(deque, parts, 0))
    yield (HEADER_NAME, "", 0, reader.check_content_id)


class _Reader:
    """Reads a store in order, decoding ahead in several threads. Memory: `2 * threads + 1` rooms.

    All blocks are compared with the digests of the original's; with `checks_pieces` what they are decoded from as well,
    which also finds damage in bytes that only approximations need.
    """

    def __init__(self, opened: OpenedStore, checkpoint: Checkpoint, threads: int, *, checks_pieces: bool) -> None:
        self.opened = opened
        self._checkpoint = checkpoint
        self._threads = threads
        self._checks_pieces = checks_pieces
        self._identity = PassingContentId(original_checkpoint(opened))

    def check_content_id(self) -> None:
        """Compare the id on record with that of the tensors, once all were read."""
        if self._identity.missing_files:
            return  # a tensor is damaged: that was told
        content_id, claimed = self._identity.value({}), self.opened.header.content_id
        if content_id != claimed:
            raise corrupt(self.opened.root / HEADER_NAME, f"content_id is {claimed}, that of its tensors {content_id}")

    def read(self, files: Mapping[Location, RangeFile], entries: Iterable[PackedEntry], sink: BlockSink) -> None:
        """Pass the blocks of tensors to `sink` in order, each checked against the original's digest.

        A block is valid until `sink` returns.
        """
        pending: deque[tuple[RawBytes, Future[RawBytes]]] = deque()
        rooms = [aligned_buffer(_ROOM_BYTES) for _ in range(2 * self._threads + 1)]  # fresh ones cost page faults
        with ThreadPoolExecutor(self._threads) as pool:
            for entry, block, span in _runs_of(entries):
                if not rooms:
                    rooms.append(_pass_on(*pending.popleft(), sink))
                tensor, room = self._checkpoint.tensors[entry.name], rooms.pop()
                content = room[: span.n_elements * tensor.dtype.itemsize]
                row = entry.first_row + block
                pending.append((room, pool.submit(self._blocks, files, tensor, span, row, content)))
            while pending:
                _pass_on(*pending.popleft(), sink)

    def _blocks(
        self, files: Mapping[Location, RangeFile], tensor: Readable, span: Span, row: int, content: RawBytes
    ) -> RawBytes:
        """Read blocks from `row` on."""
        if self._checks_pieces or not self._is_restored(files, tensor, span, row, content):
            if isinstance(tensor, TensorEntry):
                content[:] = read_span(tensor, span, files, Purpose.EXPERT)
            else:
                tensor.opened(files)(span, content, Purpose.EXPERT)
            self._check(tensor, span, row, content)
        self._identity.show(tensor.name, span.start * tensor.dtype.itemsize, content)
        return content

    def _is_restored(
        self, files: Mapping[Location, RangeFile], tensor: Readable, span: Span, row: int, content: RawBytes
    ) -> bool:
        """Whether encoded blocks decode to what was packed; otherwise reading them again tells what is damaged."""
        fetch = None if isinstance(tensor, TensorEntry) else tensor.opened(files)
        if not isinstance(fetch, PackedFetch):
            return False
        try:
            fetch.unchecked(span, content, Purpose.EXPERT)
            self._check(tensor, span, row, content)
        except CorruptError:
            return False
        return True

    def _check(self, tensor: Readable, span: Span, row: int, content: RawBytes) -> None:
        """Compare blocks with the digests of the original's."""
        block_bytes = BLOCK_ELEMENTS * tensor.dtype.itemsize
        for block, start in enumerate(range(0, len(content), block_bytes)):
            if digest(content[start : start + block_bytes]) != self.opened.index.rows["expert"][row + block].tobytes():
                element = span.start + block * BLOCK_ELEMENTS
                raise corrupt(
                    self.opened.root, f"tensor {tensor.name!r} from element {element} on is not what was packed"
                )


def _runs_of(entries: Iterable[PackedEntry]) -> Iterator[tuple[PackedEntry, int, Span]]:
    """The blocks of tensors in order, as many at a time as a room holds, with the number of the first."""
    for entry in entries:
        n_elements, step = element_count(entry.shape), _ROOM_BYTES // (BLOCK_ELEMENTS * entry.dtype.itemsize)
        for run, span in enumerate(BlockGrid(n_elements, step * BLOCK_ELEMENTS).spans()):
            yield entry, run * step, span


def _pass_on(room: RawBytes, block: Future[RawBytes], sink: BlockSink) -> RawBytes:
    """Wait for a block and pass it on; return its room."""
    sink(block.result())
    return room


def _write_weights(
    reader: _Reader, files: Mapping[Location, RangeFile], directory: Path, store: Store, progress: ByteProgress
) -> None:
    header = reader.opened.header
    for number, packed in enumerate(header.files):
        target = directory / packed.name
        make_folders(target.parent)
        with OutputFile(target, packed.size_bytes, store.ledger) as output:
            output.append(read_original_header(store, reader.opened, number))

            def take(content: RawBytes, output: OutputFile = output) -> None:
                output.append(content)
                progress.add(len(content))

            reader.read(files, [entry for entry in header.tensors if entry.file == number], take)
            output.close()


def _kept_parts(opened: OpenedStore, name: str, size_bytes: int, blake3_hex: str, store: Store) -> Iterator[bytes]:
    """Yield the content of a kept file; check its digest at the end."""
    hasher = blake3()
    for part in file_parts(store, opened.root / name, size_bytes):
        hasher.update(part)
        yield part
    if hasher.hexdigest(16) != blake3_hex:
        raise corrupt(opened.root / name, "is not the file that was packed")
