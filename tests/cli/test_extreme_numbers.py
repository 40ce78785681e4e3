"""Infinities, NaN, zeros, the smallest and the largest numbers in models and adapters: numpy warns of nothing.

Under pytest each of these warnings is an error, which would end a command with exit 70.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from support.command_line import Ran, Runner
from support.model_folders import recipe_of, write_adapter, write_model

WIDTH, TOKENS = 32, 16
WEIGHTS = "adapter_model.safetensors"
Array = NDArray[np.float32]


def with_infinities(values: Array) -> Array:
    values.flat[::7] = np.inf
    values.flat[3::11] = -np.inf
    return values


def with_nan(values: Array) -> Array:
    values.flat[::7] = np.nan
    return values


KINDS: Mapping[str, Callable[[Array], Array]] = {
    "infinities": with_infinities,
    "NaN": with_nan,
    "zeros": np.zeros_like,
    "denormals": lambda values: values * np.float32(1e-42),
    "largest": lambda values: np.where(values > 0, np.float32(3e38), np.float32(-3e38)),
}
PLACES = ("base", "expert", "adapter")
RULES: Mapping[str, tuple[Mapping[str, object], Mapping[str, object], int]] = {
    "linear": ({"weight": 0.5}, {}, 2),
    "task_arithmetic": ({"weight": 0.5}, {}, 2),
    "ties": ({"weight": 0.5, "density": 0.5}, {}, 2),
    "dare_ties": ({"weight": 0.5, "density": 0.5}, {}, 2),
    "della": ({"weight": 0.5, "density": 0.5}, {}, 2),
    "breadcrumbs": ({"weight": 0.5, "density": 0.5}, {}, 2),
    "slerp": ({}, {"t": 0.5}, 1),
    "nuslerp": ({"weight": 0.5}, {"nuslerp_flatten": False}, 2),
    "multislerp": ({"weight": 0.5}, {}, 2),
    "karcher": ({}, {}, 2),
    "model_stock": ({}, {}, 2),
    "geometric_median": ({"weight": 0.5}, {}, 2),
    "sce": ({}, {"select_topk": 0.5}, 2),
    "ramplus_tl": ({}, {}, 2),
    "magmax": ({}, {}, 2),
    "nearswap": ({}, {"t": 0.001}, 1),
    "arcee_fusion": ({}, {}, 1),
    "fisher": ({"weight": 0.5}, {}, 2),
    "sar": ({"weight": 0.5}, {"density": 0.5}, 2),
    "consensus": ({"weight": 0.5}, {}, 2),
}


def write_inputs(folder: Path, kind: str, place: str) -> None:
    """Write a base, two experts and two adapters, one of them with unusual numbers."""
    change = KINDS[kind]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (TOKENS, WIDTH))
    shapes |= {"model.norm.weight": (WIDTH,), "model.layers.0.self_attn.q_proj.bias": (WIDTH,)}
    shapes |= {f"model.layers.0.{name}.weight": (WIDTH, WIDTH) for name in ("self_attn.q_proj", "mlp.up_proj")}
    base = {n: np.random.default_rng(0).normal(size=s).astype(np.float32) for n, s in shapes.items()}
    for seed, name in enumerate(("base", "expert", "other")):
        random = np.random.default_rng(seed)
        tensors = {n: t + (random.normal(size=t.shape) * 0.01 * bool(seed)).astype(np.float32) for n, t in base.items()}
        if name == place:
            tensors = {n: change(tensor) for n, tensor in tensors.items()}
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
        write_model(folder / name, tensors, config)
    for seed, name in enumerate(("adapter", "more")):
        random = np.random.default_rng(seed)
        module = "model.layers.0.self_attn.q_proj"
        factors: dict[str, NDArray[Any]] = {
            f"{module}.lora_A.weight": random.normal(size=(4, WIDTH)).astype(np.float32),
            f"{module}.lora_B.weight": random.normal(size=(WIDTH, 4)).astype(np.float32),
        }
        if name == place:
            factors = {n: change(tensor) for n, tensor in factors.items()}
        write_adapter(folder / name, factors, target_modules=["q_proj"])


@pytest.fixture(name="run")
def make_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in a process where warnings are errors; it must end as commands do."""
    runner = Runner(capsys)

    def run(*arguments: object) -> Ran:
        ran = runner(*arguments, "--home", tmp_path / "home")
        assert ran.exit_code not in (1, 70), (arguments, ran.err)
        assert "Warning" not in ran.out + ran.err
        return ran

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_verbs__print_no_warning_of_numpy(tmp_path: Path, run: Callable[..., Ran], kind: str, place: str) -> None:
    write_inputs(tmp_path, kind, place)
    base, expert, adapter, more = (tmp_path / name for name in ("base", "expert", "adapter", "more"))
    for method in ("cat", "svd", "ties", "task_arithmetic") if place == "adapter" else ():
        rank = () if method == "cat" else ("--rank", 4)
        run("lora", "merge", adapter, more, "-o", tmp_path / f"merged-{method}", "--method", method, *rank)
    if place != "expert":
        run("lora", "apply", base, adapter, "-o", tmp_path / "applied")
    if place == "adapter":
        return
    run("analyze", base, expert, tmp_path / "other")
    for method, (own, parameters, n_models) in RULES.items():
        models: dict[Any, Mapping[str, object]] = dict.fromkeys([expert, tmp_path / "other"][:n_models], own)
        recipe = tmp_path / f"{method}.yml"
        recipe.write_text(json.dumps(recipe_of(method, models, base, parameters=parameters)))
        run("merge", recipe, tmp_path / method)
    for select in ("norm", "conflict", "sample"):
        run("merge", tmp_path / "ties.yml", tmp_path / select, "--budget", "50%", "--select", select)
    spectral = recipe_of("task_arithmetic", {expert: {"weight": 0.5}}, base, post={"svc": 1.0})
    (tmp_path / "spectral.yml").write_text(json.dumps(spectral))
    run("merge", tmp_path / "spectral.yml", tmp_path / "spectral")
    run("diff", base, expert)
    run("verify", tmp_path / "linear")
    run("explain", tmp_path / "ties")
    run("pack", base, expert, "-o", tmp_path / "packs")
    for options in (("--rank", 4), ("--rank", 4, "--save-modules"), ("--energy", 0.9)):
        run("lora", "extract", base, expert, "-o", tmp_path / "-".join(map(str, ("x", *options))), *options)


def test_lora_extract__reports_infinities_and_nan_that_it_saves_or_leaves(
    tmp_path: Path, run: Callable[..., Ran]
) -> None:
    write_inputs(tmp_path, "zeros", "adapter")
    tensors = load_file(tmp_path / "expert" / "model.safetensors")
    tensors["model.embed_tokens.weight"][2] = np.nan
    tensors["model.norm.weight"][:3] = np.inf
    write_model(tmp_path / "expert", tensors)
    command = ("lora", "extract", tmp_path / "base", tmp_path / "expert", "--rank", 4, "--json")
    report = run(*command, "-o", tmp_path / "left").json()
    reasons = {tensor["name"]: tensor["reason"] for tensor in report["left"]}
    assert f"{WIDTH} values of its difference are infinite or NaN" in reasons["model.embed_tokens.weight"]
    assert "3 values of its difference are infinite or NaN" in reasons["model.norm.weight"]
    assert 0 < report["relative_error"] < 1
    assert not report["notices"]
    report = run(*command, "--save-modules", "-o", tmp_path / "saved").json()
    assert f"infinities or NaN in 2 of {len(load_file(tmp_path / 'saved' / WEIGHTS))} tensors" in report["notices"][0]
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    write_model(tmp_path / "expert", tensors)
    refused = run(*command, "-o", tmp_path / "refused")
    assert refused.codes == ["tensor.not-finite"]
    assert not (tmp_path / "refused").exists()
