"""`--rename` applies adapters whose names are not those of the files, as PEFT does under the names of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from mergepipe import apply_lora
from mergepipe.errors import MergePipeError, MismatchError, RecipeError
from support.architecture_sweep import Subject, check_values
from support.architectures import TEXT, adapted, saved, tensors_of
from support.model_folders import write_model

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # of transformers and PEFT
RENAME = ("self_attn=mixer", "model.layers=stack.h")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model under two names, an adapter in the names of training, and what PEFT makes of the two."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    saved("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": False}, tmp_path / "trained")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "up_proj", "lm_head"], "modules_to_save": ["norm"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"self_attn.q_proj": 16},
    }  # fmt: skip
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    draw = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    made.save_pretrained(tmp_path / "adapter")
    wanted = made.merge_and_unload().state_dict()
    torch.save({in_files(name): value for name, value in wanted.items()}, tmp_path / "wanted.pt")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    config |= {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    stored = {in_files(name): value.numpy() for name, value in tensors_of(tmp_path / "trained").items()}
    write_model(tmp_path / "base", stored, config)
    return tmp_path


def in_files(name: str) -> str:
    return name.replace("model.layers", "stack.h").replace("self_attn", "mixer")


def test_apply_lora__renames_parts_of_the_names_of_an_adapter(folder: Path) -> None:
    import torch

    with pytest.raises(MismatchError, match="OLD=NEW reads parts of its names"):
        apply_lora(folder / "base", [folder / "adapter"], folder / "out", catalog=False)
    report = apply_lora(folder / "base", [folder / "adapter"], folder / "out", catalog=False, adapter_names=RENAME)
    assert [(account.adapted_modules, account.applied_modules) for account in report.adapters] == [(9, 9)]
    wanted = torch.load(folder / "wanted.pt")
    got = tensors_of(folder / "out")
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert got[name].allclose(values, atol=1e-6), name
    assert mergepipe.verify(folder / "out", deep_fraction=1.0).is_sound


def test_merge__renames_parts_of_the_names_of_adapters(folder: Path) -> None:
    names = dict(text.split("=") for text in RENAME)
    pair = f"{folder / 'base'}+{folder / 'adapter'}"
    recipe = {"merge_method": "passthrough", "models": [{"model": pair}], "adapter_names": names}
    mergepipe.merge(recipe, folder / "out", catalog=False)
    apply_lora(folder / "base", [folder / "adapter"], folder / "applied", catalog=False, adapter_names=RENAME)
    applied = tensors_of(folder / "applied")
    assert all(values.equal(applied[name]) for name, values in tensors_of(folder / "out").items())
    wrong: dict[str, object] = {**recipe, "adapter_names": {"self_attn": 3}}
    with pytest.raises(RecipeError, match="the name that the base has"):
        mergepipe.merge(wrong, folder / "other", catalog=False)


@pytest.mark.parametrize("text", ["self_attn", "=mixer", ".=mixer"])
def test_apply_lora__refuses_a_renaming_without_two_names(folder: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="is not OLD=NEW"):
        apply_lora(folder / "base", [folder / "adapter"], folder / "out", catalog=False, adapter_names=[text])


def test_apply_lora__refuses_a_renaming_that_makes_two_names_one(folder: Path) -> None:
    with pytest.raises(MismatchError, match="both become"):
        apply_lora(folder / "base", [folder / "adapter"], folder / "out", catalog=False, adapter_names=["0=1"])


@pytest.mark.parametrize(("name", "model_type"), [("HrmTextForCausalLM", "hrm_text")])
def test_an_adapter_of_weights_that_loading_makes__is_applied_to_the_base_as_it_is_loaded(
    name: str, model_type: str, tmp_path: Path
) -> None:
    subject = Subject(name, model_type, tmp_path)
    made = adapted(subject.model(subject.base))
    made.save_pretrained(tmp_path / "adapter")
    wanted = dict(made.merge_and_unload().state_dict())
    with pytest.raises(
        MergePipeError,
        match=r"loading makes it of other tensors .* save_pretrained\(\.\.\., save_original_format=False\)",
    ):
        mergepipe.apply_lora(subject.base, [tmp_path / "adapter"], tmp_path / "refused", catalog=False)
    _, as_loaded = subject.layouts(subject.base, subject.state)
    mergepipe.apply_lora(as_loaded, [tmp_path / "adapter"], tmp_path / "out", catalog=False)
    check_values(subject.loaded(tmp_path / "out"), wanted, 1e-5)
