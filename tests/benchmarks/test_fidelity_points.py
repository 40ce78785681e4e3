"""Tests of benchmarks.fidelity_points and of the tables of benchmarks.fidelity_results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from benchmarks.fidelity_points import BUDGET_PERCENTS, OPERATORS, POLICIES, Point, points, reference_seed
from benchmarks.fidelity_results import Fidelity, Reference, Report, mean_loss, to_json, to_markdown
from benchmarks.local_text import GENERAL

from mergepipe.operators.registry import operator_specs

SEEDS = (0, 1, 2)


def fidelity(point: Point, error: float, loss: float) -> Fidelity:
    losses = {GENERAL: 9.0, "prose": loss, "legal": loss + 2}
    return Fidelity(point, 25, 30, 100, 1.0, error, error + 0.5, error / 100, losses)


def test_points__are_all_different() -> None:
    found = list(points(OPERATORS, POLICIES, BUDGET_PERCENTS, SEEDS))
    assert len(set(found)) == len(found)
    # five budgets below 100 %: two policies once and random thrice, or everything thrice where the operator is random
    assert len(found) == 3 * (5 * (2 + 3) + 1) + 2 * (5 * 3 * 3 + 3)


def test_points__only_random_things_have_several_seeds() -> None:
    found = set(points(["linear", "dare_ties"], POLICIES, (25, 100), SEEDS))
    assert Point("linear", "norm", 25, 1) not in found
    assert Point("linear", "random", 25, 2) in found
    assert Point("dare_ties", "norm", 25, 2) in found
    assert Point("linear", "norm", 100, 0) in found
    assert Point("linear", "random", 100, 0) not in found


def test_reference_seed__is_the_points_own_where_the_operator_is_random() -> None:
    assert reference_seed(Point("dare_ties", "norm", 5, 2), SEEDS) == 2
    assert reference_seed(Point("linear", "random", 5, 2), SEEDS) == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_recipe__names_known_operators_and_parameters(name: str) -> None:
    recipe = yaml.safe_load(OPERATORS[name].recipe(Path("b"), [Path("e1"), Path("e2")], "float32"))
    known = {parameter.name for parameter in operator_specs()[name].parameters}
    assert recipe["merge_method"] == name
    assert [Path(model["model"]).name for model in recipe["models"]] == ["e1", "e2"]
    assert all(set(model["parameters"]) <= known for model in recipe["models"])
    assert recipe["out_dtype"] == "float32"


def test_mean_loss__leaves_out_general_text() -> None:
    assert mean_loss({GENERAL: 9.0, "prose": 1.0, "legal": 2.0}) == 1.5


def test_to_markdown__shows_means_over_seeds_and_their_half_range() -> None:
    measured = [fidelity(Point("linear", "random", 25, seed), 0.5 + seed / 10, 2.0) for seed in SEEDS]
    measured += [
        fidelity(Point("linear", "norm", 25, 0), 0.3, 1.0),
        fidelity(Point("linear", "norm", 100, 0), 0.0, 1.0),
    ]
    losses = {GENERAL: 4.0, "prose": 3.0}
    text = to_markdown(Report(losses, (Reference("linear", 0, 0.02, losses),), tuple(measured)))
    assert "| random | 0.6000 ± 0.1000 | 0.0000 |" in text
    assert "| norm | 0.3000 | 0.0000 |" in text
    assert "| random | 3.0000 ± 0.0000 | 2.0000 |" in text  # held-out loss
    assert "| full linear | 1 | 0.0200 | 3.0000 | 4.0000 |" in text


def test_to_json__holds_every_point_with_its_share() -> None:
    point = Point("ties", "norm", 25, 0)
    content = json.loads(to_json(Report({GENERAL: 1.0}, (), (fidelity(point, 0.1, 2.0),))))
    assert content["measured"][0]["point"]["policy"] == "norm"
    assert content["measured"][0]["read_fraction"] == 0.25
