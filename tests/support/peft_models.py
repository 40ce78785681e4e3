"""Small models of several architectures, and adapters of them that PEFT has trained and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from support.late_modules import LateModule, torch, transformers

peft: Any = LateModule("peft")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
COMMON = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama(*, tied: bool) -> Any:
    sizes = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def qwen3_moe(width: int) -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=48, moe_intermediate_size=width, num_experts=4, num_experts_per_tok=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(width: int, **more: int) -> Any:
    sizes = {**COMMON, **more, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(**sizes, intermediate_size=width, head_dim=8)
    return transformers.GptOssForCausalLM(config)


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "qwen3-moe": lambda: qwen3_moe(24),
    "qwen3-moe-narrow": lambda: qwen3_moe(8),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**COMMON, intermediate_size=24, num_local_experts=4, num_key_value_heads=2)
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
            n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=8,
        )
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **COMMON, intermediate_size=24, intermediate_size_mlp=48, num_local_experts=4, num_key_value_heads=2,
            head_dim=8, interleave_moe_layer_step=2,
        )
    ),
    "gpt-oss": lambda: gpt_oss(24),
    "gpt-oss-square": lambda: gpt_oss(COMMON["hidden_size"]),  # as it was published
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An adapter of one of the models. Where `is_split`, PEFT's own merge changes a tied tensor that it should not."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("q_proj", "down_proj")
    is_split: bool = False
    kind: str = "LoraConfig"

    @property
    def alpha(self) -> str:
        return "lora_alpha" if self.kind in ("LoraConfig", "AdaLoraConfig") else "alpha"

    @property
    def sizes(self) -> dict[str, int]:
        """The rank and alpha, of kinds that have them."""
        return {} if self.kind == "IA3Config" else {"r": 4, self.alpha: 6}


CASES = {
    "plain": Case("llama"),
    "rank-pattern": Case("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*down_proj": 3}}),
    "loha": Case("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}}, kind="LoHaConfig"),
    "lokr": Case("llama", {"alpha_pattern": {"q_proj": 5}, "r": 2}, kind="LoKrConfig"),
    "lokr-whole": Case("llama", {"r": 8}, kind="LoKrConfig"),
    "lokr-both": Case("llama", {"r": 2, "decompose_both": True, "decompose_factor": 16}, kind="LoKrConfig"),
    "ia3": Case("llama", {"feedforward_modules": ["down_proj"]}, ("k_proj", "down_proj"), kind="IA3Config"),
    "ia3-gpt2": Case(
        "gpt2",
        {"fan_in_fan_out": True, "feedforward_modules": ["mlp.c_proj"]},
        ("c_attn", "mlp.c_proj"),
        kind="IA3Config",
    ),
    "adalora": Case("llama", {"init_r": 6, "target_r": 3, "total_step": 100}, kind="AdaLoraConfig"),
    "rslora": Case("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    "lora-bias": Case("llama", {"lora_bias": True}, ("q_proj", "k_proj")),
    "trained-biases": Case("llama", {"lora_bias": True, "bias": "lora_only"}, ("q_proj", "k_proj")),
    "dora": Case("llama", {"use_dora": True}),
    "dora-rslora": Case("llama", {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 2}}),
    "embedding": Case("llama", {}, ("q_proj", "embed_tokens")),
    "embedding-dora": Case("llama", {"use_dora": True}, ("q_proj", "embed_tokens")),
    "saved": Case("llama", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "tokens": Case("llama", {"trainable_token_indices": [1, 5]}),
    "tokens-by-module": Case("llama", {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [1, 4]}}),
    "tied-head": Case("llama-tied", {}, ("q_proj", "lm_head"), is_split=True),
    "tied-embedding": Case("llama-tied", {}, ("q_proj", "embed_tokens"), is_split=True),
    "tied-saved-head": Case("llama-tied", {"modules_to_save": ["lm_head"]}),
    "tied-saved-embedding": Case("llama-tied", {"modules_to_save": ["embed_tokens"]}),
    "tied-tokens": Case("llama-tied", {"trainable_token_indices": [1, 5]}),
    "gpt2": Case("gpt2", {"fan_in_fan_out": True}, ("c_attn", "c_proj")),
    "gpt2-dora": Case("gpt2", {"fan_in_fan_out": True, "use_dora": True}, ("c_attn",)),
    "gpt2-embedding": Case("gpt2", {"fan_in_fan_out": True}, ("c_attn", "wte"), is_split=True),
    "parameter": Case("llama", {"target_parameters": ["v_proj.weight"], "alpha_pattern": {"1.*v_proj.weight": 3}}),
    "experts": Case("qwen3-moe", {"target_parameters": EXPERTS}, ("q_proj",)),
    "experts-rslora": Case("qwen3-moe", {"target_parameters": EXPERTS, "use_rslora": True}, ("q_proj",)),
    "experts-rank": Case("qwen3-moe", {"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}}),
    "experts-narrow": Case("qwen3-moe-narrow", {"target_parameters": EXPERTS}, ("q_proj",)),  # unsloth-zoo 779
    "experts-alone": Case("mixtral", {"target_parameters": EXPERTS[1:]}, ("q_proj",)),
    "mixtral": Case("mixtral", {"target_parameters": EXPERTS}, ("q_proj",)),
    "experts-by-last-name": Case("qwen3-moe", {}, ("q_proj", "gate_proj", "up_proj", "down_proj")),
    "mixtral-by-last-name": Case("mixtral", {}, ("q_proj", "gate", "w1", "w2", "w3")),
    "deepseek": Case(
        "deepseek-v3", {"target_parameters": EXPERTS}, ("q_a_proj", "kv_b_proj", "shared_experts.down_proj")
    ),
    "llama4": Case(
        "llama4",
        {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
        ("q_proj", "shared_expert.up_proj"),
    ),
    "gpt-oss-square": Case("gpt-oss-square", {"target_parameters": EXPERTS[1:]}, ("q_proj",)),
    "gpt-oss": Case("gpt-oss", {"target_parameters": EXPERTS}, ("q_proj", "o_proj")),
}


def base_of(root: Path, name: str, rename: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Path:
    """A small random model on disk."""
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(root / "base")
    if rename is not None:
        path = root / "base" / "model.safetensors"
        save_file({name: np.ascontiguousarray(t) for name, t in rename(load_file(path)).items()}, path)
    return root / "base"


def trained(base: Path, out: Path, case: Case) -> Any:
    """An adapter whose every parameter differs from its start, saved by PEFT; the model that has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {**case.sizes, "target_modules": list(case.targets), **case.options}
    adapted = peft.get_peft_model(model, getattr(peft, case.kind)(**options))
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(out, save_embedding_layers=False)
    return adapted.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(1, 20)[None]).logits


def loaded(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
