"""Packing on the way of merges and analyses: the same stores, for bytes that are read anyway."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from packing_cases import PackFamily, halves, make_family, store_tree, tree, write_model

import mergepipe
from mergepipe.checkpoints.contract import FileFingerprint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.deltastore.pack.job import reason_against
from mergepipe.errors import ConflictError, OutputError, RecipeError
from mergepipe.options import MergeOptions, RunOptions
from mergepipe.reports import MergeReport, Progress
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.delta_checkpoints import write_delta
from support.disk_families import weights_digest
from support.flat_options import call_flat
from support.slow_cases import slow_unless

PAGE_BYTES = 4096
SAMPLE_BYTES = 256 << 10
TIGHT = 48 << 20
TORCH_FILE = FileFingerprint("model.bin", 1, "1", "")


@pytest.fixture(scope="module", name="family")
def make_shared_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module", name="wanted")
def pack_family(family: PackFamily) -> dict[str, bytes]:
    mergepipe.pack(family.base, family.experts, family.root / "wanted", threads=1)
    return store_tree(family.root / "wanted")


def merge(family: PackFamily, place: Path, operator: str = "task_arithmetic", **options: object) -> MergeReport:
    recipe = family.recipe(operator)
    return call_flat(mergepipe.merge, recipe, place / "out", home=place / "home", **options)


@pytest.mark.parametrize(
    ("memory", "threads"), slow_unless({(TIGHT, 3), (512 << 20, 1)}.__contains__, product((TIGHT, 512 << 20), (1, 3)))
)
@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "dare_ties"])
def test_merge__packs_what_pack_would_and_merges_the_same(
    family: PackFamily,
    wanted: dict[str, bytes],
    tmp_path: Path,
    operator: str,
    memory: int,
    threads: int,
) -> None:
    plain = merge(family, tmp_path / "plain", operator, threads=threads, memory_bytes=memory)
    report = merge(family, tmp_path / "pack", operator, threads=threads, memory_bytes=memory, pack=tmp_path / "stores")
    assert store_tree(tmp_path / "stores") == wanted
    assert weights_digest(tmp_path / "pack") == weights_digest(tmp_path / "plain")
    assert [each.store.name for each in report.packed] == ["expert-1", "expert-2"]
    assert all(each.is_new for each in report.packed)
    assert report.not_packed == ()
    assert (report.base_bytes, report.expert_bytes) == (plain.base_bytes, plain.expert_bytes)


@pytest.mark.parametrize(("memory", "n_sampled"), [(TIGHT, 1), (512 << 20, 0)])
def test_merge__with_packing_reads_hardly_more(family: PackFamily, tmp_path: Path, memory: int, n_sampled: int) -> None:
    merge(family, tmp_path / "warm", memory_bytes=memory, pack=tmp_path / "warm-stores")
    plain = read_bytes(lambda: merge(family, tmp_path / "plain", memory_bytes=memory))
    packing = read_bytes(lambda: merge(family, tmp_path / "pack", memory_bytes=memory, pack=tmp_path / "stores"))
    files = {path: path.stat().st_size for expert in family.experts for path in expert.iterdir()}
    weights = {path: size for path, size in files.items() if path.suffix == ".safetensors"}
    samples = n_sampled * 3 * SAMPLE_BYTES  # of tensors that do not lie in one buffer as a whole
    few = (len(weights) + 8) * 2 * PAGE_BYTES  # headers again, and what is looked up about the process
    assert packing - plain <= samples + sum(files.values()) - sum(weights.values()) + few
    assert sum(weights.values()) > 3 * (samples + few)


def read_bytes(action: Callable[[], object]) -> int:
    """Bytes that this process asks the system for."""

    def counted() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    before = counted()
    action()
    return counted() - before


def test_merge__reads_what_it_does_not_merge_for_the_store_alone(tmp_path: Path) -> None:
    extra = {"extra.weight": halves(np.ones((300, 7), np.float32))}
    rng = np.random.default_rng(1)
    expert = write_model(tmp_path / "odd", {"a.wide": halves(rng.standard_normal((1, 5)).astype(np.float32)), **extra})
    base = write_model(tmp_path / "base", {"a.wide": halves(rng.standard_normal((1, 5)).astype(np.float32))})
    odd = PackFamily(tmp_path, base, (expert,))
    report = merge(odd, tmp_path, pack=tmp_path / "stores", allow_dropped=["extra.*"])
    assert report.packed
    mergepipe.pack(base, [expert], tmp_path / "wanted")
    assert store_tree(tmp_path / "stores") == store_tree(tmp_path / "wanted")


def test_merge__names_who_is_not_packed_and_why_before_it_reads(family: PackFamily, tmp_path: Path) -> None:
    mergepipe.pack(family.base, family.experts[:1], tmp_path / "stores")
    store = tmp_path / "stores" / "expert-1"
    seen: list[Progress] = []
    recipe = family.recipe(experts=[store, family.experts[1]])
    (tmp_path / "stores" / "expert-2").mkdir()
    (tmp_path / "stores" / "expert-2" / "mine").write_text("kept")
    before = tree(tmp_path / "stores")
    report = mergepipe.merge(
        recipe, tmp_path / "out", options=MergeOptions(catalog=False, pack=tmp_path / "stores"), on_progress=seen.append
    )
    reasons = {Path(each.expert).name: each.reason for each in report.not_packed}
    assert reasons["expert-1"] == "it is a delta store already"
    assert "already exists" in reasons["expert-2"]
    assert [notice.split()[0] for notice in seen[0].notices] == [each.expert for each in report.not_packed]
    assert all(not progress.notices for progress in seen[1:])
    assert (report.packed, tree(tmp_path / "stores")) == ((), before)


def test_merge__names_differences_and_weights_in_other_files(family: PackFamily, tmp_path: Path) -> None:
    write_delta(family.base, family.experts[0], tmp_path / "delta")
    recipe = family.recipe(experts=[tmp_path / "delta", family.experts[1]])
    report = mergepipe.merge(recipe, tmp_path / "out", options=MergeOptions(catalog=False, pack=tmp_path / "stores"))
    assert [each.reason for each in report.not_packed] == ["holds differences from a base, not weights"]
    assert [each.store.name for each in report.packed] == ["expert-2"]
    found = reason_against(replace(open_checkpoint(LocalStore(), Location.local(family.base)), files=(TORCH_FILE,)))
    assert found == "model.bin is not a safetensors file"


def test_merge__leaves_stores_that_are_there_and_names_them(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    mergepipe.pack(family.base, family.experts[1:], tmp_path / "stores")
    report = merge(family, tmp_path, pack=tmp_path / "stores")
    assert [each.store.name for each in report.packed] == ["expert-1"]
    assert "was packed before" in report.not_packed[0].reason
    assert store_tree(tmp_path / "stores") == wanted


def test_merge__packs_nothing_without_a_base(family: PackFamily, tmp_path: Path) -> None:
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (family.base, family.experts[0])]
    recipe = tmp_path / "r.yml"
    recipe.write_text(json.dumps({"merge_method": "linear", "models": models, "dtype": "bfloat16"}))
    report = mergepipe.merge(recipe, tmp_path / "out", options=MergeOptions(catalog=False, pack=tmp_path / "stores"))
    assert [each.reason for each in report.not_packed] == ["the recipe names no base_model"]
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize("option", [{"budget": "50%"}, {"target_error": 0.1}, {"resume": True}])
def test_merge__refuses_options_that_read_parts(family: PackFamily, tmp_path: Path, option: dict[str, object]) -> None:
    with pytest.raises(RecipeError) as caught:
        merge(family, tmp_path, pack=tmp_path / "stores", **option)  # type: ignore[arg-type]
    assert caught.value.code == "option.pair"
    assert not (tmp_path / "stores").exists()


def test_merge__refuses_stores_inside_its_output(family: PackFamily, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        merge(family, tmp_path, pack=tmp_path / "out")
    assert caught.value.code == "output.overlaps-input"
    assert not (tmp_path / "out").exists()


def test_merge__that_fails_publishes_no_store(family: PackFamily, tmp_path: Path) -> None:
    own = PackFamily(tmp_path, family.base, (shutil.copytree(family.experts[0], tmp_path / "expert-1"),))

    def touch(progress: Progress) -> None:
        if progress.phase == "publish":
            os.utime(tmp_path / "expert-1" / "model.safetensors", ns=(1, 1))

    with pytest.raises(ConflictError) as caught:
        merge(own, tmp_path, pack=tmp_path / "stores", on_progress=touch)
    assert caught.value.code == "input.changed"
    assert not (tmp_path / "stores").exists()
    assert not (tmp_path / "out").exists()


def test_merge__with_packing_reuses_nothing(family: PackFamily, wanted: dict[str, bytes], tmp_path: Path) -> None:
    merge(family, tmp_path / "first")
    shutil.copytree(tmp_path / "first" / "home", tmp_path / "again" / "home")
    report = merge(family, tmp_path / "again", pack=tmp_path / "stores")
    assert report.reused_bytes == 0
    assert store_tree(tmp_path / "stores") == wanted


@pytest.mark.parametrize("block_elements", [None, 16384 * 3])
def test_analyze__packs_what_pack_would(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path, block_elements: int | None
) -> None:
    report = mergepipe.analyze(
        family.base,
        family.experts,
        pack=tmp_path / "stores",
        block_elements=block_elements,
        options=RunOptions(home=tmp_path / "home"),
    )
    assert store_tree(tmp_path / "stores") == wanted
    assert [each.store.name for each in report.packed] == ["expert-1", "expert-2"]
    plain = mergepipe.analyze(
        family.base, family.experts, block_elements=block_elements, options=RunOptions(home=tmp_path / "other")
    )
    assert (report.base_bytes, report.expert_bytes) == (plain.base_bytes, plain.expert_bytes)


def test_analyze__packs_what_is_known_already_and_not_with_a_probe(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    mergepipe.analyze(family.base, family.experts, options=RunOptions(home=tmp_path / "home"))
    report = mergepipe.analyze(
        family.base, family.experts, pack=tmp_path / "stores", options=RunOptions(home=tmp_path / "home")
    )
    assert report.expert_bytes == 0
    assert store_tree(tmp_path / "stores") == wanted
    with pytest.raises(RecipeError) as caught:
        mergepipe.analyze(
            family.base,
            family.experts,
            pack=tmp_path / "more",
            probe_fraction=0.1,
            options=RunOptions(home=tmp_path / "home"),
        )
    assert caught.value.code == "option.pair"


def test_analyze__packs_an_expert_once_that_is_named_twice(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    experts = [*family.experts, family.experts[0]]
    report = mergepipe.analyze(
        family.base, experts, pack=tmp_path / "stores", options=RunOptions(home=tmp_path / "home")
    )
    assert [each.reason for each in report.not_packed] == ["it is named twice, and packed once"]
    assert store_tree(tmp_path / "stores") == wanted
