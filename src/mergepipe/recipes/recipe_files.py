"""Load recipes in mergekit's YAML: report every problem at once, ignore nothing silently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from mergepipe.checkpoints.routers import GATE_MODES, RANDOM_MODES
from mergepipe.core.blocks import DTYPES_BY_RECIPE_NAME, DType
from mergepipe.core.display import shortened
from mergepipe.core.rounding import RoundingMode
from mergepipe.errors import NotFoundError, Problem, RecipeError, UnsupportedError, did_you_mean
from mergepipe.operators.custom import load_entry_points
from mergepipe.operators.registry import COPY, has_operator, operator_named, operator_specs
from mergepipe.operators.spec import POST, OperatorSpec, Scope
from mergepipe.recipes.entries import EntryContext, check_base, check_keys, read_models, read_modules, read_slices
from mergepipe.recipes.fields import (
    CONTENT_KEYS,
    LENIENT,
    RECIPE_KEYS,
    USUAL,
    DocumentReader,
    Findings,
    Strictness,
    describe,
    unquoted,
)
from mergepipe.recipes.parameters import read_parameters
from mergepipe.recipes.recipe import Mixture, MixtureExpert, ModelInput, OutputModule, OutputSlice, Recipe
from mergepipe.recipes.references import read_model
from mergepipe.recipes.tokenizer_source import read_tokenizer
from mergepipe.recipes.yaml_source import KeyPath, RecipeText, Value, YamlSource, parse_documents, read_documents
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

# --- order the documents of a recipe file so that each comes after the documents whose results it merges ---


def document_names(sources: Sequence[YamlSource], findings: Findings) -> frozenset[str]:
    """Collect the names of several documents' results; report names used twice."""
    if len(sources) == 1:
        return frozenset()
    first: dict[str, str] = {}
    for source in sources:
        name = source.root.get("name") if isinstance(source.root, dict) else None
        if not isinstance(name, str) or not name.strip():
            continue
        if name in first:
            message = f"the name '{shortened(name)}' is already used, by {first[name]}"
            findings.add(RecipeError, "recipe.conflict", source.where("name"), message, "choose another name")
        first.setdefault(name, source.where("name").split(" ")[0])
    return frozenset(first)


def sort_documents(readers: Sequence[DocumentReader], recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Sort recipes so that each comes after those whose results it merges; the output comes last.

    Reports cycles, and documents other than the output that nothing merges.
    """
    by_name = {recipe.name: index for index, recipe in enumerate(recipes) if recipe.name is not None}
    needs = {index: [by_name[name] for name in recipe.intermediates()] for index, recipe in enumerate(recipes)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1][::-1]
        names = " -> ".join(f"'{recipes[index].name}'" for index in cycle)
        message, hint = (
            f"documents depend on each other: {names}",
            "a document can only merge documents that do not depend on it",
        )
        readers[cycle[0]].refuse("recipe.conflict", ("name",), message, hint)
        return ()
    used = {index for need in needs.values() for index in need}
    free = [index for index in range(len(recipes)) if index not in used]
    order: list[int] = []
    # Of the documents that nothing merges, the one without a name is the output's, else the last.
    _visit(next((index for index in free if recipes[index].name is None), free[-1]), needs, order)
    for index in sorted(set(range(len(recipes))) - set(order)):
        message = "no other document uses the result of this one"
        hint = "name it as a model of the output, or move it to its own file"
        readers[index].refuse("recipe.no-effect", ("name",) if recipes[index].name else (), message, hint)
    return tuple(recipes[index] for index in order)


def _visit(index: int, needs: Mapping[int, Sequence[int]], order: list[int]) -> None:
    if index in order:
        return
    for needed in needs[index]:
        _visit(needed, needs, order)
    order.append(index)


# --- one document ---


AUTO, LIKE_BASE = "auto", "like_base"
TORCH = "torch."
MIXTURE_KEYS = ("gate_mode", "experts")
MIXTURE_RECIPE_KEYS = (
    "base_model", *MIXTURE_KEYS, "shared_experts", "experts_per_token", "architecture", "dtype", "seed", "name",
)  # fmt: skip
EXPERT_KEYS = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")
DTYPE_NAMES = (*DTYPES_BY_RECIPE_NAME, AUTO)


def load_recipes(path: Location | RecipeText, store: Store, strictness: Strictness = USUAL) -> tuple[Recipe, ...]:
    """Read and validate the recipes in a file or a text, one a document, dependencies first; the last is the output's.

    Model paths must exist; no model is opened. What has no effect is in the recipes' notices.
    """
    return _load(read_documents(path, store), store, {}, strictness)


def reload_recipes(text: str, store: Store, model_paths: Mapping[str, str]) -> tuple[Recipe, ...]:
    """Read recipes that were accepted and stored as text, with models at the paths in `model_paths`.

    Raises as `load_recipes` does.
    """
    return _load(parse_documents(Location.local(Path.cwd() / "recipe"), text), store, model_paths, LENIENT)


def reload_recipe(text: str, store: Store, model_paths: Mapping[str, str]) -> Recipe:
    """Read a single recipe that was stored as text, as `reload_recipes`; intermediate models are keyed by name."""
    recipes = reload_recipes(text, store, model_paths)
    if len(recipes) > 1:
        where, message = recipes[-1].path.name, f"one recipe is expected here, found {len(recipes)} documents"
        raise RecipeError(Problem("recipe.syntax", where, message, "keep one recipe per file"))
    return recipes[0]


def _load(
    sources: Sequence[YamlSource], store: Store, model_paths: Mapping[str, str], strictness: Strictness
) -> tuple[Recipe, ...]:
    findings = Findings(RecipeError, NotFoundError, strictness=strictness)
    for source in sources:
        for key_path, message in source.repeated_keys:
            findings.add_notice("recipe.no-effect", source.where(*key_path), message)
    places: dict[Location, Location] = {}
    names = document_names(sources, findings)
    readers = [DocumentReader(source, findings, store, model_paths, names, places) for source in sources]
    recipes = [_read(reader, reader.source.root) for reader in readers]
    _raise_any(findings)
    sound = [replace(recipe, notices=findings.notices) for recipe in recipes if recipe is not None]
    if len(sound) < len(recipes):
        raise AssertionError("no recipe, and nothing found wrong with it")
    ordered = sort_documents(readers, sound)
    _raise_any(findings)
    return ordered


def _raise_any(findings: Findings) -> None:
    try:
        findings.raise_any()
    except RecipeError as error:
        if all(problem.code == "recipe.unsupported" for problem in error.problems):
            raise UnsupportedError(*error.problems) from None
        raise


def _read(reader: DocumentReader, root: Value) -> Recipe | None:
    if not isinstance(root, dict):
        message = f"a recipe is a mapping of names to values, found {describe(root)}"
        reader.refuse("recipe.value", (), message)
        return None
    if "merge_method" not in root and any(key in root for key in MIXTURE_KEYS):
        return _mixture_recipe(reader, root)
    _check_keys(reader, root)
    operator = _operator(reader, root)
    dtype, out_dtype = _dtype(reader, root, "dtype"), _dtype(reader, root, "out_dtype")
    # `auto`: of each tensor as in the base
    dtypes = (None, None) if root.get("out_dtype") == AUTO else (dtype, out_dtype)
    base = _base(reader, root)
    shared = EntryContext(reader, operator, None, ()).parameters(root, (), Scope.GLOBAL)
    if operator is not None:
        check_base(reader, operator, is_given=root.get("base_model") is not None or _has_slice_bases(root))
    content = _content(EntryContext(reader, operator, base, (shared,)), root)
    if root.get("post") is not None:
        step = read_parameters(reader, root["post"], ("post",), POST, Scope.GLOBAL)
        shared = shared | {f"{POST.name}.{name}": setting for name, setting in step.items()}
        if root.get("base_model") is None:
            message = "the recipe has no base_model, and the step works on the delta from it"
            reader.refuse("recipe.incomplete", ("post",), message, "name the base_model")
    template = None if (text := root.get("chat_template")) in (None, "") else reader.text(text, ("chat_template",))
    adapter_tokenizer = _adapter_tokenizer(reader, root.get("adapter_tokenizer"))
    name = None if root.get("name") is None else reader.text(root["name"], ("name",))
    if operator is None or content is None or (base is None and root.get("base_model") is not None):
        read_tokenizer(reader, root, (), has_base=root.get("base_model") is not None)
        return None
    models, slices, modules = content
    source = reader.source
    if root.get("post") is not None:
        named = (replace(parameter, name=f"{POST.name}.{parameter.name}") for parameter in POST.parameters)
        operator = replace(operator, parameters=(*operator.parameters, *named))
    path = source.folder / source.path.name
    recipe = Recipe(path, source.text, operator, base, models, shared, *dtypes, slices, modules)
    tokenizer = read_tokenizer(reader, root, recipe.inputs(), has_base=base is not None)
    return replace(
        recipe, tokenizer=tokenizer, chat_template=template, name=name, is_like_base=root.get("out_dtype") == LIKE_BASE,
        keeps_dtypes=AUTO in (root.get("out_dtype"), root.get("dtype")), adapter_tokenizer=adapter_tokenizer,
        adapter_names=_adapter_names(reader, root.get("adapter_names")), rounding=_rounding(reader, root),
    )  # fmt: skip


def _adapter_tokenizer(reader: DocumentReader, value: Value) -> str | None:
    """Return whose tokenizer the output gets where an adapter is applied; None if nothing is stated."""
    if isinstance(value, str) and value in ("base", "adapter"):
        return value
    if value is not None:
        reader.wrong_kind(value, ("adapter_tokenizer",), "base or adapter")
    return None


def _adapter_names(reader: DocumentReader, value: Value) -> dict[str, str]:
    """Return the parts of the names in adapters that the base has other names for, in order."""
    names: dict[str, str] = {}
    for part, other in (reader.mapping(value, ("adapter_names",)) or {}).items():
        if isinstance(other, str) and part.strip("."):
            names[part] = other
        else:
            reader.wrong_kind(other, ("adapter_names", part), "the name that the base has, as text")
    return names


def _mixture_recipe(reader: DocumentReader, root: dict[str, Value]) -> Recipe | None:
    """Read a recipe of mergekit-moe: dense models of which a mixture of experts is built, or experts of a mixture."""
    reader.unknown_keys(root, MIXTURE_RECIPE_KEYS, ())
    path = reader.source.folder / reader.source.path.name
    text = reader.source.text
    base = _base(reader, root)
    if base is None and root.get("base_model") is None:
        reader.refuse("recipe.incomplete", ("base_model",), "a mixture of experts needs base_model")
    mode = "hidden" if root.get("gate_mode") is None else reader.text(root["gate_mode"], ("gate_mode",))
    if mode is not None and mode not in GATE_MODES:
        hint = did_you_mean(shortened(mode), list(GATE_MODES))
        reader.refuse("recipe.unknown-name", ("gate_mode",), f"unknown gate mode '{shortened(mode)}'", hint)
    name = None if root.get("name") is None else reader.text(root["name"], ("name",))
    dtype = _dtype(reader, root, "dtype")
    chosen = _chosen_experts(root.get("experts"))
    if chosen:
        reader.unknown_keys(root, ("base_model", "experts", "dtype", "name"), ())
        if base is None:
            return None
        mixture = Mixture("random", (), chosen=chosen, is_dense=not isinstance(root["experts"], list))
        return Recipe(path, text, COPY.spec, base, (base,), {}, dtype, None, name=name, mixture=mixture)
    experts = _mixture_experts(reader, root.get("experts"), ("experts",))
    shared = _mixture_experts(reader, root["shared_experts"], ("shared_experts",)) if root.get("shared_experts") else ()
    per_token = reader.whole(root.get("experts_per_token"), ("experts_per_token",), 1) or 2
    seed = reader.whole(root.get("seed"), ("seed",), 0) or 0
    if experts and len(experts) < per_token:
        message = f"{len(experts)} experts, and {per_token} are used per token"
        reader.refuse("recipe.value", ("experts",), message, "name more experts, or lower experts_per_token")
    if experts and mode not in RANDOM_MODES:
        _check_prompts(reader, [expert for _, expert in experts], [expert for _, expert in shared or ()])
    architecture = reader.text(root["architecture"], ("architecture",)) if root.get("architecture") else None
    if base is None or mode is None or experts is None or shared is None:
        return None
    models = tuple(model for model, _ in (*experts, *shared))
    mixture = Mixture(
        mode, tuple(e for _, e in experts), tuple(e for _, e in shared), per_token, architecture, seed
    )  # fmt: skip
    return Recipe(path, text, COPY.spec, base, models, {}, dtype, None, name=name, mixture=mixture)


def _mixture_experts(
    reader: DocumentReader, value: Value, at: KeyPath
) -> tuple[tuple[ModelInput, MixtureExpert], ...] | None:
    """Parse the experts of a mixture; None if there are none or one is invalid."""
    if not isinstance(value, list) or not value:
        reader.wrong_kind(value, at, "a list of experts", "write '- source_model: PATH'")
        return None
    read = []
    for index, item in enumerate(value):
        entry = reader.mapping(item, (*at, index)) or {}
        reader.unknown_keys(entry, EXPERT_KEYS, (*at, index))
        if entry.get("source_model") is None:
            reader.refuse("recipe.incomplete", (*at, index, "source_model"), "the expert has no source_model")
            continue
        model = read_model(reader, entry["source_model"], (*at, index, "source_model"), {}, (*at, index))
        prompts = [_prompts(reader, entry.get(key), (*at, index, key)) for key in EXPERT_KEYS[1:3]]
        scales = [
            _scale(reader, entry.get(key), (*at, index, key), default)
            for key, default in zip(EXPERT_KEYS[3:], (0.0, 1.0), strict=True)
        ]
        if model is not None:
            read.append((model, MixtureExpert(prompts[0], prompts[1], *scales)))
    return tuple(read) if len(read) == len(value) else None


def _chosen_experts(value: Value) -> tuple[int, ...]:
    """Return the numbers of a mixture's experts; none for anything else."""
    numbers = value if isinstance(value, list) else [value]
    whole = tuple(number for number in numbers if isinstance(number, int) and not isinstance(number, bool))
    return whole if len(whole) == len(numbers) and min(whole, default=-1) >= 0 else ()


def _scale(reader: DocumentReader, value: Value, at: KeyPath, default: float) -> float:
    number = unquoted(value)
    if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
        return number
    if value is not None:
        reader.wrong_kind(value, at, "a number")
    return default


def _prompts(reader: DocumentReader, value: Value, at: KeyPath) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        reader.wrong_kind(value, at, "a list of texts")
        return ()
    return tuple(map(str, value))


def _check_prompts(reader: DocumentReader, experts: Sequence[MixtureExpert], shared: Sequence[MixtureExpert]) -> None:
    """Report experts that a router made from prompts could not tell apart."""
    for index, expert in enumerate(experts):
        if not expert.positive:
            message = "the expert has no positive_prompts, from which its router is computed"
            reader.refuse("recipe.incomplete", ("experts", index), message, "write some, or gate_mode: random")
    if len(experts) > 1 and experts[0].positive and len(set(experts)) == 1:
        message = "the prompts of all experts are the same, so the router cannot distinguish them"
        reader.refuse("recipe.value", ("experts",), message, "write prompts that are typical of each expert")
    if len({bool(expert.positive) for expert in shared}) > 1:
        reader.refuse("recipe.value", ("shared_experts",), "some have prompts and others have none")


def _check_keys(reader: DocumentReader, root: dict[str, Value]) -> None:
    check_keys(reader, root, (), RECIPE_KEYS)
    if root.get("output") == "adapter":
        reader.refuse(
            "recipe.value", ("output",), "the recipe makes an adapter", "`mergepipe lora merge RECIPE -o OUT`"
        )
    content = [key for key in CONTENT_KEYS if root.get(key)]
    if len(content) > 1:
        message = f"cannot be combined with '{content[0]}'"
        reader.refuse("recipe.conflict", (content[1],), message, "a recipe has one of models, slices and modules")


def _has_slice_bases(root: dict[str, Value]) -> bool:
    """Whether every slice names its own base, so that the recipe needs none."""
    slices = root.get("slices")
    return isinstance(slices, list) and all(
        isinstance(output_slice, dict) and output_slice.get("base_model") for output_slice in slices
    )


def _operator(reader: DocumentReader, root: dict[str, Value]) -> OperatorSpec | None:
    if root.get("merge_method") is None:
        message, hint = "the recipe has no merge_method", did_you_mean("", list(operator_specs()))
        reader.refuse("recipe.incomplete", ("merge_method",), message, hint)
        return None
    name = reader.text(root["merge_method"], ("merge_method",))
    if name is not None and not has_operator(name):
        load_entry_points()
    if name is None or has_operator(name):
        return operator_named(name).spec if name else None
    message = f"unknown merge method '{shortened(name)}'"
    nearest = partial(did_you_mean, shortened(name), list(operator_specs()))
    reader.refuse("recipe.unknown-name", ("merge_method",), message, nearest)
    return None


def _dtype(reader: DocumentReader, root: dict[str, Value], key: str) -> DType | None:
    if root.get(key) in (None, "", AUTO, LIKE_BASE if key == "out_dtype" else AUTO):
        return None
    name = reader.text(root[key], (key,))
    if name is None or name.removeprefix(TORCH) in DTYPES_BY_RECIPE_NAME:
        return DTYPES_BY_RECIPE_NAME[name.removeprefix(TORCH)] if name else None
    hint = did_you_mean(shortened(name), (*DTYPE_NAMES, LIKE_BASE) if key == "out_dtype" else DTYPE_NAMES)
    reader.refuse("recipe.unknown-name", (key,), f"unknown dtype '{shortened(name)}'", hint)
    return None


def _rounding(reader: DocumentReader, root: dict[str, Value]) -> RoundingMode:
    """Return how results are rounded; what is stored as codes with scales is rounded to the nearest code."""
    stated = root.get("rounding")
    if stated in (None, "", RoundingMode.NEAREST):
        return RoundingMode.NEAREST
    name = reader.text(stated, ("rounding",))
    if name is not None and name != RoundingMode.STOCHASTIC:
        hint = did_you_mean(shortened(name), tuple(RoundingMode))
        reader.refuse("recipe.unknown-name", ("rounding",), f"unknown rounding '{shortened(name)}'", hint)
    elif root.get("out_dtype") == LIKE_BASE:
        message = "out_dtype: like_base stores codes with scales, which are the nearest ones"
        reader.refuse("recipe.conflict", ("rounding",), message, "leave out one of the two")
    return RoundingMode.STOCHASTIC


def _base(reader: DocumentReader, root: dict[str, Value]) -> ModelInput | None:
    if root.get("base_model") is None:
        return None
    return read_model(reader, root["base_model"], ("base_model",), {}, ("base_model",))


def _content(
    context: EntryContext, root: dict[str, Value]
) -> tuple[tuple[ModelInput, ...], tuple[OutputSlice, ...], tuple[OutputModule, ...]] | None:
    """Parse models, slices or modules, the others empty; None if they are invalid."""
    written = [key for key in CONTENT_KEYS if root.get(key) is not None]
    content = next((key for key in written if root[key]), written[0] if written else None)
    if content == "models":
        models = read_models(context, root["models"], ("models",))
        return (models, (), ()) if models else None
    if content == "slices":
        slices = read_slices(context, root["slices"], ("slices",))
        return ((), slices, ()) if slices else None
    if content == "modules":
        modules = read_modules(context, root["modules"], ("modules",))
        return ((), (), modules) if modules else None
    context.reader.refuse("recipe.incomplete", ("models",), "the recipe has no models")
    return None
