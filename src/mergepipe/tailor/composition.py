"""Compose a checkpoint from a recipe: open, plan, copy, read back, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from blake3 import blake3

import mergepipe
from mergepipe.checkpoints.architecture_names import name_problems
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME, SIDECAR_NAMES
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.display import Displayed, Fact, Table, told, yaml_document
from mergepipe.core.records import encode
from mergepipe.core.strict_json import JsonValue
from mergepipe.core.units import format_bytes, format_seconds, plural
from mergepipe.errors import REPOSITORY, ConflictError, CorruptError, MergePipeError, NotFoundError, mismatched
from mergepipe.options import ComposeOptions, TailorOptions, home_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.references import real_location, text_with_relative_paths
from mergepipe.recipes.yaml_source import parse_yaml
from mergepipe.reports import ByteProgress, ProgressCallback
from mergepipe.snapshots.layout import file_digest, small_digest
from mergepipe.snapshots.manifest import (
    MANIFEST_NAME,
    AverageRecord,
    ComposedCheckpoint,
    CompositeInput,
    CompositeManifest,
    SelfCheck,
    Thoroughness,
    UnitStaleness,
    file_without_paths,
    read_composite,
)
from mergepipe.snapshots.object_upload import ObjectContent, OutputContent
from mergepipe.snapshots.staging import SPARE_BYTES, check_free_space
from mergepipe.snapshots.whole_output import check_place, open_output, staged_beside
from mergepipe.storage.contract import TRAINER_JSON_BYTES, Digested, FileId, Store, is_file, sidecar_limit
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders, write_durably
from mergepipe.storage.stores import Stores
from mergepipe.tailor.assignment import DERIVED_KINDS, Assignment, StepChoice, assign
from mergepipe.tailor.checkpoint import FP32, WEIGHT, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition_plan import CompositionPlan, plan_composition, plan_universal, unpacked
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal
from mergepipe.tailor.copy_writer import write_files
from mergepipe.tailor.formats import format_named, open_source_checkpoint, open_training_checkpoint
from mergepipe.tailor.formats.hf_trainer import TRAINER_STATE_NAME, read_config, read_json
from mergepipe.tailor.recipes import load_composition
from mergepipe.tailor.resized import plan_resized
from mergepipe.tailor.self_check import ResultCheck, StateKey
from mergepipe.tailor.unmerged_adapter import find_adapter

_COMPARED_BYTES = 16 << 20
_HEAD_BYTES = 4096
_TAIL_BYTES = 64 << 10


_STALE_NOTE = (
    f"Old weights raise the loss after resuming: {REPOSITORY}/blob/main/docs/guide/tailor.md#what-do-old-units-cost"
)
_MADE = {"none": "a model, without optimizer state", "last": "a checkpoint, with the newest moments"}


@dataclass(frozen=True, slots=True, repr=False)
class CompositionReport(Displayed):
    """The result of a composition or, with `manifest` None, of its plan."""

    plan: CompositionPlan
    manifest: CompositeManifest | None
    out: Path | Location | None
    seconds: float
    average: AverageRecord | None = None

    @property
    @told()
    def sources(self) -> Table:
        """The source of each unit and its age; of an average the weight of each checkpoint."""
        if self.average is not None:
            weights = zip(self.plan.assignment.sources, self.average.weights, strict=True)
            rows = tuple((source.path.name, str(source.step), f"{weight:.6g}") for source, weight in weights)
            return Table(("checkpoint", "step", "weight"), rows)
        return Table(
            ("unit", "from", "step", "age", "adam step", "policy"),
            tuple(_staleness_row(x) for x in self.plan.staleness),
        )

    @property
    @told()
    def facts(self) -> list[Fact]:
        """The facts of the composition that is or would be written."""
        plan, state, skeleton = self.plan, self.plan.assignment.state, self.plan.assignment.skeleton
        notes = [("note", notice) for notice in plan.notices]
        if self.average is None:
            facts = [("state from", f"{state.path} (step {state.step})")]
            facts += [("structure", str(skeleton.path))] if state is not skeleton else []
            facts += notes
        else:
            facts = [("weights", self.average.scheme)] if len(self.average.weights) > 1 else []
            facts += [("makes", self._made)]
            facts += notes
            names = {file.name for file in plan.files}
            if self.average.optimizer == "none" and not names & {CONFIG_NAME, ADAPTER_CONFIG_NAME}:
                facts += [("lacks", f"{CONFIG_NAME}, which loaders need: give --config DIR")]
        facts += [("reads", format_bytes(plan.read_bytes))]
        facts += [("writes", f"{format_bytes(plan.output_bytes)} in {plural(len(plan.files), 'file')}")]
        if self.manifest is None:
            return facts
        check = self.manifest.self_check
        compared = f"{check.thoroughness.value}: {check.elements} elements of {plural(check.states, 'state')} compared"
        copies = f"{check.copies} copies of weights against masters"
        return [
            *facts,
            ("self check", f"{compared}, {copies}"),
            ("time", format_seconds(self.seconds)),
            ("composite", self.manifest.sid),
            ("output", str(self.out)),
        ]

    @property
    def _made(self) -> str:
        """Say in words what an average makes."""
        if any(file.name == ADAPTER_CONFIG_NAME for file in self.plan.files):
            return "an adapter, as PEFT reads it"
        optimizer = "" if self.average is None else self.average.optimizer
        return _MADE.get(optimizer, "a checkpoint, with averaged moments")

    @property
    @told()
    def note(self) -> str:
        """A note on the cost of old parts; empty where there are none."""
        is_stale = any(source.age for unit in self.plan.staleness for source in unit.sources)
        return _STALE_NOTE if is_stale and self.average is None else ""

    def to_json(self) -> dict[str, JsonValue]:
        """Return the plan, staleness, and what was written if anything was."""
        plan, state = self.plan, self.plan.assignment.state
        content: dict[str, JsonValue] = {
            "out": str(self.out) if self.out is not None else None,
            "sid": self.manifest.sid if self.manifest is not None else None,
            "state_from": str(state.path),
            "step": state.step,
            "read_bytes": plan.read_bytes,
            "output_bytes": plan.output_bytes,
            "files": len(plan.files),
            "seconds": round(self.seconds, 3),
            "units": encode(plan.staleness),
            **({"notices": list(plan.notices)} if plan.notices else {}),
        }
        if self.average is not None:
            weights = zip(plan.assignment.sources, self.average.weights, strict=True)
            content["average"] = {
                "scheme": self.average.scheme,
                "optimizer": self.average.optimizer,
                "checkpoints": [{"path": str(c.path), "step": c.step, "weight": w} for c, w in weights],
            }
        return content


def _staleness_row(unit: UnitStaleness) -> tuple[str, ...]:
    paths = ", ".join(PurePosixPath(source.path).name for source in unit.sources)
    return (
        unit.unit,
        f"{paths} {unit.origin}".rstrip(),
        ", ".join(str(source.step) for source in unit.sources),
        ", ".join(str(source.age) for source in unit.sources),
        ", ".join(f"{step:g}" for step in unit.adam_steps) or "-",
        ", ".join(unit.step_policies) or "-",
    )


def compose(
    path: Location, out: Location | None, options: ComposeOptions, on_progress: ProgressCallback | None = None
) -> CompositionReport:
    """Compose and publish; see `tailor.api.compose`. Without `out` only structure and step counters are read."""
    started = time.perf_counter()
    store = Stores()
    recipe = load_composition(path, store)
    if options.state_from is not None:
        place = store.pin(locate_model(store, options.state_from).normal())
        real = real_location(store, place)  # the recipe's own spelling counts, if it names it
        named = (source for source in recipe.sources if real_location(store, source) == real)
        recipe = replace(recipe, state_from=next(named, place))
    opened = {source: open_source_checkpoint(store, source) for source in recipe.sources}
    if out is not None:  # what is no place for an output is told first
        check_place(out, opened, force=options.force)
    check_same_run(store, tuple(opened.values()))
    assignment = assign(recipe, opened)
    plan = _plan(store, assignment, is_universal=options.export is not None)
    adapter = find_adapter(assignment.skeleton)
    facts = _name_notices(store, assignment.skeleton) if adapter is None else [f"the checkpoints hold {adapter.text}"]
    plan = replace(plan, notices=(*plan.notices, *facts))
    if out is None:
        return CompositionReport(plan, None, None, time.perf_counter() - started)

    def sources(name: str, kind: str) -> tuple[StoredState, ...]:
        is_frozen = kind == FP32 and (name, kind) not in assignment.model.states  # an export's own
        stored = assignment.find_state(name, WEIGHT if is_frozen else kind)
        if stored is None:
            raise _failed(out, f"{kind} of {name} has no source")
        return (unpacked(store, stored),)

    def open_result(made: Location) -> Mapping[StateKey, StoredState]:
        opened = open_training_checkpoint(store, made, out)
        _check_structure(opened, assignment, plan.steps, out)
        return opened.states

    folder = recipe.path.parent
    text = text_with_relative_paths(recipe.text, folder.local_path) if folder.is_local else recipe.text
    return publish(store, Job(text, plan, sources, open_result), out, options, on_progress, started)


def _plan(store: Store, assignment: Assignment, *, is_universal: bool) -> CompositionPlan:
    if is_universal:
        return plan_universal(store, assignment)
    return plan_composition(store, assignment) if assignment.resized is None else plan_resized(store, assignment)


def _name_notices(store: Store, skeleton: TrainingCheckpoint) -> list[str]:
    """List how the weights of a composite, which are those of its structure, differ from its architecture's."""
    config = read_config(store, skeleton.lender or skeleton.path)
    names = {name for name, _ in skeleton.states} | skeleton.weight_shapes.keys() | skeleton.units.tied.keys()
    problems = name_problems(config, names)
    return [] if problems is None else problems.texts()


@dataclass(frozen=True, slots=True)
class Job:
    """A composition or an average to write, with the text of its `recipe`.

    The finished one, which `open_result` opens in its staging directory, is compared with `summands`, the states of
    the sources that a state is the average of by `weights`. Samples of them are read while it is written, where
    `expected` says how its states will be cut. `is_stochastic`: averages and casts are rounded stochastically.
    """

    recipe: str
    plan: CompositionPlan
    summands: Callable[[str, str], Sequence[StoredState]]
    open_result: Callable[[Location], Mapping[StateKey, StoredState]]
    weights: tuple[float, ...] = (1.0,)
    expected: Mapping[StateKey, StoredState] = field(default_factory=dict)
    average: AverageRecord | None = None
    is_stochastic: bool = False


def publish(
    store: Store, job: Job, out: Location, options: TailorOptions, on_progress: ProgressCallback | None, started: float
) -> CompositionReport:
    """Write the planned files, compare them with their sources and publish them, complete or not at all.

    An output for a bucket is uploaded from its staging directory, which then goes: the same command sends again only
    what the bucket lacks.
    """
    home = home_of(None)
    place = staged_beside(out, home)
    check_free_space(place, job.plan.output_bytes + SPARE_BYTES)
    with ExitStack() as stack:
        thoroughness = Thoroughness(options.self_check)
        check = ResultCheck(store, thoroughness, job.summands, job.weights, is_stochastic=job.is_stochastic)
        stack.enter_context(check).read_ahead(job.expected)
        output = stack.enter_context(open_output(out, force=options.force, home=home))
        manifest = _fill(store, job, check, output.path, options.memory_bytes, on_progress)
        manifest = replace(manifest, run={"seconds": round(time.perf_counter() - started, 3)})
        write_durably(output.path / MANIFEST_NAME, manifest.without_paths(place).to_json(), store.ledger)
        content = None
        if not out.is_local:
            manifest, content = published_composite(store, output.path)
        output.publish(content, lambda done, total: ByteProgress(on_progress, "upload", total).report(done))
    made = place if out.is_local else out
    return CompositionReport(job.plan, manifest, made, time.perf_counter() - started, job.average)


def _fill(
    store: Store, job: Job, check: ResultCheck, directory: Path, memory_bytes: int, on_progress: ProgressCallback | None
) -> CompositeManifest:
    """Write all files of the composite, and compare them with their sources; return its record."""
    plan = job.plan
    writing = ByteProgress(on_progress, "compose", plan.output_bytes)
    writing.add(0)
    inputs = _identify(store, plan)
    jobs = []
    for planned in plan.files:
        place = directory / planned.name
        make_folders(place.parent)
        jobs.append((_without_paths(store, planned), place))
    written = write_files(store, jobs, memory_bytes, writing.add)
    made = job.open_result(Location.local(directory))
    masters = {}
    if job.average is None:
        tied = plan.assignment.skeleton.units.tied
        owners = {(name, kind): (tied.get(name, name), FP32) for name, kind in made if kind in DERIVED_KINDS}
        masters = {copy: made[owner] for copy, owner in owners.items() if owner in made}
    checking = ByteProgress(on_progress, "check", plan.output_bytes, writing.done_bytes)
    checked = check.compare(made, lambda: checking.add(0), masters)
    for path, file in (pair for files in inputs for pair in files.items()):
        status = store.stat(path)
        if status is None or (status.size_bytes, status.version) != (file.size_bytes, file.version):
            raise ConflictError.of("input.changed", path, "changed while it was being composed", "run again")
    return _manifest(store, job, inputs, written, checked)


def _manifest(
    store: Store, job: Job, inputs: list[dict[Location, FileId]], written: tuple[Digested, ...], checked: SelfCheck
) -> CompositeManifest:
    usage = store.ledger.usage()
    moved = {path: n for (path, purpose), n in usage.by_file.items() if purpose in (Purpose.BASE, Purpose.EXPERT)}
    assignment = job.plan.assignment
    skeleton, state = assignment.skeleton, assignment.state
    sources = []
    for source, files in zip(assignment.sources, inputs, strict=True):
        role = "skeleton" if source is skeleton else "part"
        read_bytes = sum(moved.get(str(path), 0) for path in files)
        sources.append(CompositeInput(str(source.path), source.step, role, tuple(files.values()), read_bytes))
    return CompositeManifest(
        version=mergepipe.__version__,
        recipe=job.recipe,
        checkpoint=ComposedCheckpoint(
            format=skeleton.format,
            framework=skeleton.framework.value,
            stage=skeleton.stage,
            world_size=skeleton.world_size,
            step=state.step,
            state_from=str(state.path),
        ),
        inputs=tuple(sources),
        units=job.plan.staleness,
        files=written,
        self_check=checked,
        realized={str(purpose): usage[purpose] for purpose in Purpose},
        run={},
        average=job.average,
    )


def published_composite(store: Store, path: Path) -> tuple[CompositeManifest, OutputContent]:
    """Return a finished composite as others get it: without paths of this machine.

    Small files are compared with its record, of large ones the size.
    """
    folder = Location.local(path)
    record = read_composite(store, folder)
    for file in record.files:
        place, size_bytes = folder / file.name, store.size_bytes(folder / file.name)
        is_same = size_bytes == file.size_bytes
        if is_same and size_bytes <= _COMPARED_BYTES:
            is_same = file_digest(store, place, size_bytes) == (size_bytes, file.blake3)
        if not is_same:
            raise CorruptError.of("snapshot.damaged", place, "has changed since it was written", "make it again")
    files = sorted(record.files, key=lambda file: file.name)
    objects = {file.name: ObjectContent(path / file.name, file.size_bytes, file.blake3) for file in files}
    for name in filter(lambda name: name.endswith(".json"), objects):
        raw = store.read_small(folder / name, TRAINER_JSON_BYTES)
        if (cleaned := file_without_paths(name, raw)) != raw:
            objects[name] = ObjectContent(cleaned, len(cleaned), small_digest(cleaned))
    written = tuple(
        Digested(file.name, objects[file.name].size_bytes, objects[file.name].digest) for file in record.files
    )
    copy = replace(record.without_paths(None), recipe=_recipe_without_paths(record.recipe), files=written)
    return copy, OutputContent(MANIFEST_NAME, copy.to_json(), objects)


def _recipe_without_paths(text: str) -> str:
    """Return a recipe in which paths keep their last names only."""
    recipe = parse_yaml(Location.parse("recipe"), text).root
    return yaml_document(_with_last_names(recipe), width=120)


def _with_last_names(value: JsonValue, key: str = "") -> JsonValue:
    """Return a recipe's value in which of every path the last name is left; revisions are none."""
    if isinstance(value, dict):
        return {name: _with_last_names(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_last_names(item, key) for item in value]
    is_path = isinstance(value, str) and "/" in value and "://" not in value and key != "revision"
    return f"../{PurePosixPath(str(value)).name}" if is_path else value


def _identify(store: Store, plan: CompositionPlan) -> list[dict[Location, FileId]]:
    """Identify the files that are read of each source, by version and a digest of the first 4 KiB and the last 64 KiB.

    In torch.save archives these hold the checksum of every tensor. It belongs to the source in the deepest directory
    around it.
    """
    sources = plan.assignment.sources
    inputs: list[dict[Location, FileId]] = [{} for _ in sources]
    for path in sorted({path for file in plan.files for path in file.source_files}):
        around = [(len(s.path.path.parts), i) for i, s in enumerate(sources) if path.is_relative_to(s.path)]
        index = max(around)[1] if around else plan.assignment.skeleton_index
        status = store.stat(path)
        if status is None:
            raise NotFoundError.of("storage.not-found", path, "no such file", "check the path")
        digest = blake3(store.read_metadata(path, 0, _HEAD_BYTES))
        if status.size_bytes > _HEAD_BYTES:
            digest.update(store.read_metadata(path, max(_HEAD_BYTES, status.size_bytes - _TAIL_BYTES), _TAIL_BYTES))
        base = sources[index].path
        name = path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)
        inputs[index][path] = FileId(name, status.size_bytes, status.version, digest.hexdigest(16))
    return inputs


def _without_paths(store: Store, plan: FilePlan) -> FilePlan:
    """Plan a small file of a model without paths of this machine; what the trainer follows (`*_state.json`) stays."""
    if PurePosixPath(plan.name).name not in SIDECAR_NAMES:
        return plan
    match plan.segments:
        case (Literal(raw),):
            pass
        case (CopyRange(file=file, offset=0, nbytes=nbytes),) if nbytes == store.size_bytes(file):
            raw = store.read_small(file, sidecar_limit(plan.name))
        case _:
            return plan
    cleaned = file_without_paths(plan.name, raw)
    return plan if cleaned == raw else FilePlan(plan.name, (Literal(cleaned),))


# --- tell whether checkpoints are of one run, by what the Trainer records beside them ---


_SHOWN_KEYS = ("model_type", "architectures")


def check_same_run(store: Store, checkpoints: Sequence[TrainingCheckpoint]) -> None:
    """Compare architectures and training histories, where they are recorded."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    histories = [(checkpoint.path, _history(store, checkpoint.path)) for checkpoint in ordered]
    described = [(checkpoint.path, read_config(store, checkpoint.path)) for checkpoint in ordered]
    newest_path, wanted = described[-1]
    for path, stated in described:
        key = next((k for k in _SHOWN_KEYS if k in wanted and k in stated and wanted[k] != stated[k]), None)
        if key is not None:
            raise mismatched(path, f"{key} is {stated[key]}, that of {newest_path} is {wanted[key]}")
    newest = histories[-1][1]
    for path, history in histories[:-1]:
        other_step = next((step for step in sorted(history) if step in newest and history[step] != newest[step]), None)
        if other_step is not None:
            raise mismatched(
                path,
                f"its log of step {other_step} is not that of {newest_path}: they are of two "
                "runs, or of two branches of one", "use checkpoints of one run that follow one another",
            )  # fmt: skip


def _history(store: Store, folder: Location) -> dict[int, list[JsonValue]]:
    """Losses that the Trainer has logged, by step."""
    if not is_file(store, folder / TRAINER_STATE_NAME):
        return {}
    logged = read_json(store, folder / TRAINER_STATE_NAME).get("log_history")
    losses: dict[int, list[JsonValue]] = {}
    for entry in logged if isinstance(logged, list) else []:
        match entry:
            case {"step": int(step), "loss": int() | float() as loss}:
                losses.setdefault(step, []).append(loss)
    return losses


def _failed(out: Location, message: str) -> MergePipeError:
    hint = "nothing was published; check the sources, then report it"
    return CorruptError.of("output.damaged", out.name, message, hint)


def _check_structure(
    made: TrainingCheckpoint, assignment: Assignment, steps: tuple[StepChoice, ...], out: Location
) -> None:
    """Check that nothing is missing in a finished composite, and its step counters."""
    if made.missing:
        raise _failed(out, f"lacks {made.missing[0]}")
    is_other_step = made.step != assignment.state.step and format_named(made.format).records_step
    if is_other_step or dict(made.parameters) != dict(assignment.model.parameters):
        raise _failed(out, f"is at step {made.step} with {len(made.parameters)} parameters")
    wanted = {name: choice.value for choice in steps for name in choice.counter.parameters}
    written_steps = {name: step.value for step in made.steps for name in step.parameters}
    wrong = [name for name, value in wanted.items() if written_steps.get(name) != value]
    if wrong:
        raise _failed(out, f"the step counter of {wrong[0]} is {written_steps.get(wrong[0])}, not {wanted[wrong[0]]}")
