"""Compare the tensors of a model with the weights that its architecture has, without building the model.

The table that `tools/architectures.py` makes says, by class of transformers, which weights are in every model, which
in every layer or in none, which only together with others, and what loading renames.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from mergepipe.checkpoints.architectures import other_spelling
from mergepipe.checkpoints.config_files import TIED_KEY
from mergepipe.core.strict_json import JsonValue, shown
from mergepipe.core.units import plural

TABLE_NAME = "architecture_names.json"
REQUIRED = 0  # in every layer, or at all where it is in none
ALL_OR_NONE = -1  # in every layer or in none
OPTIONAL = -2
# Any positive number: together with the others of that number, in the layers that have one of them.

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LEAVES = (".weight", ".bias")
# Buffers of old files, and layers that predict further tokens, which loaders leave out.
_LEFT_OUT = re.compile(
    r"inv_freq|position_ids|masked_bias|attn(ention)?\.bias$|num_batches_tracked|relative_position_index"
    r"|(^|\.)(mtp|nextn|eh_proj|enorm|hnorm|shared_head)\b"
)
_NOTHING = re.compile(r"(?!)")
_LEAST_SHARE = 0.5  # of the required weights: with fewer it is another layout, which is not known
_N_NAMED = 3


@dataclass(frozen=True, slots=True)
class NameProblems:
    """Weights that a model lacks, and tensors that no weight of its architecture is called.

    `is_like_base`: the architecture is not known, and the base is what the model is compared with.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    is_like_base: bool = False

    def texts(self) -> list[str]:
        """Say both, with the first names."""
        texts = []
        if self.missing:
            weights = plural(len(self.missing), "weight")
            reason = "which the base has" if self.is_like_base else "which loading draws at random"
            texts.append(f"the output lacks {weights}, {reason}: {_first_names(self.missing)}")
        if self.unexpected:
            tensors = plural(len(self.unexpected), "tensor")
            names = _first_names(self.unexpected)
            if self.is_like_base:
                texts.append(f"the output has {tensors} that the base has not: {names}")
            else:
                texts.append(f"loading ignores {tensors} of the output: {names}")
        return texts


def _first_names(names: Collection[str]) -> str:
    named = ", ".join(shown(name) for name in sorted(names)[:_N_NAMED])
    return named + (", ..." if len(names) > _N_NAMED else "")


def name_problems(
    config: Mapping[str, JsonValue], tensors: Iterable[str], base: Iterable[str] = ()
) -> NameProblems | None:
    """Compare the names of a model's tensors with those of the class in its configuration.

    Where the class is not known, or a repository's own, and where most of its weights have other names, so that the
    layout is not known, they are compared with the names of the `base` that it is made from. None without one, and
    where weights are quantised.
    """
    if config.get("quantization_config"):
        return None
    by_stem = _by_stem(tensors)
    problems = _problems_of_class(config, by_stem)
    like = None if problems is not None else names_like(_by_stem(base))
    if like is None:
        return problems
    compared = like.compared(by_stem, is_tied=True)
    return None if compared is None else replace(compared, is_like_base=True)


def is_made_by_loading(config: Mapping[str, JsonValue], name: str) -> bool:
    """Whether loading a model of this class makes a weight by joining or splitting tensors of its files."""
    names = _names_of(config)
    transforms = () if names is None else names.transforms
    targets = (target for transform in transforms if transform.converts for target in transform.targets)
    return any(target.replace(r"\1", "") in name for target in targets)


def _problems_of_class(
    config: Mapping[str, JsonValue], by_stem: Mapping[str, Mapping[str, str]]
) -> NameProblems | None:
    """Compare names with those of a class of the table; None where it has none, or another layout."""
    names = None if config.get("auto_map") else _names_of(config)
    if names is None:
        return None
    is_tied = _is_tied(config)
    problems = names.compared(by_stem, is_tied=is_tied)
    if problems == NameProblems() or not names.transforms:
        return problems
    return names.compared(names.as_loaded(by_stem), is_tied=is_tied)


def _names_of(config: Mapping[str, JsonValue]) -> ClassNames | None:
    """Return the weights of the class that a configuration names, if it is transformers' own for its model type."""
    named = config.get("architectures")
    model_type = config.get("model_type")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(model_type, str):
        return None
    return class_names(f"{named[0]}@{model_type}") or class_names(f"{named[0]}", model_type)


def _is_tied(config: Mapping[str, JsonValue]) -> bool:
    """Whether the head may be the embedding: unless the configuration says that it is not."""
    text = config.get("text_config")
    stated = config.get(TIED_KEY)
    if stated is None and isinstance(text, dict):
        stated = text.get(TIED_KEY)
    return stated is not False


def _by_stem(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group names by what they are without numbers, and those by their first number, each with a name."""
    by_stem: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors:
        number = _NUMBER.search(name)
        by_stem[_NUMBER.sub("*", name)].setdefault("" if number is None else number[0], name)
    return by_stem


@dataclass(frozen=True, slots=True)
class Transform:
    """A change of names by which transformers loads files: `converts` where it also joins or splits tensors."""

    pattern: re.Pattern[str]
    targets: tuple[str, ...]
    scopes: tuple[str, ...]
    converts: bool

    def applied(self, name: str) -> tuple[list[str], str]:
        """Return the names that a name becomes, and which of the patterns matched; the name itself where none did."""
        scope = next((scope for scope in self.scopes if name.startswith(scope)), None)
        match = None if scope is None else self.pattern.search(name.removeprefix(scope))
        if scope is None or match is None:
            return [name], ""
        group = next(group for group, value in match.groupdict().items() if value is not None)
        inner = self.pattern.groupindex[group] + 1
        renamed = []
        for target in self.targets:
            text = target.replace(r"\1", match[inner] or "") if r"\1" in target else target
            renamed.append(scope + name.removeprefix(scope).replace(match[0], text, 1))
        return renamed, group


@dataclass(frozen=True, slots=True)
class ClassNames:
    """The weights of one class: `kinds` by stem, where numbers are `*`; `tied` are copies, each with its source.

    A model has its `head` unless that is tied.
    """

    kinds: Mapping[str, int]
    prefix: str
    ignored: re.Pattern[str]
    tied: Mapping[str, str]
    transforms: tuple[Transform, ...]
    head: str | None = None
    containers: frozenset[str] = field(default_factory=frozenset)

    def as_loaded(self, by_stem: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
        """Rename stems as loading does; what is joined of several is there where all of them are."""
        loaded: dict[str, dict[str, str]] = {}
        joined: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        for stem, names in by_stem.items():
            for target, source in self._loaded_names(next(iter(names.values()))):
                target_stem = self._known_stem(_NUMBER.sub("*", target)) if target else stem
                if source:
                    joined[target_stem][source] |= names
                else:
                    loaded.setdefault(target_stem, {}).update(names)
        for stem, parts in joined.items():
            places = set.intersection(*(set(part) for part in parts.values()))
            n_sources = max(self._n_sources(source) for source in parts)
            if len(parts) >= n_sources and places:
                names = next(iter(parts.values()))
                loaded.setdefault(stem, {}).update({place: names[place] for place in places})
        return loaded

    def _loaded_names(self, name: str) -> list[tuple[str, str]]:
        """Return what loading makes of a name; of names that are joined with others, by which pattern."""
        for transform in self.transforms:
            if not transform.converts:
                name = transform.applied(name)[0][0]
        for index, transform in enumerate(self.transforms):
            if transform.converts:
                targets, group = transform.applied(name)
                if group:
                    return [(target, f"{index} {group}") for target in targets]
        return [(name, "")]

    def _n_sources(self, source: str) -> int:
        transform = self.transforms[int(source.partition(" ")[0])]
        return sum(re.fullmatch(r"g\d+", group) is not None for group in transform.pattern.groupindex)

    def _known_stem(self, stem: str) -> str:
        """Add or remove the name of the model without its head, where a known name is made of it.

        Loading also renames what older releases called otherwise.
        """
        for spelling in (stem, other_spelling(stem)):
            if spelling is None:
                continue
            longer = f"{self.prefix}.{spelling}"
            shorter = spelling.removeprefix(f"{self.prefix}.")
            for name in (spelling, longer, shorter):
                if name in self.kinds:
                    return name
        return stem

    def compared(self, by_stem: Mapping[str, Mapping[str, str]], *, is_tied: bool) -> NameProblems | None:
        """Return the weights that are missing, and the tensors that are none; None where most are missing."""
        stems = {self._known_stem(stem): names for stem, names in by_stem.items()}
        for copy, source in self.tied.items():
            is_copy = is_tied or copy != self.head
            if is_copy and copy in stems and source not in stems:
                stems[source] = stems[copy]
        required = [stem for stem, kind in self.kinds.items() if kind == REQUIRED]
        if sum(stem in stems for stem in required) < _LEAST_SHARE * len(required):
            return None
        missing = self._missing(stems)
        if self.head is not None and not is_tied and self.head not in stems:
            missing.append(self.head)
        return NameProblems(tuple(missing), tuple(self._unexpected(stems)))

    def _missing(self, stems: Mapping[str, Mapping[str, str]]) -> list[str]:
        places: dict[str, set[str]] = defaultdict(set)  # by list of layers: its numbers
        filled: dict[str, set[str]] = defaultdict(set)  # by container: the layers in which it has something
        groups: dict[tuple[int, str], set[str]] = defaultdict(set)
        for stem, names in stems.items():
            if stem in self.kinds:
                places[stem.partition("*")[0]] |= names.keys()
                filled[container_of(stem)] |= names.keys()
                groups[self.kinds[stem], stem.partition("*")[0]] |= names.keys()
        missing = []
        for stem, kind in self.kinds.items():
            beginning = stem.partition("*")[0]
            if kind == OPTIONAL or (kind != REQUIRED and stem not in stems and kind == ALL_OR_NONE):
                continue
            needed = groups[kind, beginning] if kind > REQUIRED else places[beginning]
            if "*" not in stem:
                if kind == REQUIRED and stem not in stems:
                    missing.append(stem)
                continue
            if kind == REQUIRED and not places[beginning]:
                missing.append(stem)
                continue
            lacking = (needed - stems.get(stem, {}).keys()) & filled[container_of(stem)]
            missing += [stem.replace("*", place, 1) for place in sorted(lacking)]
        return missing

    def _unexpected(self, stems: Mapping[str, Mapping[str, str]]) -> list[str]:
        unexpected: list[str] = []
        for stem, names in stems.items():
            if stem in self.kinds or stem in self.tied or _LEFT_OUT.search(stem):
                continue
            parts = stem.split(".")
            parents = [".".join(parts[:cut]) for cut in range(1, len(parts))]
            is_inside = any(f"{parent}{leaf}" in self.kinds for parent in parents for leaf in _LEAVES)
            if is_inside or container_of(stem) in self.containers:
                unexpected += [name for name in names.values() if not self.ignored.search(name)]
        return unexpected


def names_like(by_stem: Mapping[str, Mapping[str, str]]) -> ClassNames | None:
    """Return the weights of models with the names of this one: all are needed that all its layers have."""
    layers: dict[str, set[str]] = defaultdict(set)
    for stem, names in by_stem.items():
        layers[stem.partition("*")[0]] |= names.keys()
    kinds = {
        stem: REQUIRED if names.keys() == layers[stem.partition("*")[0]] or "*" not in stem else OPTIONAL
        for stem, names in by_stem.items()
    }
    return ClassNames(kinds, "", _NOTHING, {}, (), containers=frozenset(map(container_of, kinds))) if kinds else None


def container_of(stem: str) -> str:
    """Return what holds the module of a weight, or the parameter itself."""
    parent, _, leaf = stem.rpartition(".")
    return parent.rpartition(".")[0] if f".{leaf}" in _LEAVES else parent


@cache
def class_names(key: str, model_type: str | None = None) -> ClassNames | None:
    """Return the weights of a class of a model type in the table, of which a line alone is parsed; None if unknown."""
    content = files("mergepipe.checkpoints").joinpath(TABLE_NAME).read_text(encoding="utf-8")
    beginning = f"\n{json.dumps(key, allow_nan=False)}: "
    start = content.find(beginning)
    if start < 0:
        return None
    line = content[start + len(beginning) :].partition("\n")[0]
    entry: dict[str, Any] = json.loads(line.removesuffix(","))
    if model_type is not None and model_type not in entry["types"]:
        return None
    kinds = dict(_flat(entry["names"], ""))
    transforms = tuple(
        Transform(re.compile(pattern), tuple(targets), tuple(scopes), bool(converts))
        for pattern, targets, scopes, converts in entry.get("loading", ())
    )
    ignored = re.compile("|".join(f"({pattern})" for pattern in entry.get("ignored", ())) or r"(?!)")
    containers = frozenset(container_of(stem) for stem in kinds)
    tied = entry.get("tied", {})
    return ClassNames(kinds, entry.get("prefix", ""), ignored, tied, transforms, entry.get("head"), containers)


def _flat(tree: Mapping[str, Any], beginning: str) -> Iterable[tuple[str, int]]:
    for part, inner in tree.items():
        if isinstance(inner, int):
            yield beginning + part, inner
        else:
            yield from _flat(inner, f"{beginning}{part}.")
