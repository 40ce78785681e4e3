"""Tests of the page of the part `trained`: what is said of losses that are known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.trained import PART

DOMAINS = ("prose", "headers", "legal", "internet")
SCHEDULE = {"steps": 40, "batch": 2, "window_tokens": 256, "peak_rate": 2e-5}
DELTA = {"relative_norm": 0.01, "changed_fraction": 0.3}


def losses(mean: float, spread: float = 0.0) -> dict[str, list[float]]:
    """Six windows a domain, which lie `spread` on either side of a mean."""
    return {domain: [mean - spread, mean + spread] * 3 for domain in DOMAINS}


def results(packed: Mapping[int, float], *, full: Mapping[int, float], spread: float = 0.0) -> Results:
    """Of TIES at 10 %: what is lost in packed form and gained in full, seed by seed; other forms lose 0.1."""
    entries: dict[str, object] = {
        "base": {"losses": losses(3.0), "bytes": 269_000_000, "schedules": {"full": SCHEDULE, "lora": SCHEDULE}}
    }
    for seed, gain in full.items():
        lost = {"packed": packed[seed], "norm": 0.1, "random": 0.1}
        own = [{domain: [2.5] * 6} for domain in DOMAINS]
        entries[f"full/{seed}/family"] = {"own_losses": own, "deltas": [DELTA] * 4, "packed_share": 0.4}
        entries[f"full/{seed}/ties/full"] = {"losses": losses(3.0 - gain)}
        for form, value in lost.items():
            loss = losses(3.0 - gain + value, spread if form == "packed" else 0.0)
            entries[f"full/{seed}/ties/{form}/10"] = {"losses": loss}
    return Results(Path("trained.json"), {"entries": entries})


def gain_rows(stored: Results) -> dict[str, str]:
    tables = [piece for piece in PART.page(stored).body if isinstance(piece, Table)]
    table = next(table for table in tables if table.header[-1] == "gain kept at 10 %")
    return {row[1]: row[2] for row in table.rows}


def told(stored: Results) -> str:
    """What the page says of each merge at 10 %."""
    return next(piece for piece in PART.page(stored).body if isinstance(piece, str))


def test_page__tells_the_share_of_the_gain_with_the_interval_over_windows() -> None:
    rows = gain_rows(results({0: 0.02}, full={0: 0.2}, spread=0.01))
    # 24 windows, half at 0.01 and half at 0.03: a deviation of 0.0102; 2.069 * 0.0102 / sqrt(24) = 0.0043 of 0.2
    assert rows["packed"] == "90 % ± 2"
    assert rows["blocks by norm"] == "50 % ± 0"


def test_page__tells_the_interval_over_three_seeds() -> None:
    rows = gain_rows(results({0: 0.02, 1: 0.0, 2: 0.04}, full={0: 0.2, 1: 0.2, 2: 0.2}))
    assert rows["packed"] == "90 % ± 0 (25)"  # shares of 90, 100 and 80 %: 4.303 * 10 / sqrt(3)


def test_page__compares_what_is_lost_with_the_noise_between_seeds() -> None:
    within = results({0: 0.01, 1: 0.01, 2: 0.01}, full={0: 0.18, 1: 0.2, 2: 0.22})
    assert "0.0100 nats lost, within the seed noise of 0.0200" in told(within)
    beyond = results({0: 0.03, 1: 0.03, 2: 0.03}, full={0: 0.18, 1: 0.2, 2: 0.22})
    assert "0.0300 nats lost, more than the seed noise of 0.0200" in told(beyond)
    single = results({0: 0.01}, full={0: 0.2})
    assert "one seed says nothing of the noise between seeds" in told(single)


def test_page__tells_what_packed_merges_keep_where_they_keep_less_too() -> None:
    better, worse = (PART.page(results({0: lost}, full={0: 0.2})).meaning for lost in (0.05, 0.15))
    assert "packed experts keep 75 %" in better
    assert "packed experts keep 25 %" in worse
    assert all("whole blocks keep 50 %" in meaning for meaning in (better, worse))


def test_page__tells_nats_where_the_full_merge_gains_nothing() -> None:
    assert gain_rows(results({0: 0.02}, full={0: -0.1}))["packed"] == "+0.0200 nats"
