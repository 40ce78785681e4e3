"""Slices of models whose layers are of several kinds load in transformers, with the values of their sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mergepipe import merge as run_merge
from mergepipe.errors import UnsupportedError
from support.architectures import HEADS, MLA, MOE, NARROW, TEXT, loaded, saved, tensors_of

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
PERIODS = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 2}
REPEATED, MOVED, FRONT, DROPPED = [(0, 3), (1, 4)], [(1, 4), (0, 2)], [(0, 3), (0, 4)], [(0, 1), (2, 4)]
CASES: dict[str, tuple[str, str, dict[str, Any], list[list[tuple[int, int]]]]] = {
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", {**TEXT, **LLAMA4}, [REPEATED, MOVED, FRONT, DROPPED]),
    "Qwen2-MoE numbers": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 2]},
        [REPEATED, MOVED, FRONT, DROPPED],
    ),
    "Qwen3-MoE steps": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**TEXT, **EXPERTS, "head_dim": 8, "decoder_sparse_step": 2},
        [REPEATED, MOVED, FRONT, DROPPED],
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config", {**NARROW, **MOE, **MLA, "first_k_dense_replace": 2},
        [[(0, 4), (2, 4)], [(0, 1), (2, 4)], [(2, 4), (2, 4)]],
    ),
    "GLM-4-MoE": (
        "Glm4MoeForCausalLM", "Glm4MoeConfig", {**TEXT, **MOE, "head_dim": 8, "first_k_dense_replace": 1},
        [[(0, 4), (2, 4)], [(1, 4)]],
    ),
    "Bamba": (
        "BambaForCausalLM", "BambaConfig", {**TEXT, **MAMBA, "attn_layer_indices": [1, 3]},
        [FRONT, MOVED, REPEATED, DROPPED],
    ),
    "Jamba": ("JambaForCausalLM", "JambaConfig", {**TEXT, **PERIODS}, [[(0, 2), (0, 4)], [(0, 4), (2, 4)]]),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        {**TEXT, "num_hidden_layers": 6, "head_dim": 8, "lru_width": 32, "attention_window_size": 8,
         "block_types": ["recurrent", "recurrent", "attention"]},
        [[(0, 3), (0, 6)], [(1, 5), (0, 2)]],
    ),
    "Ernie 4.5": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", {**TEXT, **ERNIE}, [[(0, 4), (2, 4)], [(1, 4)]]),
    "ModernBERT": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**NARROW, "num_hidden_layers": 6, "global_attn_every_n_layers": 3, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        [[(0, 3), (1, 6)], [(0, 1), (3, 6)]],
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**TEXT, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, [REPEATED, MOVED],
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**TEXT, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention"] * 2},
        [REPEATED, MOVED],
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[str, str, dict[str, Any], list[tuple[int, int]], str]] = {
    "dense layers in between": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config", {**NARROW, **MOE, **MLA, "first_k_dense_replace": 1}, FRONT,
        "first_k_dense_replace",
    ),
    "a period that is broken": ("JambaForCausalLM", "JambaConfig", {**TEXT, **PERIODS}, FRONT, "attn_layer_period"),
    "a head with columns for each layer": (
        "EsmForMaskedLM", "EsmConfig", {**NARROW, "pad_token_id": 1, "mask_token_id": 2}, REPEATED, "contact_head",
    ),
    "embeddings with columns for each layer": (
        "Gemma3nForCausalLM", "Gemma3nTextConfig",
        {**NARROW, "num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 64,
         "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 1, "altup_num_inputs": 2,
         "sliding_window": 4},
        REPEATED, "hidden_size_per_layer_input",
    ),
}  # fmt: skip


def sliced(base: Path, ranges: list[tuple[int, int]], out: Path, **more: Any) -> Path:
    """Merge slices of a model by passthrough."""
    slices = [{"sources": [{"model": str(base), "layer_range": [*layers]}]} for layers in ranges]
    run_merge({"merge_method": "passthrough", "slices": slices, **more}, out, catalog=False)
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_slices__load_as_their_layers_were(name: str, tmp_path: Path) -> None:
    model, config, options, all_ranges = CASES[name]
    base = saved(model, config, options, tmp_path / "base")
    source = tensors_of(base)
    for number, ranges in enumerate(all_ranges):
        out = sliced(base, ranges, tmp_path / str(number))
        loaded(model, out)
        origins = [layer for low, high in ranges for layer in range(low, high)]
        for tensor, values in tensors_of(out).items():
            prefix, layers, rest = tensor.partition("layers.")
            place, dot, behind = rest.partition(".")
            origin = f"{prefix}{layers}{origins[int(place)]}{dot}{behind}" if layers else tensor
            assert values.equal(source[origin]), (ranges, tensor)


@pytest.mark.parametrize("name", REFUSED)
def test_slices__that_a_configuration_cannot_state_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model, config, options, ranges, option = REFUSED[name]
    base = saved(model, config, options, tmp_path / "base")
    with pytest.raises(UnsupportedError, match=option):
        sliced(base, ranges, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_slices__of_a_decoder_leave_what_is_said_of_the_encoder(tmp_path: Path) -> None:
    sizes = {"layers": 4, "attention_heads": 4, "ffn_dim": 48}
    options: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "attention_window": [4, 8, 4, 8]}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_{name}": size for name, size in sizes.items()}
    base = saved("LEDForConditionalGeneration", "LEDConfig", options, tmp_path / "base")
    slices = [{"sources": [{"model": str(base), "layer_range": [*layers]}]} for layers in REPEATED]
    recipe = {"merge_method": "passthrough", "modules": {"decoder": {"slices": slices}}, "base_model": str(base)}
    run_merge(recipe, tmp_path / "out", catalog=False)
    config = loaded("LEDForConditionalGeneration", tmp_path / "out").config
    assert config.attention_window == [4, 8, 4, 8]
    assert (config.encoder_layers, config.decoder_layers) == (4, 6)


def test_slices__behind_the_first_block_of_t5_keep_its_attention_bias(tmp_path: Path) -> None:
    options = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4}
    base = saved("T5ForConditionalGeneration", "T5Config", {**options, "num_decoder_layers": 3}, tmp_path / "base")
    slices = [{"sources": [{"model": str(base), "layer_range": [*layers]}]} for layers in ((1, 3), (0, 2))]
    recipe = {"merge_method": "passthrough", "modules": {"encoder": {"slices": slices}}}
    run_merge({**recipe, "base_model": str(base)}, tmp_path / "out", catalog=False)
    loaded("T5ForConditionalGeneration", tmp_path / "out")
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert tensors_of(tmp_path / "out")[name].equal(tensors_of(base)[name])


@pytest.mark.parametrize("number_of_kv", [HEADS["num_key_value_heads"]])
def test_slices__of_a_model_with_vision_are_those_of_its_text(number_of_kv: int, tmp_path: Path) -> None:
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    text = transformers.LlamaConfig(**TEXT)
    assert text.num_key_value_heads == number_of_kv
    sizes = {"image_size": 16, "patch_size": 8, "projection_dim": 16}
    options = {"vision_config": transformers.CLIPVisionConfig(**vision, **sizes), "text_config": text}
    base = saved("LlavaForConditionalGeneration", "LlavaConfig", options, tmp_path / "base")
    out = sliced(base, REPEATED, tmp_path / "out")
    loaded("LlavaForConditionalGeneration", out)
    before, after = tensors_of(base), tensors_of(out)
    assert all(after[name].equal(values) for name, values in before.items() if "vision" in name)
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.text_config.num_hidden_layers == 6
    assert len([name for name in after if "language_model" in name]) > len(
        [name for name in before if "language_model" in name]
    )


SIDE = {**TEXT, "head_dim": 8, "layer_types": ["full_attention"] * 4}
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "counts named by side": (
        "MoonshineForConditionalGeneration", "MoonshineConfig",
        {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 4,
         "decoder_num_hidden_layers": 4, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
         "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    ),
    "a section for each side": (
        "T5GemmaForConditionalGeneration", "T5GemmaConfig", {"vocab_size": 64, "encoder": SIDE, "decoder": SIDE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_slices_of_a_decoder__change_what_is_said_of_it_alone(name: str, tmp_path: Path) -> None:
    model, config, options = DECODERS[name]
    base = saved(model, config, options, tmp_path / "base")
    source = tensors_of(base)
    slices = [{"sources": [{"model": str(base), "layer_range": [*layers]}]} for layers in REPEATED]
    recipe = {"merge_method": "passthrough", "base_model": str(base), "modules": {"decoder": {"slices": slices}}}
    run_merge(recipe, tmp_path / "out", catalog=False)
    loaded(model, tmp_path / "out")
    made = tensors_of(tmp_path / "out")
    n_layers = {side: len(numbers_of(made, side)) for side in ("encoder.", "decoder.")}
    assert n_layers == {"encoder.": 4, "decoder.": 6}
    for tensor, values in source.items():
        assert tensor not in made or values.shape == made[tensor].shape


def numbers_of(tensors: dict[str, Any], side: str) -> set[str]:
    """Return the numbers of the layers of an encoder or a decoder."""
    found = re.compile(rf"(?:model\.)?{re.escape(side)}.*?layers?\.(\d+)\.")
    return {match[1] for match in map(found.match, tensors) if match}
