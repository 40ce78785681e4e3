"""Delta checkpoints: made from a base and an expert, and applied to the base to give the expert back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.blocks import BF16, F32, BlockGrid, DType, DTypeKind, Span, element_count
from mergepipe.budget import Purpose
from mergepipe.errors import CorruptError, MismatchError, UnsupportedError
from mergepipe.kernels.deltas import add_delta, compare, make_delta
from mergepipe.publish import Staging, check_free_space, check_target
from mergepipe.readers.base import Checkpoint, CheckpointKind, Readable, files_of
from mergepipe.readers.choosing import names_shown
from mergepipe.readers.delta_mark import DeltaMark
from mergepipe.reports import Progress, ProgressCallback
from mergepipe.sources.delta_record import RECORD_NAME, DeltaRecord, Form, TensorRecord, read_delta_record
from mergepipe.sources.identity import base_digest
from mergepipe.sources.opening import open_model
from mergepipe.sources.ranges import SpanReader, reader_of
from mergepipe.storage.base import RangeFile
from mergepipe.storage.local import LocalStore
from mergepipe.storage.output import make_folders, write_durably
from mergepipe.workflows.inputs import check_unchanged, open_files
from mergepipe.workflows.sidecars import read_sidecars
from mergepipe.writer import INDEX_NAME, ShardLayout, ShardWriter, TensorSpec, index_json, plan_shards

CHUNK_ELEMENTS = 1 << 20
CHUNKS_AHEAD = 6
_READER_THREADS = 8
SHARD_BYTES = 5_000_000_000
_SIDECAR_MARGIN_BYTES = 16 << 20
_NO_DIGEST = ""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """What was made: how many tensors in which form, and what base + delta does not give back bit for bit."""

    out: Path
    as_delta: int
    unchanged: int
    in_full: int
    inexact: tuple[TensorRecord, ...]
    expert_bytes: int
    stored_bytes: int
    seconds: float

    @property
    def differing_elements(self) -> int:
        return sum(tensor.differing for tensor in self.inexact)

    @property
    def worst(self) -> float:
        """The largest finite distance between an element of the expert and what is given back."""
        return max((tensor.worst for tensor in self.inexact), default=0.0)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model by its place."""

    path: Path
    adapter: Path | None = None
    is_delta: bool = False


def write_delta(
    base_path: Path,
    expert_path: Path,
    out: Path,
    *,
    exact: bool = False,
    force: bool = False,
    on_progress: ProgressCallback | None = None,
) -> DeltaReport:
    """Publish at `out` what the expert differs by from the base, tensor by tensor, bound to that base.

    Each difference is in the narrowest dtype with which base + difference is the expert bit for bit; where none is,
    in float32, or with `exact` the expert's tensor in full. Both models are read twice. Memory: some 100 MB.

    Raises:
        MismatchError: the expert lacks a tensor of the base.
        UnsupportedError: one of them is not full weights.
        OutputError, StorageError, ConflictError: as a merge.
    """
    started = time.perf_counter()
    store = LocalStore()
    base = _open_full(store, base_path, None)
    expert = _open_full(store, expert_path, base)
    _check_complete(base, expert)
    check_target(out, [base.path, expert.path], force=force)
    check_free_space(out, expert.tensor_bytes + _SIDECAR_MARGIN_BYTES)
    with _Opened(store, (base, expert), _Meter("delta", (base, expert), 2, on_progress)) as stream:
        records = tuple(
            _surveyed(stream, base.tensors.get(name), tensor, exact=exact) for name, tensor in expert.tensors.items()
        )
        record = DeltaRecord(str(base.path), base_digest(store, base), str(expert.path), records)
        shards = _delta_shards(record)
        record = replace(record, files=_file_names(expert, shards, "delta"))
        stream.meter.reach(0.5)
        with Staging(out, force=force) as staging:
            with ShardWriter(staging.path, shards, store.ledger) as writer:
                forms = {each.name: each for each in records}
                for name in (spec.name for shard in shards for spec in shard.tensors):
                    _write_change(stream, writer, base.tensors.get(name), expert.tensors[name], forms[name])
                writer.finish()
            _write_small_files(store, staging.path, expert, {RECORD_NAME: record.to_json()}, shards, "delta")
            check_unchanged((base, expert))
            staging.publish()
        stream.meter.reach(1.0)
    return _report(out, records, shards, time.perf_counter() - started)


def apply_delta(
    base_path: Path, delta_path: Path, out: Path, *, on_progress: ProgressCallback | None = None
) -> DeltaReport:
    """Publish at `out` the expert that a delta checkpoint was made from, checked against its digests.

    A delta without a record of its own gives tensors in the base's dtypes, unchecked. Memory: some 100 MB.

    Raises:
        MismatchError: the delta belongs to another base.
        CorruptError: the result is not the expert.
        OutputError, StorageError, ConflictError: as a merge.
    """
    started = time.perf_counter()
    store = LocalStore()
    base = _open_full(store, base_path, None)
    delta = open_model(store, _Model(delta_path), base)
    if delta.kind is not CheckpointKind.DELTA:
        raise UnsupportedError.of("delta.kind", delta_path, f"holds {delta.kind.value} tensors, no differences")
    records = _records_of(store, base, delta)
    shards = plan_shards([TensorSpec(r.name, r.output_dtype, r.shape) for r in records], SHARD_BYTES)
    check_target(out, [base.path, delta.path], force=None)
    check_free_space(out, sum(shard.file_bytes for shard in shards) + _SIDECAR_MARGIN_BYTES)
    by_name = {record.name: record for record in records}
    meter = _Meter("apply", (base, delta), 1, on_progress)
    with _Opened(store, (base, delta), meter) as stream, Staging(out, force=False) as staging:
        with ShardWriter(staging.path, shards, store.ledger) as writer:
            for spec in (spec for shard in shards for spec in shard.tensors):
                _write_applied(stream, writer, base, delta, by_name[spec.name])
            writer.finish()
        sidecars = delta if delta.sidecars else base
        _write_small_files(store, staging.path, sidecars, {}, shards, "model")
        check_unchanged((base, delta))
        staging.publish()
        stream.meter.reach(1.0)
    return _report(out, records, shards, time.perf_counter() - started)


def _open_full(store: LocalStore, path: Path, base: Checkpoint | None) -> Checkpoint:
    opened = open_model(store, _Model(path), base)
    if opened.kind is not CheckpointKind.FULL:
        raise UnsupportedError.of("delta.full", path, f"holds {opened.kind.value} tensors, full weights are needed")
    return opened


def _check_complete(base: Checkpoint, expert: Checkpoint) -> None:
    lacking = [name for name in base.tensors if name not in expert.tensors]
    if lacking:
        raise MismatchError.of("delta.missing", expert.path, f"lacks {names_shown(lacking)} of the base")


# -- streaming -----------------------------------------------------------------------------------------------------


class _Meter:
    """Tells how far reading all tensors of some checkpoints, once or twice, has come."""

    def __init__(
        self, phase: str, checkpoints: Sequence[Checkpoint], passes: int, on_progress: ProgressCallback | None
    ) -> None:
        self._phase = phase
        self._total_bytes = passes * sum(checkpoint.tensor_bytes for checkpoint in checkpoints)
        self._done_bytes = 0
        self._on_progress = on_progress

    def advance(self, n_bytes: int) -> None:
        self._done_bytes = min(self._done_bytes + n_bytes, self._total_bytes)
        if self._on_progress is not None:
            self._on_progress(Progress(self._phase, self._done_bytes, self._total_bytes))

    def reach(self, share: float) -> None:
        """A pass is over, whatever of it was read more than once or not at all."""
        self._done_bytes = round(share * self._total_bytes)
        self.advance(0)


class _Stream:
    """Reads tensors chunk by chunk, some chunks ahead. Memory: `CHUNKS_AHEAD + 1` chunks of each tensor."""

    def __init__(self, files: Mapping[Path, RangeFile], pool: ThreadPoolExecutor, meter: _Meter) -> None:
        self.meter = meter
        self._files = files
        self._pool = pool

    def chunks(self, *tensors: tuple[Readable, Purpose]) -> Iterator[tuple[Bytes, ...]]:
        """The bytes of the same elements of each tensor, from start to end."""
        readers = [(reader_of(tensor, self._files), purpose) for tensor, purpose in tensors]
        ahead: deque[list[Future[Bytes]]] = deque()
        for span in BlockGrid(tensors[0][0].n_elements, CHUNK_ELEMENTS).spans():
            ahead.append([self._pool.submit(_read, reader, span, purpose) for reader, purpose in readers])
            if len(ahead) > CHUNKS_AHEAD:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    def _next(self, ahead: deque[list[Future[Bytes]]]) -> tuple[Bytes, ...]:
        chunks = tuple(each.result() for each in ahead.popleft())
        self.meter.advance(sum(map(len, chunks)))
        return chunks


def _read(reader: SpanReader, span: Span, purpose: Purpose) -> Bytes:
    return reader(span, purpose)


class _Opened:
    """Opens the files of some checkpoints for a `_Stream`; a context manager."""

    def __init__(self, store: LocalStore, checkpoints: Sequence[Checkpoint], meter: _Meter) -> None:
        self._meter = meter
        tensors = (tensor for checkpoint in checkpoints for tensor in checkpoint.tensors.values())
        self._files = open_files(store, files_of(tensors), checkpoints)
        self._pool = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="mergepipe-delta")

    def __enter__(self) -> _Stream:
        return _Stream(self._files.__enter__(), self._pool, self._meter)

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.__exit__(None, None, None)


# -- making ----------------------------------------------------------------------------------------------------------


class _Trial:
    """Tries one dtype for a difference: how many elements it does not give back, and by how much at most."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.differing = np.zeros(1, np.int64)
        self.worst = np.zeros(1, np.float64)

    def add(self, base: Bytes, base_code: int, expert: Bytes, expert_dtype: DType) -> None:
        code = expert_dtype.kernel_code
        delta = np.empty(len(expert) // expert_dtype.itemsize * self.dtype.itemsize, np.uint8)
        again = np.empty(len(expert), np.uint8)
        make_delta(base, base_code, expert, code, delta, self.dtype.kernel_code)
        add_delta(base, base_code, delta, self.dtype.kernel_code, again, code)
        compare(again, expert, code, self.differing, self.worst)


def candidates(dtype: DType) -> tuple[DType, ...]:
    """Dtypes to try for the differences of an expert's tensor, narrowest first; float32 is always the last."""
    narrow = {1: (dtype, BF16), 2: (dtype,)}.get(dtype.itemsize, ())
    return (*narrow, F32)


def _surveyed(stream: _Stream, base: Readable | None, expert: Readable, *, exact: bool) -> TensorRecord:
    """Read both tensors and decide how the delta checkpoint has the expert's."""
    if base is None or base.shape != expert.shape:
        return _record(expert, Form.FULL, _digest(stream, expert))
    if base.dtype.kind is not DTypeKind.FLOAT or expert.dtype.kind is not DTypeKind.FLOAT:
        is_same = base.dtype == expert.dtype and _digest(stream, base) == _digest(stream, expert)
        return _record(expert, Form.SAME if is_same else Form.FULL, _digest(stream, expert))
    *narrower, widest = (_Trial(dtype) for dtype in candidates(expert.dtype))
    for trial in narrower:
        tried = _tried(stream, base, expert, trial, until_wrong=True)
        if tried is not None:
            return tried
    tried = _tried(stream, base, expert, widest, until_wrong=False)
    assert tried is not None
    return _record(expert, Form.FULL, tried.blake3) if exact and not tried.is_exact else tried


def _tried(
    stream: _Stream, base: Readable, expert: Readable, trial: _Trial, *, until_wrong: bool
) -> TensorRecord | None:
    """Try one dtype on all elements; None as soon as one is wrong, if that ends it."""
    hasher, is_same = blake3(), base.dtype == expert.dtype
    for base_raw, raw in stream.chunks((base, Purpose.BASE), (expert, Purpose.EXPERT)):
        hasher.update(raw.data)
        is_same = is_same and np.array_equal(base_raw, raw)
        trial.add(base_raw, base.dtype.kernel_code, raw, expert.dtype)
        if until_wrong and trial.differing[0]:
            return None
    if is_same:
        return _record(expert, Form.SAME, hasher.hexdigest(16))
    made = _record(expert, Form.DELTA, hasher.hexdigest(16))
    differing, worst = int(trial.differing[0]), float(trial.worst[0])
    return replace(made, stored_dtype=trial.dtype.name, differing=differing, worst=worst)


def _digest(stream: _Stream, tensor: Readable) -> str:
    hasher = blake3()
    for (raw,) in stream.chunks((tensor, Purpose.EXPERT)):
        hasher.update(raw.data)
    return hasher.hexdigest(16)


def _record(expert: Readable, form: Form, digest: str) -> TensorRecord:
    return TensorRecord(expert.name, expert.dtype.name, expert.shape, form, expert.dtype.name, 0, 0.0, digest)


def _delta_shards(record: DeltaRecord) -> tuple[ShardLayout, ...]:
    stored = [tensor for tensor in record.tensors if tensor.form is not Form.SAME]
    full = frozenset(tensor.name for tensor in stored if tensor.form is Form.FULL)
    specs = [TensorSpec(t.name, t.storage_dtype, t.shape) for t in stored]
    shards = plan_shards(specs, SHARD_BYTES, DeltaMark(record.base_digest, full).to_metadata())
    # Under a name of their own, no loader takes differences for weights.
    return tuple(replace(shard, name=shard.name.replace("model", "delta", 1)) for shard in shards)


def _write_change(
    stream: _Stream, writer: ShardWriter, base: Readable | None, expert: Readable, record: TensorRecord
) -> None:
    if record.form is Form.FULL or base is None:
        for (raw,) in stream.chunks((expert, Purpose.EXPERT)):
            writer.append(raw)
        return
    dtype = record.storage_dtype
    for base_raw, raw in stream.chunks((base, Purpose.BASE), (expert, Purpose.EXPERT)):
        out = np.empty(len(raw) // expert.dtype.itemsize * dtype.itemsize, np.uint8)
        make_delta(base_raw, base.dtype.kernel_code, raw, expert.dtype.kernel_code, out, dtype.kernel_code)
        writer.append(out)


# -- applying --------------------------------------------------------------------------------------------------------


def _records_of(store: LocalStore, base: Checkpoint, delta: Checkpoint) -> tuple[TensorRecord, ...]:
    """What the result is made of: as the delta's own record says, else every tensor of base and delta."""
    path = delta.root / RECORD_NAME
    if path.is_file():
        records = read_delta_record(store, path).tensors
        for record in records:
            _check_record(path, base, delta, record)
        return records
    names = [*base.tensors, *(name for name in delta.tensors if name not in base.tensors)]
    return tuple(_assumed(base.tensors.get(name), delta.tensors.get(name)) for name in names)


def _assumed(base: Readable | None, change: Readable | None) -> TensorRecord:
    if change is None or base is None:
        only = change if base is None else base
        assert only is not None
        return _record(only, Form.FULL if base is None else Form.SAME, _NO_DIGEST)
    if not change.is_delta:
        return _record(change, Form.FULL, _NO_DIGEST)
    return replace(_record(base, Form.DELTA, _NO_DIGEST), stored_dtype=change.dtype.name)


def _check_record(path: Path, base: Checkpoint, delta: Checkpoint, record: TensorRecord) -> None:
    """Hold one tensor of the record against what is there."""
    needed = {Form.SAME: (base,), Form.FULL: (delta,), Form.DELTA: (base, delta)}[record.form]
    for checkpoint in needed:
        found = checkpoint.tensors.get(record.name)
        if found is None or found.shape != record.shape:
            what = "is not there" if found is None else f"has shape {list(found.shape)}"
            needed_shape = f"{list(record.shape)} is needed"
            raise MismatchError.of(
                "delta.record.tensor", path, f"'{record.name}' {what} in {checkpoint.path}, {needed_shape}"
            )
    change = delta.tensors.get(record.name)
    is_delta = None if change is None else change.is_delta
    if is_delta != {Form.SAME: None, Form.FULL: False, Form.DELTA: True}[record.form]:
        raise CorruptError.of("delta.record.tensor", path, f"'{record.name}' is not stored as '{record.form.value}'")


def _write_applied(
    stream: _Stream, writer: ShardWriter, base: Checkpoint, delta: Checkpoint, record: TensorRecord
) -> None:
    hasher = blake3()
    for raw in _applied(stream, base.tensors.get(record.name), delta.tensors.get(record.name), record):
        hasher.update(raw.data)
        writer.append(raw)
    if record.blake3 != _NO_DIGEST and record.is_exact and hasher.hexdigest(16) != record.blake3:
        raise CorruptError.of(
            "delta.result", delta.path,
            f"'{record.name}' does not come out as the expert's: {base.path} or this has changed",
            "use the base it was made from",
        )  # fmt: skip


def _applied(stream: _Stream, base: Readable | None, change: Readable | None, record: TensorRecord) -> Iterator[Bytes]:
    """The bytes of one tensor of the result."""
    if base is None or change is None or record.form is not Form.DELTA:
        source = base if record.form is Form.SAME else change
        assert source is not None
        yield from (raw for (raw,) in stream.chunks((source, Purpose.BASE)))
        return
    dtype = record.output_dtype
    for base_raw, raw in stream.chunks((base, Purpose.BASE), (change, Purpose.EXPERT)):
        out = np.empty(len(raw) // change.dtype.itemsize * dtype.itemsize, np.uint8)
        add_delta(base_raw, base.dtype.kernel_code, raw, change.dtype.kernel_code, out, dtype.kernel_code)
        yield out


# -- files -----------------------------------------------------------------------------------------------------------


def _write_small_files(
    store: LocalStore,
    directory: Path,
    model: Checkpoint,
    own: Mapping[str, bytes],
    shards: Sequence[ShardLayout],
    stem: str,
) -> None:
    """Write the model's configuration and tokenizer, the index and what is given."""
    contents = {**own, **read_sidecars(model, store)}
    if len(shards) > 1:
        contents[_index_name(stem)] = index_json(shards)
    for name, content in sorted(contents.items()):
        make_folders((directory / name).parent)
        write_durably(directory / name, content, store.ledger)


def _file_names(model: Checkpoint, shards: Sequence[ShardLayout], stem: str) -> tuple[str, ...]:
    """The names of the files of a checkpoint that is written beside a model's configuration and tokenizer."""
    index = [_index_name(stem)] if len(shards) > 1 else []
    return tuple(sorted({*(shard.name for shard in shards), *model.sidecars, *index}))


def _index_name(stem: str) -> str:
    return INDEX_NAME.replace("model", stem, 1)


def _report(out: Path, records: Sequence[TensorRecord], shards: Sequence[ShardLayout], seconds: float) -> DeltaReport:
    forms = [record.form for record in records]
    return DeltaReport(
        out=out,
        as_delta=forms.count(Form.DELTA),
        unchanged=forms.count(Form.SAME),
        in_full=forms.count(Form.FULL),
        inexact=tuple(record for record in records if not record.is_exact),
        expert_bytes=sum(element_count(r.shape) * r.output_dtype.itemsize for r in records),
        stored_bytes=sum(shard.file_bytes for shard in shards),
        seconds=seconds,
    )
