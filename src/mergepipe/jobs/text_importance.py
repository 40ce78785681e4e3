"""What a text says of a model, by transformers on this machine: its loss, and which tensors matter to it.

Run as a module it prints the loss of a folder on a file: `--evaluate loss:FILE` does that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe.core.strict_json import canonical_json
from mergepipe.errors import MergePipeError, UnsupportedError
from mergepipe.jobs.load import load_tensors
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.output import replace_durably
from mergepipe.storage.stores import Stores

WINDOW_TOKENS = 512
MOST_WINDOWS = 16
TEXT_BYTES = 64 << 20


def write_text_importance(base: Path, experts: Sequence[Location], text: Location, out: Path, threads: int) -> None:
    """Write the importance of each tensor to a text, for `--importance`: a JSON object of names and numbers.

    The gradient is that of the base's loss on at most `MOST_WINDOWS` windows of `WINDOW_TOKENS` tokens; the sums over
    each tensor's elements of its absolute product with the delta are added up over the experts. Tensors without a
    parameter in the model count as 0. Code of the checkpoint is not run.

    Memory: the base in float32 with its gradient, 8 bytes a parameter, and one tensor of an expert.

    Raises:
        UnsupportedError: `importance.text`, transformers or torch is missing, does not know the model, or the text has
            no two tokens.
        NotFoundError, CorruptError, StorageError: as from opening the experts.
    """
    gradients = _gradients(base, Stores().read_small(text, TEXT_BYTES).decode("utf-8", "replace"))
    weights = load_tensors(Location.local(base), base=None, framework="numpy", threads=threads)
    totals = dict.fromkeys(weights, 0.0)
    for expert in experts:
        tensors = load_tensors(expert, base=None, framework="numpy", threads=threads)
        for name in weights:
            gradient = gradients.get(name)
            if gradient is not None and name in tensors and tensors.shape(name) == gradient.shape:
                delta = tensors[name].astype(np.float32) - weights[name].astype(np.float32)
                totals[name] += float(np.abs(gradient * delta).sum(dtype=np.float64))
    replace_durably(out, canonical_json(totals) + b"\n", Ledger())


def text_loss(folder: Path, text: str) -> float:
    """Return the mean loss of a causal model, in nats for each token that it predicts, in float32.

    The text is cut into windows of `WINDOW_TOKENS` tokens, each of which is predicted from its own beginning on.

    Raises:
        UnsupportedError: as `write_text_importance`.
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
    try:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
    except ImportError as error:
        message = f"needs {error.name}, which is not installed"
        raise UnsupportedError.of("importance.text", "--text", message, "install mergepipe[torch]") from error
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


if __name__ == "__main__":
    try:
        print(text_loss(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes().decode("utf-8", "replace")))
    except MergePipeError as error:
        sys.exit(f"error: {error}")
