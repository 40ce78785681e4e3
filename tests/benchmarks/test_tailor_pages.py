"""Pages of benchmarks.reproduce about training checkpoints: resuming from composites, composing beside loading one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.reproduce import compose, papers, resuming
from benchmarks.reproduce.results import Results
from benchmarks.tailor_resuming import Resumed
from benchmarks.tailor_training import Setting

SETTING = asdict(Setting(at=20, every=2, after=20, rate=2e-5, schedule="linear"))


def stored(size: str, entries: Mapping[str, Any], others: float = 0.0) -> Results:
    counted = {key: {"load": 0.0, "others": others, **entry} for key, entry in entries.items()}
    content = {
        "machine": {"cpu": "a processor", "cores": 2},
        "entries": counted,
        "date": "",
        "commit": "",
        "size": {"name": size, "ks": [2]},
    }
    return Results(Path("part.json"), {**content, "is_complete": True})


def seed_entry(seed: int, final_excess: float) -> dict[str, Any]:
    runs = [Resumed("not interrupted", seed, (), None, 2.5, 2.4, (), 2.25)]
    for strategy, excess in (("paper-parity", 0.0), ("paper-filter", final_excess)):
        losses = (0.0,) * 10 + (excess,) * 10
        runs.append(Resumed(strategy, seed, (0, 2), None, 2.5, 2.4 + excess, losses, 2.25 + excess))
    return {"setting": SETTING, "step_tokens": 256, "results": [asdict(run) for run in runs]}


def test_resuming_page__names_composites_that_are_not_back_at_the_end() -> None:
    entries = {f"{way}/{seed}": seed_entry(seed, 0.001) for way in ("alone", "zero3") for seed in (1, 2)}
    results = stored("0.6b", {**entries, "zero3/2": seed_entry(2, 0.02)})
    text = resuming.PART.page(results).markdown(results, "again")
    alone, ranks = text.splitlines()[2].split(" By two ranks under ZeRO-3: ")
    assert "paper-filter: back within 0.01 nats, at most +0.0010 at the end" in alone
    assert "paper-parity: back within 0.01 nats, at most +0.0000 at the end" in ranks
    assert "paper-filter: **not back within 0.01 nats in 1 of 2 seeds**, at most +0.0200 at the end" in ranks
    assert text.count("256 tokens") == 2
    beside = papers.comparison({"resuming": results})
    assert "| paper-filter | 1.59 / 1.59 | 1.60 / 1.62 | 2.251 / 2.401 | 2.260 / 2.410 |" in beside


def composed(pattern: str, n_sources: int, seconds: float, size_gb: float = 1.0) -> dict[str, Any]:
    times = {"seconds": seconds, "floor_seconds": 2.0, "cpu_seconds": seconds / 2}
    nbytes = {"peak_rss_bytes": 2**20, "read_bytes": 11 * 10**8, "written_bytes": 10**9}
    return {"size_gb": size_gb, "pattern": pattern, "n_sources": n_sources, **times, **nbytes}


@pytest.mark.parametrize(("others", "over"), [(0.0, "3.00"), (2.0, "6.00")])
def test_compose_page__puts_times_over_that_of_loading_one(others: float, over: str) -> None:
    loaded = {"size_gb": 1.0, "baseline": "DeepSpeed", "seconds": 1.0, "cpu_seconds": 0.25}
    entries = {
        "1/DeepSpeed/0": loaded,
        "1/consecutive/2/0": composed("consecutive", 2, 2.0),
        "1/parity/2/0": composed("parity", 2, 3.0),
        "1/consecutive/35/0": composed("consecutive", 35, 5.0),
    }
    results = stored("0.6b", entries, others)
    text = compose.PART.page(results).markdown(results, "again")
    assert "At most it read 1.10 times the bytes of one. From 35 sources it takes 2.50 times" in text
    assert f"Parity of two checkpoints of 1 GB takes {over} times" in text
    row = next(line for line in text.splitlines() if line.startswith("| parity |"))
    assert row == ("| parity | 2 | 3.00 | 1.50 |" if others == 0 else "| parity | 2 | 1.50 |  |")
    assert "2 GB" in next(line for line in text.splitlines() if "Not run, for the disk" in line)
    theirs = papers.comparison({"compose": results})
    assert f"| parity, 2 sources | 292 (0.07) | 61 (0.11) | {over} (0.33) |" in theirs


def test_compose_page__tells_what_the_largest_checkpoints_have_that_were_measured_so() -> None:
    entries = {
        "1/DeepSpeed/0": {"size_gb": 1.0, "baseline": "DeepSpeed", "seconds": 1.0, "cpu_seconds": 0.25},
        **{f"1/consecutive/{n}/0": composed("consecutive", n, 1.0 + n) for n in (2, 35)},
        "1/parity/2/0": composed("parity", 2, 3.0),
        **{f"2/consecutive/{n}/0": composed("consecutive", n, 10.0 + n, 2.0) for n in (2, 18)},
        **{f"8/{name}/2/0": composed(name, 2, 20.0, 8.0) for name in ("consecutive", "parity")},
    }
    entries["8/torch.load/0"] = {"size_gb": 8.0, "baseline": "torch.load", "seconds": 40.0, "cpu_seconds": 40.0}
    results = stored("8b", entries)
    text = compose.PART.page(results).markdown(results, "again")
    growth = "From 35 sources it takes 12.00 times the seconds of 2 (1 GB each); from 18 sources it takes 2.33 times"
    assert growth in text
    assert "Parity of two checkpoints of 1 GB takes 3.00 times the seconds in which DeepSpeed loads one" in text
    assert "Of 8 GB each, it takes 0.50 times the seconds of `torch.load` of one." in text
