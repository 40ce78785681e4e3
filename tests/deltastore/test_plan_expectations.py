"""Expected errors of rules that elect: near what comes, so that a target is kept; called the least where they are."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.api import pack
from mergepipe.cli import main
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.planning.plan import Plan
from support.disk_families import DiskFamily, read_snapshot, write_family, write_recipe
from support.oracle import MergeCase
from support.rounding import decode, encode
from support.slow_cases import slow_unless

SIZES = {"layers.0.up": 3 * BLOCK_ELEMENTS, "layers.1.up": BLOCK_ELEMENTS + 9001, "layers.2.up": 2 * BLOCK_ELEMENTS}
STDS = (4e-4, 2e-4, 6e-4, 3e-4)
WEIGHTS = (0.4, 0.3, 0.5, 0.3)
CASES = {
    "ties": MergeCase("ties", WEIGHTS, (0.2, 0.2, 0.2, 0.2), normalize=True),
    "ties-sum": MergeCase("ties", WEIGHTS, (0.2, 0.2, 0.2, 0.2), normalize=False),
    "dare_ties": MergeCase("dare_ties", WEIGHTS, (0.5, 0.3, 0.5, 0.4), normalize=True),
}
FAST = {("ties", "12%", "norm"), ("ties-sum", "35%", "random"), ("dare_ties", "70%", "norm")}


@pytest.fixture(name="family", scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> DiskFamily:
    """Three packed experts and a raw one, analysed."""
    rng = np.random.default_rng(0)
    base = {name: encode((rng.standard_normal(n) * 0.02).astype(np.float32), BF16) for name, n in SIZES.items()}
    models = [base]
    for e, std in enumerate(STDS):
        steps = {
            name: (rng.standard_normal(n) * std * (1 + (i + e) % 3)).astype(np.float32)
            for i, (name, n) in enumerate(SIZES.items())
        }
        models.append({name: encode(decode(base[name].tobytes(), BF16) + steps[name], BF16) for name in SIZES})
    folder = tmp_path_factory.mktemp("expectations")
    raw = write_family(folder / "raw", models)
    stores = pack(raw.places[0], raw.places[1:4], folder / "stores", threads=2)
    family = replace(raw, places=(raw.places[0], *(each.folder for each in stores.experts), raw.places[4]))
    mergepipe.analyze(family.places[0], family.places[1:], options=RunOptions(home=folder / "home"))
    return family


def home_of(family: DiskFamily) -> Path:
    return family.places[0].parent.parent / "home"


def measured(family: DiskFamily, recipe: Path, plan: Plan, folder: Path) -> float:
    mergepipe.run(plan, folder / "cut", force=True, options=RunOptions(catalog=False))
    mergepipe.merge(recipe, folder / "full", force=True, options=MergeOptions(catalog=False))
    found, full = read_snapshot(folder / "cut"), read_snapshot(folder / "full")
    left = whole = 0.0
    for name in SIZES:
        all_of = full[name].astype(np.float64)
        left += float(np.square(found[name].astype(np.float64) - all_of).sum())
        whole += float(np.square(all_of - decode(family.models[0][name].tobytes(), BF16).astype(np.float64)).sum())
    return float(np.sqrt(left / whole))


@pytest.mark.parametrize(
    ("name", "budget", "policy"),
    slow_unless(FAST.__contains__, product(CASES, ("12%", "35%", "70%"), ("norm", "random"))),
)
def test_plan__of_an_election_expects_what_comes(
    family: DiskFamily, tmp_path: Path, name: str, budget: str, policy: str
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yml", CASES[name], family, "float32")
    plan = mergepipe.plan(recipe, budget, home=home_of(family), options=PlanOptions(select=policy))
    assert plan.expected_error is not None
    assert not plan.error_is_least
    found = measured(family, recipe, plan, tmp_path)
    assert 0.84 * found <= plan.expected_error <= 1.2 * found


@pytest.mark.parametrize("target", [0.7, 0.4])
def test_plan__of_ties_for_an_error_keeps_it(family: DiskFamily, tmp_path: Path, target: float) -> None:
    recipe = write_recipe(tmp_path / "recipe.yml", CASES["ties"], family, "float32")
    plan = mergepipe.plan(recipe, target_error=target, home=home_of(family))
    assert plan.expected_error is not None
    assert 0.8 * target < plan.expected_error <= target
    # Energies on record are of all elements that equal a cut, of which the merge keeps some.
    assert measured(family, recipe, plan, tmp_path) <= 1.1 * target


def test_plan__of_ties_inside_a_band_says_that_its_error_is_the_least(
    family: DiskFamily, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yml", replace(CASES["ties"], densities=(0.1, 0.2, 0.2, 0.2)), family)
    plan = mergepipe.plan(recipe, "50%", home=home_of(family))
    assert plan.expected_error is not None
    assert plan.error_is_least
    assert json.loads(plan.to_json())["error_is_least"] is True
    assert main(["plan", str(recipe), "--budget", "50%", "--home", str(home_of(family))]) == 0
    assert "at least" in capsys.readouterr().out
    aimed = mergepipe.plan(recipe, target_error=0.5, home=home_of(family))
    assert "the error may be larger than 0.5" in {each.decision for each in aimed.fallbacks}
    assert not mergepipe.plan(recipe, "100%", home=home_of(family)).error_is_least
