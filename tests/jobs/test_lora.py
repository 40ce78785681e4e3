"""Adapters merged and extracted: laws of the sum, of the truncation, of operators on cores, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, MismatchError, RecipeError, UnsupportedError
from mergepipe.jobs.extract_lora import EXACT_SIDE, truncated_svd
from mergepipe.jobs.merge_lora import common_bases, core_of
from mergepipe.runs.adapters import target_modules
from support.model_folders import PREFIX, recipe_of, write_adapter, write_model

SHAPES = {"model.layers.0.q_proj": (20, 12), "model.layers.1.q_proj": (20, 12), "model.layers.1.up_proj": (9, 12)}
EMBEDDING, TOKENS, WIDTH = "model.embed_tokens", 30, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.q_proj": 5}},
    "rslora-patterns": {"use_rslora": True, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 1}},
    "transposed": {"fan_in_fan_out": True},
    "bias": {"lora_bias": True},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 7]}},
    "experts": {"target_parameters": ["experts.down_proj"]},
}


def rank_of(options: dict[str, Any], module: str) -> int:
    return next((rank for end, rank in options.get("rank_pattern", {}).items() if module.endswith(end)), 4)


def write_random(folder: Path, seed: int, options: dict[str, Any], modules: tuple[str, ...] = tuple(SHAPES)) -> Path:
    """A random adapter with what its options say that it has."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    tensors: dict[str, NDArray[np.float32]] = {}
    for module in modules:
        rows, columns = SHAPES[module]
        rank = rank_of(options, module)
        tensors |= {f"{module}.lora_A.weight": random(rank, columns), f"{module}.lora_B.weight": random(rows, rank)}
        if "lora_bias" in options:
            tensors[f"{module}.lora_B.bias"] = random(rows)
        if "use_dora" in options:
            tensors[f"{module}.lora_magnitude_vector"] = np.abs(random(rows))
    if "modules_to_save" in options:
        tensors["model.norm.weight"] = random(12)
    if "trainable_token_indices" in options:
        tensors[f"{EMBEDDING}.token_adapter.trainable_tokens_delta"] = random(2, WIDTH)
    elif "use_dora" not in options:
        tensors |= {
            f"{EMBEDDING}.lora_embedding_A": random(4, TOKENS), f"{EMBEDDING}.lora_embedding_B": random(WIDTH, 4)
        }  # fmt: skip
    if "target_parameters" in options:
        stem = "model.layers.0.mlp.experts"
        tensors |= {f"{stem}.lora_A.weight": random(12, 6), f"{stem}.lora_B.weight": random(12, 12)}
    return write_adapter(folder, tensors, **{"lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **options})


def write_base(folder: Path) -> Path:
    rng = np.random.default_rng(99)
    shapes: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in SHAPES.items()}
    shapes |= {f"{module}.bias": shape[:1] for module, shape in SHAPES.items()}
    shapes |= {f"{EMBEDDING}.weight": (TOKENS, WIDTH), "model.norm.weight": (12,)}
    shapes["model.layers.0.mlp.experts.down_proj"] = (3, 12, 6)
    folder.mkdir()
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for module in SHAPES if folder.name == "transposed" else ():
        tensors[f"{module}.weight"] = np.ascontiguousarray(tensors[f"{module}.weight"].T)
    save_file(tensors, folder / "model.safetensors")
    return folder


def applied(base: Path, out: Path, *adapters: Path, weights: tuple[float, ...] = ()) -> dict[str, NDArray[np.float32]]:
    """The tensors of the base with adapters applied."""
    mergepipe.apply_lora(base, adapters, out, weights=weights, catalog=False)
    return load_file(out / "model.safetensors")


def assert_close(first: dict[str, NDArray[np.float32]], second: dict[str, NDArray[np.float32]]) -> None:
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["cat", "svd", "linear"])
@pytest.mark.parametrize("name", OPTIONS)
def test_merge_lora__one_adapter_at_weight_one_is_itself(tmp_path: Path, name: str, method: str) -> None:
    adapter = write_random(tmp_path / "a", 1, OPTIONS[name])
    base = write_base(tmp_path / ("transposed" if name == "transposed" else "base"))
    rank = 12 if method == "svd" else None
    report = mergepipe.merge_lora([adapter], tmp_path / "merged", method=method, rank=rank)
    assert report.kept_energy == pytest.approx(1.0)
    assert_close(applied(base, tmp_path / "x", adapter), applied(base, tmp_path / "y", tmp_path / "merged"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "names", [("plain", "patterns"), ("rslora", "bias"), ("experts", "plain"), ("saved", "rslora")]
)
def test_merge_lora__cat_is_the_sum_of_the_deltas(tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = (write_random(tmp_path / f"a{i}", i, OPTIONS[name]) for i, name in enumerate(names))
    base = write_base(tmp_path / "base")
    weights = (1.0 if "saved" in names else 0.75, -0.5)  # what is stored in full has no weight
    mergepipe.merge_lora([first, second], tmp_path / "merged", weights=weights)
    start = load_file(base / "model.safetensors")
    alone = [applied(base, tmp_path / f"x{i}", adapter) for i, adapter in enumerate((first, second))]
    expected = {n: x + sum(w * (one[n] - x) for w, one in zip(weights, alone, strict=True)) for n, x in start.items()}
    assert_close(expected, applied(base, tmp_path / "both", first, second, weights=weights))
    assert_close(expected, applied(base, tmp_path / "one", tmp_path / "merged"))


def in_mlx_form(adapter: Path, out: Path) -> Path:
    """The adapter as mlx-lm writes it: factors transposed, one scale, its own names."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    names = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m",
             "lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b"}  # fmt: skip
    tensors = {}
    for name, values in load_file(adapter / "adapter_model.safetensors").items():
        part = next(part for part in names if name.endswith(part))
        module = name.removeprefix(PREFIX).removesuffix(f".{part}")
        tensors[f"{module}.{names[part]}"] = np.ascontiguousarray(values.T)
    out.mkdir()
    save_file(tensors, out / "adapters.safetensors")
    save_file(tensors, out / "0000100_adapters.safetensors")  # an earlier one, as training leaves it
    parameters = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    kind = "dora" if config.get("use_dora") else "lora"
    own = {"fine_tune_type": kind, "lora_parameters": parameters, "model": "org/base"}
    (out / "adapter_config.json").write_text(json.dumps(own))
    return out


@pytest.mark.parametrize("name", ["plain", "dora"])
def test_lora_apply__takes_an_adapter_of_mlx_as_that_of_peft(tmp_path: Path, name: str) -> None:
    adapter = write_random(tmp_path / "a", 0, OPTIONS[name])
    mlx, base = in_mlx_form(adapter, tmp_path / "mlx"), write_base(tmp_path / "base")
    assert_close(applied(base, tmp_path / "one", adapter), applied(base, tmp_path / "two", mlx))


def test_merge_lora__merges_adapters_of_mlx_with_those_of_peft(tmp_path: Path) -> None:
    first, second = (write_random(tmp_path / name, seed, {}) for seed, name in enumerate("ab"))
    mlx = in_mlx_form(second, tmp_path / "mlx")
    for name, other in (("peft", second), ("both", mlx)):
        mergepipe.merge_lora([first, other], tmp_path / name, weights=(0.5, 2.0))
    made = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "both")]
    assert_close(*made)


def test_merge_lora__a_recipe_weighs_by_filter_and_by_layer(tmp_path: Path) -> None:
    first, second = (write_random(tmp_path / name, seed, {}) for seed, name in enumerate("ab"))
    weight = [{"filter": "q_proj", "value": [0.5, 1.5]}, {"value": 2.0}]
    models = [{"model": "a", "parameters": {"weight": weight}}, {"model": str(second), "parameters": {"weight": 1}}]
    recipe = tmp_path / "recipe.yml"
    content = {"output": "adapter", "merge_method": "task_arithmetic", "models": models}
    recipe.write_text(json.dumps(content))
    report = mergepipe.merge_lora([recipe], tmp_path / "out", rank=8)
    assert (report.method, len(report.adapters)) == ("task_arithmetic", 2)
    base = write_base(tmp_path / "base")
    merged, start = applied(base, tmp_path / "merged", tmp_path / "out"), load_file(base / "model.safetensors")
    deltas = [
        {name: values - start[name] for name, values in applied(base, tmp_path / f"{k}", adapter).items()}
        for k, adapter in enumerate((first, second))
    ]
    for name, values in merged.items():
        share = (0.5 if "layers.0" in name else 1.5) if "q_proj" in name else 2.0
        expected = start[name] + share * deltas[0][name] + deltas[1][name]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    for changes, words in (
        ({"output": None}, "the recipe makes a model, not an adapter"),
        ({"base_model": "x"}, "base_model: has no effect for an adapter"),
        ({"models": [{"parameters": {}}]}, "`model` does not name an adapter"),
        ({"merge_method": "tiess"}, "did you mean"),
    ):
        recipe.write_text(json.dumps({**content, **changes}))
        with pytest.raises(RecipeError, match=words):
            mergepipe.merge_lora([recipe], tmp_path / "more")


KOHYA = {
    "lora_unet_mid_block_attentions_0_to_q": ((5, 6), (9, 5)),
    "lora_te_text_model_encoder_layers_0_mlp_fc1": ((2, 6), (7, 2)),
    "lora_unet_conv_in": ((3, 4, 3, 3), (8, 3, 1, 1)),
}


def write_kohya(path: Path, seed: int, *, alpha: float | None = 2.0, more: dict[str, Any] | None = None) -> Path:
    rng = np.random.default_rng(seed)
    tensors = dict(more or {})
    for module, shapes in KOHYA.items():
        for part, shape in zip(("lora_down.weight", "lora_up.weight"), shapes, strict=True):
            tensors[f"{module}.{part}"] = rng.standard_normal(shape).astype(np.float16)
        if alpha is not None:
            tensors[f"{module}.alpha"] = np.array(alpha, np.float16)
    save_file(tensors, path)
    return path


def kohya_deltas(path: Path) -> dict[str, NDArray[np.float64]]:
    """The oracle: alpha over rank, times up and down as matrices; without alpha the rank."""
    tensors = {name: values.astype(np.float64) for name, values in load_file(path).items()}
    deltas = {}
    for module in {name.partition(".")[0] for name in tensors}:
        down, up = (tensors[f"{module}.lora_{part}.weight"] for part in ("down", "up"))
        scale = tensors.get(f"{module}.alpha", np.float64(len(down))) / len(down)
        deltas[module] = scale * up.reshape(up.shape[:2]) @ down.reshape(len(down), -1)
    return deltas


@pytest.mark.parametrize("method", ["cat", "svd", "linear"])
def test_merge_lora__keeps_the_names_of_kohya(tmp_path: Path, method: str) -> None:
    first, second = write_kohya(tmp_path / "a.safetensors", 0), write_kohya(tmp_path / "b.safetensors", 1, alpha=None)
    rank = 20 if method == "svd" else None
    mergepipe.merge_lora([first, second], tmp_path / "out", method=method, weights=(0.25, 0.75), rank=rank)
    records = {"README.md", "mergepipe.blocks", "mergepipe.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"out.safetensors", *records}
    assert mergepipe.verify(tmp_path / "out").is_sound
    written = load_file(tmp_path / "out" / "out.safetensors")
    assert written["lora_unet_conv_in.lora_down.weight"].shape[1:] == (4, 3, 3)
    assert written["lora_unet_conv_in.lora_up.weight"].shape[2:] == (1, 1)
    one, two, made = (kohya_deltas(path) for path in (first, second, tmp_path / "out" / "out.safetensors"))
    assert made.keys() == one.keys()
    for module, delta in made.items():
        np.testing.assert_allclose(delta, 0.25 * one[module] + 0.75 * two[module], rtol=1e-4, atol=1e-4)


def test_merge_lora__refuses_what_kohyas_names_do_not_say(tmp_path: Path) -> None:
    plain, peft = write_kohya(tmp_path / "a.safetensors", 0), write_random(tmp_path / "peft", 0, {})
    odd = write_kohya(tmp_path / "b.safetensors", 0, more={"lora_unet_conv_in.dora_scale": np.ones(8, np.float32)})
    infinite = write_kohya(tmp_path / "c.safetensors", 0, alpha=np.inf)
    for adapters, words in (
        ([plain, peft], "its names are Kohya's, and those of another adapter are not"),
        ([plain, odd], "'lora_unet_conv_in.dora_scale' is not a factor of a LoRA in Kohya's names"),
        ([plain, infinite], "alpha' is inf"),
    ):
        with pytest.raises(MergePipeError, match=words):
            mergepipe.merge_lora(adapters, tmp_path / "out")
    with pytest.raises(MismatchError, match=r"'lora_\w+' has no counterpart in the base"):
        applied(write_base(tmp_path / "base"), tmp_path / "out", plain)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full', only 'lora' and 'dora' are read"),
        ({"lora_parameters": {"rank": 3, "scale": 2.0}}, "the configured rank is 3"),
        ({"lora_parameters": {"rank": "3"}}, "the rank 'rank' must be > 0, found '3'"),
    ],
)
def test_lora_apply__refuses_a_configuration_of_mlx(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    mlx = in_mlx_form(write_random(tmp_path / "a", 0, {}), tmp_path / "mlx")
    path = mlx / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(MergePipeError, match=words):
        applied(write_base(tmp_path / "base"), tmp_path / "out", mlx)


def test_merge_lora__svd_is_the_best_of_its_rank_and_says_what_it_keeps(tmp_path: Path) -> None:
    adapters = [write_random(tmp_path / name, seed, {}, tuple(SHAPES)[:1]) for seed, name in enumerate("ab")]
    report = mergepipe.merge_lora(adapters, tmp_path / "svd", method="svd", rank=3)
    name = next(iter(SHAPES))
    total = np.zeros(SHAPES[name])
    for adapter in adapters:
        factors = load_file(adapter / "adapter_model.safetensors")
        up, down = (factors[f"{PREFIX}{name}.lora_{side}.weight"].astype(np.float64) for side in "BA")
        total += 1.5 * up @ down
    left, values, right = np.linalg.svd(total, full_matrices=False)
    merged = load_file(tmp_path / "svd" / "adapter_model.safetensors")
    made = merged[f"{PREFIX}{name}.lora_B.weight"] @ merged[f"{PREFIX}{name}.lora_A.weight"]
    np.testing.assert_allclose(made, (left[:, :3] * values[:3]) @ right[:3], rtol=1e-4, atol=1e-4)
    (kept,) = [one.kept_energy for one in report.modules if one.module == name]
    assert kept == pytest.approx(np.sum(values[:3] ** 2) / np.sum(values**2))


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear", "sce", "della"])
def test_merge_lora__merges_by_any_operator(tmp_path: Path, method: str) -> None:
    adapters = [write_random(tmp_path / "a", 1, {}), write_random(tmp_path / "b", 2, {}, tuple(SHAPES)[:2])]
    report = mergepipe.merge_lora(adapters, tmp_path / "merged", method=method, rank=4)
    assert {module.rank for module in report.modules} == {4}
    merged = load_file(tmp_path / "merged" / "adapter_model.safetensors")
    assert all(np.isfinite(values).all() and values.any() for values in merged.values())


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ("dora dora", UnsupportedError, "is DoRA, whose delta depends on the norms of the base"),
        ("saved saved", MismatchError, "stores 'model.norm.weight' in full, and so does another"),
        ("tokens tokens", MismatchError, "in full, and so does another"),
        ("tokens plain", MismatchError, "for 'model.embed_tokens' the adapters store different things"),
    ],
)
def test_merge_lora__refuses_what_has_no_sum(tmp_path: Path, names: str, error: type[Exception], words: str) -> None:
    adapters = [write_random(tmp_path / f"a{i}", i, OPTIONS[name]) for i, name in enumerate(names.split())]
    with pytest.raises(error, match=words):
        mergepipe.merge_lora(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "case", ["unrelated", "one twice", "cancelling", "of other lengths", "of zeros", "of more rank than rows"]
)
def test_common_bases__are_orthonormal_and_hold_every_delta(case: str) -> None:
    rng = np.random.default_rng(7)
    pairs = [(rng.standard_normal((96, 8)), rng.standard_normal((8, 64))) for _ in range(4)]
    up, down = pairs[0]
    pairs = {
        "unrelated": pairs,
        "one twice": [*pairs, (up * 1.5, down)],
        "cancelling": [*pairs, (-up, down)],
        "of other lengths": [(up * 1e-9, down * 1e9), *pairs[1:], (up[:, :2] * 1e-5, down[:2])],
        "of zeros": [(up * 0.0, down), (up * 0.0, down)],
        "of more rank than rows": [(up[:16], down[:, :20]) for up, down in pairs],
    }[case]
    bases = common_bases(pairs)
    for basis in bases:
        np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-13)
    for up, down in pairs:
        size = float(np.linalg.norm(up) * np.linalg.norm(down))
        applied = bases[0] @ core_of((up, down), bases) @ bases[1].T
        np.testing.assert_allclose(applied, up @ down, atol=1e-12 * max(size, 1e-9))


Q, DOWN, NORM, EMBED = (
    "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
    "model.embed_tokens.weight",
)  # fmt: skip


def spectrum(shape: tuple[int, ...], values: NDArray[np.float64]) -> NDArray[np.float32]:
    """A matrix of these singular values."""
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.standard_normal((shape[0], len(values))))[0]
    right = np.linalg.qr(rng.standard_normal((shape[1], len(values))))[0]
    return np.asarray((left * values) @ right.T, np.float32)


@pytest.mark.parametrize("shape", [(40, 64), (EXACT_SIDE + 132, EXACT_SIDE + 32)])
def test_truncated_svd__is_nearly_the_best_of_its_rank(shape: tuple[int, int]) -> None:
    values = 1.0 / np.arange(1, 37)
    matrix = spectrum(shape, values)
    factors = truncated_svd(matrix, 8, None, seed=1)
    best = np.sqrt(np.sum(values[8:] ** 2))
    measured = np.linalg.norm(matrix.astype(np.float64) - factors.up_MR.astype(np.float64) @ factors.down_RN)
    assert len(factors.down_RN) == 8
    assert best * (1 - 1e-5) <= measured <= best * 1.005
    assert factors.error == pytest.approx(measured, rel=1e-4)
    assert factors.norm == pytest.approx(np.sqrt(np.sum(values**2)), rel=1e-5)


@pytest.mark.parametrize("shape", [(40, 64), (EXACT_SIDE + 132, EXACT_SIDE + 32)])
def test_truncated_svd__takes_no_more_than_an_energy_needs(shape: tuple[int, int]) -> None:
    values = np.concatenate([np.full(36, 1.0), np.full(4, 0.01)])
    factors = truncated_svd(spectrum(shape, values), None, 0.95, seed=1)
    assert len(factors.down_RN) == int(np.ceil(0.95 * np.sum(values**2)))
    assert (factors.error / factors.norm) ** 2 <= 0.05


def write_pair(root: Path) -> tuple[Path, Path]:
    """A base, and a model that differs by rank two in two matrices, and in its embedding and norm."""
    rng = np.random.default_rng(5)
    shapes = {Q: (16, 16), DOWN: (16, 24), NORM: (16,), EMBED: (32, 16), "model.layers.0.mlp.up_proj.weight": (24, 16)}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = dict(base)
    for name in (Q, DOWN):
        model[name] = base[name] + spectrum(shapes[name], np.array([0.5, 0.2]))
    model[NORM], model[EMBED] = base[NORM] + 0.01, base[EMBED] * 1.01
    for folder, tensors in ((root / "base", base), (root / "model", model)):
        write_model(folder, tensors, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    return root / "base", root / "model"


def test_extract_lora__an_embedding_with_added_tokens_is_saved_in_full(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors[EMBED] = np.concatenate([tensors[EMBED], np.full((8, 16), 0.25, np.float32)])
    save_file(tensors, model / "model.safetensors")
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=2, save_modules=True)
    assert sorted(report.saved_modules) == ["lm_head", "model.embed_tokens", "model.norm"]
    mergepipe.apply_lora(base, [tmp_path / "lora"], tmp_path / "out", catalog=False)
    made = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in tensors.items():
        np.testing.assert_allclose(made[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_extract_lora__the_adapter_makes_the_model_again(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=2, save_modules=True, base_model_id="org/base")
    assert sorted(tensor.name for tensor in report.tensors) == sorted((Q, DOWN))
    assert sorted(report.saved_modules) == ["lm_head", "model.embed_tokens", "model.norm"]
    assert (report.left, report.relative_error < 1e-5) == ((), True)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 2, "org/base")
    assert config["target_modules"] == ["down_proj", "q_proj"]
    lora = {f"{base}+{tmp_path}/lora": {"weight": 1}}
    mergepipe.merge(recipe_of("task_arithmetic", lora, base, dtype="float32"), tmp_path / "merged")
    made, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", model))
    assert_close(made, wanted)
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in (tmp_path / "lora").iterdir())


@pytest.mark.parametrize("names", [("language_model.model", "vision_tower"), ("model", "visual")])
def test_extract_lora__names_the_modules_of_transformers(tmp_path: Path, names: tuple[str, str]) -> None:
    """Files of vision-language models have other names: by these PEFT finds no module, or a part of them."""
    text, vision = (f"{name}.layers.0.q_proj.weight" for name in names)
    base = {name: np.ones((8, 8), np.float32) for name in (text, vision)}
    for folder, tensors in (("base", base), ("model", {**base, text: np.eye(8, dtype=np.float32)})):
        write_model(tmp_path / folder, tensors)
    mergepipe.extract_lora(tmp_path / "base", tmp_path / "model", tmp_path / "lora", rank=8)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["language_model.layers.0.q_proj"]
    made = applied(tmp_path / "base", tmp_path / "out", tmp_path / "lora")
    np.testing.assert_allclose(made[text], np.eye(8), atol=1e-5)


def test_extract_lora__names_what_it_leaves(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", energy=0.8)
    assert {tensor.name: tensor.rank for tensor in report.tensors} == {Q: 1, DOWN: 1}
    assert [left.name for left in report.left] == [EMBED, NORM]
    a, b = (load_file(folder / "model.safetensors") for folder in (base, model))
    deltas = {name: np.linalg.norm(b[name].astype(np.float64) - a[name]) ** 2 for name in a}
    left = deltas[EMBED] + deltas[NORM] + 2 * 0.2**2
    assert report.relative_error == pytest.approx(np.sqrt(left / sum(deltas.values())), rel=1e-4)


def test_extract_lora__takes_no_embedding_for_a_linear_layer(tmp_path: Path) -> None:
    base, model = write_pair(tmp_path)
    names = ("transformer.wpe.weight", "bert.embeddings.position_embeddings.weight", "model.embed_positions.weight")
    for folder, value in ((base, 0.0), (model, 1.0)):
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: np.full((8, 4), value, np.float32) for name in names}, folder / "model.safetensors")
    report = mergepipe.extract_lora(base, model, tmp_path / "lora", rank=1)
    assert {tensor.name for tensor in report.tensors} == {Q, DOWN}
    assert {left.name for left in report.left} == {EMBED, NORM, *names}


def test_lora_apply__gives_a_tied_base_no_head_of_its_own_that_would_lose_something(tmp_path: Path) -> None:
    """Trained rows are those of the head too; an encoder and decoder ties all its embeddings by the same option."""
    base, _ = write_pair(tmp_path)
    head, rows = {"lm_head.weight": np.ones((32, 16), np.float32)}, np.ones((1, 16), np.float32)
    tokens = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": rows}
    adapter = write_adapter(tmp_path / "a", {**head, **tokens}, trainable_token_indices=[3])
    with pytest.raises(UnsupportedError, match="it trains tokens, and changes the head that the base ties"):
        applied(base, tmp_path / "out", adapter)
    config = {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match="the base has no output head: its embedding is used for it"):
        applied(base, tmp_path / "out", write_adapter(tmp_path / "b", head))


def test_target_modules__are_named_in_full_where_a_last_name_means_others_too() -> None:
    modules = ["a.0.q", "a.1.q", "a.0.v", "a.1.v", "merger.0", "text.0.mlp.out", "image.0.mlp.out", "text.0.end.out"]
    adapted = ["a.0.q", "a.1.q", "a.1.v", "merger.0", "text.0.end.out"]
    assert target_modules(adapted, modules) == ["a.1.v", "end.out", "merger.0", "q"]
    assert target_modules(["a.q"], ["a.q", "q.b"]) == ["a.q"]


def apply(tmp_path: Path, tensors: dict[str, NDArray[np.float32]], **options: object) -> mergepipe.MergeReport:
    """The report of applying an adapter to a base of the modules of `SHAPES`."""
    rng = np.random.default_rng(1)
    base = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    write_model(tmp_path / "base", base)
    write_adapter(tmp_path / "adapter", tensors, **options)
    return mergepipe.apply_lora(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")


def factors(*, b: float = 1.0) -> dict[str, NDArray[np.float32]]:
    """The factors of an adapter whose B is the same number everywhere."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for module, (rows, columns) in SHAPES.items():
        tensors[f"{module}.lora_A.weight"] = np.ones((4, columns), np.float32)
        tensors[f"{module}.lora_B.weight"] = np.full((rows, 4), b, np.float32)
    return tensors


@pytest.mark.parametrize(
    ("options", "count"), [({"lora_alpha": 0}, 3), ({"alpha_pattern": {"up_proj": 0}}, 1), ({"lora_alpha": 1}, 0)]
)
def test_lora_apply__warns_of_modules_that_are_scaled_by_0(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    report = apply(tmp_path, factors(), **options)
    notices = [notice for notice in report.recipe_notices if notice.changes_result]
    assert [f"{count} tensor{'s' * (count > 1)} of it change nothing" in str(notice) for notice in notices] == [
        True
    ] * bool(count)


@pytest.mark.parametrize("is_trained", [True, False])
def test_lora_apply__warns_of_an_adapter_that_was_not_trained(tmp_path: Path, *, is_trained: bool) -> None:
    tensors = factors(b=-0.0)
    if is_trained:
        tensors["model.layers.1.up_proj.lora_B.weight"][-1, -1] = 1e-8
    report = apply(tmp_path, tensors)
    assert any("changes nothing" in notice for notice in report.notices) != is_trained


def test_lora_apply__does_not_warn_of_an_adapter_that_changes_weights_as_a_whole(tmp_path: Path) -> None:
    tensors = {**factors(b=0.0), "model.layers.0.q_proj.weight": np.ones((20, 12), np.float32)}
    del tensors["model.layers.0.q_proj.lora_A.weight"], tensors["model.layers.0.q_proj.lora_B.weight"]
    assert not any("changes nothing" in notice for notice in apply(tmp_path, tensors).notices)


def write_large(folder: Path, alpha: float) -> Path:
    names = [f"model.layers.0.mlp.up_proj.lora_{side}.weight" for side in "AB"]
    tensors = {names[0]: np.ones((4, 8), np.float32), names[1]: np.full((8, 4), 1e38, np.float32)}
    return write_adapter(folder, tensors, lora_alpha=alpha, target_modules=["up_proj"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["cat", "svd", "linear"])
@pytest.mark.parametrize("alpha", [100.0, 1e60, 1e300])
def test_merge_lora__results_beyond_float32_are_reported_or_refused(tmp_path: Path, method: str, alpha: float) -> None:
    adapters = [write_large(tmp_path / name, alpha) for name in "ab"]
    rank = 2 if method == "svd" else None
    refusal = ""
    try:
        report = mergepipe.merge_lora(adapters, tmp_path / "out", method=method, rank=rank)
    except UnsupportedError as error:
        refusal = str(error)
    if refusal:
        assert "beyond float32" in refusal or "by its scale and weight" in refusal
        assert not (tmp_path / "out").exists()
        return
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    is_lost = any(not np.isfinite(values).all() for values in stored.values())
    assert bool([notice for notice in report.notices if notice.startswith("infinities or NaN")]) == is_lost
    assert 0.0 <= report.kept_energy <= 1.0
