"""Tests of benchmarks.methods on tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.methods import COLUMNS, main
from benchmarks.recipes import all_cases

from mergepipe.operators.registry import operator_specs
from support.families import TINY, write_family

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


def test_methods__have_a_row_for_each_case_over_its_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, chosen = Path(sys.executable).with_name("mergepipe"), ("ties", "slices", "LoRA", "union")
    arguments = ["--root", str(tmp_path), "--shape", "tiny", "--repeat", "1", "--mergepipe", str(program)]
    assert main([*arguments, "--cases", *chosen, "--json", str(tmp_path / "runs.json")]) == 0
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert {word for word in chosen for run in runs if word in run["name"]} == set(chosen)
    assert all(run["floor_seconds"] > 0 and run["needed_bytes"] > 0 for run in runs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"| {' | '.join(COLUMNS)} |"
    assert len(lines) == 4 + len(runs)
    assert main([*arguments[:-2], "--mergepipe", "/bin/false", "--cases", "linear"]) == 1


def test_cases__cover_every_operator_that_reads_experts(tmp_path: Path) -> None:
    family = write_family(tmp_path / "family", TINY, 2)
    names = {case.name for case in all_cases(family, TINY, tmp_path / "more")}
    assert {name for name, spec in operator_specs().items() if spec.max_experts != 0} <= names
