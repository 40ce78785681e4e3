"""Statistics in files: another machine plans as the first did; a file beside a model counts for that model alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mergepipe
from mergepipe import api
from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.statistics_file import STATISTICS_NAME, StatisticsFile, parse_statistics
from mergepipe.checkpoints.formats.safetensors import FIRST_READ_BYTES
from mergepipe.errors import CorruptError
from mergepipe.options import RunOptions
from mergepipe.planning.plan import Plan
from support.hub_server import HubServer, hub_server
from support.small_merges import RECIPES, Bench, make_bench

NAMES = ("base", "expert1", "expert2")
RECIPE = RECIPES["ties"]


def analyse(
    bench: Bench, home: Path, *experts: str, import_from: Sequence[Path] = (), export_to: Path | None = None
) -> mergepipe.AnalyzeReport:
    places, options = [bench.folder / name for name in experts], RunOptions(home=home, threads=2)
    return api.analyze(bench.folder / "base", places, import_from=import_from, export_to=export_to, options=options)


def plan(bench: Bench, home: Path) -> Plan:
    return mergepipe.plan(bench.write(RECIPE), "50%", home=home)


@pytest.fixture(name="first", scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A machine that analysed two experts, and exported what it knows."""
    bench = make_bench(tmp_path_factory.mktemp("first"))
    report = analyse(bench, bench.home, "expert1", "expert2", export_to=bench.folder / STATISTICS_NAME)
    assert report.exported is not None
    assert (report.exported.pairs, report.exported.tensors) == (2, 8)
    assert report.exported.file_bytes == (bench.folder / STATISTICS_NAME).stat().st_size
    return bench


@pytest.fixture(name="second")
def other_machine(first: Bench, tmp_path: Path) -> Bench:
    """A machine to which the models were copied."""
    for name in NAMES:
        shutil.copytree(first.folder / name, tmp_path / name)
    return Bench(tmp_path)


def same_choice(one: Plan, other: Plan) -> bool:
    ids = ([model.content_id for model in each.models] for each in (one, other))
    return one.tensors == other.tensors and next(ids) == next(ids) and one.digest == other.digest


def test_import__another_machine_plans_as_the_first_one(first: Bench, second: Bench) -> None:
    before = plan(first, first.home)
    report = api.import_statistics(first.folder / STATISTICS_NAME, home=second.home)
    assert (report.pairs, report.tensors, report.new_tensors) == (2, 8, 8)
    assert api.import_statistics(first.folder / STATISTICS_NAME, home=second.home).new_tensors == 0
    assert not same_choice(plan(second, second.home), before)  # no digest is known yet
    analysed = analyse(second, second.home, "expert1", "expert2")
    assert (analysed.base_bytes, analysed.expert_bytes) == (0, 0)
    assert [(each.analyzed_tensors, each.same_as) for each in analysed.experts] == [(0, "imported statistics")] * 2
    assert same_choice(plan(second, second.home), before)
    assert api.gc(home=second.home).garbage == ()


def test_analyze__imports_before_it_reads(first: Bench, second: Bench) -> None:
    report = analyse(second, second.home, "expert1", import_from=[first.folder / STATISTICS_NAME])
    assert report.imported is not None
    assert (report.expert_bytes, report.experts[0].analyzed_tensors) == (0, 0)
    assert report.analysis_bytes >= second.only_file("expert1").stat().st_size


def test_import__keeps_what_was_analysed_here(first: Bench, second: Bench) -> None:
    experts, options = [second.folder / "expert1"], RunOptions(home=second.home)
    api.analyze(second.folder / "base", experts, densities=[0.33], options=options)
    assert api.import_statistics(first.folder / STATISTICS_NAME, home=second.home).new_tensors == 4
    with Catalog.open(second.home) as catalog:
        (expert,) = [row for row in catalog.models() if row.path.name == "expert1"]
        (base,) = [row for row in catalog.models() if row.path.name == "base"]
        assert all(0.33 in one.densities_D for one in catalog.statistics(expert, base).values())


def test_import__of_a_damaged_file_records_nothing(first: Bench, tmp_path: Path) -> None:
    raw = (first.folder / STATISTICS_NAME).read_bytes()
    (tmp_path / "damaged").write_bytes(raw[:-40] + b"x" + raw[-39:])
    with pytest.raises(CorruptError, match="its checksum does not fit"):
        api.import_statistics(tmp_path / "damaged", home=tmp_path / "home")
    assert api.catalog_stats(home=tmp_path / "home").pairs == 0


# --- beside a model ---


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


def put_beside(hub: HubServer, first: Bench, content: bytes) -> None:
    for name in NAMES[1:]:
        hub.commit(f"org/{name}", {**files_of(first, name), STATISTICS_NAME: content})


def plan_of_hub(folder: Path, *, home: Path | None = None) -> Plan:
    text = RECIPE.text()
    for name in NAMES:
        text = text.replace(f'"{name}"', f'"hf://org/{name}"')
    (folder / "recipe.yml").write_text(text)
    return mergepipe.plan(folder / "recipe.yml", "50%", home=home or folder / "home")


def test_plan__of_the_hub_after_an_import_reads_headers_alone(hub: HubServer, first: Bench, tmp_path: Path) -> None:
    api.import_statistics(first.folder / STATISTICS_NAME, home=tmp_path / "home")
    decided = plan_of_hub(tmp_path)
    assert hub.content_bytes <= 3 * FIRST_READ_BYTES
    assert decided.tensors == plan_of_hub(tmp_path, home=first.home).tensors


def test_plan__uses_statistics_beside_a_model(hub: HubServer, first: Bench, tmp_path: Path) -> None:
    raw = (first.folder / STATISTICS_NAME).read_bytes()
    put_beside(hub, first, raw)
    decided = plan_of_hub(tmp_path)
    assert hub.content_bytes < 3 * 2048 + 2 * len(raw)
    analysed = plan_of_hub(tmp_path, home=first.home)
    assert [tensor.access for tensor in decided.tensors] == [tensor.access for tensor in analysed.tensors]
    with Catalog.open(tmp_path / "home") as catalog:
        assert catalog.stats().pairs == 0


@pytest.mark.parametrize("what", ["of another model", "of another base", "damaged"])
def test_plan__uses_nothing_else_beside_models(hub: HubServer, first: Bench, tmp_path: Path, what: str) -> None:
    without = plan_of_hub(tmp_path)
    raw = (first.folder / STATISTICS_NAME).read_bytes()
    file = parse_statistics(raw, "x")
    if what == "of another model":  # each file has the rows of the other one's content
        for name, pair in zip(NAMES[1:], file.pairs[::-1], strict=True):
            content = StatisticsFile(file.contents, (pair,)).to_bytes()
            hub.commit(f"org/{name}", {**files_of(first, name), STATISTICS_NAME: content})
    elif what == "of another base":
        put_beside(hub, first, raw)
        hub.commit("org/base", {**files_of(first, "base"), "model.safetensors": other_base(first)})
    else:
        put_beside(hub, first, raw[:-1])
    assert plan_of_hub(tmp_path).tensors == without.tensors


def other_base(bench: Bench) -> bytes:
    content = bytearray(bench.only_file("base").read_bytes())
    content[-1] ^= 1
    return bytes(content)
