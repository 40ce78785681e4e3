"""Mixtures of experts built from dense models: the tensors are those of the experts, the recipes are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, RecipeError
from support.command_line import Runner
from support.model_folders import write_adapter, write_model
from support.refusals import refuses

HIDDEN, INNER, TOKENS, LAYERS = 8, 12, 16, 2
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": TOKENS, "torch_dtype": "float32",
}  # fmt: skip


def write_dense(folder: Path, seed: int, *, inner: int = INNER, model_type: str = "llama") -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (TOKENS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.self_attn.{role}_proj.weight": (HIDDEN, HIDDEN) for role in "qkvo"}
        shapes |= {f"{place}.mlp.{role}_proj.weight": (inner, HIDDEN) for role in ("gate", "up")}
        shapes |= {f"{place}.mlp.down_proj.weight": (HIDDEN, inner)}
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    write_model(folder, tensors, {**CONFIG, "model_type": model_type})
    return tensors


@pytest.fixture
def models(tmp_path: Path) -> dict[str, dict[str, NDArray[Any]]]:
    return {name: write_dense(tmp_path / name, seed) for seed, name in enumerate(("base", "a", "b"))}


def build(folder: Path, recipe: dict[str, Any], out: str = "out") -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    (folder / "recipe.yml").write_text(json.dumps(recipe))
    mergepipe.merge(folder / "recipe.yml", folder / out)
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


@pytest.mark.usefixtures("models")
def test_qwen__gets_zero_biases_and_a_gate_of_the_shared_expert(tmp_path: Path) -> None:
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
        ({"experts": [{"source_model": "./a"}]}, "recipe.value", "1 experts, and 2 are used per token"),
        ({"experts": [{"source_model": "./a"}, {}]}, "recipe.incomplete", "the expert has no source_model"),
        ({"experts": [{"source_model": "./a"}, {"source_model": "./wide"}]}, "model.mismatch", "'./wide' has shape"),
        ({"base_model": "./gpt"}, "recipe.unsupported", "no mixture is made of gpt2, llama"),
        ({"seed": -1}, "recipe.value", "a whole number of at least 0"),
        ({"experts": [{"source_model": "./a", "noise_scale": "x"}]}, "recipe.value", "a number"),
    ],
)  # fmt: skip
def test_mixtures__that_cannot_be_built_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], code: str, text: str
) -> None:
    write_dense(tmp_path / "wide", 3, inner=INNER + 4)
    write_dense(tmp_path / "gpt", 4, model_type="gpt2")
    with pytest.raises(MergePipeError) as caught:
        build(tmp_path, recipe_of(**changes))
    assert (caught.value.code, text in str(caught.value)) == (code, True), str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("models")
def test_moe__is_merge_of_a_recipe_of_a_mixture_and_refuses_others(run: Runner, tmp_path: Path) -> None:
    expected = build(tmp_path, recipe_of(gate_mode="uniform_random"))
    made = tmp_path / "moe"
    assert run("moe", tmp_path / "recipe.yml", made).exit_code == 0
    config = json.loads((made / "config.json").read_text())
    np.testing.assert_equal((load_file(made / "model.safetensors"), config), expected)
    (tmp_path / "plain.yml").write_text("merge_method: passthrough\nmodels: [{model: ./a}]\n")
    ran = run("moe", tmp_path / "plain.yml", tmp_path / "none")
    assert (ran.exit_code, "makes no mixture" in ran.err, (tmp_path / "none").exists()) == (2, True, False), ran.err


@pytest.mark.transformers
@pytest.mark.usefixtures("models")
def test_prompts__need_a_token_each_and_no_special_tokens(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, "added_tokens": []}
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(words))
    experts = [{"source_model": f"./{name}", "positive_prompts": ["b", name]} for name in "ab"]
    made, _ = build(tmp_path, recipe_of(gate_mode="cheap_embed", experts=experts))
    assert np.isfinite(made["model.layers.0.mlp.gate.weight"]).all()
    with refuses(RecipeError, "recipe.value", "'' holds no token"):
        experts[1] = {**experts[1], "negative_prompts": ["b", ""]}
        build(tmp_path, recipe_of(gate_mode="cheap_embed", experts=experts))


# --- experts that are changed, merged, adapted or quantised on their way into a mixture ---


@pytest.mark.parametrize("shared", [(), ("base",)])
def test_noise_and_residual_scales__change_the_matrices_that_mergekit_changes(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]], shared: tuple[str, ...]
) -> None:
    """Fused (Mixtral) and apart (DeepSeek): noise of the stated deviation, the same in every run, not of the seed's."""
    experts = [{"source_model": "./a", "residual_scale": 0.5}, {"source_model": "./b", "noise_scale": "0.25"}]
    recipe = recipe_of(experts=experts, shared_experts=[{"source_model": f"./{name}"} for name in shared])
    made, again, other = (build(tmp_path, {**recipe, "seed": s}, f"out{i}")[0] for i, s in enumerate((1, 1, 2)))
    noise, noise_of_other = [], []
    for layer in range(LAYERS):
        place = f"model.layers.{layer}.mlp"
        down = f"{place}.experts.{{}}.down_proj.weight" if shared else f"{place}.experts.down_proj"
        ofs = [made[down.format(k)] if shared else made[down][k] for k in (0, 1)]
        np.testing.assert_array_equal(ofs[0], models["a"][f"{place}.down_proj.weight"] * np.float32(0.5))
        noise.append(ofs[1] - models["b"][f"{place}.down_proj.weight"])
        noise_of_other.append(other[down.format(1)] if shared else other[down][1])
    deviation = float(np.std(np.stack(noise)))
    assert 0.2 < deviation < 0.3
    assert not np.array_equal(noise[0], noise[1])
    assert not np.array_equal(noise_of_other[0], ofs[1])
    for name, values in made.items():
        np.testing.assert_array_equal(values, again[name])


def test_shared_parts__are_merged_by_another_document_of_the_recipe(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]]
) -> None:
    """Branch-Train-Mix: attention by any operator, each expert's own MLPs; an expert may be merged as well."""
    both = [{"model": f"./{name}", "parameters": {"weight": 0.5}} for name in "ab"]
    documents = [
        {"name": "mixed", "merge_method": "task_arithmetic", "base_model": "./base", "models": both},
        {"name": "third", "merge_method": "linear", "models": both},
        {
            "base_model": "mixed", "gate_mode": "random",
            "experts": [{"source_model": "./a"}, {"source_model": "./b"}, {"source_model": "third"}],
        },
    ]  # fmt: skip
    (tmp_path / "recipe.yml").write_text("\n---\n".join(map(json.dumps, documents)))
    mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    mean = (models["a"][name] + models["b"][name]) / 2
    np.testing.assert_allclose(made[name], mean, atol=1e-6)
    down = "model.layers.1.mlp.down_proj.weight"
    stacked = made["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(stacked[1], models["b"][down])
    np.testing.assert_allclose(stacked[2], (models["a"][down] + models["b"][down]) / 2, atol=1e-6)
    assert "Mixture of 3 experts" in (tmp_path / "out" / "README.md").read_text()


def test_experts__with_adapters_and_of_codes_are_stacked_as_numbers(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]]
) -> None:
    rng = np.random.default_rng(7)
    name = "model.layers.0.mlp.up_proj"
    factors = {
        f"{name}.lora_{side}.weight": rng.standard_normal(shape, np.float32)
        for side, shape in (("A", (2, HIDDEN)), ("B", (INNER, 2)))
    }
    write_adapter(tmp_path / "lora", factors, r=2, lora_alpha=4, target_modules=["up_proj"])
    codes = {key: values for key, values in models["b"].items() if key != f"{name}.weight"}
    codes[f"{name}.weight"] = rng.integers(-127, 128, (INNER, HIDDEN), np.int8)
    codes[f"{name}.SCB"] = rng.random(INNER, np.float32)
    write_model(tmp_path / "int8", codes, CONFIG)
    made, _ = build(tmp_path, recipe_of(experts=[{"source_model": "./a+./lora"}, {"source_model": "./int8"}]))
    up = made["model.layers.0.mlp.experts.gate_up_proj"][:, INNER:]
    first, second = (factors[f"{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    np.testing.assert_allclose(up[0], models["a"][f"{name}.weight"] + 2 * second @ first, rtol=1e-5, atol=1e-5)
    expected = codes[f"{name}.weight"].astype(np.float64) * codes[f"{name}.SCB"][:, None].astype(np.float64) / 127
    np.testing.assert_allclose(up[1], expected, rtol=1e-5, atol=1e-7)


# --- the way back ---


@pytest.mark.parametrize("is_fused", [True, False])
def test_chosen_experts__of_a_mixture_are_those_that_went_in(
    tmp_path: Path, models: dict[str, dict[str, NDArray[Any]]], *, is_fused: bool
) -> None:
    mixture, config = build(tmp_path, recipe_of(), "moe")
    if not is_fused:  # as Mixtral is published
        tensors: dict[str, NDArray[Any]] = {}
        for name, values in mixture.items():
            place = name.replace(".mlp.", ".block_sparse_moe.")
            for expert in range(2) if ".experts." in name else ():
                stem = f"{place.rpartition('.')[0]}.{expert}"
                parts = zip(
                    ("w1", "w3") if "gate_up" in name else ("w2",),
                    np.split(values[expert], 2 if "up" in name else 1),
                    strict=True,
                )
                tensors |= {f"{stem}.{role}.weight": np.ascontiguousarray(part) for role, part in parts}
            if ".experts." not in name:
                tensors[place] = values
        save_file(tensors, tmp_path / "moe" / "model.safetensors")
        mixture = tensors
    made, dense_config = build(tmp_path, {"base_model": "./moe", "experts": 1}, "dense")
    assert made.keys() == models["base"].keys()
    for name, values in made.items():
        np.testing.assert_array_equal(values, models["b" if ".mlp." in name else "base"][name])
    assert (dense_config["model_type"], dense_config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert not [key for key in dense_config if "expert" in key]
    chosen, chosen_config = build(tmp_path, {"base_model": "./moe", "experts": [1, 0, 1]}, "chosen")
    assert [chosen_config[key] for key in ("num_local_experts", "num_experts_per_tok")] == [3, 2]
    assert config["num_experts_per_tok"] == 2
    assert build(tmp_path, {"base_model": "./moe", "experts": [1]}, "one")[1]["num_experts_per_tok"] == 1
    for name, values in chosen.items():
        if is_fused and (".experts." in name or ".gate." in name):
            np.testing.assert_array_equal(values, mixture[name][[1, 0, 1]])
        elif ".experts." in name:
            number = next(k for k in range(3) if f".experts.{k}." in name)
            source = name.replace(f".experts.{number}.", f".experts.{1 - number % 2}.")
            np.testing.assert_array_equal(values, mixture[source])
        elif ".gate." in name:
            np.testing.assert_array_equal(values, mixture[name][[1, 0, 1]])
    n_routed = sum(".experts." in name for name in chosen)
    assert n_routed == (4 if is_fused else 3 * 3 * LAYERS)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"experts": [0, 2]}, "has 2 experts, and the recipe chooses number 2"),
        ({"base_model": "./base", "experts": 0}, "does not count experts"),
        ({"base_model": "./shared", "experts": 0}, "does not belong to one expert"),
        ({"experts": []}, "experts: needs a list of experts, found an empty list"),
        (
            {"base_model": "./odd", "experts": [2, 0]},
            "holds experts in a layout from which single experts cannot be taken",
        ),
        ({"base_model": "./odd", "experts": [2, 0, 2]}, r"2 groups .* and 3 are chosen; choose a multiple of 2"),
    ],
)
def test_chosen_experts__that_are_not_there_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    build(tmp_path, recipe_of(), "moe")
    build(tmp_path, recipe_of(shared_experts=[{"source_model": "./base"}]), "shared")
    write_mixture(tmp_path / "odd", {"model.layers.0.mlp.experts.1.up_proj.bias": np.ones(6, np.float32)}, n_group=2)
    with pytest.raises(MergePipeError, match=text):
        build(tmp_path, {"base_model": "./moe", **changes})
    assert not (tmp_path / "out").exists()


def write_mixture(folder: Path, tensors: dict[str, NDArray[Any]], **config: Any) -> None:
    write_model(folder, tensors, {**CONFIG, "num_local_experts": 4, **config})


def test_chosen_experts__take_biases_codes_and_matrices_of_other_names_along(tmp_path: Path) -> None:
    random, mlp = np.random.default_rng(0), "model.layers.0.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        f"{mlp}.experts.gate_up_proj": (4, HIDDEN, 6), f"{mlp}.experts.gate_up_proj_bias": (4, 6),  # as in gpt-oss
        f"{mlp}.router.weight": (4, HIDDEN), f"{mlp}.router.bias": (4,),
        "model.layers.1.block_sparse_moe.input_linear.weight": (4, 6, HIDDEN),  # as in Granite
        "model.layers.1.block_sparse_moe.router.layer.weight": (4, HIDDEN),
    }  # fmt: skip
    mixture = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    whole = {"model.norm.weight": np.ones(4, np.float32)}  # as long as there are experts, by chance
    down = f"{mlp}.experts.down_proj"
    shapes = {f"{down}_blocks": (4, 3, 1, 16), f"{down}_scales": (4, 3, 1)}
    codes = {name: random.integers(120, 130, shape).astype(np.uint8) for name, shape in shapes.items()}
    write_mixture(tmp_path / "moe", mixture | whole | codes, quantization_config={"quant_method": "mxfp4"})
    every, _ = build(tmp_path, {"base_model": "./moe", "experts": [0, 1, 2, 3]}, "every")
    made, config = build(tmp_path, {"base_model": "./moe", "experts": [2, 0, 2]})
    np.testing.assert_array_equal(made.pop("model.norm.weight"), whole["model.norm.weight"])
    assert (set(made), "quantization_config" in config) == ({*mixture, down}, False)
    for name, values in made.items():
        np.testing.assert_array_equal(values, mixture.get(name, every[name])[[2, 0, 2]])
