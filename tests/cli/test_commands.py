"""What single commands print and write, and how they refuse: on catalogs, budgets, packs, training checkpoints."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_start_up import LOADED

from mergepipe.planning.budget import OnOmit, Policy
from mergepipe.planning.plan import parse_plan
from support.bucket_outputs import files_below
from support.command_line import Runner, Workplace, file_bytes, finish, make_workplace, start_python
from support.model_folders import recipe_of
from support.public_names import REPORT_FORMAT
from support.training_trees import decay_groups, decoder_shapes, known_states, write_zero3


def test_errors_about_models__name_the_line_of_the_recipe_and_a_tidy_path(work: Workplace, run: Runner) -> None:
    (work.root / "broken" / "snapshots").mkdir(parents=True)
    text = work.recipe.read_text()
    work.recipe.write_text(text.replace("family/expert-2", "broken/..//broken"))
    ran = run("check", work.recipe)
    assert ran.err.startswith(f"error: recipe.yml:6 models[1]: {work.root / 'broken'}: no weights here")
    work.recipe.write_text(text.replace("family/expert-2", "broken/..//nothing"))
    assert "there is no folder 'broken/..//nothing'; ./ holds broken, family" in run("check", work.recipe).err
    work.recipe.write_text(text.replace("base_model: family/base", "base_model: broken"))
    assert f"yml:2 base_model: {work.root / 'broken'}: " in (told := run("check", work.recipe).err)
    assert f"give the folder of a revision: {work.root / 'broken' / 'snapshots'}/" in told


def test_paths__are_tidied_only_where_no_link_leads_elsewhere(work: Workplace, run: Runner) -> None:
    work.write_recipe()
    work.out.mkdir()
    (work.out / "mine").touch()
    (work.root / "sub").mkdir()
    assert run("merge", work.recipe, "sub//..//out").err.startswith("error: out: ")
    (work.root / "far").mkdir()
    (work.root / "far" / "deep").mkdir()
    (work.root / "link").symlink_to(work.root / "far" / "deep")
    assert run("merge", work.recipe, "link/../made", "--quiet").exit_code == 0
    assert (work.root / "far" / "made" / "config.json").exists()


def test_check__writes_nothing(work: Workplace, run: Runner) -> None:
    before = sorted(work.root.rglob("*"))
    run("check", work.recipe)
    assert sorted(work.root.rglob("*")) == before


def test_check__refuses_what_the_base_does_not_have_unless_it_is_allowed(work: Workplace, run: Runner) -> None:
    path = work.family.experts[0] / "model.safetensors"
    save_file({**load_file(path), "extra.weight": np.zeros(1, np.float32)}, path)
    ran = run("check", work.recipe)
    assert ran.exit_code == 5
    assert ran.error_lines[-1].endswith("to leave it out: --allow-dropped 'extra.weight' [model.unexpected-tensor]")
    allowed = run("check", work.recipe, "--allow-dropped", "none", "--allow-dropped", "extra.*")
    assert (allowed.exit_code, allowed.err) == (0, "")
    assert "1 dropped" in allowed.out


def test_pack__of_a_snapshot_on_its_base_brings_back_the_snapshot(work: Workplace, run: Runner) -> None:
    """Smaller, a model in recipes, and whole again byte for byte."""
    experts = ", ".join(f"{{model: {expert}}}" for expert in work.family.experts)
    base = f"base_model: {work.family.base}\nparameters: {{density: 0.5, weight: 0.5}}\n"
    (work.root / "ties.yml").write_text(f"merge_method: ties\nmodels: [{experts}]\n{base}")
    merged, packed, again = (work.root / name for name in ("merged", "small/merged", "again"))
    assert run("merge", work.root / "ties.yml", merged, "--budget", "25%").exit_code == 0
    assert run("pack", work.family.base, merged, "-o", packed.parent).exit_code == 0
    assert run("unpack", packed, "-o", again).exit_code == 0
    assert file_bytes(again) == file_bytes(merged)
    assert run("verify", again).exit_code == 0
    assert sum(map(len, file_bytes(packed).values())) < 0.9 * sum(map(len, file_bytes(merged).values()))
    (work.root / "next.yml").write_text(f"merge_method: linear\nmodels: [{{model: {packed}}}]\n{base}")
    assert run("merge", work.root / "next.yml", work.root / "next").exit_code == 0


def test_pack__on_a_base_that_is_packed_on_its_own_comes_back(work: Workplace, run: Runner) -> None:
    expert, stores = work.family.experts[0], work.root / "stores"
    assert run("pack", work.family.base, "-o", stores).exit_code == 0
    assert run("pack", stores / "base", expert, work.family.experts[1], "--chain", 4, "-o", stores).exit_code == 0
    for number in (0, 1):
        original, again = work.family.experts[number], work.root / f"again-{number}"
        assert run("unpack", stores / original.name, "-o", again).exit_code == 0
        assert (again / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


def test_pack_and_unpack__name_no_option_that_they_lack(work: Workplace, run: Runner) -> None:
    (work.root / "stores" / "expert-1").mkdir(parents=True)
    (work.root / "stores" / "expert-1" / "notes.txt").write_text("mine")
    packed = run("pack", work.family.base, work.family.experts[0], "-o", work.root / "stores")
    store = work.root / "more" / "expert-1"
    assert run("pack", work.family.base, work.family.experts[0], "-o", work.root / "more", "--quiet").exit_code == 0
    unpacked = run("unpack", store, "-o", work.root / "stores")
    for ran in (packed, unpacked):
        assert ran.exit_code == 7
        assert "already exists; choose another name" in ran.err
        assert "--force" not in ran.err


def test_pack__in_parts_gives_what_one_command_gives(run: Runner, tmp_path: Path) -> None:
    work = make_workplace(tmp_path)
    assert run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "whole").exit_code == 0
    for part in ("2/2", "1/2", "2/2"):
        ran = run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "parts", "--part", part, "--json")
        assert len(ran.json()["experts"]) == 1
    assert files_below(tmp_path / "parts") == files_below(tmp_path / "whole")
    refused = run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "parts", "--part", "3/3")
    assert (refused.exit_code, "use at most 2 parts" in refused.err) == (2, True)


def test_analyze__in_parts_gives_what_one_command_gives(run: Runner, tmp_path: Path) -> None:
    work, whole, home = make_workplace(tmp_path), tmp_path / "whole", tmp_path / "home"
    models = (work.family.base, *work.family.experts)
    assert run("analyze", *models, "--home", whole).exit_code == 0
    for number in (1, 2):
        ran = run("analyze", *models, "--part", f"{number}/2", "--home", home, "--json")
        assert len(ran.json()["experts"]) == 1
    assert files_below(home / "statistics") == files_below(whole / "statistics") != {}
    together = run("analyze", *models, "--home", home, "--json").json()
    assert [expert["analyzed_tensors"] for expert in together["experts"]] == [0, 0]
    for place in (whole, home):
        assert run("plan", work.recipe, "--budget", "50%", "--out", place / "plan", "--home", place).exit_code == 0
    assert (home / "plan").read_bytes() == (whole / "plan").read_bytes()


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
    assert "self check  full: 1155 elements of 45 states compared" in ran.out
    again = run("tailor", "compose", "recipe.yml", "out", "--force", "--json", "--state-from", "global_step7").json()
    assert (again["step"], again["units"][0]["sources"][0]["age"]) == (7, 0)


def test_compose__writes_for_any_number_of_ranks(run: Runner, place: Path) -> None:
    assert run("tailor", "compose", "recipe.yml", "out", "--export", "universal", "-q").out == ""
    assert len(list((place / "out" / "zero").glob("model.*/fp32.pt"))) > 1


def test_inspect__imports_nothing_heavy(place: Path) -> None:
    ran = finish(start_python(LOADED, "tailor", "inspect", place / "global_step7"))
    assert ran.exit_code == 0
    assert "torch" not in ran.err


NEEDING = [("ls",), ("show", "abcd"), ("lineage", "abcd"), ("explain", "abcd")]
"""Commands that cannot do without the records of snapshots."""


@pytest.fixture
def catalog(work: Workplace, run: Runner) -> Path:
    """The record of the one snapshot that a catalog knows."""
    assert run("analyze", work.family.base, *work.family.experts, "-q").exit_code == 0
    assert run("merge", work.recipe, work.out, "-q").exit_code == 0
    (record,) = (work.root / "home" / "snapshots").iterdir()
    return record


def sid_of(out: Path) -> str:
    sid: str = json.loads((out / "mergepipe.json").read_text())["sid"]
    return sid


# --- snapshots ---


def test_ls__an_empty_home_stays_empty(work: Workplace, run: Runner) -> None:
    assert run("ls").out == "no snapshots\n"
    assert run("ls", "--json").json() == {"format": REPORT_FORMAT, "snapshots": []}
    assert not (work.root / "home").exists()


def test_show__a_snapshot_the_catalog_does_not_know(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out, "-q", "--no-catalog")
    shown = run("show", work.out, "--json").json()
    assert (shown["sid"], shown["is_recorded"]) == (sid_of(work.out), False)
    assert "catalog rebuild" in run("show", work.out).out


def test_ls__filters_by_model_operator_and_day(work: Workplace, run: Runner) -> None:
    recipe = work.root / "one.yml"
    recipe.write_text(json.dumps(recipe_of("task_arithmetic", {"family/expert-1": {"weight": 1}}, "family/base")))
    run("merge", work.recipe, work.out, "-q")
    run("merge", recipe, work.root / "one", "-q")

    def listed(*filters: str) -> list[str]:
        return [Path(row["path"]).name for row in run("ls", *filters, "--json").json()["snapshots"]]

    assert listed() == listed("--with", "family/expert-1") == listed("--since", "2020-01-01") == ["one", "out"]
    assert listed("--with", "expert-2") == ["out"]
    assert listed("--operator", "task_arithmetic", "--with", "family/base") == ["one"]
    assert listed("--with", "family/none") == listed("--since", "2999-01-01") == listed("--operator", "slerp") == []
    assert listed("--since", "2100-01-01") == []
    assert run("ls", "--since", "yesterday").exit_code == 2
    shutil.rmtree(work.out)
    assert [row["is_present"] for row in run("ls", "--json").json()["snapshots"]] == [True, False]
    assert f"{work.out} (gone)" in run("ls").out


@pytest.mark.usefixtures("catalog")
def test_lineage__down_shows_what_was_made_from_a_snapshot(work: Workplace, run: Runner) -> None:
    recipe = work.root / "second.yml"
    recipe.write_text(json.dumps(recipe_of("linear", {"out": {"weight": 1}}, "family/base")))
    second = work.root / "second"
    run("merge", recipe, second, "-q")
    nodes = run("lineage", work.out, "--down", "--json").json()["nodes"]
    assert [(node["depth"], node["role"], node["path"]) for node in nodes] == [
        (0, "snapshot", str(work.out)), (1, "expert", str(second)),
    ]  # fmt: skip
    assert nodes[1]["sid"] == sid_of(second)
    lines = run("lineage", work.out, "--down").out.splitlines()
    assert lines[1].startswith(f"└─ expert of {second} = linear {sid_of(second)[:12]}, ")
    graph = run("lineage", work.out, "--down", "--dot").out
    assert f'"{sid_of(work.out)}" -> "{sid_of(second)}"' in graph


def test_lineage__of_a_snapshot_that_is_not_recorded_says_what_to_do(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out, "-q", "--no-catalog")
    ran = run("lineage", work.out)
    assert (ran.exit_code, ran.codes) == (3, ["snapshot.not-found"])
    assert f"mergepipe catalog rebuild {work.out}" in ran.err
    assert run("catalog", "rebuild", work.out).exit_code == 0
    assert run("lineage", work.out).exit_code == 0


# --- a catalog in trouble ---


def test_commands__that_need_the_catalog_say_what_is_wrong_with_it_and_leave_it_alone(
    run: Runner, catalog: Path, work: Workplace, caplog: pytest.LogCaptureFixture
) -> None:
    run("merge", work.recipe, work.root / "other", "-q")
    catalog.write_bytes(b"no record")
    for command in [*NEEDING, ("gc",)]:
        caplog.clear()
        ran = run(*command)
        is_of_all = command[0] in ("ls", "gc")
        assert (ran.exit_code, ran.codes) == ((0, []) if is_of_all else (3, ["snapshot.not-found"]))
        assert "[catalog.damaged]" in caplog.text
        assert "mergepipe catalog rebuild" in caplog.text
    assert run("show", work.root / "other").exit_code == 0
    assert catalog.read_bytes() == b"no record"


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
    assert json.loads(path.read_text()) == ran.json()
    assert parse_plan(ran.out.encode()).digest == ran.json()["digest"]


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
