"""A sweep as one self-contained HTML page: the curves, and the numbers under them."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, StrictUndefined

from mergepipe.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Line, draw_chart
from mergepipe.report.layout import number_text, share_text
from mergepipe.report.sweep_tables import rounding_note
from mergepipe.report.units import format_bytes, format_seconds
from mergepipe.reports import SweepPoint, SweepReport

_TEMPLATE = "templates/sweep.html.j2"
_STYLES = ("chosen", "beside")


def sweep_page(report: SweepReport) -> str:
    """Render the page; it loads nothing from anywhere, and follows the reader's dark or light setting."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True)
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "number": number_text}
    environment.globals |= {"share": share_text}
    template = resources.files("mergepipe.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    box = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
    return environment.from_string(template).render(
        report=report, charts=charts_of(report), box=box, note=rounding_note(report)
    )


def charts_of(report: SweepReport) -> tuple[Chart, ...]:
    """Error, and time, over the share of expert bytes that was read."""
    policies = list(dict.fromkeys(point.policy for point in report.points))
    errors, times = [], []
    for policy, style in zip(policies, _STYLES, strict=False):
        points = [point for point in report.points if point.policy == policy]
        errors.append(Line(policy, style, _places(report, [(p, p.error) for p in points])))
        times.append(Line(policy, style, _places(report, [(p, p.seconds) for p in points])))
    chosen = [(point, point.bound) for point in report.points if point.policy == report.policy]
    errors.append(Line(f"{report.policy}: bound of the plan", "bound", _places(report, chosen)))
    x_label = "expert bytes read, as a share of what the full merge reads"
    return (
        draw_chart("Error", x_label, "error relative to what merging changes", errors, _percent, "{:.3g}".format),
        draw_chart("Time", x_label, "seconds, planning included", times, _percent, "{:.3g}".format),
    )


def _places(report: SweepReport, found: list[tuple[SweepPoint, float | None]]) -> tuple[tuple[float, float], ...]:
    """Positions by rising share of bytes; what was not measured is left out."""
    full = report.full_expert_bytes
    return tuple(sorted((point.expert_bytes / full if full else 0.0, y) for point, y in found if y is not None))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
