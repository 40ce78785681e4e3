"""Tests of the page of the part `sampling`: what is said of losses that are known."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.trained import SAMPLING as PART

DOMAINS = ("prose", "headers", "legal", "internet")
SCHEDULE = {"steps": 40, "batch": 2, "window_tokens": 256, "peak_rate": 2e-5}


def losses(mean: float) -> dict[str, list[float]]:
    return {domain: [mean - 0.1, mean + 0.1] * 3 for domain in DOMAINS}


def results() -> Results:
    """Of TIES at 10 %: a gain of 0.2 nats, of which samples keep 90 % and blocks by norm 10 %."""
    kept = {"sample-32": 0.9, "norm": 0.1, "random": 0.2}
    entries: dict[str, object] = {
        "base": {"losses": losses(3.0), "schedules": {"full": SCHEDULE, "lora": SCHEDULE}},
        "full/0/family": {
            "own_losses": [{domain: [2.5] * 6} for domain in DOMAINS],
            "deltas": [{"relative_norm": 0.01, "changed_fraction": 0.3}] * 4,
        },
        "full/0/ties/full": {"losses": losses(2.8)},
    }
    entries |= {f"full/0/ties/{form}/10": {"losses": losses(3.0 - 0.2 * share)} for form, share in kept.items()}
    return Results(Path("sampling.json"), {"entries": entries})


def test_page__tells_the_share_of_the_gain_by_what_is_read() -> None:
    page = PART.page(results())
    tables = [piece for piece in page.body if isinstance(piece, Table)]
    rows = {row[1]: row[2] for row in next(table for table in tables if table.header[1] == "what is read").rows}
    assert rows == {"sample, 32 Ki": "90 ± 0", "blocks by norm": "10 ± 0"}
    assert "samples keep 90 % (full fine-tuning) of what TIES, linear and DARE-TIES merges gain" in page.meaning
    assert "blocks chosen by norm keep 10 % (full fine-tuning)" in page.meaning
    assert tables[0].rows[0][-2:] == ("", "")  # of one expert and of a sum nothing was measured
    assert not any(table.header[1] == "what is read" for table in tables[2:])  # and nothing packed
