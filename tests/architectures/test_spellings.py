"""Adapters and models whose base has the names of older releases, which transformers changes when it loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from support.architectures import NARROW, loaded, saved, tensors_of

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # of transformers and PEFT
SPEECH = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 32,
    "conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (3,), "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, str]]] = {
    "BertForMaskedLM": (
        "BertConfig", NARROW, "LayerNorm", {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config", SPEECH, "pos_conv_embed",
        {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"},
    ),
}  # fmt: skip


def in_older_names(folder: Path, out: Path, names: dict[str, str]) -> Path:
    """Copy a model under the names of an older release; return its folder."""
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in tensors_of(folder).items():
        for newer, older in names.items():
            name = name.replace(newer, older)
        tensors[name] = tensor
    assert tensors.keys() != tensors_of(folder).keys()
    shutil.copytree(folder, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("name", CASES)
def test_apply_lora__finds_saved_modules_under_the_names_of_older_releases(name: str, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    config, options, module, names = CASES[name]
    base = in_older_names(saved(name, config, options, tmp_path / "base"), tmp_path / "older", names)
    lora = LoraConfig(r=4, target_modules=["query", "q_proj"], modules_to_save=[module])
    adapted = get_peft_model(loaded(name, base), lora)
    draw = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=draw)
    adapted.save_pretrained(tmp_path / "adapter")
    report = mergepipe.apply_lora(base, [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    assert not report.recipe_notices
    assert tensors_of(tmp_path / "out").keys() == tensors_of(base).keys()
    mine = loaded(name, tmp_path / "out").state_dict()
    theirs = PeftModel.from_pretrained(loaded(name, base), tmp_path / "adapter").merge_and_unload().state_dict()
    assert mine.keys() == theirs.keys()
    before = loaded(name, base).state_dict()
    assert any(module in key and not values.equal(before[key]) for key, values in mine.items())
    for key, values in theirs.items():
        torch.testing.assert_close(mine[key], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_merge__of_models_with_older_names_reports_no_weight_that_loading_lacks(name: str, tmp_path: Path) -> None:
    config, options, _, names = CASES[name]
    newer = saved(name, config, options, tmp_path / "newer")
    older = in_older_names(newer, tmp_path / "older", names)
    models = [{"model": str(model), "parameters": {"weight": 0.5}} for model in (older, newer)]
    recipe = {"merge_method": "linear", "base_model": str(older), "models": models}
    report = mergepipe.merge(recipe, tmp_path / "out", catalog=False)
    assert not report.recipe_notices
    mine = loaded(name, tmp_path / "out").state_dict()
    for key, values in loaded(name, newer).state_dict().items():
        assert mine[key].allclose(values, rtol=1e-5, atol=1e-6)
