"""Budgets are read exactly, and refused precisely."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import RecipeError
from mergepipe.planning.budget import BudgetRequest, ByteBudget, ShareBudget, parse_budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", ByteBudget(0)),
        ("4GiB", ByteBudget(4 << 30)),
        (" 500 MB ", ByteBudget(500_000_000)),
        ("1.5g", ByteBudget(1_500_000_000)),
        ("1.9", ByteBudget(1)),
        ("25%", ShareBudget(Fraction(1, 4))),
        ("0.1 %", ShareBudget(Fraction(1, 1000))),
        ("100%", ShareBudget(Fraction(1))),
        ("0%", ShareBudget(Fraction(0))),
    ],
)
def test_parse_budget__reads_bytes_and_shares(text: str, expected: BudgetRequest) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("", "budget.malformed", "'' is not a budget"),
        ("lots", "budget.malformed", "4GiB"),
        ("1e9", "budget.malformed", "not a budget"),
        ("nan", "budget.malformed", "'nan'"),
        ("٣", "budget.malformed", "not a budget"),
        ("4GiB 2", "budget.malformed", "not a budget"),
        ("-1", "budget.negative", "'-1' is negative"),
        ("-5%", "budget.negative", "negative"),
        ("4 parsecs", "budget.unit", "unknown unit 'parsecs'"),
        ("4GBi", "budget.unit", "did you mean"),
        ("101%", "budget.range", "100% reads everything"),
        ("9999999PB", "budget.range", "more than"),
    ],
)
def test_parse_budget__refuses_with_the_right_code(text: str, code: str, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_budget(text, "--budget")
    assert caught.value.code == code
    assert str(caught.value).startswith("budget: ")
    assert part in str(caught.value)


@given(full=st.integers(0, 2**60), share=st.fractions(0, 1))
def test_share_budget__is_cut_off_to_whole_bytes(full: int, share: Fraction) -> None:
    limit = ShareBudget(share).limit_bytes(full)
    assert limit <= share * full < limit + 1
    assert ShareBudget(Fraction(1)).limit_bytes(full) == full


@given(nbytes=st.integers(0, 2**60), full=st.integers(0, 2**60))
def test_byte_budget__is_the_same_whatever_everything_costs(nbytes: int, full: int) -> None:
    assert ByteBudget(nbytes).limit_bytes(full) == nbytes


def test_budgets__refuse_what_is_none() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        ByteBudget(-1)
    with pytest.raises(ValueError, match="not a share: 3/2"):
        ShareBudget(Fraction(3, 2))
