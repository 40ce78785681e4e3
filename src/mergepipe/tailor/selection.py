"""Units of a model, and the grammar by which a recipe selects them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from itertools import groupby
from types import MappingProxyType

from mergepipe.core.strict_json import shown
from mergepipe.errors import RecipeError, did_you_mean

# --- units ---
# the parts of a model that are taken from one checkpoint or another, and which parameter belongs to which


class UnitKind(IntEnum):
    """Kinds of unit, in the order a model runs through them."""

    EMBED = 0
    LAYER = 1
    NORM = 2
    LM_HEAD = 3
    OTHER = 4


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """`embed`, `layer N`, `norm`, `lm_head`, or `other:NAME` for what is none of these. Ordered as the model runs."""

    kind: UnitKind
    index: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.kind is UnitKind.LAYER:
            return f"layer {self.index}"
        return f"other:{self.name}" if self.kind is UnitKind.OTHER else self.kind.name.lower()


EMBED = Unit(UnitKind.EMBED)
NORM = Unit(UnitKind.NORM)
LM_HEAD = Unit(UnitKind.LM_HEAD)


def layer(index: int) -> Unit:
    """The unit of layer `index`."""
    return Unit(UnitKind.LAYER, index)


def unit_named(text: str) -> Unit:
    """Return the unit of a name. Law: `unit_named(str(unit)) == unit`."""
    kind, _, rest = text.partition(" " if text.startswith("layer ") else ":")
    if text in _PLAIN_UNITS:
        return _PLAIN_UNITS[text]
    if kind == "layer" and _INDEX.fullmatch(rest):
        return layer(int(rest))
    if kind == "other" and rest:
        return Unit(UnitKind.OTHER, name=rest)
    raise ValueError(f"{shown(text)} names no unit")


def layer_prefix(parameter: str) -> str:
    """Return what stands before the number of a layer's parameter; empty for other names."""
    match = _STACK.match(parameter)
    return f"{match['stack']}." if match else ""


_PLAIN_UNITS = {str(unit): unit for unit in (EMBED, NORM, LM_HEAD)}
_INDEX = re.compile(r"\d{1,6}", re.ASCII)
_STACK_WORDS = ("layers", "layer", "h", "blocks", "block")
_STACK = re.compile(rf"^(?P<stack>(?:.*?\.)?(?:{'|'.join(_STACK_WORDS)}))\.(?P<index>\d{{1,6}})\.", re.ASCII)
_EMBED_WORDS = frozenset({
    "embed_tokens", "wte", "wpe", "word_embeddings", "word_embeddings_layernorm", "position_embeddings",
    "token_type_embeddings", "tok_embeddings", "embed_in", "embed_positions", "embeddings", "shared", "embedding",
})  # fmt: skip
_NORM_WORDS = frozenset({
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "layernorm", "layer_norm",
})  # fmt: skip
_HEAD_WORDS = frozenset({"lm_head", "embed_out", "output", "cls", "predictions"})


@dataclass(frozen=True, slots=True)
class ModelUnits:
    """The units of one model.

    `parameters` maps each unit, in order, to the names of its parameters, in the order they were given. `tied` maps
    an alias (as `lm_head.weight`) to the parameter that owns its values; an alias is in no unit.
    """

    parameters: Mapping[Unit, tuple[str, ...]]
    tied: Mapping[str, str]

    @property
    def n_layers(self) -> int:
        return sum(unit.kind is UnitKind.LAYER for unit in self.parameters)

    def unit_of(self, parameter: str) -> Unit:
        """The unit of a parameter, or of the owner of an alias."""
        owner = self.tied.get(parameter, parameter)
        return next(unit for unit, names in self.parameters.items() if owner in names)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, unit by unit."""
        return tuple(name for names in self.parameters.values() for name in names)


def model_units(parameters: Iterable[str], tied: Mapping[str, str] | None = None) -> ModelUnits:
    """Sort parameter names into units.

    The stack of layers is the numbered list with most parameters; parameters of any other numbered list (a vision
    tower, the decoder of an encoder-decoder) go to `other:` units of their own.
    Law: every parameter that is not an alias is in exactly one unit.
    """
    aliases = dict(tied or {})
    names = [name for name in dict.fromkeys(parameters) if name not in aliases]
    counts = Counter(match["stack"] for match in map(_STACK.match, names) if match)
    stack = min(counts, key=lambda stack: (-counts[stack], stack)) if counts else None
    members: dict[Unit, list[str]] = {}
    for name in names:
        members.setdefault(_unit_of(name, stack), []).append(name)
    ordered = {unit: tuple(members[unit]) for unit in sorted(members)}
    return ModelUnits(MappingProxyType(ordered), MappingProxyType(aliases))


def _unit_of(name: str, main_stack: str | None) -> Unit:
    match = _STACK.match(name)
    if match:
        if match["stack"] == main_stack:
            return layer(int(match["index"]))
        return Unit(UnitKind.OTHER, name=f"{match['stack']}.{int(match['index'])}")
    words = name.split(".")[:-1]
    for unit, unit_words in ((LM_HEAD, _HEAD_WORDS), (EMBED, _EMBED_WORDS), (NORM, _NORM_WORDS)):
        if any(word in unit_words for word in words):
            return unit
    return Unit(UnitKind.OTHER, name=".".join(words) or name)


# --- the selection grammar: what a recipe may write for units, and which parameters that means in one model ---


_WORDS = ("embed", "norm", "lm_head", "layers all", "layers even", "layers odd", "layers 0-3", "other:*", "name:*")
_RANGE = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """Parameters that a recipe takes: `find` returns those of a model, in its order, and the alias that names them.

    `find` takes the place in the recipe, too, for the error where there are none. `text` is that of a selector, empty
    where they are named by themselves. `layers` are the indices that are named one by one.
    """

    find: Callable[[ModelUnits, str], tuple[tuple[str, ...], str | None]]
    text: str = ""
    layers: tuple[int, ...] = ()


def exact_name(name: str) -> Choice:
    """Choose one parameter, or the owner of an alias, by its full name."""

    def find(units: ModelUnits, where: str) -> tuple[tuple[str, ...], str | None]:
        if name in units.tied:
            return (units.tied[name],), name
        if name not in units.names:
            message = f"the model has no parameter {name[:100]!r}"
            raise RecipeError.of("recipe.units", where, message, did_you_mean(name, (*units.names, *units.tied)))
        return (name,), None

    return Choice(find)


def numbered_unit(number: int, text: str) -> Choice:
    """Choose a unit as zero-length ranges do: 0 is the final norm, L+1 the head, L+2 the embeddings of L layers."""

    def find(units: ModelUnits, where: str) -> tuple[tuple[str, ...], str | None]:
        unit = {0: NORM, units.n_layers + 1: LM_HEAD, units.n_layers + 2: EMBED}.get(number)
        if unit is LM_HEAD and unit not in units.parameters and units.tied:
            alias, owner = next(iter(units.tied.items()))
            return (owner,), alias
        if unit is None or unit not in units.parameters:
            raise RecipeError.of(
                "recipe.units", where, f"{text}: no such unit",
                f"with {units.n_layers} layers, 0 is the final norm, {units.n_layers + 1} the head and "
                f"{units.n_layers + 2} the embeddings",
            )  # fmt: skip
        return units.parameters[unit], None

    return Choice(find)


def selector(text: str, matches: Callable[[Unit, str], bool], layers: Sequence[int] = ()) -> Choice:
    """Choose the parameters of a unit that match; there must be some, and the `layers`."""

    def find(units: ModelUnits, where: str) -> tuple[tuple[str, ...], str | None]:
        indices = [unit.index for unit in units.parameters if unit.kind is UnitKind.LAYER]
        beyond = [index for index in layers if index not in indices]
        if beyond:
            listed = ", ".join(map(str, beyond[:5])) + (", ..." if len(beyond) > 5 else "")
            hint = f"its layers are {min(indices)} to {max(indices)}" if indices else "it has no layers"
            raise RecipeError.of("recipe.units", where, f"{text!r}: the model has no layer {listed}", hint)
        names = tuple(n for unit, names in units.parameters.items() for n in names if matches(unit, n))
        if names:
            return names, None
        if text == str(LM_HEAD) and units.tied:
            alias, owner = next(iter(units.tied.items()))
            hint = f"'{alias}' is tied to '{owner}': take {units.unit_of(owner)} instead"
        elif text.startswith("name:"):
            hint = did_you_mean(text.removeprefix("name:").strip(), units.names)
        else:
            hint = f"its units: {', '.join(map(str, units.parameters))}"
        raise RecipeError.of("recipe.units", where, f"{text!r} matches nothing in this model", hint)

    return Choice(find, text, tuple(layers))


def layer_selector(text: str, layers: Sequence[int]) -> Choice:
    """Choose layers by their indices, all of which the model must have."""
    return selector(text, lambda unit, _: unit.kind is UnitKind.LAYER and unit.index in layers, layers)


def parse_selector(text: str, where: str = "units") -> Choice:
    """Read one selector.

    `embed`, `norm`, `lm_head`; `layers all`, `layers even`, `layers odd`, `layers 3,7-9` with both ends of a range;
    `other:GLOB`, units that are none of these; `name:GLOB`, parameters across units.
    """
    stripped = " ".join(text.split())
    kind, colon, glob = stripped.partition(":")
    if colon and kind in ("name", "other"):
        pattern = glob.strip()
        if not pattern:
            message = f"{stripped!r} has no pattern"
            raise RecipeError.of("recipe.units", where, message, "write for example name:*.mlp.*")
        if kind == "name":
            return selector(stripped, lambda _, name: fnmatchcase(name, pattern))
        return selector(stripped, lambda unit, _: unit.kind is UnitKind.OTHER and fnmatchcase(unit.name, pattern))
    if stripped in _PLAIN_UNITS:
        return selector(stripped, lambda unit, _: unit == _PLAIN_UNITS[stripped])
    word, _, rest = stripped.partition(" ")
    if word in ("layers", "layer") and rest:
        return _layers(stripped, rest, where)
    raise RecipeError.of("recipe.units", where, f"{text[:80]!r} names no unit", did_you_mean(stripped, _WORDS))


def _layers(text: str, rest: str, where: str) -> Choice:
    every = {"all": (1, 0), "even": (2, 0), "odd": (2, 1)}
    if rest in every:
        modulus, remainder = every[rest]
        return selector(text, lambda unit, _: unit.kind is UnitKind.LAYER and unit.index % modulus == remainder)
    if rest[0].isalpha():
        hint = did_you_mean(rest, tuple(every))
        raise RecipeError.of("recipe.units", where, f"{text[:80]!r}: {rest[:80]!r} names no layers", hint)
    indices = tuple(index for part in rest.split(",") for index in _index_range(part.strip(), text, where))
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    if repeated:
        raise RecipeError.of(
            "recipe.units", where, f"{text[:80]!r} names layer {repeated[0]} twice",
            "name each layer once; to put a layer in several places write 'slices', as for mergekit's passthrough",
        )  # fmt: skip
    return layer_selector(text, indices)


def _index_range(part: str, text: str, where: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        message = f"{text[:80]!r}: {part[:40]!r} is neither a layer nor a range"
        raise RecipeError.of("recipe.units", where, message, "write for example layers 3,7-9")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise RecipeError.of("recipe.units", where, f"{text[:80]!r}: the range {part!r} runs backwards")
    return range(first, last + 1)


def unit_selectors(units: Iterable[Unit]) -> tuple[str, ...]:
    """Format units as recipe selectors: layers in one selector with ranges, the others one each.

    Law: `parse_selector` of each, applied to a model with these units, selects exactly them.
    """
    ordered = sorted(units)
    layers = [unit.index for unit in ordered if unit.kind is UnitKind.LAYER]
    selectors = [f"layers {','.join(_ranges(layers))}"] if layers else []
    for unit in ordered:
        if unit.kind is UnitKind.OTHER:
            selectors.append("other:" + "".join(f"[{c}]" if c in "*?[" else c for c in unit.name))
        elif unit.kind is not UnitKind.LAYER:
            selectors.append(str(unit))
    return tuple(selectors)


def _ranges(indices: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        layers = [index for _, index in run]
        yield str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
