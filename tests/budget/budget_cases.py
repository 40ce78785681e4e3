"""Merges to be budgeted: one case per operator, a family on disk with its catalogs, and what they share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mergepipe
from mergepipe import Plan
from mergepipe.errors import LimitError
from support.budgets import AWKWARD, GRAIN, TensorPlanOf, forget_statistics, make_budget_models
from support.disk_families import DiskFamily, write_family, write_recipe
from support.oracle import CASES as CASES
from support.oracle import MergeCase

POLICIES = ("norm", "conflict", "random")


@dataclass(frozen=True, slots=True)
class Setting:
    """A family, its recipe, and the home of a catalog."""

    folder: Path
    case: MergeCase
    family: DiskFamily
    recipe: Path
    home: Path

    def analyze(self, block_elements: int = GRAIN) -> None:
        """Fill the catalog with all that the case needs."""
        base, *experts = self.family.places
        mergepipe.analyze(
            base, experts, block_elements=block_elements, densities=sorted(set(self.case.densities)), home=self.home
        )

    def plan(
        self, budget: str, select: str = "norm", *, on_omit: str = "keep", block_elements: int = GRAIN, seed: int = 0
    ) -> Plan:
        """Plan the recipe on small blocks."""
        return mergepipe.plan(
            self.recipe,
            budget,
            seed=seed,
            home=self.home,
            select=select,
            where_omitted=on_omit,
            block_elements=block_elements,
        )

    def run(self, plan: Plan | Path, name: str, memory_bytes: int | None = None) -> Path:
        """Run a plan; where its output is."""
        out = self.folder / name
        mergepipe.run(plan, out, home=self.home, memory_bytes=memory_bytes, threads=2)
        return out

    def full(self, seed: int = 0) -> Path:
        """The merge without a budget."""
        out = self.folder / f"full-{seed}"
        if not out.exists():
            mergepipe.merge(self.recipe, out, seed=seed, catalog=False, threads=2)
        return out

    def with_home(self, name: str) -> Setting:
        """The same with another catalog."""
        return Setting(self.folder, self.case, self.family, self.recipe, self.folder / name)

    def forgetful(self, name: str, share: float, seed: int = 0) -> Setting:
        """The same with a copy of the catalog that lacks some statistics."""
        other = self.with_home(name)
        self.home.mkdir(exist_ok=True)  # of empty tensors there are no statistics
        shutil.copytree(self.home, other.home)
        forget_statistics(other.home, np.random.default_rng(seed), share)
        return other


def make_setting(
    folder: Path,
    case: MergeCase,
    *,
    layout: int = 0,
    seed: int = 0,
    plans: Sequence[TensorPlanOf] = AWKWARD,
    out_dtype: str | None = None,
) -> Setting:
    """Write a family with as many experts as the case has, and its recipe."""
    family = write_family(folder / "models", make_budget_models(len(case.weights), seed, plans), layout)
    recipe = write_recipe(folder / "recipe.yml", case, family, out_dtype)
    return Setting(folder, case, family, recipe, folder / "home")


def useful_plan(make_plan: Callable[[], Plan]) -> Plan | None:
    """Make a plan; None where the budget holds no block or index at all, which is refused."""
    try:
        return make_plan()
    except LimitError as error:
        if error.code != "budget.too-small":
            raise
        return None
