"""Large checkpoints that take no room: sound headers over files that are one hole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]
ITEM_BYTES = 2


def decoder(
    n_layers: int, hidden: int, intermediate: int, vocabulary: int, keys: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama, with an eighth of `hidden` for the rows of keys and values, or `keys`."""
    keys = keys or hidden // 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(n_layers):
        prefix = f"model.layers.{index}"
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)), ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (intermediate, hidden)), ("mlp.up_proj", (intermediate, hidden)),
            ("mlp.down_proj", (hidden, intermediate)), ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):  # fmt: skip
            shapes[f"{prefix}.{name}.weight"] = shape
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def nbytes_of(shapes: Shapes) -> int:
    return sum(prod(shape) * ITEM_BYTES for shape in shapes.values())


def write_sparse(folder: Path, shapes: Shapes, shard_bytes: int = 5_000_000_000) -> Path:
    """A sharded BF16 checkpoint whose files are headers and holes."""
    folder.mkdir(parents=True)
    shards = list(_shards(shapes, shard_bytes))
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, position = {}, 0
        for name in names:
            stop = position + prod(shapes[name]) * ITEM_BYTES
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [position, stop]}
            weight_map[name], position = file.name, stop
        raw = json.dumps(header).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw)
        os.truncate(file, 8 + len(raw) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return folder


def _shards(shapes: Shapes, shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    room = shard_bytes
    for name, shape in shapes.items():
        nbytes = prod(shape) * ITEM_BYTES
        if names and nbytes > room:
            yield names
            names, room = [], shard_bytes
        names.append(name)
        room -= nbytes
    yield names
