"""The refusal of an adapter that cannot be applied names the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import MismatchError, NotFoundError, UnsupportedError
from support.model_folders import write_adapter, write_model

MODULE = "model.layers.0.self_attn.q_proj"


def drawn(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


FACTORS = {f"{MODULE}.lora_A.weight": drawn(4, 8), f"{MODULE}.lora_B.weight": drawn(8, 4)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", {f"{MODULE}.weight": drawn(8, 8), "model.norm.weight": drawn(8)})


@pytest.mark.parametrize("head", ["score", "classifier", "v_head.summary"])
def test_apply_lora__names_the_head_of_another_task(base: Path, tmp_path: Path, head: str) -> None:
    write_adapter(tmp_path / "adapter", {**FACTORS, f"{head}.weight": drawn(1, 8)}, modules_to_save=[head])
    with pytest.raises(MismatchError, match="is the head of another task, and the base has none") as caught:
        mergepipe.apply_lora(base, [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    assert "did you mean" not in str(caught.value)
    mergepipe.apply_lora(base, [tmp_path / "adapter"], tmp_path / "out", catalog=False, allow_unapplied=(head,))


def test_apply_lora__names_the_adapters_in_a_folder(base: Path, tmp_path: Path) -> None:
    for name in ("math", "code"):
        write_adapter(tmp_path / "adapters" / name, FACTORS)
    with pytest.raises(NotFoundError, match="name one of the adapters in it: 'code', 'math'"):
        mergepipe.apply_lora(base, [tmp_path / "adapters"], tmp_path / "out", catalog=False)


def test_apply_lora__ignores_an_option_of_the_first_releases_of_peft(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", FACTORS, merge_weights=True)
    mergepipe.apply_lora(base, [tmp_path / "adapter"], tmp_path / "out", catalog=False)


@pytest.mark.filterwarnings("ignore")
def test_apply_lora__invents_no_name_of_a_head(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": drawn(12, 8)}
    factors = {"lora_embedding_A": drawn(4, 12), "lora_embedding_B": drawn(8, 4)}
    named = {f"model.embed_tokens.{part}": values for part, values in factors.items()}
    write_adapter(tmp_path / "adapter", named)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    known = write_model(tmp_path / "known", tensors, config)
    mergepipe.apply_lora(known, [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    config |= {"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard-of"}
    unknown = write_model(tmp_path / "unknown", tensors, config)
    with pytest.raises(UnsupportedError, match="its name is not known for this architecture"):
        mergepipe.apply_lora(unknown, [tmp_path / "adapter"], tmp_path / "more", catalog=False)
    assert not (tmp_path / "more").exists()
