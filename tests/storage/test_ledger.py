"""Usages add up: what parts of a job used is what the job used."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import LimitError
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from support.refusals import refuses

charges = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Purpose), st.integers(0, 1 << 50)), max_size=8)
Charges = Sequence[tuple[str, Purpose, int]]


def ledger_of(made: Charges) -> Ledger:
    ledger = Ledger()
    for charge in made:
        ledger.charge(*charge)
    return ledger


@given(st.lists(charges, max_size=5))
def test_usage__of_parts_adds_up_to_that_of_the_whole(parts: list[Charges]) -> None:
    whole = ledger_of([charge for part in parts for charge in part]).usage()
    usages = [ledger_of(part).usage() for part in parts]
    for ordered in (usages, usages[::-1]):
        total, ledger = Usage(), Ledger()
        for usage in ordered:
            total = total + usage
            ledger.add(usage)
        assert total == whole + Usage() == ledger.usage() + Usage()
    assert total.total_bytes == sum(nbytes for part in parts for _, _, nbytes in part)


@given(charges, charges)
def test_usage__since_an_earlier_one_is_what_was_charged_since(earlier: Charges, later: Charges) -> None:
    ledger = ledger_of(earlier)
    before = ledger.usage()
    for charge in later:
        ledger.charge(*charge)
    assert ledger.usage() - before == ledger_of(later).usage() + Usage()


def test_ledger__refuses_usage_of_a_part_beyond_the_budget() -> None:
    ledger = ledger_of([("a", Purpose.EXPERT, 60)])
    ledger.expert_limit_bytes = 100
    ledger.add(ledger_of([("b", Purpose.EXPERT, 40), ("b", Purpose.BASE, 900)]).usage())
    with refuses(LimitError, "budget.exceeded"):
        ledger.add(ledger_of([("b", Purpose.ANALYSIS, 1)]).usage())
