"""What has no effect in a recipe is told once: by `check` and `merge`, in text, JSON, manifest and card, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command_line import Runner, Workplace, make_workplace

RECIPE = """\
merge_method: ties
base_model: family/base
models:
  - model: family/expert-1
    parameters:
      weight: 0.6
      density: [{filter: no_such_part, value: 0.1}, {value: 0.5}]
  - model: family/expert-2@v2
    revision: main
    parameters: {weight: [0.4]}
parameters: {int8_mask: true}
dtype: torch.bfloat16
"""
CODES = ["recipe.no-effect", "recipe.no-effect", "recipe.unclear", "recipe.no-effect"]
INT8_MASK = "recipe.yml:11 parameters.int8_mask: int8_mask has no effect here; in mergekit masks are stored in 8 bits"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    work = make_workplace(tmp_path)
    work.recipe.write_text(RECIPE, encoding="utf-8")
    return work


def test_check__tells_notices_in_text_and_as_json(work: Workplace, run: Runner) -> None:
    assert run("check", work.recipe).out.count(INT8_MASK) == 1
    told = run("check", work.recipe, "--json").json()["recipe_notices"]
    assert [notice["code"] for notice in told] == CODES
    assert (told[0]["line"], told[0]["key"]) == (11, "parameters.int8_mask")


def test_plan_sweep_and_run__tell_the_same_notices_in_the_same_order(work: Workplace, run: Runner) -> None:
    home, file = ("--home", work.root / "home"), work.root / "plan.json"
    assert run("plan", work.recipe, "--budget", "50%", "--out", file, *home).out.count(INT8_MASK) == 1
    plan = json.loads(file.read_text())
    told = run("sweep", work.recipe, "--budgets", "50%", "--json", *home).json()["recipe_notices"]
    ran = run("run", file, work.out, "--json", *home).json()["recipe_notices"]
    assert [notice["code"] for notice in plan["recipe_notices"]] == CODES
    unset = {"elsewhere": "", "other_lines": [], "changes_result": False}  # a plan leaves them out
    assert told == [{**unset, **notice} for notice in plan["recipe_notices"]]
    assert [(notice["line"], notice["key"], notice["message"]) for notice in ran] == [
        (notice["line"], notice["key"], notice["message"]) for notice in told
    ]


def test_merge__tells_notices_in_report_manifest_and_card(work: Workplace, run: Runner) -> None:
    work.out.mkdir()  # an empty folder may be there
    ran = run("merge", work.recipe, work.out, "--no-catalog")
    assert (ran.exit_code, ran.out.count(INT8_MASK)) == (0, 1)
    manifest = json.loads((work.out / "mergepipe.json").read_text())
    assert len(manifest["run"]["recipe_notices"].splitlines()) == len(CODES)
    assert (work.out / "README.md").read_text().count("has no effect here") == 2
    assert run("verify", work.out).exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        lambda work: ("check", work.recipe),
        lambda work: ("merge", work.recipe, work.out, "--no-catalog"),
        lambda work: ("merge", work.recipe, work.out, "--no-catalog", "--budget", "50%"),
        lambda work: ("sweep", work.recipe, "--budgets", "50%", "--home", work.root / "home"),
        lambda work: ("plan", work.recipe, "--budget", "50%", "--home", work.root / "home"),
    ],
)
def test_strict__refuses_all_notices_at_once(
    work: Workplace, run: Runner, command: Callable[[Workplace], tuple[object, ...]]
) -> None:
    ran = run(*command(work), "--strict")
    assert ran.exit_code == 2
    assert [line.rpartition("[")[2].rstrip("]") for line in ran.error_lines] == CODES
    assert not work.out.exists()


def test_quiet__leaves_the_warnings_that_say_that_the_result_is_another(work: Workplace, run: Runner) -> None:
    ran = run("merge", work.recipe, work.out, "--no-catalog", "--quiet")
    (line,) = ran.error_lines
    assert (ran.exit_code, ran.out) == (0, "")
    assert line.startswith("warning: recipe.yml:8 models[1].model: the revision 'v2'")
    assert line.endswith("[recipe.unclear]")
    notices = run("check", work.recipe, "--json").json()["recipe_notices"]
    assert [notice["code"] for notice in notices if notice["changes_result"]] == ["recipe.unclear"]
    assert run("check", work.recipe).out.count("\nwarning ") == 1
    quiet = run("sweep", work.recipe, "--budgets", "50%", "--home", work.root / "home", "--quiet")
    assert (quiet.out, quiet.error_lines) == ("", [line])


def test_shares_above_1__are_refused_as_percentages(work: Workplace, run: Runner) -> None:
    text = work.write_recipe("ties").read_text()
    work.recipe.write_text(text + "parameters: {density: [{filter: mlp, value: 40}, {value: 0.2}]}\n")
    ran = run("merge", work.recipe, work.out, "--quiet")
    assert (ran.exit_code, len(ran.error_lines), work.out.exists()) == (2, 1, False)
    assert "recipe.yml:9 parameters.density[0].value: density is 40, must be in [0, 1]; did you mean 0.4?" in ran.err
    lenient = run("merge", work.recipe, work.out, "--quiet", "--lenient")
    assert (lenient.exit_code, lenient.err.count("warning: ")) == (0, 1)
    assert run("verify", work.out).exit_code == 0
    assert run("replay", work.out, work.root / "again", "--quiet").exit_code == 0


def test_lenient__takes_misspelt_names_and_goes_not_with_strict(work: Workplace, run: Runner) -> None:
    work.recipe.write_text(RECIPE.replace("density", "densty").replace("no_such_part", "self_atn"), encoding="utf-8")
    refused = run("check", work.recipe)
    assert (refused.exit_code, len(refused.error_lines)) == (2, 1)
    assert "did you mean 'density'?" in refused.err
    assert "did you mean 'density'?" in run("check", work.recipe, "--lenient").out
    both = run("check", work.recipe, "--lenient", "--strict")
    assert (both.exit_code, "option.conflict" in both.err) == (2, True)


def test_replay__tells_in_the_card_what_the_merge_told(work: Workplace, run: Runner) -> None:
    assert run("merge", work.recipe, work.out, "--no-catalog", "--quiet").exit_code == 0
    assert run("replay", work.out, work.root / "again", "--no-catalog", "--quiet").exit_code == 0
    assert (work.root / "again" / "README.md").read_bytes() == (work.out / "README.md").read_bytes()
