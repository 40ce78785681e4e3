"""Running averages: the same as one average of all, each checkpoint once, whole after a kill, under the Trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composing import FORMATS, hidden, tree
from safetensors.numpy import load_file

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError
from mergepipe.tailor import Averager
from support.late_modules import transformers
from support.training_trees import decoder_shapes, known_states, write_hf

STEPS = (3, 5, 9, 12)


def run_of(folder: Path, kind: str = "hf") -> list[Path]:
    paths = [folder / f"at-{step}" for step in STEPS]
    for path, step in zip(paths, STEPS, strict=True):
        FORMATS[kind](path, known_states(decoder_shapes(), seed=step, step=step))
    return paths


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    arrays = load_file(path / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    return arrays


def record_of(path: Path) -> Any:
    return json.loads((path / "mergepipe.json").read_text())


def folded_steps(path: Path) -> tuple[int, ...]:
    return tuple(record_of(path)["average"]["steps"])


def assert_average_of(
    out: Path, paths: Sequence[Path], reference: Path, weights: str = "sma", alpha: float | None = None
) -> None:
    """Compare with one average of all, within the rounding of a fold each: 2**-24 of values below 8."""
    tailor.average(paths, reference, dtype="float32", weights=weights, alpha=alpha)
    made, wanted = arrays_of(out), arrays_of(reference)
    assert set(made) == set(wanted)
    for name, array in wanted.items():
        assert np.abs(array).max() < 8
        np.testing.assert_allclose(made[name], array, rtol=0, atol=(len(paths) + 1) * 8 * 2.0**-24)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hf", "hf-zero2", "zero2-regrouped", "zero3", "dcp"])
def test_averager__equals_one_average_of_all(tmp_path: Path, kind: str) -> None:
    paths = run_of(tmp_path, kind)
    before = tree(tmp_path)
    with Averager(tmp_path / "out", shape="wma") as averager:
        assert [averager.fold(path).result() for path in paths] == [True] * 4
    assert_average_of(tmp_path / "out", paths, tmp_path / "reference", weights="wma")
    assert {name: content for name, content in tree(tmp_path).items() if name in before} == before
    assert (folded_steps(tmp_path / "out"), hidden(tmp_path)) == (STEPS, [])
    assert mergepipe.verify(tmp_path / "out").damages == ()
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("| 3 | 0.1 |" in card, "| 12 | 0.4 |" in card, str(tmp_path) in card) == (True, True, False)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["sma", "ema", "decay-linear", "decay-cosine", "decay-1-sqrt"])
def test_averager__weighs_as_every_scheme_does(tmp_path: Path, shape: str) -> None:
    paths = run_of(tmp_path)
    alpha, count = 0.3 if shape == "ema" else None, 4 if "decay" in shape else None
    with Averager(tmp_path / "out", shape=shape, alpha=alpha, count=count) as averager:
        for path in paths:
            averager.fold(path)
    assert_average_of(tmp_path / "out", paths, tmp_path / "reference", weights=shape, alpha=alpha)


def test_averager__folds_a_step_once_and_goes_on_in_another_process(tmp_path: Path) -> None:
    paths = run_of(tmp_path)
    with Averager(tmp_path / "out") as averager:
        folds = [averager.fold(path).result() for path in (paths[0], paths[0], paths[1])]
    with Averager(tmp_path / "out", count=3) as averager:
        folds += [averager.fold(path).result() for path in (paths[0], paths[1], paths[2], paths[3])]
    assert folds == [True, False, True, False, False, True, False]
    assert folded_steps(tmp_path / "out") == STEPS[:3]
    assert_average_of(tmp_path / "out", paths[:3], tmp_path / "reference")


def test_averager__record_makes_the_same_average_again(tmp_path: Path) -> None:
    paths = run_of(tmp_path)
    with Averager(tmp_path / "out", shape="ema") as averager:
        for path in paths:
            averager.fold(path)
    recipe = tmp_path / "out" / "again.yml"  # whose paths are relative to the average
    recipe.write_text(record_of(tmp_path / "out")["recipe"])
    tailor.compose(recipe, tmp_path / "again")
    for name, array in arrays_of(tmp_path / "again").items():
        np.testing.assert_allclose(arrays_of(tmp_path / "out")[name], array, rtol=0, atol=5 * 8 * 2.0**-24)


def test_averager__refuses_what_is_no_part_of_the_average_and_leaves_it(tmp_path: Path) -> None:
    paths = run_of(tmp_path)
    shapes = {name: (*shape[:-1], shape[-1] + 1) for name, shape in decoder_shapes().items()}
    write_hf(tmp_path / "wider", known_states(shapes, seed=1, step=20))
    (paths[2] / "model.safetensors").write_bytes((paths[2] / "model.safetensors").read_bytes()[:-9])
    averager = Averager(tmp_path / "out")
    averager.fold(paths[0]).result()
    before = tree(tmp_path / "out")
    for path, words in (
        (tmp_path / "wider", "has shape"),
        (paths[2], "model.safetensors"),
        (tmp_path / "none", "none"),
    ):
        averager.fold(path)
        with pytest.raises(MergePipeError, match=words):
            averager.wait()
    with pytest.raises(MergePipeError, match="other weights"):
        Averager(tmp_path / "out", shape="wma").fold(paths[1]).result()
    tailor.average(paths[:2], tmp_path / "plain", weights="wma")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for folder in ("plain", "full"):
        with pytest.raises(MergePipeError):
            Averager(tmp_path / folder).fold(paths[1]).result()
    assert ((tmp_path / "full" / "notes.txt").read_text(), tree(tmp_path / "out")) == ("mine", before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "smooth"}, "'smooth' is not known"),
        ({"shape": "decay-cosine"}, "count"),
        ({"count": 0}, "count"),
        ({"alpha": 0.3}, "alpha"),
        ({"shape": "ema", "alpha": 2.0}, "2 was given"),
    ],
)
def test_averager__refuses_options_before_training(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(MergePipeError, match=words):
        Averager(tmp_path / "out", **options)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.transformers
def test_averager__averages_the_checkpoints_of_the_trainer(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    rows = [{"input_ids": [n % 36 + 1, 5, 7], "labels": [n % 36 + 1, 5, 7]} for n in range(16)]
    averager = Averager(tmp_path / "out")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=2, learning_rate=1e-2, max_steps=6, save_steps=2,
        save_total_limit=1, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    weights: list[dict[str, np.ndarray]] = []

    class KeepWeights(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights.append({n: p.detach().numpy().copy() for n, p in kwargs["model"].named_parameters()})

    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=rows,
        callbacks=[averager.callback(), KeepWeights()],
    )  # fmt: skip
    trainer.train()
    assert (len(weights), folded_steps(tmp_path / "out")) == (3, (2, 4, 6))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        wanted = np.mean([arrays[name].astype(np.float64) for arrays in weights], axis=0)
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=0, atol=1e-6)
