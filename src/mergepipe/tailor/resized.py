"""Plan composites whose model has other parameters than the skeleton: files that hold tensors are laid out anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.assignment import Assignment, choose_steps, staleness_of
from mergepipe.tailor.composition_plan import CompositionPlan, SkeletonChanges, follow_layers, take_state
from mergepipe.tailor.copy_plan import FilePlan
from mergepipe.tailor.formats.dcp import DCP_FORMAT
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT
from mergepipe.tailor.formats.hf_trainer import HF_FORMAT
from mergepipe.tailor.resized_dcp import dcp_files
from mergepipe.tailor.resized_model import ResizedModel, no_other_layers
from mergepipe.tailor.resized_trainer import trainer_files
from mergepipe.tailor.resized_zero import zero_files, zero_groups

_INDEX_SUFFIX = ".index.json"


def plan_resized(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan the composite of a model with other layers than the skeleton has, in the skeleton's format.

    Files without tensors are the skeleton's, changed as in any composite.
    """
    skeleton = assignment.skeleton
    if skeleton.format not in _LAYOUTS or assignment.layers is None:
        raise no_other_layers(skeleton.path, f"is of format {skeleton.format}")
    changes = SkeletonChanges(store, skeleton)
    take_state(changes, assignment)
    follow_layers(changes, assignment)
    groups = zero_groups(store, skeleton, assignment.layers) if skeleton.format == ZERO_FORMAT else ()
    steps = choose_steps(assignment, [group.names for group in groups] or None)
    for choice in steps:
        changes.step_in_pickles(choice)
    result = ResizedModel(changes, assignment, assignment.layers, groups, steps)
    made = {plan.name: plan for plan in _LAYOUTS[skeleton.format](result)}
    old_files: set[Location] = set()
    for state in skeleton.states.values():
        for piece in state.pieces:
            old_files.update(piece.files)
    for name, copied in changes.files.items():
        if name not in made and copied.file not in old_files and not name.endswith(_INDEX_SUFFIX):
            made[name] = changes.plan(name)
    ordered = tuple(sorted(made.values(), key=lambda plan: plan.name))
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), ordered)


_LAYOUTS: Mapping[str, Callable[[ResizedModel], Iterator[FilePlan]]] = MappingProxyType({
    HF_FORMAT: trainer_files, ZERO_FORMAT: zero_files, DCP_FORMAT: dcp_files,
})  # fmt: skip
