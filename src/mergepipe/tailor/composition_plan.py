"""Plan a composition from an assignment: reads the structure of archives, no tensor values. Writes nothing."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

from mergepipe.checkpoints.directory import is_linked_folder, stat_regular
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip, walk_tensors
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.checkpoints.zip_directory import Window
from mergepipe.core.blocks import F32, DType, DTypeKind, Span
from mergepipe.errors import damaged, mismatched, unsupported
from mergepipe.recipes.output_config import check_layer_kinds, with_layers
from mergepipe.snapshots.manifest import MANIFEST_NAME, UnitStaleness
from mergepipe.snapshots.shards import ShardLayout, TensorSpec, index_files
from mergepipe.storage.contract import CONFIG_BYTES, FileKind, Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.archive_layout import MemberPlan, stale_checksums
from mergepipe.tailor.archives import new_archive, plan_edited, plan_rewritten
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, StepChoice, choose_steps, staleness_of
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework, PicklePath, Piece, StoredState, TrainingCheckpoint
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal, Patch, Segment, joined, patch_states, patched_file
from mergepipe.tailor.formats import format_named
from mergepipe.tailor.formats.contract import STEP_FORMS, Node, root_of
from mergepipe.tailor.formats.dcp import DCP_FORMAT, METADATA_NAME, merge_state, read_dcp_metadata, unpack_piece
from mergepipe.tailor.formats.deepspeed import (
    LATEST_NAME,
    LATEST_UNIVERSAL_NAME,
    OPTIMIZER_STATE_NAME,
    PARAMETER_KEY,
    STATES_FOLDER,
    STEP_NAME,
    UNIVERSAL_FORMAT,
    ZERO_FORMAT,
    base_optimizer_path,
    list_zero_files,
)
from mergepipe.tailor.formats.hf_trainer import (
    HF_FORMAT,
    LOSS_SCALER_NAME,
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    read_global_step,
)
from mergepipe.tailor.formats.partial import read_partial_manifest
from mergepipe.tailor.pickle_writer import InertPickler, new_tensor

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class CompositionPlan:
    """The files to write, with the source of every byte. `files` are sorted by name; `notices` are for the user."""

    assignment: Assignment
    steps: tuple[StepChoice, ...]
    staleness: tuple[UnitStaleness, ...]
    files: tuple[FilePlan, ...]
    notices: tuple[str, ...] = ()

    @property
    def read_bytes(self) -> int:
        return sum(file.read_bytes for file in self.files)

    @property
    def output_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def plan_composition(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite that `assignment` describes, in the skeleton's own layout."""
    steps = choose_steps(assignment)
    changes = SkeletonChanges(store, assignment.skeleton)
    take_state(changes, assignment)
    follow_layers(changes, assignment)
    for (name, kind), target in assignment.skeleton.states.items():
        if not assignment.keeps(name):
            changes.state([assignment.state_of(name, kind)], target)
    for choice in steps:
        changes.step(choice)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), changes.plans())


def follow_layers(changes: SkeletonChanges, assignment: Assignment) -> None:
    """Let the model's configuration, if the checkpoint holds one, state the layers that slices stack."""
    skeleton, layers = assignment.skeleton, assignment.layers
    if layers is None or CONFIG_NAME not in changes.files:
        return
    where = skeleton.path / CONFIG_NAME
    config = changes.store.read_small(where, CONFIG_BYTES)
    changes.contents[CONFIG_NAME] = with_layers(config, layers, where=where)
    check_layer_kinds(config, layers, skeleton.parameters, assignment.model.parameters, where=where)


# --- list the files of the skeleton that belong to the checkpoint ---


_MAX_DEPTH = 8
_MAX_FILES = 200_000


def list_skeleton(store: Store, checkpoint: TrainingCheckpoint) -> dict[str, CopyRange]:
    """List the files of a checkpoint, each as a copy of it all, by their names: relative to it, with slashes.

    Of a DeepSpeed save directory: what lies in it directly and the tag that `latest` names, no other tag. An earlier
    composite's manifest is left out.
    """
    base = checkpoint.path
    if checkpoint.root == base:
        names = list(_walk(store, base, "", _MAX_DEPTH))
    else:
        tag = checkpoint.root.relative_to(base).as_posix()
        names = [*_walk(store, base, "", 0), *_walk(store, base, f"{tag}/", _MAX_DEPTH)]
    if len(names) > _MAX_FILES:
        raise damaged(base, f"more than {_MAX_FILES} files")
    files = {}
    for name in sorted(name for name in names if name != MANIFEST_NAME):
        status = stat_regular(store, base, name)
        if status is None:
            raise damaged(base / name, "is a link to nothing")
        files[name] = CopyRange(base / name, 0, status.size_bytes, is_skeleton=True)
    return files


def _walk(store: Store, base: Location, prefix: str, depth: int) -> Iterator[str]:
    """Names of files below `base/prefix`; directories are entered down to `depth`."""
    for entry in store.list(base / prefix):
        if entry.kind is not FileKind.FOLDER or is_linked_folder(store, base / prefix, entry.name):
            yield prefix + entry.name
        elif depth > 0:
            yield from _walk(store, base, f"{prefix}{entry.name}/", depth - 1)


class SkeletonChanges:
    """Collects changes to the files of a skeleton, which are `files` under the names they get.

    `patches` are of their bytes, `edits` of the values in their pickles, by path, `contents` small files that are new
    altogether, by name, and `windows` the archives inside files that hold many.
    """

    def __init__(self, store: Store, skeleton: TrainingCheckpoint) -> None:
        self.store = store
        self.files = list_skeleton(store, skeleton)
        self.patches: dict[Location, list[Patch]] = defaultdict(list)
        self.windows: dict[Location, dict[int, Window]] = defaultdict(dict)
        self.edits: dict[Location, dict[PicklePath, object]] = defaultdict(dict)
        self.contents: dict[str, bytes] = {}

    def state(self, sources: Sequence[StoredState], target: StoredState, weights: tuple[float, ...] = (1.0,)) -> None:
        """Write the values of a state, or the average of several, to the places of `target`."""
        if any(piece.strips for piece in target.pieces):
            hint = "export or average it as a model: parts of such checkpoints are not composed"
            raise unsupported(target.parameter, "is cut along columns, as tensor parallel training does", hint)
        self._note_windows(target.pieces)
        raw = [unpacked(self.store, source) for source in sources]
        for file, patch in patch_states(raw, unpacked(self.store, target), weights):
            self.patches[file].append(patch)

    def step(self, choice: StepChoice) -> None:
        """Write a step counter where its value changes."""
        counter = choice.counter
        if choice.value == counter.value:
            return
        self._note_windows(counter.cells)
        for cell in counter.cells:
            inside = unpack_piece(self.store, cell, counter.dtype)
            self.patches[inside.file].append(Patch(inside.offset, Literal(pack_step(choice))))
        self.step_in_pickles(choice)

    def step_in_pickles(self, choice: StepChoice) -> None:
        """Write a step counter that is part of pickles."""
        for file, path in choice.counter.entries:
            self.edits[file][path] = int(choice.value)

    def _note_windows(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.is_packed:
                self.windows[piece.file][piece.offset] = Window(piece.file, piece.offset, piece.nbytes)

    def plans(self) -> tuple[FilePlan, ...]:
        """Plan every file."""
        return tuple(map(self.plan, sorted(self.files)))

    def plan(self, name: str) -> FilePlan:
        """Plan a copy of one file with its changes."""
        if name in self.contents:
            return FilePlan(name, (Literal(self.contents[name]),))
        path = self.files[name].file
        patches = sorted(self.patches.get(path, []), key=lambda patch: patch.offset)
        for patch, following in pairwise(patches):
            if following.offset < patch.stop:  # one of them would be written over the other
                message = f"two states share bytes [{following.offset}, {patch.stop})"
                raise damaged(path, message, "save each state as a tensor of its own: .clone() it")
        edits = self.edits.get(path)
        if edits:
            return plan_edited(self.store, name, path, patches, edits)
        touched = [range(patch.offset, patch.stop) for patch in patches]
        windows = self.windows.get(path, {})
        checksums = stale_checksums(self.store, path, touched, tuple(windows.values()))
        return patched_file(name, path, self.files[name].nbytes, patches, checksums)


def pack_step(choice: StepChoice) -> bytes:
    """Encode a step counter."""
    form = STEP_FORMS[choice.counter.dtype.name]
    return struct.pack(form, int(choice.value) if form[1] in "qi" else choice.value)


def unpacked(store: Store, state: StoredState) -> StoredState:
    """Return the state with every piece outside its archive member, as raw bytes."""
    if not any(piece.is_packed for piece in state.pieces):
        return state
    return replace(state, pieces=tuple(unpack_piece(store, piece, state.dtype) for piece in state.pieces))


def state_segments(store: Store, stored: StoredState, dtype: DType, span: Span | None = None) -> tuple[Segment, ...]:
    """Return what copies the elements `span` of a state, all of them by default, as `dtype`."""
    span = Span(0, stored.n_elements) if span is None else span
    target = StoredState.planned(stored.parameter, stored.kind, dtype, stored.shape)
    pieces = tuple(replace(piece, nbytes=span.n_elements * dtype.itemsize, span=span) for piece in target.pieces)
    return tuple(patch.segment for _, patch in patch_states([unpacked(store, stored)], replace(target, pieces=pieces)))


def weight_files(
    shards: Sequence[ShardLayout], segments_of: Callable[[TensorSpec], Iterable[Segment]]
) -> Iterator[FilePlan]:
    """Plan safetensors and, where there are several, their index."""
    for shard in shards:
        segments: list[Segment] = [Literal(shard.header)]
        for spec in shard.tensors:
            segments += segments_of(spec)
        yield FilePlan(shard.name, tuple(joined(segments)))
    for name, content in index_files(shards).items():
        yield FilePlan(name, (Literal(content),))


def apply_edits(root: Node, edits: Edits) -> None:
    """Put new values at some paths of a pickle's value, in place."""
    for path, value in edits.items():
        root.at(path[:-1]).mapping()[path[-1]] = value


class NewTensors:
    """Collects tensors that an archive gets beside its own: `members` by the keys of their storages."""

    def __init__(self, archive: TorchArchive) -> None:
        self.members: dict[str, MemberPlan] = {}
        keys = [tensor.storage.key for _, tensor in walk_tensors(archive.root)]
        self._first_key = 1 + max((int(key) for key in keys if key.isdecimal()), default=-1)

    def add(self, segments: Sequence[Segment], dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
        """Add a tensor of these bytes; return its value in the pickle."""
        key = str(self._first_key + len(self.members))
        self.members[key] = MemberPlan(f"data/{key}", tuple(segments))
        return new_tensor(key, dtype, shape)


# --- take a run's state from a partial checkpoint: step, scheduler, random states, optimizer options ---


_STATE_FILES = re.compile(r"trainer_state\.json|scheduler\.pt|scaler\.pt|rng_state(_\d{1,6})?\.pth", re.ASCII)
_MODEL_FILE = re.compile(r".*mp_rank_\d+_model_states\.pt", re.ASCII)
_GROUPS = "param_groups"
_RATE = "lr"

Edits: TypeAlias = Mapping[PicklePath, object]


def take_state(changes: SkeletonChanges, assignment: Assignment) -> None:
    """Replace the small files and values that a partial checkpoint gives the state of, if one does."""
    if assignment.state_index is None:
        return
    _check_state(changes.store, assignment)
    _take_state_files(changes, assignment.state.path)
    if assignment.skeleton.format not in _TAKERS:
        message = f"is of format {assignment.skeleton.format}, which cannot use the state of a partial checkpoint"
        raise unsupported(assignment.skeleton.path, message, "name a complete checkpoint in state_from")
    _TAKERS[assignment.skeleton.format](changes, assignment)


def _check_state(store: Store, assignment: Assignment) -> None:
    folder = assignment.state.path
    if not assignment.state.is_partial:
        hint = "name a complete checkpoint in state_from, or a partial one"
        raise mismatched(folder, f"lacks {assignment.state.missing[0]}", hint)
    if not assignment.state.has_state:
        what = format_named(assignment.state.format).state_file
        raise damaged(folder, f"holds no {what} to resume from", "name another checkpoint in state_from")
    is_trainer = assignment.state.framework is Framework.TRANSFORMERS
    if is_trainer and read_global_step(store, folder) != assignment.state.step:
        raise damaged(folder, f"{TRAINER_STATE_NAME} is of another step")


def _take_state_files(changes: SkeletonChanges, folder: Location) -> None:
    """Put the state's files in place of their namesakes."""
    taken = {}
    for entry in changes.store.list(folder):
        status = stat_regular(changes.store, folder, entry.name) if _STATE_FILES.fullmatch(entry.name) else None
        if status is not None:
            taken[entry.name] = CopyRange(folder / entry.name, 0, status.size_bytes, is_skeleton=True)
    lacking = [name for name in changes.files if _STATE_FILES.fullmatch(name) and name not in taken]
    if lacking:
        raise damaged(folder, f"holds no {lacking[0]}, which the skeleton has")
    changes.files |= taken


# --- options of the optimizer


def _options(store: Store, assignment: Assignment, root: Node, place: PicklePath) -> Edits:
    """Put the state's options into the skeleton's parameter groups: learning rates drive the first resumed step."""
    groups = root.at(place).get(_GROUPS)
    new = read_partial_manifest(store, assignment.state.path).options
    old = groups.elements()
    rates = [option.get(_RATE) for option in new]
    if len(new) != len(old) or not all(isinstance(rate, float) for rate in rates):
        raise mismatched(assignment.state.path, f"has learning rates {rates}, not {len(old)}")
    edits: dict[PicklePath, object] = {}
    for number, (group, options) in enumerate(zip(old, new, strict=True)):
        for key, value in options.items():
            if key == "step":  # a counter, which has its own policy
                continue
            current = group.mapping().get(key)
            if key in group.mapping() and value != (list(current) if isinstance(current, tuple) else current):
                if isinstance(current, PickledTensor):
                    where, hint = group.get(key), "name a complete checkpoint in state_from"
                    raise unsupported(f"{where.file}: {where.path}", "is a tensor, not a plain number", hint)
                edits[*place, _GROUPS, number, key] = tuple(value) if isinstance(value, list) else value
    return edits


# --- Hugging Face Trainer


def _take_hf(changes: SkeletonChanges, assignment: Assignment) -> None:
    """Edit options in the optimizer file."""
    path = assignment.skeleton.root / OPTIMIZER_NAME
    root = Node(read_torch_zip(changes.store, path).root, OPTIMIZER_NAME)
    changes.edits[path] |= _options(changes.store, assignment, root, ())


# --- DeepSpeed


def _take_zero(changes: SkeletonChanges, assignment: Assignment) -> None:
    """Edit the engine's step counters in every model file, options in every optimizer file, and the tag's name."""
    store, skeleton = changes.store, assignment.skeleton
    zero = list_zero_files(store, skeleton.root)
    if zero is None:
        raise AssertionError("the skeleton was read as ZeRO")
    inside = base_optimizer_path(skeleton.stage)
    for path in zero[0].values():
        root = root_of(read_torch_zip(store, path))
        changes.edits[path] |= {**_options(store, assignment, root, inside), **_loss_scale(store, assignment, root)}
    for path in (copied.file for copied in changes.files.values()):
        if path.parent == skeleton.root and _MODEL_FILE.fullmatch(path.name):
            changes.edits[path] |= _engine_state(store, assignment, path)
    tag = new_tag(assignment)
    if tag != skeleton.root.name:
        old = f"{skeleton.root.name}/"
        changes.files = {
            f"{tag}/{name.removeprefix(old)}" if name.startswith(old) else name: copied
            for name, copied in changes.files.items()
        }
        changes.contents[LATEST_NAME] = tag.encode()


def _engine_state(store: Store, assignment: Assignment, path: Location) -> Edits:
    """Read the engine's own counters, and the scheduler where the engine keeps it."""
    root = root_of(read_torch_zip(store, path))
    step = assignment.state.step
    edits: dict[PicklePath, object] = {("global_steps",): step}
    samples, old_step = root.find("global_samples"), root.get("global_steps").integer()
    if samples is not None and old_step:
        edits["global_samples",] = samples.integer() + (step - old_step) * samples.integer() // old_step
    if root.find("lr_scheduler") is not None:
        edits["lr_scheduler",] = _scheduler(store, assignment.state.path)
    return edits


def _loss_scale(store: Store, assignment: Assignment, root: Node) -> Edits:
    """Put the state's loss scale into the scaler of an optimizer file (fp16); a static one stays."""
    optimizer, folder = root.get("optimizer_state_dict"), assignment.state.path
    dynamic, scaler = optimizer.find("dynamic_loss_scale"), optimizer.mapping().get("loss_scaler")
    if dynamic is None or dynamic.value is not True or not isinstance(scaler, Record):
        return {}
    if not is_file(store, folder / LOSS_SCALER_NAME):
        raise damaged(folder, f"holds no {LOSS_SCALER_NAME}, and the loss is scaled")
    fields = Node(read_torch_zip(store, folder / LOSS_SCALER_NAME).root, LOSS_SCALER_NAME).mapping()
    return {("optimizer_state_dict", "loss_scaler"): Record(scaler.kind, scaler.args, fields)}


def _scheduler(store: Store, folder: Location) -> object:
    path = folder / SCHEDULER_NAME
    if not is_file(store, path):
        raise damaged(folder, f"holds no {SCHEDULER_NAME}, and the engine has one")
    root = read_torch_zip(store, path).root
    if next(iter(walk_tensors(root)), None) is not None:
        raise unsupported(path, "holds tensors, which are not put into the engine's")
    return root


def new_tag(assignment: Assignment) -> str:
    """Name the skeleton's tag directory by the state's step, where it is inside a save directory and tells its step."""
    skeleton = assignment.skeleton
    is_named = skeleton.root != skeleton.path and skeleton.root.name == f"global_step{skeleton.step}"
    return f"global_step{assignment.state.step}" if is_named else skeleton.root.name


# --- torch DCP


def _take_dcp(changes: SkeletonChanges, assignment: Assignment) -> None:
    """Point the metadata of everything that is no tensor of the model to the state's file, which goes along."""
    store, skeleton, state = changes.store, assignment.skeleton, assignment.state
    metadata = read_dcp_metadata(store, skeleton.path)
    for old, new in merge_state(metadata, skeleton.path, read_dcp_metadata(store, state.path), state.path).items():
        status = stat_regular(store, state.path, old)
        if status is None:
            raise damaged(state.path, f"holds no {old}, which {METADATA_NAME} names")
        changes.files[new] = CopyRange(state.path / old, 0, status.size_bytes, is_skeleton=True)
    changes.contents[METADATA_NAME] = InertPickler().dump(metadata)


_TAKERS: Mapping[str, Callable[[SkeletonChanges, Assignment], None]] = MappingProxyType({
    HF_FORMAT: _take_hf, ZERO_FORMAT: _take_zero, DCP_FORMAT: _take_dcp,
})  # fmt: skip
"""Formats whose state may come from a partial checkpoint, whose small files are there already."""

# --- composites of DeepSpeed ZeRO checkpoints as universal ones: a file for every state of every parameter ---


_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
_STEM = "archive"


def plan_universal(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite as a universal checkpoint, which DeepSpeed loads at any number of ranks."""
    skeleton = assignment.skeleton
    if skeleton.format == UNIVERSAL_FORMAT:
        return plan_composition(store, assignment)
    zero = list_zero_files(store, skeleton.root) if skeleton.format == ZERO_FORMAT else None
    if zero is None:  # of another format, or a partial checkpoint of a run with ZeRO
        message = f"only DeepSpeed ZeRO checkpoints are exported as universal ones; this is {skeleton.format}"
        raise unsupported(skeleton.path, message)
    groups = skeleton.flat_groups if skeleton.stage != 3 else [[n for group in skeleton.flat_groups for n in group]]
    steps = choose_steps(assignment, groups)
    if not steps:
        message = "its optimizer counts no steps; DeepSpeed's universal checkpoints are those of Adam"
        raise unsupported(skeleton.path, message, "compose without --export: the number of ranks stays")
    if assignment.resized is not None:
        hint = "compose it first, and export the composite"
        raise unsupported(skeleton.path, "has other parameters than the composite", hint)
    changes = SkeletonChanges(store, skeleton)
    take_state(changes, assignment)
    follow_layers(changes, assignment)
    optimizer_files = zero[0]
    folder = STATES_FOLDER if skeleton.root == skeleton.path else f"{new_tag(assignment)}/{STATES_FOLDER}"
    plans = [
        *_copied_files(changes, assignment, frozenset(optimizer_files.values())),
        *(replace(plan, name=f"{folder}/{plan.name}") for plan in _state_files(store, assignment, steps)),
    ]
    for choice in steps:
        changes.step_in_pickles(choice)
    options_name = f"{folder}/{OPTIMIZER_STATE_NAME}"
    plans.append(_options_file(options_name, changes, optimizer_files[min(optimizer_files)], skeleton.stage, steps))
    plans.sort(key=lambda plan: plan.name)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), tuple(plans))


def _copied_files(
    changes: SkeletonChanges, assignment: Assignment, left_out: frozenset[Location]
) -> Iterator[FilePlan]:
    """Plan the files that are the skeleton's: all but the optimizer's, with weights from their sources."""
    skeleton = assignment.skeleton
    for (name, kind), target in skeleton.states.items():
        if kind in DERIVED_KINDS and not assignment.keeps(name):
            changes.state([assignment.state_of(name, kind)], target)
    for name, copied in changes.files.items():
        if copied.file not in left_out and name != LATEST_NAME:
            yield changes.plan(name)
    if skeleton.root != skeleton.path:
        yield FilePlan(LATEST_UNIVERSAL_NAME, (Literal(new_tag(assignment).encode()),))


def _state_files(store: Store, assignment: Assignment, steps: tuple[StepChoice, ...]) -> Iterator[FilePlan]:
    """Plan the files of every parameter, by names in the directory of the states."""
    model = assignment.skeleton
    for (name, kind), state in model.states.items():
        if kind not in DERIVED_KINDS:
            yield _state_file(store, assignment, name, kind)
        elif kind == WEIGHT and (name, FP32) not in model.states and state.dtype.kind is DTypeKind.FLOAT:  # frozen
            yield _state_file(store, assignment, name, FP32, WEIGHT)
    for choice in steps if model.stage != 3 else ():
        # some optimizers keep the counter among the options of the parameter group
        is_option = any("param_groups" in path for _, path in choice.counter.entries)
        for name in choice.counter.parameters if not is_option else ():
            yield _step_file(f"{name}/{STEP_NAME}", choice)


def _step_file(file: str, choice: StepChoice) -> FilePlan:
    """Plan a step counter in the form that the optimizer keeps it in: a number, or a tensor of one element."""
    if choice.counter.entries:
        return new_archive(file, _STEM, int(choice.value), [])
    tensor = new_tensor("0", choice.counter.dtype, ())
    return new_archive(file, _STEM, tensor, [MemberPlan("data/0", (Literal(pack_step(choice)),))])


def _state_file(store: Store, assignment: Assignment, name: str, kind: str, frozen_kind: str = "") -> FilePlan:
    """Plan one state in the form that the stage's loader takes: shaped in a mapping, or flat (stage 3)."""
    stored = assignment.state_of(name, frozen_kind or kind)
    dtype = F32 if frozen_kind else assignment.skeleton.states[name, kind].dtype
    segments = state_segments(store, stored, dtype)
    is_flat = assignment.skeleton.stage == 3
    tensor = new_tensor("0", dtype, (stored.n_elements,) if is_flat else stored.shape)
    root: object = tensor
    if not is_flat:  # a frozen parameter was never cut
        root = {**({} if frozen_kind else {"cat_dim": 0}), PARAMETER_KEY: tensor}
    return new_archive(f"{name}/{kind}.pt", _STEM, root, [MemberPlan("data/0", segments)])


def _options_file(
    name: str, changes: SkeletonChanges, first: Location, stage: int | None, steps: tuple[StepChoice, ...]
) -> FilePlan:
    """Plan what the optimizer keeps beside tensors: options, loss scaler and, in stage 3, the one counter."""
    archive = read_torch_zip(changes.store, first)
    file = root_of(archive)
    apply_edits(file, changes.edits[first])
    options = file.at(base_optimizer_path(stage)).get("param_groups").value
    kept = file.get("optimizer_state_dict").mapping().items()
    root = {key: value for key, value in kept if key not in _SHARDED} | {"param_groups": options}
    new = NewTensors(archive)
    if stage == 3:
        (choice,) = steps
        step: object = int(choice.value)
        if not choice.counter.entries:
            step = new.add([Literal(pack_step(choice))], choice.counter.dtype, ())
        root["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": options}
    return plan_rewritten(name, archive, root, new.members)
