"""Statistics belong to contents; the plan that a resumed merge follows is the one stored, or none."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

import mergepipe
from mergepipe import Plan
from mergepipe.catalog.statistics_file import STATISTICS_NAME, parse_statistics, statistics_folder
from mergepipe.checkpoints.safetensors import FIRST_READ_BYTES
from mergepipe.errors import ConflictError, UnsupportedError
from mergepipe.options import RunOptions
from mergepipe.reports import AnalyzeReport
from mergepipe.runs.stored_plan import STORED_PLAN_NAME, store_plan, stored_plan
from support.disk_families import make_models, write_family
from support.hub_server import HubServer, hub_server
from support.local_models import manifest_of
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.recorded_statistics import opened_with_digests, statistics_on_record
from support.small_merges import RECIPES, Bench, make_bench

NAMES = ("base", "expert1", "expert2")
RECIPE = RECIPES["ties"]
UNSAMPLED_FROM_THE_END = 20_001


def analyse(bench: Bench, *experts: str, base: str = "base", home: Path | None = None) -> AnalyzeReport:
    options = RunOptions(home=home or bench.home, threads=2)
    return mergepipe.analyze(bench.folder / base, [bench.folder / each for each in experts], options=options)


def recorded(bench: Bench, expert: str, base: str = "base", home: Path | None = None) -> bytes | None:
    """What is on record of a pair."""
    file = statistics_on_record(home or bench.home, bench.folder / base, bench.folder / expert)
    return None if file is None else file.to_bytes()


def expect_of_scratch(bench: Bench, expert: str, base: str = "base") -> None:
    home = bench.folder / "fresh-home"
    analyse(bench, expert, base=base, home=home)
    assert recorded(bench, expert, base) == recorded(bench, expert, base, home) is not None


def plan(bench: Bench, home: Path) -> Plan:
    return mergepipe.plan(bench.write(RECIPE), "50%", select="norm", home=home)


def same_choice(one: Plan, other: Plan) -> bool:
    ids = ([model.content_id for model in each.models] for each in (one, other))
    return one.tensors == other.tensors and next(ids) == next(ids) and one.digest == other.digest


@pytest.fixture(name="first", scope="module")
def analysed_once(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A machine that analysed two experts."""
    bench = make_bench(tmp_path_factory.mktemp("first"), n_experts=3)
    report = analyse(bench, "expert1", "expert2")
    assert [expert.analyzed_tensors for expert in report.experts] == [4, 4]
    folder = statistics_folder(bench.home)
    assert sorted(folder.iterdir()) == sorted(expert.statistics for expert in report.experts if expert.statistics)
    return bench


@pytest.fixture(name="bench")
def analysed(first: Bench, tmp_path: Path) -> Bench:
    """The same, to be changed; what was copied has other versions, so that it is analysed there."""
    bench = Bench(Path(shutil.copytree(first.folder, tmp_path / "bench")))
    analyse(bench, "expert1", "expert2")
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


# --- contents ---


@pytest.mark.thorough
@pytest.mark.parametrize("put", [move, copy, download, link, bare])
def test_analyze__of_the_same_bytes_elsewhere_makes_the_same_file(
    bench: Bench, put: Callable[[Bench, str, str], None]
) -> None:
    before = recorded(bench, "expert1")
    target = "again.safetensors" if put is bare else "again"
    put(bench, "expert1", target)
    analyse(bench, target)
    assert recorded(bench, target) == before is not None
    assert len(list(statistics_folder(bench.home).iterdir())) == 2
    again = analyse(bench, target)
    assert (again.base_bytes, again.expert_bytes, again.analysis_bytes) == (0, 0, 0)


def test_analyze__takes_a_changed_byte_for_what_it_is(bench: Bench) -> None:
    copy(bench, "expert1", "changed")
    path = bench.only_file("changed")
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-UNSAMPLED_FROM_THE_END] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = analyse(bench, "changed")
    assert report.experts[0].analyzed_tensors == report.experts[0].comparable_tensors
    assert recorded(bench, "changed") != recorded(bench, "expert1")
    expect_of_scratch(bench, "changed")


def test_analyze__the_same_name_with_other_content_gets_its_own(bench: Bench) -> None:
    move(bench, "expert1", "aside")
    move(bench, "expert3", "expert1")
    assert recorded(bench, "expert1") is None
    assert analyse(bench, "expert1").experts[0].analyzed_tensors == 4
    expect_of_scratch(bench, "expert1")


def test_analyze__takes_digests_from_what_it_reads(bench: Bench) -> None:
    for name in NAMES:
        (file,) = opened_with_digests(bench.home, bench.folder / name).file_ids
        assert file.sha256 == hashlib.sha256(bench.only_file(name).read_bytes()).hexdigest()
    assert opened_with_digests(bench.home, bench.folder / "expert3").file_ids[0].sha256 is None
    analyse(bench, "expert3")
    assert opened_with_digests(bench.home, bench.folder / "expert3").file_ids[0].sha256 is not None


def test_analyze__keeps_the_cuts_that_were_asked_for_before(bench: Bench) -> None:
    experts, options = [bench.folder / "expert1"], RunOptions(home=bench.home)
    for density in (0.33, 0.37):
        mergepipe.analyze(bench.folder / "base", experts, densities=[density], options=options)
    file = statistics_on_record(bench.home, bench.folder / "base", bench.folder / "expert1")
    assert file is not None
    assert {0.33, 0.37} <= set(file.densities)
    assert all({0.33, 0.37} <= set(one.densities_D.tolist()) for one in file.tensors.values())


def test_analyze__makes_a_damaged_file_again_and_says_so(bench: Bench) -> None:
    before = recorded(bench, "expert1")
    path = analyse(bench, "expert1").experts[0].statistics
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    report_of_merge = bench.merge(RECIPE, "out")
    (notice,) = [line for line in report_of_merge.notices if "statistics" in line]
    assert f"{path}: is damaged: its checksum does not fit" in notice
    with pytest.raises(UnsupportedError, match=re.escape(str(path))):
        plan(bench, bench.home)
    report = analyse(bench, "expert1")
    assert report.experts[0].analyzed_tensors == 4
    assert str(path) in report.notices[0]
    assert recorded(bench, "expert1") == before


def test_run__a_plan_holds_for_a_copy_put_in_the_place_of_a_model(bench: Bench) -> None:
    decided = plan(bench, bench.home)
    options = RunOptions(home=bench.home)
    copy(bench, "expert1", "again")
    shutil.rmtree(bench.folder / "expert1")
    move(bench, "again", "expert1")
    with pytest.raises(ConflictError):
        mergepipe.run(decided, bench.folder / "out", options=options)
    analyse(bench, "expert1")
    mergepipe.run(decided, bench.folder / "out", options=options)
    manifest = manifest_of(bench.folder / "out")
    assert manifest.inputs[1].files[0].sha256 is not None
    assert mergepipe.verify(bench.folder / "out").is_sound


def test_manifest__has_the_digests_of_inputs(bench: Bench) -> None:
    bench.merge(RECIPES["linear"], "out")
    content = json.loads((bench.folder / "out" / MANIFEST_NAME).read_bytes())
    assert {"sha256"} <= {key for source in content["inputs"] for file in source["files"] for key in file}


# --- another machine ---


def test_plan__of_a_home_with_copied_files_is_that_of_the_first_machine(first: Bench, tmp_path: Path) -> None:
    second = Bench(tmp_path)
    for name in NAMES:
        shutil.copytree(first.folder / name, tmp_path / name)
    shutil.copytree(statistics_folder(first.home), statistics_folder(second.home))
    before = plan(first, first.home)
    assert not same_choice(plan(second, second.home), before)  # no digest is known yet
    analyse(second, "expert1", "expert2")
    assert same_choice(plan(second, second.home), before)
    assert mergepipe.gc(home=second.home).garbage == ()


@pytest.fixture(name="hub")
def with_models(first: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        for name in NAMES:
            server.commit(f"org/{name}", files_of(first, name))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield server


def files_of(bench: Bench, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (bench.folder / name).iterdir()}


def statistics_of(first: Bench, name: str) -> bytes:
    content = recorded(first, name)
    assert content is not None
    return content


def put_beside(hub: HubServer, first: Bench, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        hub.commit(f"org/{name}", {**files_of(first, name), STATISTICS_NAME: content})


def plan_of_hub(folder: Path, *, home: Path | None = None) -> Plan:
    text = RECIPE.text()
    for name in NAMES:
        text = text.replace(f'"{name}"', f'"hf://org/{name}"')
    (folder / "recipe.yml").write_text(text)

    return mergepipe.plan(folder / "recipe.yml", "50%", select="norm", home=home or folder / "home")


def test_plan__of_the_hub_with_copied_files_reads_headers_alone(hub: HubServer, first: Bench, tmp_path: Path) -> None:
    shutil.copytree(statistics_folder(first.home), statistics_folder(tmp_path / "home"))
    decided = plan_of_hub(tmp_path)
    assert hub.content_bytes <= 3 * FIRST_READ_BYTES
    assert decided.tensors == plan_of_hub(tmp_path, home=first.home).tensors
    assert decided.tensors != plan_of_hub(tmp_path, home=tmp_path / "other").tensors


def test_plan__uses_statistics_beside_a_model(hub: HubServer, first: Bench, tmp_path: Path) -> None:
    put_beside(hub, first, {name: statistics_of(first, name) for name in NAMES[1:]})
    decided = plan_of_hub(tmp_path)
    analysed = plan_of_hub(tmp_path, home=first.home)
    assert [tensor.access for tensor in decided.tensors] == [tensor.access for tensor in analysed.tensors]
    assert not statistics_folder(tmp_path / "home").exists()


@pytest.mark.parametrize("what", ["of another model", "of another base", "damaged"])
def test_plan__uses_nothing_else_beside_models(hub: HubServer, first: Bench, tmp_path: Path, what: str) -> None:
    without = plan_of_hub(tmp_path)
    one, two = (statistics_of(first, name) for name in NAMES[1:])
    assert parse_statistics(one, "x").expert != parse_statistics(two, "x").expert
    if what == "of another model":
        put_beside(hub, first, {"expert1": two, "expert2": one})
    elif what == "of another base":
        put_beside(hub, first, {"expert1": one, "expert2": two})
        hub.commit("org/base", {**files_of(first, "base"), "model.safetensors": other_base(first)})
    else:
        put_beside(hub, first, {"expert1": one[:-1], "expert2": two[:-1]})
    assert plan_of_hub(tmp_path).tensors == without.tensors


def other_base(bench: Bench) -> bytes:
    content = bytearray(bench.only_file("base").read_bytes())
    content[-1] ^= 1
    return bytes(content)


def test_stored_plan__is_none_where_any_byte_was_changed(tmp_path: Path) -> None:
    family = write_family(tmp_path / "family", make_models(1))
    recipe = recipe_of("ties", {family.places[1]: {"weight": 1, "density": 0.5}}, family.places[0])
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home", allow_dropped=("*",), block_elements=16384)
    store_plan(tmp_path, "key", plan)
    stored = tmp_path / STORED_PLAN_NAME
    content, random = stored.read_bytes(), Random(5)
    in_a_path = content.index(str(family.places[1]).encode())
    for at in (in_a_path + 1, *random.sample(range(len(content)), 40)):
        stored.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert stored_plan(tmp_path, "key") is None
    stored.write_bytes(content)
    assert stored_plan(tmp_path, "key") == plan
