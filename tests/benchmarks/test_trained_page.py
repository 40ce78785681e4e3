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


def results(
    sampled: Mapping[int, float], *, full: Mapping[int, float], spread: float = 0.0, random: float = 0.1
) -> Results:
    """Of TIES: what is gained in full and lost by samples, raw and packed, seed by seed; blocks by norm lose 0.1."""
    schedules = {"full": SCHEDULE, "lora": SCHEDULE}
    entries: dict[str, object] = {
        "base": {"losses": losses(3.0), "bytes": 269_000_000, "schedules": schedules, "gpu": ""}
    }
    for seed, gain in full.items():
        lost = {"sample-32": sampled[seed], "packed-sample": sampled[seed], "norm": 0.1, "random": random}
        own = [{domain: [2.5] * 6} for domain in DOMAINS]
        entries[f"full/{seed}/family"] = {"own_losses": own, "deltas": [DELTA] * 4, "packed_share": 0.08}
        entries[f"full/{seed}/ties/full"] = {"losses": losses(3.0 - gain)}
        for form, value in lost.items():
            loss = losses(3.0 - gain + value, spread if "sample" in form else 0.0)
            entries |= {f"full/{seed}/ties/{form}/{share}": {"losses": loss} for share in (5, 10)}
    return Results(Path("trained.json"), {"entries": entries})


def kept(stored: Results) -> dict[str, str]:
    """What TIES keeps by what is read, in all tables of the page."""
    tables = [piece for piece in PART.page(stored).body if isinstance(piece, Table)]
    return {row[1]: row[2] for table in tables if table.header[1] == "what is read" for row in table.rows}


def test_page__tells_the_share_of_the_gain_with_the_interval_over_windows() -> None:
    told = kept(results({0: 0.02}, full={0: 0.2}, spread=0.01))
    # 24 windows, half at 0.01 and half at 0.03: a deviation of 0.0102; 2.069 * 0.0102 / sqrt(24) = 0.0043 of 0.2
    assert told["sample, 32 Ki"] == told["packed: sample"] == "90 ± 2"
    assert told["blocks by norm"] == "50 ± 0"


def test_page__tells_the_interval_over_three_seeds() -> None:
    told = kept(results({0: 0.02, 1: 0.0, 2: 0.04}, full={0: 0.2, 1: 0.2, 2: 0.2}))
    assert told["sample, 32 Ki"] == "90 ± 0 (25)"  # shares of 90, 100 and 80 %: 4.303 * 10 / sqrt(3)


def test_page__tells_the_paired_difference_of_the_orders() -> None:
    assert kept(results({0: 0.0}, full={0: 0.2}, random=0.16))["norm - random"] == "+30.0 ± 0.0"
    assert kept(results({0: 0.0}, full={0: 0.2}, random=0.05))["norm - random"] == "-25.0 ± 0.0"


def test_page__says_first_what_samples_and_whole_blocks_keep() -> None:
    meaning = PART.page(results({0: 0.05}, full={0: 0.2})).meaning
    assert "samples keep 75 % (full fine-tuning) of what TIES, linear and DARE-TIES merges gain" in meaning
    assert "whole blocks keep 50 % (full fine-tuning) by norm and 50 % (full fine-tuning) at random" in meaning
    assert "Packed experts keep at 5 % of the raw bytes 75 % (full fine-tuning)" in meaning


def test_page__tells_nats_where_the_full_merge_gains_nothing() -> None:
    assert kept(results({0: 0.02}, full={0: -0.1}))["packed: sample"] == "+0.0200 nats"
