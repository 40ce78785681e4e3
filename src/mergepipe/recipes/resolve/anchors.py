"""Choose the anchor of each group of models, and the models that must be opened as full weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.operators.spec import BaseRole
from mergepipe.recipes.parse.recipe import ModelInput, ModelKey, OutputSlice, Recipe


def anchor_of(members: Sequence[ModelKey], base: ModelKey | None, *, is_slice: bool) -> ModelKey:
    """Return the model that deltas are taken against: the base if listed (or only naming), else the first."""
    return base if base is not None and (base in members or not is_slice) else members[0]


def base_key(recipe: Recipe, base: ModelInput | None) -> ModelKey | None:
    """Return the key of `base_model`, if the operator uses a base and the recipe merges that model."""
    if base is None or recipe.operator.base_role is BaseRole.NONE:
        return None
    return base.key if any(model.key == base.key for model in recipe.inputs()) else None


def weights_needed(recipe: Recipe) -> frozenset[ModelKey]:
    """Find the models that must be opened as full weights: anchors, and models whose layers are moved."""
    return frozenset(_needed(recipe))


def _needed(recipe: Recipe) -> Iterator[ModelKey]:
    for models in (recipe.models, *(module.models for module in recipe.modules)):
        if models:
            yield anchor_of([model.key for model in models], base_key(recipe, recipe.base), is_slice=False)
    for pieces in (recipe.slices, *(module.slices for module in recipe.modules)):
        for piece in pieces:
            yield from _needed_in(recipe, piece)


def _needed_in(recipe: Recipe, piece: OutputSlice) -> Iterator[ModelKey]:
    starts = {source.model.key: source.start for source in piece.sources}
    anchor = anchor_of(list(starts), base_key(recipe, piece.base or recipe.base), is_slice=True)
    yield anchor
    yield from (key for key, start in starts.items() if start != starts[anchor])
