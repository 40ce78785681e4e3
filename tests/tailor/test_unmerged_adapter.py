"""Training checkpoints that hold an adapter of PEFT and its base: folded, written as an adapter, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.late_modules import LateModule, torch, transformers
from support.slow_cases import slow_unless
from support.torch_bytes import torch_bytes
from support.training_trees import KnownStates, d_tensor, write_zero3, write_zero12

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft extra"),
]

peft: Any = LateModule("peft")
dcp: Any = LateModule("torch.distributed.checkpoint")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
Values = Mapping[str, npt.NDArray[Any]]


def adapted(*, seed: int = 3, dtype: str = "float32", **options: Any) -> Any:
    """A small model that PEFT has wrapped, with an adapter of random values."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return wrapped.eval()


def state_of(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def write_one_file(folder: Path, model: Any) -> Path:
    torch.save({"model": state_of(model), "step": 5}, folder / "last.pt")
    return folder / "last.pt"


def write_dcp(folder: Path, model: Any) -> Path:
    dcp.save({"model": state_of(model)}, checkpoint_id=str(folder / "shards"), no_dist=True)
    return folder / "shards"


def write_accelerate(folder: Path, model: Any) -> Path:
    """As Accelerate's `save_fsdp_model` writes sharded state dicts."""
    place = folder / "checkpoint-7"
    dcp.save({"model": state_of(model)}, checkpoint_id=str(place / "pytorch_model_fsdp_0"), no_dist=True)
    return place


def write_verl(folder: Path, model: Any) -> Path:
    """The shards of two ranks of FSDP2, cut along the first dimension."""
    place = folder / "actor"
    place.mkdir()
    arrays = {name: value.float().numpy() for name, value in state_of(model).items()}
    for rank in range(2):
        shards = {name: d_tensor(array, rank, 2) for name, array in arrays.items()}
        (place / f"model_world_size_2_rank_{rank}.pt").write_bytes(torch_bytes(shards))
    return place


WRITERS: Mapping[str, Callable[[Path, Any], Path]] = {
    "one-file": write_one_file, "dcp": write_dcp, "accelerate": write_accelerate, "verl": write_verl,
}  # fmt: skip
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.0.self_attn.q_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "saved": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "bias": {"bias": "all"},
    "lora-bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "tokens": {"trainable_token_indices": [3, 9]},
    "loha": {},
}


def model_of(kind: str) -> Any:
    if kind != "loha":
        return adapted(**OPTIONS[kind])
    torch.manual_seed(3)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))
    wrapped = peft.get_peft_model(base, peft.LoHaConfig(r=3, alpha=6, target_modules=["q_proj"]))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return wrapped.eval()


def save_config(model: Any, folder: Path) -> None:
    model.peft_config["default"].save_pretrained(str(folder))


def merged_values(model: Any) -> Values:
    """What PEFT makes of a model and its adapter, computed in float64."""
    return {name: value.float().numpy() for name, value in model.double().merge_and_unload().state_dict().items()}


def wrong(made: Values, wanted: Values, tolerance: float = 1e-6) -> list[str]:
    """Name the tensors that are missing, unexpected, or off by more than a share of the largest value."""
    names = [*(made.keys() ^ wanted.keys())]
    for name in made.keys() & wanted.keys():
        distance = np.abs(made[name].astype("f8") - wanted[name]).max()
        if distance > tolerance * np.abs(wanted[name]).max():
            names.append(name)
    return names


def is_fast(case: tuple[str, str]) -> bool:
    kind, options = case
    return kind == "one-file" or options == "plain"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options"), slow_unless(is_fast, [(kind, options) for kind in WRITERS for options in OPTIONS])
)
def test_export__folds_an_adapter_as_peft_merges_it(tmp_path: Path, kind: str, options: str) -> None:
    model = model_of(options)
    checkpoint = WRITERS[kind](tmp_path, model)
    save_config(model, tmp_path if checkpoint.is_file() else checkpoint)
    tailor.export(checkpoint, tmp_path / "out", self_check="full")
    assert wrong(load_file(tmp_path / "out" / "model.safetensors"), merged_values(model)) == []


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_export__rounds_folded_weights_once_to_the_dtype_of_the_base(tmp_path: Path, dtype: str | None) -> None:
    model = adapted(dtype="bfloat16")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    checkpoint = write_dcp(tmp_path, model)
    tailor.export(checkpoint, tmp_path / "out", lora_alpha=12, dtype=dtype)
    made = load_file(tmp_path / "out" / "model.safetensors")
    wanted = merged_values(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert made[name].dtype == (dtype or "bfloat16")
    exact = torch.tensor(wanted[name])
    rounded = exact if dtype else exact.to(torch.bfloat16)
    assert np.abs(made[name].astype("f4") - rounded.float().numpy()).max() <= (1e-6 if dtype else 2e-3)


def test_export__makes_a_model_that_transformers_loads_without_missing_or_new_weights(tmp_path: Path) -> None:
    model = adapted()
    checkpoint = write_verl(tmp_path, model)
    (checkpoint / "huggingface").mkdir()
    model.base_model.model.config.save_pretrained(checkpoint / "huggingface")
    (checkpoint / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM"}))
    report = tailor.export(checkpoint, tmp_path / "out")
    ids = torch.arange(12)[None]
    wanted = model(ids).logits
    kind = transformers.LlamaForCausalLM
    loaded, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert (list(told["missing_keys"]), list(told["unexpected_keys"])) == ([], [])
    assert torch.allclose(loaded(ids).logits, wanted, atol=1e-5)
    assert any("lora_train_meta.json" in notice for notice in report.plan.notices)
    assert "adapter that was trained folded in" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("options", "is_given"), [("plain", False), ("dora", True), ("saved", True), ("tokens", True)])
def test_export__writes_an_adapter_that_peft_loads(tmp_path: Path, options: str, *, is_given: bool) -> None:
    model = model_of(options)
    checkpoint = write_one_file(tmp_path, model)
    settings: dict[str, Any] = {"lora_alpha": 12}
    if is_given:
        save_config(model, tmp_path / "settings")
        settings = {"adapter_config": tmp_path / "settings"}
    tailor.export(checkpoint, tmp_path / "out", adapter=True, **settings)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)
    loaded = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), tmp_path / "out").eval()
    ids = torch.arange(12)[None]
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-6)
    model.save_pretrained(tmp_path / "by-peft", save_embedding_layers=False)
    made, by_peft = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "by-peft"))
    assert wrong(made, by_peft, 0.0) == []


def test_average__averages_the_models_that_adapters_and_bases_make(tmp_path: Path) -> None:
    models = []
    for step in (1, 2):
        models.append(adapted(seed=step))
        torch.save({"model": state_of(models[-1]), "step": step}, tmp_path / f"step{step}.pt")
    paths = [tmp_path / "step1.pt", tmp_path / "step2.pt"]
    tailor.average(paths, tmp_path / "out", weights=(1, 3), lora_alpha=12, self_check="full")
    first, second = map(merged_values, models)
    wanted = {name: 0.25 * first[name].astype("f8") + 0.75 * second[name] for name in first}
    assert wrong(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []
    with pytest.raises(MergePipeError, match="which averages the models"):
        tailor.average(paths, tmp_path / "last", optimizer="last", lora_alpha=12)


def test_averager__folds_the_adapters_of_its_checkpoints(tmp_path: Path) -> None:
    models = []
    save_config(adapted(), tmp_path)
    with tailor.Averager(tmp_path / "out") as averager:
        for step in (1, 2):
            models.append(adapted(seed=step))
            torch.save({"model": state_of(models[-1]), "step": step}, tmp_path / f"step{step}.pt")
            averager.fold(tmp_path / f"step{step}.pt")
    first, second = map(merged_values, models)
    wanted = {name: 0.5 * first[name].astype("f8") + 0.5 * second[name] for name in first}
    assert wrong(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []


def refused(checkpoint: Path, out: Path, **options: Any) -> str:
    """Return the message of an export that is refused and leaves nothing behind."""
    with pytest.raises(MergePipeError) as caught:
        tailor.export(checkpoint, out, **options)
    assert not out.exists()
    return str(caught.value)


def test_export__refuses_an_adapter_of_unknown_scale(tmp_path: Path) -> None:
    message = refused(write_one_file(tmp_path, adapted()), tmp_path / "out")
    assert "'default'" in message
    assert "give adapter_config FILE, or lora_alpha NUMBER" in message


def test_export__refuses_an_adapter_without_its_base(tmp_path: Path) -> None:
    states = peft.get_peft_model_state_dict(adapted())
    torch.save(states, tmp_path / "adapter.pt")
    message = refused(tmp_path / "adapter.pt", tmp_path / "out", lora_alpha=12)
    assert "without its base" in message
    assert "lora apply" in message


def test_export__refuses_several_adapters(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    message = refused(write_one_file(tmp_path, model), tmp_path / "out", lora_alpha=12)
    assert "'default', 'other'" in message


def test_export__refuses_to_fold_into_a_quantised_base(tmp_path: Path) -> None:
    states = state_of(adapted())
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    states[name] = torch.zeros(512, 1, dtype=torch.uint8)
    torch.save(states, tmp_path / "last.pt")
    assert "quantised" in refused(tmp_path / "last.pt", tmp_path / "out", lora_alpha=12)


def test_export__refuses_factors_of_another_rank_than_the_configuration_says(tmp_path: Path) -> None:
    checkpoint = write_one_file(tmp_path, adapted())
    save_config(adapted(r=8), tmp_path)
    assert "the configured rank is 8" in refused(checkpoint, tmp_path / "out")


def test_export__refuses_two_scales_and_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    model = adapted()
    checkpoint = write_one_file(tmp_path, model)
    save_config(model, tmp_path)
    given = {"adapter_config": tmp_path / "adapter_config.json", "lora_alpha": 12}
    assert "leave out lora_alpha or adapter_config" in refused(checkpoint, tmp_path / "out", **given)
    torch.save(state_of(model.merge_and_unload()), tmp_path / "merged.pt")
    assert "has no adapter" in refused(tmp_path / "merged.pt", tmp_path / "out", adapter=True)


@pytest.mark.parametrize("is_shared", [True, False])
def test_export__refuses_an_adapter_of_one_of_tied_embedding_and_head(tmp_path: Path, *, is_shared: bool) -> None:
    """The two are one tensor in the file, or the configuration says that they are one in the model."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["embed_tokens"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings)
    torch.save(model.state_dict() if is_shared else state_of(model), tmp_path / "last.pt")
    if not is_shared:
        config.save_pretrained(tmp_path)
    message = refused(tmp_path / "last.pt", tmp_path / "out", lora_alpha=12)
    assert "embedding and head are tied" in message


def test_inspect__names_the_adapter(tmp_path: Path) -> None:
    checkpoint = write_dcp(tmp_path, adapted())
    (report,) = tailor.inspect(checkpoint).checkpoints
    assert report.adapter == "an adapter of PEFT 'default', 12 tensors, next to its base"


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_export__names_the_way_of_a_trainers_checkpoint_of_an_adapter_alone(
    tmp_path: Path, *, has_optimizer: bool
) -> None:
    """As the Trainer saves a model that PEFT has wrapped; `--adapter` writes what it holds."""
    model, folder = adapted(), tmp_path / "checkpoint-7"
    model.save_pretrained(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    if has_optimizer:
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    assert "mergepipe lora apply" in refused(folder, tmp_path / "out")
    (report,) = tailor.inspect(folder).checkpoints
    assert (report.step, report.adapter) == (7, "an adapter of PEFT, 12 tensors, without its base")
    tailor.export(folder, tmp_path / "out", adapter=True)
    made, stored = (load_file(place / "adapter_model.safetensors") for place in (tmp_path / "out", folder))
    assert wrong(made, stored, 0.0) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_export__folds_an_adapter_of_deepspeed_with_a_frozen_base(tmp_path: Path, stage: int) -> None:
    """The factors are the masters of the optimizer; the base is in the module's weights, or in fragments by rank."""
    model = adapted()
    arrays = {name: value.numpy() for name, value in state_of(model).items()}
    trained = {name: value for name, value in arrays.items() if "lora_" in name}
    frozen = {name: value for name, value in arrays.items() if name not in trained}
    known = KnownStates(
        {name: value.shape for name, value in trained.items()},
        {(name, kind): value for name, value in trained.items() for kind in ("fp32", "exp_avg", "exp_avg_sq")},
        7,
    )
    folder = tmp_path / "checkpoint-7"
    if stage == 3:
        write_zero3(folder, known, [[*trained]], 2, frozen=frozen)
    else:
        write_zero12(folder, known, [[*trained]], 2, buffers=frozen)
    save_config(model, folder)
    tailor.export(folder, tmp_path / "out", self_check="full")
    assert wrong(load_file(tmp_path / "out" / "model.safetensors"), merged_values(model)) == []
