"""Shapes of synthetic model families: tensor names and shapes as the real architectures store them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mergepipe.core.blocks import element_count

MIN_VOCAB = 257  # one entry per byte and an end-of-text token


class Architecture(StrEnum):
    """The `transformers` class a family is written for."""

    QWEN3 = "Qwen3ForCausalLM"
    LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """One tensor of every model of a family."""

    name: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm.weight")

    @property
    def is_embedding(self) -> bool:
        return self.name in ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """Sizes of a decoder-only transformer; `tied` means that only `model.embed_tokens.weight` is stored."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    architecture: Architecture = Architecture.QWEN3

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.intermediate)
        if min(sizes) < 1 or self.vocab < MIN_VOCAB:
            raise ValueError(f"not a family shape (sizes must be positive, vocab at least {MIN_VOCAB}): {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"not a family shape (heads per kv head, even head_dim): {self}")

    def tensors(self) -> tuple[FamilyTensor, ...]:
        """All tensors in model order: embedding, layers, final norm, head."""
        tensors = [FamilyTensor("model.embed_tokens.weight", (self.vocab, self.hidden))]
        for layer in range(self.layers):
            tensors += self._layer_tensors(f"model.layers.{layer}.")
        tensors.append(FamilyTensor("model.norm.weight", (self.hidden,)))
        if not self.tied:
            tensors.append(FamilyTensor("lm_head.weight", (self.vocab, self.hidden)))
        return tuple(tensors)

    def n_parameters(self) -> int:
        """Number of stored elements of one model."""
        return sum(t.n_elements for t in self.tensors())

    def _layer_tensors(self, prefix: str) -> list[FamilyTensor]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        if self.architecture is Architecture.QWEN3:
            shapes |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        return [FamilyTensor(f"{prefix}{name}.weight", shape) for name, shape in shapes.items()]


QWEN3_0_6B = FamilyShape(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True
)
"""Names and shapes of Qwen3-0.6B: 1.19 GB a model in bf16."""

DEMO = FamilyShape(hidden=384, layers=8, heads=6, kv_heads=2, head_dim=64, intermediate=1152, vocab=8192, tied=True)
"""34 MB a model in bf16."""

TINY = FamilyShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=96, vocab=512, tied=True)
"""For tests: 82 KB a model in bf16."""

TINY_LLAMA = FamilyShape(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=96,
    vocab=512,
    tied=False,
    architecture=Architecture.LLAMA,
)
"""For tests: an untied Llama, 115 KB a model in bf16."""
