"""Mixtures of experts built from dense models: the tensors are those of the experts, the recipes are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mergepipe import api
from mergepipe.errors import MergePipeError

HIDDEN, INNER, TOKENS, LAYERS = 8, 12, 16, 2
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": TOKENS, "torch_dtype": "float32",
}  # fmt: skip


def write_model(folder: Path, seed: int, *, inner: int = INNER, model_type: str = "llama") -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (TOKENS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.self_attn.{role}_proj.weight": (HIDDEN, HIDDEN) for role in "qkvo"}
        shapes |= {f"{place}.mlp.{role}_proj.weight": (inner, HIDDEN) for role in ("gate", "up")}
        shapes |= {f"{place}.mlp.down_proj.weight": (HIDDEN, inner)}
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type}))
    return tensors


@pytest.fixture
def models(tmp_path: Path) -> dict[str, dict[str, NDArray[Any]]]:
    return {name: write_model(tmp_path / name, seed) for seed, name in enumerate(("base", "a", "b"))}


def build(folder: Path, recipe: dict[str, Any], out: str = "out") -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    (folder / "recipe.yml").write_text(json.dumps(recipe))
    api.merge(folder / "recipe.yml", folder / out)
    return load_file(folder / out / "model.safetensors"), json.loads((folder / out / "config.json").read_text())


def recipe_of(**changes: Any) -> dict[str, Any]:
    experts = [{"source_model": "./a"}, {"source_model": "./b"}]
    return {"base_model": "./base", "gate_mode": "random", "experts": experts, **changes}


def test_mixtral__stacks_the_experts_and_takes_all_else_from_the_base(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]]
) -> None:
    made, config = build(tmp_path, recipe_of())
    for layer in range(LAYERS):
        place = f"model.layers.{layer}.mlp"
        gate_up = [
            np.concatenate([models[m][f"{place}.gate_proj.weight"], models[m][f"{place}.up_proj.weight"]]) for m in "ab"
        ]
        down = [models[m][f"{place}.down_proj.weight"] for m in "ab"]
        np.testing.assert_array_equal(made.pop(f"{place}.experts.gate_up_proj"), np.stack(gate_up))
        np.testing.assert_array_equal(made.pop(f"{place}.experts.down_proj"), np.stack(down))
        assert made.pop(f"{place}.gate.weight").shape == (2, HIDDEN)
    assert made.keys() == {name for name in models["base"] if ".mlp." not in name}
    for name, values in made.items():
        np.testing.assert_array_equal(values, models["base"][name])
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 2, 2)
    assert config["rms_norm_eps"] == 1e-6  # Llama's default; Mixtral's is another


def test_deepseek__keeps_experts_and_the_shared_one_apart(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]]
) -> None:
    made, config = build(tmp_path, recipe_of(shared_experts=[{"source_model": "./base"}], dtype="float16"))
    place = "model.layers.1.mlp"
    for module, model in (("experts.0", "a"), ("experts.1", "b"), ("shared_experts", "base")):
        expected = models[model][f"{place}.up_proj.weight"].astype(np.float16)
        np.testing.assert_array_equal(made[f"{place}.{module}.up_proj.weight"], expected)
    assert (config["model_type"], config["n_shared_experts"], config["torch_dtype"]) == ("deepseek", 1, "float16")


def test_qwen__gets_zero_biases_and_a_gate_of_the_shared_expert(
    tmp_path: Path,
    models: dict[str, dict[str, NDArray[Any]]],  # noqa: ARG001 - written
) -> None:
    made, config = build(tmp_path, recipe_of(shared_experts=[{"source_model": "./base"}], architecture="qwen"))
    assert not made["model.layers.0.self_attn.q_proj.bias"].any()
    assert made["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, HIDDEN)
    assert config["shared_expert_intermediate_size"] == INNER


@pytest.mark.usefixtures("models")
def test_random_routers__follow_the_seed_and_the_layer(tmp_path: Path) -> None:
    gates = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"]
    made = [build(tmp_path, recipe_of(seed=seed), f"out{index}")[0] for index, seed in enumerate((1, 1, 2))]
    first, again, other = ([tensors[name] for name in gates] for tensors in made)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, other)
    bounded = build(tmp_path, recipe_of(gate_mode="uniform_random"), "bounded")[0][gates[0]]
    assert np.abs(bounded).max() <= HIDDEN**-0.5


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"gate_mode": "randm"}, "recipe.unknown-name", "unknown gate mode 'randm'; did you mean 'random'?"),
        ({"gate_mode": "hidden"}, "recipe.incomplete", "the expert has no positive_prompts"),
        ({"experts": [{"source_model": "./a"}]}, "recipe.value", "1 experts, and 2 answer each token"),
        ({"experts": [{"source_model": "./a"}, {}]}, "recipe.incomplete", "the expert has no source_model"),
        ({"experts": [{"source_model": "./a"}, {"source_model": "./wide"}]}, "model.mismatch", "'./wide' has shape"),
        ({"base_model": "./gpt"}, "recipe.unsupported", "no mixture is made of gpt2, llama"),
        ({"seed": -1}, "recipe.value", "a whole number from 0 on"),
    ],
)  # fmt: skip
def test_mixtures__that_cannot_be_built_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], code: str, text: str
) -> None:
    write_model(tmp_path / "wide", 3, inner=INNER + 4)
    write_model(tmp_path / "gpt", 4, model_type="gpt2")
    with pytest.raises(MergePipeError) as caught:
        build(tmp_path, recipe_of(**changes))
    assert (caught.value.code, text in str(caught.value)) == (code, True), str(caught.value)
    assert not (tmp_path / "out").exists()
