"""The fast suite runs a tenth of the cases of thorough tests, and shows every value that several of them share."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from support.samples import SHARE, Case, sampled

COUNTS = st.lists(st.integers(1, 8), min_size=1, max_size=3)


def matrix(counts: list[int]) -> list[Case]:
    """All combinations of so many values of each parameter."""
    values = product(*([str(value) for value in range(count)] for count in counts))
    return [{f"parameter {number}": value for number, value in enumerate(case)} for case in values]


@given(COUNTS, st.text("abc", max_size=3))
def test_sample__has_every_shared_value_and_at_least_a_tenth(counts: list[int], name: str) -> None:
    cases = matrix(counts)
    kept = sampled(name, cases)
    assert kept == sampled(name, cases)
    if len(cases) == 1:
        assert kept == set()
        return
    assert len(cases) <= SHARE * len(kept)
    several = [number for number, count in enumerate(counts) if count < len(cases)]
    for number in several:
        shown = {cases[case][f"parameter {number}"] for case in kept}
        assert len(shown) == counts[number]


def test_sample__of_a_large_matrix_is_small_and_that_of_another_test_is_another() -> None:
    cases = matrix([30, 4, 3])
    samples = [sampled(name, cases) for name in ("first", "second")]
    assert samples[0] != samples[1]
    assert [len(kept) for kept in samples] == [36, 36]


def test_sample__of_rows_that_share_nothing_is_a_tenth() -> None:
    assert len(sampled("rows", matrix([95]))) == 10
