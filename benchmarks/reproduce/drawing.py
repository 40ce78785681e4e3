"""Command that draws figures as SVG, in an environment of its own; the only module that imports matplotlib."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reproduce.pages import Figure, Series

_MARKERS = "osD^vP*X"


def draw(figure: Figure, folder: Path) -> None:
    """Write `folder`/NAME.svg; the same figure gives the same bytes with one version of matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "mergepipe"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    plot, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, series in enumerate(figure.series):
        style = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 4, "linewidth": 1.4}
        line = "--" if series.dashed else "-"
        if series.spread:
            axes.errorbar(series.xs, series.ys, series.spread, label=series.label, capsize=3, linestyle=line, **style)
        else:
            axes.plot(series.xs, series.ys, label=series.label, linestyle=line, **style)
    if figure.log_x:
        axes.set_xscale("log")
    if figure.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, *(y for series in figure.series for y in series.ys)))
    if all(float(x).is_integer() for series in figure.series for x in series.xs) and not figure.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.set_title(figure.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plot.savefig(folder / f"{figure.name}.svg", metadata={"Date": None, "Description": f"results {figure.digest}"})
    pyplot.close(plot)


def to_json(figure: Figure) -> dict[str, Any]:
    """`from_json(to_json(f)) == f`."""
    return asdict(figure)


def from_json(content: dict[str, Any]) -> Figure:
    lists = ("xs", "ys", "spread")
    series = tuple(Series(**{**entry, **{name: tuple(entry[name]) for name in lists}}) for entry in content["series"])
    return Figure(**{**content, "series": series})


def main(folder: str) -> None:
    """Draw the figures whose JSON comes on the standard input."""
    for content in json.load(sys.stdin):
        draw(from_json(content), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
