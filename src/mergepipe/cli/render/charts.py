"""Line charts as geometry: values in, positions and labels out, for a template to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    title: str, x_label: str, y_label: str, lines: Sequence[Line], x_format: Format, y_format: Format
) -> Chart:
    """Lay lines out over axes that begin at 0; lines without points are left out."""
    drawn = [line for line in lines if line.points]
    x_step, x_top = _scale(max((x for line in drawn for x, _ in line.points), default=1.0))
    y_step, y_top = _scale(max((y for line in drawn for _, y in line.points), default=1.0))

    def x_at(x: float) -> float:
        return round(100 * x / x_top, 2)

    def y_at(y: float) -> float:
        return round(100 - 100 * y / y_top, 2)

    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_ticks=tuple(Tick(x_at(x), x_format(x)) for x in _steps(x_step, x_top)),
        y_ticks=tuple(Tick(y_at(y), y_format(y)) for y in _steps(y_step, y_top)),
        lines=tuple(
            DrawnLine(
                line.name,
                line.style,
                " ".join(f"{x_at(x)},{y_at(y)}" for x, y in line.points),
                tuple(Dot(x_at(x), y_at(y), f"{line.name}: {x_format(x)}, {y_format(y)}") for x, y in line.points),
            )
            for line in drawn
        ),
    )


def _scale(largest: float) -> tuple[float, float]:
    """A step of 1, 2 or 5 times a power of ten, and the multiple of it that holds `largest`."""
    if not (math.isfinite(largest) and largest > 0):
        return 0.2, 1.0
    raw = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return step, step * math.ceil(largest / step - 1e-9)


def _steps(step: float, top: float) -> list[float]:
    return [i * step for i in range(round(top / step) + 1)]
