"""Blocks of earlier snapshots: copied where they come out the same, with the bytes of a merge from scratch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mergepipe import api as keeping
from mergepipe import api as session
from mergepipe.errors import CorruptError
from mergepipe.options import MergeOptions
from mergepipe.runs import execution as executing
from mergepipe.runs.recovery import resume as resuming
from mergepipe.runs.reuse.blocks import find_reuse
from mergepipe.runs.reuse.keys import KEYS_NAME
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.delta_checkpoints import write_delta
from support.faults import Fault, replaced
from support.reuse_cases import RECIPES, Bench, Recipe, in_layer, make_bench, with_weight

MERGED_OF_LAYER_0 = 130 * 300 * 2
PAGE = 4096
SUM = "merge_method: task_arithmetic\nbase_model: base\nmodels:\n- {model: expert1, parameters: {weight: 0.5}}\n"


@pytest.fixture(name="first", scope="module")
def make_first(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """A bench on which a recipe was merged once, by the recipe's name."""
    benches: dict[str, Bench] = {}

    def first(name: str) -> Bench:
        if name not in benches:
            benches[name] = make_bench(tmp_path_factory.mktemp(name))
            benches[name].merge(RECIPES[name], "first")
        return benches[name]

    return first


Change = Callable[[Recipe], Recipe]


def _shared(name: str, value: object) -> Change:
    return lambda recipe: replace(recipe, shared={**recipe.shared, name: value})


CHANGES: dict[str, Change] = {
    "weight": lambda recipe: with_weight(recipe, 0.55),
    "weight_in_a_layer": lambda recipe: with_weight(recipe, in_layer(0.45, 0.6)),
    "lambda": _shared("lambda", 0.8),
    "t": _shared("t", 0.2),
    "rescale": lambda recipe: _shared("rescale", recipe.operator == "ties" and "rescale" not in recipe.shared)(recipe),
    "normalize": lambda recipe: replace(recipe, shared={**recipe.shared, "normalize": True}),
    "select_topk": _shared("select_topk", 0.2),
    "density": lambda recipe: replace(recipe, own={**recipe.own, "density": 0.2}),
    "added": lambda recipe: replace(recipe, experts=(*recipe.experts, 3)),
    "dropped": lambda recipe: replace(recipe, experts=recipe.experts[:1]),
    "exchanged": lambda recipe: replace(recipe, experts=(3, *recipe.experts[1:])),
    "order": lambda recipe: replace(recipe, experts=recipe.experts[::-1], weights=recipe.weights[1::-1]),
    "dtype": lambda recipe: replace(recipe, out_dtype="float32"),
    "operator": lambda recipe: replace(recipe, operator="ties" if recipe.operator == "dare_ties" else "dare_ties"),
}
KNOWS = {
    "linear": ("weight", "weight_in_a_layer", "added", "dropped", "exchanged", "order", "dtype"),
    "linear_sum": ("weight", "weight_in_a_layer", "normalize", "added", "dropped", "dtype"),
    "task_arithmetic": ("weight", "weight_in_a_layer", "lambda", "normalize", "added", "dropped", "order", "dtype"),
    "ties": ("weight", "weight_in_a_layer", "lambda", "rescale", "density", "added", "dropped", "dtype", "operator"),
    "ties_rescaled": ("weight", "rescale", "density", "added", "exchanged"),
    "dare_linear": ("weight_in_a_layer", "lambda", "rescale", "density", "added", "dropped", "exchanged"),
    "dare_ties": ("weight_in_a_layer", "rescale", "density", "added", "dropped", "operator"),
    "breadcrumbs": ("weight", "weight_in_a_layer", "density", "added"),
    "della": ("weight", "weight_in_a_layer", "rescale", "density", "added"),
    "nuslerp": ("weight", "weight_in_a_layer", "exchanged", "dtype"),
    "multislerp": ("weight", "weight_in_a_layer", "added", "exchanged"),
    "model_stock": ("added", "exchanged", "order"),
    "sce": ("select_topk", "added", "exchanged"),
    "ram": ("added", "exchanged"),
    "slerp": ("t", "exchanged", "dtype"),
    "nearswap": ("t", "exchanged"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_merge__done_again_reads_no_expert_and_gives_the_same(first: Callable[[str], Bench], name: str) -> None:
    bench = first(name)
    report = bench.merge(RECIPES[name], "again")
    shutil.rmtree(bench.folder / "again-scratch", ignore_errors=True)
    scratch = bench.scratch(RECIPES[name], "again-scratch")
    assert bench.digest("again") == bench.digest("first") == bench.digest("again-scratch")
    assert (report.expert_bytes, report.analysis_bytes) == (0, 0)
    assert report.reused_bytes >= 2 * (521 * 1100 + 2 * 130 * 300 + 77)
    assert report.reused_from == (read_manifest_value(LocalStore(), Location.local(bench.folder / "first")).sid,)
    assert "header digest" in report.reused_by
    assert scratch.expert_bytes > 0
    assert scratch.reused_bytes == 0
    assert keeping.verify(bench.folder / "again").is_sound


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in RECIPES for change in KNOWS[name]])
def test_merge__with_a_change_gives_the_bytes_of_a_merge_from_scratch(
    first: Callable[[str], Bench], name: str, change: str
) -> None:
    bench = first(name)
    changed = CHANGES[change](RECIPES[name])
    made, scratch = f"{change}-reusing", f"{change}-scratch"
    report = bench.merge(changed, made)
    full = bench.scratch(changed, scratch)
    assert bench.digest(made) == bench.digest(scratch)
    if change == "weight_in_a_layer":  # but for which everything stays
        assert 0 < report.expert_bytes <= 2 * (MERGED_OF_LAYER_0 + 2 * PAGE) < full.expert_bytes
    else:
        assert report.expert_bytes + report.analysis_bytes > 0
        assert change == "order" or bench.digest(made) != bench.digest("first")


def test_merge__of_another_seed_is_made_anew(first: Callable[[str], Bench]) -> None:
    bench = first("dare_linear")
    report = bench.merge(RECIPES["dare_linear"], "seed", seed=4)
    assert report.reused_bytes == 0
    bench.scratch(RECIPES["dare_linear"], "seed-scratch", seed=4)
    assert bench.digest("seed") == bench.digest("seed-scratch") != bench.digest("first")


# --- earlier snapshots that are not what they were ---


@pytest.fixture(name="bench")
def one_merge(tmp_path: Path) -> Bench:
    bench = make_bench(tmp_path)
    bench.merge(RECIPES["linear"], "first")
    return bench


def test_merge__damage_in_an_earlier_snapshot_is_found_before_it_is_published(bench: Bench) -> None:
    path = bench.only_file("first")
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError) as caught:
        bench.merge(RECIPES["linear"], "again")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("reuse.damaged", str(path))
    assert "nothing was published" in problem.message
    assert "--no-reuse" in problem.hint
    assert not (bench.folder / "again").exists()
    bench.scratch(RECIPES["linear"], "again")


@pytest.mark.parametrize("name", [KEYS_NAME, MANIFEST_NAME, "mergepipe.blocks"])
def test_merge__an_earlier_snapshot_whose_tables_are_damaged_is_passed_over(bench: Bench, name: str) -> None:
    path = bench.folder / "first" / name
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    report = bench.merge(RECIPES["linear"], "again")
    assert report.reused_bytes == 0
    assert bench.digest("again") == bench.digest("first")


def test_merge__an_earlier_snapshot_that_is_gone_is_passed_over(bench: Bench) -> None:
    before = bench.digest("first")
    shutil.rmtree(bench.folder / "first")
    assert bench.merge(RECIPES["linear"], "again").reused_bytes == 0
    assert bench.digest("again") == before


def test_merge__an_input_that_was_written_to_is_read_again(bench: Bench) -> None:
    os.utime(bench.only_file("expert1"))
    assert bench.merge(RECIPES["linear"], "again").reused_bytes == 0


def test_merge__the_snapshot_that_is_replaced_is_reused_without_a_catalog(bench: Bench) -> None:
    report = bench.merge(RECIPES["linear"], "first", force=True, catalog=False)
    assert (report.expert_bytes, report.reused_bytes > 0) == (0, True)
    assert keeping.verify(bench.folder / "first").is_sound


def test_merge__takes_every_tensor_from_where_most_of_it_stands(bench: Bench) -> None:
    other = with_weight(RECIPES["linear"], in_layer(0.9, 0.6))
    bench.merge(other, "other")
    os.utime(bench.folder / "first")
    report = bench.merge(with_weight(RECIPES["linear"], 0.6), "again")
    assert report.expert_bytes == 0
    taken = read_manifest_value(LocalStore(), Location.local(bench.folder / "again")).run["reused_from"]
    assert taken == ",".join(
        sorted(read_manifest_value(LocalStore(), Location.local(bench.folder / n)).sid for n in ("first", "other"))
    )


@pytest.mark.parametrize("name", ["linear", "dare_linear"])
def test_repair__makes_the_keys_again(tmp_path: Path, name: str) -> None:
    bench = make_bench(tmp_path)
    bench.merge(RECIPES[name], "first")
    path = bench.folder / "first" / KEYS_NAME
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    os.utime(bench.only_file("expert1"))
    assert [damage.file for damage in keeping.repair(bench.folder / "first").repaired] == [KEYS_NAME]
    assert path.read_bytes() == content


def test_merge__asks_the_system_for_no_byte_of_an_expert_that_it_need_not_merge(bench: Bench) -> None:
    asked: dict[str, int] = {}

    def noting(preadv: Callable[..., int]) -> Callable[..., int]:
        def noted(descriptor: int, buffers: list[memoryview], offset: int, *rest: int) -> int:
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            asked[path] = asked.get(path, 0) + sum(map(len, buffers))
            return preadv(descriptor, buffers, offset, *rest)

        return noted

    if not Path("/proc/self/fd").exists():
        pytest.skip("the operating system does not tell what descriptors are")
    with replaced(os, "preadv", noting):
        bench.merge(RECIPES["linear"], "again")
    read = {path for path, nbytes in asked.items() if nbytes}
    assert str(bench.only_file("first").resolve()) in read
    assert not read & {str(bench.only_file(f"expert{i}").resolve()) for i in (1, 2)}


@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize("loss", ["nothing", "the earlier snapshot"])
def test_merge__that_reuses_goes_on_where_it_was_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, budget: str | None, loss: str
) -> None:
    if budget is not None:  # a plan takes what it says, so that it has to be there
        loss = "nothing"
    monkeypatch.setattr(resuming, "INTERVAL_BYTES", 10_000)
    changed = with_weight(RECIPES["linear"], in_layer(0.9, 0.6))
    spent = {"budget": budget, "continue_": budget is not None}
    fault = Fault(2, KeyboardInterrupt())
    with replaced(os, "ftruncate", fault.wrap), pytest.raises(KeyboardInterrupt):
        bench.merge(changed, "stopped", shard_bytes=30_000, **spent)
    assert fault.fired
    if loss != "nothing":
        shutil.rmtree(bench.folder / "first")
    report = bench.merge(changed, "stopped", shard_bytes=30_000, **spent)
    assert any("resumed" in notice for notice in report.notices)
    if budget is None:
        bench.merge(changed, "whole", catalog=False)
        assert bench.digest("stopped") == bench.digest("whole")
    else:
        keeping.replay(bench.folder / "stopped", bench.folder / "replayed")
        assert bench.digest("stopped") == bench.digest("replayed")
    assert keeping.verify(bench.folder / "stopped").is_sound


@pytest.mark.parametrize("loss", ["replaced", "removed"])
def test_merge__an_earlier_snapshot_that_goes_while_it_is_looked_at_is_passed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    first, other = bench.folder / "first", bench.folder / "other"
    bench.scratch(with_weight(RECIPES["linear"], 0.9), "other", catalog=False)

    def lose(*arguments: Any) -> Any:
        found = find_reuse(*arguments)
        shutil.rmtree(first)
        if loss == "replaced":
            other.rename(first)
        return found

    monkeypatch.setattr(executing, "find_reuse", lose)
    report = bench.merge(RECIPES["linear"], "again")
    assert (report.reused_bytes, report.expert_bytes > 0) == (0, True)
    monkeypatch.undo()
    bench.scratch(RECIPES["linear"], "scratch")
    assert bench.digest("again") == bench.digest("scratch")


def test_merge__no_reuse_makes_everything_anew(bench: Bench) -> None:
    report = bench.merge(RECIPES["linear"], "again", reuse=False)
    assert (report.reused_bytes, report.expert_bytes > 0) == (0, True)


def test_merge__of_a_stored_delta_is_reused(bench: Bench) -> None:
    write_delta(bench.folder / "base", bench.folder / "expert2", bench.folder / "expert5")
    recipe = replace(RECIPES["linear"], experts=(1, 5))
    reports = [bench.merge(recipe, name) for name in ("one", "two")]
    bench.scratch(recipe, "scratch")
    assert bench.digest("one") == bench.digest("two") == bench.digest("scratch")
    assert reports[1].expert_bytes == 0


def test_merge__of_what_is_worked_out_on_the_way_is_made_anew(bench: Bench) -> None:
    (bench.folder / "recipe.yml").write_text(f"name: made\n{SUM}---\n{SUM.replace('expert1', 'made')}")
    for name in ("one", "two"):
        report = session.merge(bench.folder / "recipe.yml", bench.folder / name, options=MergeOptions(home=bench.home))
        assert (report.reused_bytes, report.expert_bytes > 0) == (0, True)
    assert bench.digest("one") == bench.digest("two")
