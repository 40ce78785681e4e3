"""Open a merge's inputs: load the recipe, open its models, pair their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from blake3 import blake3

import mergepipe
from mergepipe.checkpoints.adapted_tensors import Adapted
from mergepipe.checkpoints.adapters import apply_adapter, count_scaled_by_0, open_adapter, with_own_head
from mergepipe.checkpoints.architecture_names import name_problems
from mergepipe.checkpoints.architectures import architecture_of
from mergepipe.checkpoints.codes import CodedTensor
from mergepipe.checkpoints.config_files import parse_config
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, TensorEntry
from mergepipe.checkpoints.directory import (
    ADAPTER_NAMES,
    is_adapter,
    is_packed,
    list_names,
    names_shown,
    open_checkpoint,
    open_packed_expert,
    require_text_path,
)
from mergepipe.checkpoints.embedding_rows import embedding_ending, unaligned_notices
from mergepipe.checkpoints.quantised import dequantised, stored_like
from mergepipe.checkpoints.requantised import Requantised
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.sparse_patches import PATCH_NAME, is_patch_of
from mergepipe.checkpoints.stacked_experts import in_layout_of, in_names_of
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TokenizerFiles
from mergepipe.core.blocks import DTypeKind, element_count
from mergepipe.core.outcome import DroppedTensor, Notice, notice_at, told_once
from mergepipe.core.strict_json import JsonValue
from mergepipe.core.units import plural
from mergepipe.errors import MergePipeError, RecipeError, UnsupportedError
from mergepipe.options import OutputOptions, PathStyle, RecipeOptions
from mergepipe.recipes.fields import USUAL, Strictness, refuse_notices
from mergepipe.recipes.output_tensors import weights_needed
from mergepipe.recipes.recipe import Cases, ModelInput, ModelKey, Recipe, with_named_weights
from mergepipe.recipes.recipe_files import load_recipes
from mergepipe.recipes.references import with_relative_paths
from mergepipe.recipes.resolution import REASON_ALLOWED, resolve
from mergepipe.recipes.tasks import Action, MergeTask, Resolution, TensorParameters
from mergepipe.recipes.vocabulary_alignment import Alignment, align_vocabulary
from mergepipe.runs.adapter_tokenizer import AdapterTokenizer, choose_tokenizer
from mergepipe.runs.adapters import folds_adapters
from mergepipe.runs.folded_adapters import Source, adapters_by_tensor, folded_summary, split_source
from mergepipe.snapshots.manifest import ADAPTER_ROLE, MANIFEST_NAME, is_composite, read_composite
from mergepipe.storage.contract import Store, is_folder, map_at_once
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from mergepipe.planning.plan import Plan
    from mergepipe.recipes.yaml_source import RecipeText
    from mergepipe.runs.catalog_link import CatalogLink


def open_model(
    store: Store,
    model: ModelInput,
    base: Checkpoint | None,
    *,
    as_weights: bool = False,
    allow_unapplied: Sequence[str] = (),
    adapter_names: Mapping[str, str] = MappingProxyType({}),
) -> Checkpoint:
    """Open one model of a recipe; reads headers and configurations, and a few samples of a delta's base.

    `base` is what deltas and adapters are taken against and whose layout of fused tensors is followed; None for the
    base itself, which must be full weights. An adapter that is applied to the base is taken for its differences alone,
    unless `as_weights`. What it changes and its base lacks is an error unless a pattern of `allow_unapplied` has it.
    `adapter_names` are parts of its names, with what the base calls them.
    """
    for path in (model.path, model.adapter):
        if path is not None:
            require_text_path(path)
    if model.adapter is None:
        return _open(store, model.path, base, adapter_names, is_delta=model.is_delta)
    is_same = base is not None and not as_weights and _is_same(store, model.path, base)
    if base is not None and is_same and not any(isinstance(tensor, Adapted) for tensor in base.tensors.values()):
        return open_adapter(store, model.adapter, base, allow_unapplied, adapter_names)
    weights = _open(store, model.path, base)
    if weights.kind is not CheckpointKind.FULL:
        raise UnsupportedError.of(
            "model.unsupported", model.path, "holds differences from a base; an adapter applies to weights only"
        )
    if as_weights or base is None:
        weights = with_own_head(store, weights, model.adapter, adapter_names)
    return apply_adapter(weights, open_adapter(store, model.adapter, weights, allow_unapplied, adapter_names))


def _open(
    store: Store,
    path: Location,
    base: Checkpoint | None,
    adapter_names: Mapping[str, str] = MappingProxyType({}),
    *,
    is_delta: bool = False,
) -> Checkpoint:
    """Open what lies at one path; `is_delta`: plain weights there are differences."""
    if is_packed(store, path):
        if base is not None and base.quantisation:
            message = (
                f"is packed, and its base {base.path} is quantised ({base.quantisation}), so it is read as numbers"
            )
            raise UnsupportedError.of("model.unsupported", path, message, "unpack it, and name the unpacked model")
        packed = open_packed_expert(store, path, base)
        return packed if base is None else _with_names(base, packed, store)
    if is_folder(store, path):
        names = list_names(store, path)
        if MANIFEST_NAME in names and is_composite(store, path) and not read_composite(store, path).is_model:
            raise UnsupportedError.of(
                "model.unsupported", path, "is a composite, a training checkpoint made by `mergepipe tailor`",
                "merge the weights that are saved after training is resumed from it",
            )  # fmt: skip
        if is_adapter(names) or PATCH_NAME in names:
            return open_adapter(store, path, _required(base, path, "an adapter"), names=adapter_names)
    elif path.name in ADAPTER_NAMES:
        return open_adapter(store, path.parent, _required(base, path, "an adapter"), names=adapter_names)
    stored = open_checkpoint(store, path)
    if is_patch_of(stored.tensors):
        return open_adapter(store, path, _required(base, path, "a patch"), names=adapter_names)
    opened = dequantised(store, stored)
    if is_delta:
        _required(base, path, "a delta")
        opened = _as_delta(opened)
    return opened if base is None else _with_names(base, opened, store)


def _with_names(base: Checkpoint, opened: Checkpoint, store: Store) -> Checkpoint:
    """Return a checkpoint with the names that the base has for the same weights, and its experts in the same layout."""
    if base.tensors.keys() - opened.tensors.keys():
        architecture = architecture_of(TokenizerFiles(base, store).document(CONFIG_NAME))
        if architecture is not None and architecture.renamed:
            opened = in_names_of(base, opened, architecture)
    return in_layout_of(base, opened)


def _as_delta(weights: Checkpoint) -> Checkpoint:
    """Mark the tensors as deltas; header digests differ from those of the same files read as weights."""
    tensors = {
        name: replace(tensor, is_delta=True)
        if isinstance(tensor, StoredTensor | CodedTensor) and tensor.dtype.kind is DTypeKind.FLOAT
        else tensor
        for name, tensor in weights.tensors.items()
    }
    files = []
    for file in weights.files:
        digest = blake3(f"delta {file.id.header_digest}".encode()).hexdigest(length=16)
        files.append(replace(file, id=replace(file.id, header_digest=digest)))
    return replace(weights, tensors=MappingProxyType(tensors), files=tuple(files), kind=CheckpointKind.DELTA)


def _required(base: Checkpoint | None, path: Location, what: str) -> Checkpoint:
    if base is None:
        raise UnsupportedError.of(
            "model.unsupported", path, f"is {what}, but full weights are needed here",
            "name its base here, and the model as an expert",
        )  # fmt: skip
    return base


def _is_same(store: Store, path: Location, base: Checkpoint) -> bool:
    real_path = store.real_path(path)
    return real_path is not None and real_path == store.real_path(base.path)


DOCUMENT_MARK = "\n---\n"
_USUAL_OPTIONS = RecipeOptions()


Stage: TypeAlias = Callable[["Inputs"], Path]
"""Merges what another document makes, and says where the result lies."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A recipe with its opened checkpoints, in the order of `recipe.inputs()`, and its resolution into merge tasks.

    `checkpoints` are as stored; with an `alignment` of vocabularies the resolution is of the aligned ones.
    `intermediates` are the inputs of the models that other documents make, by their place. `notices` are what has
    no effect in the recipe, or another one than it asks for. `plain` is the merge in numbers whose result the tasks
    store like the base. `tokenizer` is the one next to an adapter, where the output gets it.
    """

    recipe: Recipe
    checkpoints: tuple[Checkpoint, ...]
    resolution: Resolution
    alignment: Alignment | None = None
    intermediates: Mapping[int, Inputs] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    plain: Inputs | None = None
    tokenizer: AdapterTokenizer | None = None

    @property
    def repeats(self) -> Mapping[int, int]:
        """Count, for models that the recipe lists again, the earlier entries, by model."""
        return {index: model.repeat for index, model in enumerate(self.recipe.inputs()) if model.repeat}

    @property
    def recipe_text(self) -> str:
        """The documents that this merge depends on as YAML, each after those it needs."""
        texts = [text for made in self.intermediates.values() for text in made.recipe_text.split(DOCUMENT_MARK)]
        return DOCUMENT_MARK.join(dict.fromkeys((*texts, self.recipe.source_text)))

    def leaves(self) -> Iterator[tuple[str, ModelInput, Checkpoint]]:
        """Yield role, model and checkpoint of every input that is read; its own inputs stand for an intermediate."""
        named = zip(self.roles, self.recipe.inputs(), self.checkpoints, strict=True)
        for index, (role, model, checkpoint) in enumerate(named):
            made = self.intermediates.get(index)
            if made is None:
                yield role, model, checkpoint
            else:
                yield from ((role, leaf, source) for _, leaf, source in made.leaves())

    @property
    def folds_adapters(self) -> bool:
        """Whether the merge adds adapters to one base, and does nothing else."""
        return folds_adapters(self.recipe)

    def sources(self) -> Iterator[Source]:
        """Yield what is recorded as inputs: the leaves; of a merge that folds adapters into a base, each by itself."""
        for role, model, checkpoint in self.leaves():
            if self.folds_adapters:
                yield from split_source(model, checkpoint)
            else:
                yield role, model, checkpoint

    @property
    def source_models(self) -> list[ModelInput]:
        """The models and adapters that are recorded as inputs."""
        return [model for _, model, _ in self.sources()]

    @property
    def folded_adapters(self) -> tuple[Location, ...]:
        """The adapters that the merge folds into a base; empty for a merge that does anything else."""
        if not self.folds_adapters:
            return ()
        return tuple(model.path for role, model, _ in self.sources() if role == ADAPTER_ROLE)

    @property
    def changes(self) -> Mapping[str, tuple[int, ...]]:
        """The folded adapters that change each tensor, as indices."""
        return adapters_by_tensor(self.folded_adapters, (self.plain or self).resolution.tasks)

    @property
    def summary(self) -> str:
        """One line that says what the merge makes, if it folds adapters into a base; else empty."""
        if not self.folds_adapters:
            return ""
        stated = [model.parameters.get("weight", 1.0) for model in self.recipe.models]
        weights = [weight for weight in stated if not isinstance(weight, Cases)]
        changes = self.changes
        n_changed = sum(bool(adapters) for adapters in changes.values())
        return folded_summary(tuple(self.sources()), weights, n_changed, len(changes))

    @property
    def base(self) -> Checkpoint:
        """The model that lends configuration and tokenizer, and the deltas' base where there is one for all."""
        return self.checkpoints[0]

    @property
    def expert_models(self) -> tuple[int, ...]:
        """Models that are an expert of at least one tensor."""
        return (self.plain or self).resolution.expert_models

    @property
    def state(self) -> Mapping[str, object]:
        """The values that must be equal for one run to resume another: version, recipe, and files."""
        coded = [task.base for task in self.resolution.tasks if isinstance(task.base, Requantised)]
        return {
            "version": mergepipe.__version__,
            "recipe": self.recipe_text,
            "inputs": [[str(checkpoint.root), checkpoint.fingerprints] for _, _, checkpoint in self.leaves()],
            "alignment": self.vocabulary,
            "powers_of_two": [tensor.name for tensor in coded if tensor.powers_of_two],
            "documents": [made.state for made in self.intermediates.values()],
        }

    @property
    def vocabulary(self) -> str | None:
        """The digest of how tokens are aligned, or of a mixture's prompts as tokens; None without a tokenizer."""
        return self.resolution.prompts if self.alignment is None else self.alignment.digest

    def dropped_rows(self) -> Iterator[DroppedTensor]:
        """Embedding rows that are dropped: of tokens that the output lacks, or beyond its last row."""
        models = self.recipe.inputs()
        dropped = self.alignment.dropped if self.alignment else {}
        lost = {model: len(tokens) for model, tokens in dropped.items()}
        for task in (task for task in self.resolution.tasks if embedding_ending(task.name)):
            for model in dict.fromkeys((task.base_model, *task.expert_models)):
                stored = self.checkpoints[model].tensors.get(task.name)
                n_beyond = 0 if stored is None or self.alignment else stored.shape[0] - task.shape[0]
                if model in lost:
                    reason = f"{plural(lost[model], 'row')} of tokens that the output's tokenizer lacks"
                    yield DroppedTensor(models[model].text, task.name, reason)
                elif n_beyond > 0:
                    yield DroppedTensor(
                        models[model].text, task.name, f"{plural(n_beyond, 'row')} beyond the output's last one"
                    )

    @property
    def roles(self) -> tuple[str, ...]:
        """By model: `expert` for one that is an expert anywhere, else `base`."""
        experts = set(self.expert_models)
        return tuple("expert" if model in experts else "base" for model in range(len(self.checkpoints)))

    def pair_name(self, task: MergeTask, slot: int) -> str | None:
        """Return the catalog's tensor name for this task and expert; None if the two are not a catalogued pair.

        Statistics compare tensors of one name in two checkpoints; gathered rows, or another layer's tensor, are
        something else.
        """
        base, source = task.base, task.experts[slot]
        is_plain = (
            source.name == base.name
            and not {task.base_model, task.expert_models[slot]} & self.intermediates.keys()
            and self.checkpoints[task.base_model].tensors.get(base.name) is base
            and self.checkpoints[task.expert_models[slot]].tensors.get(source.name) is source
        )
        return base.name if is_plain else None


def recipe_of(recipe: str | Path | Mapping[str, object]) -> Location | RecipeText:
    """Return where a recipe is, or the text of one that is given as a mapping, with paths of the working folder."""
    if not isinstance(recipe, Mapping):
        return Location.of(recipe)
    from mergepipe.recipes.yaml_source import recipe_text

    return recipe_text(recipe, Location.local(Path.cwd()))


def open_inputs(
    path: Location | RecipeText, store: Store, options: RecipeOptions = _USUAL_OPTIONS, stage: Stage | None = None
) -> Inputs:
    """Load a recipe, open what it names, pair the tensors. See `open_recipes`.

    From here on models go by names relative to the recipe's folder, unless the output is to have absolute paths.
    """
    if options.rounding is not None:
        from mergepipe.recipes.yaml_source import with_rounding

        path = with_rounding(path, store, options.rounding)
    recipes = load_recipes(path, store, options.strictness)
    if not isinstance(options, OutputOptions) or options.paths != PathStyle.ABSOLUTE:
        recipes = tuple(map(with_relative_paths, recipes))
    return open_recipes(recipes, store, options.allow_dropped, stage, options.strictness)


def open_recipes(
    recipes: Sequence[Recipe],
    store: Store,
    allow_dropped: Sequence[str] = (),
    stage: Stage | None = None,
    strictness: Strictness = USUAL,
) -> Inputs:
    """Open what the documents of a recipe name, pair the tensors; the last document makes the output.

    Without `stage` intermediates, which have to be written first, are only described: their tensors cannot be read.
    """
    made: dict[str, tuple[Inputs, Checkpoint]] = {}
    for recipe in recipes[:-1]:
        inputs = _opened(recipe, store, allow_dropped, made, strictness)
        if recipe.name is None:
            raise ValueError("a document that others merge has no name")
        if recipe.is_like_base:
            message, hint = "stores like its base what another document merges", "write out_dtype: like_base there"
            raise UnsupportedError.of("recipe.unsupported", recipe.name, message, hint)
        made[recipe.name] = inputs, _intermediate(inputs, store, stage)
    inputs = _opened(recipes[-1], store, allow_dropped, made, strictness)
    return _like_base(inputs, store, stage) if inputs.recipe.is_like_base else inputs


def _like_base(inputs: Inputs, store: Store, stage: Stage | None) -> Inputs:
    """Store what a merge makes as its base is stored: it is written in numbers before."""
    if inputs.recipe.base is not inputs.recipe.inputs()[0] or inputs.recipe.inputs()[0].intermediate is not None:
        message, hint = "needs a base_model that is a stored model", "name it, or leave out out_dtype"
        raise UnsupportedError.of("recipe.unsupported", "out_dtype: like_base", message, hint)
    merged = _intermediate(replace(inputs, recipe=replace(inputs.recipe, is_like_base=False)), store, stage)
    base = open_checkpoint(store, inputs.recipe.inputs()[0].path)
    tasks = tuple(
        MergeTask(name, Action.COPY, tensor.shape, tensor.dtype, tensor, (), TensorParameters({}, {}, ()))
        for name, tensor in stored_like(store, base, merged.tensors).items()
    )
    return replace(inputs, resolution=replace(inputs.resolution, tasks=tasks), plain=inputs)


def _opened(
    recipe: Recipe,
    store: Store,
    allow_dropped: Sequence[str],
    made: Mapping[str, tuple[Inputs, Checkpoint]],
    strictness: Strictness,
) -> Inputs:
    """Open the models of one document; those of earlier ones are `made`, each with the checkpoint that it will be."""
    models = recipe.inputs()
    for model in models:
        if model.intermediate is not None and model.adapter is not None:
            message = f"'{model.text}': an adapter applies to a stored model, not to what another document makes"
            hint = "merge that document into a folder first, and name the folder"
            raise RecipeError.of("recipe.unsupported", model.where, message, hint)
    intermediates = {i: made[m.intermediate] for i, m in enumerate(models) if m.intermediate is not None}

    def open_named(model: ModelInput, base: Checkpoint | None, *, as_weights: bool = False) -> Checkpoint:
        """Open a model as `open_model`; errors name the line of the recipe too."""
        try:
            return open_model(
                store, model, base, as_weights=as_weights, allow_unapplied=allow_dropped,
                adapter_names=recipe.adapter_names,
            )  # fmt: skip
        except MergePipeError as error:
            located = (replace(problem, where=f"{model.where}: {problem.where}") for problem in error.problems)
            raise type(error)(*located) from error

    base = intermediates[0][1] if 0 in intermediates else open_named(models[0], None)
    weighing = {model.numbers.key for model in models if model.numbers is not None}
    whole = weights_needed(recipe)

    named: dict[ModelKey, Mapping[str, float]] = {}

    def opened(i: int) -> Checkpoint:
        if i in intermediates:
            return intermediates[i][1]
        if models[i].key in weighing:
            from mergepipe.runs.importance import open_moments, open_named_weights  # which load the training formats

            if (numbers := open_named_weights(store, models[i].path)) is not None:
                named[models[i].key] = numbers[1]
                return numbers[0]
            if not recipe.operator.takes_numbers:
                message = f"{recipe.operator.name} accepts one weight per tensor, not a file with one per element"
                hint = "merge_method: fisher accepts one; without normalize it adds the weighted deltas"
                raise UnsupportedError.of("recipe.unsupported", models[i].where, message, hint)
            if (moments := open_moments(store, models[i].path)) is not None:
                return moments
        return open_named(models[i], base, as_weights=models[i].key in whole)

    stored = (model.path for model in models if model.intermediate is None)
    checkpoints = (base, *map_at_once(store, stored, opened, range(1, len(models))))
    recipe = with_named_weights(recipe, named)
    alignment = None
    if recipe.tokenizer is not None:
        alignment = align_vocabulary(recipe.tokenizer, checkpoints, store, has_base=recipe.base is not None)
    aligned = checkpoints if alignment is None else alignment.checkpoints
    if recipe.mixture is None:
        resolution = resolve(recipe, aligned, tuple(allow_dropped), strictness)
    else:
        from mergepipe.recipes.mixture import resolve_mixture  # most recipes build none

        resolution = resolve_mixture(recipe, checkpoints, store)
    left_over = tuple(
        DroppedTensor(model.text, name, REASON_ALLOWED)
        for model, checkpoint in zip(models, checkpoints, strict=True)
        for account in checkpoint.adapters
        for name in account.left_over
    )
    resolution = replace(resolution, dropped=(*resolution.dropped, *left_over))
    parts = {i: inputs for i, (inputs, _) in intermediates.items()}
    earlier = [notice for inputs in parts.values() for notice in inputs.notices]
    of_tokens = [
        notice_at("recipe.unclear", recipe.path.name, text, changes_result=True)
        for text in _vocabulary_notices(recipe, checkpoints, resolution, alignment, store)
    ]
    coded = [
        notice_at(
            "recipe.unclear", f"'{model.text}' is quantised ({checkpoint.quantisation})",
            "it is dequantised when it is read; the output is "
            + ("stored like the base" if recipe.is_like_base else "not quantised"),
        )
        for model, checkpoint in zip(recipe.inputs(), checkpoints, strict=True) if checkpoint.quantisation
    ]  # fmt: skip
    idle = [
        notice_at(
            "recipe.unclear", f"'{model.text}' has lora_alpha 0", f"{plural(n_idle, 'tensor')} of it change nothing",
            changes_result=True,
        )
        for model, checkpoint in zip(models, checkpoints, strict=True) if (n_idle := count_scaled_by_0(checkpoint))
    ]  # fmt: skip
    ignored = [
        notice_at("recipe.unclear", f"'{model.text}'", f"weights next to its own are not read: {names_shown(names)}")
        for model, checkpoint in zip(models, checkpoints, strict=True) if (names := checkpoint.ignored)
    ]  # fmt: skip
    config = TokenizerFiles(base, store).document(CONFIG_NAME)
    unlike = [
        notice_at("recipe.unclear", f"'{models[0].text}'", text, changes_result=True)
        for text in _name_notices(recipe, config, resolution, base)
    ]
    tokenizer, of_tokenizer = choose_tokenizer(recipe, base, resolution.tasks, store)
    of_models = (*coded, *idle, *ignored, *unlike, *of_tokenizer)
    notices = told_once(dict.fromkeys((*recipe.notices, *earlier, *resolution.notices, *of_tokens, *of_models)))
    if strictness.strict:
        refuse_notices(notices)
    return Inputs(recipe, checkpoints, resolution, alignment, parts, notices, tokenizer=tokenizer)


def _name_notices(recipe: Recipe, config: dict[str, JsonValue], resolution: Resolution, base: Checkpoint) -> list[str]:
    """List notices about weights that the output's architecture has and the output not, and the other way round."""
    base_names: Collection[str] = base.tensors
    if recipe.mixture is not None:
        from mergepipe.recipes.mixture import mixture_config

        config = parse_config(mixture_config(config, recipe.mixture, recipe.path.name), recipe.path)
        base_names = ()  # whose architecture is another one
    problems = name_problems(config, [task.name for task in resolution.tasks], base_names)
    return [] if problems is None else problems.texts()


def _vocabulary_notices(
    recipe: Recipe, models: Sequence[Checkpoint], resolution: Resolution, alignment: Alignment | None, store: Store
) -> tuple[str, ...]:
    """List notices about tokens that are dropped, or merged by row number."""
    names = [model.text for model in recipe.inputs()]
    if alignment is not None:
        return alignment.notices(names)
    tasks = [task for task in resolution.tasks if embedding_ending(task.name)]
    used = {model for task in tasks for model in (task.base_model, *task.expert_models)}
    return unaligned_notices(models, names, used, store)


def _intermediate(inputs: Inputs, store: Store, stage: Stage | None) -> Checkpoint:
    """Write an intermediate through `stage`, and open it; without one describe it."""
    if stage is not None:
        return open_checkpoint(store, Location.local(stage(inputs)))
    base = inputs.base
    tensors: dict[str, Readable] = {
        task.name: TensorEntry(
            task.name, task.dtype, task.shape, base.root, 0, element_count(task.shape) * task.dtype.itemsize
        )
        for task in inputs.resolution.tasks
    }
    return Checkpoint(base.path, base.root, tensors, (), base.sidecars, components=base.components)


def with_known_digests(inputs: Inputs, link: CatalogLink) -> Inputs:
    """Add the digests that the catalog knows to the fingerprints of the files of all inputs."""

    def known(checkpoint: Checkpoint) -> Checkpoint:
        return link.use(lambda catalog: catalog.with_known_digests(checkpoint)) or checkpoint

    return replace(
        inputs,
        checkpoints=tuple(map(known, inputs.checkpoints)),
        intermediates={index: with_known_digests(made, link) for index, made in inputs.intermediates.items()},
    )


def open_path(store: Store, path: Location, base: Checkpoint | None = None) -> Checkpoint:
    """Open a model by its path alone: a base, or an expert of `base` of any kind."""
    return open_model(store, ModelInput(str(path), store.pin(path.absolute()), {}, str(path)), base)


def with_parameters(inputs: Inputs, plan: Plan) -> Inputs:
    """The inputs with the plan's parameters in force: a plan may have adjusted them."""
    planned = {tensor.name: tensor for tensor in plan.tensors}

    def adjusted(task: MergeTask) -> MergeTask:
        tensor = planned.get(task.name)
        if tensor is None or task.action is not Action.MERGE:
            return task
        return replace(task, parameters=plan.parameters[tensor.parameters])

    resolution = inputs.resolution
    return replace(inputs, resolution=replace(resolution, tasks=tuple(map(adjusted, resolution.tasks))))
