"""Levels and expected errors as text: who is read how closely, and what that is expected to leave out where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mergepipe.cli.render.layout import columns_text, share_text
from mergepipe.cli.render.terminal import available_columns
from mergepipe.core.units import format_percent
from mergepipe.planning.level_counts import NAMES
from mergepipe.reports import LayerShare

MOST_GROUPS = 24
_GROUP_COLUMNS = 9
_MOST_NAME = 28


def error_text(error: float | None) -> str:
    """A share of what merging changes."""
    return "-" if error is None else format_percent(error)


def levels_text(levels: Sequence[tuple[str, int]]) -> str:
    """Shares of the blocks that are read: `largest exactly 40 %, whole 60 %`."""
    total = sum(count for _, count in levels)
    return ", ".join(f"{name} {format_percent(count / total)}" for name, count in levels) if total else "-"


def error_table(layers: Sequence[LayerShare], experts: Sequence[str]) -> str:
    """Expected errors, an expert a row and some layers a column; under them how the blocks are read."""
    groups = grouped_layers(layers, experts)
    energies = [[[layer.energies[e] for layer in group] for group in groups] for e in range(len(experts))]
    together = [[energy for layer in group for energy in layer.energies] for group in groups]
    counts = [Counter[str]() for _ in groups]
    for count, group in zip(counts, groups, strict=True):
        for layer in group:
            count.update(dict(layer.levels))
    rows = [
        ["all experts", *(error_text(_joined(values)) for values in together)],
        *(
            [name, *(error_text(_joined(values)) for values in row)]
            for name, row in zip(experts, energies, strict=True)
        ),
        *(
            [f"blocks read: {name}", *(share_text(count[name], count.total()) for count in counts)]
            for name in NAMES
            if any(count[name] for count in counts)
        ),
    ]
    return columns_text(["error expected in layers", *(layers_range(group) for group in groups)], rows)


def grouped_layers(layers: Sequence[LayerShare], experts: Sequence[str]) -> list[Sequence[LayerShare]]:
    """Return runs of layers, as many as fit beside each other, those outside of layers on their own."""
    columns = available_columns()
    names = min(max((len(name) for name in experts), default=0), _MOST_NAME) + 2
    room = MOST_GROUPS if columns is None else (columns - max(names, _MOST_NAME)) // _GROUP_COLUMNS
    most = min(max(room, 2), MOST_GROUPS)
    numbered, unnumbered = [x for x in layers if x.layer], [x for x in layers if not x.layer]
    size = max(1, -(-len(numbered) // (most - 1)))
    return [*(numbered[i : i + size] for i in range(0, len(numbered), size)), *([unnumbered] if unnumbered else [])]


def layers_range(group: Sequence[LayerShare]) -> str:
    """Name a run of layers: `4-7`, or `others`."""
    first, last = group[0].layer, group[-1].layer
    return (first if first == last else f"{first}-{last}") or "others"


def _joined(energies: Sequence[tuple[float, float] | None]) -> float | None:
    estimated = [energy for energy in energies if energy is not None]
    whole = sum(energy for _, energy in estimated)
    if not estimated:
        return None
    return float((sum(lost for lost, _ in estimated) / whole) ** 0.5) if whole > 0 else 0.0
