"""`transformers` loads what a merge wrote, and computes with it what a merge in memory would have given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from support.late_modules import torch, transformers
from support.oracle import order_of_ranks

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

WEIGHTS = (0.7, 0.5)
DENSITY = 0.4
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
HEADERS = {
    "linear": "merge_method: linear\nmodels:\n  - {model: base, parameters: {weight: 0.2}}\n",
    "ties": f"merge_method: ties\nbase_model: base\nparameters: {{density: {DENSITY}, normalize: true}}\nmodels:\n",
}

os.environ["HF_HUB_OFFLINE"] = "1"


State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """A base and two experts as `save_pretrained` leaves them, in bf16."""

    root: Path
    tied: bool

    def state(self, name: str) -> State:
        """The stored tensors of one model."""
        from safetensors.torch import load_file

        return dict(load_file(self.root / name / "model.safetensors"))

    def recipe(self, operator: str) -> Path:
        """Write a recipe for both experts."""
        models = "".join(f"  - {{model: expert-{i}, parameters: {{weight: {w}}}}}\n" for i, w in enumerate(WEIGHTS))
        path = self.root / f"{operator}.yml"
        path.write_text(f"{HEADERS[operator]}{models}dtype: bfloat16\n", encoding="utf-8")
        return path


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="module", params=[llama, qwen3], ids=lambda make: make.__name__)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    make: Callable[[], Any] = request.param
    root = tmp_path_factory.mktemp(make.__name__)
    torch.manual_seed(5)
    model = make()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(root / "base")
    for i in range(len(WEIGHTS)):
        expert = make()
        expert.load_state_dict(start)
        with torch.no_grad():
            for parameter in expert.parameters():  # a tied embedding is one parameter, and moves once
                parameter.add_(torch.randn_like(parameter) * 0.02)
        expert.to(torch.bfloat16).save_pretrained(root / f"expert-{i}")
    return Saved(root, bool(model.config.tie_word_embeddings))


def merged_linear(base: Any, experts: list[Any]) -> Any:
    weights = (0.2, *WEIGHTS)
    return sum(w * model for w, model in zip(weights, (base, *experts), strict=True)) / sum(weights)


def merged_ties(base: Any, experts: list[Any]) -> Any:
    trimmed = [trim(expert - base) * weight for expert, weight in zip(experts, WEIGHTS, strict=True)]
    stacked = torch.stack(trimmed)
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agrees = (stacked.sign() == sign) & (stacked != 0)
    shares = torch.tensor(WEIGHTS).reshape(-1, *[1] * base.dim())
    divisor = (agrees * shares).sum(0)
    return base + (stacked * agrees).sum(0) / torch.where(divisor == 0, 1.0, divisor)


def trim(delta: Any) -> Any:
    """The largest `DENSITY` of a tensor; of equal ones those that come first by the hash of their place."""
    kept = torch.from_numpy(order_of_ranks(delta.flatten().numpy())[: int(DENSITY * delta.numel())])
    return torch.zeros_like(delta).flatten().index_copy(0, kept, delta.flatten()[kept]).reshape(delta.shape)


MERGED_IN_MEMORY = {"linear": merged_linear, "ties": merged_ties}


def merge_in_memory(saved: Saved, operator: str) -> State:
    """The same merge by whole tensors in float32, rounded to bf16 once."""
    base, *experts = (saved.state(name) for name in ("base", *(f"expert-{i}" for i in range(len(WEIGHTS)))))
    merge = MERGED_IN_MEMORY[operator]
    return {
        name: merge(base[name].float(), [expert[name].float() for expert in experts]).to(torch.bfloat16)
        for name in base
    }


def logits(model: Any) -> Any:
    tokens = torch.arange(24).reshape(2, 12) * 13 % SIZES["vocab_size"]
    with torch.no_grad():
        return model.eval().float()(tokens).logits


@pytest.mark.thorough
@pytest.mark.parametrize("operator", ["linear", "ties"])
def test_merge__transformers_loads_the_output_and_computes_the_same(
    saved: Saved, operator: str, tmp_path: Path
) -> None:
    mergepipe.merge(saved.recipe(operator), tmp_path / "out", shard_bytes=50_000)
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {key: value for key, value in notes.items() if value} == {}
    assert loaded.dtype == torch.bfloat16
    expected_state = merge_in_memory(saved, operator)
    loaded_state = loaded.state_dict()
    for name, tensor in expected_state.items():
        torch.testing.assert_close(loaded_state[name], tensor, rtol=2**-7, atol=1e-6, msg=lambda text, n=name: n + text)

    reference = transformers.AutoModelForCausalLM.from_pretrained(saved.root / "base")
    before = logits(reference)
    reference.load_state_dict(expected_state, strict=False)
    reference.tie_weights()
    expected, found = logits(reference), logits(loaded)
    merging_changed = (expected - before).norm()
    assert merging_changed > 0
    assert (found - expected).norm() <= 0.02 * merging_changed


@pytest.mark.thorough
@pytest.mark.parametrize("operator", ["linear", "ties"])
def test_load_model__is_what_transformers_loads_of_the_written_merge(
    saved: Saved, operator: str, tmp_path: Path
) -> None:
    recipe = saved.recipe(operator)
    mergepipe.merge(recipe, tmp_path / "out")
    model = mergepipe.load_model(recipe)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is type(written)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is saved.tied
    wanted = written.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert model.generation_config.to_dict() == written.generation_config.to_dict()
    assert torch.equal(logits(model), logits(written))
    assert mergepipe.load_model(recipe, torch_dtype=torch.float32).dtype == torch.float32
    assert model.name_or_path == model.config.name_or_path == ""


def test_merge__tied_embeddings_are_stored_once_and_stay_tied(saved: Saved, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    mergepipe.merge(saved.recipe("ties"), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == saved.state("base").keys()
    assert ("lm_head.weight" in stored) is not saved.tied
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    is_tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert is_tied is saved.tied


def test_transformers__load_a_packed_expert_as_its_original(saved: Saved, tmp_path: Path) -> None:
    mergepipe.pack(saved.root / "base", [saved.root / "expert-0"], tmp_path)
    store = tmp_path / "expert-0"
    tensors = mergepipe.load_file(store, framework="torch")
    config = transformers.AutoConfig.from_pretrained(store)  # every file but the weights lies there as it was
    architecture = getattr(transformers, config.architectures[0])
    model = architecture.from_pretrained(None, config=config, state_dict=tensors, dtype="auto")
    original = architecture.from_pretrained(saved.root / "expert-0", dtype="auto")
    wanted = original.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.state_dict().values())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), logits(original))
