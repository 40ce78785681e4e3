"""A text model merged into a vision-language model whose text part has its tensors under a prefix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import MismatchError
from support.late_modules import torch, transformers
from support.model_folders import recipe_of, write_model

pytestmark = pytest.mark.transformers
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
    recipe = recipe_of("task_arithmetic", {tmp_path / "expert": {"weight": 0.25}}, tmp_path / "base")
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


@pytest.mark.parametrize("stem", ["", "model."])  # before the names of the text model, or in place of its `model.`
def test_merge__of_a_text_model_that_fits_in_two_places_is_told_how_to_choose(tmp_path: Path, stem: str) -> None:
    random = np.random.default_rng(0)
    roles = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in range(2) for role in "qkvo"]
    text = {name: random.standard_normal((8, 8), np.float32) for name in roles}
    held = {place: [f"{stem}{place}.{name.removeprefix(stem)}" for name in text] for place in ("talker", "thinker")}
    names = [name for place in held.values() for name in place]
    base = {name: random.standard_normal((8, 8), np.float32) for name in names}
    for name, tensors in (("text", text), ("base", base)):
        write_model(tmp_path / name, tensors)
    models = [{"model": str(tmp_path / "text"), "parameters": {"weight": 0.5}}]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")}
    places = rf"`modules: \{{{stem}talker: \{{models: ...\}}\}}` or `modules: \{{{stem}thinker: \{{models: ...\}}\}}`"
    with pytest.raises(MismatchError, match=places):
        mergepipe.check({**recipe, "models": models})
    mergepipe.merge({**recipe, "modules": {f"{stem}thinker": {"models": models}}}, tmp_path / "out", catalog=False)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for kept, changed, values in zip(held["talker"], held["thinker"], text.values(), strict=True):
        np.testing.assert_array_equal(merged[kept], base[kept])
        np.testing.assert_allclose(merged[changed], (base[changed] + values) / 2, rtol=1e-6, atol=1e-6)
