"""Plan a composition from an assignment: reads the structure of archives, no tensor values. Writes nothing."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from mergepipe.checkpoints.directory import stat_regular
from mergepipe.checkpoints.inert_values import PickledTensor, Record
from mergepipe.checkpoints.torch_file import Window, read_torch_zip, walk_tensors
from mergepipe.core.blocks import F32, DType, Span
from mergepipe.errors import damaged, mismatched, unsupported
from mergepipe.snapshots.manifest import UnitStaleness
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import (
    ArchiveRewrite,
    InertPickler,
    MemberPlan,
    new_archive,
    new_tensor,
    plan_edited,
    stale_checksums,
)
from mergepipe.tailor.assignment import (
    DERIVED_KINDS,
    Assignment,
    StepChoice,
    choose_steps,
    pickled_counters,
    staleness_of,
)
from mergepipe.tailor.checkpoint import (
    FP32,
    WEIGHT,
    Framework,
    Packing,
    Piece,
    SkeletonFile,
    StoredState,
    list_skeleton,
)
from mergepipe.tailor.copy_plan import FilePlan, Literal, Patch, Segment, patch_states, patched_file
from mergepipe.tailor.formats.dcp import DCP_FORMAT, METADATA_NAME, merge_state, read_dcp_metadata, unpack_piece
from mergepipe.tailor.formats.deepspeed import LATEST_NAME, ZERO_FORMAT, ZeroFiles, base_optimizer_path, list_zero_files
from mergepipe.tailor.formats.hf_trainer import (
    HF_FORMAT,
    LOSS_SCALER_NAME,
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    read_global_step,
)
from mergepipe.tailor.formats.partial import read_partial_manifest
from mergepipe.tailor.formats.pickle_node import Node, PicklePath
from mergepipe.tailor.formats.registry import format_named
from mergepipe.tailor.formats.universal import (
    LATEST_UNIVERSAL_NAME,
    OPTIMIZER_STATE_NAME,
    PARAMETER_KEY,
    STATES_FOLDER,
    STEP_NAME,
    UNIVERSAL_FORMAT,
)

_MEMBER = Location.parse("member")  # stands for a file or member whose content is being planned
_STEP_FORMS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


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
    patches = PatchCollector(store)
    for (name, kind), target in assignment.skeleton.states.items():
        if not assignment.keeps(name):
            patches.state([assignment.state_of(name, kind)], target)
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

    def state(self, sources: Sequence[StoredState], target: StoredState, weights: tuple[float, ...] = (1.0,)) -> None:
        """Write the values of a state, or the average of several, to the places of `target`."""
        if any(piece.strips for piece in target.pieces):
            hint = "export or average it as a model: parts of such checkpoints are not composed"
            raise unsupported(target.parameter, "is cut along columns, as tensor parallel training does", hint)
        self._note_windows(target.pieces)
        raw = [unpacked(self._store, source) for source in sources]
        for file, patch in patch_states(raw, unpacked(self._store, target), weights):
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
    for _, patch in patch_states([unpacked(store, stored)], target):
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
    touched = [range(patch.offset, patch.stop) for patch in file_patches]
    windows = patches.windows.get(file.path, {})  # the archives inside a file that is none itself
    checksums = stale_checksums(store, file.path, touched, tuple(windows.values()))
    return patched_file(file.name, file.path, file.size_bytes, file_patches, checksums)


def _check_apart(ordered: Sequence[Patch], file: SkeletonFile) -> None:
    """Refuse a file in which two states share bytes: one of them would be written over the other."""
    for patch, following in pairwise(ordered):
        if following.offset < patch.stop:
            message = f"two states share bytes [{following.offset}, {patch.stop})"
            raise damaged(file.path, message, "save each state as a tensor of its own: .clone() it")


# --- take a run's state from a partial checkpoint: step, scheduler, random states, optimizer options ---


_STATE_FILES = re.compile(r"trainer_state\.json|scheduler\.pt|scaler\.pt|rng_state(_\d{1,6})?\.pth", re.ASCII)
_MODEL_FILE = re.compile(r".*mp_rank_\d+_model_states\.pt", re.ASCII)
_GROUPS = "param_groups"
_RATE = "lr"

Edits = Mapping[PicklePath, object]


@dataclass(frozen=True, slots=True)
class StateOverlay:
    """The changes that the state makes to the skeleton's files.

    `files` are the skeleton's under their new names, with the state's in place of their namesakes. `edits` are new
    values in the pickles of archives, by path; `contents` are small files that are new altogether, by name.
    """

    files: tuple[SkeletonFile, ...]
    edits: Mapping[Location, Edits] = field(default_factory=lambda: MappingProxyType({}))
    contents: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    tag: str | None = None

    def edits_of(self, path: Location) -> Edits:
        return self.edits.get(path, {})


def overlay_state(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
    """Plan which small files and values the state replaces; `files` are the skeleton's."""
    if assignment.state_index is None:
        return StateOverlay(tuple(files))
    _check_state(store, assignment)
    replaced = _with_state_files(store, assignment, files)
    if assignment.skeleton.format not in _OVERLAYS:
        message = f"is of format {assignment.skeleton.format}, which takes no state from a partial checkpoint"
        raise unsupported(assignment.skeleton.path, message, "name a complete checkpoint in state_from")
    return _OVERLAYS[assignment.skeleton.format](store, assignment, replaced)


def _check_state(store: Store, assignment: Assignment) -> None:
    folder = assignment.state.path
    if not assignment.state.has_state:
        what = format_named(assignment.state.format).state_file
        raise damaged(folder, f"holds no {what} to resume from", "name another checkpoint in state_from")
    is_trainer = assignment.state.framework is Framework.TRANSFORMERS
    if is_trainer and read_global_step(store, folder) != assignment.state.step:
        raise damaged(folder, f"{TRAINER_STATE_NAME} is of another step")


def _with_state_files(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> tuple[SkeletonFile, ...]:
    folder = assignment.state.path
    source_files = {f.name: f for f in _state_files(store, folder)}
    lacking = [f.name for f in files if _STATE_FILES.fullmatch(f.name) and f.name not in source_files]
    if lacking:
        raise damaged(folder, f"holds no {lacking[0]}, which the skeleton has")
    other_files = [f for f in files if f.name not in source_files]
    return tuple(sorted([*other_files, *source_files.values()], key=lambda f: f.name))


def _state_files(store: Store, folder: Location) -> Iterator[SkeletonFile]:
    for entry in store.list(folder):
        if _STATE_FILES.fullmatch(entry.name):
            status = stat_regular(store, folder, entry.name)
            if status is not None:
                yield SkeletonFile(entry.name, folder / entry.name, status.size_bytes)


def apply_edits(edits: Edits, root: Node) -> None:
    """Apply edits to a value that is pickled again anyway."""
    for path, value in edits.items():
        root.at(path[:-1]).mapping()[path[-1]] = value


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
                edits[*place, _GROUPS, number, key] = _like(group.get(key), value)
    return edits


def _like(old: Node, value: object) -> object:
    """Convert an option's new value to the form of the old one."""
    if isinstance(old.value, PickledTensor):
        message = "is a tensor, not a plain number"
        raise unsupported(f"{old.file}: {old.path}", message, "name a complete checkpoint in state_from")
    return tuple(value) if isinstance(value, list) else value


# --- Hugging Face Trainer


def _overlay_hf(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
    """Options in the optimizer file."""
    path = assignment.skeleton.root / OPTIMIZER_NAME
    root = Node(read_torch_zip(store, path).root, OPTIMIZER_NAME)
    return StateOverlay(tuple(files), MappingProxyType({path: _options(store, assignment, root, ())}))


# --- DeepSpeed


def _overlay_zero(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
    """Step counters of the engine in every model file, options in every optimizer file, the tag's name."""
    skeleton = assignment.skeleton
    zero = list_zero_files(store, skeleton.root)
    if zero is None:
        raise AssertionError("the skeleton was read as ZeRO")
    inside = base_optimizer_path(skeleton.stage)
    edits: dict[Location, Edits] = {}
    for path in zero.optimizer.values():
        root = Node(read_torch_zip(store, path).root, path.name)
        edits[path] = {**_options(store, assignment, root, inside), **_loss_scale(store, assignment, root)}
    for file in files:
        if file.path.parent == skeleton.root and _MODEL_FILE.fullmatch(file.path.name):
            edits[file.path] = _engine_state(store, assignment, file.path)
    tag = _new_tag(assignment)
    if tag is None:
        return StateOverlay(tuple(files), MappingProxyType(edits))
    old = f"{skeleton.root.name}/"
    renamed = (replace(f, name=f"{tag}/{f.name.removeprefix(old)}") if f.name.startswith(old) else f for f in files)
    contents = MappingProxyType({LATEST_NAME: tag.encode()})
    return StateOverlay(tuple(sorted(renamed, key=lambda f: f.name)), MappingProxyType(edits), contents, tag)


def _engine_state(store: Store, assignment: Assignment, path: Location) -> Edits:
    """Read the engine's own counters, and the scheduler where the engine keeps it."""
    root = Node(read_torch_zip(store, path).root, path.name)
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


def _new_tag(assignment: Assignment) -> str | None:
    """The tag with the state's step, where the skeleton's is inside a save directory and tells its step."""
    skeleton = assignment.skeleton
    if skeleton.root == skeleton.path or skeleton.root.name != f"global_step{skeleton.step}":
        return None
    return f"global_step{assignment.state.step}"


# --- torch DCP


def _overlay_dcp(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
    """Point the metadata of everything that is no tensor of the model to the state's file, which goes along."""
    skeleton, state = assignment.skeleton, assignment.state
    metadata = read_dcp_metadata(store, skeleton.path)
    moved = merge_state(metadata, skeleton.path, read_dcp_metadata(store, state.path), state.path)
    added = []
    for old, new in moved.items():
        status = stat_regular(store, state.path, old)
        if status is None:
            raise damaged(state.path, f"holds no {old}, which {METADATA_NAME} names")
        added.append(SkeletonFile(new, state.path / old, status.size_bytes))
    contents = MappingProxyType({METADATA_NAME: InertPickler().dump(metadata)})
    return StateOverlay(tuple(sorted([*files, *added], key=lambda f: f.name)), contents=contents)


_OVERLAYS: Mapping[str, Callable[[Store, Assignment, Sequence[SkeletonFile]], StateOverlay]] = MappingProxyType({
    HF_FORMAT: _overlay_hf, ZERO_FORMAT: _overlay_zero, DCP_FORMAT: _overlay_dcp,
})  # fmt: skip
"""Formats whose state may come from a partial checkpoint: `files` have its small files already."""

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
    overlay = overlay_state(store, assignment, list_skeleton(store, skeleton))
    export = _Export(store, assignment, zero, overlay, steps)
    plans = sorted([*export.copied_files(), *export.state_files()], key=lambda plan: plan.name)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), tuple(plans))


@dataclass(frozen=True, slots=True)
class _Export:
    store: Store
    assignment: Assignment
    zero: ZeroFiles
    overlay: StateOverlay
    steps: tuple[StepChoice, ...]

    def copied_files(self) -> Iterator[FilePlan]:
        """Plan the files that are the skeleton's: all but the optimizer's, with weights from their sources."""
        patches = PatchCollector(self.store)
        skeleton = self.assignment.skeleton
        for (name, kind), target in skeleton.states.items():
            if kind in DERIVED_KINDS and not self.assignment.keeps(name):
                patches.state([self.assignment.state_of(name, kind)], target)
        for file in self.overlay.files:
            if file.path not in self.zero.optimizer.values() and file.name != LATEST_NAME:
                yield plan_file(self.store, file, patches, self.overlay)
        if self._tag:
            yield FilePlan(LATEST_UNIVERSAL_NAME, (Literal(self._tag.encode()),))

    @property
    def _tag(self) -> str:
        """The tag directory inside the checkpoint; empty where the checkpoint is one."""
        skeleton = self.assignment.skeleton
        return "" if skeleton.root == skeleton.path else self.overlay.tag or skeleton.root.name

    @property
    def _folder(self) -> str:
        return f"{self._tag}/{STATES_FOLDER}" if self._tag else STATES_FOLDER

    def state_files(self) -> Iterator[FilePlan]:
        """Plan the files of every parameter, and that of the optimizer's options."""
        model = self.assignment.skeleton
        for (name, kind), state in model.states.items():
            if kind not in DERIVED_KINDS:
                yield self._state_file(name, kind, state.dtype, kind)
            elif kind == WEIGHT and (name, FP32) not in model.states:  # frozen: there is no master
                yield self._state_file(name, FP32, F32, kind)
        for choice in self.steps if model.stage != 3 else ():
            for name in choice.counter.parameters if not _is_option(choice) else ():
                yield self._step_file(f"{self._folder}/{name}/{STEP_NAME}", choice)
        yield self._options_file()

    def _step_file(self, file: str, choice: StepChoice) -> FilePlan:
        """Plan a step counter in the form that the optimizer keeps it in: a number, or a tensor of one element."""
        if choice.counter.entries:
            return new_archive(file, _STEM, int(choice.value), [])
        tensor = new_tensor("0", choice.counter.dtype, ())
        return new_archive(file, _STEM, tensor, [MemberPlan("data/0", (Literal(pack_step(choice)),))])

    def _state_file(self, name: str, kind: str, dtype: DType, stored_kind: str) -> FilePlan:
        """Plan one state in the form that the stage's loader takes: shaped in a mapping, or flat (stage 3)."""
        stored = self.assignment.state_of(name, stored_kind)
        segments = tuple(state_segments(self.store, stored, Span(0, stored.n_elements), dtype))
        is_flat = self.assignment.skeleton.stage == 3
        tensor = new_tensor("0", dtype, (stored.n_elements,) if is_flat else stored.shape)
        root: object = tensor
        if not is_flat:  # a frozen parameter was never cut
            root = {**({"cat_dim": 0} if kind == stored_kind else {}), PARAMETER_KEY: tensor}
        return new_archive(f"{self._folder}/{name}/{kind}.pt", _STEM, root, [MemberPlan("data/0", segments)])

    def _options_file(self) -> FilePlan:
        """Plan what the optimizer keeps beside tensors: options, loss scaler and, in stage 3, the one counter."""
        first = self.zero.optimizer[min(self.zero.optimizer)]
        archive = read_torch_zip(self.store, first)
        file = Node(archive.root, first.name)
        apply_edits({**self.overlay.edits_of(first), **pickled_counters(self.steps, first)}, file)
        base = file.at(base_optimizer_path(self.assignment.skeleton.stage))
        options = base.get("param_groups").value
        kept = file.get("optimizer_state_dict").mapping().items()
        root = {key: value for key, value in kept if key not in _SHARDED} | {"param_groups": options}
        rewrite = ArchiveRewrite(replace(archive, root=root))
        if self.assignment.skeleton.stage == 3:
            (choice,) = self.steps
            step: object = int(choice.value)
            if not choice.counter.entries:
                step = rewrite.tensor((Literal(pack_step(choice)),), choice.counter.dtype, ())
            root["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": options}
        return rewrite.plan(f"{self._folder}/{OPTIMIZER_STATE_NAME}")


def _is_option(choice: StepChoice) -> bool:
    """Whether an optimizer keeps its counter among the options of the parameter group."""
    return any("param_groups" in path for _, path in choice.counter.entries)
