"""Evaluate merges: by a command of the user, or by libraries on this machine; raise budgets until a loss is met.

Run as a module it prints what `--evaluate NAME:SUBJECT` asks for, as a JSON object that ends with what is minimised.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe.core.display import json_line
from mergepipe.core.strict_json import canonical_json
from mergepipe.core.units import first_names, format_bytes
from mergepipe.errors import LimitError, MergePipeError, RecipeError, UnsupportedError, library
from mergepipe.jobs.load import load_file
from mergepipe.jobs.merge_run import run_budgeted
from mergepipe.jobs.plan import PlanRequest
from mergepipe.planning.budget import parse_budget
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, TriedBudget
from mergepipe.runs.merge_settings import MergeSettings
from mergepipe.snapshots.manifest import Manifest
from mergepipe.snapshots.staging import temporary_folder
from mergepipe.storage import owned
from mergepipe.storage.contract import is_file
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.output import replace_durably
from mergepipe.storage.stores import Stores

WINDOW_TOKENS = 512
MOST_WINDOWS = 16
TEXT_BYTES = 64 << 20
TARGET_BUDGETS = ("5%", "10%", "25%", "50%", "100%")
"""The budgets of a merge with a target loss, in turn."""
_NUMBER = re.compile(  # every repetition is possessive: no digit is read twice
    r"(?<![\w.])[-+]?(?:(?:\d++\.?+\d*+|\.\d++)(?:e[-+]?\d++)?+|nan|inf(?:inity)?+)(?![\w.])", re.IGNORECASE
)
_FOLDER = "{}"
_READ_ONLY = "read-only-merge"
_KEPT_OUTPUT_BYTES = 1 << 20
_PIPE_BYTES = 1 << 16
_SHOWN_DIGITS = 40


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A command that prints a loss as the last number of its output; `{}` in it stands for the snapshot's folder.

    The last `_KEPT_OUTPUT_BYTES` of the output are read. The folder is a link of its own: a command that removes or
    renames it reaches the link alone, and one that changes anything in the folder is refused.
    """

    words: tuple[str, ...]

    def loss_of(self, folder: Path, timeout: float | None = None) -> float:
        """Run the command on a snapshot; see `_printed`."""
        last_number = ""
        for match in _NUMBER.finditer(self._printed(folder, timeout)):
            last_number = match.group()
        if not last_number:
            raise self._failure("it printed no number; a finite loss is needed")
        if not math.isfinite(float(last_number)):
            shown_number = last_number[:_SHOWN_DIGITS]
            raise self._failure(f"the last number that it printed is {shown_number}; a finite loss is needed")
        return float(last_number)

    def values_of(self, folder: Path, objectives: Sequence[str], timeout: float | None = None) -> tuple[float, ...]:
        """Run the command on a snapshot; the last line that it prints is a JSON object with the objectives."""
        lines = self._printed(folder, timeout).strip().splitlines()
        try:
            printed = json.loads(lines[-1]) if lines else None
        except (ValueError, RecursionError):
            printed = None
        if not isinstance(printed, dict):
            raise self._failure("its last line is not a JSON object, which --objective needs")
        values = []
        for objective in objectives:
            name = objective.removesuffix(":max")
            value = _finite_number(printed.get(name))
            if value is None:
                raise self._failure(f"the object that it printed has no finite number '{name}'")
            values.append(value)
        return tuple(values)

    def _printed(self, folder: Path, timeout: float | None) -> str:
        """Run without a shell and without input, at most `timeout` seconds; what goes to stderr is not touched."""
        states = owned.file_states(folder)
        with temporary_folder("evaluate") as directory:
            link = directory / _READ_ONLY
            owned.link_folder(link, folder)
            printed = self._run([word.replace(_FOLDER, str(link)) for word in self.words], timeout)
        changed = _changed_names(states, folder)
        if changed:
            message = f"changed the merge that it was to evaluate, and nothing was published: {first_names(changed)}"
            hint = "let it write elsewhere, and only read the folder"
            raise RecipeError.of("evaluate.failed", shlex.join(self.words), message, hint)
        return printed

    def _run(self, words: Sequence[str], timeout: float | None) -> str:
        """Run the command, and return the end of what it prints."""
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=timeout is not None
            )
        except OSError as error:
            raise self._failure(f"cannot be run: {error.strerror}") from error
        with process:
            try:
                printed = _end_of_output(process, timeout)
            except BaseException as error:
                if timeout is not None:  # then the processes that it began are its own group
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise self._failure(f"took more than {timeout:g} s") from None
                raise
        if process.returncode:
            raise self._failure(f"failed with exit code {process.returncode}")
        return printed.decode(errors="replace")

    def _failure(self, message: str) -> Exception:
        return RecipeError.of("evaluate.failed", shlex.join(self.words), message, "try it on a merge that you have")


def _finite_number(value: object) -> float | None:
    """Return a number of a JSON document as a float; None where it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        return None
    return number if math.isfinite(number) else None


def _changed_names(states: Mapping[str, tuple[int, ...]], folder: Path) -> list[str]:
    """List the files in a folder that are not as they were, or that are new or gone."""
    now = owned.file_states(folder)
    return [name for name in sorted(states.keys() | now.keys()) if states.get(name) != now.get(name)]


def _end_of_output(process: subprocess.Popen[bytes], timeout: float | None) -> bytes:
    """Read the output of a process until it ends, at most `timeout` seconds; keep its last `_KEPT_OUTPUT_BYTES`."""
    assert process.stdout is not None
    deadline = None if timeout is None else time.monotonic() + timeout
    kept = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not selector.select(left_seconds):
                raise subprocess.TimeoutExpired(process.args, timeout or 0.0)
            chunk = os.read(process.stdout.fileno(), _PIPE_BYTES)
            if not chunk:
                break
            kept += chunk
            del kept[:-_KEPT_OUTPUT_BYTES]
    process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
    return bytes(kept)


def parse_evaluation(command: str) -> Evaluation:
    """Split a command as a shell would, without its variables and patterns; without `{}` the folder comes last.

    `loss:FILE`, `retrieval:FILE` and `lm-eval:TASKS` are `MEASURES` of this module, run in a process of their own.
    """
    measure, _, subject = command.partition(":")
    if measure in MEASURES and subject:
        if kind := MEASURES[measure][1]:
            path = Path(subject).absolute()
            if not is_file(Stores(), Location.local(path)):
                raise RecipeError.of("evaluate.failed", "--evaluate", f"there is no {kind} {path}", "name a file")
            subject = str(path)
        return Evaluation((sys.executable, "-m", "mergepipe.jobs.evaluate", measure, _FOLDER, subject))
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecipeError.of("evaluate.failed", "--evaluate", f"{error}: {command}", "close the quotes") from error
    if not words or shutil.which(words[0]) is None:
        message = f"there is no program '{words[0]}'" if words else "the command is empty"
        raise RecipeError.of("evaluate.failed", "--evaluate", message, "give a command such as 'python loss.py {}'")
    return Evaluation(tuple(words if any(_FOLDER in word for word in words) else (*words, _FOLDER)))


def parse_objective(text: str) -> str:
    """Return `NAME`, of which the least is wanted, or `NAME:max`; the least is also `NAME:min`."""
    name, _, wanted = text.partition(":")
    if not name or wanted not in ("", "min", "max"):
        message = f"'{text}' is neither NAME nor NAME:max"
        raise RecipeError.of("option.invalid", "--objective", message, "such as --objective accuracy:max")
    return f"{name}:max" if wanted == "max" else name


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

    Each is made anew where the output grows, and evaluated before it is published. A budget in which nothing fits is
    passed over. The report and the manifest list what those before it read.
    """
    tried: list[TriedBudget] = []
    too_small: list[str] = []
    anew = settings.begun_anew

    def evaluate(budget: str, made: Manifest, folder: Path) -> None:
        loss = evaluation.loss_of(folder)
        nbytes = made.realized.expert + made.realized.analysis
        tried.append(TriedBudget(budget, nbytes, loss))
        if loss > target_loss:
            raise _TooLossyError

    for budget in TARGET_BUDGETS:
        rung = replace(request, budget=parse_budget(budget))
        anew = replace(anew, tried_expert_bytes=sum(one.expert_bytes for one in tried))
        try:
            report = run_budgeted(recipe, rung, anew, before_publish=partial(evaluate, budget))
        except _TooLossyError:
            continue
        except LimitError as error:
            if error.code != "budget.too-small":
                raise
            too_small.append(f"{budget}: nothing fits")
            continue
        return replace(report, tried=tuple(tried))
    losses = [f"{one.budget}: {one.loss:.6g} ({format_bytes(one.expert_bytes)} read)" for one in tried]
    outcomes = "; ".join([*too_small, *losses])
    message = f"no budget reaches a loss of {target_loss:g}, and nothing was published: {outcomes}"
    raise LimitError.of("evaluate.target", "--target-loss", message, "raise it, or change the recipe")


# --- measures by libraries on this machine, and which tensors matter to a text ---


def write_text_importance(base: Path, experts: Sequence[str | Path], text: Location, out: Path, threads: int) -> None:
    """Write the importance of each tensor to a text, for `--importance`: a JSON object of names and numbers.

    The gradient is that of the base's loss on at most `MOST_WINDOWS` windows of `WINDOW_TOKENS` tokens; the sums over
    each tensor's elements of its absolute product with the delta are added up over the experts. Tensors without a
    parameter in the model count as 0. Code of the checkpoint is not run.

    Memory: the base in float32 with its gradient, 8 bytes a parameter, and one tensor of an expert.
    """
    gradients = _gradients(base, Stores().read_small(text, TEXT_BYTES).decode("utf-8", "replace"))
    weights = load_file(base, threads=threads)
    totals = dict.fromkeys(weights, 0.0)
    for expert in experts:
        tensors = load_file(expert, threads=threads)
        for name in weights:
            gradient = gradients.get(name)
            if gradient is not None and name in tensors and tensors.shape(name) == gradient.shape:
                delta = tensors[name].astype(np.float32) - weights[name].astype(np.float32)
                totals[name] += float(np.abs(gradient * delta).sum(dtype=np.float64))
    replace_durably(out, canonical_json(totals) + b"\n", Ledger())


def loss_on_text(folder: Path, text: str) -> dict[str, float]:
    """Measure the mean loss of a causal model on a file, in nats for each token that it predicts.

    In float32, and on a GPU if there is one. The text is cut into windows of `WINDOW_TOKENS` tokens, each of which is
    predicted from its own beginning on.
    """
    torch, model, windows = _model_and_windows(folder, Path(text).read_bytes().decode("utf-8", "replace"))
    if torch.cuda.is_available():
        model, windows = model.cuda(), [window.cuda() for window in windows]
    with torch.no_grad():
        losses = [float(model(input_ids=window, labels=window).loss) * (window.shape[1] - 1) for window in windows]
    return {"loss": fsum(losses) / sum(int(window.shape[1]) - 1 for window in windows)}


def _gradients(base: Path, text: str) -> Mapping[str, Any]:
    """Return the gradient of the mean loss by parameter, in float32."""
    _, model, windows = _model_and_windows(base, text, MOST_WINDOWS)
    for window in windows:
        (model(input_ids=window, labels=window).loss / len(windows)).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def _model_and_windows(base: Path, text: str, most_windows: int | None = None) -> tuple[Any, Any, list[Any]]:
    """Load a model in float32, and cut a text into windows of its tokens."""
    torch, transformers = (library(name, "a loss on a text", "torch") for name in ("torch", "transformers"))
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, **local)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **local)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _refusal(base, f"transformers cannot load it: {error}") from error
    tokens = tokenizer(text, return_tensors="pt").input_ids
    windows = [window for window in tokens.split(WINDOW_TOKENS, dim=1) if window.shape[1] > 1][:most_windows]
    if not windows:
        raise _refusal(base, "the text has fewer than two tokens for a loss")
    return torch, model, windows


def _refusal(base: Path, message: str) -> MergePipeError:
    return UnsupportedError.of("importance.text", base, message, "name a folder of a causal language model")


def retrieval_on_pairs(folder: Path, pairs: str) -> dict[str, float]:
    """Measure how well an embedding model finds the text that belongs to each query, among all texts of a file.

    Each line of the file is a query, a tab and its text. Similarity is the cosine. `error` is 1 - `mrr`, the mean of
    1 / rank of the text that belongs to a query.
    """
    lines = [line.split("\t") for line in Path(pairs).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or any(len(line) != 2 for line in lines):
        raise UnsupportedError.of("evaluate.failed", pairs, "needs lines of a query, a tab and a text")
    encode = (
        library("sentence_transformers", "retrieval", "sentence-transformers").SentenceTransformer(str(folder)).encode
    )
    queries_QD = np.asarray(encode([query for query, _ in lines], normalize_embeddings=True))
    texts_QD = np.asarray(encode([text for _, text in lines], normalize_embeddings=True))
    similarity_QQ = queries_QD @ texts_QD.T
    ranks_Q = (similarity_QQ >= np.diag(similarity_QQ)[:, None]).sum(axis=1)  # equal ones count against it
    mrr = float((1 / ranks_Q).mean())
    return {"recall@1": float((ranks_Q == 1).mean()), "mrr": mrr, "error": 1 - mrr}


def tasks_of_lm_eval(folder: Path, tasks: str) -> dict[str, float]:
    """Run tasks of lm-evaluation-harness by its command line: the accuracy of each, and `error`, 1 - their mean.

    Accuracy is `acc_norm`, else `acc`, else `exact_match`, as the harness reports it.
    """
    program = shutil.which("lm_eval")
    if program is None:
        message = "lm-evaluation-harness has no command lm_eval here"
        raise UnsupportedError.of("extra.missing", "lm-eval", message, "install lm_eval[hf]")
    with tempfile.TemporaryDirectory(prefix="mergepipe-lm-eval-") as out:
        command = [program, "--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", tasks]
        subprocess.run([*command, "--output_path", out], check=False, stdout=sys.stderr)
        files = sorted(Path(out).rglob("*.json"))
        results = json.loads(files[-1].read_text(encoding="utf-8"))["results"] if files else {}
    accuracies = {}
    for task, metrics in results.items():
        values = {name.partition(",")[0]: value for name, value in metrics.items()}
        known = [values[name] for name in ("acc_norm", "acc", "exact_match") if name in values]
        if known:
            accuracies[task] = float(known[0])
    missing = [task for task in tasks.split(",") if task not in accuracies]
    if missing:
        raise UnsupportedError.of("evaluate.failed", "lm-eval", f"the task {missing[0]} gave no accuracy")
    return {**accuracies, "error": 1 - fsum(accuracies[task] for task in tasks.split(",")) / len(tasks.split(","))}


MEASURES: Mapping[str, tuple[Callable[[Path, str], dict[str, float]], str]] = {
    "loss": (loss_on_text, "text"), "retrieval": (retrieval_on_pairs, "file of pairs"),
    "lm-eval": (tasks_of_lm_eval, ""),
}  # fmt: skip
"""What can be measured by name, and the kind of file that each reads, if any."""


if __name__ == "__main__":
    try:
        print(json_line(MEASURES[sys.argv[1]][0](Path(sys.argv[2]), sys.argv[3])))
    except MergePipeError as error:
        sys.exit(f"error: {error}")
