"""Runs in the peer environment: `prepare DIR` writes dense models with a tokenizer as `DIR/<family>/{base,a,b}`;
`build DIR` lets mergekit-moe build the mixture of each `DIR/*.yml` as `DIR/<name>-mergekit`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

TEXT = "<unk> <s> </s> write code a proof of the theorem tell me story about number and def return"
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=4),
}


def prepare(root: Path) -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(TEXT.split())}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    for family, config in CONFIGS.items():
        for seed, name in enumerate(("base", "a", "b")):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter.data, std=0.1)
            model.to(torch.bfloat16).save_pretrained(root / family / name)
            tokenizer.save_pretrained(root / family / name)


def build(root: Path) -> None:
    program = Path(sys.executable).with_name("mergekit-moe")
    for recipe in sorted(root.glob("*.yml")):
        out = root / f"{recipe.stem}-mergekit"
        subprocess.run([program, recipe.name, out.name, "--device", "cpu"], cwd=root, check=True)


{"prepare": prepare, "build": build}[sys.argv[1]](Path(sys.argv[2]))
