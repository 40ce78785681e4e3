"""An adapter of a tied embedding leaves the head as it was, whatever the architecture calls the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mergepipe import MergePipeError, apply_lora
from support.architectures import TEXT, loaded, saved, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
ENCODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}),
    "CTRLLMHeadModel": ("CTRLConfig", {**GPT, "dff": 48}),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", GPT),
    "GPT2LMHeadModel": ("GPT2Config", GPT),
    "BioGptForCausalLM": ("BioGptConfig", ENCODER),
    "BertForMaskedLM": ("BertConfig", ENCODER),
    "RobertaForMaskedLM": ("RobertaConfig", ENCODER),
    "ElectraForMaskedLM": ("ElectraConfig", {**ENCODER, "embedding_size": 32}),
    "AlbertForMaskedLM": ("AlbertConfig", {**ENCODER, "embedding_size": 32}),
    "MPNetForMaskedLM": ("MPNetConfig", ENCODER),
    "DistilBertForMaskedLM": (
        "DistilBertConfig", {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
    ),
    "GPTJForCausalLM": ("GPTJConfig", {**GPT, "rotary_dim": 4, "tie_word_embeddings": True}),
}  # fmt: skip


def adapter_of(model: Any, module: str, folder: Path) -> Any:
    """Save a LoRA of one module with random factors; return the delta that it stands for."""
    import torch
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=[module]))
    draw = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    adapted.save_pretrained(folder)
    return adapted.get_submodule(f"base_model.model.{module}").get_delta_weight("default").detach()


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_the_embedding__leaves_the_tied_head_as_it_was(name: str, tmp_path: Path) -> None:
    config, options = CASES[name]
    base = saved(name, config, options, tmp_path / "base")
    model = loaded(name, base)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: key for key, module in model.named_modules(remove_duplicate=False)}
    embedding_name, head_name = names[embedding], names[head]
    before = embedding.weight.detach().clone()
    delta = adapter_of(model, embedding_name, tmp_path / "adapter")
    apply_lora(base, [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    after = loaded(name, tmp_path / "out").state_dict()
    assert after[f"{head_name}.weight"].equal(before)
    assert after[f"{embedding_name}.weight"].allclose(before + delta, atol=1e-6)
    stored = tensors_of(tmp_path / "out").keys() - tensors_of(base).keys()
    assert all(key.startswith(head_name) for key in stored)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_changed_head_of_an_unknown_architecture__has_the_name_that_the_adapter_has(
    is_saved: bool, tmp_path: Path
) -> None:
    """Where the adapter changes the embedding alone, a base with a head of its own is needed, as PEFT's merge of it."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    class UnheardOfConfig(LlamaConfig):  # type: ignore[misc]
        model_type = "unheard-of"

    class UnheardOfForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        config_class = UnheardOfConfig

    def folded(base: Path, options: dict[str, Any]) -> tuple[Any, Any]:
        """Train an adapter of a base and apply it; return the logits of both models."""
        adapter = tmp_path / f"adapter of {base.name}"
        adapted = get_peft_model(UnheardOfForCausalLM.from_pretrained(base), LoraConfig(r=4, **options))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
        adapted.save_pretrained(adapter)
        output = tmp_path / f"{base.name} with it"
        apply_lora(base, [adapter], output, catalog=False)
        trained = PeftModel.from_pretrained(UnheardOfForCausalLM.from_pretrained(base), adapter).eval()
        model, info = UnheardOfForCausalLM.from_pretrained(output, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        tokens = torch.arange(3, 13).view(1, -1)
        return model(input_ids=tokens).logits, trained(input_ids=tokens).logits

    draw = torch.Generator().manual_seed(1)
    model = UnheardOfForCausalLM(UnheardOfConfig(**TEXT, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    changed = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    mine, theirs = folded(tmp_path / "tied", changed if is_saved else {"target_modules": ["q_proj", "lm_head"]})
    assert mine.allclose(theirs, rtol=1e-4, atol=2e-5)
    changed = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    changed = changed if is_saved else {"target_modules": ["q_proj", "embed_tokens"]}
    with pytest.raises(MergePipeError, match="save the base with a head of its own and tie_word_embeddings false"):
        folded(tmp_path / "tied", changed)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    mine, theirs = folded(tmp_path / "untied", changed)
    assert mine.allclose(theirs, rtol=1e-4, atol=2e-5)
