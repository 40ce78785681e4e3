"""An explained snapshot or plan as one self-contained HTML page: verdict, coverage by expert and by layer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from mergepipe.cli.render.charts import Chart, Line, draw_chart
from mergepipe.cli.render.layout import share_text
from mergepipe.cli.render.pages import render_page
from mergepipe.cli.render.verdicts import (
    coverage_lines,
    missing_text,
    unspent_text,
    verdict_sentence,
)
from mergepipe.core.units import format_bytes, format_percent, plural
from mergepipe.reports import BudgetVerdict, ExpertShare, Explanation

_SHORT_ID = 12
_LINE_STYLES = 6  # classes in the template


@dataclass(frozen=True, slots=True)
class Use:
    """A way in which blocks of an expert are used, and the CSS class that colours it."""

    label: str
    style: str


USES = (
    Use("read", "read"), Use("served by equal bytes of another", "shared"),
    Use("equal to the base", "same"), Use("left out", "omitted"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: its position and width in percent."""

    style: str
    start: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The blocks of one expert by their use."""

    label: str
    parts: tuple[Part, ...]


def explain_page(explanation: Explanation, made: datetime | None = None) -> str:
    """Render the page, with the day it was made."""
    subject = explanation.sid or explanation.plan_digest or ""
    verdict = explanation.verdict
    return render_page(
        "explain.html.j2", made, explanation=explanation,
        title=f"What is in {explanation.kind} {subject[:_SHORT_ID]}: {explanation.operator}",
        verdict="A full merge: every expert is everywhere." if verdict is None else verdict_sentence(verdict),
        advice=() if verdict is None else _advice(verdict),
        facts=_facts_text(explanation), uses=USES, charts=layer_charts(explanation),
        bars=[_bar(expert, explanation.blocks) for expert in explanation.experts],
        notices=(*explanation.fallbacks, *explanation.adjustments),
    )  # fmt: skip


def _advice(verdict: BudgetVerdict) -> tuple[str, ...]:
    """Return what follows the verdict: experts of which nothing is there, and what is not spent."""
    lines = zip(verdict.experts, coverage_lines(verdict), strict=True)
    unspent = unspent_text(verdict)
    return (
        *(f"{line}." for expert, line in lines if not expert.share),
        *([f"Unspent: {unspent}"] if unspent else []),
    )


def _facts_text(explanation: Explanation) -> str:
    facts = [f"{explanation.path}", plural(len(explanation.experts), "expert"), f"seed {explanation.seed}"]
    if explanation.budget_bytes is not None and explanation.full_bytes is not None:
        share = share_text(explanation.budget_bytes, explanation.full_bytes)
        facts.append(
            f"budget {share} ({format_bytes(explanation.budget_bytes)} of {format_bytes(explanation.full_bytes)})"
        )
        facts.append(f"policy {explanation.policy}")
    return ", ".join(facts)


def _bar(expert: ExpertShare, n_blocks: int) -> Bar:
    counts = (expert.read, expert.shared, expert.free, expert.omitted)
    parts, start = [], 0.0
    for use, count in zip(USES, counts, strict=True):
        width = 100 * count / n_blocks if n_blocks else 0.0
        if count:
            parts.append(
                Part(use.style, round(start, 3), round(width, 3), f"{use.label}: {format_percent(width / 100)}")
            )
        start += width
    present, omitted = expert.read + expert.shared, expert.omitted
    missing = missing_text(present / (present + omitted) if present + omitted else 1.0)
    nbytes = expert.realized_bytes if expert.realized_bytes is not None else expert.planned_bytes
    read = "" if nbytes is None else f", {format_bytes(nbytes)} read"
    return Bar(f"{expert.model}: {missing}{read}", tuple(parts))


def layer_charts(explanation: Explanation) -> tuple[Chart, ...]:
    """Draw the share of each layer's blocks that every expert takes part in; nothing for a model without layers."""
    layers = [layer for layer in explanation.layers if layer.layer.isdecimal() and layer.blocks]
    if not layers:
        return ()
    lines = [
        Line(
            expert.model,
            f"level{e % _LINE_STYLES}",
            tuple((float(layer.layer), layer.taking_part[e] / layer.blocks) for layer in layers),
        )
        for e, expert in enumerate(explanation.experts)
    ]
    y_label = "blocks of the layer that the expert takes part in"
    return (draw_chart("Layers", "number of the layer", y_label, lines, "{:g}".format, format_percent),)
