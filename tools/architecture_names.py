"""Find the names of weights that a class of transformers has, by building it with options changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mergepipe.checkpoints.architecture_names import ALL_OR_NONE, OPTIONAL, REQUIRED

# Options of small sections that say nothing of weights, or make a model of another kind.
_FLAGS_LEFT = re.compile(
    r"output_|return_|torchscript|use_cache|is_encoder_decoder|is_decoder|cross_attention|tf_legacy|do_sample"
    r"|early_stop|remove_invalid|chunk_size"
)
_COUNTS = re.compile(r"layer|period|offset|step|expert|rank|shared|every|interval|replace|mtp|nextn|per_layer_input")
_COUNTS_LEFT = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|depth)$|per_tok|_dim$")
_SIZES = ("embedding_size", "word_embed_proj_dim", "emb_size", "d_embed")
_ABSENT = re.compile(r"rank|expert|proj_dim|bias")
_LISTS = re.compile(r"layer_indices$|attn_idxs$|_layer_ids$|mlp_only_layers$")
_MOST_BUILDS = 40
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Change = tuple[tuple[str, ...], Any]
"""An option, by its sections and its name, and another value for it."""


@dataclass(frozen=True)
class Built:
    """The names of one build: parameters, and buffers that are stored; those that are tied, with what they equal."""

    parameters: frozenset[str]
    buffers: frozenset[str]
    tied: frozenset[tuple[str, str]]


def names_of(model: Any, tied: Mapping[str, str]) -> Built:
    """Return the names of the weights of a built model."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = set(model.state_dict())
    return Built(frozenset(stored & parameters), frozenset(stored - parameters), frozenset(tied.items()))


def flags(content: Mapping[str, Any], sections: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every option that is true or false, with its opposite."""
    for key, value in content.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from flags(value, (*sections, key))
        elif isinstance(value, bool) and not _FLAGS_LEFT.search(key):
            yield (*sections, key), not value


def counts(content: Mapping[str, Any], sections: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every option that counts something, or a size that may be another, with other values."""
    for key, value in content.items():
        if isinstance(value, dict) and key.endswith("_config") and not re.search("vision|audio", key):
            yield from counts(value, (*sections, key))
        elif key in _SIZES and type(value) is int:
            yield (*sections, key), value // 2
        elif type(value) is int and _COUNTS.search(key) and not _COUNTS_LEFT.search(key):
            for other in (0, 1, 2, None):
                if other != value:
                    yield (*sections, key), other
        elif value is None and _LISTS.search(key):
            yield (*sections, key), [1]
        elif value is None and _ABSENT.search(key):
            yield (*sections, key), 8


def nested(changes: Sequence[Change]) -> dict[str, Any]:
    """Return changes as options of a configuration."""
    options: dict[str, Any] = {}
    for (*sections, key), value in changes:
        section = options
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return options


class Builds:
    """Builds one class with options changed, several at a time where the class accepts it."""

    def __init__(self, make: Any, tied_of: Any) -> None:
        self._make = make
        self._tied_of = tied_of
        self._n_builds = 0
        self.kinds: dict[Built, tuple[Change, ...]] = {}

    def build(self, changes: tuple[Change, ...]) -> bool:
        """Build with all of these changes; return whether the class accepts them."""
        self._n_builds += 1
        try:
            with torch.device("meta"):
                model = self._make(nested(changes))
            self.kinds.setdefault(names_of(model, self._tied_of(model)), changes)
        except Exception:  # any refusal of an option
            return False
        return True

    def build_all(self, changes: tuple[Change, ...]) -> None:
        """Build with these changes at once; where that is refused, with each half of them."""
        if self._n_builds >= _MOST_BUILDS or not changes or self.build(changes):
            return
        middle = len(changes) // 2
        if middle:
            self.build_all(changes[:middle])
            self.build_all(changes[middle:])


def kinds_of_names(make: Any, tied_of: Any, content: Mapping[str, Any]) -> list[Built]:
    """Return the different sets of names that a class has with options changed; the first is that of no change."""
    builds = Builds(make, tied_of)
    if not builds.build(()):
        return []
    all_flags = tuple(flags(content))
    builds.build_all(tuple(change for change in all_flags if change[1]))
    builds.build_all(tuple(change for change in all_flags if not change[1]))
    builds.build_all(all_flags)
    for change in counts(content):
        builds.build((change,))
    return [*builds.kinds]


def entry_of(kinds: Sequence[Built], model: Any, conversions: Sequence[Any]) -> dict[str, Any] | None:
    """Return what the table says of a class; None where loading renames by rules of its own."""
    transforms = []
    for conversion in conversions:
        if type(conversion).__name__ not in ("WeightRenaming", "WeightConverter", "PrefixChange"):
            return None
        scopes = [""]
        if conversion.scope_prefix is not None:
            scope = f"{conversion.scope_prefix}." if conversion.scope_prefix else ""
            prefix = f"{conversion.base_model_prefix}." if conversion.base_model_prefix else ""
            scopes = [prefix + scope, scope]
        converts = type(conversion).__name__ == "WeightConverter"
        targets = conversion.target_patterns if converts else conversion.target_patterns[:1]
        transforms.append([conversion.compiled_sources.pattern, targets, scopes, int(converts)])
    tied: dict[str, str] = {}
    for built in kinds:
        tied |= dict(built.tied)
    entry = {
        "names": tree_of(marked(kinds, model._keys_to_ignore_on_load_missing or ())),
        "prefix": model.base_model_prefix,
        "tied": {pattern_of(name): pattern_of(source) for name, source in sorted(tied.items())},
        "ignored": sorted(model._keys_to_ignore_on_load_unexpected or ()),
        "loading": transforms,
    }
    return {key: value for key, value in entry.items() if value}


def pattern_of(name: str) -> str:
    """Replace the numbers in a name by `*`."""
    return _NUMBER.sub("*", name)


def first_number(name: str) -> str:
    """Return the number of the layer in a name."""
    match = _NUMBER.search(name)
    return "" if match is None else match[0]


def marked(kinds: Sequence[Built], not_missed: Iterable[str]) -> dict[str, int]:
    """Say of every stem in which layers of a model it is."""
    places = [places_of(built) for built in kinds]
    layers = [layers_of(stems) for stems in places]
    left_out = re.compile("|".join(f"({pattern})" for pattern in not_missed) or "(?!)")
    stems = sorted({stem for of_build in places for stem in of_build})
    copies = {pattern_of(name) for built in kinds for name, _ in built.tied}
    buffers = {pattern_of(name) for built in kinds for name in built.buffers}
    signatures: dict[tuple[Any, ...], int] = {}
    marks: dict[str, int] = {}
    for stem in stems:
        beginning = stem.partition("*")[0]
        is_full = []
        is_absent = []
        for of_build, of_lists in zip(places, layers, strict=True):
            found = of_build.get(stem, frozenset())
            is_full.append(bool(found) and found == of_lists[beginning])
            is_absent.append(not found)
        if stem in buffers or stem in copies or left_out.search(stem):
            marks[stem] = OPTIONAL
        elif all(is_full):
            marks[stem] = REQUIRED
        elif "*" not in stem:
            marks[stem] = OPTIONAL
        elif all(full or absent for full, absent in zip(is_full, is_absent, strict=True)) and not has_others(
            stem, places
        ):
            marks[stem] = ALL_OR_NONE
        else:
            signature = (beginning, *(of_build.get(stem, frozenset()) for of_build in places))
            marks[stem] = signatures.setdefault(signature, len(signatures) + 1)
    return marks


def has_others(stem: str, places: Sequence[Mapping[str, frozenset[str]]]) -> bool:
    """Whether layers have other weights where they lack this one, so that it says of what kind a layer is."""
    beginning = stem.partition("*")[0]
    with_it: list[set[str]] = []
    without_it: list[set[str]] = []
    for of_build in places:
        in_layers = {other for other in of_build if other.startswith(f"{beginning}*")}
        (with_it if stem in of_build else without_it).append(in_layers)
    return any(other - one for one in with_it for other in without_it)


def places_of(built: Built) -> dict[str, frozenset[str]]:
    """Return the layers of every stem of one build."""
    places: dict[str, set[str]] = {}
    for name in built.parameters | built.buffers:
        places.setdefault(pattern_of(name), set()).add(first_number(name))
    return {stem: frozenset(numbers) for stem, numbers in places.items()}


def layers_of(stems: Mapping[str, frozenset[str]]) -> Mapping[str, frozenset[str]]:
    """Return the numbers of every list of layers, by what precedes them."""
    lists: dict[str, frozenset[str]] = defaultdict(frozenset)
    for stem, numbers in stems.items():
        beginning = stem.partition("*")[0]
        lists[beginning] |= numbers
    return lists


def tree_of(marks: Mapping[str, int]) -> dict[str, Any]:
    """Write stems as a tree of their parts; a stem that others continue has its last parts joined."""
    tree: dict[str, Any] = {}
    for stem, mark in marks.items():
        *parents, leaf = stem.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = mark
    return tree
