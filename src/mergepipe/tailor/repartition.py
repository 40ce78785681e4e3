"""Composites of DeepSpeed ZeRO checkpoints for another number of ranks, in ZeRO's own format."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mergepipe.blocks import DType, Span, element_count
from mergepipe.errors import UnsupportedError
from mergepipe.readers.inert_values import Global, PickledStorage, PickledTensor, Record
from mergepipe.readers.torch_zip import TorchArchive, read_torch_zip
from mergepipe.storage.base import Store
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, giving_state
from mergepipe.tailor.checkpoint import FP32, Format, Piece, StoredState
from mergepipe.tailor.copy_plan import FilePlan, Fill, Literal, Patch, Segment, patch_states
from mergepipe.tailor.formats.deepspeed import ZeroFiles, list_zero_files
from mergepipe.tailor.pickle_node import Node
from mergepipe.tailor.planning import CompositionPlan, PatchCollector, pack_step, plan_file, unpacked
from mergepipe.tailor.skeleton_files import SkeletonFile, list_skeleton
from mergepipe.tailor.staleness import StepChoice, choose_steps, staleness_of
from mergepipe.tailor.state_overlay import require_own_state
from mergepipe.tailor.torch_writer import InertPickler
from mergepipe.tailor.zip_layout import MemberPlan, lay_out_archive, literal_member

_DEFAULT_SUB_GROUP_ELEMENTS = 1_000_000_000
_RANK_FILE = re.compile(r"(.*zero_pp_rank_)\d+(_mp_rank_00_(?:optim|model)_states\.pt)", re.ASCII)
_RANDOM_STATE = re.compile(r"rng_state_(\d+)\.pth", re.ASCII)
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_MEMBER = Path("member")  # stands for the member whose content is being planned


def plan_repartitioned(store: Store, assignment: Assignment, world_size: int) -> CompositionPlan:
    """Plan the composite in shards for `world_size` ranks.

    Random states of ranks that there were not before are not made up: the Trainer starts those afresh.

    Raises:
        UnsupportedError: another format, or a layout that another number of ranks would cut differently.
    """
    skeleton = assignment.skeleton
    zero = list_zero_files(skeleton.root) if skeleton.format is Format.ZERO else None
    if zero is None:
        raise UnsupportedError.of(
            "tailor.world-size.format", skeleton.path, "only DeepSpeed ZeRO checkpoints are written for another "
            f"number of ranks; this is {skeleton.format.value}",
        )  # fmt: skip
    require_own_state(assignment)
    steps = choose_steps(assignment)
    work = _Work(store, assignment, zero, steps, world_size)
    files = list_skeleton(skeleton)
    plans = sorted([*work.other_files(files), *work.optimizer_files()], key=lambda plan: plan.name)
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), tuple(plans), files)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank holds of a parameter: elements `span`, from element `start` of the rank's flat partition on."""

    name: str
    span: Span
    start: int


@dataclass(frozen=True, slots=True)
class _Work:
    store: Store
    assignment: Assignment
    zero: ZeroFiles
    steps: tuple[StepChoice, ...]
    world_size: int

    @property
    def prefix(self) -> str:
        """The tag directory inside the checkpoint."""
        skeleton = self.assignment.skeleton
        return "" if skeleton.root == skeleton.path else f"{skeleton.root.relative_to(skeleton.path).as_posix()}/"

    # --- files that are copied

    def other_files(self, files: Sequence[SkeletonFile]) -> Iterator[FilePlan]:
        """Everything but the optimizer files: weights patched, the number of ranks changed, the rest as it is."""
        patches = self._weight_patches()
        by_path = {file.path: file for file in files}
        old_ranks = {path for path in by_path if _RANK_FILE.fullmatch(path.name)}
        for path, file in by_path.items():
            state = _RANDOM_STATE.fullmatch(path.name)
            if path in old_ranks or (state and int(state[1]) >= self.world_size):
                continue
            if path == self.zero.model:
                patches.by_file[path].append(self._rank_count(path))
            yield plan_file(self.store, file, patches.by_file.get(path, []), {})
        if self.assignment.skeleton.stage == 3:
            yield from self._model_files(by_path)

    def _weight_patches(self) -> PatchCollector:
        patches = PatchCollector(self.store)
        skeleton = self.assignment.skeleton
        for (name, kind), target in skeleton.states.items():
            owner = skeleton.units.tied.get(name, name)
            if kind in DERIVED_KINDS and self.assignment.source_of[owner] != self.assignment.skeleton_index:
                patches.state(_given(self.assignment, name, kind), target)
        return patches

    def _model_files(self, files: Mapping[Path, SkeletonFile]) -> Iterator[FilePlan]:
        """Stage 3 has a model file a rank, all alike: new ranks get that of an old one."""
        old = sorted(p for p in files if (m := _RANK_FILE.fullmatch(p.name)) and "model_states" in m[2])
        for rank in range(self.world_size):
            path = old[rank % len(old)]
            file = files[path]
            name = self.prefix + _RANK_FILE.sub(rf"\g<1>{rank}\g<2>", path.name)
            renamed = SkeletonFile(name, path, file.size_bytes, file.mtime_ns)
            yield plan_file(self.store, renamed, [self._rank_count(path)], {})

    def _rank_count(self, path: Path) -> Patch:
        """Change the number of ranks inside a model file's pickle, in place."""
        pickle = read_torch_zip(self.store, path).pickle
        raw = self.store.read_metadata(path, pickle.offset, pickle.nbytes)
        key = rb"X\x0d\x00\x00\x00dp_world_size(?:q.|r....)?"
        found = list(re.finditer(key + rb"(K.|M..|J....)", raw, re.DOTALL))
        if len(found) != 1 or len(re.findall(key, raw, re.DOTALL)) != 1:
            raise UnsupportedError.of("tailor.world-size.count", path, "does not hold the number of ranks just once")
        number = found[0][1]
        forms = {b"K": "<B", b"M": "<H", b"J": "<i"}
        if self.world_size >= 1 << (8 * (len(number) - 1)):
            raise UnsupportedError.of(
                "tailor.world-size.count", path, f"{self.world_size} ranks do not fit into the {len(number) - 1} "
                "bytes that hold their number",
            )  # fmt: skip
        content = struct.pack(forms[number[:1]], self.world_size)
        return Patch(pickle.offset + found[0].start(1) + 1, Literal(content))

    # --- optimizer files

    def optimizer_files(self) -> Iterator[FilePlan]:
        """One file a rank, with the structure of the skeleton's first."""
        first = self.zero.optimizer[min(self.zero.optimizer)]
        _check_sub_groups(self.assignment, read_torch_zip(self.store, first), self.world_size)
        for rank in range(self.world_size):
            archive = read_torch_zip(self.store, first)
            shard = _Shard(self, archive, rank)
            name = self.prefix + _RANK_FILE.sub(rf"\g<1>{rank}\g<2>", first.name)
            yield shard.plan(name)

    def shares(self, group: int, rank: int) -> tuple[list[_Share], int, int]:
        """What a rank holds of a group: shares in order, elements with padding, elements of padding at the end."""
        skeleton = self.assignment.skeleton
        sizes = [(name, element_count(skeleton.parameters[name])) for name in skeleton.flat_groups[group]]
        if skeleton.stage == 3:
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


def _given(assignment: Assignment, name: str, kind: str) -> StoredState:
    owner = assignment.skeleton.units.tied.get(name, name)
    given = giving_state(assignment.source(owner), name, kind)
    if given is None:
        raise AssertionError(f"{kind} of {name} was checked to be there")
    return given


def _check_sub_groups(assignment: Assignment, archive: TorchArchive, world_size: int) -> None:
    """Stage 3 cuts large groups into sub-groups by the size of a rank's part: refuse where that would change."""
    skeleton = assignment.skeleton
    if skeleton.stage != 3:
        return
    root = Node(archive.root, archive.file.name)
    options = root.get("optimizer_state_dict").get("optimizer_state_dict").get("param_groups").elements()
    config = root.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    limit = zero.find("sub_group_size") if zero is not None else None
    most = (
        int(limit.value) if limit is not None and isinstance(limit.value, int | float) else _DEFAULT_SUB_GROUP_ELEMENTS
    )
    needed = [
        sum(-(-element_count(skeleton.parameters[name]) // world_size) for name in group)
        for group in skeleton.flat_groups
    ]
    if len(skeleton.flat_groups) != len(options) or any(n > most for n in needed):
        raise UnsupportedError.of(
            "tailor.world-size.sub-groups", skeleton.path,
            f"{len(options)} parameter groups are cut into sub-groups of {most} elements a rank, which another number "
            "of ranks cuts differently",
            "train with a larger sub_group_size to change the number of ranks",
        )  # fmt: skip


@dataclass(slots=True)
class _Shard:
    """One rank's optimizer file: the skeleton's structure with this rank's tensors."""

    work: _Work
    archive: TorchArchive
    rank: int
    members: list[MemberPlan] = field(default_factory=list)

    def plan(self, name: str) -> FilePlan:
        optimizer = Node(self.archive.root, self.archive.file.name).get("optimizer_state_dict")
        is_stage3 = self.work.assignment.skeleton.stage == 3
        masters = optimizer.get("fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups")
        states = optimizer.get("optimizer_state_dict" if is_stage3 else "base_optimizer_state").get("state")
        for group in range(len(self.work.assignment.skeleton.flat_groups)):
            self._group(group, masters, states.find(group), optimizer)
        self._count_ranks(optimizer)
        head = [
            literal_member("data.pkl", InertPickler().dump(self.archive.root)),
            literal_member("byteorder", b"little"),
        ]
        return lay_out_archive(name, self.archive.stem, [*head, *self.members, literal_member("version", b"3\n")])

    def _group(self, group: int, masters: Node, states: Node | None, optimizer: Node) -> None:
        shares, n_elements, n_padding = self.work.shares(group, self.rank)
        flats = masters.value
        if not isinstance(flats, list):
            raise masters.error("a list is needed")
        flats[group] = self._flat(flats[group], FP32, shares, n_elements - n_padding)
        if states is not None:
            entry = states.mapping()
            for kind, value in list(entry.items()):
                if isinstance(value, PickledTensor) and isinstance(kind, str):
                    is_counter = kind == "step" or value.shape == ()
                    entry[kind] = (
                        self._counter(group, value) if is_counter else self._flat(value, kind, shares, n_elements)
                    )
        for key, replacement in (("group_paddings", n_padding), ("param_slice_mappings", _fragments(shares))):
            node = optimizer.find(key)
            if node is not None and isinstance(node.value, list):
                node.value[group] = replacement

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
            given = unpacked(self.work.store, _given(assignment, share.name, kind))
            segments += _gap(share.start - position, old.dtype)
            segments += _elements(given, share, old.dtype)
            position = share.start + share.span.n_elements
        segments += _gap(n_elements - position, old.dtype)
        return self._member(segments, old.dtype, (n_elements,))

    def _counter(self, group: int, old: PickledTensor) -> PickledTensor:
        names = self.work.assignment.skeleton.flat_groups[group]
        choice = next(c for c in self.work.steps if set(c.counter.parameters) == set(names))
        return self._member([Literal(pack_step(choice))], old.dtype, old.shape)

    def _member(self, segments: Sequence[Segment], dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
        key = str(len(self.members))
        self.members.append(MemberPlan(f"data/{key}", tuple(segments)))
        stride = (1,) if shape else ()
        return PickledTensor(PickledStorage(key, dtype, element_count(shape)), dtype, 0, shape, stride)


def _gap(n_elements: int, dtype: DType) -> list[Segment]:
    return [Fill(n_elements * dtype.itemsize)] if n_elements else []


def _elements(given: StoredState, share: _Share, dtype: DType) -> Iterator[Segment]:
    """The elements of one share, from wherever the source keeps them."""
    place = Piece(_MEMBER, 0, share.span.n_elements * dtype.itemsize, share.span)
    target = StoredState(given.parameter, given.kind, dtype, given.shape, (place,))
    for _, patch in patch_states(given, target):
        yield patch.segment


def _fragments(shares: Sequence[_Share]) -> dict[object, object]:
    """`param_slice_mappings` of one group: where each parameter's part lies in the rank's partition."""
    return {
        share.name: Record(_FRAGMENT, (), {"numel": share.span.n_elements, "start": share.start}) for share in shares
    }
