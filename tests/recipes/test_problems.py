"""Collecting problems: all of them, in order, as one error."""

from __future__ import annotations

import pytest

from mergepipe.errors import CorruptError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from mergepipe.recipes.fields import MAX_LISTED, Findings


def test_findings__raise_nothing_when_nothing_was_found() -> None:
    Findings(RecipeError).raise_any()


def test_findings__raise_the_first_class_of_the_precedence() -> None:
    findings = Findings(NotFoundError, CorruptError, MismatchError, UnsupportedError, RecipeError)
    findings.add(RecipeError, "r", "", "last")
    findings.add(UnsupportedError, "u", "", "second")
    findings.add(MismatchError, "m", "x", "first", lambda: "computed")
    with pytest.raises(MismatchError) as caught:
        findings.raise_any()
    assert str(caught.value) == "x: first; computed\nsecond\nlast"


def test_findings__keep_the_class_of_a_problem_found_late() -> None:
    findings = Findings(MismatchError, UnsupportedError)
    for i in range(MAX_LISTED + 5):
        findings.add(UnsupportedError, "u", "", f"{i}")
    findings.add(MismatchError, "m", "", "late")
    with pytest.raises(MismatchError) as caught:
        findings.raise_any()
    assert [p.message for p in caught.value.problems] == ["late", *map(str, range(MAX_LISTED - 1)), "and 6 more"]


def test_findings__do_not_compute_hints_they_do_not_list() -> None:
    computed = []
    findings = Findings(RecipeError)
    for i in range(MAX_LISTED + 5):
        findings.add(RecipeError, "r", "", "x", lambda i=i: f"{computed.append(i)}")  # type: ignore[misc, func-returns-value]
    assert computed == list(range(MAX_LISTED))


def test_findings__refuse_a_class_without_a_place() -> None:
    with pytest.raises(ValueError, match="MismatchError"):
        Findings(RecipeError).add(MismatchError, "m", "", "x")
