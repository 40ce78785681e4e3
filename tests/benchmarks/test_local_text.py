"""Tests of benchmarks.local_text."""

from __future__ import annotations

import re
from functools import cache

import pytest
from benchmarks.local_text import GENERAL, Domain, TextError, gather

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


@cache
def some_domains() -> tuple[Domain, ...]:
    return gather(4, 300_000, 600_000)


def long_paragraphs(text: str) -> list[str]:
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if len(p) >= 40)
    return [paragraph for paragraph in paragraphs if len(paragraph) >= 40]


def test_gather__gives_general_text_first_then_the_domains() -> None:
    names = [domain.name for domain in some_domains()]
    assert names[0] == GENERAL
    assert len(set(names)) == len(names) == 5
    assert all(len(domain.training) > len(domain.heldout) > 5_000 for domain in some_domains())


def test_gather__no_long_paragraph_is_there_twice() -> None:
    paragraphs = [p for d in some_domains() for text in (d.training, d.heldout) for p in long_paragraphs(text)]
    assert len(paragraphs) > 1_000
    assert len(set(paragraphs)) == len(paragraphs)


def test_gather__same_machine_same_text() -> None:
    assert gather(4, 300_000, 600_000) == some_domains()


def test_gather__refuses_more_domains_than_there_are() -> None:
    with pytest.raises(TextError, match="1000 domains needed, this machine has text for"):
        gather(1000, 100_000, 100_000)
