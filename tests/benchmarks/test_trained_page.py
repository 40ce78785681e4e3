"""Tests of the page of the part `trained`: what is said of losses that are known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.trained import TRAINED as PART

DOMAINS = ("prose", "headers", "legal", "internet")
SCHEDULE = {"steps": 40, "batch": 2, "window_tokens": 256, "peak_rate": 2e-5}
DELTA = {"relative_norm": 0.01, "changed_fraction": 0.3}


def losses(mean: float, spread: float = 0.0) -> dict[str, list[float]]:
    """Six windows a domain, which lie `spread` on either side of a mean."""
    return {domain: [mean - spread, mean + spread] * 3 for domain in DOMAINS}


def results(
    packed: Mapping[int, float], *, full: Mapping[int, float], spread: float = 0.0, random: float = 0.1
) -> Results:
    """Of TIES at 5 %: what is gained in full and lost by levels of packs, seed by seed; blocks by norm lose 0.1."""
    entries: dict[str, object] = {
        "base": {"losses": losses(3.0), "bytes": 269_000_000, "schedules": {"full": SCHEDULE, "lora": SCHEDULE}}
    }
    for seed, gain in full.items():
        lost = {"packed": packed[seed], "norm": 0.1, "random": random}
        own = [{domain: [2.5] * 6} for domain in DOMAINS]
        entries[f"full/{seed}/family"] = {"own_losses": own, "deltas": [DELTA] * 4, "packed_share": 0.08}
        entries[f"full/{seed}/ties/full"] = {"losses": losses(3.0 - gain)}
        for form, value in lost.items():
            loss = losses(3.0 - gain + value, spread if form == "packed" else 0.0)
            entries |= {f"full/{seed}/ties/{form}/{share}": {"losses": loss} for share in (5, 10)}
    return Results(Path("trained.json"), {"entries": entries})


def table_of(stored: Results, column: str) -> Table:
    return next(piece for piece in PART.page(stored).body if isinstance(piece, Table) and column in piece.header)


def kept_by_packs(stored: Results) -> tuple[str, ...]:
    return table_of(stored, "of the packs").rows[0][2:]


def kept_by_blocks(stored: Results) -> dict[str, str]:
    return {row[1]: row[2] for row in table_of(stored, "gain kept at 10 %").rows}


def test_page__tells_the_share_of_the_gain_with_the_interval_over_windows() -> None:
    stored = results({0: 0.02}, full={0: 0.2}, spread=0.01)
    # 24 windows, half at 0.01 and half at 0.03: a deviation of 0.0102; 2.069 * 0.0102 / sqrt(24) = 0.0043 of 0.2
    assert kept_by_packs(stored) == ("5 %", "62 %", "90 ± 2")  # a budget that holds the packs whole is left out
    assert kept_by_blocks(stored)["blocks by norm"] == "50 ± 0"


def test_page__tells_the_interval_over_three_seeds() -> None:
    stored = results({0: 0.02, 1: 0.0, 2: 0.04}, full={0: 0.2, 1: 0.2, 2: 0.2})
    assert kept_by_packs(stored)[2] == "90 ± 0 (25)"  # shares of 90, 100 and 80 %: 4.303 * 10 / sqrt(3)


def test_page__tells_the_paired_difference_of_the_orders() -> None:
    assert kept_by_blocks(results({0: 0.0}, full={0: 0.2}, random=0.16))["norm - random"] == "+30.0 ± 0.0"
    assert kept_by_blocks(results({0: 0.0}, full={0: 0.2}, random=0.05))["norm - random"] == "-25.0 ± 0.0"


def test_page__says_first_what_whole_blocks_and_levels_of_packs_keep() -> None:
    better, worse = (PART.page(results({0: lost}, full={0: 0.2})).meaning for lost in (0.05, 0.15))
    assert "levels of packs keep at 5 % of the raw bytes 75 % (full fine-tuning)" in better
    assert "levels of packs keep at 5 % of the raw bytes 25 % (full fine-tuning)" in worse
    assert all("of what the full merge gains, 50 % by norm and 50 % at random" in text for text in (better, worse))


def test_page__tells_nats_where_the_full_merge_gains_nothing() -> None:
    assert kept_by_packs(results({0: 0.02}, full={0: -0.1}))[2] == "+0.0200 nats"
