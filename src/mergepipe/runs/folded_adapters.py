"""Describe merges that fold adapters into one base: base and adapters apart, and the tensors that each one changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, CheckpointKind, TensorEntry, files_of
from mergepipe.recipes.recipe import ModelInput
from mergepipe.recipes.tasks import MergeTask
from mergepipe.snapshots.manifest import ADAPTER_ROLE, BASE_ROLE
from mergepipe.storage.contract import BESIDE
from mergepipe.storage.location import Location

Source = tuple[str, ModelInput, Checkpoint]
"""The role of an input, its name and its place, and its files."""


def split_source(model: ModelInput, checkpoint: Checkpoint) -> Iterator[Source]:
    """Yield the base and the adapter that `model` names, of a merge that folds adapters into a base.

    An adapter that was opened for its differences alone is one of its own.
    """
    adapter = model.adapter
    if adapter is None:
        yield BASE_ROLE, model, checkpoint
        return
    base_name, adapter_name = _names_of(model, adapter)
    own = replace(model, text=adapter_name, path=adapter, adapter=None)
    if checkpoint.kind is CheckpointKind.ADAPTER:
        yield ADAPTER_ROLE, own, checkpoint
        return
    of_base: dict[str, TensorEntry] = {}
    of_adapter: dict[str, TensorEntry] = {}
    for tensor in checkpoint.tensors.values():
        for entry in tensor.stored:
            owner = of_adapter if entry.file.is_relative_to(adapter) else of_base
            owner[entry.name] = entry
    base_files, adapter_files = _files_of(checkpoint, adapter)
    base = replace(checkpoint, tensors=of_base, files=base_files, adapters=())
    yield BASE_ROLE, replace(model, text=base_name, adapter=None), base
    applied = Checkpoint(
        adapter, adapter, of_adapter, adapter_files, (), CheckpointKind.ADAPTER, adapters=checkpoint.adapters
    )
    yield ADAPTER_ROLE, own, applied


def adapters_by_tensor(adapters: Sequence[Location], tasks: Iterable[MergeTask]) -> dict[str, tuple[int, ...]]:
    """Return the adapters that change each tensor, as indices; empty for a tensor that stays as the base has it."""
    changes = {}
    for task in tasks:
        files = files_of((task.base, *task.experts))
        changing = []
        for index, adapter in enumerate(adapters):
            if any(file.is_relative_to(adapter) for file in files):
                changing.append(index)
        changes[task.name] = tuple(changing)
    return changes


def folded_summary(sources: Sequence[Source], weights: Sequence[float], n_changed: int, n_tensors: int) -> str:
    """Say in one line which adapters were folded into which base, and how many tensors that changed."""
    base = next(model.text for role, model, _ in sources if role == BASE_ROLE)
    names = []
    for role, model, _ in sources:
        if role == ADAPTER_ROLE:
            names.append(model.text)
    if any(weight != 1.0 for weight in weights):
        names = [f"{name} (weight {weight:g})" for name, weight in zip(names, weights, strict=True)]
    return f"LoRA {' and '.join(names)} folded into {base}: {n_changed} of {n_tensors} tensors changed"


def _files_of(
    checkpoint: Checkpoint, adapter: Location
) -> tuple[tuple[CheckpointFile, ...], tuple[CheckpointFile, ...]]:
    """Return the files of a base and those of the adapter applied to it, each named relative to its own place."""
    base_files = []
    adapter_files = []
    for file in checkpoint.files:
        if file.location.is_relative_to(adapter):
            own_id = replace(file.id, name=file.id.name.removeprefix(BESIDE))
            adapter_files.append(replace(file, id=own_id))
        else:
            base_files.append(file)
    return tuple(base_files), tuple(adapter_files)


def _names_of(model: ModelInput, adapter: Location) -> tuple[str, str]:
    """Cut `base+adapter` into the two names; a name may hold a plus itself."""
    cuts = []
    for index, character in enumerate(model.text):
        if character == "+":
            cuts.append((model.text[:index], model.text[index + 1 :]))
    for base_name, adapter_name in cuts:
        if _is_name_of(base_name, model.path) and _is_name_of(adapter_name, adapter):
            return base_name, adapter_name
    return cuts[0]


def _is_name_of(text: str, place: Location) -> bool:
    """Whether the last part of a name is that of a place."""
    return text.partition("@")[0].rstrip("/").rpartition("/")[2] == place.model_name
