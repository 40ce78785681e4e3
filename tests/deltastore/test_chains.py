"""Checkpoints of one training run packed on one another: bounded depth, bits restored, chains that lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from packing_cases import SHAPES, PackFamily, halves, relabel, write_model

import mergepipe
from mergepipe.deltastore import checkpoint, job
from mergepipe.errors import CorruptError, LimitError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from support.bucket_outputs import files_below
from support.model_folders import recipe_of
from support.public_names import HEADER_NAME
from support.refusals import refuses

N_STEPS = 5
LENGTH = 3


@pytest.fixture(scope="module", name="run")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    """A base and five checkpoints, each a small step from the one before; the third has a tensor of its own."""
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(9)
    weights = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in SHAPES.items()}
    base = write_model(root / "base", {name: halves(values) for name, values in weights.items()})
    steps = []
    for step in range(N_STEPS):
        for name, values in weights.items():
            weights[name] = (values + rng.standard_normal(values.shape) * 3e-4).astype(np.float32)
        if step == 2:
            weights["e.extra"] = np.ones(70_000, np.float32)
        steps.append(write_model(root / f"step-{step}", {name: halves(values) for name, values in weights.items()}))
    return PackFamily(root, base, tuple(steps))


@pytest.fixture(scope="module", name="packed")
def pack_run(run: PackFamily) -> Path:
    mergepipe.pack(run.base, run.experts, run.root / "packed", chain=LENGTH, threads=2)
    return run.root / "packed"


@pytest.fixture(name="copy")
def copy_packed(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, packed.with_name(tmp_path.name))  # beside the original: bases are relative to it


def header_of(store: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((store / HEADER_NAME).read_text())
    return document


def rewrite_header(store: Path, **changes: object) -> None:
    relabel(store, lambda document: document.update(changes))


@pytest.mark.thorough
def test_chain__is_packed_on_the_one_before_with_a_bounded_depth(run: PackFamily, packed: Path) -> None:
    headers = [header_of(packed / step.name) for step in run.experts]
    assert [header.get("depth", 0) for header in headers] == [0, 1, 2, 0, 1]
    below = ["../../base", "../step-0", "../step-1", "../../base", "../step-3"]
    assert [header["base"] for header in headers] == below


def test_chain__restores_every_checkpoint_bit_for_bit(run: PackFamily, packed: Path, tmp_path: Path) -> None:
    for step in run.experts:
        mergepipe.unpack(packed / step.name, tmp_path / step.name, threads=2)
        assert files_below(tmp_path / step.name) == files_below(step)
        assert mergepipe.verify(packed / step.name).is_sound


def test_chain__is_smaller_than_packs_on_the_base(run: PackFamily, packed: Path, tmp_path: Path) -> None:
    alone = mergepipe.pack(run.base, run.experts[2:3], tmp_path).experts[0].store_bytes
    assert sum(path.stat().st_size for path in (packed / "step-2").iterdir()) < alone


def test_chain__gives_tensors_and_parts_of_them(run: PackFamily, packed: Path) -> None:
    plain, chained = mergepipe.load_file(run.experts[2]), mergepipe.load_file(packed / "step-2")
    assert list(plain) == list(chained)
    for name in plain:
        assert plain[name].tobytes() == chained[name].tobytes()


def test_chain__goes_on_from_a_store_whose_original_is_gone(run: PackFamily, copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "step-4")
    rewrite_header(copy / "step-3", expert="/gone")
    report = mergepipe.pack(copy / "step-3", run.experts[4:], copy, chain=LENGTH)
    assert report.experts[0].is_new
    assert report.experts[0].match is not None
    assert header_of(copy / "step-4")["depth"] == 1
    mergepipe.unpack(copy / "step-4", tmp_path / "out")
    assert files_below(tmp_path / "out") == files_below(run.experts[4])
    again = mergepipe.pack(copy / "step-3", run.experts[4:], copy, chain=LENGTH)
    assert not again.experts[0].is_new
    full = mergepipe.pack(copy / "step-2", run.experts[3:4], tmp_path / "next", chain=LENGTH)
    (match,) = [expert.match for expert in full.experts]
    assert match is not None
    assert match.base.local_path == run.base  # the chain is long enough: on its first base again


def test_chain__that_was_moved_as_a_whole_is_found_beside_itself(run: PackFamily, tmp_path: Path) -> None:
    mergepipe.pack(run.base, run.experts[:2], tmp_path / "there", chain=LENGTH)
    (tmp_path / "there").rename(tmp_path / "here")
    assert mergepipe.verify(tmp_path / "here" / "step-1").is_sound
    shutil.rmtree(tmp_path / "here" / "step-0")
    with refuses(NotFoundError, "input.not-found"):
        mergepipe.load_file(tmp_path / "here" / "step-1")


def test_chain__takes_the_one_before_unpacked_as_a_base_too(run: PackFamily, packed: Path, tmp_path: Path) -> None:
    mergepipe.unpack(packed / "step-1", tmp_path / "out", base=run.experts[0])
    assert files_below(tmp_path / "out") == files_below(run.experts[1])
    recipe = recipe_of("linear", {packed / "step-1": {"weight": 1.0}}, run.experts[0], dtype="bfloat16")
    mergepipe.merge(recipe, tmp_path / "merged", catalog=False)
    wanted = mergepipe.load_file(run.experts[1])
    assert mergepipe.load_file(tmp_path / "merged")["a.wide"].tobytes() == wanted["a.wide"].tobytes()
    with refuses(MismatchError, "base.mismatch"):
        mergepipe.merge({**recipe, "base_model": str(run.base)}, tmp_path / "no", catalog=False)


def test_chain__with_a_damaged_store_below_is_refused(copy: Path) -> None:
    rewrite_header(copy / "step-1", base=str(copy / "step-0"))
    path = copy / "step-0" / "mergepipe-store.rest.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    report = mergepipe.verify(copy / "step-1")
    assert not report.is_sound


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "step-1"}, "is at depth 1 of a chain, 0 is needed"),  # itself: endless, if it were followed
        ({"base": "step-2"}, "is at depth 2 of a chain, 0 is needed"),
        ({"depth": 3}, "is at depth 0 of a chain, 2 is needed"),
        ({"depth": 10**6}, "is at depth 1000000 of a chain, at most 32 is allowed"),
        ({"depth": -1}, "depth: an integer from 0 on is needed"),
        ({"depth": True}, "depth: an integer from 0 on is needed"),
    ],
)
def test_chain__that_lies_about_itself_is_refused(copy: Path, changes: dict[str, object], message: str) -> None:
    if "base" in changes:
        changes = {"base": str(copy / str(changes["base"]))}
    rewrite_header(copy / "step-1", **changes)
    with pytest.raises(CorruptError, match=message):
        mergepipe.load_file(copy / "step-1")


OPERATIONS: dict[str, Callable[[Path, PackFamily, Path], object]] = {
    "load": lambda store, _, __: mergepipe.load_file(store),
    "unpack": lambda store, _, out: mergepipe.unpack(store, out / "model"),
    "verify": lambda store, _, __: mergepipe.verify(store),
    "pack": lambda store, run, out: mergepipe.pack(store, run.experts[4:], out),
    "pack a chain": lambda store, run, out: mergepipe.pack(store, run.experts[4:], out, chain=2),
    "merge": lambda store, _, out: mergepipe.merge(
        recipe_of("linear", {store: {"weight": 1}}, store), out / "model", catalog=False
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize(
    "circle",
    [
        [("step-1", "step-1", 0)],
        [("step-0", "step-1", 0), ("step-1", "step-0", 1)],
        [("step-1", "step-2", 1), ("step-2", "step-1", 1)],
        [("step-0", "step-1", 2), ("step-1", "step-0", 1)],
        [("step-0", "step-1", 3), ("step-1", "step-2", 2), ("step-2", "step-0", 1)],
    ],
    ids=["itself", "two", "equal depths", "falling depths", "three"],
)
def test_chain__in_a_circle_is_one_error_of_every_operation_and_nothing_is_written(
    copy: Path,
    run: PackFamily,
    tmp_path: Path,
    circle: list[tuple[str, str, int]],
    operation: Callable[[Path, PackFamily, Path], object],
) -> None:
    for name, base, depth in circle:
        rewrite_header(copy / name, base=str(copy / base), depth=depth)
    (tmp_path / "new").mkdir()
    before = files_below(copy)
    with pytest.raises((CorruptError, MismatchError, UnsupportedError)) as caught:
        operation(copy / "step-1", run, tmp_path / "new")
    assert "step-" in str(caught.value)
    assert files_below(copy) == before
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []


def test_chain__is_not_packed_deeper_than_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, job):
        monkeypatch.setattr(module, "MOST_DEPTH", 5)
    rng, last = np.random.default_rng(9), write_model(tmp_path / "base", {"w": halves(np.zeros((64, 64), np.float32))})
    for step in range(6):
        values = (rng.standard_normal((64, 64)) * 1e-2).astype(np.float32)
        expert = write_model(tmp_path / f"step-{step}", {"w": halves(values)})
        mergepipe.pack(last, [expert], tmp_path / "packed", threads=1)
        last = tmp_path / "packed" / expert.name
    mergepipe.unpack(last, tmp_path / "restored")
    assert files_below(tmp_path / "restored") == files_below(expert)
    with pytest.raises(UnsupportedError, match="is at depth 5 of a chain, stores are packed on those at 4 at most"):
        mergepipe.pack(last, [write_model(tmp_path / "more", {"w": halves(values)})], tmp_path / "packed")
    assert not (tmp_path / "packed" / "more").exists()
    assert mergepipe.pack(last, [tmp_path / "more"], tmp_path / "packed", chain=3).experts[0].is_new


def test_chain__refuses_what_it_cannot_do(run: PackFamily, tmp_path: Path) -> None:
    with refuses(RecipeError, "option.conflict"):
        mergepipe.pack([run.base, run.base], run.experts, tmp_path, chain=2)
    with pytest.raises(LimitError):
        mergepipe.pack(run.base, run.experts, tmp_path, chain=0)
    assert list(tmp_path.iterdir()) == []
