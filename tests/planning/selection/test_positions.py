"""Numbers of positions: uniform over seeds, evenly spread along a tensor, and the same whatever else is merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.planning.candidates import find_candidates
from mergepipe.planning.planner import sample_order
from mergepipe.planning.problem import Columns
from mergepipe.planning.selection import position_numbers
from support.planning_problems import BLOCK, make


def numbers(counts: list[int], seed: int, names: list[str] | None = None) -> NDArray[np.float64]:
    """The numbers of tensors with so many positions each."""
    first_T = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tensor_B = np.repeat(np.arange(len(counts)), counts)
    every = np.arange(len(tensor_B), dtype=np.int64)
    slots = np.zeros((1, len(counts)), np.int16)
    columns = Columns((), slots, first_T, tensor_B, every, np.ones_like(every), frozenset())
    return position_numbers(names or [f"tensor {t}" for t in range(len(counts))], columns, seed)


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), digits=st.integers(0, 8))
def test_position_numbers__spread_every_share_evenly_along_a_tensor(count: int, seed: int, digits: int) -> None:
    number_B = numbers([count], seed)
    size = 2 ** min(digits, max(0, count - 1).bit_length())
    for start in range(0, count - size + 1, size):
        assert len(set((number_B[start : start + size] * size).astype(int).tolist())) == size
    assert ((number_B >= 0) & (number_B < 1)).all()


def test_position_numbers__are_uniform_over_seeds() -> None:
    number_SB = np.stack([numbers([5, 1, 16], seed) for seed in range(2000)])
    for b in range(number_SB.shape[1]):
        counts, _ = np.histogram(number_SB[:, b], 10, (0, 1))
        assert abs(counts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)
    together = np.asarray(np.corrcoef(number_SB.T))
    assert abs(together[0, 5:]).max() < 0.12  # of different tensors: independent


def test_position_numbers__do_not_depend_on_other_tensors() -> None:
    alone = numbers([37], 3, ["b"])
    assert (numbers([11, 37, 900], 3, ["a", "b", "c"])[11:48] == alone).all()
    assert not (numbers([37], 4, ["b"]) == alone).any()


@pytest.mark.parametrize("is_known", [False, True], ids=["alike", "by norm"])
def test_sample__is_right_in_the_mean(is_known: bool) -> None:
    """Over seeds each position counts once: what is drawn of it, divided by its probability."""
    sizes = {"layers.0.w": 40 * BLOCK, "layers.1.w": 23 * BLOCK + 5, "layers.2.w": 7 * BLOCK}
    given = make("task_arithmetic", 2, sizes=sizes)
    problem = given.problem if is_known else replace(given.problem, statistics=({}, {}))
    candidates = find_candidates(problem, samples=True)
    budget_bytes = int(candidates.full_E.sum()) // 4
    tensor_B, n_seeds = candidates.columns.tensor_B, 1500
    counted_B, squares_B = np.zeros(len(tensor_B)), np.zeros(len(tensor_B))
    for seed in range(n_seeds):
        drawn = sample_order(problem, candidates, seed).select(budget_bytes)
        assert drawn.planned_bytes <= budget_bytes
        assert drawn.drawn_B is not None
        assert drawn.probability_T is not None
        counts_B = drawn.drawn_B / drawn.probability_T[tensor_B]
        counted_B += counts_B
        squares_B += counts_B**2
    mean_B = counted_B / n_seeds
    deviation_B = np.sqrt((squares_B / n_seeds - mean_B**2) / n_seeds)
    assert (abs(mean_B - 1) < 4.5 * deviation_B).all()
    assert abs(mean_B.mean() - 1) < 0.01
