"""Schemes of averaging: the weight of each checkpoint of a run, from the oldest to the newest. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from mergepipe.errors import RecipeError, did_you_mean

DEFAULT_ALPHA = 0.2
_NEXT_TO_NOTHING = 1e-8


def _simple(count: int, _alpha: float) -> tuple[float, ...]:
    """Equal weights."""
    return (1.0,) * count


def _exponential(count: int, alpha: float) -> tuple[float, ...]:
    """`M_i <- alpha theta_i + (1 - alpha) M_(i-1)` from `M_1 = theta_1` on."""
    return tuple((alpha if place else 1.0) * (1 - alpha) ** (count - 1 - place) for place in range(count))


def _linear_weights(count: int, _alpha: float) -> tuple[float, ...]:
    """`w_i = i`: the newest counts most."""
    return tuple(float(place + 1) for place in range(count))


def _decay_shaped(remaining: Callable[[float], float]) -> Callable[[int, float], tuple[float, ...]]:
    """Merge coefficients of a learning rate that decays as `remaining` does, from 1 at 0 to 0 at 1.

    With the rate's share w_i of the i-th interval between checkpoints, `c_j = w_j - w_(j+1)`, `w_0 = 1`, and 0 after
    the last. A linear decay gives equal weights.
    """

    def weights(count: int, _alpha: float) -> tuple[float, ...]:
        shares = [*(remaining(place / count) for place in range(count)), 0.0]
        return tuple(a - b for a, b in pairwise(shares))

    return weights


SCHEMES: Mapping[str, Callable[[int, float], tuple[float, ...]]] = MappingProxyType({
    "sma": _simple,
    "ema": _exponential,
    "wma": _linear_weights,
    "decay-linear": _decay_shaped(lambda t: 1 - t),
    "decay-cosine": _decay_shaped(lambda t: (1 + math.cos(math.pi * t)) / 2),
    "decay-1-sqrt": _decay_shaped(lambda t: 1 - math.sqrt(t)),
})  # fmt: skip


def scheme_weights(scheme: str, count: int, alpha: float = DEFAULT_ALPHA) -> tuple[float, ...]:
    """Return the weights of `count` checkpoints from the oldest to the newest; they sum to 1.

    Source: simple, exponential and weighted averages as in PMA (Li et al. 2025, arXiv 2505.12082); weights shaped as a
    learning-rate decay as in WSM (Tian et al. 2025, arXiv 2507.17634: `w_i = sum_(j >= i) c_j`, solved for c).

    Raises:
        RecipeError: an unknown scheme, or an `alpha` that is not in (0, 1].
    """
    if scheme not in SCHEMES:
        raise RecipeError.of(
            "option.invalid", "--weights", f"'{scheme}' is not known", did_you_mean(scheme, list(SCHEMES))
        )
    if not 0 < alpha <= 1:
        raise RecipeError.of("option.invalid", "--alpha", f"{alpha:g} was given", "give a number above 0, at most 1")
    return normalised(SCHEMES[scheme](count, alpha), "--weights")


def normalised(weights: Sequence[float], where: str) -> tuple[float, ...]:
    """Divide weights by their sum.

    Raises:
        RecipeError: one is not a finite number, or they sum to next to nothing.
    """
    total = sum(weights)  # that of huge numbers is infinite, where fsum would raise
    if not math.isfinite(total) or abs(total) < _NEXT_TO_NOTHING:
        raise RecipeError.of(
            "tailor.average.weights", where, f"the weights {', '.join(f'{w:g}' for w in weights[:8])} sum to {total:g}",
            "give finite numbers whose sum is not 0",
        )  # fmt: skip
    exact_total = math.fsum(weights)
    return tuple(weight / exact_total for weight in weights)
