"""`sweep --evaluate` and `merge --target-loss`: losses that a command of the user prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.command_line import Runner, Workplace

LOSS = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
plan = json.loads((folder / "mergepipe.json").read_text())["plan"]
assert (folder / "model.safetensors").exists() and (folder / "config.json").exists()
share = 1.0 if plan is None else plan["planned_bytes"] / plan["full_cost_bytes"]
print("step 7 of 9", file=sys.stderr)
print(f"evaluated 12 windows in model-2: loss {3 - share:.9e}")
"""


@pytest.fixture(autouse=True)
def _loss(work: Workplace) -> None:
    (work.root / "loss of a model.py").write_text(LOSS)


PYTHON = f"'{sys.executable}'"
COMMAND = f"{PYTHON} 'loss of a model.py'"
SAMPLE = ("--select", "sample", "--block-elements", "16384")


def test_sweep__tells_the_loss_of_each_budget_and_no_distance_of_samples(work: Workplace, run: Runner) -> None:
    swept = run("sweep", work.recipe, "--budgets", "0,50%,100%", *SAMPLE, "--evaluate", COMMAND, "--json").json()
    assert [(point["budget"], point["policy"]) for point in swept["points"]] == [
        ("0", "sample"), ("50%", "sample"), ("100%", "sample"),
    ]  # fmt: skip
    for point in swept["points"]:
        assert point["loss"] == pytest.approx(3 - point["planned_bytes"] / swept["full_cost_bytes"])
        assert point["error"] is point["flattering_error"] is None
    assert swept["full_loss"] == 2.0


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ((*SAMPLE, "--evaluate", f"{COMMAND} {{}}"), ["loss"]),
        (SAMPLE, []),
        (("--select", "norm", "--evaluate", COMMAND), ["loss", "error", "of norm"]),
    ],
)
def test_sweep__has_columns_and_charts_of_what_was_measured(
    work: Workplace, run: Runner, options: tuple[str, ...], columns: list[str]
) -> None:
    page = work.root / "sweep.html"
    table = run("sweep", work.recipe, "--budgets", "50%", *options, "--html", page).out
    pattern = " +".join(["^budget", "policy", "read", "of all", "time", *columns])
    assert re.search(f"{pattern}$", table, re.MULTILINE)
    assert not re.search(r"^50% +random", table, re.MULTILINE)
    text = page.read_text()
    assert ("loss by the given command" in text, "error relative" in text) == ("loss" in columns, "error" in columns)


def test_merge__to_a_target_loss_publishes_the_first_budget_that_meets_it(work: Workplace, run: Runner) -> None:
    options = (*SAMPLE, "--target-loss", "2.8", "--evaluate", COMMAND)
    report = run("merge", work.recipe, work.out, *options, "--json").json()
    assert [one["budget"] for one in report["tried"]] == ["5%", "10%", "25%"]
    losses = [one["loss"] for one in report["tried"]]
    assert losses[0] > losses[1] > 2.8 >= losses[2]
    assert report["expert_bytes"] + report["analysis_bytes"] == report["tried"][2]["expert_bytes"]
    run("merge", work.recipe, work.root / "direct", *SAMPLE, "--budget", "25%", "-q")
    weights = [(place / "model.safetensors").read_bytes() for place in (work.out, work.root / "direct")]
    assert weights[0] == weights[1]
    listed = run("ls", "--json").json()["snapshots"]
    assert sorted(Path(row["path"]).name for row in listed) == ["direct", "out"]
    assert run("verify", work.out, "-q").exit_code == 0
    manifest = json.loads((work.out / "mergepipe.json").read_text())
    assert 0 < manifest["run"]["tried_expert_bytes"] < manifest["realized"]["expert"] + manifest["realized"]["analysis"]


def test_merge__to_a_loss_that_no_budget_meets_publishes_nothing(work: Workplace, run: Runner) -> None:
    before = work.names()
    ran = run("merge", work.recipe, work.out, *SAMPLE, "--target-loss", "1.5", "--evaluate", COMMAND, "-q")
    assert (ran.exit_code, ran.codes) == (10, ["evaluate.target"])
    assert re.search(r"5%: 2\.\d+ \(.* read\); .*100%: 2 \(", ran.err)
    assert not work.out.exists()
    assert {name for name in work.names() - before if not name.startswith(".")} == set()
    assert run("ls", "--json").json()["snapshots"] == []
    again = run("merge", work.recipe, work.out, *SAMPLE, "--target-loss", "2", "--evaluate", COMMAND, "--json").json()
    assert [one["budget"] for one in again["tried"]][-1] == "100%"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program {}", "there is no program 'no-such-program'"),
        ("", "the command is empty"),
        ("python 'x", "No closing quotation"),
        (f"{PYTHON} -c 'import sys; print(2.5); sys.exit(3)'", "failed with exit code 3"),
        (f"{PYTHON} -c 'print(\"done\")'", "it printed no number"),
        (f"{PYTHON} -c 'print(\"step 3: loss nan\")'", "the last number that it printed is nan"),
    ],
)
@pytest.mark.parametrize("call", ["sweep", "merge"])
def test_evaluate__a_command_that_gives_no_loss_is_refused(
    work: Workplace, run: Runner, command: str, message: str, call: str
) -> None:
    options = ("--budgets", "50%") if call == "sweep" else (work.out, "--target-loss", "3")
    ran = run(call, work.recipe, *options, *SAMPLE, "--evaluate", command, "-q")
    assert (ran.exit_code, ran.codes[0]) == (2, "evaluate.failed")
    assert message in ran.err
    assert not work.out.exists()


def test_evaluate__numbers_in_names_are_no_losses(work: Workplace, run: Runner) -> None:
    command = f"{PYTHON} -c 'print(\"loss -1.25e-1 by v2.1.0, layer3\")'"
    swept = run("sweep", work.recipe, "--budgets", "50%", *SAMPLE, "--evaluate", command, "--json").json()
    assert swept["full_loss"] == -0.125
