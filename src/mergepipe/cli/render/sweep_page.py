"""A sweep as one self-contained HTML page: the curves, and the numbers under them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from mergepipe.cli.render.charts import Chart, Line, draw_chart
from mergepipe.cli.render.levels import levels_text
from mergepipe.cli.render.pages import render_page
from mergepipe.cli.render.sweep import loss_text, measured, rounding_note, unread_lines, verdict_text
from mergepipe.core.units import format_percent
from mergepipe.planning.level_counts import NAMES, WHOLE
from mergepipe.reports import SweepPoint, SweepReport

_STYLES = ("chosen", "beside")
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
