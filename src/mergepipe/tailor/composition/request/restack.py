"""Restack layers: the same model with its layers in another order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.recipes.resolve.tasks import LayerCount
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.units import ModelUnits, at_layer, layer

_FIRST = layer(0)


def fits_in_place(checkpoint: TrainingCheckpoint, origins: Sequence[int]) -> bool:
    """Whether the restacked model has the parameters, by name and shape, that the checkpoint has."""
    shapes, layers = checkpoint.parameters, checkpoint.units.parameters

    def fits(place: int, origin: int) -> bool:
        stacked = {at_layer(name, place): shapes[name] for name in layers[layer(origin)]}
        return stacked == {name: shapes[name] for name in layers[layer(place)]}

    return len(origins) == checkpoint.units.n_layers and all(fits(*pair) for pair in enumerate(origins))


def layer_count(units: ModelUnits, origins: Sequence[int]) -> LayerCount:
    """Describe the restacking for the model's configuration."""
    name = units.parameters[_FIRST][0]
    prefix = name[: next(i for i, (a, b) in enumerate(zip(name, at_layer(name, 1), strict=True)) if a != b)]
    return LayerCount(prefix, units.n_layers, tuple(origins))
