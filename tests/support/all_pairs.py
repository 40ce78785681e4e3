"""Rows of values of several factors in which every pair of values that exists occurs: a small covering array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations

Value = tuple[str, str]
"""A factor and one of its values."""
Pair = frozenset[Value]
Factors = Mapping[str, Sequence[str]]
Row = Mapping[str, str]


def pair(first: Value, second: Value) -> Pair:
    """Return the pair of two values, whichever comes first."""
    return frozenset((first, second))


def pairs_of(row: Row) -> set[Pair]:
    """Return all pairs of values that occur in a row."""
    return {pair(first, second) for first, second in combinations(row.items(), 2)}


def all_pairs(factors: Factors) -> Iterator[Pair]:
    """Yield every pair of values of two factors, in the order of the factors."""
    for (first, first_values), (second, second_values) in combinations(factors.items(), 2):
        for value in first_values:
            for other in second_values:
                yield pair((first, value), (second, other))


def covering_rows(factors: Factors, absent: Set[Pair]) -> list[Row]:
    """Return rows that hold every pair that can occur, and none of those that are `absent`.

    Each row begins with the first pair that no row before holds, and takes the value of each further factor that adds
    most pairs. A pair that cannot be completed to a row, because other values are absent with both, is in no row.
    """
    missing = dict.fromkeys(possible for possible in all_pairs(factors) if possible not in absent)
    rows: list[Row] = []
    while missing:
        wanted = next(iter(missing))
        row = _completed(dict(wanted), factors, absent, missing.keys())
        del missing[wanted]
        if row is None:
            continue
        for covered in pairs_of(row):
            missing.pop(covered, None)
        rows.append({factor: row[factor] for factor in factors})
    return rows


def _completed(row: dict[str, str], factors: Factors, absent: Set[Pair], missing: Set[Pair]) -> dict[str, str] | None:
    """Complete a row by the values that add most missing pairs; None if no row without absent pairs has them."""
    factor = next((name for name in factors if name not in row), None)
    if factor is None:
        return row
    gains: dict[str, int] = {}
    for value in factors[factor]:
        added = {pair((factor, value), other) for other in row.items()}
        if not added & absent:
            gains[value] = len(added & missing)
    for value in sorted(gains, key=lambda name: -gains[name]):
        completed = _completed({**row, factor: value}, factors, absent, missing)
        if completed is not None:
            return completed
    return None
