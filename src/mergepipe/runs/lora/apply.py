"""The recipe of adding adapters to a base: a merge like any other."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.checkpoints.stored_adapters import read_adapter
from mergepipe.errors import MismatchError, NotFoundError, RecipeError
from mergepipe.recipes.references import resolve_model_name
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def apply_recipe(base: str, adapters: Sequence[str], weights: Sequence[float], dtype: str | None) -> dict[str, object]:
    """Return the recipe of `base` with `adapters` added, each times its weight; relative paths stay relative.

    Raises:
        RecipeError: another number of weights than of adapters, or no adapters.
        MismatchError: two adapters store one module in full.
    """
    if not adapters:
        raise RecipeError.of("option.missing", "ADAPTER", "no adapter is given", "name one or more behind the base")
    if weights and len(weights) != len(adapters):
        message = f"{len(weights)} for {len(adapters)} adapters"
        raise RecipeError.of("option.conflict", "--weight", message, "give one for each, in order, or none")
    check_saved_modules(Stores(), adapters)
    models = [{"model": {"model": base}, "lora": adapter} for adapter in adapters]
    if len(adapters) == 1 and (not weights or weights[0] == 1.0):
        return {"merge_method": "passthrough", "models": [{"model": models[0]}], "dtype": dtype or "auto"}
    listed = [
        {"model": model, "parameters": {"weight": weight}}
        for model, weight in zip(models, weights or [1.0] * len(adapters), strict=True)
    ]
    return {"merge_method": "task_arithmetic", "base_model": base, "models": listed, "dtype": dtype or "auto"}


def check_saved_modules(store: Store, adapters: Sequence[str]) -> None:
    """Refuse adapters of which two store one module in full: at most one of them can be what the model has."""
    owners: dict[str, str] = {}
    for text, location in zip(adapters, located_adapters(store, adapters), strict=True):
        for module in read_adapter(store, location).saved_modules:
            if module in owners:
                message = f"it stores {module} in full, and so does {owners[module]}"
                raise MismatchError.of("adapter.mismatch", text, message, "apply one of the two, or merge their models")
            owners[module] = text


def located_adapters(store: Store, adapters: Sequence[str]) -> list[Location]:
    """Return where adapters are: at paths, addresses or ids of the Hub.

    Raises:
        NotFoundError: there is none.
    """
    locations = []
    for text in adapters:
        name = resolve_model_name(text, lambda candidate: store.stat(Location.of(candidate)) is not None)
        location = store.pin((name.remote or Location.of(name.path)).absolute())
        if store.stat(location) is None:
            raise NotFoundError.of("model.not-found", text, "there is no such adapter", "give its folder, or its id")
        locations.append(location)
    return locations
