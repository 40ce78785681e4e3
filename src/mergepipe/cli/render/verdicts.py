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
    if larger_bytes is None or error is None or not verdict.expected_error:
        return ""
    share = share_text(larger_bytes, verdict.full_bytes)
    if error >= verdict.expected_error:
        return f"A budget of {format_bytes(larger_bytes)} ({share}) is not expected to leave less."
    return f"A budget of {format_bytes(larger_bytes)} ({share}) would leave {number_text(error)}."


def unspent_text(verdict: BudgetVerdict) -> str:
    """Say what of the budget is not used, and why; nothing where that is little."""
    return f"{format_bytes(verdict.unspent_bytes)}: {verdict.unspent_reason}." if verdict.unspent_bytes else ""


def verdict_facts(verdict: BudgetVerdict | None) -> list[Fact]:
    """Return the lines of a table that tell a verdict: it first, what more would bring, what is missing of whom."""
    if verdict is None:
        return []
    more, unspent = larger_budget_text(verdict), unspent_text(verdict)
    return [
        ("verdict", verdict_sentence(verdict)),
        *([("unspent", unspent)] if unspent else []),
        *([("more budget", more)] if more else []),
        *(("expert", line) for line in coverage_lines(verdict)),
    ]


def coverage_lines(verdict: BudgetVerdict) -> list[str]:
    """Return a line for each expert, those of which nothing is read first: what is missing of it."""
    return [f"{expert.model}: {missing_text(expert.share, expert.rough)}" for expert in verdict.experts]


def missing_text(share: float, rough: float = 0.0) -> str:
    """Say what is missing of an expert, by the share of the blocks that it changes that is in the merge."""
    if not share:
        return "nothing of it is in the merge"
    text = f"{share_text(1 - share, 1)} of the blocks that it changes are missing"
    text = "all blocks that it changes are in the merge" if share == 1 else text
    return f"{text}, {share_text(rough, 1)} are rough" if rough else text
