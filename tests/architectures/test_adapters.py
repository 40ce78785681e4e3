"""Adapters of models whose names transformers changes when it loads them, against PEFT's `merge_and_unload`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mergepipe import apply_lora
from support.architectures import adapted, loaded, small_model

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


@pytest.mark.thorough
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
