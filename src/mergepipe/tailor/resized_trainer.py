"""Lay out the Trainer's checkpoint anew: weights, and `optimizer.pt`, whose numbers count the parameters."""

from __future__ import annotations

from collections.abc import Iterator

from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.inert_pickle import PickledTensor
from mergepipe.tailor.archives import plan_rewritten
from mergepipe.tailor.checkpoint import WEIGHT
from mergepipe.tailor.composition_plan import NewTensors
from mergepipe.tailor.copy_plan import FilePlan
from mergepipe.tailor.formats.contract import Node
from mergepipe.tailor.formats.hf_trainer import OPTIMIZER_NAME, numbered_parameters, read_config
from mergepipe.tailor.resized_model import ResizedModel, new_counter
from mergepipe.tailor.restacking import restacked_names


def trainer_files(result: ResizedModel) -> Iterator[FilePlan]:
    yield from result.weight_files(WEIGHT)
    folder = result.skeleton.root
    archive, root = result.open(folder / OPTIMIZER_NAME)
    new = NewTensors(archive)
    config = read_config(result.store, folder)
    names = numbered_parameters(folder, config, open_checkpoint(result.store, folder), root)
    number_of = {name: number for number, name in enumerate(names)}
    entries: dict[object, object] = {}
    n_parameters = 0
    for group in root.get("param_groups").elements():
        before = [names[node.integer()] for node in group.get("params").elements()]
        pairs = restacked_names(before, result.layers)
        group.mapping()["params"] = list(range(n_parameters, n_parameters + len(pairs)))
        for number, (name, origin) in enumerate(pairs, n_parameters):
            entry = root.get("state").find(number_of[origin])
            if entry is not None:
                entries[number] = dict(_trainer_entry(result, new, name, entry))
        n_parameters += len(pairs)
    root.mapping()["state"] = entries
    yield plan_rewritten(result.name_of(archive.file), archive, root.value, new.members)


def _trainer_entry(result: ResizedModel, new: NewTensors, name: str, old: Node) -> Iterator[tuple[str, object]]:
    """Yield the optimizer's states of one parameter, in the form of an entry of the skeleton's."""
    for kind, node in old.named_items():
        value = node.value
        if kind == "step":
            yield kind, new_counter(new, value, result.step_of[name])
        elif isinstance(value, PickledTensor):
            yield kind, new.add(result.segments(name, kind, value.dtype), value.dtype, value.shape)
        else:
            yield kind, value
