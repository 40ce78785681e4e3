"""Messages that name what was found, what was needed and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MismatchError, NotFoundError, OutputError, RecipeError
from mergepipe.reports import KeptShare, SnapshotDiff, TensorChange
from support.command_line import Runner, Workplace
from support.model_folders import write_adapter, write_model
from support.training_trees import decoder_shapes, known_states, write_hf

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks/rules.md"


@pytest.fixture
def training_run(tmp_path: Path) -> Path:
    """A run with three checkpoints."""
    for step in (20, 100, 30):
        write_hf(tmp_path / "run" / f"checkpoint-{step}", known_states(decoder_shapes(), seed=step, step=step))
    return tmp_path / "run"


def compose_into(run: Path, step: int) -> Path:
    """Compose two checkpoints of a run into one of its folders."""
    recipe = run.parent / "compose.yml"
    recipe.write_text("default: run/checkpoint-100\ntake: [{from: run/checkpoint-30, units: [embed]}]\n")
    out = run / f"checkpoint-{step}"
    tailor.compose(recipe, out)
    return out


def test_space__where_no_files_are_stored_is_said_so(work: Workplace) -> None:
    with pytest.raises(OutputError, match="/proc is on a file system that stores no files; choose another folder"):
        mergepipe.merge(work.recipe, "/proc/merged")


def test_existing_output__force_is_advised_only_where_it_replaces(work: Workplace) -> None:
    mergepipe.merge(work.recipe, work.out)
    with pytest.raises(OutputError, match="already exists; choose another name, or replace it with force"):
        mergepipe.merge(work.recipe, work.out)
    (work.root / "notes").mkdir()
    (work.root / "notes" / "mine.txt").touch()
    for taken in (work.root / "notes", work.recipe):
        with pytest.raises(OutputError, match=r"already exists; choose another name$"):
            mergepipe.merge(work.recipe, taken)


def test_check__states_the_disk_space_that_the_merge_asks_for(work: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("mergepipe.jobs.merge_run.check_free_space", lambda _, nbytes: asked.append(nbytes))
    mergepipe.merge(work.recipe, work.out)
    assert asked == [mergepipe.check(work.recipe).disk_bytes]


@pytest.mark.parametrize(
    ("select", "kinds", "of_draws"),
    [("sample", ("sample",), " in single draws"), ("random", ("blocks by norm", "blocks at random"), "")],
)
def test_verdict__has_the_range_of_the_page_that_it_names_and_the_factor_of_the_plan(
    work: Workplace, select: str, kinds: tuple[str, ...], of_draws: str
) -> None:
    section = PAGE.read_text().partition("## Budgets, 4 raw experts")[2].partition("## ")[0]
    rows = [row for row in section.splitlines() if row.startswith(tuple(f"| 10 % | {kind}" for kind in kinds))]
    kept = [int(cell) for row in rows for cell in re.findall(r"\| (-?\d+)(?: ±|, \d draws?)", row)]
    explanation = mergepipe.explain(mergepipe.plan(work.recipe, "20%", select=select))
    assert explanation.verdict is not None
    sentence = explanation.verdict.sentence
    assert (
        f"Gain that such merges kept: {min(kept)} % to {max(kept)} %{of_draws}, at 10 % of the bytes of raw experts "
        "(https://" in sentence
    )
    assert sentence.endswith("/main/docs/benchmarks/rules.md).")
    if explanation.sampling is not None and explanation.sampling.least_probability < 0.5:
        assert f"scaled by up to {1 / explanation.sampling.least_probability:.3g}" in sentence


def test_export__of_a_run_names_its_checkpoints_and_the_newest(training_run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as raised:
        tailor.export(training_run, tmp_path / "model")
    assert str(raised.value) == (
        f"{training_run}: is a folder of checkpoints: checkpoint-100, checkpoint-30, checkpoint-20; name the "
        f"checkpoints themselves; the newest is {training_run}/checkpoint-100"
    )


def test_composite__among_checkpoints_of_the_run_is_none_of_them(training_run: Path, tmp_path: Path) -> None:
    composite = compose_into(training_run, 200)
    recipe = tailor.recipe(training_run, strategy="latest", folder=tmp_path)
    assert "checkpoint-100" in recipe
    assert "checkpoint-200" not in recipe
    checkpoints = sorted(training_run.glob("checkpoint-*"))
    assert composite in checkpoints
    report = tailor.average(checkpoints, tmp_path / "averaged")
    assert f"{composite} is skipped: it is a composite made by `mergepipe tailor`" in report.plan.notices
    with pytest.raises(MismatchError, match="leave it out, with its weight"):
        tailor.average(checkpoints, tmp_path / "weighted", weights=(1.0, 2.0, 3.0, 4.0))


@pytest.mark.usefixtures("training_run")
def test_compose__one_layer_named_twice_is_one_error(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yml"
    take = "take: [{from: run/checkpoint-30, units: [layer 1]}, {from: run/checkpoint-20, units: [layer 1]}]\n"
    recipe.write_text(f"default: run/checkpoint-100\n{take}")
    with pytest.raises(RecipeError) as raised:
        tailor.check(recipe)
    (problem,) = raised.value.problems
    assert re.fullmatch(r"'\S+', of 'layer 1', is already taken from another checkpoint, at .*", problem.message)


def test_show__prints_the_recipe_the_seed_the_dtype_and_the_version(work: Workplace, run: Runner) -> None:
    mergepipe.merge(work.recipe, work.out, seed=5)
    out = run("show", work.out).out
    for label, value in (("seed", "5"), ("dtype", "BF16"), ("version", mergepipe.__version__)):
        assert re.search(rf"^{label} +{re.escape(value)}$", out, re.MULTILINE)
    assert work.recipe.read_text().strip() in out
    assert run("show", work.root / "family").err.startswith(f"error: {work.root}/family: holds no mergepipe.json")


def test_diff__of_a_file_that_is_no_snapshot_says_so_and_names_no_others(work: Workplace, run: Runner) -> None:
    mergepipe.merge(work.recipe, work.out)
    assert "is a file without the record of a snapshot; give a snapshot, or its sid" in run("show", work.recipe).err
    assert run("show", "nowhere").err == (
        "error: nowhere: no such snapshot in the catalog; `mergepipe ls` lists those on record [snapshot.not-found]\n"
    )


def test_diff__writes_bytes_as_every_report_does(work: Workplace) -> None:
    mergepipe.merge(work.recipe, work.root / "full")
    mergepipe.merge(work.recipe, work.root / "planned", budget="25%")
    settings = mergepipe.diff(work.root / "full", work.root / "planned").settings
    assert any(re.fullmatch(r"budget: none -> \S+ k?B", line) for line in settings)
    assert [line for line in settings if "bytes" in line] == []


def test_diff__says_how_many_tensors_it_leaves_out() -> None:
    changes = tuple(TensorChange(f"t{index}", "values", float(index), None) for index in range(43))
    report = SnapshotDiff(
        a=Path("a"), b=Path("b"), a_sid="1", b_sid="2", recipe="", settings=(), inputs=(), equal_tensors=0,
        tensors=changes, norm=1.0,
    )  # fmt: skip
    assert report.left_out == "3 more tensors with smaller differences: `mergepipe diff --json` lists all"


def test_kept__a_density_of_one_trims_nothing_and_says_so(work: Workplace) -> None:
    work.write_recipe("ties")
    report = mergepipe.merge(work.recipe, work.out)
    assert [str(kept) for kept in report.kept] == [
        f"all of family/expert-{number}: its density is 1, so nothing is trimmed" for number in (1, 2)
    ]
    assert str(KeptShare("models/math", 1, 5)) == "20 % of models/math, by size of the difference"


def test_extract__of_another_architecture_says_that_nothing_has_a_counterpart(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", {"model.q_proj.weight": np.ones((8, 8), np.float32)})
    other = write_model(tmp_path / "other", {"encoder.query.weight": np.ones((8, 8), np.float32)})
    with pytest.raises(
        MismatchError, match=f"not one of its tensors has a counterpart of its name and shape in {base}"
    ):
        mergepipe.extract_lora(base, other, tmp_path / "out", rank=2)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "other"}


def test_merge_lora__of_two_bases_names_the_forms_and_the_bases(tmp_path: Path) -> None:
    for name, rows in (("one", 8), ("two", 6)):
        factors = {"lora_A.weight": np.ones((4, 8), np.float32), "lora_B.weight": np.ones((rows, 4), np.float32)}
        tensors = {f"model.layers.0.q_proj.{factor}": value for factor, value in factors.items()}
        write_adapter(tmp_path / name, tensors, base_model_name_or_path=f"org/{name}", target_modules=["q_proj"])
    with pytest.raises(MismatchError) as raised:
        mergepipe.merge_lora([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert str(raised.value) == (
        f"{tmp_path}/two: its factors of 'model.layers.0.q_proj' make a matrix of 6 x 8, those of {tmp_path}/one a "
        "matrix of 8 x 8; adapters of one base are merged, and these name org/two and org/one"
    )
