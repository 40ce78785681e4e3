"""Plan a composition from an assignment: reads the structure of archives, no tensor values. Writes nothing."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mergepipe.checkpoints.torch_file import Window
from mergepipe.core.blocks import ByteRange, DType, Span
from mergepipe.errors import CorruptError
from mergepipe.snapshots.composite import UnitStaleness
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import plan_edited, stale_checksums
from mergepipe.tailor.assignment import Assignment, StepChoice, choose_steps, staleness_of
from mergepipe.tailor.checkpoint import Packing, Piece, StoredState
from mergepipe.tailor.copy_plan import (
    FilePlan,
    Literal,
    Patch,
    Segment,
    average_states,
    patch_states,
    patched_file,
)
from mergepipe.tailor.formats.dcp import unpack_piece
from mergepipe.tailor.formats.pickle_node import PicklePath
from mergepipe.tailor.sources import SkeletonFile, list_skeleton
from mergepipe.tailor.state_overlay import StateOverlay, overlay_state

_MEMBER = Location.parse("member")  # stands for a file or member whose content is being planned
_STEP_FORMS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


@dataclass(frozen=True, slots=True)
class CompositionPlan:
    """The files to write, with the source of every byte. `files` are sorted by name."""

    assignment: Assignment
    steps: tuple[StepChoice, ...]
    staleness: tuple[UnitStaleness, ...]
    files: tuple[FilePlan, ...]

    @property
    def read_bytes(self) -> int:
        return sum(file.read_bytes for file in self.files)

    @property
    def output_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def plan_composition(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite that `assignment` describes, in the skeleton's own layout."""
    steps = choose_steps(assignment)
    patches = PatchCollector(store)
    for (name, kind), target in assignment.skeleton.states.items():
        if not assignment.keeps(name):
            patches.state(assignment.state_of(name, kind), target)
    for choice in steps:
        patches.step(choice)
    overlay = overlay_state(store, assignment, list_skeleton(store, assignment.skeleton))
    plans = tuple(plan_file(store, file, patches, overlay) for file in overlay.files)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), plans)


class PatchCollector:
    """Collects patches and edits by the skeleton's file, and the archives inside files that hold many."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_file: dict[Location, list[Patch]] = defaultdict(list)
        self.windows: dict[Location, dict[int, Window]] = defaultdict(dict)
        self.edits: dict[Location, dict[PicklePath, object]] = defaultdict(dict)

    def state(self, source: StoredState, target: StoredState) -> None:
        """Copy the values of `given` to the places of `target`."""
        self._note_windows(target.pieces)
        for file, patch in patch_states(unpacked(self._store, source), unpacked(self._store, target)):
            self.by_file[file].append(patch)

    def average(self, sources: Sequence[StoredState], weights: tuple[float, ...], target: StoredState) -> None:
        """Write the average of raw states to the places of `target`."""
        self._note_windows(target.pieces)
        for file, patch in average_states(sources, weights, unpacked(self._store, target)):
            self.by_file[file].append(patch)

    def step(self, choice: StepChoice) -> None:
        """Write a step counter where its value changes."""
        counter = choice.counter
        if choice.value == counter.value:
            return
        self._note_windows(counter.cells)
        for cell in counter.cells:
            inside = cell if cell.packing is Packing.RAW else unpack_piece(self._store, cell, counter.dtype)
            self.by_file[inside.file].append(Patch(inside.offset, Literal(pack_step(choice))))
        for file, path in counter.entries:
            self.edits[file][path] = int(choice.value)

    def _note_windows(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.packing is Packing.TORCH_ZIP:
                self.windows[piece.file][piece.offset] = Window(piece.file, piece.offset, piece.nbytes)


def pack_step(choice: StepChoice) -> bytes:
    """Encode a step counter."""
    form = _STEP_FORMS[choice.counter.dtype.name]
    return struct.pack(form, int(choice.value) if form[1] in "qi" else choice.value)


def unpacked(store: Store, state: StoredState) -> StoredState:
    """Return the state with every piece outside its archive member, as raw bytes."""
    if all(piece.packing is Packing.RAW for piece in state.pieces):
        return state
    pieces = (p if p.packing is Packing.RAW else unpack_piece(store, p, state.dtype) for p in state.pieces)
    return replace(state, pieces=tuple(pieces))


def state_segments(store: Store, stored: StoredState, span: Span, dtype: DType) -> Iterator[Segment]:
    """Yield the segments of the elements `span` of a source's state, in order, as values of `dtype`."""
    place = Piece(_MEMBER, 0, span.n_elements * dtype.itemsize, span)
    target = StoredState(stored.parameter, stored.kind, dtype, stored.shape, (place,) if span.n_elements else ())
    for _, patch in patch_states(unpacked(store, stored), target):
        yield patch.segment


def plan_file(store: Store, file: SkeletonFile, patches: PatchCollector, overlay: StateOverlay) -> FilePlan:
    """Plan a copy of one file with its patches and state edits."""
    if file.name in overlay.contents:
        return FilePlan(file.name, (Literal(overlay.contents[file.name]),))
    file_patches = sorted(patches.by_file.get(file.path, []), key=lambda patch: patch.offset)
    _check_apart(file_patches, file)
    edits = {**overlay.edits_of(file.path), **patches.edits.get(file.path, {})}
    if edits:
        return plan_edited(store, file, file_patches, edits)
    touched = [ByteRange(patch.offset, patch.stop) for patch in file_patches]
    windows = patches.windows.get(file.path, {})  # the archives inside a file that is none itself
    checksums = stale_checksums(store, file.path, touched, tuple(windows.values()))
    return patched_file(file.name, file.path, file.size_bytes, file_patches, checksums)


def _check_apart(ordered: Sequence[Patch], file: SkeletonFile) -> None:
    """Refuse a file in which two states share bytes: one of them would be written over the other."""
    for patch, following in pairwise(ordered):
        if following.offset < patch.stop:
            raise CorruptError.of(
                "checkpoint.damaged", file.path, f"two states share bytes [{following.offset}, {patch.stop})",
                "save each state as a tensor of its own: .clone() it",
            )  # fmt: skip
