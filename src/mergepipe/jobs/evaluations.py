"""Measure a model with libraries on this machine: its loss on a text, retrieval, tasks, and which tensors matter.

Run as a module it prints what `--evaluate NAME:SUBJECT` asks for, as a JSON object that ends with what is minimised.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe.core.display import json_line
from mergepipe.core.strict_json import canonical_json
from mergepipe.errors import MergePipeError, UnsupportedError
from mergepipe.jobs.load import load_file
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.output import replace_durably
from mergepipe.storage.stores import Stores

WINDOW_TOKENS = 512
MOST_WINDOWS = 16
TEXT_BYTES = 64 << 20


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


def text_loss(folder: Path, text: str) -> float:
    """Return the mean loss of a causal model, in nats for each token that it predicts, in float32.

    The text is cut into windows of `WINDOW_TOKENS` tokens, each of which is predicted from its own beginning on.
    """
    torch, model, windows = _model_and_windows(folder, text)
    with torch.no_grad():
        losses = [float(model(input_ids=window, labels=window).loss) * (window.shape[1] - 1) for window in windows]
    return fsum(losses) / sum(int(window.shape[1]) - 1 for window in windows)


def _gradients(base: Path, text: str) -> Mapping[str, Any]:
    """Return the gradient of the mean loss by parameter, in float32."""
    _, model, windows = _model_and_windows(base, text, MOST_WINDOWS)
    for window in windows:
        (model(input_ids=window, labels=window).loss / len(windows)).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def _model_and_windows(base: Path, text: str, most_windows: int | None = None) -> tuple[Any, Any, list[Any]]:
    """Load a model in float32, and cut a text into windows of its tokens."""
    torch, transformers = (_library(name, "a loss on a text", "mergepipe[torch]") for name in ("torch", "transformers"))
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


def _library(name: str, user: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        message = f"needs {error.name}, which is not installed"
        raise UnsupportedError.of("extra.missing", user, message, f"install {package}") from error


def _refusal(base: Path, message: str) -> MergePipeError:
    return UnsupportedError.of("importance.text", base, message, "name a folder of a causal language model")


# --- what `--evaluate NAME:SUBJECT` prints ---


def loss_on_text(folder: Path, text: str) -> dict[str, float]:
    """Measure `text_loss` on a file."""
    return {"loss": text_loss(folder, Path(text).read_bytes().decode("utf-8", "replace"))}


def retrieval_on_pairs(folder: Path, pairs: str) -> dict[str, float]:
    """Measure how well an embedding model finds the text that belongs to each query, among all texts of a file.

    Each line of the file is a query, a tab and its text. Similarity is the cosine. `error` is 1 - `mrr`, the mean of
    1 / rank of the text that belongs to a query.
    """
    lines = [line.split("\t") for line in Path(pairs).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or any(len(line) != 2 for line in lines):
        raise UnsupportedError.of("evaluate.failed", pairs, "needs lines of a query, a tab and a text")
    encode = (
        _library("sentence_transformers", "retrieval", "sentence-transformers").SentenceTransformer(str(folder)).encode
    )
    queries_QD, texts_QD = (np.asarray(encode([line[i] for line in lines], normalize_embeddings=True)) for i in (0, 1))
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


MEASURES: Mapping[str, Callable[[Path, str], dict[str, float]]] = {
    "loss": loss_on_text, "retrieval": retrieval_on_pairs, "lm-eval": tasks_of_lm_eval,
}  # fmt: skip


if __name__ == "__main__":
    try:
        print(json_line(MEASURES[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])))
    except MergePipeError as error:
        sys.exit(f"error: {error}")
