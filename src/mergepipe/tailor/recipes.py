"""Parse recipes: a composition in its short form or as slices, or an average; weigh the checkpoints of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from mergepipe.core.blocks import BF16, DTYPES_BY_RECIPE_NAME, F16, F32, DType
from mergepipe.core.display import shortened, yaml_document
from mergepipe.core.rounding import RoundingMode
from mergepipe.errors import NotFoundError, Problem, RecipeError, did_you_mean, invalid_option
from mergepipe.recipes.fields import DocumentReader, Findings, describe
from mergepipe.recipes.references import read_reference
from mergepipe.recipes.yaml_source import KeyPath, Value, read_yaml
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.selection import Choice, exact_name, layer_selector, numbered_unit, parse_selector

SHORT_KEYS = ("default", "take", "state_from")
TAKE_KEYS = ("from", "units")
SLICES_KEYS = ("slices", "pre_weights", "post_weights", "base_model", "merge_method", "dtype", "state_from")
_SLICE_KEYS = ("sources",)
_SOURCE_KEYS = ("model", "layer_range")
_WEIGHT_KEYS = ("name", "model")


@dataclass(frozen=True, slots=True)
class Take:
    """Units taken from one source; `where` is the position in the recipe.

    The layers of a slice become those of the result from `first_layer` on; None where units keep their positions.
    """

    source: Location
    choices: tuple[Choice, ...]
    where: str
    first_layer: int | None = None


@dataclass(frozen=True, slots=True)
class CompositionRecipe:
    """A composition as requested. `default` provides units that no take names; `state_from` None means the newest.

    `weights_dtype` is what the recipe says of the stored weights, to be checked; None where it says nothing.
    """

    path: Location
    text: str
    default: Location | None
    takes: tuple[Take, ...]
    state_from: Location | None
    weights_dtype: DType | None

    @property
    def stacked_layers(self) -> tuple[int, ...]:
        """The layer that each layer of the result is in its source; empty where layers keep their positions."""
        stacked = (take for take in self.takes if take.first_layer is not None)
        return tuple(number for take in stacked for choice in take.choices for number in choice.layers)

    @property
    def sources(self) -> tuple[Location, ...]:
        """List every named checkpoint once, in the order of the recipe."""
        named = (self.default, *(take.source for take in self.takes), self.state_from)
        return tuple(dict.fromkeys(path for path in reversed(named) if path is not None))[::-1]


def load_composition(path: Location, store: Store) -> CompositionRecipe:
    """Read and validate a recipe. Sources must exist; none is opened."""
    source = read_yaml(path.absolute(), store)
    if not isinstance(source.root, dict):
        message = f"a recipe is a mapping of names to values, found {describe(source.root)}"
        raise RecipeError(Problem("recipe.value", source.where(), message))
    reader = DocumentReader(source, Findings(RecipeError, NotFoundError), store)
    root = source.root
    is_short = not any(key in root for key in ("slices", "pre_weights", "post_weights"))
    recipe = _read_short(reader, root) if is_short else _read_slices(reader, root)
    reader.findings.raise_any()
    return recipe


def _read_short(reader: DocumentReader, root: dict[str, Value]) -> CompositionRecipe:
    reader.refuse_unknown_keys(root, SHORT_KEYS, ())
    default = _optional_source(reader, root, "default")
    entries = _entries(reader, root, "take", "write '- {from: PATH, units: [layers even, embed]}'")
    takes = [take for index, entry in enumerate(entries) if (take := _take(reader, entry, ("take", index)))]
    if default is None and not entries and "default" not in root:
        reader.refuse(
            "recipe.incomplete", ("default",), "the recipe names no checkpoint for any unit", "write 'default: PATH'"
        )
    return _recipe(reader, root, default, takes)


def _recipe(
    reader: DocumentReader, root: dict[str, Value], default: Location | None, takes: Iterable[Take]
) -> CompositionRecipe:
    state_from = _optional_source(reader, root, "state_from")
    dtype = _dtype(reader, root)
    return CompositionRecipe(reader.source.path, reader.source.text, default, tuple(takes), state_from, dtype)


def _optional_source(reader: DocumentReader, root: dict[str, Value], key: str) -> Location | None:
    return _source(reader, root[key], (key,)) if root.get(key) is not None else None


def _source(reader: DocumentReader, value: Value, key_path: KeyPath) -> Location | None:
    reference = read_reference(reader, value, key_path)
    if reference is None:
        return None
    if reference.adapter is not None:
        reader.refuse("recipe.value", key_path, "a training checkpoint cannot have an adapter")
    return reference.path.normal()


def _mapping(
    reader: DocumentReader, value: Value, at: KeyPath, known: Sequence[str], named: str
) -> dict[str, Value] | None:
    """Return a mapping of the recipe with known keys; else report it, and what keys are `named`."""
    if isinstance(value, dict):
        reader.refuse_unknown_keys(value, known, at)
        return value
    reader.wrong_kind(value, at, f"a mapping with the {named}")
    return None


def _take(reader: DocumentReader, value: Value, at: KeyPath) -> Take | None:
    entry = _mapping(reader, value, at, TAKE_KEYS, "keys 'from' and 'units'")
    if entry is None:
        return None
    source = _named_source(reader, entry, "from", at)
    units = entry.get("units")
    texts = units if isinstance(units, list) else [units]
    if units is None or not texts:
        reader.refuse(
            "recipe.incomplete", (*at, "units"), "names no units", "write for example units: [layers even, embed]"
        )
        return None
    choices: list[Choice] = []
    for index, value in enumerate(texts):
        place = (*at, "units", index) if isinstance(units, list) else (*at, "units")
        text = reader.text(value, place)
        try:
            choices += [] if text is None else [parse_selector(text, reader.source.where(*place))]
        except RecipeError as error:
            for problem in error.problems:
                reader.findings.add(RecipeError, problem.code, problem.where, problem.message, problem.hint)
    return Take(source, tuple(choices), reader.source.where(*at)) if source is not None else None


def _named_source(reader: DocumentReader, entry: dict[str, Value], key: str, at: KeyPath) -> Location | None:
    if entry.get(key) is None:
        reader.refuse("recipe.incomplete", (*at, key), "the entry names no checkpoint", f"write '{key}: PATH'")
        return None
    return _source(reader, entry[key], (*at, key))


# --- slices


def _read_slices(reader: DocumentReader, root: dict[str, Value]) -> CompositionRecipe:
    reader.refuse_unknown_keys(root, SLICES_KEYS, ())
    method = root.get("merge_method")
    if method != "passthrough":
        message = f"slices are composed with merge_method: passthrough, found {describe(method)}"
        reader.refuse("recipe.value", ("merge_method",), message)
    takes: list[Take] = []
    n_layers = 0
    for index, entry in enumerate(_entries(reader, root, "slices")):
        for take in _slice(reader, entry, ("slices", index)):
            n_sliced = sum(len(choice.layers) for choice in take.choices)
            takes.append(replace(take, first_layer=n_layers) if n_sliced else take)
            n_layers += n_sliced
    for key in ("pre_weights", "post_weights"):
        for index, entry in enumerate(_entries(reader, root, key)):
            takes += _weight(reader, entry, (key, index))
    return _recipe(reader, root, _optional_source(reader, root, "base_model"), takes)


def _entries(reader: DocumentReader, root: dict[str, Value], key: str, hint: str = "") -> list[Value]:
    value = root.get(key)
    if value is None or isinstance(value, list):
        return value or []
    reader.wrong_kind(value, (key,), "a list", hint)
    return []


def _slice(reader: DocumentReader, value: Value, at: KeyPath) -> list[Take]:
    entry = _mapping(reader, value, at, _SLICE_KEYS, "key 'sources'")
    if entry is None:
        return []
    sources = entry.get("sources")
    if not isinstance(sources, list) or len(sources) != 1:
        reader.refuse("recipe.value", (*at, "sources"), "a slice needs exactly one source")
        return []
    place = (*at, "sources", 0)
    taken = _mapping(reader, sources[0], place, _SOURCE_KEYS, "keys 'model' and 'layer_range'")
    if taken is None:
        return []
    source = _named_source(reader, taken, "model", place)
    choice = _layer_range(reader, taken.get("layer_range"), (*place, "layer_range"))
    return [Take(source, (choice,), reader.source.where(*place))] if source is not None and choice is not None else []


def _layer_range(reader: DocumentReader, value: Value, at: KeyPath) -> Choice | None:
    match value:
        case [int(first), int(last)] if bool not in (type(first), type(last)) and 0 <= first <= last <= 10**6:
            text, layers = f"layer_range [{first}, {last}]", range(first, last)
            return layer_selector(text, layers) if layers else numbered_unit(first, text)
    reader.refuse("recipe.value", at, "needs two layer numbers, the second excluded, as [0, 16]")
    return None


def _weight(reader: DocumentReader, value: Value, at: KeyPath) -> list[Take]:
    entry = _mapping(reader, value, at, _WEIGHT_KEYS, "keys 'name' and 'model'")
    if entry is None:
        return []
    name = reader.text(entry.get("name"), (*at, "name"))
    source = _named_source(reader, entry, "model", at)
    return [Take(source, (exact_name(name),), reader.source.where(*at))] if name and source is not None else []


def _dtype(reader: DocumentReader, root: dict[str, Value]) -> DType | None:
    value = root.get("dtype")
    if value is None:
        return None
    name = reader.text(value, ("dtype",))
    if name is None or name in DTYPES_BY_RECIPE_NAME:
        return DTYPES_BY_RECIPE_NAME[name] if name else None
    hint = did_you_mean(shortened(name), list(DTYPES_BY_RECIPE_NAME))
    reader.refuse("recipe.unknown-name", ("dtype",), f"unknown dtype '{shortened(name)}'", hint)
    return None


# --- schemes of averaging: the weight of each checkpoint of a run, from the oldest to the newest. Pure ---


DEFAULT_ALPHA = 0.2
_NEXT_TO_NOTHING = 1e-8


def _exponential(count: int, alpha: float) -> tuple[float, ...]:
    """`M_i <- alpha theta_i + (1 - alpha) M_(i-1)` from `M_1 = theta_1` on."""
    return tuple((alpha if place else 1.0) * (1 - alpha) ** (count - 1 - place) for place in range(count))


def _decay_shaped(remaining: Callable[[float], float]) -> Callable[[int, float], tuple[float, ...]]:
    """Merge coefficients of a learning rate that decays as `remaining` does, from 1 at 0 to 0 at 1.

    With the rate's share w_i of the i-th interval between checkpoints, `c_j = w_j - w_(j+1)`, `w_0 = 1`, and 0 after
    the last. A linear decay gives equal weights.
    """

    def weights(count: int, _alpha: float) -> tuple[float, ...]:
        shares = [*(remaining(place / count) for place in range(count)), 0.0]
        return tuple(a - b for a, b in pairwise(shares))

    return weights


SCHEMES: Mapping[str, Callable[[int, float], tuple[float, ...]]] = MappingProxyType({
    "sma": lambda count, _: (1.0,) * count,
    "ema": _exponential,
    "wma": lambda count, _: tuple(float(place + 1) for place in range(count)),  # the newest counts most
    "decay-linear": _decay_shaped(lambda t: 1 - t),
    "decay-cosine": _decay_shaped(lambda t: (1 + math.cos(math.pi * t)) / 2),
    "decay-1-sqrt": _decay_shaped(lambda t: 1 - math.sqrt(t)),
})  # fmt: skip


def scheme_weights(scheme: str, count: int, alpha: float = DEFAULT_ALPHA) -> tuple[float, ...]:
    """Return the weights of `count` checkpoints from the oldest to the newest; they sum to 1.

    Source: simple, exponential and weighted averages as in PMA (Li et al. 2025, arXiv 2505.12082); weights shaped as a
    learning-rate decay as in WSM (Tian et al. 2025, arXiv 2507.17634: `w_i = sum_(j >= i) c_j`, solved for c).
    """
    if scheme not in SCHEMES:
        raise invalid_option("--weights", f"'{scheme}' is not known", did_you_mean(scheme, list(SCHEMES)))
    if not 0 < alpha <= 1:
        raise invalid_option("--alpha", f"{alpha:g} was given", "give a number above 0, at most 1")
    return normalised(SCHEMES[scheme](count, alpha), "--weights")


def normalised(weights: Sequence[float], where: str) -> tuple[float, ...]:
    """Divide weights by their sum."""
    total = sum(weights)  # that of huge numbers is infinite, where fsum would raise
    if not math.isfinite(total) or abs(total) < _NEXT_TO_NOTHING:
        message = f"the weights {', '.join(f'{w:g}' for w in weights[:8])} sum to {total:g}"
        raise invalid_option(where, message, "give finite numbers whose sum is not 0")
    exact_total = math.fsum(weights)
    return tuple(weight / exact_total for weight in weights)


# --- parse what is to be averaged: the command's options or a recipe with the key `average`, into one frozen value ---


AVERAGE_KEY = "average"
RECIPE_KEYS = (
    "checkpoints", "weights", "alpha", "optimizer", "dtype", "rounding", "config", "adapter", "adapter_config",
    "lora_alpha",
)  # fmt: skip
_OUT_DTYPES = (F32, BF16, F16)


class OptimizerState(StrEnum):
    """The optimizer state of an average."""

    NONE = "none"  # weights alone, as a model for inference
    LAST = "last"  # a checkpoint to resume from, with the moments of the newest
    AVERAGE = "average"  # the same, with averaged moments


@dataclass(frozen=True, slots=True)
class AverageRequest:
    """Checkpoints to average; one alone is made a model as it is.

    `weights` are a scheme's name or one number a checkpoint, in the order given. `alpha` is for `ema`; None is the
    default. `dtype`, its rounding and `config` (which lends configuration and tokenizer) are for models; None is
    what the newest has. What a checkpoint's adapter is scaled by is in `adapter_config`, else `lora_alpha` over its
    rank. With `is_adapter` the adapter of one checkpoint is written, and no model. With
    `is_strict` a model whose weights are not those of its architecture is refused.
    """

    checkpoints: tuple[Location, ...]
    weights: str | tuple[float, ...] = "sma"
    alpha: float | None = None
    optimizer: OptimizerState = OptimizerState.NONE
    dtype: DType | None = None
    config: Location | None = None
    adapter_config: Location | None = None
    lora_alpha: float | None = None
    is_adapter: bool = False
    is_strict: bool = False
    is_stochastic: bool = False

    @property
    def is_model(self) -> bool:
        """Whether a model is made, or an adapter, and no checkpoint to resume from."""
        return self.optimizer is OptimizerState.NONE

    def to_yaml(self) -> str:
        """The request as a recipe; paths are absolute."""
        content: dict[str, object] = {"checkpoints": [str(path) for path in self.checkpoints]}
        content["weights"] = self.weights if isinstance(self.weights, str) else list(self.weights)
        alpha = DEFAULT_ALPHA if self.alpha is None else self.alpha
        content |= {"alpha": alpha} if self.weights == "ema" else {}
        content["optimizer"] = self.optimizer.value
        content |= {"dtype": self.dtype.recipe_name} if self.dtype is not None else {}
        content |= {"rounding": RoundingMode.STOCHASTIC.value} if self.is_stochastic else {}
        content |= {"config": str(self.config)} if self.config is not None else {}
        if self.adapter_config is not None:
            content["adapter_config"] = str(self.adapter_config)
        if self.lora_alpha is not None:
            content["lora_alpha"] = self.lora_alpha
        if self.is_adapter:
            content["adapter"] = True
        return yaml_document({AVERAGE_KEY: content}, width=120)


def out_dtype(name: str | None, where: str) -> DType | None:
    """Return the dtype of that name."""
    names = [dtype.recipe_name for dtype in _OUT_DTYPES]
    if name is not None and name not in names:
        raise invalid_option(where, f"'{name}' is not known", did_you_mean(name, names))
    return None if name is None else DTYPES_BY_RECIPE_NAME[name]


def weights_of(text: str, where: str = "--weights") -> str | tuple[float, ...]:
    """Read a scheme's name, or numbers separated by commas."""
    if text in SCHEMES:
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"'{text[:80]}' is neither a scheme nor numbers"
        raise invalid_option(where, message, did_you_mean(text, list(SCHEMES))) from None


def load_average(path: Location, store: Store) -> AverageRequest | None:
    """Read a recipe that averages; None where it composes."""
    source = read_yaml(path.absolute(), store)
    if not isinstance(source.root, dict) or AVERAGE_KEY not in source.root:
        return None
    reader = DocumentReader(source, Findings(RecipeError, NotFoundError), store)
    reader.refuse_unknown_keys(source.root, (AVERAGE_KEY,), ())
    entry = _mapping(reader, source.root[AVERAGE_KEY], (AVERAGE_KEY,), RECIPE_KEYS, "key 'checkpoints'")
    if entry is None:
        reader.findings.raise_any()
        raise AssertionError("raised above")
    listed = entry.get("checkpoints")
    if not isinstance(listed, list):
        reader.wrong_kind(listed, (AVERAGE_KEY, "checkpoints"), "a list of checkpoints")
    places = enumerate(listed if isinstance(listed, list) else [])
    references = [read_reference(reader, value, (AVERAGE_KEY, "checkpoints", index)) for index, value in places]
    config = _path(reader, entry, "config")
    adapter_config = _path(reader, entry, "adapter_config")
    alpha = _number_of(reader, entry, "alpha")
    lora_alpha = _number_of(reader, entry, "lora_alpha")
    is_adapter = entry.get("adapter") or False
    if not isinstance(is_adapter, bool):
        reader.wrong_kind(is_adapter, (AVERAGE_KEY, "adapter"), "true or false")
    optimizer = _one_of(reader, entry, "optimizer", [state.value for state in OptimizerState])
    dtype = _one_of(reader, entry, "dtype", [dtype.recipe_name for dtype in _OUT_DTYPES])
    rounding = _one_of(reader, entry, "rounding", list(RoundingMode))
    request = AverageRequest(
        tuple(reference.path.normal() for reference in references if reference is not None),
        _weights(reader, entry.get("weights")),
        alpha,
        OptimizerState(optimizer or OptimizerState.NONE),
        None if dtype is None else DTYPES_BY_RECIPE_NAME[dtype],
        config,
        adapter_config,
        lora_alpha,
        is_adapter=is_adapter is True,
        is_stochastic=rounding == RoundingMode.STOCHASTIC,
    )
    reader.findings.raise_any()
    return request


def _path(reader: DocumentReader, entry: dict[str, Value], key: str) -> Location | None:
    """Return the path that a recipe gives for a key."""
    if entry.get(key) is None:
        return None
    reference = read_reference(reader, entry[key], (AVERAGE_KEY, key))
    return None if reference is None else reference.path.normal()


def _number_of(reader: DocumentReader, entry: dict[str, Value], key: str) -> float | None:
    """Return the number that a recipe gives for a key; None where there is none, or it is reported."""
    number = _number(entry.get(key))
    if number is None and entry.get(key) is not None:
        reader.wrong_kind(entry[key], (AVERAGE_KEY, key), "a number")
    return number


def _weights(reader: DocumentReader, value: Value) -> str | tuple[float, ...]:
    if value is None:
        return "sma"
    if isinstance(value, str):
        return weights_of(value, reader.source.where(AVERAGE_KEY, "weights"))
    numbers = [_number(n) for n in value] if isinstance(value, list) else []
    known = [n for n in numbers if n is not None]
    if not numbers or len(known) < len(numbers):
        reader.wrong_kind(value, (AVERAGE_KEY, "weights"), "the name of a scheme or a list of numbers")
    return tuple(known)


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _one_of(reader: DocumentReader, entry: dict[str, Value], key: str, names: Sequence[str]) -> str | None:
    """Return the name that a recipe gives for a key; None where there is none, or one that is reported."""
    at = (AVERAGE_KEY, key)
    text = None if entry.get(key) is None else reader.text(entry[key], at)
    if text is None or text in names:
        return text
    reader.refuse("recipe.unknown-name", at, f"'{shortened(text)}' is not known", did_you_mean(shortened(text), names))
    return None
