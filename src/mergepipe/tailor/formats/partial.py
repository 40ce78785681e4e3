"""Partial checkpoints of our own, written while training: some units of a model, per rank, with a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

from mergepipe.checkpoints.contained_files import stat_regular
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.formats.safetensors import read_header
from mergepipe.core.blocks import DTYPES, Span
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import PARTIAL_MANIFEST_BYTES
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, Piece, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import TrainingFormat
from mergepipe.tailor.formats.partial_manifest import (
    MANIFEST_NAME,
    PartialManifest,
    ShardFile,
    ShardTensor,
    parse_manifest,
)
from mergepipe.tailor.formats.scalars import read_scalar
from mergepipe.tailor.units import ModelUnits, model_units

_COUNTER_DTYPE = DTYPES["F32"]

_Entries = dict[str, TensorEntry]


def read_partial_manifest(store: Store, folder: Location) -> PartialManifest:
    """Read and check the manifest alone.

    Raises:
        CorruptError, UnsupportedError: it is none that this version reads.
    """
    path = folder / MANIFEST_NAME
    return parse_manifest(store.read_small(path, PARTIAL_MANIFEST_BYTES), path)


def read_partial(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a partial checkpoint; of tensors, only step counters are read.

    It has the format of the run it comes from, so that it can be compared and combined with full checkpoints of it;
    what was not saved is listed as `missing`.

    Raises:
        CorruptError: manifest and shard files contradict each other.
        UnsupportedError: a version this one does not read.
    """
    manifest = read_partial_manifest(store, folder)
    entries = {shard.name: _entries(store, folder, shard) for shard in manifest.shards}
    units = model_units(manifest.parameters, manifest.tied)
    states = {(s.parameter, s.kind): s for s in _states(manifest, entries)}
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=manifest.origin,
        framework=manifest.framework,
        stage=manifest.stage,
        world_size=manifest.world_size,
        step=manifest.step,
        units=units,
        parameters=manifest.parameters,
        states=MappingProxyType(states),
        steps=tuple(_steps(store, manifest, entries)),
        flat_groups=manifest.flat_groups,
        missing=tuple(_missing(folder, manifest, units, states)),
        is_partial=True,
    )


def _entries(store: Store, folder: Location, shard: ShardFile) -> _Entries:
    """The tensors of one shard file, which must be exactly those the manifest lists."""
    path = folder / shard.name
    status = stat_regular(store, folder, shard.name)
    if status is None or status.size_bytes != shard.size_bytes:
        size = "is not there" if status is None else f"has {status.size_bytes} bytes"
        raise CorruptError.of(
            "tailor.partial.shard", path, f"{size}; the manifest says {shard.size_bytes} bytes", "copy it again"
        )
    entries = {entry.name: entry for entry in read_header(store, path).entries}
    listed = {t.key: (t.dtype, t.span.n_elements) for t in shard.tensors}
    listed |= {f"step/{number}": (_COUNTER_DTYPE, 1) for number in shard.counters}
    held = {name: (entry.dtype, entry.n_elements) for name, entry in entries.items()}
    if held != listed:
        wrong = min(name for name in held.keys() | listed.keys() if held.get(name) != listed.get(name))
        raise CorruptError.of("tailor.partial.tensors", path, f"{shown(wrong)} is not as the manifest describes it")
    return entries


def _states(manifest: PartialManifest, entries: dict[str, _Entries]) -> Iterator[StoredState]:
    """Every state, its pieces joined over the shards in the order of their elements."""
    parts_of_state: dict[tuple[str, str], list[tuple[ShardTensor, Piece]]] = {}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            entry = entries[shard.name][tensor.key]
            piece = Piece(entry.file, entry.offset, entry.nbytes, tensor.span)
            parts_of_state.setdefault((tensor.parameter, tensor.kind), []).append((tensor, piece))
    for (parameter, kind), parts in parts_of_state.items():
        pieces = sorted((piece for _, piece in parts), key=lambda piece: piece.span.start)
        overlap = any(a.span.stop > b.span.start for a, b in pairwise(pieces))
        if overlap or len({tensor.dtype for tensor, _ in parts}) > 1:
            message = f"{kind} of {shown(parameter)}: shards overlap or have different dtypes"
            raise CorruptError.of("tailor.partial.overlap", pieces[0].file, message)
        yield StoredState(parameter, kind, parts[0][0].dtype, manifest.parameters[parameter], tuple(pieces))


def _steps(store: Store, manifest: PartialManifest, entries: dict[str, _Entries]) -> Iterator[AdamStep]:
    """Each step counter, the same in every shard that holds it."""
    for number, parameters in enumerate(manifest.counters):
        cells = [entries[s.name][f"step/{number}"] for s in manifest.shards if number in s.counters]
        values = {read_scalar(store, cell.file, cell.offset, cell.dtype) for cell in cells}
        if len(values) != 1:
            path = cells[0].file if cells else MANIFEST_NAME
            raise CorruptError.of("tailor.partial.step", path, f"step counter {number} has the values {sorted(values)}")
        pieces = tuple(Piece(cell.file, cell.offset, cell.nbytes, Span(0, 1)) for cell in cells)
        yield AdamStep(values.pop(), parameters, _COUNTER_DTYPE, pieces)


def _missing(
    folder: Location, manifest: PartialManifest, units: ModelUnits, states: dict[tuple[str, str], StoredState]
) -> Iterator[str]:
    """Units that were not saved, and states with gaps in those that were."""
    by_name = {str(unit): names for unit, names in units.parameters.items()}
    unknown = [name for name in manifest.units if name not in by_name]
    if unknown:
        path = folder / MANIFEST_NAME
        raise CorruptError.of("tailor.partial.unit", path, f"the model has no unit {shown(unknown[0])}")
    saved = {parameter for unit in manifest.units for parameter in by_name[unit]}
    outside = [name for name, _ in states if name not in saved]
    if outside:
        message = f"{shown(outside[0])} is in no unit that was saved"
        raise CorruptError.of("tailor.partial.unit", folder / MANIFEST_NAME, message)
    yield from (f"{unit}: not saved" for unit in by_name if unit not in manifest.units)
    yield from (f"part of {state.kind} of {state.parameter}" for state in states.values() if state.gaps)
    stateless = saved - {name for name, _ in states}
    yield from (f"every state of {name}" for name in sorted(stateless) if 0 not in manifest.parameters[name])


@dataclass(frozen=True, slots=True)
class PartialKind:
    """Partial checkpoints of our own; each has the format of the run it comes from, which is one of `formats`."""

    formats: tuple[TrainingFormat, ...]
    looked_for: ClassVar[str] = f"{MANIFEST_NAME} (partial checkpoint)"

    def recognise(self, store: Store, path: Location) -> bool:
        """Recognise the format by the manifest."""
        return is_file(store, path / MANIFEST_NAME)

    def open(self, store: Store, path: Location, home: Location) -> TrainingCheckpoint:
        """See `read_partial`; it knows whether its framework could resume at its step, if it were whole."""
        partial = read_partial(store, path)
        of_run = next((candidate for candidate in self.formats if candidate.name == partial.format), None)
        if of_run is None:
            names = ", ".join(candidate.name for candidate in self.formats)
            message = f"'origin': one of {names} is needed, found {shown(partial.format)}"
            raise CorruptError.of("tailor.partial.name", path / MANIFEST_NAME, message)
        has_state = of_run.resumes_partial(partial.framework) and is_file(store, path / of_run.state_file)
        return replace(partial, has_state=has_state)
