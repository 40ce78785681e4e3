"""Snapshots are made again without a model, with what was made from them, parents first."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe import MergeOptions, MergePipeError
from support.command_line import Runner

Array = npt.NDArray[np.float32]
NAMES = ("a.weight", "b.weight")


@dataclass(frozen=True, slots=True)
class Models:
    """A base and three experts of it in a folder, by name."""

    root: Path
    tensors: Mapping[str, Mapping[str, Array]]

    def merge(self, out: str, recipe: str, options: MergeOptions | None = None) -> Path:
        path = self.root / f"{out}.yml"
        path.write_text(recipe, encoding="utf-8")
        mergepipe.merge(path, self.root / out, options=options)
        return self.root / out

    def mean(self, **weights: float) -> dict[str, Array]:
        """Weighted means in float64, as `linear` makes them."""
        total = sum(weights.values())
        means = {}
        for name in NAMES:
            terms = [weight * self.tensors[model][name].astype(np.float64) for model, weight in weights.items()]
            means[name] = (np.sum(terms, axis=0) / total).astype(np.float32)
        return means


def linear(**weights: float) -> str:
    entries = "".join(f"- {{model: {model}, parameters: {{weight: {weight}}}}}\n" for model, weight in weights.items())
    return f"merge_method: linear\nmodels:\n{entries}dtype: float32\n"


@pytest.fixture(name="models")
def write_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    random = np.random.default_rng(1)
    base = {name: random.standard_normal((48, 64)).astype(np.float32) for name in NAMES}
    tensors = {"base": base}
    for model in ("math", "code", "chat"):
        changes = {name: 0.1 * random.standard_normal((48, 64)).astype(np.float32) for name in NAMES}
        tensors[model] = {name: base[name] + changes[name] for name in NAMES}
    for model, content in tensors.items():
        (tmp_path / model).mkdir()
        save_file(content, tmp_path / model / "model.safetensors")
        (tmp_path / model / "config.json").write_text("{}")
    return Models(tmp_path, tensors)


def values(folder: Path) -> dict[str, Array]:
    return load_file(folder / "model.safetensors")


def assert_close(made: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(made[name], value, rtol=1e-5, atol=1e-6)


def test_without__makes_a_snapshot_and_what_was_made_from_it_again_parents_first(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    models.merge("second", linear(first=1, chat=3))
    models.merge("unrelated", linear(base=1, chat=1))
    before = {name: values(root / name) for name in ("first", "second")}
    report = mergepipe.without(root / "math", root / "first", root / "again")
    assert [(item.path.name, item.out) for item in report.remade] == [
        ("first", root / "again" / "first"), ("second", root / "again" / "second"),
    ]  # fmt: skip
    assert report.not_remade == ()
    first = models.mean(base=1, code=2)
    assert_close(values(root / "again" / "first"), first)
    again = Models(root, {**models.tensors, "first": first})
    assert_close(values(root / "again" / "second"), again.mean(first=1, chat=3))
    for name, tensors in before.items():
        assert_close(values(root / name), tensors)
    nodes = mergepipe.lineage(root / "again" / "second")
    assert not any("math" in node.model for node in nodes)
    assert str(root / "again" / "first") in [node.model for node in nodes]
    assert mergepipe.replay(root / "again" / "second", root / "replayed").sid == report.remade[1].new_sid


def test_without__lists_a_snapshot_whose_input_was_replaced_since(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    shutil.rmtree(root / "code")
    shutil.copytree(root / "chat", root / "code")
    report = mergepipe.without("math", root / "first", root / "again")
    assert report.remade == ()
    assert "was written to since the snapshot was made" in report.not_remade[0].reason
    assert not (root / "again").exists()


def test_without__takes_an_input_that_was_copied_over_itself(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    shutil.move(root / "code", root / "kept")
    shutil.copytree(root / "kept", root / "code", copy_function=shutil.copyfile)
    report = mergepipe.without("math", root / "first", root / "again")
    assert [item.path.name for item in report.remade] == ["first"]


def test_without__calls_its_output_after_the_copy_that_was_named(models: Models) -> None:
    root = models.root
    for name in ("first", "copy"):  # one sid, two folders
        models.merge(name, linear(base=1, math=1, code=2))
    for name in ("first", "copy"):
        report = mergepipe.without("math", root / name, root / "again", dry_run=True)
        assert [item.out.name for item in report.remade] == [name]


def test_without__of_a_descendant_makes_its_parents_that_hold_the_model_too(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    models.merge("second", linear(first=1, chat=3))
    report = mergepipe.without("math", [root / "second"], root / "again")
    assert [item.path.name for item in report.remade] == ["first", "second"]


def test_without__makes_all_parents_of_a_descendant_again_and_goes_on_where_it_stopped(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    models.merge("side", linear(base=1, math=3, chat=2))
    models.merge("last", linear(first=1, side=1))
    report = mergepipe.without("math", root / "first", root / "again")
    assert [item.path.name for item in report.remade] == ["first", "side", "last"]
    assert not any("math" in node.model for node in mergepipe.lineage(root / "again" / "last"))
    first, side = models.mean(base=1, code=2), models.mean(base=1, chat=2)
    assert_close(values(root / "again" / "last"), {name: 0.5 * first[name] + 0.5 * side[name] for name in NAMES})
    made = {path: path.stat().st_ino for path in (root / "again").rglob("*")}
    shutil.rmtree(root / "again" / "last")
    again = mergepipe.without("math", root / "first", root / "again")
    assert [item.new_sid for item in again.remade] == [item.new_sid for item in report.remade]
    kept = [path for path in made if "last" not in path.parts]
    assert all(path.stat().st_ino == made[path] for path in kept)


def test_without__states_bytes_and_writes_nothing_in_a_dry_run(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    report = mergepipe.without(root / "math", root / "first", root / "again", dry_run=True)
    (item,) = report.remade
    nbytes = sum(value.nbytes for value in models.tensors["base"].values())
    assert (item.base_bytes, item.expert_bytes, item.new_sid) == (nbytes, nbytes, None)
    assert item.output_bytes >= nbytes
    assert not (root / "again").exists()


def test_without__keeps_seed_and_budget(models: Models) -> None:
    root = models.root
    experts = "".join(f"- {{model: {m}, parameters: {{weight: 1, density: 0.5}}}}\n" for m in ("math", "code", "chat"))
    recipe = f"merge_method: dare_linear\nbase_model: base\nmodels:\n{experts}dtype: float32\n"
    models.merge("first", recipe, MergeOptions(budget="95%", seed=7))
    (item,) = mergepipe.without("math", root / "first", root / "again").remade
    without = recipe.replace("- {model: math, parameters: {weight: 1, density: 0.5}}\n", "")
    made = mergepipe.show(root / "again" / "first")
    assert made.seed == 7
    assert 0 < made.expert_bytes <= item.expert_bytes
    assert made.plan_digest is not None
    assert "math" not in made.recipe
    assert mergepipe.show(models.merge("full", without, MergeOptions(seed=7))).plan_digest is None


TWO = "merge_method: {}\nbase_model: {}\nmodels:\n- {{model: math, parameters: {{weight: 1}}}}\n"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (TWO.format("task_arithmetic", "base"), "nothing but the base would be left"),
        (
            "merge_method: task_arithmetic\nbase_model: math\nmodels: [{model: code, parameters: {weight: 1}}]\n",
            "is its base",
        ),
        (
            "merge_method: slerp\nbase_model: code\nmodels: [{model: code}, {model: math}]\nparameters: {t: 0.3}\n",
            "nothing but the base",
        ),
    ],
)
def test_without__lists_what_cannot_be_made_again_and_what_was_made_from_it(
    models: Models, recipe: str, reason: str
) -> None:
    root = models.root
    models.merge("first", recipe)
    models.merge("second", linear(first=1, chat=3))
    models.merge("other", linear(base=1, math=1, code=2))
    report = mergepipe.without("math", [root / "first", root / "other"], root / "again")
    assert [item.path.name for item in report.remade] == ["other"]
    assert [item.path.name for item in report.not_remade] == ["first", "second"]
    assert reason in report.not_remade[0].reason
    assert "cannot be made again itself" in report.not_remade[1].reason
    assert sorted(path.name for path in (root / "again").iterdir()) == ["other"]


def test_lineage__finds_what_was_made_from_a_model_by_a_copy_of_it(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    models.merge("second", linear(first=1, chat=3))
    for model in ("math", "chat"):
        shutil.copytree(root / model, root / "elsewhere" / f"copied-{model}")
        shutil.rmtree(root / model)
    copy = root / "elsewhere" / "copied-math"
    assert [Path(node.path).name for node in mergepipe.lineage(copy, down=True)[1:]] == ["first", "second"]
    held = [report.path.name for report in mergepipe.list_snapshots(contained=root / "elsewhere" / "copied-chat")]
    assert held == ["second"]
    assert [item.path.name for item in mergepipe.without(copy, root / "first", root / "x", dry_run=True).remade] == [
        "first",
    ]  # fmt: skip
    changed = load_file(copy / "model.safetensors")
    changed["b.weight"] = changed["b.weight"] + 1
    save_file(changed, copy / "model.safetensors")
    with pytest.raises(MergePipeError):
        mergepipe.lineage(copy, down=True)


def test_merge__knows_what_its_inputs_are_without_reading_more(models: Models) -> None:
    report = mergepipe.merge({"merge_method": "linear", "models": [
        {"model": str(models.root / name), "parameters": {"weight": 1}} for name in ("base", "math", "math")
    ]}, models.root / "out")  # fmt: skip
    inputs = mergepipe.show(models.root / "out").inputs
    assert inputs[0].content_id != inputs[1].content_id == inputs[2].content_id
    assert None not in {source.content_id for source in inputs}
    nbytes = sum(value.nbytes for value in models.tensors["base"].values())
    assert (report.base_bytes, report.expert_bytes, report.analysis_bytes) == (nbytes, nbytes, 0)


def test_without__makes_what_a_folder_holds_now_and_lists_what_is_one_file(models: Models) -> None:
    root = models.root
    models.merge("one.safetensors", linear(base=1, math=1, code=2))
    models.merge("first", linear(base=1, math=1, code=2))
    models.merge("first", linear(base=1, math=2, code=2), MergeOptions(force=True))
    report = mergepipe.without("math", [root / "one.safetensors", root / "first"], root / "again")
    assert [item.out.name for item in report.remade] == ["first"]
    assert [item.reason.rpartition(": ")[2] for item in report.not_remade] == ["is one file, not a folder"]
    assert_close(values(root / "again" / "first"), models.mean(base=1, code=2))


def test_without__says_which_input_is_gone_or_changed(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    (root / "code").rename(root / "moved")
    report = mergepipe.without("math", root / "first", root / "again")
    assert (report.remade, len(report.not_remade)) == ((), 1)
    assert "the input code does not exist any more" in report.not_remade[0].reason


def test_without__needs_a_snapshot_that_holds_the_model_and_a_free_place(models: Models) -> None:
    root = models.root
    models.merge("first", linear(base=1, code=2))
    with pytest.raises(MergePipeError, match="holds nothing of 'math'"):
        mergepipe.without("math", root / "first", root / "again")
    models.merge("second", linear(base=1, math=1, code=2))
    (root / "again" / "second").mkdir(parents=True)
    (root / "again" / "second" / "mine").write_text("")
    with pytest.raises(MergePipeError, match="second"):
        mergepipe.without("math", root / "second", root / "again")
    assert [path.name for path in (root / "again" / "second").iterdir()] == ["mine"]


@pytest.mark.parametrize("out", ["s3://bucket/again", "hf://org/again", "again.safetensors"])
def test_without__writes_into_a_folder_of_this_machine(models: Models, out: str) -> None:
    models.merge("first", linear(base=1, math=1, code=2))
    with pytest.raises(MergePipeError) as caught:
        mergepipe.without("math", models.root / "first", out)
    assert caught.value.code == "output.place"


def test_without__takes_experts_that_are_packed_or_files(models: Models) -> None:
    """The model that is left out may be a pack or a file; what stays is read as the recipe has it."""
    root = models.root
    mergepipe.pack(root / "base", [root / "math", root / "code"], root / "packs")
    shutil.copy(root / "chat" / "model.safetensors", root / "chat.safetensors")
    weights = {"packs/math": 1.0, "packs/code": 1.0, "chat.safetensors": 1.0}
    entries = "".join(f"- {{model: {name}, parameters: {{weight: {w}}}}}\n" for name, w in weights.items())
    models.merge("first", f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{entries}dtype: float32\n")
    full = values(root / "first")
    for expert in ("math", "chat"):
        name = {"math": "packs/math", "chat": "chat.safetensors"}[expert]
        mergepipe.without(root / name, root / "first", root / f"without-{expert}")
        made = values(root / f"without-{expert}" / "first")
        base = models.tensors["base"]
        wanted = {n: full[n] - (models.tensors[expert][n] - base[n]) for n in NAMES}
        for tensor in NAMES:
            np.testing.assert_allclose(made[tensor], wanted[tensor], rtol=1e-5, atol=1e-5)


def test_without__prints_what_it_would_do(models: Models, run: Runner) -> None:
    root = models.root
    models.merge("first", linear(base=1, math=1, code=2))
    result = run("without", "math", root / "first", "-o", root / "again", "--dry-run")
    assert result.exit_code == 0
    assert f"would make  {root / 'again' / 'first'} from {root / 'first'}" in result.out
