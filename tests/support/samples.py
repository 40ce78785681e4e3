"""Which cases of the tests marked `thorough` the fast suite runs: about one in ten, and every value of a parameter.

Which ones depends on the name of the test, so that tests with the same parameters show different pairs of values. Of a
test that has one case the fast suite runs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import pytest

SHARE = 10

Case = Mapping[str, str]
"""The values of a test's parameters, as texts."""


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the thorough tests that the fast suite does not run."""
    items_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("slow"):
            items_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for name, of_test in items_of.items():
        kept = sampled(name, [_case_of(item) for item in of_test])
        left |= {item for number, item in enumerate(of_test) if number not in kept}
    return left


def sampled(name: str, cases: Sequence[Case]) -> set[int]:
    """Return the numbers of the cases that are run: at least a tenth, and each value that several cases share.

    Law: the same for the same name and cases, in every process and on every machine.
    """
    if len(cases) == 1:
        return set()
    uses = Counter(value for case in cases for value in case.items())
    shared = {value for value, n_uses in uses.items() if n_uses > 1}
    fewest = -(-len(cases) // SHARE)

    waiting = sorted(range(len(cases)), key=lambda number: crc32(f"{name} {sorted(cases[number].items())}".encode()))
    kept: set[int] = set()
    while len(kept) < fewest or shared:
        newest = max(waiting, key=lambda number: len(cases[number].items() & shared))
        waiting.remove(newest)
        shared -= cases[newest].items()
        kept.add(newest)
    return kept


def _case_of(item: pytest.Item) -> dict[str, str]:
    """Return the parameters of an item: texts and numbers as they are, other values by the name of the case."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    values = callspec.params.items()
    return {name: repr(value) if isinstance(value, str | int | float) else callspec.id for name, value in values}
