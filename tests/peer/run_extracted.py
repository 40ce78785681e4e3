"""Runs in the peer environment: `prepare DIR` writes `DIR/<case>/{base,model}`; `merge DIR` merges what lies in
`DIR/<case>/lora` into the base with peft, as `DIR/<case>/merged`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import torch
import transformers

CONFIGS = {
    "llama": transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "gpt2": transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}  # fmt: skip


def prepare(folder: Path, name: str) -> None:
    """A random model, and one whose matrices, norms and embeddings differ from it."""
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.save_pretrained(folder / "base")
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder / "model")


def merge(folder: Path) -> None:
    """Apply the adapter as peft does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    peft.PeftModel.from_pretrained(model, folder / "lora").merge_and_unload().save_pretrained(folder / "merged")


if __name__ == "__main__":
    for case in CONFIGS:
        place = Path(sys.argv[2]) / case
        prepare(place, case) if sys.argv[1] == "prepare" else merge(place)
