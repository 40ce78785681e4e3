"""Search the numbers of a recipe: merge it with many choices of them, evaluate each merge, publish the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mergepipe.core.flags import public_call
from mergepipe.core.outcome import private_outputs, warn_of
from mergepipe.errors import (
    CorruptError,
    LimitError,
    MergePipeError,
    MismatchError,
    OutputError,
    RecipeError,
    UnsupportedError,
    library,
)
from mergepipe.jobs.evaluate import Evaluation, parse_evaluation, parse_objective
from mergepipe.jobs.load import OpenedMerge, loaded_model
from mergepipe.jobs.merge_run import run_budgeted, run_merge
from mergepipe.jobs.plan import plan_request
from mergepipe.options import MergeOptions, PlanOptions, SearchOptions
from mergepipe.recipes.searched_values import Searched, searched_values, with_values
from mergepipe.recipes.yaml_source import KeyPath, RecipeText, parse_yaml, read_yaml
from mergepipe.recipes.yaml_source import recipe_text as written_recipe
from mergepipe.reports import MergeReport, Progress, ProgressCallback, SearchReport, SearchTrial
from mergepipe.runs.inputs import open_inputs, recipe_of
from mergepipe.runs.merge_settings import settings_without_output
from mergepipe.snapshots.staging import check_target, temporary_folder
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders
from mergepipe.storage.output_places import output_place
from mergepipe.storage.stores import Stores

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler"}
_SEED = 0  # of what is proposed, and of operators that draw
_STUDY_NAME = "mergepipe"
_RECIPE_KEY = "recipe"
_OBJECTIVES_KEY = "choice of objectives"
_SID_KEY = "sid"
_FACTS: Mapping[str, Any] = {"expert_bytes": int, "rungs": list, "seconds": int | float, "failure": str}
"""The types of what the journal holds of each trial."""
_KEPT_OF = 3  # so many trials at a rung one goes on: halves found worse merges for as many bytes
_MOST_FAILED = 5  # where that many trials fail one after the other, a search ends
Evaluate = Callable[[Any], float]
"""A function of the user: takes the folder of a merge, or the loaded model, and returns a loss."""


@public_call(SearchOptions)
def search(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    evaluate: Callable[[Any], float] | str | None = None,
    *,
    loads_models: bool = False,
    options: SearchOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> SearchReport:
    """Search the values of a recipe that are written `{search: [low, high]}` or `{search: [a, b, c]}`.

    Each trial is a merge, evaluated by the function, which gets its folder and returns a loss, or by the command (see
    `SearchOptions`). With `loads_models` the function gets a model of transformers in the place of a folder, as
    `load_model` makes it, and trials write nothing. A trial whose merge or evaluation fails is marked, and the search
    goes on. The study lies beside the output, in a file of its name and `.study`; the best merge is published as `out`.

    Raises:
        RecipeError: nothing is to be searched, or options that do not fit together.
        OutputError: a study of an earlier search exists, or of another recipe.
        LimitError: every trial fails.
        UnsupportedError: optuna is not installed.
    """
    if isinstance(evaluate, str):
        evaluate, fields = None, {**fields, "evaluate": evaluate}
    made = SearchOptions.of(options, fields)
    study = _Search(recipe_of(recipe), output_place(out).local_path, evaluate, made, on_progress, loads_models)
    with temporary_folder("search") as directory:
        study.try_values(directory / "trial")
    return study.publish()


class _Study:
    """The trials of one search, kept in a journal of optuna on the disk.

    Args:
        path: the journal.
        searched: what is searched; a completed trial has a value of each.
        objectives: names of the numbers that an evaluation gives; none for one loss.
        options: the sampler, and whether a journal that is there is continued.
        recipe: the text of the recipe: a journal of another one is refused.
    """

    def __init__(
        self, path: Path, searched: Sequence[Searched], objectives: Sequence[str], options: SearchOptions, recipe: str
    ) -> None:
        optuna = library("optuna", "search", "search")
        self._path = path
        self._searched = searched
        self._n_losses = max(len(objectives), 1)
        exists = Stores().stat(Location.local(path)) is not None
        if exists and not options.resume:
            message = "a study of an earlier search exists"
            raise OutputError.of("output.exists", path, message, "give --resume to continue it, or move it")
        make_folders(path.parent)
        directions = ["maximize" if name.endswith(":max") else "minimize" for name in objectives or ("",)]
        self._study = self._opened(optuna, exists, _SAMPLERS[options.sampler], directions)
        self._check_attribute(_RECIPE_KEY, recipe)
        self._check_attribute(_OBJECTIVES_KEY, list(objectives))
        for trial in self.trials():
            damage = self._damage_of(trial)
            if damage:
                raise self._damaged(f"trial {trial.number} has no sound {damage}")

    def _opened(self, optuna: Any, exists: bool, sampler: str, directions: list[str]) -> Any:
        """Begin a study, or go on with the one on the disk."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = optuna.storages.journal
        lock = journal.JournalFileSymlinkLock(str(self._path))
        seed = None if exists else _SEED  # others that work on it, or did, drew from that one
        try:
            if exists:
                self._cut_open_line(lock)
            return optuna.create_study(
                study_name=_STUDY_NAME,
                storage=optuna.storages.JournalStorage(journal.JournalFileBackend(str(self._path), lock)),
                sampler=getattr(optuna.samplers, sampler)(seed=seed),
                pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_KEPT_OF),
                directions=directions,
                load_if_exists=exists,
            )
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def _cut_open_line(self, lock: Any) -> None:
        """Remove what a full disk or a lost machine left of a line, which would spoil the next one."""
        lock.acquire()
        try:
            content = owned.read_file(self._path, 1 << 30)
            if not content.endswith(b"\n"):
                owned.replace_file(self._path, content[: content.rfind(b"\n") + 1])
        finally:
            lock.release()

    def _check_attribute(self, key: str, wanted: object) -> None:
        if self._study.user_attrs.get(key, wanted) != wanted:
            message = f"is the study of another {key}, or of this one before it was changed"
            raise OutputError.of("output.exists", self._path, message, "search under another name")
        self._study.set_user_attr(key, wanted)

    def _damage_of(self, trial: Any) -> str:
        """Name what a trial lacks of what the report of a search shows; empty if nothing."""
        for name, kind in _FACTS.items():
            if name in trial.user_attrs and not isinstance(trial.user_attrs[name], kind):
                return name
        if trial.state.name != "COMPLETE":
            return ""
        for searched in self._searched:
            if searched.name not in trial.params:
                return searched.name
        losses = trial.values or ()
        if len(losses) != self._n_losses or not all(isinstance(loss, int | float) for loss in losses):
            return "loss"
        return ""

    def _damaged(self, reason: str) -> MergePipeError:
        message = f"is not a journal of optuna: {reason}"
        hint = "remove the line, or search under another name"
        return CorruptError.of("work-log.damaged", self._path, message, hint)

    def trials(self) -> list[Any]:
        """Return all trials."""
        return list(self._study.get_trials(deepcopy=False))

    def finished(self) -> list[Any]:
        """Return the trials that have ended, failed ones among them."""
        return [trial for trial in self.trials() if trial.state.is_finished()]

    def ask(self) -> Any:
        """Begin a trial."""
        return self._study.ask()

    def end(self, trial: Any, losses: tuple[float, ...], state: Any) -> None:
        """End a trial; without losses it was given up, or failed."""
        self._study.tell(trial, losses if losses else None, state=state)

    def best_of_several(self) -> list[Any]:
        """Return the trials that no other trial beats in every objective."""
        return list(self._study.best_trials)

    @property
    def published_sid(self) -> str:
        """The snapshot that another machine published as this study's best; empty without one."""
        return str(self._study.user_attrs.get(_SID_KEY, ""))

    @published_sid.setter
    def published_sid(self, sid: str) -> None:
        self._study.set_user_attr(_SID_KEY, sid)


class _Search:
    """One search: its study on the disk, and the merges that it makes one at a time."""

    def __init__(
        self,
        recipe: Location | RecipeText,
        out: Path,
        evaluate: Evaluate | None,
        options: SearchOptions,
        on_progress: ProgressCallback | None,
        loads_models: bool,
    ) -> None:
        self._store = Stores()
        if isinstance(recipe, RecipeText):
            self._source = parse_yaml(recipe.path, recipe.text)
            self._folder = recipe.folder
        else:
            self._source = read_yaml(recipe.absolute(), self._store)
            self._folder = recipe.absolute().parent
        self._searched = searched_values(self._source)
        self._out = out
        self._options = options
        self._on_progress = on_progress
        self._rungs = tuple(options.rungs)
        self._requests = {rung: plan_request(rung, options.common(PlanOptions)) for rung in self._rungs}
        trial_options = options.common(MergeOptions, catalog=False, resume=None, evaluate=None, seed=_SEED)
        self._settings = settings_without_output(trial_options, self._report)
        self._objectives = tuple(map(parse_objective, options.objectives))
        self._evaluate = evaluate
        self._command = self._parsed_command(evaluate)
        self._loads_models = loads_models
        if loads_models and evaluate is None:
            message = "a loaded model is evaluated by a function, and a command was given"
            raise RecipeError.of("option.conflict", "loads_models", message, "leave it out")
        if len(self._objectives) > 1 and self._rungs:
            message = "rungs compare trials by one number, and several objectives are given"
            raise RecipeError.of("option.conflict", "--rung", message, "leave one of the two out")
        check_target(out, (), force=None)
        self._study_path = out.absolute().with_name(f"{out.name}.study")
        self._check_models()
        self._study = _Study(self._study_path, self._searched, self._objectives, options, self._source.text)

    def _check_models(self) -> None:
        """Refuse models that cannot be opened before the study is begun; values are judged by their trials."""
        first_values = {searched.key_path: searched.first for searched in self._searched}
        try:
            open_inputs(self._recipe(first_values), self._store)
        except MergePipeError as error:
            is_of_values = isinstance(error, RecipeError | UnsupportedError | MismatchError)
            if is_of_values and error.code != "location.invalid":
                return
            name = self._source.path.name
            # Lines are those of the recipe of a trial, which nobody wrote.
            problems = (
                replace(problem, where=f"{name} {problem.where.partition(' ')[2]}") for problem in error.problems
            )
            raise type(error)(*problems) from error

    def _parsed_command(self, evaluate: Evaluate | None) -> Evaluation | None:
        if (evaluate is None) == (self._options.evaluate is None):
            message = "merges are evaluated by a command or a function: exactly one is needed"
            raise RecipeError.of("option.missing", "--evaluate", message, "give --evaluate 'python loss.py {}'")
        if evaluate is not None and self._objectives:
            message = "a function returns one number"
            raise RecipeError.of("option.conflict", "--objective", message, "leave it out")
        return None if self._options.evaluate is None else parse_evaluation(self._options.evaluate)

    def _report(self, progress: Progress) -> None:
        if self._on_progress is not None:
            number = min(len(self._study.finished()) + 1, self._options.trials)
            self._on_progress(replace(progress, phase=f"trial {number} of {self._options.trials}"))

    def try_values(self, folder: Path) -> None:
        """Make trials until there are as many as were asked for; every one is on the disk when it ends."""
        while len(self._study.finished()) < self._options.trials:
            self._try_one(folder)

    def _try_one(self, folder: Path) -> None:
        states = import_module("optuna").trial.TrialState
        trial = self._study.ask()
        started = time.perf_counter()
        failure = ""
        losses: tuple[float, ...] = ()
        try:
            values = {searched.key_path: searched.proposed(trial) for searched in self._searched}
            losses = self._losses(trial, values, folder)
            state = states.COMPLETE if losses else states.PRUNED
        except Exception as error:  # of the merge or of the user's function: recorded, and the search goes on
            state = states.FAIL
            failure = str(error) if isinstance(error, MergePipeError) else f"{type(error).__name__}: {error}"
        except BaseException as error:
            self._study.end(trial, (), states.FAIL)
            error.add_note(f"the trials before are kept in {self._study_path}, and --resume continues with them")
            raise
        finally:
            owned.remove_tree(folder, ignore_errors=True)
        trial.set_user_attr("seconds", time.perf_counter() - started)
        trial.set_user_attr("failure", failure)
        self._study.end(trial, losses, state)
        last = self._study.finished()[-_MOST_FAILED:]
        if len(last) == _MOST_FAILED and all(one.state == states.FAIL for one in last):
            message = f"{_MOST_FAILED} trials in a row failed; the last: {failure}"
            hint = "fix the cause, then continue with --resume"
            raise LimitError.of("evaluate.failed", self._study_path, message, hint)

    def _losses(self, trial: Any, values: Mapping[KeyPath, Any], folder: Path) -> tuple[float, ...]:
        """Merge and evaluate under one budget after the other; empty where a trial is given up on the way."""
        losses: tuple[float, ...] = ()
        nbytes = 0
        at_rungs = []
        for step, rung in enumerate(self._rungs or (None,)):
            if self._loads_models:
                expert_bytes, losses = self._evaluated_model(values, rung)
            else:
                with private_outputs():
                    report = self._merged(values, rung, folder)
                expert_bytes = report.expert_bytes + report.analysis_bytes
                losses = self._evaluated(folder)
                owned.remove_tree(folder, ignore_errors=True)
            if not all(map(math.isfinite, losses)):
                raise LimitError.of("evaluate.failed", "evaluate", f"gave {losses[0]:g}; a finite loss is needed")
            nbytes += expert_bytes
            at_rungs.append(losses[0])
            trial.set_user_attr("expert_bytes", nbytes)
            trial.set_user_attr("rungs", at_rungs)
            if rung is not None and rung != self._rungs[-1]:
                trial.report(losses[0], step + 1)
                if trial.should_prune():
                    return ()
        return losses

    def _recipe(self, values: Mapping[KeyPath, Any]) -> RecipeText:
        return written_recipe(with_values(self._source.root, values), self._folder)

    def _merged(self, values: Mapping[KeyPath, Any], rung: str | None, out: Path) -> MergeReport:
        recipe = self._recipe(values)
        settings = replace(self._settings, out=out, started=time.perf_counter())
        if rung is None:
            return run_merge(recipe, settings)
        return run_budgeted(recipe, self._requests[rung], settings)

    def _evaluated(self, folder: Path) -> tuple[float, ...]:
        if self._evaluate is not None:
            return (float(self._evaluate(folder)),)
        assert self._command is not None
        timeout = self._options.trial_timeout
        if not self._objectives:
            return (self._command.loss_of(folder, timeout),)
        return self._command.values_of(folder, self._objectives, timeout)

    def _evaluated_model(self, values: Mapping[KeyPath, Any], rung: str | None) -> tuple[int, tuple[float, ...]]:
        """Merge into a model of transformers and evaluate it, without a file; return the expert bytes and the loss."""
        assert self._evaluate is not None
        options = replace(self._settings.options, budget=rung)
        with OpenedMerge(self._recipe(values), options) as merge:
            model = loaded_model(merge)
            expert_bytes = merge.expert_bytes
        return expert_bytes, (float(self._evaluate(model)),)

    def publish(self) -> SearchReport:
        """Merge the best values again into the output, unless another machine does, and tell all trials."""
        best = self._best()
        values = {searched.key_path: best.params[searched.name] for searched in self._searched}
        options = replace(self._settings.options, catalog=True)
        self._settings = settings_without_output(options, self._report)
        sid = self._published_sid(values)
        is_front = {best.number}
        if len(self._objectives) > 1:
            is_front = {trial.number for trial in self._study.best_of_several()}
        return SearchReport(
            out=self._out,
            study=self._study_path,
            sid=sid,
            objectives=self._objectives or ("loss",),
            best=best.number,
            trials=tuple(
                SearchTrial(
                    number=trial.number,
                    state=trial.state.name.lower(),
                    values=dict(trial.params),
                    losses=tuple(trial.values or ()),
                    rungs=tuple(trial.user_attrs.get("rungs", ())),
                    expert_bytes=trial.user_attrs.get("expert_bytes", 0),
                    seconds=trial.user_attrs.get("seconds", 0.0),
                    failure=trial.user_attrs.get("failure", ""),
                    is_best=trial.number in is_front,
                )
                for trial in self._study.trials()
            ),
        )

    def _published_sid(self, values: Mapping[KeyPath, Any]) -> str:
        """Publish the merge of some values; where another machine of the study publishes, wait for its snapshot."""
        while True:
            try:
                report = self._merged(values, self._rungs[-1] if self._rungs else None, self._out)
                warn_of(report.recipe_notices)
                sid = report.sid
            except MergePipeError as error:
                sid = self._study.published_sid
                if error.code == "output.busy":
                    time.sleep(1)
                    continue
                if error.code != "output.exists" or not sid:
                    raise
            self._study.published_sid = sid
            return sid

    def _best(self) -> Any:
        trials = self._study.trials()
        complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if not complete:
            message = "no trial was completed, and nothing was published"
            failures = [trial.user_attrs["failure"] for trial in trials if trial.user_attrs.get("failure")]
            if failures:
                message += f"; the last: {failures[-1]}"
            raise LimitError.of("evaluate.failed", self._study_path, message)
        best_of = max if self._objectives and self._objectives[0].endswith(":max") else min
        return best_of(complete, key=lambda trial: trial.values[0])
