"""Adapters of models whose names transformers changes when it loads them, against PEFT's `merge_and_unload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mergepipe import apply_lora
from support.architectures import loaded

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
RENAMED = {
    "PhimoeForCausalLM": "phimoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "GPTNeoXForCausalLM": "gpt_neox",
    "MixtralForCausalLM": "mixtral",
    "LlamaForCausalLM": "exaone",
}


def small_model(name: str, model_type: str) -> Any:
    """Return a small model of a class with random values."""
    import torch
    import transformers
    from tools.architectures import built

    torch.manual_seed(0)
    config = built(model_type, name).config
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter)
    return model.eval()


def adapted(model: Any) -> Any:
    """Return the model with a LoRA of every linear layer and of fused experts, whose factors are random."""
    import torch
    from peft import LoraConfig, get_peft_model

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    experts = {
        name.split(".", 3)[-1]
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and parameter.dim() == 3
    }
    head = {
        name.rpartition(".")[2] for name, module in model.named_modules() if module is model.get_output_embeddings()
    }
    options = {"target_modules": sorted(linear - head), "target_parameters": sorted(experts) or None}
    made = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **options))
    draw = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    return made.eval()


@pytest.mark.parametrize("name", RENAMED)
def test_adapters_of_renamed_weights__give_what_peft_gives(name: str, tmp_path: Path) -> None:
    model = small_model(name, RENAMED[name])
    model.save_pretrained(tmp_path / "base")
    made = adapted(model)
    made.save_pretrained(tmp_path / "adapter")
    wanted = made.merge_and_unload().state_dict()
    apply_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    got = loaded(name, tmp_path / "out").state_dict()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == RENAMED[name]
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        assert got[key].allclose(values.to(got[key].dtype), atol=1e-5), key
