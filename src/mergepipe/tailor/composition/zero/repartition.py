"""Plan composites of DeepSpeed ZeRO checkpoints for another number of ranks, in ZeRO's own format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import field, replace

from mergepipe.checkpoints.formats.inert_values import Global, PickledTensor, Record
from mergepipe.checkpoints.formats.torch_zip import TorchArchive, read_torch_zip
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.core.values import dataclass
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT
from mergepipe.tailor.composition.archives.archive_rewrite import ArchiveRewrite, new_archive, new_tensor
from mergepipe.tailor.composition.archives.torch_writer import Size
from mergepipe.tailor.composition.archives.zip_layout import MemberPlan
from mergepipe.tailor.composition.composition_plan import (
    CompositionPlan,
    PatchCollector,
    pack_step,
    plan_file,
    state_segments,
)
from mergepipe.tailor.composition.copy.plan import FilePlan, Fill, Literal, Segment
from mergepipe.tailor.composition.request.assignment import DERIVED_KINDS, Assignment
from mergepipe.tailor.composition.request.restack import restacked_names
from mergepipe.tailor.composition.resized import is_weight_file, weight_file, whole_state
from mergepipe.tailor.composition.skeleton_files import SkeletonFile, list_skeleton
from mergepipe.tailor.composition.staleness import StepChoice, choose_steps, pickled_counters, staleness_of
from mergepipe.tailor.composition.state_overlay import StateOverlay, apply_edits, overlay_state
from mergepipe.tailor.composition.zero.sub_groups import FlatGroup, regrouped
from mergepipe.tailor.formats.contract import refuse_repartition
from mergepipe.tailor.formats.deepspeed import ZeroFiles, base_optimizer_path, list_zero_files
from mergepipe.tailor.formats.pickle_node import Node, PicklePath

_STAGE12_MASTERS = "single_partition_of_fp32_groups"
_RANK_FILE = re.compile(r"(.*zero_pp_rank_)\d+(_mp_rank_00_(?:optim|model)_states\.pt)", re.ASCII)
_RANDOM_STATE = re.compile(r"rng_state_(\d+)\.pth", re.ASCII)
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")


def plan_repartitioned(store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
    """Plan the ZeRO composite in shards for `world_size` ranks.

    Random states of ranks that there were not before are not made up: the Trainer starts those afresh.

    Raises:
        UnsupportedError: a layout that another number of ranks would cut differently.
    """
    skeleton = assignment.skeleton
    zero = list_zero_files(store, skeleton.root)
    if zero is None:  # a partial checkpoint of a run with ZeRO
        refuse_repartition(skeleton)
    overlay = overlay_state(store, assignment, list_skeleton(store, skeleton))
    first = read_torch_zip(store, zero.optimizer[min(zero.optimizer)])
    layers = None if assignment.resized is None else assignment.layers
    groups = regrouped(skeleton, Node(first.root, first.file.name), world_size, layers)
    steps = choose_steps(assignment, [group.names for group in groups])
    work = _Repartition(store, assignment, zero, overlay, groups, steps, world_size)
    plans = sorted([*work.other_files(), *work.optimizer_files()], key=lambda plan: plan.name)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), tuple(plans))


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's share of a parameter: elements `span`, at element `start` of the rank's flat partition."""

    name: str
    span: Span
    start: int


@dataclass(frozen=True, slots=True)
class _Repartition:
    store: Store
    assignment: Assignment
    zero: ZeroFiles
    overlay: StateOverlay
    groups: tuple[FlatGroup, ...]
    steps: tuple[StepChoice, ...]
    world_size: int

    @property
    def prefix(self) -> str:
        """The tag directory inside the checkpoint."""
        skeleton = self.assignment.skeleton
        return "" if skeleton.root == skeleton.path else f"{self.overlay.tag or skeleton.root.name}/"

    # --- files that are copied

    def other_files(self) -> Iterator[FilePlan]:
        """Plan all files but the optimizer's: weights patched, the number of ranks changed, the rest copied."""
        patches = PatchCollector(self.store) if self.assignment.resized else self._patches()
        for file in self.overlay.files:
            state = _RANDOM_STATE.fullmatch(file.path.name)
            is_rank_file = _RANK_FILE.fullmatch(file.path.name) or (state and int(state[1]) >= self.world_size)
            if not is_rank_file and not (self.assignment.resized and self._is_resized(file)):
                yield plan_file(self.store, file, patches, self.overlay)
        if self.assignment.resized is not None:
            yield from self._resized_files()
        if self.assignment.skeleton.stage == 3:
            yield from self._model_files(patches)

    def _patches(self) -> PatchCollector:
        """Collect patches: weights from their sources, and the number of ranks in every model file."""
        patches = PatchCollector(self.store)
        skeleton = self.assignment.skeleton
        for (name, kind), target in skeleton.states.items():
            if kind in DERIVED_KINDS and not self.assignment.keeps(name):
                patches.state(self.assignment.state_of(name, kind), target)
        for path in {self.zero.model, *(file.path for file in self._old_model_files())}:
            patches.edits[path].update(self._layout())
        return patches

    def _layout(self) -> dict[PicklePath, object]:
        """What a model file says of the number of ranks and, where it changes, of the flat groups."""
        changes: dict[PicklePath, object] = {("dp_world_size",): self.world_size}
        if tuple(group.names for group in self.groups) != self.assignment.skeleton.flat_groups:
            shapes = self.assignment.model.parameters
            changes["param_shapes",] = [{name: Size(shapes[name]) for name in group.names} for group in self.groups]
        return changes

    def _old_model_files(self) -> list[SkeletonFile]:
        matches = ((file, _RANK_FILE.fullmatch(file.path.name)) for file in self.overlay.files)
        return [file for file, match in matches if match and "model_states" in match[2]]

    def _model_files(self, patches: PatchCollector) -> Iterator[FilePlan]:
        """Stage 3 has a model file a rank, all alike: new ranks get that of an old one."""
        old = self._old_model_files()
        for rank in range(self.world_size):
            file = old[rank % len(old)]
            name = self.prefix + _RANK_FILE.sub(rf"\g<1>{rank}\g<2>", file.path.name)
            if self.assignment.resized is not None:
                yield self._resized_model_file(replace(file, name=name))
            else:
                yield plan_file(self.store, replace(file, name=name), patches, self.overlay)

    # --- files of a restacked model with other parameters

    def _is_resized(self, file: SkeletonFile) -> bool:
        return is_weight_file(file) or file.path == self.zero.model

    def _resized_files(self) -> Iterator[FilePlan]:
        """Plan the weights for other programs and, in stages 1 and 2, the one model file."""
        if any(is_weight_file(file) for file in self.overlay.files):
            yield weight_file(self.store, self.assignment, EXPORT)
        if self.assignment.model.stage != 3:
            yield from (self._resized_model_file(file) for file in self.overlay.files if file.path == self.zero.model)

    def _resized_model_file(self, file: SkeletonFile) -> FilePlan:
        """Plan a model file with the restacked module: its weights or, in stage 3, the places of weights."""
        model, layers = self.assignment.model, self.assignment.layers or ()
        archive = read_torch_zip(self.store, file.path)
        root = Node(archive.root, file.path.name)
        apply_edits({**self.overlay.edits_of(file.path), **self._layout()}, root)
        rewrite = ArchiveRewrite(archive)
        old = root.get("module").mapping()
        module: dict[object, object] = {}
        for name, before in restacked_names([str(n) for n in old], self.assignment.skeleton.units, layers):
            form = model.states.get((name, WEIGHT))
            module[name] = old[before]
            if form is not None:
                segments = tuple(whole_state(self.store, self.assignment, name, WEIGHT, form.dtype))
                module[name] = rewrite.tensor(segments, form.dtype, form.shape)
        module |= {alias: module[owner] for alias, owner in model.units.tied.items() if alias in module}
        old.clear()
        old.update(module)
        return rewrite.plan(file.name)

    # --- optimizer files

    def optimizer_files(self) -> Iterator[FilePlan]:
        """Plan one optimizer file per rank, with the structure of the skeleton's first."""
        first = self.zero.optimizer[min(self.zero.optimizer)]
        counters = pickled_counters(self.steps, first)
        for rank in range(self.world_size):
            archive = read_torch_zip(self.store, first)
            apply_edits({**self.overlay.edits_of(first), **counters}, Node(archive.root, first.name))
            shard = _Shard(self, archive, rank)
            name = self.prefix + _RANK_FILE.sub(rf"\g<1>{rank}\g<2>", first.name)
            yield shard.plan(name)

    def shares(self, group: FlatGroup, rank: int) -> tuple[list[_Share], int, int]:
        """Return a rank's part of a group: shares in order, elements with padding, elements of padding."""
        model = self.assignment.model
        sizes = [(name, element_count(model.parameters[name])) for name in group.names]
        if model.stage == 3:
            return self._own_shares(sizes, rank)
        return self._cut_shares(sizes, rank)

    def _own_shares(self, sizes: Sequence[tuple[str, int]], rank: int) -> tuple[list[_Share], int, int]:
        """Stage 3: every parameter is cut by itself."""
        shares, start = [], 0
        for name, n_elements in sizes:
            share = -(-n_elements // self.world_size)
            first, last = min(rank * share, n_elements), min((rank + 1) * share, n_elements)
            if first < last:
                shares.append(_Share(name, Span(first, last), start))
            start += share
        return shares, start, 0

    def _cut_shares(self, sizes: Sequence[tuple[str, int]], rank: int) -> tuple[list[_Share], int, int]:
        """Stages 1 and 2: the group is padded to twice the number of ranks and cut in equal parts."""
        total = sum(n for _, n in sizes)
        per_rank = -(-total // (2 * self.world_size)) * 2
        n_padding = per_rank * self.world_size - total
        if n_padding >= per_rank:
            raise UnsupportedError.of(
                "tailor.world-size.small", self.assignment.skeleton.path,
                f"a flat group of {total} elements is too small for {self.world_size} ranks",
            )  # fmt: skip
        begin, end = rank * per_rank, (rank + 1) * per_rank
        shares, at = [], 0
        for name, n_elements in sizes:
            first, last = max(begin, at), min(end, at + n_elements)
            if first < last:
                shares.append(_Share(name, Span(first - at, last - at), first - begin))
            at += n_elements
        return shares, per_rank, n_padding if rank == self.world_size - 1 else 0


@dataclass(slots=True)
class _Shard:
    """One rank's optimizer file: the skeleton's structure with this rank's tensors."""

    work: _Repartition
    archive: TorchArchive
    rank: int
    members: list[MemberPlan] = field(default_factory=list)

    def plan(self, name: str) -> FilePlan:
        root = Node(self.archive.root, self.archive.file.name)
        optimizer = root.get("optimizer_state_dict")
        stage = self.work.assignment.skeleton.stage
        base = root.at(base_optimizer_path(stage))
        self._flat_groups(optimizer.get("fp32_flat_groups" if stage == 3 else _STAGE12_MASTERS), base.get("state"))
        for number, group in enumerate(base.get("param_groups").elements() if stage == 3 else ()):
            group.mapping()["params"] = [index for index, part in enumerate(self.work.groups) if part.options == number]
        self._cuts(optimizer)
        self._count_ranks(optimizer)
        return new_archive(name, self.archive.stem, self.archive.root, self.members)

    def _flat_groups(self, masters: Node, states: Node) -> None:
        """Put this rank's masters and states in the place of the skeleton's."""
        old_flats, old_states = masters.elements(), states.mapping()
        flats: list[object] = []
        entries: dict[object, object] = {}
        for number, group in enumerate(self.work.groups):
            shares, n_elements, n_padding = self.work.shares(group, self.rank)
            flats.append(self._flat(old_flats[group.like].value, FP32, shares, n_elements - n_padding))
            entry = states.find(group.like)
            if entry is not None:
                entries[number] = dict(self._entry(number, entry, shares, n_elements))
        if not isinstance(masters.value, list):
            raise masters.error("a list is needed")
        masters.value[:] = flats
        old_states.clear()
        old_states.update(entries)

    def _entry(
        self, number: int, entry: Node, shares: Sequence[_Share], n_elements: int
    ) -> Iterator[tuple[object, object]]:
        """The states of one flat group."""
        for kind, node in entry.named_items():
            value = node.value
            if not isinstance(value, PickledTensor):
                yield kind, int(self._choice(number).value) if kind == "step" else value
            elif kind == "step" or value.shape == ():
                yield kind, self._counter(number, value)
            else:
                yield kind, self._flat(value, kind, shares, n_elements)

    def _cuts(self, optimizer: Node) -> None:
        """Update the partition records of stages 1 and 2."""
        for number, group in enumerate(self.work.groups):
            shares, _, n_padding = self.work.shares(group, self.rank)
            replacements = {
                "group_paddings": n_padding,
                "param_slice_mappings": _fragments(shares),
                "param_alignment_paddings": [0] * len(group.names),
            }
            for key, replacement in replacements.items():
                node = optimizer.find(key)
                if node is not None and isinstance(node.value, list):
                    node.value[number] = replacement

    def _count_ranks(self, optimizer: Node) -> None:
        count = optimizer.get("partition_count").value
        new = [self.work.world_size] * len(count) if isinstance(count, list) else self.work.world_size
        optimizer.mapping()["partition_count"] = new

    def _flat(self, old: object, kind: str, shares: Sequence[_Share], n_elements: int) -> PickledTensor:
        """Plan a flat tensor of this rank as a new member."""
        if not isinstance(old, PickledTensor):
            raise AssertionError(f"{kind} was read as a tensor")
        assignment = self.work.assignment
        segments: list[Segment] = []
        position = 0
        for share in shares:
            stored = assignment.state_of(share.name, kind)
            segments += _gap(share.start - position, old.dtype)
            segments += state_segments(self.work.store, stored, share.span, old.dtype)
            position = share.start + share.span.n_elements
        segments += _gap(n_elements - position, old.dtype)
        return self._member(segments, old.dtype, (n_elements,))

    def _choice(self, number: int) -> StepChoice:
        names = set(self.work.groups[number].names)
        return next(c for c in self.work.steps if set(c.counter.parameters) == names)

    def _counter(self, number: int, old: PickledTensor) -> PickledTensor:
        return self._member([Literal(pack_step(self._choice(number)))], old.dtype, old.shape)

    def _member(self, segments: Sequence[Segment], dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
        key = str(len(self.members))
        self.members.append(MemberPlan(f"data/{key}", tuple(segments)))
        return new_tensor(key, dtype, shape)


def _gap(n_elements: int, dtype: DType) -> list[Segment]:
    return [Fill(n_elements * dtype.itemsize)] if n_elements else []


def _fragments(shares: Sequence[_Share]) -> dict[object, object]:
    """Build `param_slice_mappings` of one group: the position of each parameter in the rank's partition."""
    return {
        share.name: Record(_FRAGMENT, (), {"numel": share.span.n_elements, "start": share.start}) for share in shares
    }
