"""Packed chains of checkpoints as sources of averages and compositions: the bytes of the originals, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from composing import hidden
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import mergepipe
from mergepipe import tailor
from mergepipe.checkpoints.packed import UnpackedView
from mergepipe.deltastore import original_files
from mergepipe.deltastore.index import HEADER_NAME
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact
from support.training_trees import KnownStates, decoder_shapes, known_states, write_hf

STEPS = (100, 200, 300)
SHAPES = decoder_shapes(vocabulary=53_000, tied=True)  # embeddings of two blocks
WHOLE = "mergepipe-store.whole.bin"


def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) / 500).astype(np.float32)


@pytest.fixture(scope="module", name="run")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints in raw/, packed on one another in packed/; the same without optimizer in plain/ and packed-plain/."""
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    arrays = dict(known_states(SHAPES).arrays)
    base = root / "base"
    for step in (0, *STEPS):
        arrays = {key: values + noise(rng, values.shape) for key, values in arrays.items()}
        folder = root / "raw" / f"checkpoint-{step}"
        write_hf(folder, KnownStates(SHAPES, arrays, step))
        plain = base if step == 0 else root / "plain" / folder.name
        plain.mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            shutil.copy(folder / name, plain)
    for kind in ("raw", "plain"):
        mergepipe.pack(base, steps_of(root, kind), root / "packing", chain=8, threads=2)
        (root / "packing").rename(root / f"packed-{kind}")  # stores are found beside one another from here on
    return root


def steps_of(run: Path, kind: str) -> list[Path]:
    return [run / kind / f"checkpoint-{step}" for step in STEPS]


def content_of(folder: Path) -> Mapping[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "mergepipe.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(name="copy")
def copy_packed(run: Path, tmp_path: Path) -> list[Path]:
    """Return the stores of a chain of this test's own, which lie beside their base."""
    shutil.copytree(run / "base", tmp_path / "base")
    return sorted(shutil.copytree(run / "packed-raw", tmp_path / "copy").iterdir())


@pytest.mark.parametrize(("kind", "optimizer"), [("raw", "none"), ("raw", "average"), ("plain", "none")])
def test_average__of_a_packed_chain_is_that_of_the_originals(
    run: Path, tmp_path: Path, kind: str, optimizer: str
) -> None:
    packed = steps_of(run, f"packed-{kind}")
    assert [json.loads((store / HEADER_NAME).read_text()).get("depth", 0) for store in packed] == [0, 1, 2]
    tailor.average(steps_of(run, kind), tmp_path / "raw", weights="wma", optimizer=optimizer)
    report = tailor.average(packed, tmp_path / "packed", weights="wma", optimizer=optimizer, self_check="full")
    assert content_of(tmp_path / "raw") == content_of(tmp_path / "packed")
    assert report.manifest is not None
    inputs = report.manifest.inputs
    named = {Path(source.path).name: {Path(file.name).name for file in source.files} for source in inputs}
    assert all({WHOLE, HEADER_NAME} <= files for files in named.values())


def test_compose__takes_weights_and_optimizer_state_from_packed_checkpoints(run: Path, tmp_path: Path) -> None:
    for kind in ("raw", "packed-raw"):
        older, newer = (run / kind / f"checkpoint-{step}" for step in (200, 300))
        recipe = tmp_path / f"{kind}.yml"
        recipe.write_text(f"default: {newer}\ntake: [{{from: {older}, units: [layers even, embed]}}]\n")
        tailor.compose(recipe, tmp_path / kind, self_check="full")
    assert content_of(tmp_path / "raw") == content_of(tmp_path / "packed-raw")
    assert mergepipe.verify(tmp_path / "packed-raw").damages == ()


def test_compose__refuses_optimizer_state_of_packed_weights(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    sources = (run / "raw" / "checkpoint-300", run / "packed-plain" / "checkpoint-200")
    recipe.write_text("default: {}\ntake: [{{from: {}, units: [norm]}}]\n".format(*sources))
    with pytest.raises(MergePipeError) as caught:
        tailor.compose(recipe, tmp_path / "out")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("checkpoint.mismatch", str(sources[1]))
    assert "it lacks the optimizer's state: only weights are here" in problem.message
    assert problem.hint == "take them from a checkpoint that holds them"
    with pytest.raises(MergePipeError, match="it takes weights alone"):
        tailor.average(steps_of(run, "packed-plain"), tmp_path / "out", optimizer="last")


def test_tailor__looks_at_packed_checkpoints_as_at_their_originals(run: Path) -> None:
    raw, packed = (steps_of(run, kind) for kind in ("raw", "packed-raw"))
    reports = [tailor.inspect(*paths).checkpoints for paths in (raw, packed)]
    assert [(c.step, c.units) for c in reports[0]] == [(c.step, c.units) for c in reports[1]]
    assert tailor.diff(*raw[:2]).units == tailor.diff(*packed[:2]).units
    recipes = [tailor.recipe(run / kind, strategy="parity", folder=run / kind) for kind in ("raw", "packed-raw")]
    assert recipes[0] == recipes[1]


def test_average__orders_weights_alone_by_their_names(run: Path, tmp_path: Path) -> None:
    nameless = shutil.copytree(run / "plain" / "checkpoint-100", tmp_path / "first")
    with pytest.raises(MergePipeError) as caught:
        tailor.average([nameless, *steps_of(run, "plain")], tmp_path / "out")
    assert caught.value.code == "checkpoint.unsupported"


# --- lower stores that are not what they were


def test_average__without_a_store_of_its_chain_is_refused(copy: list[Path], tmp_path: Path) -> None:
    shutil.rmtree(copy[0])
    with pytest.raises(NotFoundError) as caught:
        tailor.average(copy[1:], tmp_path / "out")
    assert caught.value.code == "input.not-found"


def test_average__of_a_truncated_store_below_is_refused(copy: list[Path], tmp_path: Path) -> None:
    pieces = copy[0] / WHOLE
    pieces.write_bytes(pieces.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=f"{WHOLE}.*bytes are needed"):
        tailor.average(copy[1:], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("late", [False, True])
def test_average__refuses_a_store_below_that_changes_meanwhile(copy: list[Path], tmp_path: Path, late: bool) -> None:
    """Before its bytes are read, and after; the bytes that were there before are back at once."""
    changes: list[str] = []

    def change(phase: str, done: int, total: int) -> None:
        if not changes and (done == total if late else phase == "compose"):
            changes.append(phase)
            replaced = copy[0] / WHOLE
            content = replaced.read_bytes()
            replaced.unlink()
            replaced.write_bytes(content)

    with pytest.raises(ConflictError) as caught:
        tailor.average(copy[1:], tmp_path / "out", on_progress=change)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("input.changed", str(copy[0] / WHOLE))
    assert (changes, hidden(tmp_path)) == ([changes[0]], [])


def test_average__of_a_damaged_store_below_publishes_nothing(copy: list[Path], tmp_path: Path) -> None:
    pieces = copy[0] / WHOLE
    content = bytearray(pieces.read_bytes())
    content[len(content) // 2] ^= 1
    pieces.write_bytes(content)
    with pytest.raises(CorruptError):
        tailor.average(copy[1:], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the view


@pytest.fixture(scope="module", name="original")
def open_original(run: Path) -> Iterator[RangeFile]:
    place = Location.local(run / "packed-raw" / "checkpoint-300" / "model.safetensors")
    with closing(UnpackedView(LocalStore()).open(place)) as file:
        yield file


@given(st.lists(st.tuples(st.integers(-10, 1_300_000), st.integers(0, 600_000)), max_size=8))
def test_unpacked_view__reads_the_bytes_of_the_original(
    run: Path, original: RangeFile, ranges: list[tuple[int, int]]
) -> None:
    wanted = (run / "raw" / "checkpoint-300" / "model.safetensors").read_bytes()
    for start, length in ranges:
        first = start % len(wanted)
        stop = min(len(wanted), first + length)
        assert read_exact(original, first, stop, Purpose.EXPERT).tobytes() == wanted[first:stop]
    beyond = memoryview(bytearray(64))
    assert original.read_into(len(wanted) - 5, beyond, Purpose.EXPERT) == 5
    assert original.size_bytes == len(wanted)


def test_unpacked_view__read_from_many_threads_in_little_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original_files, "_FEWEST_KEPT_BYTES", 0)
    monkeypatch.setattr(original_files, "_KEPT_BYTES_OF_STORE", 1)
    view = UnpackedView(LocalStore())
    wanted = {path: (path / "model.safetensors").read_bytes() for path in steps_of(run, "raw")}
    files = {path: view.open(Location.local(run / "packed-raw" / path.name / "model.safetensors")) for path in wanted}

    def is_same(piece: tuple[Path, int]) -> bool:
        path, start = piece
        stop = min(start + 100_000, len(wanted[path]))
        return read_exact(files[path], start, stop, Purpose.EXPERT).tobytes() == wanted[path][start:stop]

    pieces = [(path, start) for start in range(0, 1_200_000, 100_000) for path in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_same, pieces))
    for file in files.values():
        file.close()


def test_unpacked_view__lists_what_was_packed(run: Path) -> None:
    view = UnpackedView(LocalStore())
    for kind in ("raw", "plain"):
        packed, raw = (Location.local(run / k / "checkpoint-200") for k in (f"packed-{kind}", kind))
        assert view.list(packed) == view.list(raw) == LocalStore().list(raw)
        small = packed / "model.safetensors"
        assert view.read_small(small, 1 << 30) == raw.local_path.joinpath("model.safetensors").read_bytes()
        with pytest.raises(CorruptError):
            view.read_small(small, 100)
