"""`analyze`, `plan`, `run`, `merge --budget`, `explain` and `sweep`: what they print, and how they refuse."""

from __future__ import annotations

import json
import os
import shutil
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from mergepipe.planning.budget import OnOmit, Policy
from mergepipe.planning.plan import parse_plan
from support.command_line import Runner, Workplace


@pytest.fixture
def home(work: Workplace) -> Path:
    """The catalog's home in the workplace, not made yet."""
    return work.root / "home"


@pytest.fixture
def analyzed(work: Workplace, run: Runner, home: Path) -> Path:
    """The home of a catalog that knows both experts."""
    assert run("analyze", work.family.base, *work.family.experts, "--quiet").exit_code == 0
    return home


def stored_plan(work: Workplace, run: Runner, *options: object) -> Path:
    path = work.root / "plan.json"
    assert run("plan", work.recipe, "--budget", "50%", "-o", path, *options).exit_code == 0
    return path


# --- plan ---


@pytest.mark.usefixtures("analyzed")
def test_plan__json_is_the_plan_and_is_what_is_stored(work: Workplace, run: Runner) -> None:
    path = work.root / "plan.json"
    ran = run("plan", work.recipe, "--budget", "50%", "-o", path, "--json")
    schema = resources.files("mergepipe").joinpath("schemas/plan.schema.json").read_text(encoding="utf-8")
    jsonschema.validate(ran.json(), json.loads(schema))
    assert path.read_text() == ran.out
    assert parse_plan(ran.out.encode()).digest == ran.json()["digest"]


@pytest.mark.usefixtures("analyzed")
def test_plan__reads_no_tensor_data(work: Workplace, run: Runner) -> None:
    for model in work.family.models:
        file = model / "model.safetensors"
        content, status = file.read_bytes(), file.stat()
        header_bytes = 8 + int.from_bytes(content[:8], "little")
        with file.open("r+b") as stream:
            stream.seek(header_bytes)
            stream.write(bytes(len(content) - header_bytes))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run("plan", work.recipe, "--budget", "50%").exit_code == 0


@pytest.mark.usefixtures("analyzed")
def test_plan__only_another_plan_is_replaced(work: Workplace, run: Runner) -> None:
    path = stored_plan(work, run)
    first = path.read_bytes()
    stored_plan(work, run, "--select", "random")
    assert path.read_bytes() != first
    path.write_text("notes")
    ran = run("plan", work.recipe, "--budget", "50%", "-o", path)
    assert (ran.exit_code, ran.codes) == (7, ["output.not-ours"])
    assert path.read_text() == "notes"


# --- run and merge under a budget ---


def test_run__needs_no_catalog(work: Workplace, run: Runner, analyzed: Path) -> None:
    path = stored_plan(work, run)
    shutil.rmtree(analyzed)
    assert run("run", path, work.out, "-q", "--no-catalog").exit_code == 0
    assert not analyzed.exists()


def test_merge__without_a_catalog_it_leaves_none(work: Workplace, run: Runner, home: Path) -> None:
    assert run("merge", work.recipe, work.out, "-q", "--no-catalog").exit_code == 0
    assert run("merge", work.recipe, work.root / "o", "-q", "--no-catalog", "--budget", "50%").exit_code == 0
    assert not home.exists()


# --- explain ---


@pytest.mark.usefixtures("analyzed")
def test_explain__a_plan_and_its_snapshot_agree(work: Workplace, run: Runner) -> None:
    path = stored_plan(work, run)
    run("run", path, work.out, "-q")
    planned, made = run("explain", path, "--json").json(), run("explain", work.out, "--json").json()
    assert (planned["kind"], made["kind"]) == ("plan", "snapshot")
    same = ("plan_digest", "operator", "policy", "planned_bytes", "blocks", "touched", "layers", "fallbacks")
    assert {key: planned[key] for key in same} == {key: made[key] for key in same}
    assert planned["realized_bytes"] is None
    assert 0 < made["realized_bytes"] <= made["planned_bytes"]
    coverage = json.loads((work.out / "mergepipe.json").read_text())["coverage"]
    assert made["touched"] == coverage["touched"]
    assert [each["read"] for each in made["experts"]] == coverage["read"]
    assert [each["free"] for each in made["experts"]] == coverage["free"]


# --- defaults stated twice ---


def test_docs__name_every_choice_and_command(run: Runner) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "guide"
    text = (guide / "budget.md").read_text(encoding="utf-8")
    every_page = "".join(page.read_text(encoding="utf-8") for page in sorted(guide.glob("*.md")))
    for option, choices in (("--select", Policy), ("--where-omitted", OnOmit)):
        assert [choice.value for choice in choices if f"`{option} {choice.value}`" not in text] == []
    assert "`--select sample` | the default: draw positions" in text
    for command in ("analyze", "plan", "run", "merge", "explain", "ls", "sweep", "catalog"):
        assert f"mergepipe {command}" in every_page
        assert run(command, "--help").exit_code == 0
