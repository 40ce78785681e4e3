"""Runs in the peer environment: `run_tokensurgeon.py DIR` writes models with tokenizers, tied and not, and lets
mergekit-tokensurgeon give each model each donor's vocabulary: `DIR/<model>-<donor>-<method>`.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import tokenizers
import torch
import transformers

OWN = "the theorem of the proof is a story about code and numbers that return the theorem def return code write it"
LENT = "telling stories of programs: returned codes, theorems, numbering the proofs, writers wrote storytelling code"


def tokenizer_of(text: str, size: int, name: str) -> transformers.PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>", name], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([text] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def write(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, width: int, seed: int) -> None:
    sizes = {"hidden_size": width, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    is_tied = "tied" in folder.name
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=1, tie_word_embeddings=is_tied, **sizes
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


root = Path(sys.argv[1])
own, lent = tokenizer_of(OWN, 300, "<|own|>"), tokenizer_of(LENT, 310, "<|lent|>")
for seed, ending in enumerate(("", "-tied")):
    write(root / f"model{ending}", own, 16, seed)
    write(root / f"donor{ending}", lent, 24, 10 + seed)
program = Path(sys.executable).with_name("mergekit-tokensurgeon")
for model, donor, method in product(("model", "model-tied"), ("donor", "donor-tied"), ("subword", "omp")):
    command = [str(program), model, donor, f"{model}-{donor}-{method}", "-a", method, "-k", "4"]
    subprocess.run(command, cwd=root, check=True)
