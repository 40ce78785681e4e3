"""Rounding as users meet it: what merges, adapters and models of tailor write, what they say of it, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mergepipe
from mergepipe import tailor
from mergepipe.errors import RecipeError, UnsupportedError
from support.command_line import run_command
from support.families import FamilyShape, write_family
from support.model_folders import recipe_of, write_adapter
from support.refusals import refuses
from support.rounding import NUMPY_DTYPES

SHAPE = FamilyShape(hidden=96, layers=2, heads=4, kv_heads=2, head_dim=24, intermediate=288, vocab=512, tied=True)
OPERATORS: Mapping[str, dict[str, float]] = {
    "linear": {"weight": 0.02},
    "task_arithmetic": {"weight": 0.02},
    "ties": {"weight": 1.0, "density": 0.3},
    "dare_ties": {"weight": 0.05, "density": 0.5},
}
SMALL = OPERATORS["task_arithmetic"]
"""A hundredth of what the experts change: less than half a step of bfloat16 in most elements."""


@dataclass(frozen=True, slots=True)
class Models:
    base: Path
    experts: tuple[Path, ...]
    folder: Path

    def recipe(self, operator: str = "task_arithmetic", **more: object) -> dict[str, object]:
        models = dict.fromkeys(self.experts, OPERATORS[operator])
        common = {"parameters": {"normalize": False}} if operator == "task_arithmetic" else {}
        return recipe_of(operator, models, self.base, **{**common, "dtype": "bfloat16", **more})


@pytest.fixture
def models(tmp_path: Path) -> Models:
    paths = write_family(tmp_path / "models", SHAPE, 2)
    return Models(paths.base, tuple(paths.experts), tmp_path)


def merge(recipe: Mapping[str, object], out: Path, **options: Any) -> mergepipe.MergeReport:
    return mergepipe.merge(recipe, out, **{"catalog": False, "threads": 1, **options})


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """The stored bytes of every tensor, however they are distributed over files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, stop = entry["data_offsets"]
                tensors[name] = entry["dtype"], raw[start + first : start + stop]
    return tensors


def values(folder: Path) -> dict[str, NDArray[np.float64]]:
    stored = raw_tensors(folder).items()
    return {name: np.frombuffer(raw, NUMPY_DTYPES[dtype]).astype(np.float64) for name, (dtype, raw) in stored}


def share(
    base: Mapping[str, NDArray[Any]], meant: Mapping[str, NDArray[Any]], made: Mapping[str, NDArray[Any]]
) -> float:
    """The share of the meant change that was made, by all elements."""
    product = sum(float(np.dot(made[name] - base[name], meant[name] - base[name])) for name in meant)
    return product / sum(float(np.dot(meant[name] - base[name], meant[name] - base[name])) for name in meant)


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "mergepipe.json").read_text())
    return content


@pytest.mark.parametrize("operator", OPERATORS)
def test_stochastic_rounding__keeps_the_change_of_float32_and_takes_its_neighbours(
    models: Models, operator: str
) -> None:
    merge(models.recipe(operator, dtype="float32"), models.folder / "exact")
    merge(models.recipe(operator, rounding="stochastic"), models.folder / "out")
    base, exact, made = (values(folder) for folder in (models.base, models.folder / "exact", models.folder / "out"))
    for name, meant in exact.items():
        bits = meant.astype(np.float32).view(np.uint32)
        towards_zero = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        away = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
        is_held = meant == towards_zero
        assert ((made[name] == towards_zero) | ((made[name] == away) & ~is_held)).all(), name
    assert abs(share(base, exact, made) - 1) < 0.03


@pytest.mark.parametrize("operator", OPERATORS)
def test_stochastic_rounding__has_the_same_bytes_for_threads_memory_shards_and_budget(
    models: Models, operator: str
) -> None:
    recipe = models.recipe(operator, rounding="stochastic")
    merge(recipe, models.folder / "out")
    whole = raw_tensors(models.folder / "out")
    ways: dict[str, dict[str, object]] = {
        "threads": {"threads": 3},
        "memory": {"memory_bytes": 32 << 20, "threads": 2},
        "shards": {"shard_bytes": 60_000},
        "budget": {"budget": "100%"},
    }
    for way, options in ways.items():
        merge(recipe, models.folder / way, **options)
        assert raw_tensors(models.folder / way) == whole, way
    merge(recipe, models.folder / "seed", seed=1)
    assert raw_tensors(models.folder / "seed") != whole


def test_stochastic_rounding__is_that_of_parts_of_replay_and_of_repair(models: Models) -> None:
    plan = mergepipe.plan(models.recipe(), everything=True, rounding="stochastic", home=models.folder / "home")
    assert "rounding: stochastic" in plan.recipe
    whole, parts = models.folder / "whole", models.folder / "parts"
    report = mergepipe.run(plan, whole, catalog=False)
    for part in ("1/2", "2/2"):
        mergepipe.run_part(plan, parts, part=part, catalog=False, shard_bytes=60_000)
    assert raw_tensors(parts) == raw_tensors(whole)
    first, second = (manifest_of(folder) for folder in (whole, parts))
    assert first["run"]["rounding_kept"] == second["run"]["rounding_kept"] == report.rounding.share  # type: ignore[union-attr]
    kept = [{tensor["name"]: tensor.get("kept") for tensor in manifest["tensors"]} for manifest in (first, second)]
    assert kept[0] == kept[1]
    mergepipe.replay(whole, models.folder / "again", catalog=False)
    assert raw_tensors(models.folder / "again") == raw_tensors(whole)
    assert mergepipe.verify(whole, deep_fraction=1.0, catalog=False).is_sound
    before = (whole / "model.safetensors").read_bytes()
    (whole / "model.safetensors").write_bytes(before[:-1000] + bytes(1000))
    mergepipe.repair(whole, catalog=False)
    assert (whole / "model.safetensors").read_bytes() == before


def test_nearest_rounding__is_the_default_and_the_option_says_what_the_key_says(models: Models) -> None:
    recipes = {"none": models.recipe(), "nearest": models.recipe(rounding="nearest")}
    for name, recipe in recipes.items():
        merge(recipe, models.folder / name)
    merge(models.recipe(), models.folder / "option", rounding="stochastic")
    merge(models.recipe(rounding="stochastic"), models.folder / "key")
    made = {name: raw_tensors(models.folder / name) for name in ("none", "nearest", "option", "key")}
    assert made["none"] == made["nearest"]
    assert made["option"] == made["key"] != made["none"]
    assert "rounding: stochastic" in manifest_of(models.folder / "option")["recipe"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_report__says_which_share_of_the_change_rounding_kept(models: Models, operator: str) -> None:
    merge(models.recipe(operator, dtype="float32"), models.folder / "exact")
    report = merge(models.recipe(operator), models.folder / "out")
    base, exact, made = (values(folder) for folder in (models.base, models.folder / "exact", models.folder / "out"))
    kept = report.rounding
    assert kept is not None
    assert (kept.dtype, kept.rounding) == ("bfloat16", "nearest")
    assert abs(kept.share - share(base, exact, made)) < 0.05
    whole = [name for name, tensor in exact.items() if tensor.size <= 2048 and name in kept.tensors]
    assert whole
    for name in whole:  # small tensors are measured whole
        expected = share({name: base[name]}, {name: exact[name]}, {name: made[name]})
        assert kept.tensors[name] == pytest.approx(expected, abs=6e-4), name
    manifest = manifest_of(models.folder / "out")
    assert manifest["run"]["rounding_kept"] == kept.share
    assert {t["name"]: t["kept"] for t in manifest["tensors"] if "kept" in t} == kept.tensors
    text = f"kept {100 * kept.share:.0f} % of the change"
    assert str(kept) == f"to bfloat16 {text}"
    assert text in (models.folder / "out" / "README.md").read_text()
    is_warned = any("--rounding stochastic" in notice for notice in report.notices)
    assert is_warned == (kept.share < 0.9)


def test_report__says_that_stochastic_rounding_keeps_what_nearest_loses(models: Models) -> None:
    nearest = merge(models.recipe(), models.folder / "nearest")
    stochastic = merge(models.recipe(rounding="stochastic"), models.folder / "stochastic")
    assert nearest.rounding is not None
    assert stochastic.rounding is not None
    assert nearest.rounding.share < 0.8
    assert abs(stochastic.rounding.share - 1) < 0.05
    assert not stochastic.notices
    assert str(stochastic.rounding).startswith("to bfloat16 (stochastic) kept")


def test_report__says_nothing_where_nothing_is_rounded(models: Models) -> None:
    report = merge(models.recipe(dtype="float32"), models.folder / "exact")
    assert report.rounding is None
    assert not any("kept" in tensor for tensor in manifest_of(models.folder / "exact")["tensors"])
    report = merge(models.recipe(dtype="float32"), models.folder / "asked", rounding="stochastic")
    assert "rounding: stochastic has no effect: no result is rounded" in report.notices


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2"])
def test_stochastic_rounding__holds_for_other_dtypes(models: Models, dtype: str) -> None:
    merge(models.recipe(dtype="float32"), models.folder / "exact")
    for seed in range(2):
        options = {"seed": seed, "threads": 1 + seed}
        merge(models.recipe(dtype=dtype, rounding="stochastic"), models.folder / f"out-{seed}", **options)
    exact = values(models.folder / "exact")
    for name, meant in exact.items():
        errors = [values(models.folder / f"out-{seed}")[name] - meant for seed in range(2)]
        scale = np.sqrt(sum(float(np.dot(error, error)) for error in errors))
        if scale:
            assert abs(sum(float(error.sum()) for error in errors)) < 5 * scale, name


def write_lora(models: Models, name: str, scale: float, **options: object) -> Path:
    """An adapter of every projection of attention, whose delta is about `scale` of the weights."""
    rng, tensors = np.random.default_rng(7), {}
    for layer in range(SHAPE.layers):
        for module in ("q_proj", "o_proj"):
            key = f"model.layers.{layer}.self_attn.{module}"
            tensors[f"{key}.lora_A.weight"] = rng.standard_normal((4, 96)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = (rng.standard_normal((96, 4)) * 0.01 * scale).astype(np.float32)
            if options.get("use_dora"):
                tensors[f"{key}.lora_magnitude_vector"] = np.full(96, 0.2, np.float32)
    modules = ["q_proj", "o_proj"]
    return write_adapter(models.folder / name, tensors, r=4, lora_alpha=4, target_modules=modules, **options)


def apply(models: Models, adapter: Path, out: str, **options: Any) -> mergepipe.MergeReport:
    made = {"catalog": False, "threads": 1, **options}
    return mergepipe.apply_lora(models.base, [adapter], models.folder / out, **made)


def test_lora_apply__says_what_rounding_kept_and_keeps_it_stochastically(models: Models) -> None:
    adapter = write_lora(models, "adapter", 1e-3)
    nearest = apply(models, adapter, "nearest")
    stochastic = apply(models, adapter, "stochastic", rounding="stochastic")
    again = apply(models, adapter, "again", rounding="stochastic", threads=3, shard_bytes=60_000)
    apply(models, adapter, "exact", dtype="float32")
    base, exact = values(models.base), values(models.folder / "exact")
    changed = [name for name in exact if name.endswith(("q_proj.weight", "o_proj.weight"))]
    for report, out in ((nearest, "nearest"), (stochastic, "stochastic")):
        made = values(models.folder / out)
        parts = [{name: tensors[name] for name in changed} for tensors in (base, exact, made)]
        assert report.rounding is not None
        assert sorted(report.rounding.tensors) == sorted(changed)
        assert abs(report.rounding.share - share(*parts)) < 0.08
    assert nearest.rounding is not None
    assert stochastic.rounding is not None
    assert again.rounding is not None
    assert nearest.rounding.share < 0.8
    assert any("--rounding stochastic" in notice for notice in nearest.notices)
    assert abs(stochastic.rounding.share - 1) < 0.1
    assert raw_tensors(models.folder / "again") == raw_tensors(models.folder / "stochastic")
    assert again.rounding.tensors == stochastic.rounding.tensors
    mergepipe.replay(models.folder / "stochastic", models.folder / "replayed", catalog=False)
    assert raw_tensors(models.folder / "replayed") == raw_tensors(models.folder / "stochastic")


def test_lora_apply__rounds_dora_stochastically_too(models: Models) -> None:
    adapter = write_lora(models, "adapter", 1e-2, use_dora=True)
    apply(models, adapter, "exact", dtype="float32")
    reports = [apply(models, adapter, f"out-{n}", rounding="stochastic", threads=n) for n in (1, 3)]
    assert [report.rounding for report in reports] == [None, None]
    assert raw_tensors(models.folder / "out-1") == raw_tensors(models.folder / "out-3")
    exact, made = values(models.folder / "exact"), values(models.folder / "out-1")
    for name in exact:
        error = made[name] - exact[name]
        assert abs(error.sum()) <= 5 * np.sqrt(np.dot(error, error)), name


@pytest.mark.parametrize("verb", ["export", "average"])
def test_tailor__rounds_models_stochastically(models: Models, verb: str) -> None:
    checkpoints = []
    for step in (1, 2):
        checkpoint = models.folder / f"checkpoint-{step}"
        weights = recipe_of("task_arithmetic", {models.experts[step - 1]: SMALL}, models.base, dtype="float32")
        merge(weights, checkpoint)
        (checkpoint / "mergepipe.json").unlink()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        checkpoints.append(checkpoint)
    calls: dict[str, Callable[..., object]] = {
        "export": lambda out, **options: tailor.export(checkpoints[0], models.folder / out, **options),
        "average": lambda out, **options: tailor.average(checkpoints, models.folder / out, **options),
    }
    calls[verb]("exact", dtype="float32")
    calls[verb]("nearest", dtype="bfloat16")
    for out, self_check in (("stochastic", "full"), ("again", "sampled")):
        calls[verb](out, dtype="bfloat16", rounding="stochastic", self_check=self_check)
    exact, made = values(models.folder / "exact"), values(models.folder / "stochastic")
    base = values(models.base)
    nearest = share(base, exact, values(models.folder / "nearest"))
    assert abs(share(base, exact, made) - 1) < abs(nearest - 1) / 4
    assert raw_tensors(models.folder / "again") == raw_tensors(models.folder / "stochastic")
    assert raw_tensors(models.folder / "nearest") != raw_tensors(models.folder / "stochastic")
    assert "rounding: stochastic" in manifest_of(models.folder / "stochastic")["recipe"]


def test_tailor__says_that_nothing_is_rounded(models: Models) -> None:
    checkpoint = models.folder / "checkpoint-1"
    merge(models.recipe(dtype="float32"), checkpoint)
    (checkpoint / "mergepipe.json").unlink()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    report = tailor.export(checkpoint, models.folder / "out", rounding="stochastic")
    assert "rounding: stochastic has no effect: no value is rounded" in report.plan.notices
    report = tailor.export(checkpoint, models.folder / "half", dtype="float16", rounding="stochastic")
    assert not any("rounding" in notice for notice in report.plan.notices)


def test_tailor__rounds_averages_to_small_float16_numbers(models: Models) -> None:
    """Between subnormal numbers the comparison with the sources allows for a step of them."""
    checkpoints = []
    for step in (1, 2):
        checkpoint = models.folder / f"checkpoint-{step}"
        merge(recipe_of("passthrough", {models.base: {"scale": 1e-5 * step}}, dtype="float32"), checkpoint)
        (checkpoint / "mergepipe.json").unlink()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        checkpoints.append(checkpoint)
    for rounding in ("nearest", "stochastic"):
        out = models.folder / rounding
        tailor.average(checkpoints, out, dtype="float16", rounding=rounding, self_check="full")
    assert raw_tensors(models.folder / "nearest") != raw_tensors(models.folder / "stochastic")


def test_rounding__is_refused_where_it_cannot_be_honoured(models: Models) -> None:
    out = models.folder / "out"
    with refuses(RecipeError, "recipe.unknown-name", "unknown rounding 'stochastik'.*stochastic"):
        merge(models.recipe(rounding="stochastik"), out)
    with refuses(RecipeError, "recipe.conflict", "like_base stores codes with scales"):
        merge(models.recipe(rounding="stochastic", out_dtype="like_base"), out)
    with refuses(RecipeError, "option.conflict", "rounding: is stochastic, and the recipe says nearest"):
        merge(models.recipe(rounding="nearest"), out, rounding="stochastic")
    mixture = {"base_model": str(models.base), "gate_mode": "random", "experts": [{"source_model": str(models.base)}]}
    with refuses(RecipeError, "option.conflict", "has no merge_method"):
        merge(mixture, out, rounding="stochastic")
    with refuses(RecipeError, "option.conflict", "^rounding: a checkpoint to resume from"):
        tailor.average(models.experts, out, optimizer="last", rounding="stochastic")
    assert not out.exists()


def test_rounding__is_refused_of_quantised_gguf(models: Models) -> None:
    pytest.importorskip("gguf")
    out = models.folder / "model-Q8_0.gguf"
    with refuses(UnsupportedError, "recipe.unsupported", "codes with scales"):
        merge(models.recipe(), out, rounding="stochastic")
    assert not out.exists()


def test_command_line__takes_rounding_and_prints_what_it_kept(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEPIPE_HOME", str(models.folder / "home"))
    recipe = models.folder / "recipe.yml"
    recipe.write_text(json.dumps(models.recipe()))
    ran = run_command(["merge", str(recipe), str(models.folder / "out"), "--rounding", "stochastic", "--json"])
    assert ran.exit_code == 0, ran.err
    report = ran.json()
    assert report["rounding"]["rounding"] == "stochastic"
    assert report["rounding"]["share"] == manifest_of(models.folder / "out")["run"]["rounding_kept"]
    ran = run_command(["merge", str(recipe), str(models.folder / "text"), "--rounding", "stochastic"])
    assert "rounding      to bfloat16 (stochastic) kept" in ran.out
    ran = run_command(["merge", str(recipe), str(models.folder / "wrong"), "--rounding", "up"])
    assert ran.exit_code != 0
    assert "nearest" in ran.err
