"""Units: the parts of a model that are taken from one checkpoint or another, and which parameter belongs to which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType


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


def at_layer(parameter: str, index: int) -> str:
    """Return the name that a parameter of a layer has in layer `index`; other names are returned as they are."""
    match = _STACK.match(parameter)
    return f"{match['stack']}.{index}.{parameter[match.end() :]}" if match else parameter


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
        """The unit of a parameter, or of the owner of an alias.

        Raises:
            KeyError: the model has no such parameter.
        """
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
    stack = _main_stack(names)
    members: dict[Unit, list[str]] = {}
    for name in names:
        members.setdefault(_unit_of(name, stack), []).append(name)
    ordered = {unit: tuple(members[unit]) for unit in sorted(members)}
    return ModelUnits(MappingProxyType(ordered), MappingProxyType(aliases))


def _main_stack(names: Iterable[str]) -> str | None:
    counts = Counter(match["stack"] for match in map(_STACK.match, names) if match)
    return min(counts, key=lambda stack: (-counts[stack], stack)) if counts else None


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
