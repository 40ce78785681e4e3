"""List every output tensor with its sources, and the configuration of the output."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mergepipe.checkpoints.architectures import is_known_type, layer_defaults
from mergepipe.checkpoints.config_files import Json, config_bytes, parse_config
from mergepipe.checkpoints.contract import CheckpointKind, Readable
from mergepipe.core.blocks import DType
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MismatchError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.operators.spec import BaseRole
from mergepipe.recipes.fields import Findings
from mergepipe.recipes.layer_options import check_layers, follow_slices, layers_of, stated_kinds
from mergepipe.recipes.recipe import Cases, ModelInput, ModelKey, OutputModule, OutputSlice, Recipe, Setting
from mergepipe.recipes.tasks import LayerCount

# --- choose the anchor of each group of models, and the models that must be opened as full weights ---


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


# --- find a model's layers from its tensor names, for any architecture ---


# The first number between dots counts layers; later ones count what is inside a layer (experts, sublayers).
_NUMBERED = re.compile(r"(?:(?P<prefix>.*?)\.)??(?P<index>\d+)\.")
# Tensors outside the layers that come before them; all others come after.
_BEFORE = re.compile(
    r"embed(?!_out)|embd|(^|[._])(wte|wpe|wpm|shared|relative_\w+|pos_emb|rotary\w*|project_in|conv[12]|ln_pre)[._]"
)
# Parts of a model of several, by a word in the names of their tensors; the first that fits.
_PARTS = (
    ("projector", re.compile(r"(^|\.)(multi_modal_projector|mm_projector|merger|deepstack_merger_list|connector)\.")),
    ("vision", re.compile(r"(^|\.)(visual|vision\w*|image_\w+)\.")),
    ("audio", re.compile(r"(^|\.)audio\w*\.")),
    ("encoder", re.compile(r"(^|\.)encoder\.")),
    ("decoder", re.compile(r"(^|\.)decoder\.")),
)
_REST = "text"
# Words in the names of a text model that stands among other parts, and the parts that are never text.
_TEXT_PART = re.compile(r"(^|\.)(language_model|text_model|text_decoder)\.")
_TOWERS = frozenset({"projector", "vision", "audio"})
_SIDES = ("decoder", "encoder")  # of a model with layers of both
_ANY_LAYER = "0."
_EVERYTHING = "default"
# mergekit's names of modules, and what they are here.
_MODULES = {
    _EVERYTHING: "", "text_decoder": _REST, "text": _REST, "language_model": _REST, "shared": _REST,
    "multi_modal_projector": "projector", "projector": "projector",
    "vision_tower": "vision", "vision_model": "vision", "visual": "vision", "vision": "vision",
    "audio_tower": "audio", "audio": "audio", "encoder": "encoder", "decoder": "decoder",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerList:
    """The numbered layers of a model: tensors `prefix` + number + `.` + the rest, numbers from 0."""

    prefix: str
    n_layers: int

    def split(self, name: str) -> tuple[int, str] | None:
        """Split a tensor's name into layer number and rest; None if it is in no layer."""
        parts = _numbered(name)
        return parts[1:] if parts is not None and parts[0] == self.prefix else None

    def name(self, index: int, rest: str) -> str:
        """Join a layer number and a rest into a tensor's name: the inverse of `split`."""
        return f"{self.prefix}{index}.{rest}"

    def __str__(self) -> str:
        return f"'{self.prefix}0.' to '{self.prefix}{self.n_layers - 1}.'"


def _numbered(name: str) -> tuple[str, int, str] | None:
    match = _NUMBERED.match(name)
    if match is None:
        return None
    return name[: match.start("index")], int(match["index"]), name[match.end() :]


def template(name: str) -> str:
    """Remove the layer number from a name, so that all layers share it. Other names stay."""
    parts = _numbered(name)
    return name if parts is None else f"{parts[0]}*.{parts[2]}"


def layer_of(name: str) -> tuple[str, int]:
    """Return the list of layers that a tensor is in, by its prefix, and the layer; an empty prefix if in none."""
    parts = _numbered(name)
    return ("", 0) if parts is None else parts[:2]


def layer_lists(names: Iterable[str]) -> dict[str, LayerList]:
    """Find every list of layers by prefix: those numbered 0, 1, 2 ... without a gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        parts = _numbered(name)
        if parts is not None:
            numbers[parts[0]].add(parts[1])
    return {
        prefix: LayerList(prefix, len(indices))
        for prefix, indices in numbers.items()
        if max(indices) == len(indices) - 1
    }


def longest(lists: Mapping[str, LayerList]) -> tuple[LayerList, ...]:
    """Return the longest lists: one if the layers are unambiguous, none if there are none."""
    most = max((layers.n_layers for layers in lists.values()), default=0)
    return tuple(layers for layers in lists.values() if layers.n_layers == most)


def text_lists(lists: Mapping[str, LayerList]) -> dict[str, LayerList]:
    """Return the lists of a model's text part, where it has other parts; else all of them."""
    named = {prefix: layers for prefix, layers in lists.items() if _TEXT_PART.search(prefix)}
    others = {prefix: layers for prefix, layers in lists.items() if part_of(prefix + _ANY_LAYER) not in _TOWERS}
    return named or others or dict(lists)


def depth_of(index: int, n_layers: int) -> float:
    """Return a layer's depth between the first (0) and the last (1); 1 for a single layer, as in mergekit."""
    return index / (n_layers - 1) if n_layers > 1 else 1.0


def is_before_layers(name: str) -> bool:
    """Whether a tensor outside the layers precedes them: embeddings do, norms and heads do not."""
    return _BEFORE.search(name) is not None


def module_names(names: Iterable[str]) -> list[str]:
    """List the names that a recipe may use for the modules of a model with these tensors."""
    parts = {part_of(name) for name in names}
    return [module for module, part in _MODULES.items() if not part or part in parts]


def module_tensors(module: str, names: Iterable[str]) -> list[str]:
    """Find the tensors of a module by mergekit's name for it, or by prefix. Empty if unknown."""
    if module in _MODULES:
        part = _MODULES[module]
        return [name for name in names if not part or part_of(name) == part]
    return [name for name in names if name.startswith((f"{module}.", f"{module}/"))]


def part_of(name: str) -> str:
    """Return the part that a tensor belongs to: the folder of a component, or text, vision, audio, projector, ..."""
    return name.rpartition("/")[0] or next((part for part, pattern in _PARTS if pattern.search(name)), _REST)


# --- list every output tensor with its sources, from the recipe's models, slices or modules ---


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
            yield from self._of_slices(recipe.slices, (recipe.parameters,), _EVERYTHING, recipe.slices[0].where)
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
        candidates = all_lists if module != _EVERYTHING else text_lists(all_lists)
        lists = longest(candidates)
        parts = {part_of(prefix + _ANY_LAYER) for prefix in candidates}
        if len(lists) == 1 and not parts.issuperset(_SIDES):
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


# --- adapt a model's configuration to the output: its dtype, the number and order of its layers ---


_DTYPE_KEYS = ("torch_dtype", "dtype")
_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "layers",
    "num_blocks", "depth",
)  # fmt: skip
_LAYER_NAME = re.compile(r"(.*?)(?:layers|h|blocks)\.(\d+)\.")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "text_model")
_SECTION_SUFFIX = "_config"
_ROWS_BEHIND_VOCABULARY = {"mllama_text_model": 8, "moshi": 1}  # for images, for a beginning; by the model's type


def with_dtype(config: bytes, dtype: DType) -> bytes:
    """Set the configuration's dtype to the output's, so that loaders do not cast; unchanged if it states none."""
    content = parsed_config(config)
    if content is None:
        return config
    changed = False
    for section in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if isinstance(section.get(key), str) and section[key] != dtype.recipe_name:
                section[key] = dtype.recipe_name
                changed = True
    return config_bytes(content) if changed else config


def shape_contradictions(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what a configuration says of layers and embeddings that the tensors contradict."""
    counts: dict[str, int] = {}  # a vision tower has layers of its own
    for match in filter(None, map(_LAYER_NAME.match, shapes)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    n_layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    n_halves = kinds.count("mlp") if isinstance(kinds, list) else 0  # of Dory, which counts both halves of a layer
    if counts and isinstance(n_layers, int) and not {n_layers, n_layers - n_halves} & {*counts.values()}:
        yield f"says {n_layers} layers, there are {max(counts.values())}"
    n_rows = config.get("vocab_size")
    if isinstance(n_rows, int):
        n_rows += _ROWS_BEHIND_VOCABULARY.get(str(config.get("model_type")), 0)
    stated = [n_rows, config.get("hidden_size")]
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and None not in stated and list(shape) != stated:
            yield f"says that embeddings are {' x '.join(map(shown, stated))}, {name} is {list(shape)}"


def with_layers(config: bytes, layers: LayerCount, *, where: object) -> bytes:
    """Set the number of layers to that of the slices, and let what is said of single layers follow them."""
    content = parsed_config(config) or {}
    stated = _sections_with_layers(content, layers)
    if not stated:
        raise MismatchError.of(
            "model.mismatch", where,
            f"{layers.after} layers '{layers.prefix}*' cannot be stated: none of {', '.join(_LAYER_KEYS)} is "
            f"{layers.before}, which is their number before",
            "is it the configuration of this model?",
        )  # fmt: skip
    if layers.origins == tuple(range(layers.before)):
        return config
    origins = [origin % layers.before for origin in layers.origins]
    for section, keys in stated:
        _changed(section, keys, layers, origins, where)
    return config_bytes(content)


def _changed(section: Json, keys: Sequence[str], layers: LayerCount, origins: Sequence[int], where: object) -> None:
    """Let a section say of the output's layers what it says of the model's."""
    kept = {}
    if "decoder" in layers.prefix and "attention_window" in section:  # of LED's encoder
        kept["attention_window"] = section["attention_window"]
    section.update(dict.fromkeys(keys, layers.after))
    follow_slices(section, origins, layers.before, layer_defaults(section.get("model_type")), where=where)
    section.update(kept)


def check_layer_kinds(
    config: bytes,
    layers: LayerCount,
    before: Mapping[str, tuple[int, ...]],
    after: Mapping[str, tuple[int, ...]],
    *,
    where: object,
) -> None:
    """Refuse output layers that are not of the kind that the output's configuration says they are.

    `config` is the model's, before its layers were changed; `before` and `after` are the shapes of the model's and the
    output's tensors.
    """
    origins = [origin % layers.before for origin in layers.origins]
    if origins == [*range(layers.before)]:
        return
    for name in before:
        if name.endswith("contact_head.regression.weight"):  # of ESM
            message = f"{shown(name)} has columns for each layer, which slices do not move"
            raise UnsupportedError.of("model.unsupported", where, message, "merge it without slices")
    kinds_before = [""] * layers.before
    kinds_after = [""] * layers.after
    is_known = False
    for section, keys in _sections_with_layers(parsed_config(config) or {}, layers):
        is_known = is_known or is_known_type(section.get("model_type"))
        defaults = layer_defaults(section.get("model_type"))
        kinds_before = [*map(operator.add, kinds_before, stated_kinds(section, layers.before, defaults))]
        _changed(section, keys, layers, origins, where)
        kinds_after = [*map(operator.add, kinds_after, stated_kinds(section, layers.after, defaults))]
    if not is_known and len({*kinds_before}) == 1:
        return  # nothing is known of how such a model builds its layers
    place = LayerList(layers.prefix, layers.before)
    check_layers(layers_of(before, place.split), layers_of(after, place.split), kinds_before, kinds_after, where)


def _sections_with_layers(content: Json, layers: LayerCount) -> list[tuple[Json, list[str]]]:
    """Return the sections that state the number of these layers, each with the options that do."""
    sections = [(section, _layer_keys(section, layers)) for section in _sections_of(content, layers.prefix)]
    return [(section, keys) for section, keys in sections if keys]


def _layer_keys(section: Json, layers: LayerCount) -> list[str]:
    """Find the keys that state the number of these layers, such as `num_hidden_layers` or `decoder_layers`."""
    stated_keys = [key for key in _LAYER_KEYS if section.get(key) == layers.before]
    side = next((side for side in _SIDES if side in layers.prefix), None)
    if side is None:
        return stated_keys
    side_keys = [key for key in stated_keys if side in key]
    neutral = [key for key in stated_keys if not any(other_side in key for other_side in _SIDES)]
    if side_keys and side == "decoder":
        return side_keys
    return side_keys + neutral  # models with both count encoders without naming them


def _sections_of(content: Json, prefix: str) -> list[Json]:
    """Find the sections that describe the layers of a prefix: `vision_config` for `vision_tower.layers.`.

    A model with two sides may have a section for each, as T5Gemma has: `decoder` for `model.decoder.layers.`.
    """
    side = next((word for word in prefix.split(".") if word in _SIDES), None)
    of_side = content.get(side) if side is not None else None
    if isinstance(of_side, dict):
        return [of_side]
    named = [
        section
        for name, section in content.items()
        if isinstance(section, dict) and name.endswith(_SECTION_SUFFIX) and name.removesuffix(_SECTION_SUFFIX) in prefix
    ]
    return named or text_sections(content)


def text_sections(content: Json) -> list[Json]:
    """List the configuration and, for a multimodal model, its text section."""
    return [content, *(content[name] for name in _TEXT_SECTIONS if isinstance(content.get(name), dict))]


def parsed_config(raw: bytes) -> Json | None:
    """Parse a JSON object; None if the file holds none, in which case it is copied as it is."""
    try:
        return parse_config(raw, "")
    except CorruptError:
        return None
