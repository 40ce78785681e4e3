"""A tiny base and expert on disk, odd contents for each of their small files, and recipes that rewrite these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TOKENS = {"<s>": 0, "a": 1, "b": 2, "c": 3}
FILES: dict[str, object] = {
    "config.json": {"torch_dtype": "float32", "num_hidden_layers": 1, "vocab_size": 4, "eos_token_id": 0},
    "generation_config.json": {"eos_token_id": 0},
    "tokenizer.json": {"model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "a"}, "added_tokens": []},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ 1 }}"},
    "chat_template.json": {"chat_template": "{{ 2 }}"},
}
TEMPLATE = "{{ messages }}"

_MODELS = "base_model: base\nmodels: [{model: expert, parameters: {weight: 0.5}}]\nmerge_method: task_arithmetic\n"
RECIPES = {
    "plain": _MODELS,
    "rewriting": _MODELS + "out_dtype: bfloat16\nchat_template: chatml\n",
    "tokenizers": _MODELS + "chat_template: auto\ntokenizer: {source: union, pad_to_multiple_of: 8}\n",
}


def write_model(folder: Path, seed: int) -> None:
    """Two shards with an index and every small file."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": (4, 8), "model.layers.0.mlp.weight": (8, 8)}
    shards = {name: f"model-{n + 1:05}-of-00002.safetensors" for n, name in enumerate(tensors)}
    for name, shape in tensors.items():
        save_file({name: rng.standard_normal(shape, np.float32)}, folder / shards[name], {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_models(root: Path) -> None:
    """A base, an expert and what looks like an adapter, and one recipe for each name of `RECIPES`."""
    root.mkdir(exist_ok=True)
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    (root / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (root / "adapter.yml").write_text(RECIPES["plain"].replace("model: expert", "model: adapter"))
    write_model(root / "base", 0)
    write_model(root / "expert", 1)
    for name, text in RECIPES.items():
        (root / f"{name}.yml").write_text(text)


ODD = {
    "empty": b"",
    "space": b" \n",
    "not JSON": b"{",
    "list": b"[1, 2]",
    "number": b"3",
    "null": b"null",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep": b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
    "very deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep text": b"{{ " + b"(" * 500 + b"1" + b")" * 500 + b" }}",
}
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "lone surrogate": lambda raw: _with(raw, b'"odd": "\\ud800"'),
    "lone surrogate as a key": lambda raw: _with(raw, b'"\\udfff": 1'),
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "NaN": lambda raw: _with(raw, b'"odd": [NaN, -Infinity, 1e999]'),
    "key twice": lambda raw: _with(raw, b'"odd": 1, "odd": 2'),
    "long integer": lambda raw: _with(raw, b'"odd": ' + b"7" * 1000),
    "integer too long for Python": lambda raw: _with(raw, b'"odd": ' + b"7" * 5000),
    "odd values of known keys": lambda raw: _with(
        raw, b'"torch_dtype": "\\ud800", "vocab_size": [NaN], "num_hidden_layers": -7e300, "bos_token_id": {"a": []},'
        b' "chat_template": "\\ud800", "text_config": {"vocab_size": "\\ud800"}',
    ),
}  # fmt: skip


def _with(raw: bytes, member: bytes) -> bytes:
    """A JSON object with one more member before its own."""
    return raw.replace(b"{", b"{" + member + b", ", 1)


def odd_content(kind: str, raw: bytes) -> bytes:
    """A file's odd content of one kind: its own with something odd in it, or another."""
    return ODD[kind] if kind in ODD else CHANGES[kind](raw)
