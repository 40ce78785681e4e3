"""Searches: what is searched in a recipe, trials that fail, rungs, several objectives, and studies that go on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import CorruptError, LimitError, OutputError, RecipeError
from mergepipe.options import SearchOptions
from support.families import TINY, write_family
from support.late_modules import transformers
from support.model_folders import recipe_of

pytest.importorskip("optuna")

LINEAR = {"search": [0.0, 1.0]}


@pytest.fixture
def family(tmp_path: Path) -> Path:
    write_family(tmp_path, TINY, 2)
    return tmp_path


def write_recipe(folder: Path, first: object = LINEAR, second: object = 0.5, **more: object) -> Path:
    models = {"expert-1": {"weight": first}, "expert-2": {"weight": second}}
    path = folder / "recipe.yml"
    path.write_text(json.dumps({**recipe_of("task_arithmetic", models, "base", dtype="float32"), **more}))
    return path


class Distance:
    """The evaluation: how far a merge is from one with known weights."""

    def __init__(self, folder: Path, first: float) -> None:
        mergepipe.merge(write_recipe(folder, first), folder / "target", catalog=False)
        self.target = load_file(folder / "target" / "model.safetensors")
        self.calls = 0

    def __call__(self, folder: Path) -> float:
        self.calls += 1
        made = load_file(folder / "model.safetensors")
        return float(sum(np.square(made[name] - values).sum() for name, values in self.target.items()) ** 0.5)


def command(folder: Path, code: str) -> str:
    path = folder / "evaluate.py"
    path.write_text(f"import json, pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n{code}\n")
    return f"{sys.executable} {path}"


def test_search__that_is_interrupted_says_how_it_goes_on(family: Path) -> None:
    def interrupted(_: Path) -> float:
        raise KeyboardInterrupt

    recipe = write_recipe(family)
    with pytest.raises(KeyboardInterrupt) as caught:
        mergepipe.search(recipe, family / "best", interrupted)
    assert [note for note in caught.value.__notes__ if "best.study, and --resume continues" in note]
    report = mergepipe.search(recipe, family / "best", lambda _: 1.0, trials=2, resume=True)
    assert [trial.state for trial in report.trials] == ["fail", "complete"]


def test_search__finds_the_weight_and_publishes_its_merge(family: Path) -> None:
    distance = Distance(family, 0.7)
    recipe = write_recipe(family)
    report = mergepipe.search(recipe, family / "best", distance, trials=25)
    best = report.best_trial.values["models[0].parameters.weight"]
    assert isinstance(best, float)
    assert abs(best - 0.7) < 0.1
    assert (distance.calls, len(report.trials)) == (25, 25)
    assert report.best_trial.losses[0] == min(trial.losses[0] for trial in report.trials)
    mergepipe.merge(write_recipe(family, best), family / "again", catalog=False)
    made = (family / "best" / "model.safetensors").read_bytes()
    assert made == (family / "again" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in family.iterdir() if "mergepipe" in path.name) == []


def test_search__goes_on_with_its_study(family: Path) -> None:
    distance, recipe = Distance(family, 0.2), write_recipe(family)
    study = family / "best.study"
    mergepipe.search(recipe, family / "best", distance, trials=3)
    shutil.rmtree(family / "best")
    with pytest.raises(OutputError, match="a study of an earlier search exists; give resume=True"):
        mergepipe.search(recipe, family / "best", distance, trials=5)
    study.write_text(study.read_text() + '{"op_cod')  # as far as a disk had room
    report = mergepipe.search(recipe, family / "best", distance, trials=5, resume=True)
    assert (distance.calls, len(report.trials)) == (5, 5)
    assert len({str(trial.values) for trial in report.trials}) == 5
    shutil.rmtree(family / "best")
    objectives = SearchOptions(evaluate=command(family, "print('{}')"), objectives=("a:max",), resume=True)
    with pytest.raises(OutputError, match="another choice of objectives"):
        mergepipe.search(recipe, family / "best", options=objectives)
    other = write_recipe(family, {"search": [0.0, 2.0]})
    with pytest.raises(OutputError, match="study of another recipe"):
        mergepipe.search(other, family / "best", distance, trials=6, resume=True)
    study.write_text("{}\n\n{}\n")
    with pytest.raises(CorruptError, match="not a journal of optuna"):
        mergepipe.search(recipe, family / "best", distance, resume=True)


def test_search__of_several_machines_is_published_by_one(family: Path) -> None:
    recipe, others = write_recipe(family), []

    def evaluated(folder: Path) -> float:
        if (family / "best.study").read_text().count('"values":'):  # the other machine comes to an end meanwhile
            others.append(mergepipe.search(recipe, family / "best", lambda _: 1.0, trials=1, resume=True))
        return len(folder.name)

    assert mergepipe.search(recipe, family / "best", evaluated, trials=2).sid == others[0].sid


def test_search__chooses_among_values_and_on_a_logarithm(family: Path) -> None:
    recipe = write_recipe(
        family, {"search": [1e-3, 1.0], "log": True}, merge_method={"search": ["task_arithmetic", "ties", "linear"]}
    )
    report = mergepipe.search(recipe, family / "best", lambda folder: len(folder.name), trials=8, sampler="random")
    tried = [trial.values for trial in report.trials]
    assert {values["merge_method"] for values in tried} <= {"task_arithmetic", "ties", "linear"}
    assert len({values["merge_method"] for values in tried}) > 1
    weights = [values["models[0].parameters.weight"] for values in tried]
    assert all(isinstance(weight, float) and 1e-3 <= weight <= 1.0 for weight in weights)


@pytest.mark.thorough
def test_search__marks_a_trial_that_fails_and_goes_on(family: Path) -> None:
    code = """
weight = json.loads((folder / "mergepipe.json").read_text())
count = pathlib.Path(__file__).with_name("count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
if number == 0: sys.exit(3)
if number == 1: print("no loss")
elif number == 2: time.sleep(600)
elif number == 3: print("loss nan")
else: print("loss", number)
"""
    evaluate = command(family, code)
    report = mergepipe.search(write_recipe(family), family / "best", evaluate=evaluate, trials=6, trial_timeout=8.0)
    failures = [trial.failure for trial in report.trials]
    for failure, words in zip(failures, ("exit code 3", "printed no number", "more than 8 s", "is nan"), strict=False):
        assert words in failure
    assert (failures[4:], report.best) == (["", ""], 4)
    losses = iter((np.nan, np.inf, 1.0, 1.0, *[np.nan] * 5))
    report = mergepipe.search(write_recipe(family), family / "called", lambda _: next(losses), trials=3)
    assert ["a finite loss is needed" in trial.failure for trial in report.trials] == [True, True, False]
    with pytest.raises(LimitError, match=r"was completed, and nothing was published; the last: .*exit code 1"):
        mergepipe.search(write_recipe(family), family / "none-1", evaluate=command(family, "sys.exit(1)"), trials=1)
    with pytest.raises(LimitError, match=r"5 trials in a row failed; the last: .*a finite loss is needed"):
        mergepipe.search(write_recipe(family), family / "none-9", lambda _: next(losses), trials=9)
    assert not list(family.glob("none-*[0-9]"))


@pytest.mark.thorough
def test_search__several_objectives_have_a_front(family: Path) -> None:
    code = """
size = int.from_bytes((folder / "model.safetensors").read_bytes()[-4:], "little") % 97
print(json.dumps({"loss": size, "score": size % 10}))
"""
    recipe, both = write_recipe(family), ("loss", "score:max")
    report = mergepipe.search(recipe, family / "best", evaluate=command(family, code), trials=6, objectives=both)
    assert report.objectives == both
    front = {trial.number: trial.losses for trial in report.trials if trial.is_best}
    assert report.best in front
    for trial in report.trials:
        loss, score = trial.losses
        is_beaten = any(a <= loss and b >= score and (a, b) != (loss, score) for a, b in front.values())
        assert (trial.number in front) != is_beaten
    evaluate = command(family, "print(100_000 * '[')")
    with pytest.raises(LimitError, match="not a JSON object, which objectives needs"):
        mergepipe.search(recipe, family / "none", evaluate=evaluate, trials=5, objectives=both)


@pytest.mark.parametrize(
    ("code", "objectives", "failure"),
    [
        ("print(json.dumps({'loss': 10**400}))", ("loss",), "has no finite number 'loss'"),
        ("(folder / 'x').touch(); print(1)", (), "changed the merge that it was to evaluate"),
    ],
)
def test_search__counts_an_evaluation_without_a_sound_result_as_a_failed_trial(
    family: Path, code: str, objectives: tuple[str, ...], failure: str
) -> None:
    evaluate = command(family, code)
    with pytest.raises(LimitError, match=failure):
        mergepipe.search(write_recipe(family), family / "none", evaluate=evaluate, trials=1, objectives=objectives)


@pytest.mark.thorough
def test_search__gives_up_the_worse_half_after_a_rung(family: Path) -> None:
    distance, recipe = Distance(family, 0.6), write_recipe(family)
    report = mergepipe.search(recipe, family / "best", distance, trials=12, rungs=("60%", "100%"))
    states = [trial.state for trial in report.trials]
    assert states.count("pruned") >= 2
    assert all(len(trial.rungs) == (2 if trial.state == "complete" else 1) for trial in report.trials)
    full = next(trial for trial in report.trials if trial.state == "complete")
    early = next(trial for trial in report.trials if trial.state == "pruned")
    assert 0 < early.expert_bytes < full.expert_bytes
    assert report.best_trial.state == "complete"


@pytest.mark.thorough
@pytest.mark.transformers
def test_search__with_loaded_models_writes_no_trial_and_finds_what_folders_find(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.norm.weight"
    mergepipe.merge(write_recipe(family, 0.3), family / "target", catalog=False)
    target = load_file(family / "target" / "model.safetensors")[name]
    recipe = write_recipe(family)

    def of_model(model: Any) -> float:
        assert isinstance(model, transformers.PreTrainedModel)
        assert list(scratch.glob("mergepipe-search-*/*")) == []
        return float(np.square(model.get_parameter(name).detach().numpy() - target).sum())

    def of_folder(folder: Path) -> float:
        return float(np.square(load_file(folder / "model.safetensors")[name] - target).sum())

    (scratch := family / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    loaded = mergepipe.search(recipe, family / "loaded", of_model, loads_models=True, trials=4, rungs=("50%", "100%"))
    written = mergepipe.search(recipe, family / "written", of_folder, trials=4, rungs=("50%", "100%"))
    told = [
        [(trial.values, trial.rungs, trial.expert_bytes) for trial in report.trials] for report in (loaded, written)
    ]
    assert told[0] == told[1]
    assert loaded.sid == written.sid
    with pytest.raises(RecipeError, match="a loaded model is evaluated by a function"):
        mergepipe.search(recipe, family / "none", evaluate=command(family, "print(1)"), loads_models=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0].replace('"op_code":0', '"op_code":99'), *lines[1:]],
        lambda lines: [lines[0], '{"op_code":2,"worker_id":"x","study_id":0,"user_attr":[]}', *lines[2:]],
        lambda lines: [line for line in lines if '"op_code":5' not in line],
        lambda lines: [line.replace('"values":[1.0]', '"values":[]') for line in lines],
        lambda lines: [line.replace('"values":[1.0]', '"values":["x"]') for line in lines],
        lambda lines: [line.replace('"rungs":[1.0]', '"rungs":7') for line in lines],
        lambda lines: [line.replace('"failure":""', '"failure":[]') for line in lines],
        lambda lines: ["7", *lines],
        lambda lines: ["{}", *lines],
    ],
)
def test_search__refuses_a_damaged_study(family: Path, damage: Callable[[list[str]], list[str]]) -> None:
    recipe = write_recipe(family)
    mergepipe.search(recipe, family / "best", lambda _: 1.0, trials=2)
    shutil.rmtree(family / "best")
    study = family / "best.study"
    lines = study.read_text().splitlines()
    damaged = damage(lines)
    assert damaged != lines
    study.write_text("\n".join(damaged) + "\n")
    with pytest.raises(CorruptError, match="is not a journal of optuna") as caught:
        mergepipe.search(recipe, family / "best", lambda _: 1.0, trials=3, resume=True)
    assert caught.value.code == "work-log.damaged"
