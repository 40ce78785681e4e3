"""The names, shapes and row orders that a model's tensors have in transformers, whatever its trainer calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from mergepipe.checkpoints.directory import without_wrappers
from mergepipe.core.blocks import Span, element_count
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import mismatched
from mergepipe.tailor.checkpoint import StoredState


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of the model in the stored one: all of it or, in another shape, runs of its elements in their order."""

    stored: str
    shape: tuple[int, ...] | None = None
    runs: Callable[[], Iterable[Span]] | None = None

    def of(self, state: StoredState) -> StoredState:
        """Return the tensor's part of a raw stored state, as one of the tensor's own shape."""
        if self.runs is None:
            return state
        pieces, end = [], 0
        for run in self.runs():
            pieces += [piece.part(held, state.dtype, end + held.start - run.start) for piece, held in state.within(run)]
            end += run.n_elements
        return replace(state, shape=state.shape if self.shape is None else self.shape, pieces=tuple(pieces))


Views: TypeAlias = Mapping[str, TensorView]
"""Every tensor of the model by its name."""


def tensor_views(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, JsonValue]
) -> tuple[dict[str, TensorView], str]:
    """Find the tensors of the model of which `config` is; return them, and a notice where names stay or one goes.

    `shapes` are those of the stored tensors, by their names.
    """
    stored = names_without_wrappers([*shapes])
    plain = {name: TensorView(stored_name) for name, stored_name in stored.items()}
    if "tok_embeddings.weight" in stored:
        views = _titan_views(stored, shapes, config)
        is_biased = views is not None and any(_TITAN_BIAS.fullmatch(name) for name in stored)
        return views or plain, "expert_bias is left out: the model has no place for it" if is_biased else ""
    if "embedding.word_embeddings.weight" in stored:
        views = _megatron_views({name: shapes[stored_name] for name, stored_name in stored.items()}, config)
        if views is None:
            return plain, "tensors keep Megatron's names: --config with a known model's folder gives Hugging Face's"
        return {name: replace(view, stored=stored[view.stored]) for name, view in views.items()}, ""
    return plain, ""


# --- what wrappers add ---


_ROOTS = ("model.", "transformer.", "lm_head.")


def names_without_wrappers(stored: Sequence[str]) -> dict[str, str]:
    """Map the names that a model's tensors have by themselves to those that a trainer's wrappers gave them.

    Left out are the parts that torch.compile, FSDP and Lightning add anywhere, `module.` of DDP in front of all names,
    and one part in front of all names where a model's own follow it, as in `model.model.layers.0` of a LightningModule.
    """
    names = {without_wrappers(name): name for name in stored}
    front = {name.partition(".")[0] for name in names}
    rests = {name.partition(".")[2]: stored_name for name, stored_name in names.items()}
    if front == {"module"} or (len(front) == 1 and any(rest.startswith(_ROOTS) for rest in rests)):
        names = rests
    return names if len(names) == len(stored) else {name: name for name in stored}


# --- torchtitan: dense Llama, Qwen3 and its mixture of experts ---


_TITAN_OUTSIDE = MappingProxyType({
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "lm_head": "lm_head",
})  # fmt: skip
_TITAN_INSIDE = MappingProxyType({
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "moe.router.gate": "mlp.gate",
})  # fmt: skip
_TITAN_EXPERTS = re.compile(r"layers\.(\d+)\.moe\.experts\.(w[123])(?:_E[DF]{2})?", re.ASCII)
_TITAN_PROJECTIONS = MappingProxyType({"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
_TITAN_BIAS = re.compile(r"layers\.\d+\.moe\.expert_bias(?:_E)?", re.ASCII)
_TITAN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight", re.ASCII)
_ROTATED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")
_ROTATES_PAIRS = MappingProxyType({"llama": True, "qwen3": False, "qwen3_moe": False})


def _titan_views(
    stored: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, JsonValue]
) -> dict[str, TensorView] | None:
    """Rename the tensors of a torchtitan model; None where not all are known.

    Experts are stacked in one tensor. A mixture's `expert_bias` is left out, which a Qwen3 has no place for.
    Source: the `Llama3StateDictAdapter` and `Qwen3StateDictAdapter` of torchtitan.
    """
    model_type = str(config.get("model_type", ""))
    if model_type not in _ROTATES_PAIRS:
        return None
    views: dict[str, TensorView] = {}
    for name, place in stored.items():
        if model_type == "qwen3_moe" and _TITAN_BIAS.fullmatch(name):
            continue
        tensors = _titan_tensors(name, place, shapes[place])
        if not tensors or not views.keys().isdisjoint(tensors):
            return None
        views |= tensors
    for name in views if _ROTATES_PAIRS[model_type] else ():
        if name.endswith(_ROTATED):
            place = views[name].stored
            runs = _rotated_halves(place, shapes[place], _heads(config)[2])
            views[name] = TensorView(place, None, runs)
    return views


def _titan_tensors(name: str, place: str, shape: tuple[int, ...]) -> dict[str, TensorView]:
    """Return the tensors of transformers that lie in one of torchtitan; none where it is not known."""
    experts, layer = _TITAN_EXPERTS.fullmatch(name), _TITAN_LAYER.fullmatch(name)
    if experts is not None and len(shape) == 3:
        prefix, projection, inner = f"model.layers.{experts[1]}.mlp.experts", _TITAN_PROJECTIONS[experts[2]], shape[1:]
        return {
            f"{prefix}.{expert}.{projection}.weight": _view(
                place, expert * element_count(inner), inner, [(0, inner[0])]
            )
            for expert in range(shape[0])
        }
    if layer is None:
        renamed = _TITAN_OUTSIDE.get(name.removesuffix(".weight"))
    else:
        inside = _TITAN_INSIDE.get(layer[2].replace("qkv_linear.", ""))
        renamed = inside and f"model.layers.{layer[1]}.{inside}"
    return {f"{renamed}.weight": TensorView(place)} if renamed else {}


def _rotated_halves(name: str, shape: tuple[int, ...], head_size: int) -> Callable[[], Iterator[Span]]:
    """List the rows of every head in the order of transformers, even ones, then odd ones.

    Rows (2j, 2j + 1) of a head rotate together, where transformers rotates rows j and j + half of it.
    """
    n_rows = shape[0]
    if len(shape) != 2 or head_size < 2 or head_size % 2 or n_rows % head_size:
        message = f"has shape {shape}, no heads of {head_size} rows"
        raise mismatched(name, message, "give --config with the model that was trained")
    half, width = head_size // 2, shape[1]

    def runs() -> Iterator[Span]:
        for row in range(n_rows):
            place = row // head_size * head_size + row % half * 2 + row % head_size // half
            yield Span(place * width, (place + 1) * width)

    return runs


_Heads: TypeAlias = tuple[int, int, int]
"""The numbers of heads and of query groups, and the rows of a head."""


def _heads(config: Mapping[str, JsonValue]) -> _Heads:
    heads = _stated(config, "num_attention_heads")
    derived = _stated(config, "hidden_size") // heads if heads else 0
    head = derived if config.get("head_dim") is None else _stated(config, "head_dim")
    return heads, _stated(config, "num_key_value_heads", heads), head


def _stated(config: Mapping[str, JsonValue], key: str, otherwise: int = 0) -> int:
    """Return a size that a configuration states."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


# --- Megatron-Core: Llama, Mistral, Qwen2, Qwen3 and Mixtral ---


_MEGATRON_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "mixtral"})
_MEGATRON_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)", re.ASCII)
_MEGATRON_OUTSIDE = MappingProxyType({
    "embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
})  # fmt: skip
_MEGATRON_INSIDE = MappingProxyType({
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight", "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight", "mlp.router.weight": "block_sparse_moe.gate.weight",
})  # fmt: skip
_EXPERTS = "block_sparse_moe.experts"


def _megatron_views(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, JsonValue]
) -> dict[str, TensorView] | None:
    """Find the tensors of a Megatron model in those that it keeps; None where not all are known.

    Layers, and the experts of a layer, are stacked in one tensor or have tensors of their own. Rows of the vocabulary
    behind the configuration's are padding. Source: the `sharded_state_dict` methods of Megatron-Core.
    """
    heads, vocabulary = _heads(config), _stated(config, "vocab_size")
    if config.get("model_type") not in _MEGATRON_TYPES or not heads[0] or heads[0] % heads[1]:
        return None
    views: dict[str, TensorView] = {}
    for name, shape in shapes.items():
        layer = _MEGATRON_LAYER.fullmatch(name)
        tensors: list[tuple[str, TensorView]] = []
        if layer is None and name in _MEGATRON_OUTSIDE:
            rows = vocabulary if len(shape) == 2 and 0 < vocabulary < shape[0] else shape[0]
            tensors = [(_MEGATRON_OUTSIDE[name], _view(name, 0, (rows, *shape[1:]), [(0, rows)]))]
        elif layer is not None and (layer[1] is not None or len(shape) > 1):
            is_stacked = layer[1] is None
            inner = shape[1:] if is_stacked else shape
            for place in range(shape[0]) if is_stacked else (0,):
                number = place if is_stacked else int(layer[1])
                inside = _megatron_layer(name, layer[2], place * element_count(inner), inner, heads)
                tensors += [(f"model.layers.{number}.{suffix}", view) for suffix, view in inside]
        if not tensors or any(suffix in views for suffix, _ in tensors):
            return None
        views.update(tensors)
    return views


_Found: TypeAlias = Iterator[tuple[str, TensorView]]


def _megatron_layer(name: str, inside: str, start: int, shape: tuple[int, ...], heads: _Heads) -> _Found:
    """Yield the tensors of one layer, whose elements begin at `start` of the stored tensor; none if it is not known."""
    module, _, leaf = inside.rpartition(".")
    if inside in _MEGATRON_INSIDE:
        yield _MEGATRON_INSIDE[inside], _view(name, start, shape, [(0, shape[0])])
    elif module == "self_attention.linear_qkv" and leaf in ("weight", "bias"):
        yield from _queries_keys_values(name, leaf, start, shape, heads)
    elif inside == "mlp.linear_fc1.weight":
        yield from _halves(name, start, shape, ("mlp.gate_proj.weight", "mlp.up_proj.weight"))
    elif inside in ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"):
        for expert in range(shape[0]):
            begin, prefix = start + expert * element_count(shape[1:]), f"{_EXPERTS}.{expert}"
            if inside.endswith("fc1.weight"):
                yield from _halves(name, begin, shape[1:], (f"{prefix}.w1.weight", f"{prefix}.w3.weight"))
            else:
                yield f"{prefix}.w2.weight", _view(name, begin, shape[1:], [(0, shape[1])])


def _queries_keys_values(name: str, leaf: str, start: int, shape: tuple[int, ...], heads: _Heads) -> _Found:
    """Yield the three projections: each query group is its queries' rows, then a key's and a value's."""
    n_heads, n_groups, head_rows = heads
    per_group = n_heads // n_groups
    group_rows = (per_group + 2) * head_rows
    if shape[0] != n_groups * group_rows:
        message = f"has {shape[0]} rows, not {n_groups} groups of {group_rows}"
        raise mismatched(name, message, "give --config with the model that was trained")
    ends = (0, per_group, per_group + 1, per_group + 2)
    for letter, first, last in zip("qkv", ends, ends[1:], strict=False):
        starts = range(0, n_groups * group_rows, group_rows)
        rows = [(start_row + first * head_rows, start_row + last * head_rows) for start_row in starts]
        n_rows = n_groups * (last - first) * head_rows
        yield f"self_attn.{letter}_proj.{leaf}", _view(name, start, (n_rows, *shape[1:]), rows)


def _halves(name: str, start: int, shape: tuple[int, ...], names: tuple[str, str]) -> _Found:
    """Yield the gate, which is the first half of the rows, and what it multiplies."""
    half = shape[0] // 2
    for place, half_name in enumerate(names):
        yield half_name, _view(name, start, (half, *shape[1:]), [(place * half, (place + 1) * half)])


def _view(name: str, start: int, shape: tuple[int, ...], rows: Sequence[tuple[int, int]]) -> TensorView:
    """Make the view of ranges of rows, of a matrix or a vector that begins at element `start`."""
    width = element_count(shape[1:])
    spans = tuple(Span(start + first * width, start + last * width) for first, last in rows)
    return TensorView(name, shape, partial(tuple, spans))
