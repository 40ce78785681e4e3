"""Runs in the peer environment: for each case write `DIR/<case>/{base,adapter,merged}`, merged by peft."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

LLAMA = transformers.LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "plain": (LLAMA, "float32", {"r": 4, "lora_alpha": 16, "target_modules": [*ATTENTION, "gate_proj", "down_proj"]}),
    "bfloat16": (LLAMA, "bfloat16", {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, "up_proj"]}),
    "rank-stabilised": (LLAMA, "float32", {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_modules": ATTENTION}),
    "patterns": (LLAMA, "float32", {
        "r": 4, "lora_alpha": 16, "target_modules": ATTENTION,
        "rank_pattern": {"layers.0.self_attn.q_proj": 7, "k_proj": 2}, "alpha_pattern": {"^model.layers.1.*v_proj": 3},
    }),
    "embedding": (LLAMA, "float32", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]}),
    "head": (LLAMA, "float32", {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"],
    }),
    "bias-all": (LLAMA, "float32", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "all"}),
    "bias-lora": (LLAMA, "float32", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "lora_only"}),
    "transposed": (GPT2, "float32", {
        "r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True,
    }),
}  # fmt: skip


def write_case(root: Path, name: str) -> None:
    """A random model, a random adapter for it, and what peft makes of the two."""
    config, dtype, options = CASES[name]
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(root / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for _, parameter in sorted(adapted.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(root / "adapter", safe_serialization=name != "plain")
    adapted.merge_and_unload().save_pretrained(root / "merged")


if __name__ == "__main__":
    for case in CASES:
        write_case(Path(sys.argv[1]) / case, case)
