"""Explanations and sweeps as self-contained HTML pages: charts as geometry, drawn by templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

import mergepipe
from mergepipe.cli.render.budgets import (
    coverage_lines,
    levels_text,
    loss_text,
    measured,
    missing_text,
    rounding_note,
    unread_lines,
    unspent_text,
    verdict_sentence,
    verdict_text,
)
from mergepipe.cli.render.layout import number_text, share_text
from mergepipe.core.escaping import as_line
from mergepipe.core.units import format_bytes, format_percent, format_seconds, plural
from mergepipe.reports import (
    BudgetVerdict,
    ExpertShare,
    Explanation,
    SearchReport,
    SearchTrial,
    SweepPoint,
    SweepReport,
)
from mergepipe.runs.budget.verdict import NAMES, WHOLE


def render_page(template: str, made: datetime | None, **values: object) -> str:
    """Render a template with the version and the time it was made; the page loads nothing from anywhere."""
    when = "" if made is None else f"{made:%Y-%m-%d %H:%M} UTC"
    return _environment().get_template(template).render(version=mergepipe.__version__, made=when, **values)


@cache
def _environment() -> Environment:
    """Return what compiles the templates and keeps them for the next pages of this process."""
    environment = Environment(
        loader=FunctionLoader(_template_text), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True, finalize=as_line,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "number": number_text}
    environment.globals |= {"share": share_text}
    return environment


def _template_text(name: str) -> str:
    return resources.files("mergepipe.cli.render").joinpath("templates", name).read_text(encoding="utf-8")


_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Points `(x, y)` in data units. `style` is the CSS class that colours it."""

    name: str
    style: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Dot:
    """One value, drawn, with what to say about it."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line in positions: `path` for a polyline, and its dots."""

    name: str
    style: str
    path: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything a template draws; positions in percent of the area between the axes, from its upper left corner."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[DrawnLine, ...]


Format = Callable[[float], str]


def draw_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    x_format: Format,
    y_format: Format,
    *,
    begins_at_0: bool = True,
) -> Chart:
    """Lay lines out over axes that begin at 0 (that of `y` only if told to); lines without points are left out."""
    drawn = [line for line in lines if line.points]
    x_ticks = _ticks(0.0, max((x for line in drawn for x, _ in line.points), default=1.0))
    ys = [y for line in drawn for _, y in line.points] or [1.0]
    y_ticks = _ticks(0.0 if begins_at_0 else min(ys), max(ys))

    def x_at(x: float) -> float:
        return round(100 * x / x_ticks[-1], 2)

    def y_at(y: float) -> float:
        return round(100 - 100 * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]), 2)

    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_ticks=tuple(Tick(x_at(x), x_format(x)) for x in x_ticks),
        y_ticks=tuple(Tick(y_at(y), y_format(y)) for y in y_ticks),
        lines=tuple(
            DrawnLine(
                line.name,
                line.style,
                " ".join(f"{x_at(x)},{y_at(y)}" for x, y in line.points),
                tuple(Dot(x_at(x), y_at(y), f"{line.name}: {x_format(x)}, {y_format(y)}") for x, y in line.points),
            )
            for line in drawn
        ),
    )  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, the first at most `low`, the last at least `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        low, high = (0.0, 1.0) if not math.isfinite(low + high) or low == 0 else (low - abs(low), low + abs(low))
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


_SHORT_ID = 12
_LINE_STYLES = 6  # classes in the template


@dataclass(frozen=True, slots=True)
class Use:
    """A way in which blocks of an expert are used, and the CSS class that colours it."""

    label: str
    style: str


USES = (
    Use("read", "read"),
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
    counts = (expert.read, expert.free, expert.omitted)
    parts, start = [], 0.0
    for use, count in zip(USES, counts, strict=True):
        width = 100 * count / n_blocks if n_blocks else 0.0
        if count:
            parts.append(
                Part(use.style, round(start, 3), round(width, 3), f"{use.label}: {format_percent(width / 100)}")
            )
        start += width
    changed = expert.read + expert.omitted
    missing = missing_text(expert.read / changed if changed else 1.0)
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


_STYLES = ("chosen", "random")
_LEVEL_STYLES = 6  # classes in the template


def sweep_page(report: SweepReport, made: datetime | None = None) -> str:
    """Render the page, with the day it was made; it loads nothing from anywhere, follows the dark or light setting."""
    has_errors, has_losses = measured(report)
    return render_page(
        "sweep.html.j2", made, report=report, charts=charts_of(report), note=rounding_note(report),
        verdict=verdict_text(report), unread=unread_lines(report), levels_of=levels_text,
        loss_of=loss_text, is_graded=any(name != WHOLE for point in report.points for name, _ in point.levels),
        has_errors=has_errors, has_losses=has_losses,
    )  # fmt: skip


def charts_of(report: SweepReport) -> tuple[Chart, ...]:
    """Error, and time, over the share of expert bytes that was read."""
    policies = list(dict.fromkeys(point.policy for point in report.points))
    errors, times = [], []
    for policy, style in zip(policies, _STYLES, strict=False):
        points = [point for point in report.points if point.policy == policy]
        errors.append(Line(policy, style, _places(report, [(p, p.error) for p in points])))
        times.append(Line(policy, style, _places(report, [(p, p.seconds) for p in points])))
    x_label = "expert bytes read, as a share of what reading all costs"
    losses = [Line(report.policy, _STYLES[0], _places(report, [(point, point.loss) for point in report.points]))]
    error_label, levels_label = "error relative to what merging changes", "blocks read in this form or a closer one"
    charts = (
        draw_chart("Loss", x_label, "loss by the given command", losses, format_percent, "{:.4g}".format),
        draw_chart("Error", x_label, error_label, errors, format_percent, "{:.3g}".format),
        draw_chart("Levels", x_label, levels_label, _level_lines(report), format_percent, format_percent),
        draw_chart("Time", x_label, "seconds, planning included", times, format_percent, "{:.3g}".format),
    )
    return tuple(chart for chart in charts if chart.lines)


def _level_lines(report: SweepReport) -> list[Line]:
    """Return for each form, closest first, the share of blocks that are read in it or in a closer one."""
    points = [point for point in report.points if point.policy == report.policy]
    used = [name for name in NAMES if any(name in dict(point.levels) for point in points)]
    most = max((sum(count for _, count in point.levels) for point in points), default=0)
    if len(used) < 2 or not most:
        return []
    lines = []
    for number, name in enumerate(reversed(used)):
        closer = used[used.index(name) :]
        shares = [(point, sum(dict(point.levels).get(name, 0) for name in closer) / most) for point in points]
        lines.append(Line(f"{name} or closer", f"level{number % _LEVEL_STYLES}", _places(report, shares)))
    return lines


def _places(report: SweepReport, values: Sequence[tuple[SweepPoint, float | None]]) -> tuple[tuple[float, float], ...]:
    """Positions by rising share of bytes; what was not measured is left out."""
    full = report.full_cost_bytes
    return tuple(sorted((point.expert_bytes / full if full else 0.0, y) for point, y in values if y is not None))


def search_page(report: SearchReport, made: datetime | None = None) -> str:
    """Render the page of a search, with the day it was made."""
    axes = _axes(report)
    return render_page(
        "search.html.j2", made, report=report, axes=[f"{name}: {low:.4g} to {high:.4g}" for name, low, high in axes],
        parallel=_parallel_chart(report, axes), charts=_search_charts(report), values_of=_values_text,
    )  # fmt: skip


def _values_text(trial: SearchTrial) -> str:
    return ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.values.values())


def _axes(report: SearchReport) -> list[tuple[str, float, float]]:
    """Return what has an axis, the searched numbers and the first objective, with its range over finished trials."""
    places = [_numbers(trial, report.objectives[0]) for trial in report.trials if trial.losses]
    names = [name for name in places[0] if all(name in place for place in places)]
    columns = {name: [place[name] for place in places] for name in names}
    return [(name, min(column), max(column)) for name, column in columns.items()]


def _numbers(trial: SearchTrial, objective: str) -> dict[str, float]:
    """Return the values of a trial that are numbers, and what its objective came to, by name."""
    numbers = {
        name: float(value)
        for name, value in trial.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**numbers, objective: trial.losses[0]}


def _parallel_chart(report: SearchReport, axes: Sequence[tuple[str, float, float]]) -> Chart:
    """Draw each finished trial as a line over the axes, each of which goes from its least value to its largest."""

    def line(trial: SearchTrial, style: str) -> Line:
        values = _numbers(trial, report.objectives[0])
        heights = [(values[name] - low) / (high - low) if high > low else 0.5 for name, low, high in axes]
        return Line(f"trial {trial.number}", style, tuple((float(n), y) for n, y in enumerate(heights, start=1)))

    others = [line(trial, "bound") for trial in report.trials if trial.losses and not trial.is_best]
    best = [line(trial, "chosen") for trial in report.trials if trial.losses and trial.is_best]
    x_label = "the axes below"
    return draw_chart("Trials", x_label, "from the least value of an axis to its largest", [*others, *best],
                      "{:g}".format, "{:g}".format)  # fmt: skip


def _search_charts(report: SearchReport) -> tuple[Chart, ...]:
    """Draw the first objective by trial and by bytes read, and over the second objective where there are several."""
    objective = report.objectives[0]
    trials = [trial for trial in report.trials if trial.losses]

    def chart(title: str, x_label: str, x_of: Callable[[SearchTrial], float], x_format: Format) -> Chart:
        lines = [
            Line(name, style, tuple((x_of(trial), trial.losses[0]) for trial in trials if trial.is_best == is_best))
            for name, style, is_best in (("others", "bound scatter", False), ("the best", "chosen scatter", True))
        ]
        return draw_chart(title, x_label, objective, lines, x_format, "{:.4g}".format, begins_at_0=False)

    charts = [
        chart("By trial", "trial", lambda trial: float(trial.number), "{:g}".format),
        chart("By bytes", "expert bytes that the trial read", lambda trial: float(trial.expert_bytes),
              lambda nbytes: format_bytes(int(nbytes))),
    ]  # fmt: skip
    if len(report.objectives) > 1:
        charts.append(chart("The front", report.objectives[1], lambda trial: trial.losses[1], "{:.4g}".format))
    return tuple(charts)
