"""Assign each parameter to a source checkpoint, by the recipe and the opened sources; compute staleness. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mergepipe.errors import MismatchError, RecipeError, unsupported
from mergepipe.recipes.fields import Findings
from mergepipe.recipes.tasks import LayerCount
from mergepipe.snapshots.manifest import StepPolicy, UnitSource, UnitStaleness
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, AdamStep, StoredState, TrainingCheckpoint, differences
from mergepipe.tailor.formats.hf_trainer import WEIGHTS_FORMAT
from mergepipe.tailor.recipes import CompositionRecipe, Take
from mergepipe.tailor.restacking import at_layer, fits_in_place, in_layers, layer_count, restacked
from mergepipe.tailor.selection import Choice, ModelUnits, Unit, UnitKind, layer

DERIVED_KINDS = (WEIGHT, EXPORT)  # copies of the master, in the dtype they are stored in
_MAX_LISTED_UNITS = 8


@dataclass(frozen=True, slots=True)
class Assignment:
    """`source_of` maps every parameter to its source's place in `sources`. The skeleton gives everything else:
    structure, scheduler, random states, options of the optimizer. With `state_index` a partial checkpoint takes the
    skeleton's place in all but structure.

    With `layers` the result's layers are these layers of their sources, and `origin_of` has the source's name of every
    parameter that has another name there. `resized` describes the result where it has other parameters than the
    skeleton.
    """

    sources: tuple[TrainingCheckpoint, ...]
    skeleton_index: int
    source_of: Mapping[str, int]
    state_index: int | None = None
    layers: LayerCount | None = None
    origin_of: Mapping[str, str] = field(default_factory=dict)
    resized: TrainingCheckpoint | None = None

    @property
    def model(self) -> TrainingCheckpoint:
        """The description of the result: its parameters, and the form of its states."""
        return self.resized or self.skeleton

    @property
    def skeleton(self) -> TrainingCheckpoint:
        return self.sources[self.skeleton_index]

    @property
    def state(self) -> TrainingCheckpoint:
        """The source of step, scheduler and random states: training resumes at its step."""
        return self.sources[self.skeleton_index if self.state_index is None else self.state_index]

    def source(self, parameter: str) -> TrainingCheckpoint:
        """Return the source of a parameter; what is none, as a frozen weight of ZeRO-3, is the skeleton's."""
        return self.sources[self.source_of.get(parameter, self.skeleton_index)]

    def keeps(self, name: str) -> bool:
        """Whether a weight, or the owner of an alias, is the skeleton's own, in its position."""
        owner = self.skeleton.units.tied.get(name, name)
        return self.source(owner) is self.skeleton and owner not in self.origin_of

    def origin(self, name: str) -> str:
        """Return the name that a parameter has in its source."""
        return self.origin_of.get(name, name)

    def find_state(self, name: str, kind: str) -> StoredState | None:
        """Return the source's state that a parameter or an alias is copied from, if there is one."""
        owner = self.skeleton.units.tied.get(name, name)
        return state_to_copy(self.source(owner), self.origin(name), kind)

    def state_of(self, name: str, kind: str) -> StoredState:
        """Return the source's state that a parameter or an alias is copied from; `assign` has seen it there."""
        stored = self.find_state(name, kind)
        if stored is None:
            raise AssertionError(f"{kind} of {name} was checked to be there")
        return stored


def assign(recipe: CompositionRecipe, sources: Mapping[Location, TrainingCheckpoint]) -> Assignment:
    """Decide where each parameter comes from. `sources` has every location that the recipe names."""
    places = {place: index for index, place in enumerate(sources)}
    opened = tuple(sources.values())
    findings = Findings(RecipeError, MismatchError)
    skeleton = _skeleton(recipe, opened, places, findings)
    findings.raise_any()
    layers = _stacked_layers(recipe, opened[skeleton], findings)
    model = opened[skeleton] if layers is None else restacked(opened[skeleton], layers)
    claims = _claim_parameters(recipe, opened[skeleton].units, model.units, findings)
    source_of = {name: places[source] for name, (source, _) in claims.items()}
    origin_of = {name: origin for name, (_, origin) in claims.items() if origin != name}
    _check_dtype(recipe, opened[skeleton], findings)
    state = _state(recipe, opened, places, skeleton)
    assignment = Assignment(
        opened,
        skeleton,
        MappingProxyType(source_of),
        state if state != skeleton else None,
        layers,
        MappingProxyType(origin_of),
        None if fits_in_place(opened[skeleton], model) else model,
    )
    for index in sorted({*source_of.values()} - {skeleton}):
        _check_fit(assignment, opened[index], [n for n, i in source_of.items() if i == index], findings)
    findings.raise_any()
    return assignment


def _stacked_layers(recipe: CompositionRecipe, skeleton: TrainingCheckpoint, findings: Findings) -> LayerCount | None:
    """Describe the layers of slices, all of which the model must have; None where layers keep their positions."""
    origins = recipe.stacked_layers
    if not origins or origins == tuple(range(skeleton.units.n_layers)):
        return None
    for take in recipe.takes:
        for choice in take.choices if take.first_layer is not None else ():
            _find(choice, take, skeleton.units, findings)
    findings.raise_any()
    layers = layer_count(skeleton.units, origins)
    tied = next((alias for pair in skeleton.units.tied.items() for alias in pair if in_layers(alias, layers)), None)
    if tied is not None:
        raise unsupported(skeleton.path, f"{tied} is tied to another parameter", "leave its layer in its position")
    untrained = next((name for name in skeleton.untrained if in_layers(name, layers)), None)
    if untrained is not None:
        message = f"{untrained} is frozen or a buffer, and ZeRO-3 keeps it apart: its layer keeps its position"
        raise unsupported(skeleton.path, message, "stack the weights alone: merge the models by this recipe")
    return layers


def _find(choice: Choice, take: Take, units: ModelUnits, findings: Findings) -> tuple[tuple[str, ...], str | None]:
    """Return what a choice finds in a model; nothing, and a finding, where it is wrong."""
    try:
        return choice.find(units, take.where)
    except RecipeError as error:
        for problem in error.problems:
            findings.add(RecipeError, problem.code, problem.where, problem.message, problem.hint)
        return (), None


def _state(
    recipe: CompositionRecipe, opened: Sequence[TrainingCheckpoint], places: Mapping[Location, int], skeleton: int
) -> int:
    """Choose the source of the state: the requested one, else the newest that has state."""
    if recipe.state_from is not None:
        return places[recipe.state_from]
    partial = (index for index, source in enumerate(opened) if source.has_state)
    newest = max(partial, key=lambda index: opened[index].step, default=skeleton)
    return newest if opened[newest].step > opened[skeleton].step else skeleton


def _skeleton(
    recipe: CompositionRecipe, opened: Sequence[TrainingCheckpoint], places: Mapping[Location, int], findings: Findings
) -> int:
    """Choose the source of structure: the requested one if complete, else the newest complete one."""
    if recipe.state_from is not None:
        index = places[recipe.state_from]
        if not opened[index].missing:
            return index
    complete = [index for index, source in enumerate(opened) if not source.missing]
    if not complete:
        newest = max(opened, key=lambda source: source.step)
        more = f" and {len(newest.missing) - 1} more" if len(newest.missing) > 1 else ""
        hint = "a composition needs one complete checkpoint of the run, as default or in state_from"
        findings.add(MismatchError, "checkpoint.mismatch", str(newest.path), f"lacks {newest.missing[0]}{more}", hint)
        return 0
    return max(complete, key=lambda index: opened[index].step)


def _claim_parameters(
    recipe: CompositionRecipe, source_units: ModelUnits, units: ModelUnits, findings: Findings
) -> dict[str, tuple[Location, str]]:
    """Return every parameter's source and its name there, in the order of the result, whose `units` are given.

    What no entry takes comes from the default.
    """
    claims: dict[str, tuple[Take, Choice, str | None]] = {}
    origins: dict[str, str] = {}
    for take in recipe.takes:
        for choice in take.choices:
            selected, alias = _find(choice, take, source_units, findings)
            conflicting: set[tuple[str, bool]] = set()  # one error for an earlier entry, and one for a tied parameter
            for name, origin in _placed(take, choice, selected, source_units):
                origins.setdefault(name, origin)
                first, first_choice, first_alias = claims.setdefault(name, (take, choice, alias))
                is_tied = bool(first_alias or alias)
                if (first.where, is_tied) in conflicting:
                    continue
                if first.source != take.source:
                    conflicting.add((first.where, is_tied))
                    what = choice.text or name
                    _refuse_two_sources(what, name, first_alias or alias, take.where, first.where, findings)
                elif first_choice is not choice and first_choice.text and choice.text:
                    conflicting.add((first.where, is_tied))
                    message = f"{choice.text!r} selects {name!r}, which {first_choice.text!r} selects too"
                    findings.add(RecipeError, "recipe.conflict", take.where, message, "name every unit once")
    lacking = [str(unit) for unit, names in units.parameters.items() if not claims.keys() >= set(names)]
    if recipe.default is None and lacking:
        _refuse_unclaimed(recipe, lacking, findings)
    sources = ((name, claims[name][0].source if name in claims else recipe.default) for name in units.names)
    return {name: (source, origins.get(name, name)) for name, source in sources if source is not None}


def _placed(take: Take, choice: Choice, names: Sequence[str], units: ModelUnits) -> Iterator[tuple[str, str]]:
    """Yield the result's names of what a choice finds, each with its name in the source."""
    if take.first_layer is None:
        yield from ((name, name) for name in names)
        return
    layers = layer_count(units, choice.layers)
    for place, number in enumerate(choice.layers, take.first_layer):
        for name in units.parameters[layer(number)]:
            yield at_layer(name, layers, place), name


def _refuse_unclaimed(recipe: CompositionRecipe, units: Sequence[str], findings: Findings) -> None:
    """Report the units that no entry takes, in a recipe without a default."""
    listed = ", ".join(units[:_MAX_LISTED_UNITS])
    if len(units) > _MAX_LISTED_UNITS:
        listed += ", ..."
    hint = "take them from one, or add 'default: PATH'"
    findings.add(RecipeError, "recipe.incomplete", recipe.path.name, f"no checkpoint is named for {listed}", hint)


def _refuse_two_sources(unit: str, name: str, alias: str | None, where: str, first: str, findings: Findings) -> None:
    """Report that a unit, or a parameter of it, is taken from two checkpoints."""
    if alias is None:
        what = f"{name!r}" if unit == name else f"{name!r}, of {unit!r},"
        message = f"{what} is already taken from another checkpoint, at {first}"
        findings.add(RecipeError, "recipe.conflict", where, message, "name every unit once")
        return
    message = f"{alias!r} is tied to {name!r}, and the two are taken from different checkpoints (see {first})"
    findings.add(MismatchError, "checkpoint.mismatch", where, message, "take both from one")


def _check_dtype(recipe: CompositionRecipe, skeleton: TrainingCheckpoint, findings: Findings) -> None:
    if recipe.weights_dtype is None:
        return
    dtypes = {s.dtype.name for (_, kind), s in skeleton.states.items() if kind in DERIVED_KINDS}
    if dtypes and recipe.weights_dtype.name not in dtypes:
        findings.add(
            MismatchError, "checkpoint.mismatch", f"{recipe.path.name} dtype",
            f"{recipe.weights_dtype.recipe_name} is asked "
            f"for, the weights of {skeleton.path} are {', '.join(sorted(dtypes))}",
            "a composition keeps the dtype of its sources",
        )  # fmt: skip


def _check_fit(assignment: Assignment, source: TrainingCheckpoint, names: Sequence[str], findings: Findings) -> None:
    """Check that `source` has the parameters `names` as the result needs them."""
    skeleton = assignment.skeleton
    reasons = list(differences(skeleton, source)) if not source.missing else list(_stage_differences(skeleton, source))
    for reason in reasons:
        findings.add(MismatchError, "checkpoint.mismatch", str(source.path), reason)
    if reasons:
        return
    wanted = set(names)
    problems = []
    for (name, kind), state in assignment.model.states.items():
        if skeleton.units.tied.get(name, name) in wanted:
            stored = assignment.find_state(name, kind)
            problem = _mismatch(stored, state) if stored is not None else "is not there"
            problems += [f"{kind} of {assignment.origin(name)} {problem}"] if problem else []
    counted = {name for step in source.steps for name in step.parameters}
    counters = (assignment.origin(n) for step in assignment.model.steps for n in step.parameters if n in wanted)
    problems += [f"the step counter of {name} is not there" for name in counters if name not in counted]
    if problems:
        more = f", and {len(problems) - 1} more states" if len(problems) > 1 else ""
        lacking = f" (it lacks {source.missing[0]})" if source.missing and not source.is_partial else ""
        hint = "take them from a checkpoint that has them"
        findings.add(MismatchError, "checkpoint.mismatch", str(source.path), f"{problems[0]}{more}{lacking}", hint)


def state_to_copy(source: TrainingCheckpoint, name: str, kind: str) -> StoredState | None:
    """Return the state to copy from a source: the state itself, or the master weights for a derived copy."""
    source_state = source.states.get((name, kind))
    if source_state is not None or kind not in DERIVED_KINDS:
        return source_state
    owner = source.units.tied.get(name, name)
    return source.states.get((owner, FP32)) or source.states.get((owner, WEIGHT))


def _mismatch(stored: StoredState, wanted: StoredState) -> str:
    if stored.gaps:
        return "is saved in part only"
    if stored.shape != wanted.shape:
        return f"has shape {stored.shape}, not {wanted.shape}"
    if stored.kind == wanted.kind and stored.dtype != wanted.dtype:
        return f"is {stored.dtype.name}, not {wanted.dtype.name}"
    return ""


def _stage_differences(skeleton: TrainingCheckpoint, source: TrainingCheckpoint) -> Iterator[str]:
    """Return why a partial checkpoint is not of the skeleton's run, as far as recorded."""
    if skeleton.stage != source.stage and source.format != WEIGHTS_FORMAT:
        yield f"{skeleton.path} and {source.path}: ZeRO stage {skeleton.stage} and {source.stage}"
    both = [name for name in source.parameters if name in skeleton.parameters]
    unknown = [name for name in source.parameters if name not in skeleton.parameters]
    if unknown:
        yield f"{skeleton.path} lacks {unknown[0]}, which {source.path} has"
    reshaped = [name for name in both if source.parameters[name] != skeleton.parameters[name]]
    if reshaped:
        yield f"{skeleton.path} and {source.path}: different shapes of {reshaped[0]}"


# --- compute each unit's staleness, and choose the value of each step counter. Pure ---


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The value chosen for one step counter of the skeleton."""

    counter: AdamStep
    value: float
    policy: StepPolicy


def choose_steps(assignment: Assignment, groups: Sequence[Sequence[str]] | None = None) -> tuple[StepChoice, ...]:
    """Choose the value of every step counter: of the result's, or of one for each of `groups`.

    Law: where all of a counter's parameters come from one source, its value is that source's.
    """
    counters = [
        {name: step.value for step in source.steps for name in step.parameters} for source in assignment.sources
    ]
    steps = assignment.model.steps
    wanted = steps if groups is None else _regrouped(steps, groups)
    return tuple(_choose(assignment, counters, counter) for counter in wanted)


def _regrouped(steps: Sequence[AdamStep], groups: Sequence[Sequence[str]]) -> Iterator[AdamStep]:
    """Build one counter for each group that any counter serves."""
    by_name = {name: step for step in steps for name in step.parameters}
    for names in groups:
        served = [by_name[name] for name in names if name in by_name]
        if served:
            newest = max(served, key=lambda step: step.value)
            entries = dict.fromkeys(entry for step in served for entry in step.entries)
            yield replace(newest, parameters=tuple(names), cells=(), entries=tuple(entries))


def _choose(assignment: Assignment, counters: list[dict[str, float]], counter: AdamStep) -> StepChoice:
    used = {name: assignment.source_of[name] for name in counter.parameters if name in assignment.source_of}
    values = (counters[index].get(assignment.origin(name), counter.value) for name, index in used.items())
    value = max(values, default=counter.value)
    return StepChoice(counter, value, StepPolicy.EXACT if len({*used.values()}) <= 1 else StepPolicy.NEWEST)


def staleness_of(assignment: Assignment, steps: tuple[StepChoice, ...]) -> tuple[UnitStaleness, ...]:
    """Report every unit, in the model's order."""
    by_name = {name: choice for choice in steps for name in choice.counter.parameters}
    newest = assignment.state.step
    reports = []
    for unit, names in assignment.model.units.parameters.items():
        choices = [by_name[name] for name in names if name in by_name]
        opened = [assignment.sources[index] for index in dict.fromkeys(assignment.source_of[name] for name in names)]
        reports.append(UnitStaleness(
            unit=str(unit),
            parameters=len(names),
            sources=tuple(UnitSource(str(source.path), source.step, newest - source.step) for source in opened),
            adam_steps=tuple(sorted({choice.value for choice in choices})),
            step_policies=tuple(sorted({choice.policy for choice in choices})),
            origin=_origin(assignment, unit),
        ))  # fmt: skip
    return tuple(reports)


def _origin(assignment: Assignment, unit: Unit) -> str:
    """Name the layer that a layer is in its source, where that is another."""
    if assignment.layers is None or unit.kind is not UnitKind.LAYER:
        return ""
    before = assignment.layers.origins[unit.index]
    return "" if before == unit.index else str(layer(before))
