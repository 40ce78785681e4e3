"""Restack layers: the model that has them in another order, twice, or in another number. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from mergepipe.recipes.resolve.tasks import LayerCount
from mergepipe.tailor.checkpoint import AdamStep, TrainingCheckpoint
from mergepipe.tailor.units import ModelUnits, UnitKind, at_layer, layer, model_units

_FIRST = layer(0)


def restacked_names(names: Sequence[str], units: ModelUnits, origins: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Return the restacked model's (name, name before) pairs of a list of parameters.

    Layers follow one another where the first stood, each with its parameters in the order of `names`; all others
    keep their order.
    """
    indices = {
        name: unit.index
        for unit, members in units.parameters.items()
        if unit.kind is UnitKind.LAYER
        for name in members
    }
    members: dict[int, list[str]] = {}
    for name in names:
        if name in indices:
            members.setdefault(indices[name], []).append(name)
    first = next((place for place, name in enumerate(names) if name in indices), len(names))
    stacked = (
        (at_layer(name, place), name) for place, origin in enumerate(origins) for name in members.get(origin, ())
    )
    kept = [(name, name) for name in names if name not in indices]
    return (*kept[:first], *stacked, *kept[first:])


def fits_in_place(checkpoint: TrainingCheckpoint, origins: Sequence[int]) -> bool:
    """Whether the restacked model has the parameters, by name and shape, that the checkpoint has."""
    shapes = checkpoint.parameters
    pairs = restacked_names(tuple(shapes), checkpoint.units, origins)
    return {name: shapes[before] for name, before in pairs} == dict(shapes)


def resized(checkpoint: TrainingCheckpoint, origins: Sequence[int]) -> TrainingCheckpoint:
    """Describe the checkpoint of the restacked model: its names, shapes, dtypes, flat groups and step counters.

    The pieces of its states are those of the layers before: only form and dtype mean something.
    """

    def renamed(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        return restacked_names(names, checkpoint.units, origins)

    pairs = renamed(tuple(checkpoint.parameters))
    parameters = {name: checkpoint.parameters[before] for name, before in pairs}
    names = (*pairs, *((alias, alias) for alias in checkpoint.units.tied))
    states = {
        (name, kind): replace(checkpoint.states[before, kind], parameter=name)
        for kind in checkpoint.kinds
        for name, before in names
        if (before, kind) in checkpoint.states
    }
    return replace(
        checkpoint,
        units=model_units(parameters, checkpoint.units.tied),
        parameters=MappingProxyType(parameters),
        states=MappingProxyType(states),
        steps=tuple(step for counter in checkpoint.steps for step in _steps(counter, renamed(counter.parameters))),
        flat_groups=tuple(tuple(name for name, _ in renamed(group)) for group in checkpoint.flat_groups),
    )


def _steps(counter: AdamStep, pairs: Sequence[tuple[str, str]]) -> Iterator[AdamStep]:
    """Yield a parameter's own counter once for each place the parameter has, a shared one once."""
    if len(counter.parameters) > 1:
        yield replace(counter, parameters=tuple(name for name, _ in pairs))
    else:
        yield from (replace(counter, parameters=(name,)) for name, _ in pairs)


def layer_count(units: ModelUnits, origins: Sequence[int]) -> LayerCount:
    """Describe the restacking for the model's configuration."""
    name = units.parameters[_FIRST][0]
    prefix = name[: next(i for i, (a, b) in enumerate(zip(name, at_layer(name, 1), strict=True)) if a != b)]
    return LayerCount(prefix, units.n_layers, tuple(origins))
