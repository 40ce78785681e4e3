"""Our exponential and logarithm, against the platform's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.numerics import exp_tile, log_tile

Numbers = NDArray[np.float64]


def of_all(tile_function: Callable[[Numbers, int, Numbers], None], values: Numbers) -> Numbers:
    out = np.empty_like(values)
    for start in range(0, len(out), TILE_ELEMENTS):
        tile = values[start : start + TILE_ELEMENTS]
        tile_function(tile, len(tile), out[start:])
    return out


def units_off(found: Numbers, wanted: Numbers) -> float:
    """The largest distance in units of the last place."""
    return float(np.max(np.abs(found - wanted) / np.spacing(np.abs(wanted))))


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1e-6, 1e-6), (-700, 709), (-745, -700)])
def test_exp_tile__is_within_two_units_of_the_platform(low: float, high: float) -> None:
    values = np.random.default_rng(1).uniform(low, high, 50_000)
    assert units_off(of_all(exp_tile, values), np.exp(values)) <= 2


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1e-6, 1e-6), (-700, 709)])
def test_log_tile__is_within_two_units_of_the_platform(low: float, high: float) -> None:
    values = np.exp(np.random.default_rng(2).uniform(low, high, 50_000))
    values = values[values != 1.0]
    assert units_off(of_all(log_tile, values), np.log(values)) <= 2


def test_exp_tile__knows_its_limits() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 710.0, 1e300, -746.0, -1e300])
    np.testing.assert_array_equal(of_all(exp_tile, values), [1, 1, np.inf, 0, np.nan, np.inf, np.inf, 0, 0])


def test_log_tile__knows_its_limits() -> None:
    np.testing.assert_array_equal(of_all(log_tile, np.array([1.0, np.inf, np.nan])), [0, np.inf, np.nan])


@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_tiles__do_not_depend_on_how_they_are_cut(length: int) -> None:
    values = np.random.default_rng(3).uniform(0.1, 3, 100)
    for function in (exp_tile, log_tile):
        cut = np.empty_like(values)
        for start in range(0, 100, length):
            function(values[start:], min(length, 100 - start), cut[start:])
        np.testing.assert_array_equal(cut, of_all(function, values))
