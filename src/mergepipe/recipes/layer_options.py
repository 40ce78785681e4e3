"""Make what a configuration says of single layers follow slices: lists, numbers of layers, and rules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mergepipe.checkpoints.architectures import LayerDefaults
from mergepipe.checkpoints.config_files import Json
from mergepipe.core.strict_json import JsonValue, shown
from mergepipe.errors import UnsupportedError

Kinds = tuple[bool, ...]
"""Of every layer: whether a rule holds for it."""

# Lists of the numbers of the layers that have something, ascending; those of layers that are not there say nothing.
_NUMBERS = frozenset({
    "attn_layer_indices", "cross_attention_layers", "deepstack_visual_indexes", "full_attn_idxs", "global_attn_indexes",
    "hybrid_layer_ids", "kv_source_layers", "local_layer_ids", "mlp_only_layers", "moe_layers", "ple_layer_ids",
    "slstm_at",
})  # fmt: skip
_PER_LAYER_DICTS = ("per_layer_config",)
_PER_LAYER_TEXTS = ("hybrid_override_pattern", "layer_pattern")
_CYCLES = ("block_types",)
# Options that give tensors outside the layers some columns or rows for each layer.
_STACKED = ("hidden_size_per_layer_input",)
# Lists that are as long as there are layers only by chance.
_OTHER_LISTS = ("architectures", "token")
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class Entries:
    """A list with one entry a layer that says the same as a rule."""

    name: str
    where_it_holds: JsonValue
    elsewhere: JsonValue


@dataclass(frozen=True, slots=True)
class NumberList:
    """A list of the layers for which a rule holds, or does not, and the options that leave the decision to it."""

    name: str
    lists_exceptions: bool = False
    options: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Options that say by a rule which layers are of a kind, and what says the same layer by layer.

    `holds` takes a layer, the number of layers and the options' values; `candidates` takes the kinds that are wanted,
    and returns the values worth trying for each option.
    """

    options: tuple[str, ...]
    holds: Callable[[int, int, Sequence[int]], bool]
    candidates: Callable[[Kinds], tuple[Sequence[int], ...]]
    replacement: Entries | NumberList | None = None
    switch: str | None = None

    def values(self, section: Mapping[str, JsonValue], defaults: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the options' values; None where the configuration does not use the rule."""
        if self.switch and not section.get(self.switch):
            return None
        numbers = []
        for name in self.options:
            value = section.get(name, defaults.get(name))
            if type(value) is not int:
                return None
            numbers.append(value)
        return tuple(numbers)

    def kinds(self, values: Sequence[int], n_layers: int, exceptions: Sequence[int] = ()) -> Kinds:
        """Say of every layer whether the rule holds."""
        kinds = []
        for layer in range(n_layers):
            kinds.append(self.holds(layer, n_layers, values) and layer not in exceptions)
        return tuple(kinds)

    def exceptions(self, section: Mapping[str, JsonValue]) -> list[int]:
        """Return the layers that a list takes out of the rule."""
        if not isinstance(self.replacement, NumberList) or not self.replacement.lists_exceptions:
            return []
        listed = section.get(self.replacement.name)
        numbers: list[int] = []
        if not isinstance(listed, list):
            return numbers
        for number in listed:
            if type(number) is int:
                numbers.append(number)
        return numbers

    def is_replaced(self, section: Mapping[str, JsonValue], n_layers: int) -> bool:
        """Whether the configuration says layer by layer what the rule says, so that nothing reads the rule."""
        if self.replacement is None:
            return False
        listed = section.get(self.replacement.name)
        if isinstance(self.replacement, NumberList):
            return isinstance(listed, list) and not self.replacement.lists_exceptions
        return isinstance(listed, list) and len(listed) == n_layers


def _periods(kinds: Kinds) -> range:
    return range(1, len(kinds) + 2)


def _first(kinds: Kinds) -> int:
    return kinds.index(True) if True in kinds else len(kinds)


def _last(kinds: Kinds) -> int:
    return len(kinds) - 1 - kinds[::-1].index(True) if True in kinds else -1


def _is_step(layer: int, _: int, values: Sequence[int]) -> bool:
    return values[0] > 0 and (layer + 1) % values[0] == 0


def _is_at_offset(layer: int, _: int, values: Sequence[int]) -> bool:
    return values[0] > 0 and layer % values[0] == values[1]


def _is_behind(layer: int, _: int, values: Sequence[int]) -> bool:
    return layer >= values[0]


def _is_in_range(layer: int, n_layers: int, values: Sequence[int]) -> bool:
    start, stated_end, interval = values
    end = n_layers - 1 if stated_end == -1 else stated_end
    return start <= layer <= end and interval > 0 and (layer + 1) % interval == 0


def _step_rule(option: str, replacement: Entries | NumberList) -> LayerRule:
    return LayerRule((option,), _is_step, lambda kinds: (_periods(kinds),), replacement)


def _offset_rule(kind: str) -> LayerRule:
    options = (f"{kind}_layer_period", f"{kind}_layer_offset")
    return LayerRule(options, _is_at_offset, lambda kinds: (_periods(kinds), range(len(kinds) + 1)))


RULES = (
    LayerRule(("first_k_dense_replace",), _is_behind, lambda kinds: ([_first(kinds)],),
          Entries("mlp_layer_types", "sparse", "dense")),
    LayerRule(("num_dense_layers",), _is_behind, lambda kinds: ([_first(kinds)],)),
    LayerRule(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _is_in_range,
          lambda kinds: ([_first(kinds), 0], [_last(kinds), len(kinds) - 1], _periods(kinds))),
    LayerRule(("num_kv_shared_layers",), lambda layer, n_layers, values: layer >= n_layers - values[0],
          lambda kinds: ([len(kinds) - _first(kinds)],)),
    LayerRule(("max_window_layers",), _is_behind, lambda kinds: ([_first(kinds)],),
          Entries("layer_types", _SLIDING, _FULL), "use_sliding_window"),
    LayerRule(("global_attn_every_n_layers",), lambda layer, _, values: values[0] > 0 and layer % values[0] == 0,
          lambda kinds: (_periods(kinds),), Entries("layer_types", _FULL, _SLIDING)),
    _offset_rule("attn"),
    _offset_rule("expert"),
    _step_rule("decoder_sparse_step", NumberList("mlp_only_layers", lists_exceptions=True, options=(1,))),
    _step_rule("interleave_moe_layer_step", NumberList("moe_layers")),
    _step_rule("no_rope_layer_interval", Entries("no_rope_layers", 0, 1)),
    _step_rule("sliding_window_pattern", Entries("layer_types", _FULL, _SLIDING)),
    _step_rule("full_attention_interval", Entries("layer_types", _FULL, _LINEAR)),
    _step_rule("layer_group_size", Entries("layer_types", _FULL, _LINEAR)),
)  # fmt: skip


def follow_slices(
    section: Json, origins: Sequence[int], before: int, defaults: LayerDefaults, *, where: object
) -> None:
    """Change what a section says of its `before` layers to say it of those at `origins`, in that order.

    Raises:
        UnsupportedError: a rule does not hold for the new order, and the class reads no list in its place; or tensors
            outside the layers have columns for each layer.
    """
    after = len(origins)
    for stacked in _STACKED:
        if section.get(stacked):
            message = f"by {stacked} its embeddings have columns for each layer, which slices do not move"
            raise UnsupportedError.of("model.unsupported", where, message, "merge it without slices")
    stated = dict(section)
    for name, value in stated.items():
        section[name] = _followed(name, value, origins, before)
    for rule in RULES:
        values = rule.values(stated, defaults.options)
        if values is None or rule.is_replaced(stated, before):
            continue
        kinds = rule.kinds(values, before, rule.exceptions(stated))
        wanted = tuple(kinds[origin] for origin in origins)
        if rule.kinds(values, after, rule.exceptions(section)) != wanted:
            section.update(_restated(rule, wanted, section, defaults, where))


def _followed(name: str, value: JsonValue, origins: Sequence[int], before: int) -> JsonValue:
    """Return the value of an option for the layers at `origins`: unchanged if it says nothing of single layers."""
    if isinstance(value, list) and _is_numbers(name, value):
        numbers: list[JsonValue] = []
        for layer, origin in enumerate(origins):
            if origin in value:
                numbers.append(layer)
        return numbers
    if isinstance(value, list) and _is_per_layer(name, value, before):
        return [value[origin] for origin in origins]
    if isinstance(value, str) and name in _PER_LAYER_TEXTS and len(value) == before:
        return "".join(value[origin] for origin in origins)
    if isinstance(value, dict) and name in _PER_LAYER_DICTS:
        by_layer: Json = {}
        for layer, origin in enumerate(origins):
            if str(origin) in value:
                by_layer[str(layer)] = value[str(origin)]
        return by_layer
    if isinstance(value, list) and name in _CYCLES and value:
        entries = [value[origin % len(value)] for origin in origins]
        for layer, entry in enumerate(entries):
            if entry != value[layer % len(value)]:
                return entries
    return value


def _is_numbers(name: str, value: Sequence[JsonValue]) -> bool:
    if name not in _NUMBERS:
        return False
    for number in value:
        if type(number) is not int:
            return False
        if number < 0:
            return False
    return True


def _is_per_layer(name: str, value: Sequence[JsonValue], n_layers: int) -> bool:
    return len(value) == n_layers and name not in _NUMBERS and not any(word in name for word in _OTHER_LISTS)


def _restated(
    rule: LayerRule, wanted: Kinds, section: Mapping[str, JsonValue], defaults: LayerDefaults, where: object
) -> Json:
    """Return options under which a rule gives the kinds that are wanted, or a list in its place."""
    is_stated = all(name in section for name in rule.options)
    for values in itertools.product(*rule.candidates(wanted)):
        if is_stated and rule.kinds(values, len(wanted), rule.exceptions(section)) == wanted:
            return dict(zip(rule.options, values, strict=True))
    replacement = rule.replacement
    if isinstance(replacement, NumberList):
        numbers: list[JsonValue] = []
        for layer, holds in enumerate(wanted):
            if holds is not replacement.lists_exceptions:
                numbers.append(layer)
        options = dict(zip(rule.options, replacement.options, strict=False))
        return {**options, replacement.name: numbers}
    if replacement is not None and (replacement.name in defaults.lists or replacement.name in section):
        entries = []
        for holds in wanted:
            entries.append(replacement.where_it_holds if holds else replacement.elsewhere)
        return {replacement.name: entries}
    layers = ", ".join(str(layer) for layer, holds in enumerate(wanted) if holds)
    message = (
        f"{' and '.join(rule.options)} cannot say that of the output's layers {layers or 'none'} are what it names"
    )
    hint = "choose slices for which its rule still holds"
    raise UnsupportedError.of("model.unsupported", where, message, hint)


def stated_kinds(section: Mapping[str, JsonValue], n_layers: int, defaults: LayerDefaults) -> list[str]:
    """Say of every layer, as a text to compare, all that a section says of it."""
    facts: list[Sequence[JsonValue]] = []
    for name, value in section.items():
        if isinstance(value, list) and _is_numbers(name, value):
            facts.append([layer in value for layer in range(n_layers)])
        elif isinstance(value, list) and _is_per_layer(name, value, n_layers):
            facts.append(value)
        elif isinstance(value, str) and name in _PER_LAYER_TEXTS and len(value) == n_layers:
            facts.append([*value])
        elif isinstance(value, dict) and name in _PER_LAYER_DICTS:
            facts.append([value.get(str(layer)) for layer in range(n_layers)])
        elif isinstance(value, list) and name in _CYCLES and value:
            facts.append([value[layer % len(value)] for layer in range(n_layers)])
    for rule in RULES:
        values = rule.values(section, defaults.options)
        if values is not None and not rule.is_replaced(section, n_layers):
            facts.append([*rule.kinds(values, n_layers, rule.exceptions(section))])
    by_layer = zip(*facts, strict=True) if facts else [()] * n_layers
    return [json.dumps(of_layer, sort_keys=True, allow_nan=False) for of_layer in by_layer]


Layer = frozenset[tuple[str, tuple[int, ...]]]
"""The tensors of a layer: what their names are behind its number, and their shapes."""


def check_layers(
    before: Sequence[Layer], after: Sequence[Layer], kinds_before: Sequence[str], kinds_after: Sequence[str],
    where: object,
) -> None:  # fmt: skip
    """Refuse output layers that are not of the kind that the output's configuration says they are.

    Raises:
        UnsupportedError: a layer has other tensors than a model of that configuration builds in its place.
    """
    if len({*before}) == 1:
        return
    of_kind: dict[str, set[Layer]] = {}
    for kind, layer in zip(kinds_before, before, strict=True):
        of_kind.setdefault(kind, set()).add(layer)
    is_explained = all(len(layers) == 1 for layers in of_kind.values())
    is_first_alone = len({*before[1:]}) == 1
    for place, layer in enumerate(after):
        if is_explained:
            expected = next(iter(of_kind.get(kinds_after[place], {layer})))
        elif is_first_alone:
            expected = before[min(place, 1)]
        elif place < len(before):
            expected = before[place]
        else:
            expected = frozenset()
        if layer != expected:
            _refuse(place, layer, expected, where)


def _refuse(place: int, layer: Layer, expected: Layer, where: object) -> None:
    """Refuse a layer by a tensor that it has and should not have, or the other way round."""
    differing = sorted((layer ^ expected), key=str)
    name = differing[0][0] if differing else ""
    has = "has" if any(rest == name for rest, _ in layer) else "lacks"
    difference = f"layer {place} of the output {has} {shown(name)}"
    message = f"its layers are of several kinds: {difference}, and the configuration cannot say so"
    hint = "choose slices that keep every kind of layer at its place"
    raise UnsupportedError.of("model.unsupported", where, message, hint)


def layers_of(names: Mapping[str, tuple[int, ...]], split: Callable[[str], tuple[int, str] | None]) -> list[Layer]:
    """Return the tensors of every layer, in order."""
    layers: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for layer, rest, shape in _split(names, split):
        layers.setdefault(layer, set()).add((rest, shape))
    return [frozenset(layers[layer]) for layer in sorted(layers)]


def _split(
    names: Mapping[str, tuple[int, ...]], split: Callable[[str], tuple[int, str] | None]
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    for name, shape in names.items():
        place = split(name)
        if place is not None:
            yield *place, shape
