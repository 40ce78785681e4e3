"""`sweep --evaluate` and `merge --target-loss`: losses that a command of the user prints."""

from __future__ import annotations

import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import LimitError
from mergepipe.options import MergeOptions
from support.command_line import Runner, Workplace, finish, start_command
from support.model_folders import recipe_of, write_model

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


CHANGES = {
    "flips a bit": "weights = folder / 'model.safetensors'; b = bytearray(weights.read_bytes()); b[-5] ^= 1; "
    "weights.write_bytes(b)",
    "writes the same bytes again": "weights = folder / 'model.safetensors'; weights.write_bytes(weights.read_bytes())",
    "removes a file": "(folder / 'config.json').unlink()",
    "adds a file": "(folder / 'results.json').write_text('{}')",
    "adds a folder": "(folder / 'cache').mkdir()",
    "removes all": "[path.unlink() for path in folder.iterdir()]",
    "replaces the real folder": "real = folder.resolve(); real.rename(real.with_name('other')); real.mkdir()",
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
def test_merge__that_the_evaluation_changed_is_not_published(work: Workplace, run: Runner, change: str) -> None:
    script = work.root / "changing.py"
    script.write_text(f"import sys, pathlib\nfolder = pathlib.Path(sys.argv[1])\n{CHANGES[change]}\nprint(0.5)\n")
    command = f"{PYTHON} changing.py {{}}"
    ran = run("merge", work.recipe, work.out, *SAMPLE, "--target-loss", "1", "--evaluate", command, "-q")
    assert (ran.exit_code, ran.codes[0]) == (2, "evaluate.failed")
    assert "changing.py" in ran.err
    assert "changed the merge that it was to evaluate" in ran.err
    assert not work.out.exists()
    assert not list(work.root.glob(".*/snapshot*"))  # nothing of it is resumed
    assert run("ls", "--json").json()["snapshots"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["SIGKILL", "SIGINT"])
def test_merge__that_ends_while_it_is_evaluated_is_not_resumed(work: Workplace, run: Runner, ending: str) -> None:
    (work.root / "ending.py").write_text(
        "import os, pathlib, signal, sys\n"
        "weights = pathlib.Path(sys.argv[1]) / 'model.safetensors'\n"
        "content = bytearray(weights.read_bytes())\n"
        "content[-5] ^= 1\n"
        "weights.write_bytes(content)\n"
        f"os.kill(os.getppid(), signal.{ending})\n"
        "print(9)\n"
    )
    options = (*SAMPLE, "--target-loss", "1", "--evaluate", f"{PYTHON} ending.py")
    assert finish(start_command("merge", work.recipe, work.out, *options, cwd=work.root)).exit_code != 0
    run("merge", work.recipe, work.out, *SAMPLE, "--budget", "5%", "-q")
    run("merge", work.recipe, work.root / "direct", *SAMPLE, "--budget", "5%", "-q")
    weights = [(place / "model.safetensors").read_bytes() for place in (work.out, work.root / "direct")]
    assert weights[0] == weights[1]


def test_merge__gives_the_evaluation_a_link_whose_removal_harms_nothing(work: Workplace, run: Runner) -> None:
    (work.root / "moving.py").write_text(
        "import os, sys\nos.rename(sys.argv[1], sys.argv[1] + '2')\nos.makedirs(sys.argv[1])\nprint(0.5)\n"
    )
    command = f"{PYTHON} moving.py"
    run("merge", work.recipe, work.out, *SAMPLE, "--target-loss", "1", "--evaluate", command, "-q")
    assert run("verify", work.out, "-q").exit_code == 0


def test_merge__into_one_file_gives_the_evaluation_the_folder_of_that_file(work: Workplace, run: Runner) -> None:
    (work.root / "single.py").write_text(
        "import sys, pathlib\nassert (pathlib.Path(sys.argv[1]) / 'one.safetensors').stat().st_size > 1000\nprint(1)\n"
    )
    out = work.root / "one.safetensors"
    command = f"{PYTHON} single.py"
    run("merge", work.recipe, out, *SAMPLE, "--target-loss", "1", "--evaluate", command, "-q")
    assert run("verify", out, "-q").exit_code == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "printed",
    ["'1' * 300_000 + 'x 2.5'", "'9' * 300_000 + ' 2.5'", "'2.5\\n' * 20_000_000", "'word ' * 20_000_000 + '2.5'"],
)
def test_evaluate__reads_the_end_of_any_output_in_linear_time(work: Workplace, run: Runner, printed: str) -> None:
    (work.root / "long.py").write_text(f"print({printed})\n")
    options = ("--target-loss", "3", "--evaluate", f"{PYTHON} long.py")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = run("merge", work.recipe, work.out, *SAMPLE, *options, "--json").json()
    assert [one["loss"] for one in report["tried"]] == [2.5]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 80 << 10  # KiB: of 100 MB that are printed


@pytest.mark.parametrize(("printed", "number"), [("nan", "nan"), ("9" * 5000, "9" * 40)])
def test_evaluate__numbers_that_are_no_loss_are_shown_short(
    work: Workplace, run: Runner, printed: str, number: str
) -> None:
    (work.root / "odd.py").write_text(f"print('{printed}')\n")
    options = ("--target-loss", "3", "--evaluate", f"{PYTHON} odd.py")
    ran = run("merge", work.recipe, work.out, *SAMPLE, *options, "-q")
    assert f"the last number that it printed is {number}; a finite loss" in ran.err


def test_merge__to_a_target_loss_passes_over_budgets_in_which_nothing_fits(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name in ("base", "expert"):
        write_model(tmp_path / name, {"x": random.normal(size=(512, 512)).astype(np.float32)}, {"model_type": "llama"})
    recipe = recipe_of("task_arithmetic", {tmp_path / "expert": {"weight": 0.5}}, tmp_path / "base")
    options = MergeOptions(target_loss=1.0, evaluate=f"{PYTHON} -c 'print(1)'", block_elements=1 << 16)
    report = mergepipe.merge(recipe, tmp_path / "out", options=options)
    assert [one.budget for one in report.tried] == ["25%"]
    never = replace(options, target_loss=0.0)
    with pytest.raises(LimitError, match="published: 5%: nothing fits; 10%: nothing fits; 25%: 1 "):
        mergepipe.merge(recipe, tmp_path / "none", options=never)
