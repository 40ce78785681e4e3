"""Choose the budget to select for, so that the expected error never grows with the budget that is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

STEPS = 20
"""Budgets are compared at multiples of this part of the full cost, and at halves of the first of them."""
HALVINGS = 3
FINE_STEPS = 16
"""Between two such budgets, selections are made at this many of their differences."""
_DIGITS = 9  # so that the choice does not depend on the last bits of a sum


def compared_budgets(full_cost_bytes: int, least_bytes: int) -> tuple[int, ...]:
    """Return the budgets that are compared, ascending from the least useful one to the full cost."""
    multiples = {full_cost_bytes * step // STEPS for step in range(1, STEPS + 1)}
    halves = {full_cost_bytes // STEPS >> halving for halving in range(1, HALVINGS + 1)}
    return tuple(sorted({least_bytes} | {nbytes for nbytes in multiples | halves if nbytes > least_bytes}))


def least_error_budget(
    budget_bytes: int, compared: tuple[int, ...], errors_of: Callable[[Sequence[int]], list[float]]
) -> int:
    """Return the budget to select for: of those compared with the least error, of equals the largest.

    Between two compared budgets their fine steps count as well, unless they have a smaller error than the upper one.
    Below the first compared budget nothing is compared. `errors_of` is called once, with all budgets that count.

    Law: for `compared[0] <= a <= b`, the error of `least_error_budget(b)` is at most that of `least_error_budget(a)`.
    """
    n_reached = bisect_right(compared, budget_bytes)
    if not n_reached:
        return budget_bytes
    fine = [nbytes for nbytes in _fine_steps(compared[n_reached - 1 : n_reached + 1]) if nbytes <= budget_bytes]
    counting = [*compared[: n_reached + bool(fine)], *fine]
    error_at = {nbytes: round(error, _DIGITS) for nbytes, error in zip(counting, errors_of(counting), strict=True)}
    lower_limit = error_at[compared[n_reached]] if fine else 0.0
    allowed = [*compared[:n_reached], *(nbytes for nbytes in fine if error_at[nbytes] >= lower_limit)]
    return min(allowed, key=lambda nbytes: (error_at[nbytes], -nbytes))


def _fine_steps(bounds: tuple[int, ...]) -> list[int]:
    """List the fine steps between a compared budget and the next one, if there is one."""
    lower_bytes, upper_bytes = bounds[0], bounds[-1]
    steps = {lower_bytes + (upper_bytes - lower_bytes) * step // FINE_STEPS for step in range(1, FINE_STEPS)}
    return sorted(steps - {lower_bytes})
