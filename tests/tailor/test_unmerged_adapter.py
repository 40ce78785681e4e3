"""Training checkpoints that hold an adapter of PEFT and its base: folded, written as an adapter, or refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.late_modules import LateModule, torch, transformers

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft extra"),
]

peft: Any = LateModule("peft")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def adapted(**options: Any) -> Any:
    """A small model that PEFT has wrapped, with an adapter of random values."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def refused(checkpoint: Path, out: Path, **options: Any) -> str:
    """Return the message of an export that is refused and leaves nothing behind."""
    with pytest.raises(MergePipeError) as caught:
        tailor.export(checkpoint, out, **options)
    assert not out.exists()
    return str(caught.value)


def test_export__refuses_an_adapter_that_is_not_merged(tmp_path: Path) -> None:
    torch.save({"model": adapted().state_dict()}, tmp_path / "last.pt")
    message = refused(tmp_path / "last.pt", tmp_path / "out")
    assert "layers.0.self_attn.q_proj.lora_A.default.weight" in message
    assert "merge_and_unload" in message


def test_average__refuses_an_adapter_that_is_not_merged(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"model": adapted().state_dict(), "step": step}, tmp_path / f"step{step}.pt")
    with pytest.raises(MergePipeError, match="adapter"):
        tailor.average([tmp_path / "step1.pt", tmp_path / "step2.pt"], tmp_path / "out")
    with pytest.raises(MergePipeError, match="adapter"), tailor.Averager(tmp_path / "running") as averager:
        averager.fold(tmp_path / "step1.pt")
