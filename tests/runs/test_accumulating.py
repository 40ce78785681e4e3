"""Kept sums: experts added at the end are read alone, and the bytes are those of a merge from scratch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file, save_file

from mergepipe import api as keeping
from mergepipe.errors import CorruptError, RecipeError
from mergepipe.runs.reuse.accumulators import (
    ACCUMULATORS_FORMAT,
    ACCUMULATORS_NAME,
    ACCUMULATORS_RECORD_NAME,
    read_totals,
)
from mergepipe.runs.reuse.kept_sums_files import sums_folder
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.reuse_cases import RECIPES, Bench, Recipe, make_bench

ADDITIVE = ("task_arithmetic", "linear_sum", "dare_linear")
WEIGHTS = (0.6, 0.3, 0.2, 0.1)
PAGES_OF_A_TENSOR = 2 * 4096


@pytest.fixture(name="bench")
def make(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def of(name: str, *experts: int, **changes: Any) -> Recipe:
    recipe = RECIPES[name]
    shared = {**recipe.shared, "normalize": False}
    return replace(recipe, experts=experts, weights=WEIGHTS, shared=shared, **changes)


def expert_bytes(bench: Bench, n_experts: int) -> int:
    """Of whole experts, at most."""
    tensors = load_file(bench.only_file("expert1"))
    return n_experts * sum(a.nbytes + PAGES_OF_A_TENSOR for name, a in tensors.items() if name != "ids")


@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("out_dtype", [None, "float32", "bfloat16"])
def test_merge__with_kept_sums_is_the_same(bench: Bench, name: str, out_dtype: str | None) -> None:
    bench.merge(of(name, 1, 2, out_dtype=out_dtype), "keeping", keep_sums=True)
    bench.scratch(of(name, 1, 2, out_dtype=out_dtype), "scratch")
    assert bench.digest("keeping") == bench.digest("scratch")
    report = keeping.verify(bench.folder / "keeping")
    assert (report.damages, report.notices) == ((), ())


def sums_of(out: Path) -> Path:
    """The file of the sums that were kept beside a snapshot."""
    (path,) = sums_folder(out).iterdir()
    return path


@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("keeps", [False, True])
def test_merge__of_one_expert_more_reads_that_expert_only(bench: Bench, name: str, keeps: bool) -> None:
    if name == "linear_sum":
        pytest.skip("the sum of weights scales the base: every weight counts from the start")
    bench.merge(of(name, 1, 2), "two", keep_sums=True)
    report = bench.merge(of(name, 1, 2, 3), "three", keep_sums=keeps)
    bench.scratch(of(name, 1, 2, 3), "scratch")
    assert bench.digest("three") == bench.digest("scratch")
    assert 0 < report.expert_bytes <= expert_bytes(bench, 1)
    assert (report.analysis_bytes > 0) == (name == "dare_linear")  # a content id, once
    assert sums_folder(bench.folder / "three").exists() == keeps
    assert keeping.verify(bench.folder / "three").is_sound
    shutil.rmtree(bench.folder / "two")
    report = bench.merge(of(name, 1, 2, 3, 4), "four")
    bench.scratch(of(name, 1, 2, 3, 4), "scratch4")
    assert bench.digest("four") == bench.digest("scratch4")
    assert (report.expert_bytes <= expert_bytes(bench, 1)) == keeps


def test_merge__keeps_the_sums_of_what_it_need_not_merge(bench: Bench) -> None:
    report = bench.merge(of("task_arithmetic", 1, 2), "first", keep_sums=True)
    assert (report.reused_bytes, report.reused_from, report.sum_bytes > 0) == (0, (), True)
    assert not any(
        name.startswith("reused")
        for name in read_manifest_value(LocalStore(), Location.local(bench.folder / "first")).run
    )
    report = bench.merge(of("task_arithmetic", 1, 2, out_dtype="bfloat16"), "again", keep_sums=True)
    assert (report.expert_bytes, report.reused_bytes > 0, len(report.reused_from)) == (0, True, 1)
    first, again = (sums_of(bench.folder / name) for name in ("first", "again"))
    assert not (bench.folder / "first" / ACCUMULATORS_NAME).exists()
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("change", ["weight", "order", "lambda", "dropped", "operator", "normalize"])
def test_merge__of_another_sum_begins_anew(bench: Bench, change: str) -> None:
    first = of("task_arithmetic", 1, 2)
    changed = {
        "weight": replace(first, weights=(0.5, 0.3, 0.2), experts=(1, 2, 3)),
        "order": replace(first, experts=(2, 1, 3)),
        "lambda": replace(first, experts=(1, 2, 3), shared={"lambda": 0.8, "normalize": False}),
        "dropped": replace(first, experts=(1,)),
        "operator": replace(RECIPES["ties"], experts=(1, 2, 3)),
        "normalize": replace(first, experts=(1, 2, 3), shared={"lambda": 0.9, "normalize": True}),
    }[change]
    bench.merge(first, "first", keep_sums=True)
    report = bench.merge(changed, "changed")
    assert report.reused_bytes == 0
    bench.scratch(changed, "scratch")
    assert bench.digest("changed") == bench.digest("scratch")


def test_merge__goes_on_with_values_of_every_kind(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    rng = np.random.default_rng(5)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 65504.0, 6e-8], np.float16)
    for model in ("base", "expert1", "expert2", "expert3"):
        path = bench.only_file(model)
        tensors = load_file(path)
        tensors["norm.weight"] = rng.choice(special, 77)
        save_file(tensors, path)
    bench.merge(of("task_arithmetic", 1, 2), "two", keep_sums=True)
    report = bench.merge(of("task_arithmetic", 1, 2, 3), "three")
    bench.scratch(of("task_arithmetic", 1, 2, 3), "scratch")
    assert report.expert_bytes <= expert_bytes(bench, 1)
    assert bench.digest("three") == bench.digest("scratch")


NAN_EXPERT, OTHER_NAN_EXPERT = 2, 4


@pytest.mark.parametrize("experts", [(1,), (1, 3), (3, 1), (1, 3, NAN_EXPERT)])
@pytest.mark.parametrize("keeps", [False, True])
def test_merge__leaves_nothing_of_a_dropped_or_replaced_expert_with_nan(
    bench: Bench, experts: tuple[int, ...], keeps: bool
) -> None:
    for expert, special in ((NAN_EXPERT, np.nan), (OTHER_NAN_EXPERT, np.inf)):
        path = bench.only_file(f"expert{expert}")
        tensors = load_file(path)
        save_file({n: np.full_like(t, special) if n != "ids" else t for n, t in tensors.items()}, path)
    bench.merge(of("task_arithmetic", 1, NAN_EXPERT), "with-nan", keep_sums=True)
    bench.merge(of("task_arithmetic", 1, OTHER_NAN_EXPERT), "with-inf", keep_sums=True)
    bench.merge(of("task_arithmetic", *experts), "without", keep_sums=keeps)
    bench.scratch(of("task_arithmetic", *experts), "scratch")
    assert bench.digest("without") == bench.digest("scratch")
    is_finite = all(np.isfinite(t.astype(np.float64)).all() for t in load_file(bench.only_file("without")).values())
    assert is_finite == (NAN_EXPERT not in experts)


def test_merge__replaced_bytes_of_an_expert_with_nan_leave_nothing_behind(bench: Bench) -> None:
    path = bench.only_file("expert2")
    sound = load_file(path)
    save_file({n: np.full_like(t, np.nan) if n != "ids" else t for n, t in sound.items()}, path)
    bench.merge(of("task_arithmetic", 1, 2), "out", keep_sums=True)
    save_file(sound, path)
    bench.merge(of("task_arithmetic", 1, 2, 3), "after", keep_sums=True)
    bench.scratch(of("task_arithmetic", 1, 2, 3), "scratch")
    assert bench.digest("after") == bench.digest("scratch")


def test_merge__does_not_go_on_with_a_record_of_another_format(bench: Bench) -> None:
    bench.merge(of("task_arithmetic", 1, 2), "first", keep_sums=True)
    record = bench.folder / "first" / ACCUMULATORS_RECORD_NAME
    older = record.read_bytes().replace(ACCUMULATORS_FORMAT.encode(), b"mergepipe-accumulators/1")
    manifest = read_manifest_value(LocalStore(), Location.local(bench.folder / "first"))
    records = tuple(
        replace(each, blake3=blake3(older).hexdigest(16)) if each.name == record.name else each
        for each in manifest.sidecars
    )
    assert read_totals(LocalStore(), Location.local(record.parent), manifest) is not None
    record.write_bytes(older)
    assert read_totals(LocalStore(), Location.local(record.parent), replace(manifest, sidecars=records)) is None


def test_merge__damaged_sums_are_found_before_anything_is_published(bench: Bench) -> None:
    bench.merge(of("task_arithmetic", 1, 2), "first", keep_sums=True)
    path = sums_of(bench.folder / "first")
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError) as caught:
        bench.merge(of("task_arithmetic", 1, 2, 3), "again")
    assert (caught.value.problems[0].code, caught.value.problems[0].where) == ("accumulators.damaged", str(path))
    assert not (bench.folder / "again").exists()
    assert [damage.file for damage in keeping.verify(bench.folder / "first").damages] == [str(path)]
    path.unlink()
    assert [str(path) in notice for notice in keeping.verify(bench.folder / "first").notices] == [True]
    assert bench.merge(of("task_arithmetic", 1, 2, 3), "again").reused_bytes == 0


def test_merge__sums_under_a_budget_are_refused(bench: Bench) -> None:
    with pytest.raises(RecipeError) as caught:
        bench.merge(of("task_arithmetic", 1, 2), "first", keep_sums=True, budget="50%")
    assert caught.value.problems[0].code == "option.pair"


@pytest.mark.parametrize("name", ["ties", "dare_ties"])
def test_merge__keeping_sums_of_a_rule_that_is_no_sum_is_refused_with_what_to_do(bench: Bench, name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        bench.merge(RECIPES[name], "refused", keep_sums=True)
    assert caught.value.code == "option.accumulators"
    assert "mergepipe pack" in str(caught.value)
    assert not (bench.folder / "refused").exists()
