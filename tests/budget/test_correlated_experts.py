"""Budgets of experts whose deltas agree or cancel: the order that knows of it is nearest to the full merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import mergepipe
from support.families import CANCELLING_AND_AGREEING, TINY, FamilyPaths, mixing_of, write_family
from support.model_folders import recipe_of

BLOCK = 16384


def weights_of(model: Path) -> NDArray[np.float64]:
    tensors = mergepipe.load_file(model)
    return np.concatenate([np.asarray(tensors[name], np.float64).ravel() for name in sorted(tensors)])


def test_family__has_the_cosines_that_are_given(tmp_path: Path) -> None:
    family = write_family(tmp_path, TINY, 4, cosines=CANCELLING_AND_AGREEING)
    base = weights_of(family.base)
    deltas_EN = np.stack([weights_of(expert) - base for expert in family.experts])
    lengths_E = np.linalg.norm(deltas_EN, axis=1)
    cosine_EE = deltas_EN @ deltas_EN.T / np.outer(lengths_E, lengths_E)
    assert np.abs(cosine_EE - np.array(CANCELLING_AND_AGREEING)).max() < 0.02


def test_family__has_no_cosines_that_no_deltas_have() -> None:
    assert mixing_of(((1, -1), (-1, 1))) == ((1.0,), (-1.0, 0.0))
    for impossible in (((1, 0.9, -0.9), (0.9, 1, 0.9), (-0.9, 0.9, 1)), ((2, 0), (0, 1))):
        with pytest.raises(ValueError, match="cosines"):
            mixing_of(impossible)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyPaths:
    """Four analyzed experts, of which two cancel and two agree."""
    root = tmp_path_factory.mktemp("correlated")
    family = write_family(root, TINY, 4, cosines=CANCELLING_AND_AGREEING)
    mergepipe.analyze(family.base, family.experts, home=root / "home", block_elements=BLOCK)
    return family


@pytest.mark.thorough
@pytest.mark.parametrize(("budget", "most"), [("25%", 0.60), ("50%", 0.25)])
def test_conflict__is_nearest_where_experts_agree_and_cancel(
    family: FamilyPaths, tmp_path: Path, budget: str, most: float
) -> None:
    home = family.base.parent / "home"
    recipe = recipe_of("task_arithmetic", {expert: {"weight": 1.0} for expert in family.experts}, family.base)
    mergepipe.merge(recipe, tmp_path / "full", home=home)
    base, full = weights_of(family.base), weights_of(tmp_path / "full")
    error = {}
    for order in ("conflict", "norm", "random"):
        mergepipe.merge(recipe, tmp_path / order, budget=budget, select=order, block_elements=BLOCK, home=home)
        merged = weights_of(tmp_path / order)
        error[order] = np.linalg.norm(merged - full) / np.linalg.norm(full - base)
    assert error["conflict"] < most
    assert error["conflict"] < 0.8 * min(error["norm"], error["random"])
