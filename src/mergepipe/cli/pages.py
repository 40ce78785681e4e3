"""Explanations and sweeps as self-contained HTML pages: charts as geometry, drawn by templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

import mergepipe
from mergepipe.core.display import Table, as_line, share_text
from mergepipe.core.units import first_names, format_bytes, format_percent, format_seconds, plural
from mergepipe.reports import ExpertShare, Explanation, Overlap, SweepPoint, SweepReport, missing_text, read_share
from mergepipe.runs.budget import NAMES

_TICKS = 5
_SHORT_ID = 12
_STYLES = ("chosen", "random")  # classes in the template, as `level0` to `level5` and those of uses
_LEVEL_STYLES = 6
USES = (("read", "read"), ("equal to the base", "same"), ("left out", "omitted"))
"""The ways in which blocks of an expert are used, and the CSS class that colours each."""


def render_page(template: str, made: datetime | None, **values: object) -> str:
    """Render a template with the version and the time it was made; the page loads nothing from anywhere."""
    when = "" if made is None else f"{made:%Y-%m-%d %H:%M} UTC"
    return _environment().get_template(template).render(version=mergepipe.__version__, made=when, **values)


@cache
def _environment() -> Environment:
    """Return what compiles the templates and keeps them for the next pages of this process."""
    templates = resources.files("mergepipe.cli") / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8")), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True, finalize=as_line,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    environment.globals |= {"share": share_text}
    return environment


@dataclass(frozen=True, slots=True)
class Line:
    """Points `(x, y)` in data units or, in a chart, in percent from the upper left, each with what to say about it.

    `style` is the CSS class that colours it.
    """

    name: str
    style: str
    points: tuple[tuple[float, float], ...]
    titles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything a template draws: ticks are a position in percent and a label."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]


Format = Callable[[float], str]


def draw_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], x_format: Format, y_format: Format
) -> Chart:
    """Lay lines out over axes that begin at 0; lines without points are left out."""
    drawn = [line for line in lines if line.points]
    x_ticks = _ticks(max((x for line in drawn for x, _ in line.points), default=1.0))
    y_ticks = _ticks(max((y for line in drawn for _, y in line.points), default=1.0))

    def x_at(x: float) -> float:
        return round(100 * x / x_ticks[-1], 2)

    def y_at(y: float) -> float:
        return round(100 - 100 * y / y_ticks[-1], 2)

    def laid_out(line: Line) -> Line:
        points = tuple((x_at(x), y_at(y)) for x, y in line.points)
        labels = tuple(f"{line.name}: {x_format(x)}, {y_format(y)}" for x, y in line.points)
        return Line(line.name, line.style, points, labels)

    return Chart(
        title,
        x_label,
        y_label,
        x_ticks=tuple((x_at(x), x_format(x)) for x in x_ticks),
        y_ticks=tuple((y_at(y), y_format(y)) for y in y_ticks),
        lines=tuple(map(laid_out, drawn)),
    )


def _ticks(high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from 0 to the first that is at least `high`."""
    if not math.isfinite(high) or high <= 0:
        high = 1.0
    raw = high / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]


def explain_page(explanation: Explanation, made: datetime | None = None) -> str:
    """Render the page, with the day it was made."""
    verdict = explanation.verdict
    read = "all"
    if verdict is not None and not verdict.is_full:
        read = share_text(verdict.planned_bytes, verdict.full_bytes)
    advice = [] if verdict is None else [f"{expert}." for expert in verdict.experts if not expert.share]
    if verdict is not None and verdict.unspent_bytes:
        advice.append(f"Unspent: {format_bytes(verdict.unspent_bytes)}: {verdict.unspent_reason}.")
    return render_page(
        "explain.html.j2", made, explanation=explanation,
        title=_headline(explanation.operator, [expert.model for expert in explanation.experts], read),
        verdict="A full merge: all experts are read in full." if verdict is None else verdict.sentence,
        advice=advice, facts=_facts_text(explanation), uses=USES, charts=layer_charts(explanation),
        bars=[_bar(expert) for expert in explanation.experts], numbers=Table.of(explanation.experts),
        heat_maps=heat_maps(explanation.overlaps),
        notices=(*explanation.fallbacks, *explanation.adjustments),
    )  # fmt: skip


def _headline(operator: str, experts: Sequence[str], read: str) -> str:
    """Say how much was read, of which experts."""
    names = f" of {first_names(experts)}" if experts else ""
    return f"{operator}{names}: {read} of the expert bytes read"


def _facts_text(explanation: Explanation) -> str:
    digest = explanation.sid or explanation.plan_digest or ""
    subject = f"{explanation.kind} {digest[:_SHORT_ID]} in {explanation.path}"
    facts = [subject, plural(len(explanation.experts), "expert"), f"seed {explanation.seed}"]
    if explanation.budget_bytes is not None and explanation.full_bytes is not None:
        share = share_text(explanation.budget_bytes, explanation.full_bytes)
        full = format_bytes(explanation.full_bytes)
        facts.append(f"budget {share} ({format_bytes(explanation.budget_bytes)} of {full})")
        facts.append(f"policy {explanation.policy}")
    return ", ".join(facts)


def _bar(expert: ExpertShare) -> tuple[str, list[tuple[str, float, float, str]]]:
    """Return the label of an expert's bar, and its parts: style, start and width in percent, and title."""
    counts = (expert.read, expert.free, expert.omitted)
    parts, start = [], 0.0
    for (label, style), count in zip(USES, counts, strict=True):
        width = 100 * count / max(sum(counts), 1)
        if count:
            parts.append((style, round(start, 3), round(width, 3), f"{label}: {format_percent(width / 100)}"))
        start += width
    missing = missing_text(read_share(expert.read, expert.omitted, expert.planned_bytes or 0, expert.full_bytes or 1))
    nbytes = expert.realized_bytes if expert.realized_bytes is not None else expert.planned_bytes
    read = "" if nbytes is None else f", {format_bytes(nbytes)} read"
    return f"{expert.model}: {missing}{read}", parts


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer in a heat map, or (`layer` is empty) the tensors outside of layers: a value, and what to say about it."""

    layer: str
    value: float
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A row of cells for each two experts. `low` and `high` are the ends of the scale of colours; `high` is full."""

    title: str
    low: float
    high: float
    format: Format
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def heat_maps(overlaps: Sequence[Overlap]) -> list[HeatMap]:
    """Map what experts have in common in each layer; nothing where there are no statistics."""
    if not overlaps:
        return []
    return [
        _heat_map("Cosines between experts, by layer", overlaps, lambda part: part.cosine, "{:.3g}".format),
        _heat_map(
            "Elements that both experts change, by layer", overlaps, lambda part: part.shared(part.both), format_percent
        ),
    ]


def _heat_map(
    title: str, overlaps: Sequence[Overlap], value: Callable[[Overlap], float], value_format: Format
) -> HeatMap:
    pairs: dict[str, list[Overlap]] = {}
    for overlap in overlaps:
        pairs.setdefault(f"{overlap.first}, {overlap.second}", []).append(overlap)

    rows = []
    for pair, parts in pairs.items():
        cells = tuple(Cell(part.layer, value(part), f"{_layer_name(part)}: {part}") for part in parts)
        rows.append((f"{pair}: {Overlap.over(parts)}", cells))

    values = [value(overlap) for overlap in overlaps]
    high = _ticks(max(map(abs, values)))[-1]
    return HeatMap(title, -high if min(values) < 0 else 0.0, high, value_format, tuple(rows))


def _layer_name(overlap: Overlap) -> str:
    return f"layer {overlap.layer}" if overlap.layer else "others"


def layer_charts(explanation: Explanation) -> tuple[Chart, ...]:
    """Draw the share of each layer's blocks that every expert takes part in; nothing for a model without layers."""
    layers = [layer for layer in explanation.layers if layer.layer.isdecimal() and layer.blocks]
    if not layers:
        return ()
    lines = []
    for e, expert in enumerate(explanation.experts):
        points = tuple((float(layer.layer), layer.taking_part[e] / layer.blocks) for layer in layers)
        lines.append(Line(expert.model, f"level{e % _LEVEL_STYLES}", points))
    y_label = "blocks of the layer that the expert takes part in"
    return (draw_chart("Layers", "number of the layer", y_label, lines, _whole_number, format_percent),)


def _whole_number(value: float) -> str:
    """Write a number; nothing for ticks between two numbers."""
    return f"{value:g}" if value.is_integer() else ""


def sweep_page(report: SweepReport, made: datetime | None = None) -> str:
    """Render the page, with the day it was made; it loads nothing from anywhere, follows the dark or light setting."""
    shares = [point.share for point in report.points]
    read = " to ".join(dict.fromkeys((format_percent(min(shares)), format_percent(max(shares)))))
    return render_page(
        "sweep.html.j2", made, report=report, title=_headline(report.operator, report.experts, read),
        charts=charts_of(report), numbers=Table.of(report.points),
    )  # fmt: skip


def charts_of(report: SweepReport) -> tuple[Chart, ...]:
    """Error, and time, over the share of expert bytes that was read."""
    points_of: dict[str, list[SweepPoint]] = {}
    for point in report.points:
        points_of.setdefault(point.policy, []).append(point)

    def by_policy(value: Callable[[SweepPoint], float | None]) -> list[Line]:
        styled = zip(points_of.items(), _STYLES, strict=False)
        return [Line(policy, style, _places(points, value)) for (policy, points), style in styled]

    x_label = "expert bytes read, as a share of what reading all costs"
    losses = [Line(report.policy, _STYLES[0], _places(report.points, lambda point: point.loss))]
    error_label = "error relative to what merging changes"
    levels_label = "blocks read in this form or a closer one"
    charts = (
        draw_chart("Loss", x_label, "loss by the given command", losses, format_percent, "{:.4g}".format),
        draw_chart(
            "Error", x_label, error_label, by_policy(lambda point: point.error), format_percent, "{:.3g}".format
        ),
        draw_chart("Levels", x_label, levels_label, _level_lines(report), format_percent, format_percent),
        draw_chart(
            "Time",
            x_label,
            "seconds, planning included",
            by_policy(lambda point: point.seconds),
            format_percent,
            "{:.3g}".format,
        ),
    )
    return tuple(chart for chart in charts if chart.lines)


def _level_lines(report: SweepReport) -> list[Line]:
    """Return for each form, closest first, the share of blocks that are read in it or in a closer one."""
    points = [point for point in report.points if point.policy == report.policy]
    seen = set[str]()
    most = 0
    for point in points:
        seen.update(name for name, _ in point.levels)
        most = max(most, sum(count for _, count in point.levels))
    used = [name for name in NAMES if name in seen]
    if len(used) < 2 or not most:
        return []

    lines = []
    for number, name in enumerate(reversed(used)):
        closer = used[used.index(name) :]

        def share(point: SweepPoint, closer: Sequence[str] = closer) -> float:
            return sum(count for level, count in point.levels if level in closer) / most

        lines.append(Line(f"{name} or closer", f"level{number % _LEVEL_STYLES}", _places(points, share)))
    return lines


def _places(
    points: Iterable[SweepPoint], value: Callable[[SweepPoint], float | None]
) -> tuple[tuple[float, float], ...]:
    """Positions by rising share of bytes; what was not measured is left out."""
    measured = ((point.share, value(point)) for point in points)
    return tuple(sorted((share, y) for share, y in measured if y is not None))
