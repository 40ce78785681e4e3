"""Print, as JSON, how transformers' Trainer orders the parameters of small models: {case: [decayed, plain, type]}."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {}),
    "gemma3": ("Gemma3TextConfig", {}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": ("GPT2Config", {}),
}


def orders() -> dict[str, tuple[list[str], list[str], str]]:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    found = {}
    for case, (config_name, options) in CASES.items():
        config = getattr(transformers, config_name)(num_hidden_layers=12, **options)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
        names = [name for name, _ in model.named_parameters()]
        split = [n for n in names if n in decayed], [n for n in names if n not in decayed]
        found[case] = (*split, str(config.model_type))
    return found


if __name__ == "__main__":
    json.dump(orders(), sys.stdout)
