"""List every output tensor with its sources, from the recipe's models, slices or modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mergepipe.checkpoints.contract import CheckpointKind, Readable
from mergepipe.errors import MismatchError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.operators.spec import BaseRole
from mergepipe.recipes.fields import Findings
from mergepipe.recipes.layer_names import (
    ANY_LAYER,
    EVERYTHING,
    SIDES,
    LayerList,
    depth_of,
    is_before_layers,
    layer_lists,
    longest,
    module_names,
    module_tensors,
    part_of,
    text_lists,
)
from mergepipe.recipes.recipe import Cases, ModelInput, ModelKey, OutputModule, OutputSlice, Recipe, Setting
from mergepipe.recipes.tasks import LayerCount


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
    if recipe.mixture is not None:
        yield from (model.key for model in recipe.inputs())
        return
    for models, slices in recipe.parts():
        if models:
            yield anchor_of([model.key for model in models], base_key(recipe, recipe.base), is_slice=False)
        for piece in slices:
            starts = {source.model.key: source.start for source in piece.sources}
            anchor = anchor_of(list(starts), base_key(recipe, piece.base or recipe.base), is_slice=True)
            yield anchor
            yield from (key for key, start in starts.items() if start != starts[anchor])


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model of the recipe with its tensors under the names that the first model has for them, in storage order."""

    input: ModelInput
    tensors: Mapping[str, Readable]
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class Member:
    """One model of a group: its index, its own parameters, and its first layer in a slice."""

    model: int
    own: Mapping[str, Setting]
    first_layer: int = 0
    numbers: int | None = None  # the model that holds its weights


def _member(index: Mapping[ModelKey, int], model: ModelInput, first_layer: int = 0) -> Member:
    weight = model.parameters.get("weight")
    is_named = isinstance(weight, Cases) and weight.named is not None
    numbers = None if model.numbers is None or is_named else index[model.numbers.key]
    return Member(index[model.key], model.parameters, first_layer, numbers)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Models that are merged together. `shared` are the enclosing parameters, innermost first.

    `takes_part`: the anchor is merged with the experts, and is not only what deltas are taken against or what lends
    names; `is_listed`: it stands among the models, with parameters of its own. `numbers` are the models that hold
    experts' weights, each with the place of the expert.
    """

    anchor: Member
    experts: tuple[Member, ...]
    shared: tuple[Mapping[str, Setting], ...]
    takes_part: bool
    is_listed: bool
    numbers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output: `sources` names the anchor's tensor, then the experts'. Without a group, a copy."""

    name: str
    group: Group | None
    sources: tuple[str, ...]
    depth: float = 0.0
    model: int = 0


class OutputListing:
    """Lists the output tensors of a recipe. The list is complete only if no problem is reported."""

    def __init__(
        self, recipe: Recipe, models: Sequence[OpenModel], findings: Findings, allow_dropped: Sequence[str] = ()
    ) -> None:
        self.layer_counts: list[LayerCount] = []
        self._recipe = recipe
        self._models = models
        self._findings = findings
        self._allow_dropped = allow_dropped
        self._index = {model.input.key: index for index, model in enumerate(models)}
        self._lists = [layer_lists(model.tensors) for model in models]

    def output_tensors(self) -> Iterator[OutputTensor]:
        """List every output tensor in the base's storage order, or slices' layers between the tensors around them."""
        recipe = self._recipe
        if recipe.models:
            yield from self._of_models(recipe.models, (recipe.parameters,), self._models[0].tensors)
        elif recipe.slices:
            yield from self._of_slices(recipe.slices, (recipe.parameters,), EVERYTHING, recipe.slices[0].where)
        else:
            yield from self._of_modules()

    def _of_modules(self) -> Iterator[OutputTensor]:
        names = self._models[0].tensors
        module_of: dict[str, str] = {}
        for module in self._recipe.modules:
            owned_names = module_tensors(module.name, names)
            self._check_module(module, owned_names, module_of)
            module_of |= dict.fromkeys(owned_names, module.name)
            if not owned_names:
                continue
            shared = (module.parameters, self._recipe.parameters)
            if module.models:
                yield from self._of_models(module.models, shared, owned_names)
            else:
                yield from self._of_slices(module.slices, shared, module.name, module.where)
        yield from (OutputTensor(name, None, (name,)) for name in names if name not in module_of)

    def _check_module(self, module: OutputModule, owned_names: Sequence[str], module_of: Mapping[str, str]) -> None:
        names, text = self._models[0].tensors, self._models[0].input.text
        if not owned_names:
            message = f"'{text}' has no module '{module.name}'"
            hint = did_you_mean(module.name, module_names(names))
            self._findings.add(RecipeError, "recipe.unknown-name", module.where, message, hint)
        twice = next((name for name in owned_names if name in module_of), None)
        if twice is not None:
            message = f"'{twice}' belongs to this module and to '{module_of[twice]}'"
            self._findings.add(RecipeError, "recipe.conflict", module.where, message, "keep one of the two")

    def _of_models(
        self,
        models: Sequence[ModelInput],
        shared: tuple[Mapping[str, Setting], ...],
        names: Sequence[str] | Mapping[str, Readable],
    ) -> Iterator[OutputTensor]:
        members = [_member(self._index, model) for model in models]
        group = self._group(members, self._recipe.base, shared, is_slice=False)
        self._check_layer_counts(group)
        lists = self._lists[group.anchor.model]
        n_sources = 1 + len(group.experts)
        for name in names:
            yield OutputTensor(name, group, (name,) * n_sources, _depth(name, lists), group.anchor.model)

    def _group(
        self,
        members: list[Member],
        base: ModelInput | None,
        shared: tuple[Mapping[str, Setting], ...],
        *,
        is_slice: bool,
    ) -> Group:
        """Split a group into anchor and experts: the anchor is the base if listed (or naming only), else the first."""
        role = self._recipe.operator.base_role
        key = base_key(self._recipe, base)
        keys = [self._models[member.model].input.key for member in members]
        anchor = self._index[anchor_of(keys, key, is_slice=is_slice)]
        listed = next((member for member in members if member.model == anchor), None)
        is_origin = role is BaseRole.REQUIRED or (role is BaseRole.ORIGIN and key is not None)
        experts = tuple(member for member in members if member.model != anchor)
        model = self._models[anchor]
        if model.kind is not CheckpointKind.FULL:
            message = f"'{model.input.text}' holds differences from a base, but weights are needed here"
            hint = "name its base as base_model too, and a method that takes one"
            self._findings.add(UnsupportedError, "model.unsupported", model.input.where, message, hint)
        numbers = tuple((member.numbers, e) for e, member in enumerate(experts) if member.numbers is not None)
        return Group(listed or Member(anchor, {}), experts, shared, not is_origin, listed is not None, numbers)

    def _check_layer_counts(self, group: Group) -> None:
        anchor = self._models[group.anchor.model]
        lists = self._lists[group.anchor.model]
        for member in group.experts:
            model = self._models[member.model]
            if model.kind is not CheckpointKind.FULL:
                continue
            for prefix, layers in lists.items():
                member_layers = self._lists[member.model].get(prefix)
                if (
                    member_layers is not None
                    and member_layers.n_layers != layers.n_layers
                    and not self._may_drop(model, layers)
                ):
                    message = (
                        f"'{model.input.text}' has {member_layers.n_layers} layers, "
                        f"{layers.n_layers} has '{anchor.input.text}' ({layers})"
                    )
                    hint = "merge the same number of layers of each with slices"
                    self._findings.add(MismatchError, "model.mismatch", model.input.where, message, hint)

    def _may_drop(self, model: OpenModel, layers: LayerList) -> bool:
        """Whether a model has tensors beyond some layers and all of them may be dropped."""
        split = ((name, layers.split(name)) for name in model.tensors)
        beyond = [name for name, place in split if place is not None and place[0] >= layers.n_layers]
        return bool(beyond) and all(is_allowed(model, name, self._allow_dropped) for name in beyond)

    def _of_slices(
        self, slices: Sequence[OutputSlice], shared: tuple[Mapping[str, Setting], ...], module: str, where: str
    ) -> Iterator[OutputTensor]:
        layers = self._layers(module, where)
        if layers is None or not self._check_ranges(slices, layers):
            return
        groups = [self._slice_group(piece, shared) for piece in slices]
        starts = zip((group.anchor.first_layer for group in groups), slices, strict=True)
        origins = tuple(start + offset for start, piece in starts for offset in range(piece.n_layers))
        self.layer_counts.append(LayerCount(layers.prefix, layers.n_layers, origins))
        yield from self._around(groups[0], layers, module, before=True)
        first = 0
        for piece, group in zip(slices, groups, strict=True):
            yield from self._of_slice(piece, group, layers, first)
            first += piece.n_layers
        yield from self._around(groups[-1], layers, module, before=False)

    def _layers(self, module: str, where: str) -> LayerList | None:
        """Find the layers that slices of a module select from."""
        text = self._models[0].input.text
        names = module_tensors(module, self._models[0].tensors)
        all_lists = layer_lists([name for name in names if "/" not in name] or names)  # of components last
        candidates = all_lists if module != EVERYTHING else text_lists(all_lists)
        lists = longest(candidates)
        parts = {part_of(prefix + ANY_LAYER) for prefix in candidates}
        if len(lists) == 1 and not parts.issuperset(SIDES):
            return lists[0]
        hint = "choose one with 'modules:'"
        if not lists:
            message, hint = f"'{text}' has no numbered layers to slice", "use 'models:' instead"
        elif len(lists) == 1:
            message = (
                f"'{text}' has layers of an encoder and of a decoder: {' and '.join(map(str, candidates.values()))}"
            )
        else:
            message = f"'{text}' has several lists of layers of the same length: {' and '.join(map(str, lists))}"
        self._findings.add(RecipeError, "recipe.conflict", where, message, hint)
        return None

    def _check_ranges(self, slices: Sequence[OutputSlice], layers: LayerList) -> bool:
        is_sound = True
        for source in (source for piece in slices for source in piece.sources):
            index = self._index[source.model.key]
            source_layers = (
                self._lists[index].get(layers.prefix) if self._models[index].kind is CheckpointKind.FULL else layers
            )
            n_layers = 0 if source_layers is None else source_layers.n_layers
            if source.stop > n_layers:
                message = f"[{source.start}, {source.stop}] goes beyond the {n_layers} layers of '{source.model.text}'"
                self._findings.add(
                    RecipeError, "recipe.value", source.where, message, f"counted as {source_layers or layers}"
                )
                is_sound = False
        return is_sound

    def _slice_group(self, piece: OutputSlice, shared: tuple[Mapping[str, Setting], ...]) -> Group:
        members = [_member(self._index, source.model, source.start) for source in piece.sources]
        return self._group(members, piece.base or self._recipe.base, (piece.parameters, *shared), is_slice=True)

    def _around(self, group: Group, layers: LayerList, module: str, *, before: bool) -> Iterator[OutputTensor]:
        """List tensors outside the layers, from the models of the first or last slice; at depth 0, as in mergekit."""
        n_sources = 1 + len(group.experts)
        for name in module_tensors(module, self._models[group.anchor.model].tensors):
            if layers.split(name) is None and is_before_layers(name) is before:
                yield OutputTensor(name, group, (name,) * n_sources, 0.0, group.anchor.model)

    def _of_slice(self, piece: OutputSlice, group: Group, layers: LayerList, first: int) -> Iterator[OutputTensor]:
        members = (group.anchor, *group.experts)
        if self._models[group.anchor.model].kind is not CheckpointKind.FULL:
            return  # noted with the group: differences may lack any layer
        anchor_tensors = self._models[group.anchor.model].tensors
        by_layer: dict[int, list[str]] = {}
        for name in anchor_tensors:
            parts = layers.split(name)
            if parts is not None:
                by_layer.setdefault(parts[0], []).append(parts[1])
        of_first = _only_in_first(by_layer)
        for offset in range(piece.n_layers):
            depth = depth_of(offset, piece.n_layers)
            place = first + offset
            rests = [rest for rest in by_layer[group.anchor.first_layer + offset] if rest not in of_first]
            for rest in rests:
                sources = tuple(layers.name(member.first_layer + offset, rest) for member in members)
                yield OutputTensor(layers.name(place, rest), group, sources, depth, group.anchor.model)
            for rest in of_first if place == 0 else ():
                sources = tuple(layers.name(0, rest) for _ in members)
                yield OutputTensor(layers.name(place, rest), group, sources, depth, group.anchor.model)


def _only_in_first(by_layer: Mapping[int, Sequence[str]]) -> list[str]:
    """List what the first layer has in addition to all others, which are alike: it belongs to that place, as in T5.

    Its attention biases are read by every layer behind it.
    """
    others = {frozenset(rests) for layer, rests in by_layer.items() if layer > 0}
    if len(others) != 1:
        return []
    common = next(iter(others))
    return [rest for rest in by_layer[0] if rest not in common] if common < {*by_layer[0]} else []


def is_allowed(model: OpenModel, name: str, patterns: Sequence[str]) -> bool:
    """Whether a model's tensor, by its own name or the first model's, matches one of `patterns`."""
    return any(fnmatchcase(candidate, glob) for glob in patterns for candidate in (name, model.tensors[name].name))


def _depth(name: str, lists: Mapping[str, LayerList]) -> float:
    for layers in lists.values():
        parts = layers.split(name)
        if parts is not None:
            return depth_of(parts[0], layers.n_layers)
    return 0.0
