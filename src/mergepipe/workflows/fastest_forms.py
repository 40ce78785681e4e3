"""For merges in full by time: each packed expert is read as it is packed, or from its original if that is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mergepipe.engine.levels import sufficient_levels
from mergepipe.operators.registry import operator_named
from mergepipe.planner.rules import operator_input
from mergepipe.prices import Speeds
from mergepipe.readers.base import Graded
from mergepipe.recipe.load import reload_recipe
from mergepipe.storage.base import Store
from mergepipe.workflows.opening import Inputs, open_recipes


def in_fastest_form(inputs: Inputs, speeds: Speeds, store: Store, allow_dropped: tuple[str, ...]) -> Inputs:
    """The same inputs, opened anew with the originals of those packed experts that are expected to be read faster so.

    Indices of packed experts are read. What was decided is among the notices. A recipe of several documents, and an
    expert with an adapter, stay as they are.
    """
    if inputs.intermediates:
        return inputs
    models = inputs.recipe.inputs()
    places = {model.text: model.path for model in models}
    notices, is_swapped = [f"by time: {_speeds_text(speeds)}"], False
    for model in inputs.expert_models:
        found = inputs.checkpoints[model].encoded
        original = None if found is None or models[model].adapter is not None else found.find_original()
        if found is None or original is None:
            continue
        packed_seconds = found.cost_bytes * speeds.seconds_per_byte + _packed_seconds(inputs, model, speeds)
        raw_seconds = _original_seconds(inputs, model, speeds)
        text = f"{packed_seconds:.3g} s packed, {raw_seconds:.3g} s from {original.path}"
        is_faster = raw_seconds < packed_seconds
        notices.append(f"'{models[model].text}' is read {'from its original' if is_faster else 'packed'}: {text}")
        if is_faster:
            places[models[model].text], is_swapped = original.path, True
    if is_swapped:
        inputs = open_recipes((reload_recipe(inputs.recipe.source_text, places),), store, allow_dropped)
    return replace(inputs, notices=(*inputs.notices, *notices)) if len(notices) > 1 else inputs


def _speeds_text(speeds: Speeds) -> str:
    return f"storage of {speeds.storage_bytes_per_second / 1e6:g} MB/s, {speeds.threads} threads ({speeds.source})"


def _packed_seconds(inputs: Inputs, model: int, speeds: Speeds) -> float:
    """To read and decode what the rule needs of an expert."""
    operator, seconds = operator_named(inputs.recipe.operator.name), 0.0
    for task in inputs.resolution.tasks:
        if model not in task.expert_models or not task.base.n_elements:
            continue
        levels = dict(sufficient_levels(operator, operator_input(task), task))
        for slot in (slot for slot, own in enumerate(task.expert_models) if own == model):
            source = task.experts[slot]
            if isinstance(source, Graded):
                level = levels.get(slot, source.last_level)
                seconds += float(np.sum(source.decoding_seconds(level, speeds.decoding))) / speeds.threads
                seconds += source.at_level(level).nbytes * speeds.seconds_per_byte
            else:
                seconds += source.nbytes * speeds.seconds_per_byte
    return seconds


def _original_seconds(inputs: Inputs, model: int, speeds: Speeds) -> float:
    """To read the same tensors as they were; what is not packed in levels costs what it costs anyway."""
    nbytes = 0
    for task in inputs.resolution.tasks:
        for own, source in zip(task.expert_models, task.experts, strict=True):
            if own == model:
                found = source.find_original() if isinstance(source, Graded) else None
                nbytes += source.nbytes if found is None else found.nbytes
    return nbytes * speeds.seconds_per_byte
