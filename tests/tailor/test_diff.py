"""What diff says, against numpy; and the recipes of the usual strategies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from sys import modules

import numpy as np
import pytest
import yaml
from composing import FORMATS, FULL, Pair, make_pair, wrong_values

from mergepipe import Progress, progress_bar, tailor
from mergepipe.cli.printing import report_json
from mergepipe.errors import MergePipeError, MismatchError, RecipeError
from mergepipe.tailor import api
from mergepipe.tailor.inspection import InspectReport
from mergepipe.tailor.saving.save_log import SaveRecord
from mergepipe.tailor.selection import unit_named
from support.refusals import refuses
from support.training_trees import (
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_hf,
    write_zero3,
    write_zero12,
)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FORMATS)
def test_diff__is_the_relative_change_of_every_unit(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    report = api.diff(tmp_path / "old", tmp_path / "new")
    unit = next(u for u in report.units if u.unit == "layer 1")
    for found, state in ((unit.weights, "fp32"), (unit.exp_avg, "exp_avg"), (unit.exp_avg_sq, "exp_avg_sq")):
        names = [n for n in pair.old.shapes if ".layers.1." in n]
        a = np.concatenate([pair.old.arrays[n, state].ravel() for n in names]).astype(np.float64)
        b = np.concatenate([pair.new.arrays[n, state].ravel() for n in names]).astype(np.float64)
        assert found == pytest.approx(float(np.linalg.norm(b - a) / np.linalg.norm(a)), rel=1e-12)


def test_diff__is_the_same_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(tmp_path, FORMATS["zero2"])
    whole = api.diff(tmp_path / "old", tmp_path / "new").to_json()["units"]
    monkeypatch.setattr(modules["mergepipe.tailor.inspection"], "BLOCK_ELEMENTS", 7)
    reported: list[Progress] = []
    pieces = api.diff(tmp_path / "old", tmp_path / "new", on_progress=reported.append).to_json()["units"]
    assert str(pieces)[:20] == str(whole)[:20]
    for a, b in zip(flat(whole), flat(pieces), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    elements = sum(math.prod(shape) for shape in decoder_shapes().values())
    compared_bytes = elements * 4 * 2 * 3
    assert reported[-1] == Progress("compare", compared_bytes, compared_bytes)
    assert len({progress.done_bytes for progress in reported}) == len(reported) > 3


def flat(units: object) -> list[float]:
    assert isinstance(units, list)
    return [unit[kind] for unit in units for kind in ("weights", "exp_avg", "exp_avg_sq")]


def test_diff__compares_across_stages_and_world_sizes(tmp_path: Path) -> None:
    known = known_states(decoder_shapes())
    write_zero12(tmp_path / "a", known, decay_groups(known.shapes), 2)
    write_zero3(tmp_path / "b", known, decay_groups(known.shapes), 3)
    assert set(flat(api.diff(tmp_path / "a", tmp_path / "b").to_json()["units"])) == {0.0}


def test_diff__says_when_there_was_nothing_before(tmp_path: Path) -> None:
    known = known_states(decoder_shapes())
    zeros = {key: np.zeros_like(a) if key[1] == "exp_avg" else a for key, a in known.arrays.items()}
    write_zero3(tmp_path / "a", replace(known, arrays=zeros), decay_groups(known.shapes), 1)
    write_zero3(tmp_path / "b", known, decay_groups(known.shapes), 1)
    report = api.diff(tmp_path / "a", tmp_path / "b")
    assert [u.exp_avg for u in report.units] == [math.inf] * 6
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["units"][0]["exp_avg"] is None


def test_diff__refuses_another_model(tmp_path: Path) -> None:
    for name, width in (("a", 5), ("b", 6)):
        known = known_states(decoder_shapes(width=width))
        write_zero3(tmp_path / name, known, decay_groups(known.shapes), 1)
    with pytest.raises(MismatchError):
        api.diff(tmp_path / "a", tmp_path / "b")


# --- strategies


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three full checkpoints and other things beside them."""
    for step in (3, 7, 9):
        known = known_states(decoder_shapes(6), seed=step, step=step)
        FORMATS["zero3"](tmp_path / "run" / f"global_step{step}", known)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step9")
    return tmp_path / "run"


def test_recipe__composes_the_newest_checkpoints_at_a_step(run: Path) -> None:
    taken = {"from": "global_step3", "units": ["layers 0,2,4", "embed"]}
    wanted = {"default": "global_step7", "take": [taken]}
    assert yaml.safe_load(api.recipe(run, strategy="parity", at=8, folder=run)) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["parity", "filter", "paper-parity", "paper-filter", "latest"])
def test_recipe__is_a_recipe_that_composes(run: Path, tmp_path: Path, strategy: str) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(api.recipe(run, strategy=strategy, folder=tmp_path))
    report = tailor.compose(recipe, tmp_path / "out", options=FULL)
    assert report.plan.assignment.skeleton.step == 9
    old, new = (known_states(decoder_shapes(6), seed=step, step=step) for step in (7, 9))
    older = {
        "parity": (".layers.0.", ".layers.2.", ".layers.4.", "embed"),
        "filter": (".layers.3.", "embed", "lm_head"),
        "paper-parity": (".layers.1.", ".layers.3.", ".layers.5.", "embed", "model.norm."),
        "paper-filter": (".layers.3.", "embed", "lm_head"),
        "latest": (),
    }[strategy]
    taken = [name for name in old.shapes if any(part in name for part in older)]
    assert wrong_values(tmp_path / "out", Pair(tmp_path, old, new), taken) == []


def test_compose__is_there_in_the_api(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("default: run/global_step9\n")
    phases: list[str] = []
    report = api.compose(recipe, tmp_path / "out", self_check="full", on_progress=lambda p: phases.append(p.phase))
    assert (report.out, set(phases)) == (tmp_path / "out", {"compose", "check"})
    assert api.check(recipe, state_from=run / "global_step7").plan.assignment.skeleton.step == 7
    assert [c.step for c in api.inspect(run, tmp_path / "out").checkpoints] == [9, 9]
    with pytest.raises(MergePipeError):
        api.compose(recipe, tmp_path / "out")


def test_recipe__is_written_by_a_strategy_or_from_a_log(run: Path, tmp_path: Path) -> None:
    """As the command line does; what the user should know stands on top."""
    assert tailor.recipe(run, strategy="latest", folder=tmp_path) == api.recipe(run, strategy="latest", folder=tmp_path)
    log, units = tmp_path / "log.jsonl", tuple(api.inspect(run / "global_step7").checkpoints[0].units)
    saved = tuple(unit_named(unit.unit) for unit in units)
    log.write_text(SaveRecord(7, saved, "global_step7", True, saved).to_line() + '{"step"')
    text = tailor.recipe(run, from_log=log, at=9, folder=tmp_path)
    assert (text.splitlines()[0], yaml.safe_load(text)["default"]) == (
        "# line 2 of the log was cut short by a crash", "run/global_step7",
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": "latest", "from_log": "log"}, {"from_log": "log"}, {"strategy": "newest"},
     {"strategy": "parity", "at": 3}],
)  # fmt: skip
def test_recipe__refuses_options_that_do_not_fit(run: Path, options: dict[str, object]) -> None:
    with refuses(RecipeError, "option.invalid"):
        tailor.recipe(run, **options)  # type: ignore[arg-type]


# --- what inspect reports


SHAPES = decoder_shapes()
KNOWN = known_states(SHAPES)


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    write_zero12(tmp_path / "zero2", KNOWN, decay_groups(SHAPES), 2)
    write_zero12(tmp_path / "later", replace(KNOWN, step=9), decay_groups(SHAPES), 2)
    write_zero3(tmp_path / "zero3", KNOWN, decay_groups(SHAPES), 2)
    write_hf(tmp_path / "hf", KNOWN)
    write_dcp(tmp_path / "dcp", KNOWN, 2)
    return tmp_path


def inspected(formats: Path, *names: str) -> InspectReport:
    return tailor.inspect(*(formats / name for name in names))


def test_inspect_checkpoints__counts_bytes_per_unit_and_kind(formats: Path) -> None:
    (report,) = inspected(formats, "zero2").checkpoints
    layer = next(u for u in report.units if u.unit == "layer 1")
    n_elements = sum(KNOWN.arrays[n, "fp32"].size for n in SHAPES if ".layers.1." in n)
    assert (layer.parameters, layer.elements) == (4, n_elements)
    assert dict(layer.bytes) == dict.fromkeys(("fp32", "exp_avg", "exp_avg_sq", "weight"), 4 * n_elements)
    assert report.bytes == 16 * sum(KNOWN.arrays[n, "fp32"].size for n in SHAPES)


def test_inspect_checkpoints__says_where_a_step_counter_is_shared(formats: Path) -> None:
    report = inspected(formats, "zero2", "hf", "dcp")
    shared = [{u.shared_step for u in c.units} for c in report.checkpoints]
    steps = {step for c in report.checkpoints for u in c.units for step in u.adam_steps}
    assert (shared, steps) == ([{True}, {False}, {False}], {7.0})


def test_inspect_checkpoints__says_why_two_do_not_fit(formats: Path) -> None:
    for other, reason in (("zero3", "only one has weight"), ("dcp", "framework deepspeed and torch"), ("later", "")):
        report = inspected(formats, "zero2", other)
        assert (report.comparable, reason in "; ".join(report.reasons)) == (not reason, True)
    for lost in (*formats.rglob("zero2/*rank_1_*optim*"), *formats.rglob("later/*rank_1_*optim*")):
        lost.unlink()
    assert inspected(formats, "zero2", "later").reasons == (
        "none of them is complete: a composition needs one that is",
    )


def test_to_json__is_json_and_complete(formats: Path) -> None:
    report = inspected(formats, "zero2", "dcp")
    document = json.loads(report_json(report))
    assert [c["format"] for c in document["checkpoints"]] == ["deepspeed-zero", "torch-dcp"]
    assert [u["unit"] for u in document["checkpoints"][0]["units"]] == [
        "embed", "layer 0", "layer 1", "layer 2", "norm", "lm_head",
    ]  # fmt: skip
    assert document["comparable"] is False


def test_progress_bar__shows_the_calls_of_tailor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(tmp_path, FORMATS["zero2"])
    with progress_bar() as on_progress:
        api.diff(tmp_path / "old", tmp_path / "new", on_progress=on_progress)
        api.export(tmp_path / "new", tmp_path / "model", on_progress=on_progress)
    shown = capsys.readouterr().err
    assert "compare: " in shown
    assert "compose: " in shown
