"""Restack layers: the same model with its layers in another order, some more than once, or in another number. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from mergepipe.recipes.tasks import LayerCount
from mergepipe.tailor.checkpoint import AdamStep, TrainingCheckpoint
from mergepipe.tailor.selection import ModelUnits, layer, layer_prefix, model_units


def layer_count(units: ModelUnits, origins: Sequence[int]) -> LayerCount:
    """Describe a model whose layers are these layers of the model with `units`."""
    name = units.parameters[layer(origins[0])][0]
    return LayerCount(layer_prefix(name), units.n_layers, tuple(origins))


def in_layers(name: str, layers: LayerCount) -> bool:
    """Whether a name belongs to one of the layers."""
    return name.startswith(layers.prefix)


def at_layer(name: str, layers: LayerCount, index: int) -> str:
    """Return the name that a parameter of a layer has in layer `index`."""
    _, _, rest = name.removeprefix(layers.prefix).partition(".")
    return f"{layers.prefix}{index}.{rest}"


def restacked_names(names: Iterable[str], layers: LayerCount) -> tuple[tuple[str, str], ...]:
    """Return the restacked model's names, in order, each with its name before.

    Layers follow one another where the first one was, each with its names in the order of `names`; all other names
    keep their order.
    """
    members: dict[str, list[str]] = defaultdict(list)
    before: list[tuple[str, str]] = []
    behind: list[tuple[str, str]] = []
    for name in names:
        if in_layers(name, layers):
            number, _, _ = name.removeprefix(layers.prefix).partition(".")
            members[number].append(name)
        elif members:
            behind.append((name, name))
        else:
            before.append((name, name))
    stacked = [
        (at_layer(name, layers, place), name)
        for place, origin in enumerate(layers.origins)
        for name in members.get(str(origin), ())
    ]
    return (*before, *stacked, *behind)


def names_after(names: Iterable[str], layers: LayerCount) -> tuple[str, ...]:
    """Return the restacked model's names, in order."""
    return tuple(name for name, _ in restacked_names(names, layers))


def restacked(checkpoint: TrainingCheckpoint, layers: LayerCount) -> TrainingCheckpoint:
    """Describe the checkpoint of the restacked model: its names, shapes, dtypes, flat groups and step counters.

    The pieces of its states are those of the layers before: only shape and dtype mean something.
    """
    pairs = restacked_names(checkpoint.parameters, layers)
    names = (*pairs, *((alias, alias) for alias in checkpoint.units.tied))
    parameters = {name: checkpoint.parameters[before] for name, before in pairs}
    states = {
        (name, kind): replace(checkpoint.states[before, kind], parameter=name)
        for kind in checkpoint.kinds
        for name, before in names
        if (before, kind) in checkpoint.states
    }
    steps: list[AdamStep] = []
    for counter in checkpoint.steps:
        steps += _counters(counter, layers)
    return replace(
        checkpoint,
        units=model_units(parameters, checkpoint.units.tied),
        parameters=MappingProxyType(parameters),
        states=MappingProxyType(states),
        steps=tuple(steps),
        flat_groups=tuple(names_after(group, layers) for group in checkpoint.flat_groups),
    )


def _counters(counter: AdamStep, layers: LayerCount) -> Iterator[AdamStep]:
    """Yield a parameter's own counter once for each position that the parameter gets, a shared one once."""
    names = names_after(counter.parameters, layers)
    if len(counter.parameters) > 1:
        yield replace(counter, parameters=names)
        return
    for name in names:
        yield replace(counter, parameters=(name,))


def fits_in_place(checkpoint: TrainingCheckpoint, model: TrainingCheckpoint) -> bool:
    """Whether a restacked model has the checkpoint's own parameters and states, of the same shapes and dtypes."""
    return checkpoint.parameters == model.parameters and _forms(checkpoint) == _forms(model)


def _forms(checkpoint: TrainingCheckpoint) -> Mapping[tuple[str, str], object]:
    return {key: (state.dtype, state.shape) for key, state in checkpoint.states.items()}
