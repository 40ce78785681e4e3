"""A budgeted merge follows from recipe, inputs, seed, version, budget and what is on record, not from other merges."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mergepipe
from support.disk_families import write_single

GRAIN = 16_384
N_EXPERTS = 3
OPERATORS = {
    "ties": "parameters: {weight: 1.0, density: 0.2}",
    "dare_linear": "parameters: {weight: 0.5, density: 0.4}",
    "task_arithmetic": "parameters: {weight: 0.4}",
}
EVENTS = ("full", "other budget", "other recipe", "other operator", "sweep", "explain", "plan", "same")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and experts whose tensors moved by very different amounts, and recipes of three operators."""
    folder = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(11)
    base = {f"layers.{t}.w": rng.standard_normal(6 * GRAIN + 100 * t).astype(np.float32) for t in range(5)}
    write_single(folder / "base", base)
    for e in range(N_EXPERTS):
        moved = {
            name: (values + rng.lognormal(-6, 1.5) * rng.standard_normal(len(values))).astype(np.float32)
            for name, values in base.items()
        }
        write_single(folder / f"expert-{e}", moved)
    for operator, parameters in OPERATORS.items():
        for name, experts in (("", (0, 1, 2)), ("-other", (2, 1))):
            models = "".join(f"  - model: expert-{e}\n" for e in experts)
            text = f"merge_method: {operator}\nbase_model: base\nmodels:\n{models}{parameters}\n"
            (folder / f"{operator}{name}.yml").write_text(text)
    return folder


def merge(recipe: Path, out: Path, home: Path, budget: str | None, **plan: Any) -> Any:
    return mergepipe.merge(recipe, out, budget=budget, home=home, threads=2, block_elements=GRAIN, **plan)


def published(out: Path) -> tuple[str, str]:
    """The digest of the weights and that of the plan."""
    weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return weights, json.loads((out / "mergepipe.json").read_text())["plan_digest"]


def happen(event: str, family: Path, operator: str, place: Path, number: int) -> None:
    recipe, out, home = family / f"{operator}.yml", place / f"earlier-{number}", place / "home"
    match event:
        case "full":
            merge(recipe, out, home, None)
        case "other budget":
            merge(recipe, out, home, "60%")
        case "other recipe":
            merge(family / f"{operator}-other.yml", out, home, "40%")
        case "other operator":
            merge(family / "dare_linear-other.yml", out, home, None)
        case "sweep":
            mergepipe.sweep(recipe, ["25%", "50%"], work=place, home=home, threads=2)
        case "explain":
            merge(recipe, out, home, "30%")
            mergepipe.explain(out, home=home)
        case "plan":
            mergepipe.plan(recipe, "35%", home=home, block_elements=GRAIN)
        case "same":
            merge(recipe, out, home, "25%")


@settings(max_examples=settings.default.max_examples // 5, deadline=None)  # type: ignore[union-attr]
@given(data=st.data())
@pytest.mark.parametrize("operator", OPERATORS)
def test_merge__gives_the_same_bytes_and_the_same_plan_after_any_other_merges(
    operator: str, family: Path, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3))
    budget, select = data.draw(st.sampled_from(["25%", "50%"])), data.draw(st.sampled_from(["norm", "sample"]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        merge(family / f"{operator}.yml", place / "first", place / "home-of-nothing", budget, select=select)
        for number, event in enumerate(history):
            happen(event, family, operator, place, number)
        merge(family / f"{operator}.yml", place / "second", place / "home", budget, select=select)
        assert published(place / "second") == published(place / "first")
