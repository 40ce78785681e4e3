"""Tests of benchmarks.reproduce: pages follow from stored results, and those in docs are what these give."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import Tool
from benchmarks.process import BenchmarkError, Clocks, available_memory_bytes, busy_seconds, processors_of_others
from benchmarks.recipes import Case
from benchmarks.reproduce import models, workplace
from benchmarks.reproduce.__main__ import Folders, measure_parts
from benchmarks.reproduce.pages import Figure, Page, Series, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.registry import PARTS
from benchmarks.reproduce.results import Results, ResultsError, this_machine
from benchmarks.reproduce.scaling import other_cells
from benchmarks.reproduce.sizes import SIZES, Size
from benchmarks.reproduce.workplace import NoRoomError, Workplace
from benchmarks.reproduce.writing import markdown_files, papers_text, stored_pages

DOCS = Path(__file__).parents[2] / "docs"
STORED = DOCS / "benchmarks/results"
TOY = {"name": "toy"}


@pytest.mark.thorough
def test_markdown_files__are_those_in_the_documentation() -> None:
    texts = markdown_files(PARTS, STORED)
    assert len(texts) > 1
    for name, text in texts.items():
        assert (DOCS / "benchmarks" / name).read_text() == text, f"{name} is stale: make pages"
    assert {path.name for path in (DOCS / "benchmarks").glob("*.md")} == set(texts)
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert [name for name in texts if f"benchmarks/{name}" not in navigation] == []


@pytest.mark.thorough
def test_figures__are_drawn_from_the_stored_results() -> None:
    figures = [figure for _, page in stored_pages(PARTS, STORED).values() for figure in page.figures]
    assert figures
    for figure in figures:
        drawing = (DOCS / f"benchmarks/{figure.name}.svg").read_text()
        assert f"results {figure.digest}" in drawing, f"{figure.name}.svg is stale: make pages"
    assert {path.stem for path in (DOCS / "benchmarks").glob("*.svg")} == {figure.name for figure in figures}


@pytest.mark.thorough
def test_papers_page__has_the_figures_of_the_stored_results() -> None:
    page = (DOCS / "papers.md").read_text()
    assert page == papers_text(page, PARTS, STORED)


@pytest.mark.thorough
def test_pages__begin_with_what_they_mean() -> None:
    for name, text in markdown_files(PARTS, STORED).items():
        assert re.match(r"# .+\n\n(\*\*|What to expect)", text), name


def test_results__measure_once_and_resume(tmp_path: Path) -> None:
    calls: list[int] = []

    def measured() -> dict[str, int]:
        calls.append(1)
        return {"value": 7}

    first = Results.open(tmp_path, "part", TOY)
    assert first.measure("a/1", measured)["value"] == 7
    resumed = Results.open(tmp_path, "part", TOY)
    assert resumed.measure("a/1", measured)["value"] == 7
    assert calls == [1]
    assert (resumed.machine, resumed.commit) == (first.machine, first.commit)


def test_results__are_measured_where_git_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Results.open(tmp_path, "part", TOY).commit == "unknown"


def test_results__that_go_on_elsewhere_name_both_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Results.open(tmp_path, "part", TOY)
    first.measure("a", lambda: {"value": 7})
    elsewhere = replace(this_machine(), cpu="another processor")
    monkeypatch.setattr("benchmarks.reproduce.results.this_machine", lambda: elsewhere)
    resumed = Results.open(tmp_path, "part", TOY)
    resumed.measure("b", lambda: {"value": 7})
    assert ("cpu" in resumed["a"], resumed["b"]["cpu"]) == (False, "another processor")
    text = Page("Title", "**Meaning.**", ()).markdown(resumed, "make it")
    assert f"{first.machine['cpu']}; 1 of 2 on another processor ([machines]" in text


def test_results__of_another_size_are_replaced_only_if_asked(tmp_path: Path) -> None:
    Results.open(tmp_path, "part", TOY).measure("a", lambda: {"value": 7})
    with pytest.raises(ResultsError, match="--replace"):
        Results.open(tmp_path, "part", {"name": "large"})
    assert "a" in Results.open(tmp_path, "part", TOY)
    assert "a" not in Results.open(tmp_path, "part", {"name": "large"}, replace=True)


def test_workplace__refuses_what_the_disk_does_not_hold(tmp_path: Path) -> None:
    place = Workplace(tmp_path / "work")
    place.check_room(0)
    with pytest.raises(NoRoomError, match="are needed"):
        place.check_room(10**18)


@pytest.mark.parametrize("name", SIZES)
def test_needs__hold_at_least_the_family(name: str) -> None:
    size = SIZES[name]
    for part in ("scaling", "sweep", "overheads", "payoff"):
        needs = PARTS[part].needs(size)
        assert needs.disk_bytes > size.family_bytes
        assert needs.minutes > 0


def test_page__text_table_and_figure_become_markdown(tmp_path: Path) -> None:
    figure = Figure("plot", "A plot", "x", "y", (Series("one", (1.0, 2.0), (3.0, 4.0)),))
    results = Results.open(tmp_path, "part", TOY)
    results.measure("a", lambda: {"value": 7})
    page = Page("Title", "**Meaning.**", ("Text.", Table(("a", "b"), (("1", "2"),)), figure))
    text = page.markdown(results, "make it")
    assert text.startswith(
        "# Title\n\n**Meaning.**\n\nText.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n![A plot](plot.svg)\n\n"
    )
    assert "`make it`" in text
    assert results.date in text
    other = Figure("plot", "A plot", "x", "y", (Series("one", (1.0, 2.0), (3.0, 4.5)),))
    assert figure.digest != other.digest


def results_with(entries: dict[str, dict[str, Any]], cores: int = 2) -> Results:
    machine = {"cpu": "a processor", "cores": cores}
    content = {"machine": machine, "entries": entries, "date": "", "commit": "", "size": TOY, "is_complete": True}
    return Results(Path("part.json"), content)


def results_of(others: list[float], cores: int) -> Results:
    return results_with({str(number): {"load": 6.0, "others": used} for number, used in enumerate(others)}, cores)


def test_is_busy__by_what_other_programs_used_whatever_the_load() -> None:
    assert not results_of([0.0, 0.1, 3.0], cores=2).is_busy
    assert results_of([0.6, 0.1, 0.9], cores=2).is_busy
    assert not results_of([0.6, 0.1, 0.9], cores=8).is_busy
    text = Page("Title", "**Meaning.**", ()).markdown(results_of([0.6, 0.1, 0.9], cores=2), "make it")
    assert "other programs used 0.6 (at most 0.9) on 2 processors. The machine was busy" in text


def test_told_seconds__mark_entries_that_were_slowed_or_measured_elsewhere() -> None:
    results = results_with({"a": {"base_bytes": 2, "expert_bytes": 3, "output_bytes": 1, "floor_seconds": 2.0}})
    assert results.floor_rate == 3.0
    slowed = {"seconds": 2.0, "cpu_seconds": 1.0, "others": 0.9, "cpu": "another"}
    assert [results.told_seconds(slowed, clock) for clock in ("seconds", "cpu_seconds")] == ["~2.00*", "1.00*"]
    assert results.told_seconds({**slowed, "others": 0.1}, "seconds") == "2.00*"


def test_processors_of_others__are_the_busy_ones_less_ours() -> None:
    stat = "cpu  100 20 30 5000 700 1 2 7 90 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert busy_seconds(stat, 100) == pytest.approx(1.6)
    before, after = Clocks(10.0, 100.0, 7.0), Clocks(14.0, 107.0, 11.0)
    assert processors_of_others(before, after) == pytest.approx(0.75)
    assert processors_of_others(before, Clocks(14.0, 103.9, 11.0)) == 0
    assert processors_of_others(before, before) == 0


def test_clocks__count_what_a_child_used() -> None:
    before = Clocks.read()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    after = Clocks.read()
    assert after.ours > before.ours
    assert after.busy > before.busy
    assert after.wall > before.wall


def test_available_memory__is_what_programs_may_still_take() -> None:
    assert available_memory_bytes("MemTotal: 9 kB\nMemFree: 5 kB\nMemAvailable:   7 kB\n") == 7168


@pytest.mark.thorough
def test_peer__for_which_the_memory_is_too_small_has_that_as_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, case = Workplace(tmp_path), Case("linear", (), "")

    def program(text: str) -> Tool:
        return Tool("program", lambda *_: (sys.executable, "-c", text), {})

    monkeypatch.setattr(workplace, "available_memory_bytes", lambda _: 1 << 29)
    entry = place.peer(program("import time; held = b'a' * (1 << 30); time.sleep(60)"), case)
    assert entry["out_of_memory_bytes"] == int(0.95 * (1 << 29))
    assert other_cells(results_of([0.0], cores=2), entry) == ("out of memory", "> 486")
    with pytest.raises(BenchmarkError, match=r"exit code 1\n(?s:.*)another reason"):
        place.peer(program("raise ValueError('another reason')"), case)


def test_models_page__tells_what_is_measured_so_far() -> None:
    entry = {
        "model_bytes": 16_000_000_000, "stored_expert_bytes": 2_000_000_000, "is_packed": True, "expert_bytes": 1,
        "base_bytes": 1, "output_bytes": 1, "kernel_read_bytes": 1, "seconds": 20.0, "cpu_seconds": 10.0,
        "floor_seconds": 10.0, "peak_rss_bytes": 2**30,
    }  # fmt: skip
    entries: dict[str, dict[str, Any]] = {"8b/ties/2/full": {**entry, "load": 0.1, "others": 0.0}}
    first = results_with(entries)
    text = models.PART.page(first).markdown(first, "again")
    assert "2.000 GB each (12.5 %)" in text
    assert "TIES of" not in text
    for k, seconds in ((2, 20.0), (4, 21.0)):
        judged = {"error": 0.25, "relative_l2": 1e-3, "seconds": seconds}
        entries[f"8b/ties/{k}/budget"] = {**entries["8b/ties/2/full"], **judged}
    meaning = models.PART.page(results_with(entries)).meaning
    assert "8b: TIES of 4 experts takes 1.05 times the seconds of 2, errors 0.250 and 0.250." in meaning
    entries["8b/ties/4/budget"]["cpu"] = "a slower one"
    page = models.PART.page(results_with(entries))
    assert "8b: TIES of 2 and 4 experts has errors 0.250 and 0.250." in page.meaning
    text = page.markdown(results_with(entries), "again")
    assert "| 21.00* | 10.00* |" in text
    assert "Times with * are those of a slower one." in text


def test_stored_pages__are_of_results_measured_to_the_end_but_for_parts_that_tell_beginnings(tmp_path: Path) -> None:
    page = Page("Title", "**Meaning.**", ())
    parts = {
        name: Part(name, "", lambda _: Needs(0, 0), lambda *_: None, lambda _: page, tells_beginnings=tells)
        for name, tells in (("whole", False), ("begun", True))
    }
    for name in parts:
        results = Results.open(tmp_path, name, TOY)
        results.measure("a", lambda: {"value": 7})
    pages = stored_pages(parts, tmp_path)
    assert list(pages) == ["begun"]
    assert "**Not completely measured**" in page.markdown(pages["begun"][0], "make it")
    results = Results.open(tmp_path, "whole", TOY)
    results.finish()
    assert set(stored_pages(parts, tmp_path)) == {"whole", "begun"}
    assert "Not measured" not in page.markdown(results, "make it")


# --- measuring parts that are stored already ---


def part_that_measures(entry: dict[str, Any]) -> Part:
    """A part with the one entry `a`."""

    def measure(_place: Workplace, _size: Size, results: Results) -> None:
        results.measure("a", lambda: entry)

    return Part("part", "a part", lambda _size: Needs(0, 0), measure, lambda _results: Page("Part", "**none**", ()))


def measured_again(tmp_path: Path, *, seconds: float, size: str = "toy", replace: bool = False) -> None:
    part = part_that_measures({"seconds": seconds, "bytes": 100, "name": "x"})
    folders = Folders(tmp_path / "stored", tmp_path / "anew", replace)
    measure_parts([part], SIZES[size], Workplace(tmp_path / "work"), folders, keep=False)


def test_measure__next_to_complete_results_measures_anew_and_prints_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_again(tmp_path, seconds=2.0)
    stored = tmp_path / "stored/part.json"
    before = stored.read_bytes()
    capsys.readouterr()
    for seconds, change in ((3.0, "+50.0%"), (1.0, "-50.0%")):  # and what was measured anew is no reason to stop
        measured_again(tmp_path, seconds=seconds)
        printed = capsys.readouterr().out
        assert f"a seconds: 2 stored, {seconds:g} now ({change})" in printed
        assert "1 figures differ by 1 % at most, 1 by more" in printed
        assert Results.read(tmp_path / "anew/part.json")["a"]["seconds"] == seconds
    assert stored.read_bytes() == before


def test_measure__of_another_size_leaves_the_stored_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_again(tmp_path, seconds=2.0)
    before = (tmp_path / "stored/part.json").read_bytes()
    measured_again(tmp_path, seconds=2.0, size="0.6b")
    assert "stored at size 'toy', measured at '0.6b'" in capsys.readouterr().out
    assert (tmp_path / "stored/part.json").read_bytes() == before


def test_measure__goes_on_where_it_was_stopped_and_replaces_if_asked(tmp_path: Path) -> None:
    for folder in ("stored", "anew"):
        folders = Folders(tmp_path / "stored", tmp_path / "anew", replace=False)
        results, _ = folders.open("part", SIZES["toy"])
        assert results.path.parent.name == folder
        results.measure("a", lambda: {"seconds": 7.0})  # and stopped
        measured_again(tmp_path, seconds=9.0)
        assert Results.read(tmp_path / folder / "part.json")["a"]["seconds"] == 7.0
    measured_again(tmp_path, seconds=9.0, replace=True)
    assert Results.read(tmp_path / "stored/part.json")["a"]["seconds"] == 9.0
