"""Masks that an explanation writes: each restores what a merge holds of an expert. Counts are recorded in `surface`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import NotFoundError, OutputError, RecipeError
from support.command_line import run_command
from support.model_folders import recipe_of, write_model
from support.refusals import refuses

SHAPES = {"embed.weight": (30, 24), "layers.0.weight": (16, 40), "layers.0.conv": (6, 1, 3), "norm.weight": (16,)}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A sum of three experts' deltas, one of which a LoRA-like sparse one, in `merged`."""
    rng = np.random.default_rng(5)
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    for e, name in enumerate(("base", "a", "b", "c")):
        changed = {n: x + (rng.random(x.shape) < 0.5) * rng.standard_normal(x.shape) * e for n, x in base.items()}
        write_model(tmp_path / name, {n: x.astype(np.float32) for n, x in changed.items()})
    models = {tmp_path / name: {"weight": 0.5} for name in "abc"}
    recipe = recipe_of("task_arithmetic", models, tmp_path / "base")
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe), encoding="utf-8")
    mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "merged", home=tmp_path / "home")
    return tmp_path / "merged"


@pytest.mark.thorough
def test_masks__restore_what_is_nearest_to_each_expert(tmp_path: Path, snapshot: Path) -> None:
    report = mergepipe.explain(snapshot, masks=tmp_path / "masks", home=tmp_path / "home")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert [Path(mask.file).name for mask in report.masks] == [f"{name}.safetensors" for name in "abc"]
    for mask, name in zip(report.masks, "abc", strict=True):
        expert = load_file(tmp_path / name / "model.safetensors")
        stored = load_file(tmp_path / "masks" / f"{name}.safetensors")
        is_set = {n: abs(expert[n] - base[n]) > abs((merged[n] - base[n]) - (expert[n] - base[n])) for n in SHAPES}
        for tensor, shape in SHAPES.items():
            if shape[-1] % 8:
                found = stored[tensor].astype(bool)
            else:
                found = np.unpackbits(stored[f"{tensor}.mask_bits"], axis=-1, bitorder="little").astype(bool)
            assert np.array_equal(found, is_set[tensor])
        masked = np.concatenate([(is_set[n] * (merged[n] - base[n])).astype(float).ravel() for n in SHAPES])
        delta = np.concatenate([(expert[n] - base[n]).astype(float).ravel() for n in SHAPES])
        assert mask.scale == pytest.approx(masked @ delta / (masked @ masked), rel=1e-5)
        lost = np.linalg.norm(delta - mask.scale * masked) / np.linalg.norm(delta)
        assert mask.lost_fraction == pytest.approx(lost, rel=1e-5)
        assert mask.set_fraction == pytest.approx(np.mean(np.concatenate([of.ravel() for of in is_set.values()])))
        for scale, out in ((1.0, tmp_path / f"restored-{name}"), (mask.scale, tmp_path / f"scaled-{name}")):
            models = {snapshot: {"weight": {"file": mask.file, "value": scale}}}
            recipe = recipe_of("fisher", models, tmp_path / "base", parameters={"normalize": False})
            made = mergepipe.merge(recipe, out, home=tmp_path / "home")
            assert not made.notices
            for tensor, values in load_file(out / "model.safetensors").items():
                wanted = base[tensor] + scale * is_set[tensor] * (merged[tensor] - base[tensor])
                np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)


def test_masks__leave_out_what_is_not_finite(tmp_path: Path, snapshot: Path) -> None:
    weights = load_file(tmp_path / "a" / "model.safetensors")
    weights["norm.weight"][:2] = np.nan, np.inf
    write_model(tmp_path / "a", weights)
    mergepipe.merge(tmp_path / "recipe.yml", snapshot, home=tmp_path / "home", force=True)
    report = mergepipe.explain(snapshot, masks=tmp_path / "masks", home=tmp_path / "home")
    assert all(0 < mask.lost_fraction < 1 and mask.scale > 0 for mask in report.masks)
    assert load_file(tmp_path / "masks" / "a.safetensors")["norm.weight.mask_bits"][0] & 3 == 0


def test_masks__need_a_snapshot_and_a_new_folder(tmp_path: Path, snapshot: Path) -> None:
    plan = mergepipe.plan(tmp_path / "recipe.yml", "50%", home=tmp_path / "home")
    assert mergepipe.explain(plan).touched > 0
    with refuses(RecipeError, "option.conflict"):
        mergepipe.explain(plan, masks=tmp_path / "masks")
    with refuses(OutputError, "output.exists"):
        mergepipe.explain(snapshot, masks=tmp_path / "home", home=tmp_path / "home")
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(NotFoundError):
        mergepipe.explain(snapshot, masks=tmp_path / "masks", home=tmp_path / "home")
    assert not (tmp_path / "masks").exists()


def test_bound__is_stated_by_plans_and_explanations_and_merges_warn_where_it_is_worse_than_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three experts one is read: its weight becomes 1 where it was 1/3, and its delta is longer than the others'."""
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(5)
    lengths = {"a": 0.3, "b": 0.1, "c": 0.1}
    deltas = {name: np.asarray(scale * rng.standard_normal((64, 64))) for name, scale in lengths.items()}
    total = np.sum(list(deltas.values()), axis=0)
    base = rng.standard_normal((64, 64)).astype(np.float32)
    write_model(tmp_path / "base", {"layers.0.weight": base})
    for name, delta in deltas.items():
        write_model(tmp_path / name, {"layers.0.weight": (base + delta).astype(np.float32)})
    names = ["base", *deltas]
    run_command(["analyze", *(str(tmp_path / name) for name in names)])
    models = {tmp_path / name: {"weight": float(name != "base")} for name in names}
    recipe, plan = tmp_path / "recipe.yml", tmp_path / "plan.json"
    recipe.write_text(json.dumps(recipe_of("linear", models)), encoding="utf-8")
    reading_one = ["--budget", "34%", "--select", "norm"]
    for where_omitted, is_worse in (("keep", False), ("renormalize", True)):
        options = [*reading_one, "--where-omitted", where_omitted]
        planned = run_command(["plan", str(recipe), *options, "-o", str(plan), "--json"])
        bound = json.loads(planned.out)["bound"]
        error = np.linalg.norm(total / 3 - deltas["a"] * (1.0 if is_worse else 1 / 3))
        assert error <= bound["distance"] <= 1.3 * error + 3
        assert (bound["distance"] > bound["nothing_read"]) is is_worse
        explained = run_command(["explain", str(plan)]).out
        name = "coefficient drift, equations 16 to 18" if is_worse else "omission bound, Proposition 2"
        assert f"({name})" in explained
        merged = run_command(["merge", str(recipe), str(tmp_path / f"out-{where_omitted}"), *options])
        assert merged.exit_code == 0
        assert ("worse than the base" in merged.out) is is_worse
        assert ("worse than the base" in explained) is is_worse
