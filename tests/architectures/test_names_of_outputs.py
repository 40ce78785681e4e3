"""What is written can be loaded: tensors that are not the weights of their architecture are named, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.architectures import MLA, MOE, NARROW, TEXT, saved, tensors_of
from support.model_folders import write_model
from support.training_trees import decay_groups, known_states, write_zero12

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", TEXT),
    "Qwen2ForCausalLM": ("Qwen2Config", {**TEXT, "tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**TEXT, "head_dim": 8, "attention_bias": True}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**TEXT, "head_dim": 8}),
    "Phi3ForCausalLM": ("Phi3Config", {**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "MixtralForCausalLM": ("MixtralConfig", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**TEXT, **EXPERTS, "head_dim": 8, "decoder_sparse_step": 2}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**NARROW, **MOE, **MLA, "first_k_dense_replace": 2}),
    "BambaForCausalLM": (
        "BambaConfig",
        {**TEXT, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
         "attn_layer_indices": [1, 3]},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", NARROW),
    "BertForMaskedLM": ("BertConfig", NARROW),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2}),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"text_config": {"model_type": "llama", **TEXT}, "image_token_index": 3,
         "vision_config": {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **VISION}},
    ),
}  # fmt: skip
MERGED = "model.layers.1.self_attn.q_proj.weight"
LACKED = "'model.layers.1.self_attn.q_proj.weight'"


def merged(base: Path, out: Path, **options: Any) -> Any:
    recipe = {"merge_method": "linear", "models": [{"model": str(base), "parameters": {"weight": 1}}]}
    return mergepipe.merge(recipe, out, catalog=False, **options)


def words(report: Any) -> list[str]:
    return [notice.message for notice in report.recipe_notices]


@pytest.mark.thorough
@pytest.mark.parametrize("is_original", [True, False], ids=["files", "modules"])
@pytest.mark.parametrize("name", CASES)
def test_merge__says_nothing_of_models_that_transformers_saved(name: str, is_original: bool, tmp_path: Path) -> None:
    import transformers

    config, options = CASES[name]
    base = saved(name, config, options, tmp_path / "base")
    if not is_original:
        model = getattr(transformers, name).from_pretrained(base)
        shutil.rmtree(base)
        model.save_pretrained(base, save_original_format=False)
    assert not words(merged(base, tmp_path / "out", strict=True))
    stored = list(tensors_of(base))
    for lost in (stored[0], stored[-1]):
        tensors = {key: value.numpy() for key, value in tensors_of(base).items() if key != lost}
        write_model(tmp_path / "less" / lost, tensors, json.loads((base / "config.json").read_text()))
        told = " ".join(words(merged(tmp_path / "less" / lost, tmp_path / "of less" / lost)))
        assert "loading draws at random" in told, lost


@pytest.fixture
def llama(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the configuration of a small Llama."""
    base = saved("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": False}, tmp_path / "sound")
    tensors = {name: value.numpy() for name, value in tensors_of(base).items()}
    return tensors, json.loads((base / "config.json").read_text())


def damaged(tensors: dict[str, Any], fault: str) -> tuple[dict[str, Any], list[str]]:
    """Return tensors with a fault, and the words that name it."""
    other = {**tensors}
    weight = other.pop("lm_head.weight" if fault == "head" else MERGED)
    if fault == "head":
        return other, ["lacks 1 weight", "'lm_head.weight'"]
    if fault == "removed":
        return other, ["lacks 1 weight", LACKED]
    renamed = {"renamed": "qq_proj.weight", "base layer": "q_proj.base_layer.weight"}[fault]
    other[MERGED.replace("q_proj.weight", renamed)] = weight
    return other, ["lacks 1 weight", LACKED, "ignores 1 tensor", renamed]


@pytest.mark.parametrize("fault", ["removed", "renamed", "base layer", "head"])
def test_merge__names_weights_that_the_architecture_has_and_the_output_not(
    llama: tuple[dict[str, Any], dict[str, Any]], fault: str, tmp_path: Path
) -> None:
    tensors, wanted = damaged(llama[0], fault)
    base = write_model(tmp_path / "base", tensors, llama[1])
    report = merged(base, tmp_path / "out")
    told = " ".join(words(report))
    assert all(word in told for word in wanted), told
    record = (tmp_path / "out" / "mergepipe.json").read_text()
    assert wanted[0] in record
    with pytest.raises(MergePipeError, match=wanted[0]):
        merged(base, tmp_path / "refused", strict=True)
    assert not (tmp_path / "refused").exists()
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps({"merge_method": "passthrough", "models": [{"model": str(base)}]}))
    assert wanted[0] in str(mergepipe.check(recipe).recipe_notices)


def test_merge__says_nothing_of_types_that_are_not_known(
    llama: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    tensors, _ = damaged(llama[0], "removed")
    remote = {**llama[1], "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    unknown = {**llama[1], "model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    for number, config in enumerate((remote, unknown)):
        base = write_model(tmp_path / f"base {number}", tensors, config)
        assert not words(merged(base, tmp_path / f"out {number}", strict=True))


@pytest.mark.parametrize("kind", ["unheard of", "of a repository", "known"])
def test_merge__of_slices_of_an_unknown_type_is_compared_with_its_base(
    llama: tuple[dict[str, Any], dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "unheard of": {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]},
        "of a repository": {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        "known": {},
    }
    config = {**llama[1], **changes[kind]}
    base = write_model(tmp_path / "base", llama[0], config)
    other_names = {name: tensor for name, tensor in llama[0].items() if name != MERGED}
    other_names["model.layers.1.self_attn.q_proj.scale"] = np.ones(4, np.float32)
    other = write_model(tmp_path / "other", other_names, config)
    layers = [(base, [0, 2]), (other, [1, 2])]
    slices = [{"sources": [{"model": str(model), "layer_range": taken}]} for model, taken in layers]
    recipe = {"merge_method": "passthrough", "slices": slices}
    told = " ".join(words(mergepipe.merge(recipe, tmp_path / "out", catalog=False)))
    name = "'model.layers.2.self_attn.q_proj"
    if kind == "known":
        assert f"lacks 1 weight, which loading draws at random: {name}.weight'" in told
        assert f"loading ignores 1 tensor of the output: {name}.scale'" in told
    else:
        assert f"lacks 1 weight, which the base has: {name}.weight'" in told
        assert f"1 tensor that the base has not: {name}.scale'" in told
    with pytest.raises(MergePipeError, match="lacks 1 weight"):
        mergepipe.merge(recipe, tmp_path / "refused", catalog=False, strict=True)


@pytest.mark.parametrize("fault", ["", "removed", "renamed", "head"])
def test_compose__names_weights_that_the_architecture_has_and_the_composite_not(
    llama: tuple[dict[str, Any], dict[str, Any]], fault: str, tmp_path: Path
) -> None:
    tensors, wanted = damaged(llama[0], fault) if fault else (llama[0], [])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for step in (3, 5):
        known = known_states(shapes, seed=step, step=step)
        write_zero12(tmp_path / f"at-{step}", known, decay_groups(shapes), 2)
        (tmp_path / f"at-{step}" / "config.json").write_text(json.dumps(llama[1]))
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("default: at-5\ntake: [{from: at-3, units: [layers even]}]\n")
    told = " ".join(tailor.compose(recipe, tmp_path / "out").plan.notices)
    assert all(word in told for word in wanted), told
    assert bool(told) == bool(fault), told


@pytest.mark.parametrize("fault", ["", "removed", "renamed", "head"])
def test_export__names_weights_that_the_architecture_has_and_the_model_not(
    llama: tuple[dict[str, Any], dict[str, Any]], fault: str, tmp_path: Path
) -> None:
    tensors, wanted = damaged(llama[0], fault) if fault else (llama[0], [])
    write_model(tmp_path / "checkpoint-1", tensors, llama[1])
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1, "log_history": []}')
    report = tailor.export(tmp_path / "checkpoint-1", tmp_path / "out")
    told = " ".join(report.plan.notices)
    assert all(word in told for word in wanted), told
    assert bool(told) == bool(fault), told
    if fault:
        with pytest.raises(MergePipeError, match=wanted[0]):
            tailor.export(tmp_path / "checkpoint-1", tmp_path / "refused", strict=True)
        assert not os.path.lexists(tmp_path / "refused")


def test_slices__of_models_of_transformers_say_nothing(
    llama: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base", llama[0], llama[1])
    slices = [{"sources": [{"model": str(base), "layer_range": [start, stop]}]} for start, stop in ((0, 3), (1, 4))]
    report = mergepipe.merge({"merge_method": "passthrough", "slices": slices}, tmp_path / "out", catalog=False)
    assert not words(report)
    assert len(tensors_of(tmp_path / "out")) == len(llama[0]) + 2 * 9
    assert np.isfinite(report.output_bytes)
