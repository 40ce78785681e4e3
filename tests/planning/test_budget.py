"""Budgets are read exactly, and refused precisely."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import RecipeError
from mergepipe.planning.budget import (
    BudgetRequest,
    ByteBudget,
    ShareBudget,
    parse_budget,
    parse_fraction,
    retry_reserve_bytes,
)
from support.refusals import refuses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", ByteBudget(0)),
        ("4GiB", ByteBudget(4 << 30)),
        (" 500 MB ", ByteBudget(500_000_000)),
        ("1.5g", ByteBudget(1_500_000_000)),
        ("1.9B", ByteBudget(1)),
        ("25B", ByteBudget(25)),
        (str(1 << 20), ByteBudget(1 << 20)),
        ("0.25", ShareBudget(Fraction(1, 4))),
        (".5", ShareBudget(Fraction(1, 2))),
        ("1.0", ShareBudget(Fraction(1))),
        (np.float64(0.25), ShareBudget(Fraction(1, 4))),
        (1e-5, ShareBudget(Fraction(1, 100_000))),
        (0, ByteBudget(0)),
        ("25%", ShareBudget(Fraction(1, 4))),
        ("0.1 %", ShareBudget(Fraction(1, 1000))),
        ("100%", ShareBudget(Fraction(1))),
        ("0%", ShareBudget(Fraction(0))),
    ],
)
def test_parse_budget__reads_bytes_and_shares(text: str | float, expected: BudgetRequest) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "'' is not a budget"),
        ("lots", "4GiB"),
        ("1e9", "not a budget"),
        ("nan", "'nan'"),
        (True, "'True' is not a budget"),
        ("٣", "not a budget"),
        ("4GiB 2", "not a budget"),
        ("-1", "'-1' is negative"),
        ("-5%", "negative"),
        ("4 parsecs", "unknown unit 'parsecs'"),
        ("4GBi", "did you mean"),
        ("25", "did you mean 25%.*bytes are written 25B"),
        ("1", "did you mean 1%?"),
        ("5000", "did you mean 5000kB or 5000MB?"),
        (str((1 << 20) - 1), "without a unit"),
        ("1.9", "did you mean 1.9%?"),
        (25, "did you mean 25%?"),
        (math.nan, "nan"),
        ("101%", "100% reads everything"),
        ("9999999PB", "more than"),
    ],
)
def test_parse_budget__refuses_with_the_right_code(text: str | float, part: str) -> None:
    with refuses(RecipeError, "option.invalid", f"^budget: .*{part}"):
        parse_budget(text, "--budget")


@given(full=st.integers(0, 2**60), share=st.fractions(0, 1))
def test_share_budget__is_cut_off_to_whole_bytes(full: int, share: Fraction) -> None:
    limit = ShareBudget(share).limit_bytes(full)
    assert limit <= share * full < limit + 1
    assert ShareBudget(Fraction(1)).limit_bytes(full) == full


def test_budgets__refuse_what_is_none() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        ByteBudget(-1)
    with pytest.raises(ValueError, match="not a share: 3/2"):
        ShareBudget(Fraction(3, 2))


@given(units=st.integers(1, 10_000))
def test_number_forms__agree_everywhere(units: int) -> None:
    decimal, percent = f"{units / 10_000:.4f}", f"{units / 100:.2f}%"
    assert parse_budget(decimal) == parse_budget(percent)
    assert parse_fraction(decimal, "--density") == parse_fraction(percent, "--density")


@given(budget=st.integers(0, 1 << 40), more=st.integers(0, 1 << 30), full=st.integers(0, 1 << 41))
def test_retry_reserve_bytes__leaves_no_less_of_a_larger_budget(budget: int, more: int, full: int) -> None:
    spent, later = (b - retry_reserve_bytes(b, full) for b in (budget, budget + more))
    assert 0 <= spent <= later
    assert later >= full or budget + more < full


@pytest.mark.parametrize(
    ("budget", "reserve"), [(0, 0), (1_000, 100), (100 << 20, 8 << 20), (1 << 30, (1 << 30) // 50)]
)
def test_retry_reserve_bytes__is_one_request_or_a_small_share(budget: int, reserve: int) -> None:
    assert retry_reserve_bytes(budget, 1 << 40) == reserve
    assert retry_reserve_bytes(budget, budget) == 0
