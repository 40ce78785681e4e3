"""Decide which experts can be packed, on which base, into which store, and whether a store holds one already."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, TensorEntry, files_of
from mergepipe.checkpoints.directory import (
    is_linked_folder,
    is_packed,
    open_checkpoint,
    require_text_path,
    stat_present,
)
from mergepipe.checkpoints.open_files import decoded, open_files, read_elements
from mergepipe.checkpoints.sharded_tensors import ShardedTensor
from mergepipe.core.blocks import BlockGrid, DTypeKind, Span
from mergepipe.core.units import format_percent
from mergepipe.deltastore.builder import PackJob, file_parts
from mergepipe.deltastore.checkpoint import MOST_DEPTH, OpenedStore, open_packed, read_header, read_store
from mergepipe.deltastore.index import digest, is_own_name
from mergepipe.deltastore.pieces import BLOCK_ELEMENTS, can_be_base_of
from mergepipe.errors import OutputError, RecipeError, UnsupportedError
from mergepipe.reports import BaseMatch
from mergepipe.snapshots.object_upload import check_apart, staging_place
from mergepipe.snapshots.staging import check_target
from mergepipe.storage.contract import FileId, FileKind, Store, map_at_once
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

# --- compare an expert with the bases that it may have been fine-tuned from, by samples of tensors of the same ---


UNRELATED: Final = 2**0.5
"""The relative delta of two independent tensors of equal variance."""
_SAMPLE_BYTES = 4096
_REQUEST_BYTES = 2 * _SAMPLE_BYTES  # a sample that begins inside a page
_MOST_SAMPLES = 256
_LEAST_SAMPLES = 16
_SHARE = 0.001


def doubt_about(match: BaseMatch) -> str:
    """Say why a base may be the wrong one; empty if nothing speaks against it."""
    if not match.n_samples:
        return f"{match.base} is used as its base without a comparison: it has no floating-point tensor to compare"
    if match.is_doubtful:
        size = format_percent(match.relative_delta)
        return (
            f"{match.base} is probably not its base: deltas have {size} of the size of the weights, so little is saved"
        )
    if not match.is_sure and match.next_delta is not None:
        return (
            f"{match.base} is used as its base, deltas of {format_percent(match.relative_delta)} of the weights, but "
            f"{match.next_base} is equally near: {format_percent(match.next_delta)}"
        )
    return ""


def match_base(store: Store, expert: Checkpoint, candidates: Sequence[Checkpoint]) -> tuple[int, BaseMatch]:
    """Find the candidate that an expert is nearest to; return its number and how sure that is.

    Reads the same samples of the expert and of each candidate: at most 0.1 % of the expert's bytes, or 128 KiB. An
    expert without a floating-point tensor is taken as equal to the first candidate.
    """
    spans = tuple(sample_spans(expert))
    if not spans:
        return 0, BaseMatch(candidates[0].path, 0.0, 0)
    weights_S, deltas_CS = _squares(store, expert, candidates, spans)
    total = float(weights_S.sum())
    relative_C = [float(np.sqrt(deltas_S.sum() / total)) if total else 0.0 for deltas_S in deltas_CS]
    order = sorted(range(len(candidates)), key=lambda c: (relative_C[c], c))
    best = order[0]
    nearest = float((deltas_CS[best] <= deltas_CS.min(axis=0)).mean())
    match = BaseMatch(candidates[best].path, relative_C[best], len(spans), nearest)
    if len(order) == 1:
        return best, match
    following = order[1]
    return best, BaseMatch(
        match.base, match.relative_delta, len(spans), nearest, candidates[following].path, relative_C[following]
    )


def sample_spans(expert: Checkpoint) -> Iterator[tuple[str, Span]]:
    """Yield the spans to compare, at equal distances over all floating-point tensors in the order of their names."""
    names = sorted(name for name, tensor in expert.tensors.items() if tensor.dtype.kind is DTypeKind.FLOAT)
    tensors = [expert.tensors[name] for name in names if expert.tensors[name].n_elements]
    sizes = [tensor.n_elements * tensor.dtype.itemsize for tensor in tensors]
    ends = list(accumulate(sizes))
    if not ends:
        return
    wanted = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, int(_SHARE * ends[-1] / _REQUEST_BYTES)))
    n_samples = max(1, min(wanted, ends[-1] // _SAMPLE_BYTES))
    for number in range(n_samples):
        at = ends[-1] * (2 * number + 1) // (2 * n_samples)
        place = bisect_right(ends, at)
        tensor, size = tensors[place], tensors[place].dtype.itemsize
        n_elements = min(_SAMPLE_BYTES // size, tensor.n_elements)
        start = min((at - (ends[place] - sizes[place])) // size, tensor.n_elements - n_elements)
        yield tensor.name, Span(start, start + n_elements)


def _squares(
    store: Store, expert: Checkpoint, candidates: Sequence[Checkpoint], spans: Sequence[tuple[str, Span]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum up the squares of the weights' deviations, by sample, and of the deltas, by candidate and sample."""
    checkpoints = (expert, *candidates)
    present = [
        checkpoint.tensors[name] for checkpoint in checkpoints for name, _ in spans if name in checkpoint.tensors
    ]
    weights_S, deltas_CS = np.zeros(len(spans)), np.zeros((len(candidates), len(spans)))
    with open_files(store, files_of(present), checkpoints) as files:

        def compare(number: int) -> None:
            name, span = spans[number]
            tensor = expert.tensors[name]
            values = _values(tensor, span, files)
            weights_S[number] = _square_sum(values - values.mean())
            for c, candidate in enumerate(candidates):
                other = candidate.tensors.get(name)
                if other is None or other.shape != tensor.shape or not can_be_base_of(other.dtype, tensor.dtype):
                    deltas_CS[c, number] = UNRELATED**2 * weights_S[number]
                else:
                    deltas_CS[c, number] = _square_sum(values - _values(other, span, files))

        map_at_once(store, [checkpoint.path for checkpoint in checkpoints], compare, range(len(spans)))
    return weights_S, deltas_CS


def _values(tensor: Readable, span: Span, files: Mapping[Location, RangeFile]) -> NDArray[np.float64]:
    values = decoded(read_elements(tensor, span, files, Purpose.METADATA), tensor.dtype.kernel_code)
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float64)  # a cast warns of signalling NaNs


def _square_sum(values: NDArray[np.float64]) -> float:
    return float(values @ values)


# --- decide which experts can be packed, into which store, and whether a store holds one already ---


_SUFFIX = ".safetensors"


def open_base(store: Store, path: Location) -> Checkpoint:
    """Open the checkpoint that experts are packed relative to; it may be packed itself."""
    require_text_path(path)
    if is_packed(store, path):
        return open_packed(store, path)[1]
    base = open_checkpoint(store, path)
    if base.kind is not CheckpointKind.FULL:
        message = "holds differences from a base, not weights"
        raise UnsupportedError.of("pack.unsupported", path, message, "name its base")
    refuse_shards(base)
    return base


def refuse_shards(checkpoint: Checkpoint) -> None:
    """Refuse tensors that are stored in several ranges: a packed one keeps the header of a file of whole tensors."""
    if any(isinstance(tensor, ShardedTensor) for tensor in checkpoint.tensors.values()):
        message = "its tensors are stored in shards by rank"
        hint = "make a model of it first: mergepipe tailor export"
        raise UnsupportedError.of("pack.unsupported", checkpoint.path, message, hint)


def job_of(store: Store, base: Checkpoint | None, expert: Checkpoint, folder: Location, home: Path) -> PackJob:
    """The job of packing an expert, relative to `base` if any, under its name in `folder`.

    One in a bucket is staged in `home`.
    """
    require_text_path(expert.path)
    reason = reason_against(expert)
    if reason:
        raise UnsupportedError.of("pack.unsupported", expert.path, reason, "pack full weights in .safetensors files")
    real_path = store.real_path(expert.path) or expert.path
    place = folder / real_path.model_name.removesuffix(_SUFFIX)
    out = place.local_path if place.is_local else staging_place(place, home)
    inputs = (expert.path,) if base is None else (base.path, expert.path)
    if not place.is_local:
        check_apart(place, inputs)
    elif not is_packed(store, place):
        check_target(out, inputs, force=None)
    is_chained = base is not None and base.encoded is not None
    depth = read_header(store, base.path).header.depth + 1 if base is not None and is_chained else 0
    if base is not None and depth > MOST_DEPTH:
        message = f"is at depth {depth - 1} of a chain, stores are packed on those at {MOST_DEPTH - 1} at most"
        raise UnsupportedError.of(
            "pack.unsupported", base.path, message, "name what the chain begins on, or add --chain 8"
        )
    return PackJob.of(base, expert, out, place, _kept_files(store, expert), depth)


def reason_against(expert: Checkpoint) -> str:
    """The reason why a checkpoint cannot be packed with any base; empty if it can."""
    if expert.kind is not CheckpointKind.FULL:
        return "holds differences from a base, not weights"
    unsupported = [file.name for file in expert.file_ids if not file.name.endswith(_SUFFIX)]
    return f"{unsupported[0]} is not a safetensors file" if unsupported else ""


def check_names(jobs: Iterable[PackJob]) -> None:
    """Refuse two experts of the same name."""
    for place, count in Counter(job.place for job in jobs).items():
        if count > 1:
            message = f"{count} experts are named {place.name!r}"
            raise RecipeError.of("option.conflict", place.parent, message, "pack them into different directories")


def is_done(store: Store, job: PackJob, threads: int) -> bool:
    """Whether `job.place` holds this expert packed with this base.

    Weights count as unchanged if their files' versions are the same; otherwise they are read and compared with the
    digests in the store. Other files are always compared by content.
    """
    if not is_packed(store, job.place):
        return False
    opened = read_store(store, job.place)
    header = opened.header
    packed_files = [(f.name, f.size_bytes, f.version, f.header_blake3) for f in header.files]
    present_files = [(f.name, f.size_bytes, f.version, f.header_digest) for f in job.expert.file_ids]
    path = _differing_kept_file(store, opened, job)
    if path is None and packed_files != present_files:
        path = _differing_weights(store, opened, job, threads)
    if path is None and header.base_files != job.base_files:
        path = _differing_base(store, opened, job, threads)
    if path is None:
        job.check_unchanged(store)
        return True
    message = f"holds a store of {header.expert}, packed from other content than {path} has now"
    raise OutputError.of("output.exists", job.place, message, "remove it yourself, or choose another folder")


def _differing_kept_file(store: Store, opened: OpenedStore, job: PackJob) -> Location | None:
    """Find the first file, other than weights, that differs from its copy in the store; reads all of them."""
    present = {file.name: file.size_bytes for file in job.kept}
    kept_files = {file.name: file for file in opened.header.kept}
    for name in sorted(present.keys() | kept_files.keys()):
        path = job.expert.root / name
        if name not in present or name not in kept_files or present[name] != kept_files[name].size_bytes:
            return path
        hasher = blake3()
        for part in file_parts(store, path, present[name]):
            hasher.update(part)
        if hasher.hexdigest(16) != kept_files[name].blake3:
            return path
    return None


def _differing_weights(store: Store, opened: OpenedStore, job: PackJob, threads: int) -> Location | None:
    """Find the first weight file of an expert that differs from what the store was packed from; reads all of them."""
    header = opened.header
    present = {file.name: file for file in job.expert.file_ids}
    packed = {file.name: file for file in header.files}
    for name in sorted(present.keys() | packed.keys()):
        path = job.expert.root / name
        if name not in present or name not in packed or present[name].size_bytes != packed[name].size_bytes:
            return path
        content = store.read_metadata(path, 0, packed[name].header_bytes)
        if blake3(content).hexdigest(16) != packed[name].header_blake3:
            return path
    # Equal headers: both have the same tensors, in the same order.
    entries = [place.entry for place in job.places]
    rows = [place.first_row for place in job.places]
    return _differing_file(store, job.expert, opened.index.rows["expert"], entries, rows, threads)


def _differing_base(store: Store, opened: OpenedStore, job: PackJob, threads: int) -> Location | None:
    """Find the first file of the base with a block that differs from what the store was packed with."""
    if [place.base is not None for place in job.places] != [tensor.has_base for tensor in opened.header.tensors]:
        return (job.base or job.expert).path
    if job.base is None:
        return None
    beside = [(place.base, place.first_row) for place in job.places if place.base is not None]
    entries, rows = [base for base, _ in beside], [row for _, row in beside]
    return _differing_file(store, job.base, opened.index.rows["base"], entries, rows, threads)


def _differing_file(
    store: Store,
    checkpoint: Checkpoint,
    digests: NDArray[np.void],
    entries: Sequence[Readable],
    rows: Sequence[int],
    threads: int,
) -> Location | None:
    """Find the file of the first tensor with a block of another digest; `rows` holds the first rows of the tensors.

    Memory: `threads` blocks.
    """
    with open_files(store, files_of(entries), (checkpoint,)) as files, ThreadPoolExecutor(threads) as pool:
        for entry, first_row in zip(entries, rows, strict=True):

            def is_same(block: int, entry: Readable = entry, first_row: int = first_row) -> bool:
                span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
                content = read_elements(entry, span, files, Purpose.ANALYSIS)
                return bool(digest(content) == digests[first_row + block].tobytes())

            if not all(pool.map(is_same, range(BlockGrid(entry.n_elements, BLOCK_ELEMENTS).n_blocks))):
                return entry.file if isinstance(entry, TensorEntry) else checkpoint.path
    return None


def _kept_files(store: Store, expert: Checkpoint) -> tuple[FileId, ...]:
    """Every other file of the expert's directory, at any depth; none beside a bare file."""
    if expert.path != expert.root:
        return ()
    weights = {file.name for file in expert.file_ids}
    fingerprints = []
    for name in sorted(name for name in _walk(store, expert.root) if name not in weights):
        if is_own_name(name):
            message = "has a name that delta stores use"
            raise UnsupportedError.of("pack.unsupported", expert.root / name, message, "rename the file")
        status = stat_present(store, expert.root, name)
        fingerprints.append(FileId(name, status.size_bytes, status.version, ""))
    return tuple(fingerprints)


def _walk(store: Store, root: Location, prefix: str = "") -> Iterator[str]:
    """Names of files below `root/prefix`, at any depth."""
    folder = root / prefix
    for entry in store.list(folder):
        if entry.kind is not FileKind.FOLDER:
            yield prefix + entry.name
            continue
        if is_linked_folder(store, folder, entry.name):
            message = "is a link to a directory, and stores keep files only"
            hint = "remove the link, or copy the directory into its place"
            raise UnsupportedError.of("pack.unsupported", folder / entry.name, message, hint)
        yield from _walk(store, root, f"{prefix}{entry.name}/")
