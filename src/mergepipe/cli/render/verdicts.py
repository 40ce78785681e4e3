"""Verdicts of budgeted merges as sentences for tables and pages."""

from __future__ import annotations

from mergepipe.cli.render.layout import Fact, share_text
from mergepipe.core.units import format_bytes
from mergepipe.reports import BudgetVerdict


def verdict_sentence(verdict: BudgetVerdict) -> str:
    """Say how much is read and how it is chosen, and where the gain of such merges was measured."""
    if verdict.is_full:
        return "The full merge: everything of the experts is read."
    share = share_text(verdict.planned_bytes, verdict.full_bytes)
    read = f"{share} of the experts' bytes are read, by policy '{verdict.policy}'"
    return f"{read}. What such merges kept of a gain: {verdict.measured}."


def unspent_text(verdict: BudgetVerdict) -> str:
    """Say what of the budget is not used, and why; nothing where that is little."""
    return f"{format_bytes(verdict.unspent_bytes)}: {verdict.unspent_reason}." if verdict.unspent_bytes else ""


def verdict_facts(verdict: BudgetVerdict | None) -> list[Fact]:
    """Return the lines of a table that tell a verdict: it first, then what is missing of whom."""
    if verdict is None:
        return []
    unspent = unspent_text(verdict)
    return [
        ("verdict", verdict_sentence(verdict)),
        *([("unspent", unspent)] if unspent else []),
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
