"""Pages of benchmarks.reproduce about training checkpoints: resuming from composites, composing beside loading one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.reproduce import compose, papers, resuming
from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.trained import PART
from benchmarks.tailor import N_UNITS, Pattern, patterns
from benchmarks.tailor_resuming import Resumed
from benchmarks.tailor_training import Setting
from benchmarks.tailor_tree import checkpoint_name, scaled_shapes, write_checkpoint

from benchmarks import partial_saving, tailor_resuming
from mergepipe.tailor import api
from support.public_names import ZERO_FORMAT

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


# --- the checkpoints and recipes that composition is measured with


PATTERNS = [pattern for pattern in patterns([2, 8, N_UNITS]) if pattern.units is not None]
_CHECKPOINTS = 8


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: f"{p.name}-{p.n_sources}")
def test_patterns__take_every_unit_at_most_once_and_something_of_every_source(pattern: Pattern) -> None:
    taken = Counter(unit for units in (pattern.units or {}).values() for unit in units)
    assert set(taken.values()) == {1}
    assert set(taken) <= set(range(N_UNITS))
    assert set(pattern.units or {}) | {pattern.n_sources - 1} == set(range(pattern.n_sources))


@pytest.mark.thorough
def test_write_checkpoint__is_one_that_every_pattern_composes(tmp_path: Path) -> None:
    size_bytes = 4_000_000
    pool = tmp_path / "pool"
    pool.write_bytes(bytes(range(256)) * (1 << 18))
    shapes = scaled_shapes(size_bytes)
    for index in range(_CHECKPOINTS):
        write_checkpoint(tmp_path / checkpoint_name(index), shapes, 2, 100 * (index + 1), pool)
    (found,) = api.inspect(tmp_path / checkpoint_name(0)).checkpoints
    assert (found.format, found.missing, found.step) == (ZERO_FORMAT, (), 100)
    assert sum(p.stat().st_size for p in (tmp_path / checkpoint_name(0)).iterdir()) == pytest.approx(
        size_bytes, rel=0.2
    )
    for pattern in (pattern for pattern in PATTERNS if pattern.n_sources <= _CHECKPOINTS):
        (tmp_path / "recipe.yml").write_text(pattern.recipe())
        report = api.check(tmp_path / "recipe.yml")
        assert len(report.plan.assignment.sources) == pattern.n_sources


# --- what is told of a resumed run


def resumed(name: str, seed: int, *excess: float) -> Resumed:
    return Resumed(name, seed, (0, 50, 100), 0.5, 4.5, 4.25, excess)


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("excess", "expected"),
    [
        ([0.0] * 10, 0),
        ([0.5] * 3 + [0.0] * 12, 3),  # 10 steps of nothing begin there
        ([0.08] + [0.0] * 9, 0),  # one step of ten counts for a tenth
        ([0.5] * 30, None),
        ([0.0] * 9, None),  # too few to say
    ],
)
def test_recovered_after__is_the_first_step_whose_next_ten_are_within_a_hundredth(
    excess: list[float], expected: int | None
) -> None:
    assert resumed("a", 1, *excess).recovered_after == expected


# --- the page of the part trained: what is said of losses that are known


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
            loss = losses(3.0 - gain + value, spread)
            entries |= {f"full/{seed}/ties/{form}/{share}": {"losses": loss} for share in (5, 10)}
    return Results(Path("trained.json"), {"entries": entries})


def kept(stored: Results) -> dict[str, str]:
    """What TIES keeps by what is read, in all tables of the page."""
    tables = [piece for piece in PART.page(stored).body if isinstance(piece, Table)]
    return {row[1]: row[2] for table in tables if table.header[1] == "what is read" for row in table.rows}


def test_page__tells_one_draw_without_an_interval_and_other_rows_with_that_over_windows() -> None:
    told = kept(results({0: 0.02}, full={0: 0.2}, spread=0.01))
    assert told["sample, 32 Ki"] == told["packed: sample"] == "90, 1 draw"
    # 24 windows, half at 0.09 and half at 0.11: a deviation of 0.0102; 2.069 * 0.0102 / sqrt(24) = 0.0043 of 0.2
    assert told["blocks by norm"] == "50 ± 2"


def test_page__tells_the_interval_over_three_draws() -> None:
    told = kept(results({0: 0.02, 1: 0.0, 2: 0.04}, full={0: 0.2, 1: 0.2, 2: 0.2}))
    assert told["sample, 32 Ki"] == "90 ± 25"  # shares of 90, 100 and 80 %: 4.303 * 10 / sqrt(3)


def test_page__tells_the_paired_difference_of_the_orders() -> None:
    assert kept(results({0: 0.0}, full={0: 0.2}, random=0.16))["norm - random"] == "+30.0 ± 0.0"
    assert kept(results({0: 0.0}, full={0: 0.2}, random=0.05))["norm - random"] == "-25.0 ± 0.0"


def test_page__says_first_what_samples_and_whole_blocks_keep() -> None:
    meaning = PART.page(results({0: 0.05}, full={0: 0.2})).meaning
    assert "samples keep 75 % (full fine-tuning), in the mean of" in meaning
    assert "whole blocks keep 50 % (full fine-tuning) by norm and 50 % (full fine-tuning) at random" in meaning
    assert "Packed experts keep at 5 % of the raw bytes 75 % (full fine-tuning)" in meaning


def test_page__tells_nats_where_the_full_merge_gains_nothing() -> None:
    assert kept(results({0: 0.02}, full={0: -0.1}))["packed: sample"] == "+0.0200 nats"


# --- the commands of docs/internals/benchmarks.md need no arguments ---


def test_partial_saving__measures_every_strategy_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    works: list[Path] = []

    def measured(strategy: str, work: Path, n_saves: int) -> tuple[list[tuple[int, float]], float]:
        works.append(work)
        return [(1000 if strategy == "full" else 250, 0.5)] * n_saves, 10.0

    monkeypatch.setattr(partial_saving, "_measure", measured)
    partial_saving.main([])
    names = ["full", "paper-parity", "paper-filter", "parity", "filter", "latest-changed"]
    assert works == [Path(".bench/partial-saving") / name for name in names]
    rows = [line.split(" | ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert rows == ["100%", *["25%"] * 5]


@pytest.mark.thorough
def test_tailor_resuming__keeps_its_results_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = Resumed("parity", 1, (0, 50), 0.5, 4.0, 4.0, (0.0,) * 100, 3.9)
    monkeypatch.setattr(tailor_resuming, "run_all", lambda *_: [result])
    tailor_resuming.main([])
    stored = json.loads((tmp_path / ".bench/tailor-resuming/resuming.json").read_text())
    assert [entry["name"] for entry in stored["results"]] == ["parity"]
