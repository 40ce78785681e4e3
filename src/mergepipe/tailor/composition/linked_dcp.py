"""Plan linked composites of torch DCP checkpoints: new metadata points to the sources' chunks, none is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mergepipe.core.values import dataclass
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Packing, Piece, TrainingCheckpoint
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.composition.composition_plan import CompositionPlan
from mergepipe.tailor.composition.copy.plan import FilePlan, Literal, patched_file
from mergepipe.tailor.composition.request.assignment import Assignment
from mergepipe.tailor.composition.skeleton_files import list_skeleton
from mergepipe.tailor.composition.staleness import choose_steps, staleness_of
from mergepipe.tailor.composition.state_overlay import require_own_state
from mergepipe.tailor.formats.dcp import METADATA_NAME
from mergepipe.tailor.formats.dcp_metadata import read_dcp_metadata
from mergepipe.tailor.formats.pickle_node import Node

_Place = tuple[Location, int, int]  # file, offset, bytes


def plan_linked(store: Store, assignment: Assignment, out: Location | None) -> CompositionPlan:
    """Plan a DCP composite that points into its sources; `out` None stands for a directory beside the skeleton.

    Raises:
        UnsupportedError: `out` is not beside its sources, or they are cut into chunks differently.
    """
    skeleton = assignment.skeleton
    require_own_state(assignment)
    if assignment.resized is not None:
        raise UnsupportedError.of(
            "tailor.restack.link",
            skeleton.path,
            "a model of another number of layers is not composed by links",
            "compose without --link",
        )
    home = (out or skeleton.path.with_name("composite")).normal()
    moved = dict(_moves(assignment))
    metadata = read_dcp_metadata(store, skeleton.path)
    linked = _relink(metadata, skeleton, moved, home)
    steps = choose_steps(assignment)
    return CompositionPlan(
        assignment,
        steps,
        staleness_of(assignment, steps),
        tuple(
            FilePlan(f.name, (Literal(InertPickler().dump(metadata)),))
            if f.name == METADATA_NAME
            else patched_file(f.name, f.path, f.size_bytes, ())
            for f in list_skeleton(store, skeleton)
            if f.path not in linked.own_files
        ),
        linked.files,
    )


def _moves(assignment: Assignment) -> Iterator[tuple[_Place, _Place]]:
    """Map each chunk of the skeleton to its new location."""
    skeleton = assignment.skeleton
    counters = [{name: step for step in source.steps for name in step.parameters} for source in assignment.sources]
    for (name, kind), target in skeleton.states.items():
        if assignment.keeps(name):
            continue
        index = assignment.source_of[skeleton.units.tied.get(name, name)]
        source_state = assignment.sources[index].states[assignment.origin(name), kind]
        if any(piece.packing is not Packing.TORCH_ZIP for piece in source_state.pieces):
            raise UnsupportedError.of(
                "tailor.link.partial", assignment.sources[index].path, "is partial: it has no chunks to point to",
                "compose without --link",
            )  # fmt: skip
        if [p.span for p in source_state.pieces] != [p.span for p in target.pieces]:
            raise UnsupportedError.of(
                "tailor.link.chunks", assignment.sources[index].path,
                f"{kind} of {name} is cut into other chunks than in {skeleton.path}", "compose without --link",
            )  # fmt: skip
        yield from zip(map(_place, target.pieces), map(_place, source_state.pieces), strict=True)
    for name, index in assignment.source_of.items():
        skeleton_counter = counters[assignment.skeleton_index].get(name)
        if not assignment.keeps(name) and skeleton_counter is not None:
            cells = counters[index][assignment.origin(name)].cells
            yield from zip(map(_place, skeleton_counter.cells), map(_place, cells), strict=True)


def _place(piece: Piece) -> _Place:
    if piece.packing is not Packing.TORCH_ZIP:
        raise AssertionError("pieces of a DCP checkpoint are packed")
    return piece.file, piece.offset, piece.nbytes


@dataclass(frozen=True, slots=True)
class _Linked:
    """`files` that the new metadata points to; `own_files` of the skeleton that need not be copied."""

    files: tuple[Location, ...]
    own_files: frozenset[Location]


def _relink(metadata: object, skeleton: TrainingCheckpoint, moved: Mapping[_Place, _Place], home: Location) -> _Linked:
    """Change the places in `metadata` (in place) to the new ones, relative to `home`."""
    root = Node(metadata, METADATA_NAME).fields("Metadata")
    files, own_files = set(), set()
    for _, node in root.get("storage_data").items():
        fields = node.fields("_StorageInfo")
        relative = fields.get("relative_path").text()
        file = (skeleton.path.absolute() / relative).normal()
        own_files.add(file)
        old = (file, fields.get("offset").integer(), fields.get("length").integer())
        new = moved.get(old, old)
        files.add(new[0])
        state = fields.mapping()
        state["relative_path"], state["offset"], state["length"] = new[0].relative_text(home), new[1], new[2]
    outside = [file for file in sorted(files) if not file.is_relative_to(home.parent)]
    if outside:
        raise UnsupportedError.of(
            "tailor.link.place", home, f"is not beside its sources: {outside[0]} lies elsewhere",
            f"choose a directory in {outside[0].parent.parent}, or compose without --link",
        )  # fmt: skip
    return _Linked(tuple(sorted(files)), frozenset(own_files))
