"""The files beside the weights of a synthetic model: config, generation config and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from mergepipe.core.blocks import DType
from support.family_shapes import Architecture, FamilyShape

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_ID = 256


def write_sidecars(directory: Path, shape: FamilyShape, dtype: DType) -> None:
    """Write everything but the weights of one model into `directory`."""
    files = {
        "config.json": _config(shape, dtype),
        "generation_config.json": {"eos_token_id": _END_OF_TEXT_ID, "do_sample": False},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": 2048,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _config(shape: FamilyShape, dtype: DType) -> dict[str, object]:
    return {
        "architectures": [shape.architecture.value],
        "model_type": "qwen3" if shape.architecture is Architecture.QWEN3 else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "eos_token_id": _END_OF_TEXT_ID,
        "torch_dtype": dtype.recipe_name,
    }


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": _END_OF_TEXT_ID,
                "content": END_OF_TEXT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_vocabulary(), "merges": []},
    }


def _byte_vocabulary() -> dict[str, int]:
    """One token per byte, id = byte value, spelled as ByteLevel does: unprintable bytes move above U+0100, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}
    return dict(sorted(spelled.items(), key=lambda item: item[1]))
