"""A model that was moved, copied, linked or downloaded again keeps its statistics; one of other bytes gets none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

import mergepipe
from mergepipe import api
from mergepipe.catalog.catalog import Catalog
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.file_digests import read_digests, with_digests
from mergepipe.errors import ConflictError
from mergepipe.options import RunOptions
from mergepipe.reports import AnalyzeReport
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.small_merges import RECIPES, Bench, make_bench

Statistics = dict[str, bytes]
UNSAMPLED_FROM_THE_END = 20_001


def analyse(bench: Bench, *experts: str, base: str = "base", home: Path | None = None) -> AnalyzeReport:
    options = RunOptions(home=home or bench.home, threads=2)
    return api.analyze(bench.folder / base, [bench.folder / each for each in experts], options=options)


def opened(bench: Bench, name: str) -> Checkpoint:
    return open_checkpoint(LocalStore(), Location.local(bench.folder / name))


def statistics(bench: Bench, expert: str, base: str = "base", home: Path | None = None) -> Statistics:
    """What the catalog knows of a pair, by tensor."""
    with Catalog.open(home or bench.home) as catalog:
        rows = [catalog.model_for(opened(bench, name)) for name in (expert, base)]
        if rows[0] is None or rows[1] is None:
            return {}
        return {name: each.blocks_B.tobytes() for name, each in catalog.statistics(rows[0], rows[1]).items()}


def expect_of_scratch(bench: Bench, *experts: str, base: str = "base") -> None:
    home = bench.folder / "fresh-home"
    analyse(bench, *experts, base=base, home=home)
    for expert in experts:
        assert statistics(bench, expert, base) == statistics(bench, expert, base, home) != {}


@pytest.fixture(name="made", scope="module")
def make_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    make_bench(folder, n_experts=3)
    return folder


@pytest.fixture(name="bench")
def analysed(made: Path, tmp_path: Path) -> Bench:
    bench = Bench(Path(shutil.copytree(made, tmp_path / "bench")))
    assert [each.same_as for each in analyse(bench, "expert1", "expert2").experts] == [None, None]
    return bench


def move(bench: Bench, source: str, target: str) -> None:
    (bench.folder / source).rename(bench.folder / target)


def copy(bench: Bench, source: str, target: str) -> None:
    shutil.copytree(bench.folder / source, bench.folder / target)


def download(bench: Bench, source: str, target: str) -> None:
    shutil.copytree(bench.folder / source, bench.folder / target, copy_function=shutil.copyfile)
    os.utime(bench.only_file(target), ns=(0, 0))


def link(bench: Bench, source: str, target: str) -> None:
    shutil.copytree(bench.folder / source, bench.folder / target, copy_function=os.link)


def bare(bench: Bench, source: str, target: str) -> None:
    shutil.copyfile(bench.only_file(source), bench.folder / target)


Put = Callable[[Bench, str, str], None]


@pytest.mark.parametrize("put", [move, copy, download, link])
@pytest.mark.parametrize("moves_base", [False, True])
def test_analyze__knows_a_model_by_its_content(bench: Bench, put: Put, moves_base: bool) -> None:
    size = bench.only_file("expert1").stat().st_size
    put(bench, "expert1", "again")
    if moves_base:
        put(bench, "base", "base-again")
    base = "base-again" if moves_base else "base"
    assert statistics(bench, "again", base) == {}
    report = analyse(bench, "again", base=base)
    (expert,) = report.experts
    assert (expert.same_as, expert.analyzed_tensors) == (str(bench.folder / "expert1"), 0)
    assert (report.base_bytes, report.expert_bytes) == (0, 0)
    assert size <= report.analysis_bytes <= (size + 32 * 3 * 4096) * (1 + moves_base)
    expect_of_scratch(bench, "again", base=base)
    report = analyse(bench, "again", base=base)
    assert (report.analysis_bytes, report.experts[0].analyzed_tensors) == (0, 0)


def test_analyze__knows_a_bare_file_of_the_same_bytes(bench: Bench) -> None:
    bare(bench, "expert1", "again.safetensors")
    assert analyse(bench, "again.safetensors").experts[0].same_as == str(bench.folder / "expert1")


def test_analyze__takes_a_changed_byte_for_what_it_is(bench: Bench) -> None:
    copy(bench, "expert1", "changed")
    path = bench.only_file("changed")
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-UNSAMPLED_FROM_THE_END] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = analyse(bench, "changed")
    assert report.experts[0].same_as is None
    assert report.experts[0].analyzed_tensors == report.experts[0].comparable_tensors
    assert report.analysis_bytes >= path.stat().st_size  # it looked the same until its digest was taken
    expect_of_scratch(bench, "changed")


def test_analyze__a_sibling_is_not_read_twice(bench: Bench) -> None:
    report = analyse(bench, "expert3")
    assert report.experts[0].same_as is None
    assert report.analysis_bytes <= 2 * 32 * 3 * 4096
    expect_of_scratch(bench, "expert3")


@pytest.mark.parametrize("is_exchange", [False, True])
def test_analyze__the_same_name_with_other_content_gets_its_own(bench: Bench, is_exchange: bool) -> None:
    move(bench, "expert1", "aside")
    move(bench, "expert2" if is_exchange else "expert3", "expert1")
    assert statistics(bench, "expert1") == {}
    if is_exchange:
        move(bench, "aside", "expert2")
        assert [each.analyzed_tensors for each in analyse(bench, "expert1", "expert2").experts] == [0, 0]
    else:
        assert analyse(bench, "expert1").experts[0].same_as is None
    expect_of_scratch(bench, "expert1")


def test_analyze__digests_are_those_of_the_files(bench: Bench) -> None:
    with Catalog.open(bench.home) as catalog:
        for name in ("base", "expert1", "expert2"):
            (file,) = catalog.with_known_digests(opened(bench, name)).files
            assert file.sha256 == hashlib.sha256(bench.only_file(name).read_bytes()).hexdigest()
        assert catalog.with_known_digests(opened(bench, "expert3")).files[0].sha256 is None


def test_gc__collects_digests_of_files_that_are_gone_and_made_no_snapshot(bench: Bench) -> None:
    recipe = RECIPES["slerp"]
    bench.merge(recipe, "out")  # of expert1
    move(bench, "expert1", "expert8")
    move(bench, "expert2", "expert9")
    found = api.gc(dry_run=True, home=bench.home).garbage
    assert [each.what for each in found if each.reason.startswith("files")] == ["1 digest"]
    api.gc(home=bench.home)
    with Catalog.open(bench.home) as catalog:
        assert catalog.gone_digests() == ()


def test_plan__of_a_moved_model_uses_statistics_once_it_is_known(bench: Bench) -> None:
    recipe = RECIPES["task_arithmetic"]
    before = mergepipe.plan(bench.write(recipe), budget="50%", home=bench.home)
    for name in ("base", "expert1", "expert2"):
        copy(bench, name, f"{name}-copy")
        shutil.rmtree(bench.folder / name)
        move(bench, f"{name}-copy", name)
    unknown = mergepipe.plan(bench.write(recipe), budget="50%", home=bench.home)
    assert unknown.fallbacks != before.fallbacks
    analyse(bench, "expert1", "expert2")
    known = mergepipe.plan(bench.write(recipe), budget="50%", home=bench.home)
    assert (known.tensors, known.fallbacks) == (before.tensors, before.fallbacks)


def digest_in_passing(bench: Bench, *names: str, home: Path | None = None) -> None:
    """Record the digests of models, as an analysis does."""
    store = LocalStore()
    with Catalog.open(home or bench.home) as catalog:
        for name in names:
            checkpoint = opened(bench, name)
            catalog.register_model(with_digests(checkpoint, read_digests(store, checkpoint, 1)))


def test_run__a_plan_holds_for_a_copy_put_in_the_place_of_a_model(bench: Bench) -> None:
    plan = mergepipe.plan(bench.write(RECIPES["task_arithmetic"]), budget="50%", home=bench.home)
    options = RunOptions(home=bench.home)
    copy(bench, "expert1", "again")
    shutil.rmtree(bench.folder / "expert1")
    move(bench, "again", "expert1")
    with pytest.raises(ConflictError):
        mergepipe.run(plan, bench.folder / "out", options=options)
    digest_in_passing(bench, "expert1")
    mergepipe.run(plan, bench.folder / "out", options=options)
    manifest = read_manifest_value(LocalStore(), Location.local(bench.folder / "out"))
    assert manifest.inputs[1].files[0].sha256 is not None
    assert api.verify(bench.folder / "out").is_sound


def test_manifest__with_digests_keeps_to_its_schema(bench: Bench) -> None:
    bench.merge(RECIPES["linear"], "out")
    content = json.loads((bench.folder / "out" / MANIFEST_NAME).read_bytes())
    assert {"sha256"} <= {key for source in content["inputs"] for file in source["files"] for key in file}
    schema = resources.files("mergepipe").joinpath("schemas/manifest.schema.json").read_bytes()
    jsonschema.validate(content, json.loads(schema))
