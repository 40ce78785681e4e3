"""Values of a recipe that are searched: read from the recipe, proposed by trials, and put back in their places."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from mergepipe.core.strict_json import shown
from mergepipe.errors import RecipeError
from mergepipe.recipes.yaml_source import KeyPath, Value, YamlSource, key_path_text

SEARCH_KEY = "search"
LOG_KEY = "log"
_FORM = "write {search: [low, high], log: true}"


@dataclass(frozen=True, slots=True)
class Searched:
    """A value of a recipe that is searched: between two numbers, or one of several values."""

    key_path: KeyPath
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False

    @property
    def first(self) -> Any:
        """A value that may be tried: the first choice, or the lower end."""
        return self.choices[0] if self.choices else self.low

    @property
    def name(self) -> str:
        """The name of the parameter in the study: its place in the recipe."""
        return key_path_text(self.key_path)

    def proposed(self, trial: Any) -> Any:
        """Return the value that a trial of optuna tries."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        return trial.suggest_float(self.name, self.low, self.high, log=self.is_log)


def searched_values(source: YamlSource) -> list[Searched]:
    """List the values `{search: [low, high]}` and `{search: [a, b, c]}` of a recipe."""
    values = list(_searched(source, source.root, ()))
    if not values:
        message = "the recipe has no values to search"
        hint = "write `weight: {search: [0.0, 1.0]}` in the place of a number"
        raise RecipeError.of("recipe.incomplete", source.where(), message, hint)
    return values


def _searched(source: YamlSource, value: Value, at: KeyPath) -> Iterator[Searched]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _searched(source, item, (*at, index))
    elif isinstance(value, dict) and SEARCH_KEY in value:
        yield _one(source, value, at)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _searched(source, item, (*at, key))


def _one(source: YamlSource, stated: Mapping[str, Value], at: KeyPath) -> Searched:
    options = stated[SEARCH_KEY]
    is_log = stated.get(LOG_KEY, False)
    where = source.where(*at)
    for key in stated:
        if key not in (SEARCH_KEY, LOG_KEY):
            raise RecipeError.of("recipe.value", where, f"'{key}' has no effect here", _FORM)
    if not isinstance(is_log, bool):
        raise RecipeError.of("recipe.value", where, f"'log' must be true or false, found {is_log}", _FORM)
    if not isinstance(options, list) or len(options) < 2 or any(isinstance(option, list | dict) for option in options):
        message = f"a search is over [low, high] or a list of values, found {shown(options)}"
        raise RecipeError.of("recipe.value", where, message)
    numbers = [float(option) for option in options if isinstance(option, int | float) and not isinstance(option, bool)]
    if len(options) > 2 or len(numbers) < 2:
        if is_log:
            raise RecipeError.of("recipe.value", where, "'log' is for two numbers, and this is a list of values")
        return Searched(at, tuple(options))
    low, high = numbers
    least = 0.0 if is_log else -math.inf
    if not least < low < high < math.inf:
        message = f"[{low:g}, {high:g}] is no range: {least:g} < low < high < inf is needed"
        raise RecipeError.of("recipe.value", where, message)
    return Searched(at, low=low, high=high, is_log=is_log)


def with_values(root: Value, values: Mapping[KeyPath, Any]) -> dict[str, object]:
    """Return a recipe with values in the places of what is searched."""
    content: Any = copy.deepcopy(root)
    for at, value in values.items():
        holder = reduce(lambda inner, key: inner[key], at[:-1], content)
        holder[at[-1]] = value
    return dict(content)
