"""What `lora convert` writes and PEFT loads gives the logits of the adapter that it was made from."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from support.late_modules import LateModule, torch, transformers

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft extra"),
]

peft: Any = LateModule("peft")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TOKENS = [[1, 5, 9, 2, 33, 60, 7, 8]]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def trained(kind: str, folder: Path, **options: Any) -> Any:
    """An adapter with random factors of a model, both saved; returns its logits."""
    model = model_of(kind)
    model.save_pretrained(folder / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if kind == "moe" else None
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=parameters, **options
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    adapted.save_pretrained(folder / "adapter")
    return logits_of(adapted)


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits


def loaded(kind: str, folder: Path) -> Any:
    return logits_of(peft.PeftModel.from_pretrained(model_of(kind), folder))


@pytest.mark.parametrize("form", ["vllm", "sglang", "mlx", "gguf", "kohya", "comfyui", "diffusers"])
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}], ids=["plain", "patterns"]
)
def test_convert_lora__there_and_back_gives_the_logits_of_peft(
    tmp_path: Path, form: str, options: dict[str, Any]
) -> None:
    expected = trained("dense", tmp_path, **options)
    mergepipe.convert_lora(tmp_path / "adapter", tmp_path / "there", form=form, base=tmp_path / "base")
    there = next((file for file in (tmp_path / "there").iterdir() if file.stem == "there"), tmp_path / "there")
    mergepipe.convert_lora(there, tmp_path / "back", base=tmp_path / "base")
    torch.testing.assert_close(loaded("dense", tmp_path / "back"), expected, rtol=1e-4, atol=1e-4)
    if form in ("vllm", "sglang"):  # PEFT reads what they read
        torch.testing.assert_close(loaded("dense", tmp_path / "there"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["vllm", "mlx", "gguf"])
def test_convert_lora__of_stacked_experts_there_and_back_gives_the_logits_of_peft(tmp_path: Path, form: str) -> None:
    expected = trained("moe", tmp_path)
    mergepipe.convert_lora(tmp_path / "adapter", tmp_path / "there", form=form, base=tmp_path / "base")
    there = tmp_path / "there" / "there.gguf" if form == "gguf" else tmp_path / "there"
    mergepipe.convert_lora(there, tmp_path / "back", experts="stacked")
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert len(config["target_parameters"]) == 4
    torch.testing.assert_close(loaded("moe", tmp_path / "back"), expected, rtol=1e-4, atol=1e-4)
