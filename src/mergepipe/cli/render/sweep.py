"""Sweeps as a text table for people."""

from __future__ import annotations

from mergepipe.cli.render.layout import columns_text, facts_text, listed, notice_facts, number_text, share_text
from mergepipe.cli.render.levels import levels_text
from mergepipe.core.units import format_bytes, format_seconds
from mergepipe.planning.choices import Policy
from mergepipe.planning.level_counts import WHOLE
from mergepipe.reports import SweepReport


def verdict_text(report: SweepReport) -> str:
    """Say what was measured: a loss by a command, or distances, which say little."""
    if report.full_loss is not None:
        return f"the loss of the full merge is {loss_text(report.full_loss)}; those under budgets are below"
    if report.policy == Policy.SAMPLE:
        return "a sample is right on average, and far from the full merge in each draw: measure a loss with --evaluate"
    return "distances say nothing of a gain: measure a loss with --evaluate"


def unread_lines(report: SweepReport) -> list[str]:
    """Return a line for each budget under which nothing is read of some expert, by the policy that was chosen."""
    points = (point for point in report.points if point.policy == report.policy and point.unread)
    return [f"{point.budget}: nothing of {listed(point.unread)} is in the merge" for point in points]


def measured(report: SweepReport) -> tuple[bool, bool]:
    """Whether errors were measured, and losses."""
    points = report.points
    return any(point.error is not None for point in points), any(point.loss is not None for point in points)


def loss_text(loss: float | None) -> str:
    """Return a loss with six significant digits: those of near merges differ in the third or fourth."""
    return "-" if loss is None else f"{loss:.6g}"


def rounding_note(report: SweepReport) -> str:
    """Return the note on the rounding that errors are measured against."""
    return f"errors are taken from the outputs, after rounding to {', '.join(report.dtypes)}"


def sweep_table(report: SweepReport) -> str:
    """Budget by budget and policy by policy: error, bytes, time."""
    has_errors, has_losses = measured(report)
    error_facts = [
        ("error", "distance to the full merge, as a share of what the full merge changes"),
        ("beside", "the same distance as a share of the full merge's norm: it flatters"),
        ("note", rounding_note(report)),
    ] if has_errors else []  # fmt: skip
    facts = [
        ("verdict", verdict_text(report)),
        *(("unread", line) for line in unread_lines(report)),
        ("operator", report.operator),
        ("full merge", f"{format_bytes(report.full_expert_bytes)} of the experts read, "
                       f"{format_seconds(report.full_seconds)}"),
        ("changes", f"the full merge is {number_text(report.changed_norm)} away from the base, "
                    f"{share_text(report.changed_norm, report.full_norm)} of its own norm"),
        *error_facts,
        *notice_facts(report.recipe_notices),
    ]  # fmt: skip
    is_graded = any(name != WHOLE for point in report.points for name, _ in point.levels)
    graded = ["blocks read"] if is_graded else []
    losses, errors = ["loss"] * has_losses, ["error", "beside"] * has_errors
    head = ["budget", "policy", "read", "of all", "time", *losses, *errors, *graded]
    rows = [
        [
            point.budget,
            point.policy,
            format_bytes(point.expert_bytes),
            share_text(point.expert_bytes, report.full_cost_bytes),
            format_seconds(point.seconds),
            *([loss_text(point.loss)] if has_losses else []),
            *([number_text(x) for x in (point.error, point.flattering_error)] if has_errors else []),
            *([levels_text(point.levels)] if is_graded else []),
        ]
        for point in report.points
    ]
    return f"{facts_text(facts)}\n\n{columns_text(head, rows, left=2)}"
