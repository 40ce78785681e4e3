"""The order of a model's parameters asked from transformers: the only module of tailor that imports it, lazily."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from mergepipe.errors import UnsupportedError

_build_lock = Lock()  # models are built under settings of the process


def ask_transformers(folder: Path, model_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Build the model of `folder`'s configuration without memory; return parameters with weight decay and without.

    No code of the checkpoint is run: only architectures that transformers itself has.
    """
    try:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise UnsupportedError.of(
            "checkpoint.unsupported", folder, f"the order of parameters of model type {model_type!r} is not known here",
            "install mergepipe[torch], which asks transformers",
        ) from error  # fmt: skip
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        with _build_lock, torch.device("meta"):
            model = kind(config)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise UnsupportedError.of(
            "checkpoint.unsupported", folder, f"transformers cannot build model type {model_type!r}: {error}"
        ) from error
    decayed = frozenset(transformers.Trainer.get_decay_parameter_names(None, model))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return tuple(n for n in names if n in decayed), tuple(n for n in names if n not in decayed)
