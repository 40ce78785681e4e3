"""A text model merged into a vision-language model whose text part has its tensors under a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

import mergepipe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
EYES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "projection_dim": 16,
}  # fmt: skip


def test_merge__puts_a_text_model_into_a_llava(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text, eyes = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**EYES)
    config = transformers.LlavaConfig(vision_config=eyes, text_config=text, image_token_index=95)
    base, expert = transformers.LlavaForConditionalGeneration(config), transformers.LlamaForCausalLM(text)
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "base"),
        "models": [{"model": str(tmp_path / "expert"), "parameters": {"weight": 0.25}}],
    }
    report = mergepipe.merge(recipe, tmp_path / "out", home=tmp_path / "home", threads=2)
    merged = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    before, trained = base.state_dict(), expert.state_dict()
    n_text = 0
    for name, tensor in merged.state_dict().items():
        wanted = before[name].double()
        theirs = trained.get(name.replace("model.language_model.", "model."))
        if theirs is not None:
            wanted, n_text = wanted + 0.25 * (theirs.double() - wanted), n_text + 1
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(tensor, before[name])
    assert (report.merged_tensors, n_text) == (len(trained), len(trained))
    kept = [str(notice) for notice in report.recipe_notices]
    assert sum("tensors: those of" in notice for notice in kept) == 2  # vision, projector
