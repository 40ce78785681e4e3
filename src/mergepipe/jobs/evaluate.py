"""Evaluate merges by a command of the user: one number for a snapshot, and budgets that rise until it is low enough."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.core.units import format_bytes
from mergepipe.errors import LimitError, RecipeError
from mergepipe.jobs.merge import run_budgeted
from mergepipe.jobs.plan import PlanRequest
from mergepipe.planning.budget import parse_budget
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, TriedBudget
from mergepipe.runs.progress import Resume
from mergepipe.runs.work import MergeSettings
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.contract import is_file
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

TARGET_BUDGETS = ("5%", "10%", "25%", "50%", "100%")
"""The budgets of a merge with a target loss, in turn."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])", re.IGNORECASE
)
_FOLDER = "{}"
_SUBJECTS = {"loss": "text", "retrieval": "file of pairs", "lm-eval": ""}
"""The measures of `jobs.evaluations`, and the kind of file that each reads, if any."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A command that prints a loss as the last number of its output; `{}` in it stands for the snapshot's folder."""

    words: tuple[str, ...]

    def loss_of(self, folder: Path, timeout: float | None = None) -> float:
        """Run the command on a snapshot; see `_printed`."""
        numbers = _NUMBER.findall(self._printed(folder, timeout))
        if not numbers or not math.isfinite(float(numbers[-1])):
            printed = f"the last number that it printed is {numbers[-1]}" if numbers else "it printed no number"
            raise self._failure(f"{printed}; a finite loss is needed")
        return float(numbers[-1])

    def values_of(
        self, folder: Path, objectives: Sequence[Objective], timeout: float | None = None
    ) -> tuple[float, ...]:
        """Run the command on a snapshot; the last line that it prints is a JSON object with the objectives."""
        lines = self._printed(folder, timeout).strip().splitlines()
        try:
            printed = json.loads(lines[-1]) if lines else None
        except ValueError:
            printed = None
        if not isinstance(printed, dict):
            raise self._failure("its last line is no JSON object, which --objective needs")
        for objective in objectives:
            value = printed.get(objective.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self._failure(f"the object that it printed has no finite number '{objective.name}'")
        return tuple(float(printed[objective.name]) for objective in objectives)

    def _printed(self, folder: Path, timeout: float | None) -> str:
        """Run without a shell and without input, at most `timeout` seconds; what goes to stderr is not touched."""
        words = [word.replace(_FOLDER, str(folder)) for word in self.words]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=timeout is not None
            )
        except OSError as error:
            raise self._failure(f"cannot be run: {error.strerror}") from error
        with process:
            try:
                printed, _ = process.communicate(timeout=timeout)
            except BaseException as error:
                self._end(process, is_group=timeout is not None)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise self._failure(f"took more than {timeout:g} s") from None
                raise
        if process.returncode:
            raise self._failure(f"failed with exit code {process.returncode}")
        return printed.decode(errors="replace")

    @staticmethod
    def _end(process: subprocess.Popen[bytes], *, is_group: bool) -> None:
        """End the command, with the processes that it began where they are its own group."""
        if is_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()

    def _failure(self, message: str) -> Exception:
        return RecipeError.of("evaluate.failed", shlex.join(self.words), message, "try it on a merge that you have")


def parse_evaluation(command: str) -> Evaluation:
    """Split a command as a shell would, without its variables and patterns; without `{}` the folder comes last.

    `loss:FILE`, `retrieval:FILE` and `lm-eval:TASKS` are measures of `jobs.evaluations`.
    """
    measure, _, subject = command.partition(":")
    if measure in _SUBJECTS and subject:
        if kind := _SUBJECTS[measure]:
            path = Path(subject).absolute()
            if not is_file(Stores(), Location.local(path)):
                raise RecipeError.of("evaluate.failed", "--evaluate", f"there is no {kind} {path}", "name a file")
            subject = str(path)
        return Evaluation((sys.executable, "-m", "mergepipe.jobs.evaluations", measure, _FOLDER, subject))
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecipeError.of("evaluate.failed", "--evaluate", f"{error}: {command}", "close the quotes") from error
    if not words or shutil.which(words[0]) is None:
        message = f"there is no program '{words[0]}'" if words else "the command is empty"
        raise RecipeError.of("evaluate.failed", "--evaluate", message, "give a command such as 'python loss.py {}'")
    return Evaluation(tuple(words if any(_FOLDER in word for word in words) else (*words, _FOLDER)))


@dataclass(frozen=True, slots=True)
class Objective:
    """A number that an evaluation prints by name, and whether the most of it is wanted, not the least."""

    name: str
    is_most: bool = False

    @property
    def direction(self) -> str:
        """The direction, as optuna names it."""
        return "maximize" if self.is_most else "minimize"

    def __str__(self) -> str:
        return f"{self.name}:max" if self.is_most else self.name


def parse_objective(text: str) -> Objective:
    """Read `NAME`, of which the least is wanted, or `NAME:max`."""
    name, _, wanted = text.partition(":")
    if not name or wanted not in ("", "min", "max"):
        message = f"'{text}' is neither NAME nor NAME:max"
        raise RecipeError.of("option.invalid", "--objective", message, "such as --objective accuracy:max")
    return Objective(name, wanted == "max")


class _TooLossyError(Exception):
    """The loss of a finished merge is above the target: it is not published."""


def merge_to_target(
    recipe: Location | RecipeText,
    request: PlanRequest,
    settings: MergeSettings,
    evaluation: Evaluation,
    target_loss: float,
) -> MergeReport:
    """Merge under one budget of `TARGET_BUDGETS` after the other, and publish the first of which the loss is met.

    Each is made anew where the output grows, and evaluated before it is published. The report and the manifest tell
    what those before it read.
    """
    tried: list[TriedBudget] = []
    anew = replace(settings, resume=Resume.NEVER)

    def evaluate(made: Manifest, folder: Path) -> None:
        loss = evaluation.loss_of(folder)
        nbytes = made.realized.expert + made.realized.analysis
        tried.append(TriedBudget(TARGET_BUDGETS[len(tried)], nbytes, loss))
        if loss > target_loss:
            raise _TooLossyError

    for budget in TARGET_BUDGETS:
        rung = replace(request, budget=parse_budget(budget))
        anew = replace(anew, tried_expert_bytes=sum(one.expert_bytes for one in tried))
        try:
            report = run_budgeted(recipe, rung, anew, before_publish=evaluate)
        except _TooLossyError:
            continue
        return replace(report, tried=tuple(tried))
    losses = "; ".join(f"{one.budget}: {one.loss:.6g} ({format_bytes(one.expert_bytes)} read)" for one in tried)
    message = f"no budget brings the loss down to {target_loss:g}, and nothing was published: {losses}"
    raise LimitError.of("evaluate.target", "--target-loss", message, "raise it, or change the recipe")
