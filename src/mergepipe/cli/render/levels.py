"""Levels and layers as text: who is read how closely, and where."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.cli.render.terminal import available_columns
from mergepipe.core.units import format_percent
from mergepipe.reports import LayerShare

MOST_GROUPS = 24
_GROUP_COLUMNS = 9
_MOST_NAME = 28


def levels_text(levels: Sequence[tuple[str, int]]) -> str:
    """Shares of the blocks that are read: `largest exactly 40 %, whole 60 %`."""
    total = sum(count for _, count in levels)
    return ", ".join(f"{name} {format_percent(count / total)}" for name, count in levels) if total else "-"


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
