"""Which of the models that are merged together is the anchor, and which have to be opened as whole weights for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.operators.spec import BaseRole
from mergepipe.recipes.parse.recipe import ModelInput, ModelKey, OutputSlice, Recipe


def anchor_of(members: Sequence[ModelKey], base: ModelKey | None, *, is_slice: bool) -> ModelKey:
    """The model that the others differ from: the base where it is listed (or lends names only), else the first."""
    return base if base is not None and (base in members or not is_slice) else members[0]


def base_key(recipe: Recipe, base: ModelInput | None) -> ModelKey | None:
    """The model that `base_model` names, if that means anything to the operator and the model is one of the recipe."""
    if base is None or recipe.operator.base_role is BaseRole.NONE:
        return None
    return base.key if any(model.key == base.key for model in recipe.inputs()) else None


def weights_needed(recipe: Recipe) -> frozenset[ModelKey]:
    """Models whose own differences from the first model do not do: anchors, and those of other layers than theirs."""
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
