"""Test of the part `resuming` of make reproduce, on a model of eight small layers, under the Trainer itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.papers import comparison
from benchmarks.reproduce.registry import PARTS
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.writing import markdown_files

pytestmark = pytest.mark.slow  # `make test-frameworks`: it needs what trains


def test_resuming__compares_composites_with_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    folders = ("--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"))
    assert main(["measure", "resuming", "--size", "toy", *folders]) == 0
    stored = Results.read(tmp_path / "results/resuming.json")
    assert set(stored.entries) == {"alone/1", "zero3/1"}
    for entry in stored.entries.values():
        runs = {run["name"]: run for run in entry["results"]}
        itself, parity = runs["the checkpoint itself"], runs["paper-parity of full saves, 2 steps apart"]
        assert itself["excess"] == [0.0] * 20
        assert itself["heldout_after"] == runs["not interrupted"]["heldout_after"]
        assert sorted(set(parity["ages"])) == [0, 2]
        assert any(parity["excess"])
    text = markdown_files(PARTS, tmp_path / "results")["resuming.md"]
    assert "| paper-filter of full saves, 10 steps apart |" in text
    assert "| paper-filter | 1.59 / 1.59 | 1.60 / 1.62 |" in comparison({"resuming": stored})
