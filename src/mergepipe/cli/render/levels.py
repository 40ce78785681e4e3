"""Levels and expected errors as text: who is read how closely, and what that is expected to leave out where."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.cli.render.layout import Fact, columns_text
from mergepipe.cli.render.units import format_bytes, format_rate, format_seconds
from mergepipe.planning.plan import TimePrice
from mergepipe.reports import LayerShare

MOST_ROWS = 24
MOST_EXPERTS = 8
_MOST_NAME = 20


def error_text(error: float | None) -> str:
    """A share of what merging changes."""
    return "-" if error is None else f"{100 * error:.3g} %"


def levels_text(levels: Sequence[tuple[str, int]]) -> str:
    """Shares of the blocks that are read: `head 40 %, whole 60 %`."""
    total = sum(count for _, count in levels)
    return ", ".join(f"{name} {100 * count / total:.3g} %" for name, count in levels) if total else "-"


def error_table(layers: Sequence[LayerShare], experts: Sequence[str]) -> str:
    """Expected errors by layer (neighbours together where there are many) and expert; levels beside them."""
    shown = experts[:MOST_EXPERTS]
    head = ["layer", "all", *(_shortened(name) for name in shown), "blocks read"]
    rows = []
    for group in _grouped(layers):
        errors = [_joined([layer.energies[e] for layer in group]) for e in range(len(experts))]
        together = _joined([energy for layer in group for energy in layer.energies])
        counts: dict[str, int] = {}
        for layer in group:
            for name, count in layer.levels:
                counts[name] = counts.get(name, 0) + count
        cells = [error_text(together), *map(error_text, errors[: len(shown)]), levels_text(tuple(counts.items()))]
        rows.append([_range_text(group), *cells])
    more = len(experts) - len(shown)
    note = f"\n({more} more experts: see --json)" if more else ""
    return f"error expected, by layer and expert\n{columns_text(head, rows)}{note}"


def _grouped(layers: Sequence[LayerShare]) -> list[Sequence[LayerShare]]:
    """At most `MOST_ROWS` runs of layers, those outside of layers on their own."""
    numbered, others = [x for x in layers if x.layer], [x for x in layers if not x.layer]
    size = max(1, -(-len(numbered) // (MOST_ROWS - 1)))
    return [*(numbered[i : i + size] for i in range(0, len(numbered), size)), *([others] if others else [])]


def _range_text(group: Sequence[LayerShare]) -> str:
    first, last = group[0].layer, group[-1].layer
    return (first if first == last else f"{first}-{last}") or "others"


def _joined(energies: Sequence[tuple[float, float] | None]) -> float | None:
    known = [energy for energy in energies if energy is not None]
    whole = sum(energy for _, energy in known)
    if not known:
        return None
    return float((sum(left for left, _ in known) / whole) ** 0.5) if whole > 0 else 0.0


def _shortened(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"...{name[3 - _MOST_NAME :]}"


def price_facts(price: TimePrice | None) -> list[Fact]:
    """What a plan by time was made from, and how long it is expected to take."""
    if price is None:
        return []
    speeds, duration = price.speeds, price.duration
    reading, decoding = format_seconds(duration.reading_seconds), format_seconds(duration.decoding_seconds)
    bands = speeds.decoding.nanoseconds.get("bands")
    text = f"time: storage of {format_rate(speeds.storage_bytes_per_second)}"
    if bands:
        text += (
            f", {format_bytes(2e9 / bands[-1])} a second of packed experts decoded by each of {speeds.threads} threads"
        )
    return [
        ("price", f"{text} ({speeds.source})"),
        ("expected", f"{reading} to read the experts, {decoding} to decode them; the two overlap"),
    ]
