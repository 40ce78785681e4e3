"""Compute the order in which the Trainer numbers a model's parameters, without torch where it is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from mergepipe.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ArchitectureOrder:
    """Modules in the order they are defined; `stack` is the prefix of layer N, as in `model.layers.N`."""

    before: tuple[str, ...]
    stack: str
    in_layer: tuple[str, ...]
    after: tuple[str, ...]


_DECODER = ArchitectureOrder(
    before=("model.embed_tokens",),
    stack="model.layers",
    in_layer=(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
        "self_attn.q_norm", "self_attn.k_norm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.down_proj",
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    after=("model.norm", "lm_head"),
)  # fmt: skip
_GPT2 = ArchitectureOrder(
    before=("transformer.wte", "transformer.wpe"),
    stack="transformer.h",
    in_layer=("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    after=("transformer.ln_f", "lm_head"),
)

ORDERS: dict[str, ArchitectureOrder] = {
    "gemma": _DECODER, "gemma2": _DECODER, "gemma3_text": _DECODER, "gpt2": _GPT2, "llama": _DECODER,
    "mistral": _DECODER, "olmo": _DECODER, "olmo2": _DECODER, "phi3": _DECODER, "qwen2": _DECODER, "qwen3": _DECODER,
}  # fmt: skip

_NORM_WORDS = ("norm", "layernorm", "ln_1", "ln_2", "ln_f")


def defined_order(model_type: str, names: Iterable[str]) -> tuple[str, ...] | None:
    """Return `names` as the model defines them; None when the architecture is unknown or does not have them all."""
    order = ORDERS.get(model_type)
    unordered = list(names)
    if order is None:
        return None
    places = {name: _place(order, name) for name in unordered}
    if any(place is None for place in places.values()):
        return None
    return tuple(sorted(unordered, key=lambda name: places[name] or ()))


def trainer_order(defined: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split parameters in defined order into those with weight decay and those without."""
    names = tuple(defined)
    return tuple(n for n in names if _decays(n)), tuple(n for n in names if not _decays(n))


def _place(order: ArchitectureOrder, name: str) -> tuple[int, ...] | None:
    """Sort key of a parameter: section, layer, module, weight before bias."""
    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    last = int(leaf == "bias")
    if module in order.before:
        return 0, 0, order.before.index(module), last
    if module in order.after:
        return 2, 0, order.after.index(module), last
    index, _, inner = module.removeprefix(f"{order.stack}.").partition(".")
    if not module.startswith(f"{order.stack}.") or not index.isdecimal() or inner not in order.in_layer:
        return None
    return 1, int(index), order.in_layer.index(inner), last


def _decays(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    word = module.rpartition(".")[2]
    return leaf != "bias" and not word.endswith(_NORM_WORDS)


# --- of other architectures: asked from transformers, which is imported here alone in tailor, lazily ---


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
