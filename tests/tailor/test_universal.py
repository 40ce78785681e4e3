"""DeepSpeed universal checkpoints: ZeRO checkpoints exported as such, and sources of compositions and averages."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from composing import FORMATS, FULL, Pair, checkpoint_at, edit, make_pair, stored_values, wrong_values
from test_pickled_counters import counters, write_fused

from mergepipe.errors import MergePipeError
from mergepipe.storage.location import Location
from mergepipe.tailor import api
from mergepipe.tailor.checkpoint import FP32
from mergepipe.tailor.composition import compose
from support.training_trees import KnownStates

UNIVERSAL = replace(FULL, export="universal")
KINDS = ("zero1", "zero2", "zero2-regrouped", "zero3", "zero3-regrouped", "zero3-saved", "hf-zero2")
PARITY = "default: new\ntake: [{from: old, units: [layers even, embed]}]\n"


def from_old(pair: Pair) -> list[str]:
    return [n for n in pair.old.shapes if any(part in n for part in ("embed_tokens", ".layers.0.", ".layers.2."))]


def write_universal(kind: str) -> Callable[[Path, KnownStates], None]:
    def write(folder: Path, known: KnownStates) -> None:
        native = folder.with_name(f"native-{folder.name}")
        FORMATS[kind](native, known)
        recipe = folder.with_name("export.yml")
        recipe.write_text(f"default: {native.name}\n")
        compose(Location.local(recipe), Location.local(folder), UNIVERSAL, lambda *_: None)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_compose__exports_a_universal_checkpoint_and_takes_such_sources(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, FORMATS[kind])
    pair.compose(PARITY, UNIVERSAL)
    made = checkpoint_at(pair.out)
    assert (made.format, made.step, wrong_values(pair.out, pair, from_old(pair))) == ("deepspeed-universal", 9, [])
    assert not (pair.out / "latest").exists()
    assert (pair.out / "latest_universal").exists() == (made.root != made.path)
    for path in pair.out.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    universal = Pair(tmp_path / "universal", pair.old, pair.new)
    universal.folder.mkdir()
    for name in ("old", "new"):
        pair.compose(f"default: {name}\n", UNIVERSAL, universal.folder / name)
    universal.compose(PARITY)
    assert wrong_values(universal.out, pair, from_old(pair)) == []
    assert counters(universal) == counters(pair)


@pytest.mark.parametrize("stage", [2, 3])
def test_compose__exports_counters_that_are_numbers(tmp_path: Path, stage: int) -> None:
    pair = make_pair(tmp_path, lambda folder, known: write_fused(folder, known, stage))
    pair.compose("default: new\ntake: [{from: old, units: [layers all, norm, embed]}]\n", UNIVERSAL)
    norms = 9.0 if stage == 3 else 7.0  # stage 3 has one counter for all
    assert counters(pair) == {name: norms if "norm" in name else 9.0 for name in pair.old.shapes}
    second = Pair(tmp_path / "again", pair.old, pair.new)
    second.folder.mkdir()
    second.compose("default: ../out\n")
    assert counters(second) == counters(pair)


def test_average__reads_universal_checkpoints(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, write_universal("zero2"))
    api.average([tmp_path / "old", tmp_path / "new"], pair.out, weights=(1, 3), optimizer="last", self_check="full")
    made = checkpoint_at(pair.out)
    for name in pair.new.shapes:
        mean = 0.25 * pair.old.arrays[name, FP32].astype(np.float64) + 0.75 * pair.new.arrays[name, FP32]
        np.testing.assert_allclose(stored_values(made.states[name, FP32]), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_average__of_native_checkpoints_becomes_universal(tmp_path: Path, kind: str) -> None:
    """The way of an average to another number of ranks: weights, moments and step stay what was averaged."""
    pair = make_pair(tmp_path, FORMATS[kind])
    api.average([tmp_path / "old", tmp_path / "new"], tmp_path / "mean", weights=(1, 3), optimizer="average")
    pair.compose("default: mean\n", UNIVERSAL)
    native, made = (checkpoint_at(path) for path in (tmp_path / "mean", pair.out))
    assert (made.format, made.step, made.missing) == ("deepspeed-universal", native.step, ())
    for (name, of_kind), state in made.states.items():
        assert np.array_equal(stored_values(state), stored_values(native.states[name, of_kind])), (name, of_kind)
    assert {kind for _, kind in made.states} >= {FP32, "exp_avg", "exp_avg_sq"}


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(MergePipeError) as caught:
        act()
    return caught.value.code


def test_export__is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, FORMATS["hf"])
    recipe = pair.recipe("default: new\n")
    assert refused(lambda: api.check(recipe, export="universal")) == "checkpoint.unsupported"
    assert refused(lambda: api.check(recipe, export="parquet")) == "option.invalid"


def test_open__refuses_universal_checkpoints_that_lie(tmp_path: Path) -> None:
    make_pair(tmp_path, write_universal("zero2"))
    states = tmp_path / "new" / "zero" / "model.norm.weight"
    edit(states / "fp32.pt", {("param",): None})
    assert refused(lambda: api.inspect(tmp_path / "new")) == "checkpoint.damaged"
    (states / "fp32.pt").unlink()
    assert checkpoint_at(tmp_path / "new").missing == ("fp32 of model.norm.weight",)
    edit(tmp_path / "old" / "zero" / "model.norm.weight" / "step.pt", {(): 8})
    assert refused(lambda: api.inspect(tmp_path / "old")) == "checkpoint.damaged"
