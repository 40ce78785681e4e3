"""Command that plans a merge in the papers' order, |coefficient| x norm of the delta per byte, to compare ours with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mergepipe
from mergepipe.options import PlanOptions
from mergepipe.planning import planner
from mergepipe.planning.selection import Order, descending_order


def _paper_order(items: Any, _problem: Any, data: Any, *_: object) -> Order:
    """Sort by falling score per byte of what is not sparsified, whatever the operator makes of it."""
    coefficient_EB = np.abs(data.rules.coefficient_ET)[:, data.columns.tensor_B]
    score_I = (data.known_statistics.usable_norm_EB * coefficient_EB).ravel()[items.flat_I]
    return descending_order(score_I / np.maximum(items.cost_I, 1))


def _whole_budget(budget_bytes: int, *_: object) -> int:
    return budget_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the plan to the file PLAN."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("budget")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    setattr(planner, "_order", _paper_order)  # noqa: B010 - a process of its own, in which nothing else is planned
    setattr(planner, "least_error_budget", _whole_budget)  # noqa: B010
    plan = mergepipe.plan(chosen.recipe, budget=chosen.budget, home=chosen.home, options=PlanOptions(select="norm"))
    chosen.plan.write_bytes(plan.to_json())


if __name__ == "__main__":
    main()
