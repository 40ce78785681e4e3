"""Hugging Face names and rotary layout for the dense Llama and Qwen3 models of torchtitan."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mergepipe.core.blocks import Span
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MismatchError
from mergepipe.tailor.checkpoint import Piece, StoredState

_OUTSIDE = MappingProxyType({
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "lm_head": "lm_head",
})  # fmt: skip
_INSIDE = MappingProxyType({
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
})  # fmt: skip
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight", re.ASCII)
_ROTATED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")
_ROTATES_PAIRS = MappingProxyType({"llama": True, "qwen3": False})


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The stored name of each of a model's tensors.

    `head_sizes` are, by stored name, of matrices whose rows rotate as neighbours (2j, 2j + 1) of a head, where
    transformers rotates rows j and j + half of it.
    """

    stored: Mapping[str, str]
    head_sizes: Mapping[str, int] = field(default_factory=dict)


def hugging_face_names(names: Mapping[str, str], config: Mapping[str, JsonValue]) -> TensorNames:
    """Rename the tensors of a torchtitan model of which `config` is; others keep the names they have.

    Source: the `Llama3StateDictAdapter` and `Qwen3StateDictAdapter` of torchtitan.
    """
    model_type = str(config.get("model_type", ""))
    renamed = {_hugging_face_name(name): stored for name, stored in names.items()}
    is_known = "tok_embeddings.weight" in names and model_type in _ROTATES_PAIRS and "" not in renamed
    if not is_known or len(renamed) < len(names):
        return TensorNames(names)
    if not _ROTATES_PAIRS[model_type]:
        return TensorNames(renamed)
    head_size = config.get("head_dim")
    if head_size is None:
        width, n_heads = config.get("hidden_size"), config.get("num_attention_heads")
        head_size = width // n_heads if isinstance(width, int) and isinstance(n_heads, int) and n_heads else 0
    size = head_size if isinstance(head_size, int) and head_size > 0 else 0
    return TensorNames(renamed, {stored: size for name, stored in renamed.items() if name.endswith(_ROTATED)})


def _hugging_face_name(name: str) -> str:
    """Return the name of a tensor in transformers; empty for one that has none."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        outside = _OUTSIDE.get(name.removesuffix(".weight"))
        return f"{outside}.weight" if outside is not None else ""
    inside = _INSIDE.get(layer[2].replace("qkv_linear.", ""))
    return f"model.layers.{layer[1]}.{inside}.weight" if inside is not None else ""


def with_rotated_halves(state: StoredState, head_size: int) -> StoredState:
    """Return a raw matrix with the rows of every head in the order of transformers: even ones, then odd ones."""
    n_rows = state.shape[0]
    if len(state.shape) != 2 or head_size < 2 or head_size % 2 or n_rows % head_size:
        raise MismatchError.of(
            "checkpoint.mismatch", state.parameter, f"has shape {state.shape}, no heads of {head_size} rows",
            "give --config with the model that was trained",
        )  # fmt: skip
    half, n_columns = head_size // 2, state.shape[1]
    order = ((row // head_size) * head_size + row % half * 2 + row % head_size // half for row in range(n_rows))
    pieces = [piece for row, stored in enumerate(order) for piece in _moved(state, stored, row, n_columns)]
    return replace(state, pieces=tuple(pieces))


def _moved(state: StoredState, stored_row: int, row: int, n_columns: int) -> Iterator[Piece]:
    """Yield the pieces of a stored row as those of another row."""
    start, stop = stored_row * n_columns, (stored_row + 1) * n_columns
    place = bisect_right(state.pieces, start, key=lambda piece: piece.span.stop)
    while place < len(state.pieces) and (piece := state.pieces[place]).span.start < stop:
        place += 1
        first, last = max(piece.span.start, start), min(piece.span.stop, stop)
        offset = piece.offset + (first - piece.span.start) * state.dtype.itemsize
        moved = Span(first - start + row * n_columns, last - start + row * n_columns)
        yield Piece(piece.file, offset, (last - first) * state.dtype.itemsize, moved)
