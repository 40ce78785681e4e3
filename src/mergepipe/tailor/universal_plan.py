"""Plan composites of DeepSpeed ZeRO checkpoints as universal ones: a file for every state of every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mergepipe.checkpoints.torch_file import read_torch_zip
from mergepipe.core.blocks import F32, DType, Span
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.tailor.archives import ArchiveRewrite, MemberPlan, new_archive, new_tensor
from mergepipe.tailor.assignment import (
    DERIVED_KINDS,
    Assignment,
    StepChoice,
    choose_steps,
    pickled_counters,
    staleness_of,
)
from mergepipe.tailor.checkpoint import FP32, WEIGHT, list_skeleton
from mergepipe.tailor.composition_plan import (
    CompositionPlan,
    PatchCollector,
    StateOverlay,
    apply_edits,
    overlay_state,
    pack_step,
    plan_composition,
    plan_file,
    state_segments,
)
from mergepipe.tailor.copy_plan import FilePlan, Literal
from mergepipe.tailor.formats.deepspeed import LATEST_NAME, ZERO_FORMAT, ZeroFiles, base_optimizer_path, list_zero_files
from mergepipe.tailor.formats.pickle_node import Node
from mergepipe.tailor.formats.universal import (
    LATEST_UNIVERSAL_NAME,
    OPTIMIZER_STATE_NAME,
    PARAMETER_KEY,
    STATES_FOLDER,
    STEP_NAME,
    UNIVERSAL_FORMAT,
)

_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups", "fp32_flat_groups")
_STEM = "archive"


def plan_universal(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite as a universal checkpoint, which DeepSpeed loads at any number of ranks."""
    skeleton = assignment.skeleton
    if skeleton.format == UNIVERSAL_FORMAT:
        return plan_composition(store, assignment)
    zero = list_zero_files(store, skeleton.root) if skeleton.format == ZERO_FORMAT else None
    if zero is None:  # of another format, or a partial checkpoint of a run with ZeRO
        raise UnsupportedError.of(
            "checkpoint.unsupported", skeleton.path, "only DeepSpeed ZeRO checkpoints are exported as universal ones; "
            f"this is {skeleton.format}",
        )  # fmt: skip
    groups = skeleton.flat_groups if skeleton.stage != 3 else [[n for group in skeleton.flat_groups for n in group]]
    steps = choose_steps(assignment, groups)
    if not steps:
        raise UnsupportedError.of(
            "checkpoint.unsupported", skeleton.path, "its optimizer counts no steps; DeepSpeed's universal "
            "checkpoints are those of Adam", "compose without --export: the number of ranks stays",
        )  # fmt: skip
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
