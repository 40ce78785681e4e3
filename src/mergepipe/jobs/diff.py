"""Compare two snapshots: settings, inputs, and which tensors differ by how much."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, files_of
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import open_files, read_elements
from mergepipe.core.blocks import BlockGrid, DTypeKind, Span
from mergepipe.core.units import format_bytes
from mergepipe.jobs.snapshots import find_snapshot, read_manifest_value
from mergepipe.reports import ByteProgress, ProgressCallback, SnapshotDiff, TensorChange
from mergepipe.snapshots.manifest import InputRecord, Manifest, OutputTensor
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores


def diff(
    a: str | Path,
    b: str | Path,
    *,
    reads_tensors: bool = True,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> SnapshotDiff:
    """Compare two snapshots: recipes, settings, inputs, coverage, and tensors with the norms of what differs.

    Args:
        a, b: snapshots: their directories, sids, or first digits of them.
        reads_tensors: work out the norms; without, only manifests are read.
    """
    store = Stores()
    place_a = find_snapshot(a, home)
    place_b = find_snapshot(b, home)
    first = read_manifest_value(store, place_a)
    second = read_manifest_value(store, place_b)
    lines_a, lines_b = (manifest.recipe.splitlines(keepends=True) for manifest in (first, second))
    changes, equal = _changes(first, second)
    measured = tuple(changes)
    if reads_tensors:
        weights_a, weights_b = _weights_of(first, place_a), _weights_of(second, place_b)
        measured = tuple(_measured(store, weights_a, weights_b, changes, on_progress))
    changes_with_norm = [change for change in measured if change.norm is not None]
    norm = math.sqrt(sum((change.norm or 0.0) ** 2 for change in changes_with_norm)) if reads_tensors else None
    return SnapshotDiff(
        a=place_a.as_reported,
        b=place_b.as_reported,
        a_sid=first.sid,
        b_sid=second.sid,
        recipe="".join(difflib.unified_diff(lines_a, lines_b, "a", "b", n=1)),
        settings=tuple(_settings(first, second)),
        inputs=tuple(_inputs(first, second)),
        equal_tensors=equal,
        tensors=measured,
        norm=norm,
    )


def _weights_of(manifest: Manifest, place: Location) -> Location:
    """Return where the tensors of a snapshot are opened: its folder, or the one file of an adapter."""
    return place / manifest.files[0].name if manifest.is_adapter else place


def _settings(a: Manifest, b: Manifest) -> Iterator[str]:
    """List the settings that differ, one line each."""
    facts_a, facts_b = _facts(a), _facts(b)
    for name in facts_a:
        if facts_a[name] != facts_b[name]:
            yield f"{name}: {facts_a[name]} -> {facts_b[name]}"


def _facts(manifest: Manifest) -> dict[str, str]:
    plan, coverage = manifest.plan or {}, manifest.coverage
    budget_bytes = plan.get("budget_bytes")
    budget = format_bytes(budget_bytes) if isinstance(budget_bytes, int) else "none"
    return {
        "version": manifest.version,
        "operator": manifest.operator,
        "seed": str(manifest.seed),
        "plan": manifest.plan_digest or "none: a full merge",
        "budget": budget,
        "policy": str(plan.get("policy", "none")),
        "read from experts": format_bytes(manifest.realized.expert),
        "blocks touched": "all" if coverage is None else f"{coverage.touched} of {coverage.blocks}",
        "blocks read by expert": "all" if coverage is None else ", ".join(map(str, coverage.read)),
    }


def _inputs(a: Manifest, b: Manifest) -> Iterator[str]:
    """List the inputs that only one snapshot has, or whose files differ."""
    in_a = {record.path: record for record in a.inputs}
    in_b = {record.path: record for record in b.inputs}
    for path in sorted(in_a.keys() | in_b.keys()):
        if path not in in_b:
            yield f"only in a: {in_a[path].role} {path}"
        elif path not in in_a:
            yield f"only in b: {in_b[path].role} {path}"
        elif _identity(in_a[path]) != _identity(in_b[path]):
            yield f"changed between: {in_a[path].role} {path}"


def _identity(record: InputRecord) -> list[tuple[str, int, str, str]]:
    return [(file.name, file.size_bytes, file.version, file.header_digest) for file in record.files]


def _changes(a: Manifest, b: Manifest) -> tuple[list[TensorChange], int]:
    """List the tensors whose digests differ, and count the equal ones."""
    in_a = {tensor.name: tensor for tensor in a.tensors}
    in_b = {tensor.name: tensor for tensor in b.tensors}
    changes = []
    for name in sorted(in_a.keys() | in_b.keys()):
        kind = _kind(in_a.get(name), in_b.get(name))
        if kind:
            changes.append(TensorChange(name, kind, None, None))
    return changes, len(in_a.keys() | in_b.keys()) - len(changes)


def _kind(a: OutputTensor | None, b: OutputTensor | None) -> str:
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} -> {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} -> {b.dtype}"
    return "" if a.blake3 == b.blake3 else "values"


def _measured(
    store: Store, a: Location, b: Location, changes: list[TensorChange], on_progress: ProgressCallback | None
) -> Iterator[TensorChange]:
    """Add `||A - B||` and `||A||` to the changes where both are floats of one shape."""
    first, second = (open_checkpoint(store, place) for place in (a, b))
    comparable = [c.name for c in changes if c.kind == "values" or c.kind.startswith("dtype")]
    total = sum(model.tensors[name].nbytes for name in comparable for model in (first, second))
    norms = tensor_norms(store, first, second, comparable, ByteProgress(on_progress, "compare", total).add)
    for change in changes:
        norm_pair = norms.get(change.name)
        if norm_pair is None:
            yield change
        else:
            distance, norm = norm_pair
            yield TensorChange(change.name, change.kind, distance, distance / norm if norm else None)


# --- distances between checkpoints, summed in float64 over their float tensors ---


CHUNK_ELEMENTS = 1 << 20
"""Elements held at a time: of two checkpoints, as stored and in float64, and their difference: 48 MiB at most."""

OnTick = Callable[[int], None]


def distance(store: Store, a: Checkpoint, b: Checkpoint, on_tick: OnTick) -> float:
    """`||A - B||` over the float tensors that both have in the same shape.

    `on_tick` is called from time to time with the bytes read since the last call.
    """
    norms = tensor_norms(store, a, b, [name for name in a.tensors if name in b.tensors], on_tick)
    return math.hypot(*(difference for difference, _ in norms.values()))


def norm(store: Store, checkpoint: Checkpoint, on_tick: OnTick) -> float:
    """`||A||` over its float tensors; `on_tick` as in `distance`."""
    with open_files(store, files_of(checkpoint.tensors.values()), direct=False) as files:
        entries = filter(_is_float, checkpoint.tensors.values())
        return math.hypot(*(_norms(files, entry, None, on_tick)[1] for entry in entries))


def tensor_norms(
    store: Store, a: Checkpoint, b: Checkpoint, names: Iterable[str], on_tick: OnTick
) -> dict[str, tuple[float, float]]:
    """`||A - B||` and `||A||` of each named float tensor that both have in the same shape; `on_tick` as above."""
    with open_files(store, files_of((*a.tensors.values(), *b.tensors.values())), direct=False) as files:
        pairs = ((name, a.tensors[name], b.tensors[name]) for name in names)
        return {
            name: _norms(files, entry, other, on_tick)
            for name, entry, other in pairs
            if other.shape == entry.shape and _is_float(entry) and _is_float(other)
        }


def _norms(
    files: Mapping[Location, RangeFile], entry: Readable, other: Readable | None, on_tick: OnTick
) -> tuple[float, float]:
    """Return `||entry - other||`, 0 without another, and `||entry||`."""
    difference = norm = 0.0
    for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans():
        elements_N = _elements(files, entry, span)
        norm += float(np.dot(elements_N, elements_N))
        if other is not None:
            elements_N -= _elements(files, other, span)
            difference += float(np.dot(elements_N, elements_N))
        on_tick(span.n_elements * (entry.dtype.itemsize + (0 if other is None else other.dtype.itemsize)))
    return math.sqrt(difference), math.sqrt(norm)


def _is_float(entry: Readable) -> bool:
    return entry.dtype.kind is DTypeKind.FLOAT


def _elements(files: Mapping[Location, RangeFile], entry: Readable, span: Span) -> NDArray[np.float64]:
    """Decode elements of a tensor into a new array."""
    from mergepipe.kernels.codec import CODE_F64, decode_all

    raw = read_elements(entry, span, files, Purpose.ANALYSIS)
    if entry.dtype.kernel_code == CODE_F64:
        return np.asarray(raw.view(np.float64))
    elements_N = np.empty(span.n_elements, np.float32)
    decode_all(raw, entry.dtype.kernel_code, span.n_elements, elements_N)
    return np.asarray(elements_N, np.float64)
