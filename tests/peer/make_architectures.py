"""Runs in the peer environment: tiny random models `DIR/<architecture>/<name>`, the same layers in all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

LAYERS = 4
SIZES = {"vocab_size": 96, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": False}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen2": lambda: transformers.Qwen2Config(**{**DECODER, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER, head_dim=8),
    "mixtral": lambda: transformers.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=16, n_head=4, n_layer=LAYERS, n_positions=32),
    "t5": lambda: transformers.T5Config(
        vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu"
    ),
    "bert": lambda: transformers.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=32),
}
CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration",
    "bert": "BertForSequenceClassification",
}  # fmt: skip
NAMES = ("base", "a", "b")


def main(root: Path) -> None:
    """Write every architecture's base, and two models that differ from it in every weight.

    Experts are stored fused, as mergekit writes them: what is told apart by tensor (norms, thresholds) is so alike.
    """
    for architecture, config in CONFIGS.items():
        torch.manual_seed(7)
        model = getattr(transformers, CLASSES[architecture])(config())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.5)
        for name in NAMES:
            model.save_pretrained(root / architecture / name, save_original_format=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn_like(parameter) * 0.1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
