"""`lora apply` gives what PEFT's `merge_and_unload` gives in float32, and the logits of the adapter before it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MismatchError, UnsupportedError
from support.late_modules import torch
from support.model_folders import write_adapter
from support.peft_models import (
    CASES,
    COMMON,
    EXPERTS,
    Case,
    base_of,
    gpt_oss,
    loaded,
    logits,
    peft,
    trained,
)

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft extra"),
]


EMBEDDINGS = ("embed_tokens", "wte", "lm_head")


def applied(base: Path, adapter: Path, out: Path, **options: Any) -> mergepipe.MergeReport:
    return mergepipe.apply_lora(base, [adapter], out, catalog=False, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_lora_apply__equals_peft_and_lora_check_says_so_of_both(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    base = base_of(tmp_path, case.model)
    adapted = trained(base, tmp_path / "adapter", case)
    report = applied(base, tmp_path / "adapter", tmp_path / "out")
    (account,) = report.adapters
    assert (account.applied_modules, account.left_over) == (account.adapted_modules, ())
    expected, mine = logits(adapted), loaded(tmp_path / "out")
    assert (expected - logits(loaded(base))).abs().max() > 1e-4
    torch.testing.assert_close(logits(mine), expected, rtol=1e-4, atol=2e-5)
    assert mergepipe.check_lora(base, tmp_path / "adapter", tmp_path / "out").is_applied
    absent = mergepipe.check_lora(base, tmp_path / "adapter", base)
    assert {str(tensor.verdict) for tensor in absent.tensors} <= {"not applied", "cannot be told"}
    assert (absent.is_applied, absent.others) == (False, ())
    theirs = adapted.merge_and_unload(safe_merge=True)
    theirs.save_pretrained(tmp_path / "peft")
    checked = mergepipe.check_lora(base, tmp_path / "adapter", tmp_path / "peft")
    assert {str(tensor.verdict) for tensor in checked.tensors} <= {"applied", "cannot be told"}
    assert checked.is_applied is not case.is_split
    assert [other.detail.partition("; ")[0] for other in checked.others] == [
        f"that of {tensor.name}" for tensor in checked.tensors if case.is_split and tensor.kind in EMBEDDINGS
    ]
    if not case.is_split:
        merged = theirs.state_dict()
        for key, values in mine.state_dict().items():
            torch.testing.assert_close(
                values, merged[key], rtol=1e-5, atol=2e-6, msg=lambda text, k=key: f"{k}: {text}"
            )


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_lora_apply__takes_an_embedding_that_was_resized_in_training(tmp_path: Path, name: str) -> None:
    base, adapter = base_of(tmp_path, name), tmp_path / "adapter"
    model = loaded(base)
    model.resize_token_embeddings(72)
    saved = ["embed_tokens", *(["lm_head"] if name == "llama" else [])]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(adapter)  # with copies of the embedding under the names that PEFT has inside
    (adapter / "tokenizer_config.json").write_text('{"added": true}')
    applied(base, adapter, tmp_path / "out")
    mine = loaded(tmp_path / "out")
    assert mine.config.vocab_size == 72
    torch.testing.assert_close(logits(mine), logits(adapted.eval()), rtol=1e-4, atol=2e-5)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"added": True}
    path = adapter / "adapter_model.safetensors"
    save_file({key: values for key, values in load_file(path).items() if "lm_head" not in key}, path)
    if name == "llama":
        with pytest.raises(MismatchError, match=r"rows than the base: 'lm_head\.weight' has 64"):
            applied(base, adapter, tmp_path / "more")


def test_lora_apply__of_adalora_takes_the_directions_that_were_kept(tmp_path: Path) -> None:
    base, adapter = base_of(tmp_path, "llama"), tmp_path / "adapter"
    case = Case("llama", {"init_r": 6, "target_r": 3, "total_step": 100}, kind="AdaLoraConfig")
    adapted = trained(base, adapter, case)
    values = [name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_E" in name]
    kept = {name.removeprefix("base_model.model."): [True] * 6 for name in values}
    kept["model.layers.0.self_attn.q_proj.lora_E"] = [True, False, False, True, False, True]
    adapted.peft_config["default"].rank_pattern = kept
    adapted.save_pretrained(adapter, save_embedding_layers=False)
    theirs = peft.PeftModel.from_pretrained(loaded(base), adapter).eval()
    applied(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(theirs), rtol=1e-4, atol=2e-5)
    mergepipe.merge_lora([adapter, adapter], tmp_path / "twice", weights=(0.25, 0.75), catalog=False)
    once = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "twice").eval()
    torch.testing.assert_close(logits(once), logits(theirs), rtol=1e-4, atol=2e-5)


def test_lora_apply__names_the_way_from_another_kind_to_lora(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    model = peft.get_peft_model(loaded(base), peft.VeraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=r"'VERA'.*convert it to LoRA by `peft\.save_as_lora`"):
        applied(base, tmp_path / "adapter", tmp_path / "out")


def trained_after_resizing(base: Path, adapter: Path, rows: int, options: Mapping[str, Any]) -> Any:
    """Save an adapter of a model whose embedding was resized before training."""
    model = loaded(base)
    model.resize_token_embeddings(rows)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(adapter)
    return adapted.eval()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("llama", 72, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        ("llama", 50, {"target_modules": ["embed_tokens", "lm_head"]}),
        ("llama", 72, {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
        ("llama-tied", 72, {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama-tied", 67, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 66]}),
        ("llama", 67, {"trainable_token_indices": {"embed_tokens": [3, 66], "lm_head": [64]}}),
    ],
)
def test_lora_apply__adds_to_an_embedding_that_was_resized_before_training(
    tmp_path: Path, name: str, rows: int, options: Mapping[str, Any]
) -> None:
    base, adapter = base_of(tmp_path, name), tmp_path / "adapter"
    adapted = trained_after_resizing(base, adapter, rows, options)
    applied(base, adapter, tmp_path / "out")
    mine = loaded(tmp_path / "out")
    assert mine.config.vocab_size == rows
    torch.testing.assert_close(logits(mine), logits(adapted), rtol=1e-4, atol=2e-5)


def test_lora_apply__adds_trained_rows_to_a_table_that_is_not_stored(tmp_path: Path) -> None:
    base, adapter = base_of(tmp_path, "llama-tied"), tmp_path / "adapter"
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 64, 65, 66]}
    adapted = trained_after_resizing(base, adapter, 67, options)
    adapted.save_pretrained(adapter, save_embedding_layers=False)
    applied(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(adapted), rtol=1e-4, atol=2e-5)


def test_lora_apply__refuses_rows_that_an_adapter_neither_trains_nor_stores(tmp_path: Path) -> None:
    base, adapter = base_of(tmp_path, "llama-tied"), tmp_path / "adapter"
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [66]}
    adapted = trained_after_resizing(base, adapter, 67, options)
    adapted.save_pretrained(adapter, save_embedding_layers=False)
    with pytest.raises(MismatchError, match=r"trains row 66 of .*, the base has 64 rows.*row 64 is stored nowhere"):
        applied(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("is_dora", [False, True])
def test_lora_apply__needs_the_resized_base_where_an_adapter_stores_the_head_alone(
    tmp_path: Path, is_dora: bool
) -> None:
    """The added rows of the embedding are stored nowhere: PEFT does not load such an adapter into the base either."""
    base, adapter = base_of(tmp_path, "llama"), tmp_path / "adapter"
    adapted = trained_after_resizing(base, adapter, 72, {"target_modules": ["q_proj", "lm_head"], "use_dora": is_dora})
    with pytest.raises(RuntimeError, match=r"size mismatch for base_model\.model\.lm_head"):
        peft.PeftModel.from_pretrained(loaded(base), adapter)
    with pytest.raises(MismatchError, match=r"'model\.embed_tokens\.weight' has 64.*resize the base as it was"):
        applied(base, adapter, tmp_path / "out")
    adapted.unload().save_pretrained(tmp_path / "resized")
    applied(tmp_path / "resized", adapter, tmp_path / "out")
    mine = logits(loaded(tmp_path / "out"))
    theirs = peft.PeftModel.from_pretrained(loaded(tmp_path / "resized"), adapter).eval()
    torch.testing.assert_close(mine, logits(theirs), rtol=1e-4, atol=2e-5)


def test_lora_apply__takes_a_base_whose_layers_are_repeated_as_in_training(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    adapted = trained(base, tmp_path / "adapter", Case("llama", {"layer_replication": [[0, 2], [1, 2]]}))
    slices = [{"sources": [{"model": str(base), "layer_range": ends}]} for ends in ([0, 2], [1, 2])]
    recipe = {"merge_method": "passthrough", "slices": slices}
    mergepipe.merge(recipe, tmp_path / "repeated", catalog=False)
    applied(tmp_path / "repeated", tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(adapted), rtol=1e-4, atol=2e-5)
    with pytest.raises(MismatchError, match=r"slices of layer_range \[0, 2\], \[1, 2\] by passthrough"):
        applied(base, tmp_path / "adapter", tmp_path / "more")


MERGED = (
    "plain", "loha", "rank-pattern", "rslora", "lora-bias", "embedding", "gpt2", "parameter", "experts-rank",
    "experts-by-last-name", "mixtral-by-last-name",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", MERGED)
def test_lora_merge__is_loaded_by_peft_and_is_the_model_with_both(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    base = base_of(tmp_path, case.model)
    first = trained(base, tmp_path / "a", case)
    second = tmp_path / "b"
    trained(base, second, replace(case, options={**case.options, case.alpha: 3}))
    mergepipe.merge_lora([tmp_path / "a", second], tmp_path / "merged", weights=(0.5, 0.75))
    mergepipe.apply_lora(base, [tmp_path / "a", second], tmp_path / "out", weights=(0.5, 0.75), catalog=False)
    model = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "merged").eval()
    assert (logits(model) - logits(first)).abs().max() > 1e-4
    torch.testing.assert_close(logits(model), logits(loaded(tmp_path / "out")), rtol=1e-4, atol=2e-5)


def changes(model: Any, base: Path) -> dict[str, Any]:
    """What a model with an adapter adds to the weights of its base, in float64."""
    weights = loaded(base).double().state_dict()
    merged = model.double().merge_and_unload().state_dict()
    return {name: (merged[name] - weights[name]).numpy() for name in weights}


def distance(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """The norm of the difference, relative to that of `others`."""
    squares = sum(float(np.sum((tensors[name] - others[name]) ** 2)) for name in others)
    return float(np.sqrt(squares / sum(float(np.sum(values**2)) for values in others.values())))


@pytest.mark.parametrize(
    ("options", "off"),
    [
        ({"use_rslora": True, "r": 16}, 4.66),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.*down_proj": 3, "q_proj": 12}}, 0.0),
        ({"use_dora": True, "r": 16}, None),
    ],
    ids=["rslora", "patterns", "dora"],
)
def test_lora_merge__is_the_sum_of_the_deltas_where_add_weighted_adapter_is_another(
    tmp_path: Path, options: Mapping[str, Any], off: float | None
) -> None:
    """The figures that the guide states: PEFT scales an rsLoRA again, and leaves the magnitudes of a DoRA out."""
    base = base_of(tmp_path, "llama")
    adapters = [tmp_path / "a", tmp_path / "b"]
    for adapter, alpha in zip(adapters, (16, 8), strict=True):
        trained(base, adapter, Case("llama", {**options, "lora_alpha": alpha}))
    first, second = (changes(peft.PeftModel.from_pretrained(loaded(base), adapter), base) for adapter in adapters)
    total = {name: 0.7 * first[name] + 0.3 * second[name] for name in first}
    theirs = peft.PeftModel.from_pretrained(loaded(base), adapters[0], adapter_name="a")
    theirs.load_adapter(adapters[1], "b")
    theirs.add_weighted_adapter(["a", "b"], [0.7, 0.3], "both", combination_type="cat")
    theirs.set_adapter("both")
    error_of_peft = distance(changes(theirs, base), total)
    if off is None:
        assert error_of_peft > 0.3
        with pytest.raises(UnsupportedError, match="is DoRA, whose delta depends on the norms of the base"):
            mergepipe.merge_lora(adapters, tmp_path / "both", weights=(0.7, 0.3), catalog=False)
        mergepipe.apply_lora(base, adapters, tmp_path / "out", weights=(0.7, 0.3), catalog=False)
        weights = loaded(base).double().state_dict()
        merged = loaded(tmp_path / "out").double().state_dict()
        mine = {name: (merged[name] - weights[name]).numpy() for name in weights}
        assert distance(mine, total) < 1e-5
        return
    mergepipe.merge_lora(adapters, tmp_path / "both", weights=(0.7, 0.3), catalog=False)
    mine = changes(peft.PeftModel.from_pretrained(loaded(base), tmp_path / "both"), base)
    assert distance(mine, total) < 1e-6
    assert abs(error_of_peft - off) < 0.01


@pytest.mark.parametrize(("name", "words"), [("lokr", "LOKR: its delta is a Kronecker product"), ("ia3", "IA3")])
def test_lora_merge__refuses_what_has_no_factors_of_its_own(tmp_path: Path, name: str, words: str) -> None:
    trained(base_of(tmp_path, "llama"), tmp_path / "a", CASES[name])
    with pytest.raises(UnsupportedError, match=f"it is {words}.*and extract a LoRA"):
        mergepipe.merge_lora([tmp_path / "a"], tmp_path / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_extract_lora__biases_norms_and_embeddings_reach_the_model_that_peft_loads(tmp_path: Path, name: str) -> None:
    base = base_of(tmp_path, name)
    model = loaded(base)
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if key.endswith(("bias", "embed_tokens.weight")) or "0.mlp" in key or "ln_1" in key:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "tuned")
    report = mergepipe.extract_lora(base, tmp_path / "tuned", tmp_path / "lora", energy=1.0, save_modules=True)
    assert (report.left, any(saved.endswith(".bias") for saved in report.saved_modules)) == ((), True)
    adapted = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "lora").eval()
    torch.testing.assert_close(logits(adapted), logits(model), rtol=1e-4, atol=2e-5)
    applied(base, tmp_path / "lora", tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(model), rtol=1e-4, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("changed", ["experts", "gate_up_proj", "1.mlp.experts.down_proj"])
def test_extract_lora__stacked_experts_reach_the_model_that_peft_loads(tmp_path: Path, name: str, changed: str) -> None:
    """PEFT nests the parameters of one module: their names depend on which of them are adapted."""
    base = base_of(tmp_path, name, None if name == "gpt-oss" else fused)
    tensors = load_file(base / "model.safetensors")
    stacks = [key for key in tensors if changed in key and key.endswith(("gate_up_proj", "down_proj"))]
    rng = np.random.default_rng(0)
    for key in stacks:
        tensors[key] = tensors[key] + 0.1 * rng.standard_normal(tensors[key].shape).astype(np.float32)
    shutil.copytree(base, tmp_path / "tuned")
    save_file(tensors, tmp_path / "tuned" / "model.safetensors")
    report = mergepipe.extract_lora(base, tmp_path / "tuned", tmp_path / "lora", energy=1.0)
    assert (sorted(tensor.name for tensor in report.tensors), report.left) == (sorted(stacks), ())
    assert report.relative_error < 1e-5
    adapted = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "lora").eval()
    tuned = logits(loaded(tmp_path / "tuned"))
    assert (logits(loaded(base)) - tuned).abs().max() > 1e-3
    torch.testing.assert_close(logits(adapted), tuned, rtol=1e-4, atol=2e-5)
    applied(base, tmp_path / "lora", tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), tuned, rtol=1e-4, atol=2e-5)


# --- what servers make of an adapter that is written ---


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["cat", "svd", "extract"])
def test_written_adapters__follow_the_conventions_of_vllm(tmp_path: Path, method: str) -> None:
    """It knows one scale, `lora_alpha / r` or that of rsLoRA, and no patterns; names of modules and two factors."""
    case = CASES["rank-pattern"]
    base, out = base_of(tmp_path, case.model), tmp_path / "written"
    trained(base, tmp_path / "a", case)
    if method == "extract":
        applied(base, tmp_path / "a", tmp_path / "tuned")
        mergepipe.extract_lora(base, tmp_path / "tuned", out, energy=0.9)
    else:
        mergepipe.merge_lora([tmp_path / "a"], out, method=method, rank=3 if method == "svd" else None)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["modules_to_save"], config["use_dora"], config["use_rslora"]) == (None, False, False)
    leaves = {target.rpartition(".")[2] for target in config["target_modules"]}
    factors = load_file(out / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in factors}
    assert set(factors) == {f"base_model.model.{m}.{part}.weight" for m in modules for part in ("lora_A", "lora_B")}
    assert {module.rpartition(".")[2] for module in modules} == leaves == set(case.targets)
    weights, changed = load_file(base / "model.safetensors"), peft.PeftModel.from_pretrained(loaded(base), out)
    merged = changed.merge_and_unload().state_dict()
    for module in modules:
        down, up = (factors[f"base_model.model.{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
        assert down.shape[0] <= config["r"]
        served = weights[f"{module}.weight"] + config["lora_alpha"] / config["r"] * (up @ down)
        np.testing.assert_allclose(served, merged[f"{module}.weight"].numpy(), rtol=1e-4, atol=1e-6)


# --- shapes of bugs that were found in other tools, where deltas went missing and nobody was told ---


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Store the experts of every layer in two tensors, as the model has them in memory."""
    made = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(COMMON["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp.experts"
        role = {
            role: np.stack([tensors[f"{stem}.{expert}.{role}.weight"] for expert in range(4)])
            for role in ("gate_proj", "up_proj", "down_proj")
        }
        made[f"{stem}.gate_up_proj"] = np.concatenate([role["gate_proj"], role["up_proj"]], axis=1)
        made[f"{stem}.down_proj"] = role["down_proj"]
    return made


def in_old_layout(adapter: Path) -> None:
    """Store the factors of experts as PEFT before 0.19 does: their first dimension is taken for the inputs."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    n_experts, rank = 4, 4
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        up_ERM = up.reshape(-1, rank, n_experts).transpose(2, 1, 0)
        tensors[name] = np.ascontiguousarray(up_ERM.reshape(n_experts * rank, -1))
        down_NRE = down.reshape(n_experts, rank, -1).transpose(2, 1, 0)
        tensors[name.replace("lora_A", "lora_B")] = np.ascontiguousarray(down_NRE.reshape(-1, rank * n_experts))
    save_file(tensors, path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "is_fused"), [("qwen3-moe", False), ("qwen3-moe", True), ("mixtral", False)],
    ids=["single-experts-on-disk", "fused-on-disk", "mixtral"],
)  # fmt: skip
@pytest.mark.parametrize("is_old", [False, True], ids=["peft-0.19", "peft-0.18"])
def test_lora_apply__drops_no_expert_in_either_layout_of_peft_and_of_the_base(
    tmp_path: Path, model: str, *, is_fused: bool, is_old: bool
) -> None:
    """unsloth-zoo 647, 812: the layout of the factors, and the names of Mixtral's files, were not known."""
    base = base_of(tmp_path, model, fused if is_fused else None)
    adapted = trained(base, tmp_path / "adapter", Case(model, {"target_parameters": EXPERTS}, ("q_proj",)))
    if is_old:
        in_old_layout(tmp_path / "adapter")
    applied(base, tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(adapted), rtol=1e-4, atol=2e-5)


def test_lora_apply__adds_to_the_numbers_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """The adapter was trained on the numbers that transformers makes of the codes, as float32."""
    mxfp4, stored = (pytest.importorskip(name) for name in ("transformers.integrations.mxfp4", "safetensors.torch"))
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    torch.manual_seed(0)
    gpt_oss(32, hidden_size=64).save_pretrained(plain)
    tensors = stored.load_file(plain / "model.safetensors")
    codes: dict[str, Any] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    shutil.copytree(plain, coded)
    stored.save_file(tensors, plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in codes}
    stored.save_file(kept | codes, coded / "model.safetensors")
    adapted = trained(plain, tmp_path / "adapter", CASES["gpt-oss"])
    applied(coded, tmp_path / "adapter", tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(adapted), rtol=1e-4, atol=2e-5)


def test_lora_apply__folds_adapters_of_single_experts_into_fused_ones(tmp_path: Path) -> None:
    """unsloth-zoo 885: adapters of single experts did not match the fused tensor, and were skipped."""
    base = base_of(tmp_path, "qwen3-moe")
    path = base / "model.safetensors"
    start = load_file(path)
    stem = "model.layers.1.mlp.experts.2"
    rng, factors = np.random.default_rng(0), {}
    for role in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = start[f"{stem}.{role}.weight"].shape
        name = f"{stem}.{role}"
        factors[f"{name}.lora_A.weight"] = rng.standard_normal((4, columns)).astype(np.float32)
        factors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, 4)).astype(np.float32)
    adapter = write_adapter(tmp_path / "adapter", factors)
    applied(base, adapter, tmp_path / "single")
    save_file({key: np.ascontiguousarray(value) for key, value in fused(start).items()}, path)
    applied(base, adapter, tmp_path / "fused")
    expected = fused(load_file(tmp_path / "single" / "model.safetensors"))
    made = load_file(tmp_path / "fused" / "model.safetensors")
    changed = "model.layers.1.mlp.experts.down_proj"
    assert not np.array_equal(made[changed], fused(start)[changed])
    for key, values in expected.items():
        np.testing.assert_array_equal(made[key], values)


def test_lora_apply__refuses_what_would_fall_back_to_the_weights_of_the_base(tmp_path: Path) -> None:
    """vllm 41384: deltas that did not fit were left out, and the merge succeeded."""
    base = base_of(tmp_path, "qwen3-moe")
    trained(base, tmp_path / "adapter", Case("qwen3-moe", {"target_parameters": EXPERTS}, ("q_proj",)))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    wrong = {
        name: np.ascontiguousarray(t[:, :-1]) if "experts.lora_A" in name else t for name, t in load_file(path).items()
    }
    save_file(wrong, path)
    with pytest.raises(MismatchError, match=r"factors of 'model.layers.0.mlp.experts' make .* the base has"):
        applied(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lora_apply__names_what_is_left_over_where_that_is_allowed(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    trained(base, tmp_path / "adapter", Case("llama"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.7"): values for name, values in load_file(path).items()}, path)
    with pytest.raises(MismatchError, match=r"'model.layers.7.*' has no counterpart in the base.*did you mean"):
        applied(base, tmp_path / "adapter", tmp_path / "out")
    report = applied(base, tmp_path / "adapter", tmp_path / "out", allow_unapplied=["model.layers.7.*"])
    (account,) = report.adapters
    assert (account.adapted_modules, account.applied_modules, len(account.left_over)) == (4, 2, 2)
    assert report.dropped_tensors == 2


# --- names of the modules that a merged adapter adapts ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second", "targets"),
    [
        (Case("llama"), Case("llama", targets=("q_proj", "v_proj")), ["down_proj", "q_proj", "v_proj"]),
        (
            Case("llama", {"layers_to_transform": [1]}),
            Case("llama", targets=("v_proj",)),
            ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj", "v_proj"],
        ),
        (
            Case("llama", {"target_modules": r".*\.0\.self_attn\.(q|k)_proj"}),
            Case("llama", targets=("k_proj",)),
            ["k_proj", "model.layers.0.self_attn.q_proj"],
        ),
        (Case("gpt2", {"fan_in_fan_out": True}, ("attn.c_proj",)), Case("gpt2", {"fan_in_fan_out": True}, ("c_fc",)),
         ["attn.c_proj", "c_fc"]),
    ],
    ids=["ends", "some-layers", "pattern", "longer-ends"],
)  # fmt: skip
def test_merge_lora__names_modules_by_their_ends_where_peft_adapts_exactly_these(
    tmp_path: Path, first: Case, second: Case, targets: list[str]
) -> None:
    base = base_of(tmp_path, first.model)
    for name, case in (("a", first), ("b", second)):
        trained(base, tmp_path / name, case)
    mergepipe.merge_lora([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["target_modules"] == targets
    adapted = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "both")
    start, merged = loaded(base).state_dict(), adapted.merge_and_unload().state_dict()
    alone = [
        peft.PeftModel.from_pretrained(loaded(base), tmp_path / name).merge_and_unload().state_dict() for name in "ab"
    ]
    for name, weights in start.items():
        expected = weights + sum(one[name] - weights for one in alone)
        torch.testing.assert_close(merged[name], expected, rtol=1e-4, atol=1e-5)
    mergepipe.apply_lora(base, [tmp_path / "both"], tmp_path / "out")
    torch.testing.assert_close(loaded(tmp_path / "out").state_dict(), merged, rtol=1e-4, atol=1e-5)


def test_merge_lora__of_extracted_adapters_is_what_peft_reads(tmp_path: Path) -> None:
    """Both differences from the base are in it: of layer 1 in one adapter, of all layers in the other."""
    base = base_of(tmp_path, "llama")
    for name, case in (("a", Case("llama", {"layers_to_transform": [1]})), ("b", Case("llama", targets=("v_proj",)))):
        trained(base, tmp_path / name, case)
        applied(base, tmp_path / name, tmp_path / f"tuned-{name}")
        report = mergepipe.extract_lora(base, tmp_path / f"tuned-{name}", tmp_path / f"lora-{name}", energy=1.0)
        assert report.relative_error < 1e-4
    mergepipe.merge_lora([tmp_path / "lora-a", tmp_path / "lora-b"], tmp_path / "both", method="svd", rank=32)
    adapted = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "both").merge_and_unload().state_dict()
    start, *tuned = (loaded(tmp_path / name).state_dict() for name in (base.name, "tuned-a", "tuned-b"))
    for name, weights in start.items():
        expected = weights + sum(one[name] - weights for one in tuned)
        torch.testing.assert_close(adapted[name], expected, rtol=1e-3, atol=1e-5)
