"""Resolve a recipe against opened checkpoints: one task per output tensor, a reason for every dropped tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.adapted_tensors import Adapted
from mergepipe.checkpoints.contract import Checkpoint, Readable, Source
from mergepipe.checkpoints.embedding_rows import TIED_HEADS, is_head, is_task_head
from mergepipe.core.blocks import DType, DTypeKind, promoted_dtype
from mergepipe.core.outcome import DroppedTensor
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from mergepipe.operators.base import NUMBERS_OF
from mergepipe.operators.spec import BY_NORM, BaseRole, Scope
from mergepipe.recipes.entries import SMALLEST_WEIGHT_SUM, normalized_sum
from mergepipe.recipes.fields import USUAL, Findings, Strictness, near_miss
from mergepipe.recipes.layer_names import layer_of, module_tensors, template
from mergepipe.recipes.output_tensors import Group, Member, OpenModel, OutputListing, OutputTensor, is_allowed
from mergepipe.recipes.pairing import WHISPER_HEAD, Pairing, is_pooler, renamed_to_match, shared_embedding
from mergepipe.recipes.parameters import global_values, is_constant, missing_values, model_values
from mergepipe.recipes.recipe import EVERY_TENSOR, Cases, ModelInput, OutputModule, OutputSlice, Recipe, Scalar, Setting
from mergepipe.recipes.tasks import Action, MergeTask, Resolution, TensorParameters, count_text, group_by_pattern

# --- account for every input tensor: used, or dropped for a reason; report unexpected ones ---


REASON_EXACT = "integer or boolean buffer"
REASON_COMPUTED = "buffer that a model computes itself"
REASON_COPIED = "copied from the base"
REASON_NO_PART = "kept: no expert has this part of the base"
REASON_NO_MODULE = "in no module of the recipe"
REASON_ALLOWED = "not in the base, allowed to be dropped"
REASON_LAYER = "in a layer that no slice takes"
REASON_AROUND = "outside the layers, taken from another slice"
REASON_COPY = "copy of the shared embedding"
REASON_POOLER = "in a pooler, which the base has not"
REASON_LENDER = "lends its configuration only"

# Buffers that some models store and recompute on loading.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb|rotary_embedding)\.\w+$|(^|\.)attn\.(masked_bias|bias)$")
_MASK_DIMENSIONS = 4
# Names of what a model does not do without: factors and wrappers of training, norms.
_PART_OF_ANOTHER = re.compile(
    r"(^|\.)(lora_\w+|base_layer|modules_to_save|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
    r"|norm\w*\.(weight|bias)$|\.ln_\w+\.(weight|bias)$",
    re.IGNORECASE,
)
_KEEP_HEAD = (
    " (nothing is lost where it equals the embedding); to keep it, give the base a head of its own: store its "
    "embedding as '{}', too"
)


def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a buffer that models recompute: rotary frequencies, causal masks."""
    if _COMPUTED.search(name) is None:
        return False
    return "rotary" in name or len(shape) in (0, _MASK_DIMENSIONS)


class TensorAccount:
    """Finds the reason for each tensor that no task uses."""

    def __init__(
        self,
        recipe: Recipe,
        models: Sequence[OpenModel],
        outputs: Sequence[OutputTensor],
        used: Sequence[set[str]],
        allow: Sequence[str],
    ) -> None:
        self._models = models
        self._used = used
        self._allow = allow
        self._is_sliced = not recipe.models
        self._names = {output.name for output in outputs}
        self._templates = {template(output.name) for output in outputs if output.group is not None}
        self._layers = [{*map(layer_of, names)} for names in used]
        self._lists = {prefix for prefix, _ in map(layer_of, self._names)} - {""}
        taking_part = {output.model for output in outputs}
        groups = {output.group for output in outputs if output.group}
        taking_part |= {model for group in groups for model, _ in group.numbers}
        taking_part |= {member.model for group in groups for member in group.experts}
        self._taking_part = taking_part

    def dropped(self, findings: Findings, unrelated: Collection[int] = ()) -> Iterator[DroppedTensor]:
        """List every tensor that no task uses, by model in storage order; report unexpected ones.

        Of `unrelated` models enough was said before.
        """
        for index, model in enumerate(self._models):
            unexpected: list[str] = []
            for name, entry in model.tensors.items():
                if name in self._used[index]:
                    continue
                reason = self._reason(index, name)
                stored = entry.name
                if reason is None and is_allowed(model, name, self._allow):
                    reason = REASON_ALLOWED
                if reason is not None:
                    yield DroppedTensor(model.input.text, stored, reason)
                else:
                    unexpected.append(stored)
            if index not in unrelated:
                base = self._models[0].input.text
                for pattern, group in group_by_pattern(unexpected, self._models[0].tensors).items():
                    message = f"'{model.input.text}' has {count_text(group)}, the base '{base}' has not"
                    hint = f"to leave {'it' if len(group) == 1 else 'them'} out: --allow-dropped '{pattern}'"
                    if is_head(pattern) or pattern == WHISPER_HEAD:
                        hint += _KEEP_HEAD.format(pattern)
                    elif is_task_head(pattern):
                        hint = f"it is the head of another task; {hint}"
                    elif _PART_OF_ANOTHER.search(pattern):
                        hint = "a model needs it: is the base of its architecture, and was it saved without adapters?"
                    findings.add(MismatchError, "model.unexpected-tensor", pattern, message, hint)

    def _reason(self, index: int, name: str) -> str | None:
        """Return why a tensor is expected to be unused; empty if it is not."""
        entry = self._models[index].tensors[name]
        if index not in self._taking_part:
            return REASON_LENDER
        if self._is_sliced and template(name) in self._templates:
            return REASON_LAYER if template(name) != name else REASON_AROUND
        if self._is_sliced and self._is_unused_layer(index, name):
            return REASON_LAYER
        if name in self._names:
            return REASON_COPIED
        if entry.dtype.kind is DTypeKind.EXACT:
            return REASON_EXACT
        if shared_embedding(name, self._models[index].tensors) in self._names:
            return REASON_COPY
        if is_pooler(name) and not any(map(is_pooler, self._names)):
            return REASON_POOLER
        return REASON_COMPUTED if is_computed(name, entry.shape) else None

    def _is_unused_layer(self, index: int, name: str) -> bool:
        """Whether a tensor is in a layer that no slice selects, of a kind that the output need not have."""
        place = layer_of(name)
        return place[0] in self._lists and place not in self._layers[index]


# --- resolve a recipe against opened checkpoints: one task per output tensor, a reason for every dropped tensor ---


_NOTHING = TensorParameters({}, {}, ())
_SHOWN_PARTS = 12


def resolve(
    recipe: Recipe, checkpoints: Sequence[Checkpoint], allow_dropped: Sequence[str] = (), strictness: Strictness = USUAL
) -> Resolution:
    """Pair the tensors of `checkpoints`, opened from `recipe.inputs()` in that order, into merge tasks.

    `allow_dropped` are patterns (`*`, `?`, `[...]`) of names that models may have and the base not.
    """
    inputs = recipe.inputs()
    if len(inputs) != len(checkpoints):
        raise ValueError(f"the recipe has {len(inputs)} models, {len(checkpoints)} were opened")
    precedence = (NotFoundError, CorruptError, MismatchError, UnsupportedError, RecipeError)
    findings = Findings(*precedence, strictness=strictness)
    base = checkpoints[0]
    models = [OpenModel(inputs[0], base.tensors, base.kind)]
    for input_, checkpoint in zip(inputs[1:], checkpoints[1:], strict=True):
        tensors = renamed_to_match(_reference(recipe, input_, base), checkpoint)
        models.append(OpenModel(input_, tensors, checkpoint.kind))
    listing = OutputListing(recipe, models, findings, allow_dropped)
    outputs = list(listing.output_tensors())
    findings.raise_any()
    resolver = _Resolver(recipe, models, findings)
    tasks = tuple(task for output in outputs if (task := resolver.task(output)) is not None)
    unrelated = resolver.pairing.note_missing()
    resolver.pairing.note_short_vocabularies()
    resolver.pairing.note_kept_parts()
    _report_idle_filters(recipe, outputs, findings)
    _report_mixed_dtypes(recipe, tasks, findings)
    account = TensorAccount(recipe, models, outputs, resolver.pairing.used, tuple(allow_dropped))
    dropped = tuple(account.dropped(findings, unrelated))
    findings.raise_any()
    return Resolution(tasks, dropped, inputs, tuple(listing.layer_counts), findings.notices)


class _Resolver:
    """Builds one task at a time, and reports what does not fit."""

    def __init__(self, recipe: Recipe, models: Sequence[OpenModel], findings: Findings) -> None:
        self.pairing = Pairing(models, findings)
        self._recipe = recipe
        self._findings = findings
        self._dtype = recipe.out_dtype or recipe.dtype
        self._constant: dict[Group, TensorParameters] = {}
        self._is_constant: dict[Group, bool] = {}
        self._without_value: set[str] = set()
        self._inputs = recipe.inputs()
        self._conflicting: list[Member] = []

    def task(self, output: OutputTensor) -> MergeTask | None:
        """Build the task of one output tensor; None if a problem was reported."""
        anchor = output.sources[0]
        base = self.pairing.base(output.model, anchor)
        if base is None:
            return None
        reason = _why_copied(output, base)
        experts_of_group = [] if output.group is None else [member.model for member in output.group.experts]
        if not reason and self.pairing.keeps(experts_of_group, anchor, output.model):
            reason = REASON_NO_PART
        if reason or output.group is None:
            return MergeTask(
                output.name, Action.COPY, base.shape, base.dtype, base, (), _NOTHING, reason, output.model
            )  # fmt: skip
        experts = self._experts(output, output.group, base)
        parameters = self._parameters(output, output.group)
        if experts is None:
            return None
        group = output.group
        members = (*(member.model for member in group.experts), *(model for model, _ in group.numbers))
        dtype = self._dtype or (base.stored_dtype if self._recipe.keeps_dtypes else _promoted(base, experts))
        is_copied = self._recipe.operator.max_experts == 0 and parameters.anchor.get("scale", 1.0) == 1.0
        if is_copied and isinstance(base, Adapted):
            base = replace(base, dtype=dtype)
        return MergeTask(
            output.name, Action.MERGE, base.shape, dtype, base, experts, parameters, "", output.model, members
        )

    def _experts(self, output: OutputTensor, group: Group, base: Readable) -> tuple[Source, ...] | None:
        named = [(member.model, name) for member, name in zip(group.experts, output.sources[1:], strict=True)]
        numbers = [(model, named[e][1]) for model, e in group.numbers]
        for model, name in numbers:
            if name not in self.pairing.tensors_of(model):
                message = f"'{self._inputs[model].text}' has no weights of it, which is merged by them"
                self._findings.add(
                    MismatchError, "importance.mismatch", name, message, "give a number for each element"
                )
        partners = [self.pairing.partner(model, name, base, output.model) for model, name in (*named, *numbers)]
        matching = tuple(partner for partner in partners if partner is not None)
        return matching if len(matching) == len(partners) else None

    def _parameters(self, output: OutputTensor, group: Group) -> TensorParameters:
        if group not in self._is_constant:
            settings = (*group.shared, group.anchor.own, *(member.own for member in group.experts))
            self._is_constant[group] = is_constant(settings)
        if not self._is_constant[group]:
            return self._evaluated(output, group)
        if group not in self._constant:
            self._constant[group] = self._evaluated(output, group)
        return self._constant[group]

    def _evaluated(self, output: OutputTensor, group: Group) -> TensorParameters:
        operator, depth = self._recipe.operator, output.depth
        shared = global_values(operator, group.shared, output.name, depth)
        self._note_missing(shared, Scope.GLOBAL, group.shared, output.name)
        chains = [(member.own, *group.shared) for member in (group.anchor, *group.experts)]
        values = [
            model_values(operator, chain, name, depth) for chain, name in zip(chains, output.sources, strict=True)
        ]
        if not self._is_constant[group]:  # else checked on loading
            self._note_conflicts(group, values[1:], output.name)
        anchor = self._anchor_values(group, values[0])
        for index, chain in enumerate(chains):
            if index or (group.takes_part and group.is_listed):
                self._note_missing(values[index], Scope.MODEL, chain, output.sources[index])
        if operator.base_role is BaseRole.OPTIONAL and not self._is_constant[group]:  # else checked on loading
            self._check_weights(shared, [*([anchor] if anchor else ()), *values[1:]], output.name)
        numbers = [{"weight": 0.0, NUMBERS_OF: float(e)} for _, e in group.numbers]
        return TensorParameters(shared, anchor, (*values[1:], *numbers))

    def _anchor_values(self, group: Group, values: dict[str, Scalar]) -> dict[str, Scalar]:
        if not group.takes_part:
            return {}
        weight = self._recipe.operator.parameter("weight")
        if not group.is_listed and weight is not None and values.get("weight", BY_NORM) is BY_NORM:
            return {
                **values,
                "weight": 0.0,
            }  # it lends its tensors' names, shapes and dtypes, and has no part in the average
        if values.get("weight") is BY_NORM:
            model = self._inputs[group.anchor.model]
            message = (
                f"'{model.text}' has the weight nan, but no norm: it is the model that the others are compared with"
            )
            self._findings.add(RecipeError, "recipe.value", model.where, message, "give it a number, or a base_model")
        return values  # with a weight for every model it is one of them, as in mergekit

    def _note_missing(
        self, values: Mapping[str, Scalar], scope: Scope, chain: Sequence[Mapping[str, Setting]], tensor: str
    ) -> None:
        """Report a required parameter of which no case applies to a tensor; missing ones are reported on loading."""
        for spec in missing_values(self._recipe.operator, scope, values):
            settings = (settings_of_scope[spec.name] for settings_of_scope in chain if spec.name in settings_of_scope)
            where = next((setting.where for setting in settings if isinstance(setting, Cases)), self._recipe.path.name)
            if where in self._without_value:
                continue
            self._without_value.add(where)
            message, hint = f"{spec.name} has no value for '{tensor}'", "end the list with '- value: ...'"
            self._findings.add(RecipeError, "recipe.incomplete", where, message, hint)

    def _note_conflicts(self, group: Group, values: Sequence[Mapping[str, Scalar]], tensor: str) -> None:
        """Report, once per model, contradicting parameters that depend on the tensor."""
        for member, parameters in zip(group.experts, values, strict=True):
            conflict = self._recipe.operator.conflict_of(parameters)
            if conflict and member not in self._conflicting:
                self._conflicting.append(member)
                model = self._inputs[member.model]
                message = f"'{model.text}': for '{tensor}' {conflict}"
                hint = "change one of the two"
                self._findings.add(RecipeError, "recipe.conflict", model.where, message, hint)

    def _check_weights(self, shared: dict[str, Scalar], values: list[dict[str, Scalar]], tensor: str) -> None:
        total = normalized_sum(shared, values)
        if total is not None and abs(total) < SMALLEST_WEIGHT_SUM:
            message = f"the weights sum to {total:g} and cannot be normalized"
            hint = "change a weight, or set normalize: false"
            self._findings.add(RecipeError, "recipe.value", tensor, message, hint)


def _reference(recipe: Recipe, model: ModelInput, base: Checkpoint) -> Checkpoint:
    """Return the base with the tensors of the modules that list a model, whose names its own may differ from."""
    own = {module.name for module in recipe.modules if model.key in {listed.key for listed in module.models}}
    names = [name for module in own for name in module_tensors(module, base.tensors)]
    return replace(base, tensors={name: base.tensors[name] for name in names}) if names else base


def _why_copied(output: OutputTensor, base: Readable) -> str:
    if base.dtype.kind is DTypeKind.EXACT:
        return REASON_EXACT
    if is_computed(output.name, base.shape):
        return REASON_COMPUTED
    return REASON_NO_MODULE if output.group is None else ""


def _promoted(base: Readable, experts: Sequence[Source]) -> DType:
    """The dtype that holds what all weights hold, as torch promotes dtypes; what is stored as differences has none."""
    dtype = base.stored_dtype
    for source in experts:
        if not source.is_delta:
            dtype = promoted_dtype(dtype, source.stored_dtype)
    return dtype


def _report_mixed_dtypes(recipe: Recipe, tasks: Sequence[MergeTask], findings: Findings) -> None:
    """Report tensors whose dtype becomes another than the base's because the recipe states none."""
    if recipe.dtype or recipe.out_dtype or recipe.keeps_dtypes:
        return
    widened = [task for task in tasks if task.action is Action.MERGE and task.dtype != task.base.stored_dtype]
    if widened:
        before, after = widened[0].base.stored_dtype.recipe_name, widened[0].dtype.recipe_name
        message = f"no dtype is stated: {len(widened)} tensors, e.g. '{widened[0].name}', become {after}"
        meaning = f"they are {before} in the base and not in every other model; `dtype: auto` keeps the base's"
        findings.add_notice("recipe.unclear", recipe.path.name, message, meaning, changes_result=True)


def _report_idle_filters(recipe: Recipe, outputs: Sequence[OutputTensor], findings: Findings) -> None:
    """Report filters that match no tensor name; an output head that is tied counts as a tensor."""
    settings = [setting for setting in _settings(recipe) if isinstance(setting, Cases)]
    filters = {(case.filter, s.where) for s in settings for case in s.cases if case.filter not in EVERY_TENSOR}
    if not filters:
        return
    names = {
        *TIED_HEADS,
        *(output.name for output in outputs),
        *(name for output in outputs for name in output.sources),
    }
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    for text, where in sorted(filters, key=lambda pair: (pair[1], pair[0])):
        if any(text in name for name in names):
            continue
        message, real_name = f"the filter '{text}' matches no tensor's name", near_miss(text, *parts)
        if real_name is not None:
            findings.add_misspelt("recipe.unknown-name", where, message, f"did you mean '{real_name}'?")
        else:
            shown_parts = ", ".join(parts[:_SHOWN_PARTS]) + (", ..." if len(parts) > _SHOWN_PARTS else "")
            findings.add_notice("recipe.no-effect", where, message, f"the names contain {shown_parts}")


def _settings(recipe: Recipe) -> Iterator[Setting]:
    """Yield every parameter value of a recipe."""
    slices = (piece for _, slices in recipe.parts() for piece in slices)
    parts: list[Recipe | OutputModule | OutputSlice | ModelInput] = [recipe, *recipe.modules, *slices, *recipe.listed()]
    for part in parts:
        yield from part.parameters.values()
