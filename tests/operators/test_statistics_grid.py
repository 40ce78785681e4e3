"""Statistics by blocks of one size serve plans by blocks of another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.operators.statistics import OCTAVE_SHARES, TensorStatistics, on_grid
from support.planning_problems import Arrays, tensor_statistics

CELL = 256
SIZE = 24 * CELL + 5


def a_tensor(seed: int, unchanged: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """A base and an expert whose cells moved by different amounts, some of them not at all."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(SIZE).astype(np.float32)
    scale = np.repeat(rng.lognormal(-4, 1, SIZE // CELL + 1), CELL)[:SIZE]
    expert = (base + scale * rng.standard_normal(SIZE)).astype(np.float32)
    for cell in unchanged:
        expert[cell * CELL : (cell + 1) * CELL] = base[cell * CELL : (cell + 1) * CELL]
    return base, expert


def kept_octaves(statistics: TensorStatistics) -> np.ndarray:
    return np.asarray(OCTAVE_SHARES[statistics.blocks_B["octaves"]] * np.square(statistics.blocks_B["norm"])[:, None])


@given(seed=st.integers(0, 5), factor=st.sampled_from((2, 3, 8, 100)), unchanged=st.sets(st.integers(0, 23)))
def test_on_grid__of_whole_old_blocks_is_what_analysing_finds(seed: int, factor: int, unchanged: set[int]) -> None:
    base, expert = a_tensor(seed, tuple(sorted(unchanged)))
    known, wanted = (tensor_statistics(base, expert, size) for size in (CELL, factor * CELL))
    carried = on_grid(known, factor * CELL)
    assert carried.grid == wanted.grid
    assert not carried.are_norms_spread
    assert (carried.blocks_B["largest"] == wanted.blocks_B["largest"]).all()
    assert (carried.blocks_B["changed"] == wanted.blocks_B["changed"]).all()
    assert (carried.blocks_B["norm"] >= wanted.blocks_B["norm"] * (1 - 2.0**-23)).all()
    np.testing.assert_allclose(carried.blocks_B["norm"], wanted.blocks_B["norm"], rtol=1e-6)
    assert (carried.cuts_D3 == known.cuts_D3).all()
    above = [np.cumsum(kept_octaves(each), axis=1) for each in (carried, wanted)]
    whole_B1 = np.square(wanted.blocks_B["norm"].astype(np.float64))[:, None]
    assert (np.abs(above[0] - above[1]) <= 0.2 * whole_B1).all()


@given(seed=st.integers(0, 5), size=st.sampled_from((64, 100, 300, 700)), unchanged=st.sets(st.integers(0, 23)))
def test_on_grid__calls_nothing_unchanged_that_is_not_and_keeps_the_energy(
    seed: int, size: int, unchanged: set[int]
) -> None:
    base, expert = a_tensor(seed, tuple(sorted(unchanged)))
    carried = on_grid(tensor_statistics(base, expert, CELL), size)
    delta = expert - base
    assert carried.are_norms_spread
    for record, span in zip(carried.blocks_B, carried.grid.spans(), strict=True):
        inside = delta[span.start : span.stop]
        assert record["changed"] > 0 or not inside.any()
        assert record["largest"] >= np.abs(inside).max()
        assert (record["norm"] > 0) == (record["changed"] > 0)
    energy = float(np.square(carried.blocks_B["norm"].astype(np.float64)).sum())
    assert energy == pytest.approx(float(np.square(delta.astype(np.float64)).sum()), rel=1e-5)


@pytest.mark.parametrize("size", [2 * CELL, CELL // 2, 300])
def test_on_grid__equal_hashes_mean_equal_bytes(size: int) -> None:
    base, first = a_tensor(1)
    second: Arrays = {"w": np.where(np.arange(SIZE) < 4 * CELL, first, first + np.float32(1))}
    hashes = [on_grid(tensor_statistics(base, each, CELL), size).blocks_B["hash"] for each in (first, second["w"])]
    equal_B = (hashes[0] == hashes[1]).all(axis=1)
    spans = list(on_grid(tensor_statistics(base, first, CELL), size).grid.spans())
    assert [bool(equal) for equal in equal_B] == [span.stop <= 4 * CELL for span in spans]


def test_on_grid__of_its_own_grid_is_the_same_and_infinities_stay() -> None:
    base, expert = a_tensor(2)
    known = tensor_statistics(base, expert, CELL)
    assert on_grid(known, CELL) is known
    known.blocks_B["norm"][3] = known.blocks_B["largest"][3] = np.inf
    known.blocks_B["octaves"][3] = 0
    merged = on_grid(known, 2 * CELL).blocks_B["norm"]
    assert np.isinf(merged[1])
    assert np.isfinite(np.delete(merged, 1)).all()
