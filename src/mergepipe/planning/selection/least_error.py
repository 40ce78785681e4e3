"""Choose the budget to select for: the one asked for, or a smaller one with which less is expected to be lost."""

from __future__ import annotations

from collections.abc import Callable

STEPS = 20
"""Budgets are compared with those at multiples of this part of the full cost."""
_DIGITS = 9  # so that the choice does not depend on the last bits of a sum


def least_error_budget(budget_bytes: int, full_cost_bytes: int, error_of: Callable[[int], float]) -> int:
    """Return which of `budget_bytes` and the steps below it has the least expected error, of equals the largest.

    Law: for steps `a <= b`, `error_of(least_error_budget(b)) <= error_of(least_error_budget(a))`.
    """
    least_bytes, least_error = budget_bytes, round(error_of(budget_bytes), _DIGITS)
    for step in range(STEPS - 1, 0, -1):
        smaller_bytes = full_cost_bytes * step // STEPS
        if smaller_bytes < budget_bytes and round(error_of(smaller_bytes), _DIGITS) < least_error:
            least_bytes, least_error = smaller_bytes, round(error_of(smaller_bytes), _DIGITS)
    return least_bytes
