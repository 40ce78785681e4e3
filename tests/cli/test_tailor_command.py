"""`mergepipe tailor`: every subcommand, as text and as JSON, and its failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_start_up import LOADED

from support.command_line import Runner, finish, start_python
from support.training_trees import decay_groups, decoder_shapes, known_states, write_zero3


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for step in (7, 9):
        known = known_states(decoder_shapes(), seed=step, step=step)
        write_zero3(tmp_path / f"global_step{step}", known, decay_groups(known.shapes), 2)
    text = "default: global_step9\ntake: [{from: global_step7, units: [layers even, embed]}]\n"
    (tmp_path / "recipe.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compose__publishes_and_reports(run: Runner, place: Path) -> None:
    ran = run("tailor", "compose", "recipe.yml", "out", "--self-check", "full", "--memory", "32MiB")
    assert (ran.exit_code, (place / "out" / "mergepipe.json").is_file()) == (0, True)
    assert "self check  full: 2190 elements of 90 states compared" in ran.out
    again = run("tailor", "compose", "recipe.yml", "out", "--force", "--json", "--state-from", "global_step7").json()
    assert (again["step"], again["units"][0]["sources"][0]["age"]) == (7, 0)


def test_compose__writes_for_any_number_of_ranks(run: Runner, place: Path) -> None:
    assert run("tailor", "compose", "recipe.yml", "out", "--export", "universal", "-q").out == ""
    assert len(list((place / "out" / "zero").glob("model.*/fp32.pt"))) > 1


def test_inspect__imports_nothing_heavy(place: Path) -> None:
    ran = finish(start_python(LOADED, "tailor", "inspect", place / "global_step7"))
    assert ran.exit_code == 0
    assert "numba" not in ran.err
    assert "torch" not in ran.err
