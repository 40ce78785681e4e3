"""Verdicts of budgeted merges as sentences for tables and pages."""

from __future__ import annotations

from mergepipe.cli.render.layout import Fact, number_text, share_text
from mergepipe.core.units import format_bytes
from mergepipe.reports import BudgetVerdict


def verdict_sentence(verdict: BudgetVerdict) -> str:
    """Say what is expected to be lost, and what that means."""
    if verdict.expected_error is None:
        return f"Expected error: {verdict.meaning}."
    least = "at least " if verdict.is_least else ""
    return f"Expected error {least}{number_text(verdict.expected_error)}: {verdict.meaning}."


def larger_budget_text(verdict: BudgetVerdict) -> str:
    """Say what half as much budget again would leave; nothing where that is not known or everything is read."""
    larger_bytes, error = verdict.larger_budget_bytes, verdict.larger_expected_error
    if larger_bytes is None or error is None or verdict.expected_error == 0:
        return ""
    share = share_text(larger_bytes, verdict.full_bytes)
    return f"A budget of {format_bytes(larger_bytes)} ({share}) would leave {number_text(error)}."


def verdict_facts(verdict: BudgetVerdict | None) -> list[Fact]:
    """Return the lines of a table that tell a verdict: it first, then what more would bring."""
    if verdict is None:
        return []
    more = larger_budget_text(verdict)
    return [
        ("verdict", verdict_sentence(verdict)),
        *([("more budget", more)] if more else []),
    ]


def coverage_facts(verdict: BudgetVerdict | None) -> list[Fact]:
    """Return a line for each expert: what share of its blocks is in the merge."""
    experts = () if verdict is None else verdict.experts
    shares = [(expert.model, share_text(expert.share, 1)) for expert in experts]
    return [("expert", f"{model}: {share} of its blocks are in the merge") for model, share in shares]
