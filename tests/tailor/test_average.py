"""Averages of checkpoints: weights of every scheme, values against float64, models and checkpoints to resume from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from composing import FORMATS, checkpoint_at, hidden, model_values, stored_values, tree
from hypothesis import given
from hypothesis import strategies as st

import mergepipe
from mergepipe import tailor
from mergepipe.core.blocks import BF16, F32, Span
from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.snapshots.manifest import Thoroughness
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor import copy_writer
from mergepipe.tailor.averaging import Averaging, made_states, open_averaging
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, Piece, StoredState
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_plan import AverageRange, FilePlan, patch_states
from mergepipe.tailor.copy_writer import write_files
from mergepipe.tailor.recipes import SCHEMES, AverageRequest, OptimizerState, scheme_weights
from mergepipe.tailor.self_check import ResultCheck
from support.refusals import refusal, refuses
from support.training_trees import STATES, KnownStates, decoder_shapes, known_states, write_hf, write_trainer_files

STEPS = (3, 5, 9)
KINDS = ("hf", "hf-zero2", "zero1", "zero2-regrouped", "zero3", "zero3-saved", "dcp")


def run_of(folder: Path, kind: str) -> tuple[list[Path], list[KnownStates]]:
    """Checkpoints of one run, newest first, as a user may list them; and what they hold, oldest first."""
    knowns = [known_states(decoder_shapes(), seed=step, step=step) for step in STEPS]
    paths = [folder / f"at-{known.step}" for known in knowns]
    for path, known in zip(paths, knowns, strict=True):
        FORMATS[kind](path, known)
    return paths[::-1], knowns


def mean(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    return sum(w * a.astype(np.float64) for w, a in zip(weights, arrays, strict=True))  # type: ignore[return-value]


# --- weights


def test_scheme_weights__are_those_of_the_papers() -> None:
    assert scheme_weights("sma", 4) == (0.25,) * 4
    assert scheme_weights("wma", 4) == (0.1, 0.2, 0.3, 0.4)
    running = 1.0 * np.eye(4)[0]
    for place in range(1, 4):  # the recurrence itself
        running = 0.3 * np.eye(4)[place] + 0.7 * running
    assert scheme_weights("ema", 4, 0.3) == pytest.approx(tuple(running), rel=1e-12)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("decay-")])
def test_scheme_weights__replay_the_decayed_steps(scheme: str) -> None:
    """WSM: the merged model is the oldest plus each update times the decayed rate of its interval."""
    count, updates = 6, np.random.default_rng(0).standard_normal(5)
    checkpoints = np.cumsum([1.0, *updates])
    shapes = {
        "decay-linear": lambda t: 1 - t,
        "decay-cosine": lambda t: np.cos(np.pi * t) / 2 + 0.5,
        "decay-1-sqrt": lambda t: 1 - t**0.5,
    }
    rates = [shapes[scheme]((i + 1) / count) for i in range(count - 1)]
    merged = np.dot(scheme_weights(scheme, count), checkpoints)
    assert merged == pytest.approx(1.0 + np.dot(rates, updates), rel=1e-12)


@given(st.sampled_from(sorted(SCHEMES)), st.integers(2, 60), st.floats(0.01, 1.0))
def test_scheme_weights__sum_to_one(scheme: str, count: int, alpha: float) -> None:
    weights = scheme_weights(scheme, count, alpha)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    assert (len(weights), min(weights) >= 0) == (count, True)


# --- values


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_average__writes_a_model_of_averaged_weights(tmp_path: Path, kind: str) -> None:
    paths, knowns = run_of(tmp_path, kind)
    before = {name: content for path in paths for name, content in tree(path).items()}
    report = tailor.average(paths, tmp_path / "out", weights="wma", self_check="full", memory_bytes=32 << 20)
    model = model_values(tmp_path / "out")
    assert set(model) == set(decoder_shapes())
    for name, values in model.items():
        wanted = mean([known.arrays[name, FP32] for known in knowns], (1 / 6, 2 / 6, 3 / 6))
        np.testing.assert_allclose(values.astype(np.float32), wanted, rtol=0, atol=1e-6)
    assert (report.average is not None, hidden(tmp_path)) == (True, [])
    assert {name: content for path in paths for name, content in tree(path).items()} == before
    assert mergepipe.verify(tmp_path / "out").damages == ()


def test_average__makes_a_model_that_merges_take(tmp_path: Path) -> None:
    paths, knowns = run_of(tmp_path, "zero2")
    tailor.average(paths, tmp_path / "model")
    tailor.average(paths, tmp_path / "checkpoint", optimizer="last")
    recipe = tmp_path / "merge.yml"
    recipe.write_text("merge_method: linear\nmodels: [{model: model, parameters: {weight: 1}}]\n")
    mergepipe.merge(recipe, tmp_path / "merged")
    wanted = mean([known.arrays["model.norm.weight", FP32] for known in knowns], (1 / 3,) * 3)
    merged = model_values(tmp_path / "merged")["model.norm.weight"]
    np.testing.assert_allclose(merged.astype(np.float32), wanted, atol=1e-6)
    recipe.write_text("merge_method: linear\nmodels: [{model: checkpoint, parameters: {weight: 1}}]\n")
    with refuses(MergePipeError, "model.unsupported"):
        mergepipe.merge(recipe, tmp_path / "refused")


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["last", "average"])
@pytest.mark.parametrize("kind", KINDS)
def test_average__writes_a_checkpoint_to_resume_from(tmp_path: Path, kind: str, optimizer: str) -> None:
    paths, knowns = run_of(tmp_path, kind)
    tailor.average(paths, tmp_path / "out", weights="ema", alpha=0.5, optimizer=optimizer, memory_bytes=32 << 20)
    made = checkpoint_at(tmp_path / "out")
    newest = checkpoint_at(paths[0])
    assert (made.missing, made.step, made.states.keys()) == ((), STEPS[-1], newest.states.keys())
    assert {s.value for s in made.steps} == {float(STEPS[-1])}
    for (name, kind_of_state), state in made.states.items():
        known_kind = FP32 if kind_of_state in (WEIGHT, EXPORT) else kind_of_state
        arrays = [known.arrays[name, known_kind] for known in knowns]
        if known_kind in STATES and optimizer == "last":
            assert np.array_equal(stored_values(state), arrays[-1])
        else:
            np.testing.assert_allclose(stored_values(state), mean(arrays, (0.25, 0.25, 0.5)), rtol=0, atol=1e-6)


def test_average__of_a_recipe_is_that_of_the_command(tmp_path: Path) -> None:
    paths, _ = run_of(tmp_path, "zero2")
    recipe = tmp_path / "average.yml"
    recipe.write_text("average:\n  checkpoints: [at-3, at-5, at-9]\n  weights: [3, 2, 1]\n  optimizer: last\n")
    checked = tailor.check(recipe)
    by_recipe = tailor.compose(recipe, tmp_path / "one")
    by_call = tailor.average(paths, tmp_path / "two", weights=(1, 2, 3), optimizer="last")
    assert checked.average == by_recipe.average == by_call.average
    assert checked.average is not None
    assert checked.average.weights == (0.5, 2 / 6, 1 / 6)
    one, two = (
        {n: c for n, (c, _, _) in tree(tmp_path / out).items() if n != "mergepipe.json"} for out in ("one", "two")
    )
    assert one == two


def test_average__casts_once_and_says_the_dtype(tmp_path: Path) -> None:
    paths, knowns = run_of(tmp_path, "zero3")
    lender = tmp_path / "model"
    lender.mkdir()
    (lender / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    (lender / "tokenizer.json").write_text("{}")
    tailor.average(paths, tmp_path / "out", dtype="bfloat16", config=lender)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    made = model_values(tmp_path / "out")["model.norm.weight"]
    wanted = mean([known.arrays["model.norm.weight", FP32] for known in knowns], (1 / 3,) * 3)
    assert (made.dtype, made.tolist()) == (ml_dtypes.bfloat16, wanted.astype(ml_dtypes.bfloat16).tolist())


def test_average__reads_a_flat_group_at_once(tmp_path: Path) -> None:
    """Parameters that follow one another in every checkpoint are one range; all around them stays as it is."""
    paths, _ = run_of(tmp_path, "zero2")
    request = AverageRequest(tuple(map(Location.local, paths)), optimizer=OptimizerState.AVERAGE)
    averaging = open_averaging(LocalStore(), request)
    plans = [plan for plan in averaging.plan().files if plan.name.endswith("optim_states.pt")]
    counts = {sum(isinstance(s, AverageRange) for s in plan.segments) for plan in plans}
    assert max(counts) <= (n_flat_states := 3 * len(averaging.newest.flat_groups))
    tailor.average(paths, tmp_path / "out", optimizer="average")
    for path in averaging.newest.root.local_path.glob("*optim_states.pt"):
        old, new = path.read_bytes(), (tmp_path / "out" / path.name).read_bytes()
        held = np.zeros(len(old), bool)
        for piece in (p for s in averaging.newest.states.values() for p in s.pieces if p.file.name == path.name):
            held[piece.offset : piece.offset + piece.nbytes] = True
        changed = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
        assert (changed & ~held).sum() <= 8 * n_flat_states  # checksums alone


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["zero3", "dcp"])
@pytest.mark.parametrize("optimizer", list(OptimizerState))
def test_self_check__finds_the_same_with_samples_read_ahead(
    tmp_path: Path, kind: str, optimizer: OptimizerState
) -> None:
    paths, _ = run_of(tmp_path, kind)
    tailor.average(paths, tmp_path / "out", optimizer=optimizer.value, self_check="off")
    averaging = open_averaging(LocalStore(), AverageRequest(tuple(map(Location.local, paths)), optimizer=optimizer))
    out = Location.local(tmp_path / "out")

    def new_check() -> ResultCheck:
        return ResultCheck(averaging.store, Thoroughness.SAMPLED, averaging.summands, averaging.weights)

    with new_check() as ahead, new_check() as late:
        ahead.read_ahead(averaging.planned_states())
        seen: list[None] = []
        states = made_states(averaging, out, out)
        checked = ahead.compare(states, lambda: seen.append(None))
        assert (checked.elements > 0, checked.states, len(seen) > 0) == (True, len(states), True)
        assert late.compare(states, lambda: None) == checked
        ahead.read_ahead(averaging.planned_states())
        (file, offset) = _place_of_a_value(averaging, out)
        content = bytearray(file.read_bytes())
        content[offset + 3] ^= 0x40  # the exponent
        file.write_bytes(content)
        for check in (ahead, late):
            with pytest.raises(CorruptError, match="differs from its sources in elements"):
                check.compare(states, lambda: None)


def _place_of_a_value(averaging: Averaging, out: Location) -> tuple[Path, int]:
    """The place of the first element of a weight of the result."""
    state = next(s for s in made_states(averaging, out, out).values() if s.dtype == F32 and s.n_elements > 1)
    piece = unpacked(averaging.store, state).pieces[0]
    return piece.file.local_path, piece.offset


def test_copier__averages_many_files_in_little_memory(tmp_path: Path) -> None:
    """40 files, cut into chunks, results in bfloat16: bytes of the float64 average, rounded once."""
    generator = np.random.default_rng(0)
    n_elements, states, values = 300_001, [], []
    for number in range(40):
        value = generator.standard_normal(n_elements + number).astype(np.float32)
        path = tmp_path / f"f{number}"
        path.write_bytes(value.tobytes())
        values.append(value[number:])
        piece = Piece(Location.local(path), 4 * number, 4 * n_elements, Span(0, n_elements))
        states.append(StoredState("p", WEIGHT, F32, (n_elements,), (piece,)))
    place = Piece(Location.local(tmp_path / "out"), 0, 2 * n_elements, Span(0, n_elements))
    target = StoredState("p", WEIGHT, BF16, (n_elements,), (place,))
    weights = scheme_weights("decay-cosine", 40)
    plan = FilePlan("out", tuple(patch.segment for _, patch in patch_states(states, target, weights)))
    write_files(LocalStore(), [(plan, tmp_path / "out")], copy_writer.FEWEST_BYTES, lambda _: None)
    made = np.frombuffer((tmp_path / "out").read_bytes(), ml_dtypes.bfloat16).astype(np.float64)
    wanted = mean(values, weights)
    assert np.max(np.abs(made - wanted)) <= 2.0**-8 * np.max(np.abs(wanted))
    assert plan.read_bytes == 40 * 4 * n_elements


# --- refusals


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run that nothing changes."""
    return run_of(tmp_path_factory.mktemp("steps"), "zero2")[0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"weights": (1.0, -1.0, 0.0)}, "option.invalid"),
        ({"weights": (1e308, 1e308, 1e308)}, "option.invalid"),
        ({"weights": "ema", "alpha": 0.0}, "option.invalid"),
        ({"weights": "wma", "alpha": 0.5}, "option.conflict"),
        ({"optimizer": "last", "dtype": "bfloat16"}, "option.conflict"),
        ({"optimizer": "average", "config": "at-3"}, "option.conflict"),
        ({"optimizer": "first"}, "option.invalid"),
        ({"dtype": np.float16}, "option.invalid"),
    ],
)
def test_average__refuses_options_by_name(
    steps: list[Path], tmp_path: Path, options: Mapping[str, object], code: str
) -> None:
    with refuses(MergePipeError, code):
        tailor.average(steps, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("alpha: fast", "recipe.value", "needs a number, found the text 'fast'"),
        ("alpha: '0.5'", "recipe.value", "needs a number"),
        ("alpha: 0.5", "option.conflict", "only the weights 'ema' use it"),
        ("weights: [true, false, 1]", "recipe.value", "needs the name of a scheme or a list of numbers"),
        ("weights: []", "recipe.value", "needs the name of a scheme or a list of numbers"),
        ("optimizer: [1]", "recipe.value", "needs text, found a list"),
        ("optimizer: lats", "recipe.unknown-name", "average.yml:3 average.optimizer: 'lats' is not known; did you"),
        ("weights: best", "option.invalid", "average.yml:3 average.weights: 'best' is neither a scheme nor numbers"),
        ("colour: blue", "recipe.unknown-name", "unknown key 'colour'"),
        ("weights: sma\ndefault: x", "recipe.unknown-name", "unknown key 'default'"),
    ],
)
def test_average__refuses_values_of_a_recipe_by_place(
    steps: list[Path], tmp_path: Path, line: str, code: str, message: str
) -> None:
    recipe = tmp_path / "average.yml"
    recipe.write_text(f"average:\n  checkpoints: [{', '.join(map(str, steps))}]\n  {line}\n", encoding="utf-8")
    error = refusal(lambda: tailor.check(recipe))
    assert (error.code, len(error.problems), message in str(error)) == (code, 1, True)


def test_average__refuses_checkpoints_that_are_no_steps_of_one_run(tmp_path: Path) -> None:
    paths, _ = run_of(tmp_path, "hf")
    write_hf(tmp_path / "wider", known_states(decoder_shapes(width=7), step=20))
    for given_paths, code in (
        ([], "option.invalid"),
        ([*paths, tmp_path / "wider"], "checkpoint.mismatch"),
        (paths * 50, "option.out-of-range"),
    ):
        with refuses(MergePipeError, code):
            tailor.average(given_paths, tmp_path / "out")


def test_average__of_weights_alone_makes_models_ordered_by_their_names(tmp_path: Path) -> None:
    for step in STEPS[:2]:
        write_trainer_files(tmp_path / f"checkpoint-{step}", known_states(decoder_shapes(), seed=step, step=step))
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    paths = sorted(tmp_path.iterdir())
    tailor.average(paths, tmp_path / "out")
    with pytest.raises(MergePipeError, match="weights alone are enough"):
        tailor.average(paths, tmp_path / "resumed", optimizer="last")
    nameless = paths[0].rename(tmp_path / "first")
    with refuses(MergePipeError, "checkpoint.unsupported"):
        tailor.average([nameless, paths[1]], tmp_path / "other")


def test_average__publishes_nothing_that_differs_from_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = run_of(tmp_path, "zero2")
    wrong = copy_writer._averaging((0.5, 0.25, 0.25))
    monkeypatch.setattr(copy_writer, "_averaging", lambda _: wrong)
    with pytest.raises(CorruptError) as caught:
        tailor.average(paths, tmp_path / "out")
    assert (caught.value.code, (tmp_path / "out").exists(), hidden(tmp_path)) == ("output.damaged", False, [])
