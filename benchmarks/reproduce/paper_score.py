"""Command that plans a merge in the papers' order, |coefficient| x norm of the delta per byte, to compare ours with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import mergepipe
from mergepipe.options import PlanOptions
from mergepipe.planning import planner
from mergepipe.planning.candidates import Candidates, coefficients
from mergepipe.planning.problem import PlanningProblem
from mergepipe.planning.selection import ItemOrder, descending_order, make_items

_LARGEST_NORM = float(np.finfo(np.float32).max)


def _paper_order(_problem: PlanningProblem, candidates: Candidates, *_: object) -> ItemOrder:
    """Sort by falling score per byte of what is not sparsified, whatever the operator makes of it."""
    columns = candidates.columns
    norm_EB = np.zeros_like(candidates.score_EB)
    for (e, t), statistics in candidates.statistics.items():
        norm_EB[e, columns.of_tensor(t)] = np.minimum(statistics.blocks_B["norm"], _LARGEST_NORM)
    coefficient_EB = np.abs(coefficients(columns, candidates.rules))[:, columns.tensor_B]
    items = make_items(candidates, in_steps=False)
    score_I = (norm_EB * coefficient_EB).ravel()[items.flat_I]
    return ItemOrder(candidates, items, descending_order(score_I / np.maximum(items.cost_I, 1)))


def main(recipe: str, budget: str, out: str, home: str) -> None:
    """Write the plan to the file `out`."""
    setattr(planner, "_order", _paper_order)  # noqa: B010 - a process of its own, in which nothing else is planned
    plan = mergepipe.plan(Path(recipe), budget=budget, home=Path(home), options=PlanOptions(select="norm"))
    Path(out).write_bytes(plan.to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
