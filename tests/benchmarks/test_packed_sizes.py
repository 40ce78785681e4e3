"""Tests of benchmarks.packed_sizes on fine-tunes that take seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.local_text import GENERAL, Domain
from benchmarks.packed_sizes import BUDGETS, Cell, Grid, measure_store, table
from benchmarks.tiny_lm import LmShape, Schedule
from benchmarks.trained_family import FamilyError, TrainedRequest, train_family

from support.families import TINY, write_family

pytestmark = [pytest.mark.transformers, pytest.mark.slow]  # `make test-benchmarks`, which CI runs too

SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
BASE = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
EXPERT = replace(BASE, muon=False)
REQUEST = TrainedRequest(experts=1, seed=0, shape=SHAPE, base=BASE, expert=EXPERT, threads=1)
DOMAINS = tuple(
    Domain(name, words * 500, words * 250)
    for name, words in ((GENERAL, "one two three apple pear if else "), ("code", "for while if else return "))
)


@pytest.fixture(scope="module", name="grid")
def make_grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    folder = tmp_path_factory.mktemp("packed-sizes")
    train_family(folder / "family", REQUEST, DOMAINS, only=[])
    return Grid(folder / "grid", folder / "family", REQUEST, 1, lambda n: DOMAINS[: n + 1])


@pytest.fixture(scope="module", name="cells")
def make_cells(grid: Grid) -> list[Cell]:
    return list(grid.cells([1e-5, 1e-3], [4], 1))


def test_cells__larger_steps_go_further_learn_more_and_need_more_bytes(cells: list[Cell]) -> None:
    small, large = cells
    assert (small.peak_rate, small.steps, small.domain) == (1e-5, 4, "code")
    assert small.relative_norm < large.relative_norm
    assert small.changed_fraction < large.changed_fraction
    assert small.base_loss == large.base_loss > large.loss
    assert small.store.sizes.pieces < large.store.sizes.pieces < 1


def test_cells__are_not_trained_again(grid: Grid, cells: list[Cell]) -> None:
    model = grid.root / "1e-05x4/expert-1/model.safetensors"
    before = model.stat().st_mtime_ns
    again = Grid(grid.root, grid.family, grid.request, grid.number, lambda _: pytest.fail("nothing is to be trained"))
    assert list(again.cells([1e-5, 1e-3], [4], 1)) == cells
    assert model.stat().st_mtime_ns == before
    assert not (grid.root / "1e-05x4/work").exists()


def test_cells__of_other_options_are_refused(grid: Grid, cells: list[Cell]) -> None:
    other = replace(REQUEST, expert=replace(REQUEST.expert, batch=1))
    with pytest.raises(FamilyError, match="made with other options"):
        next(replace(grid, request=other).cells([cells[0].peak_rate], [4], 1))


def test_measure_store__reads_more_at_every_budget_until_nothing_is_left(tmp_path: Path) -> None:
    family = write_family(tmp_path / "family", TINY, 1)
    found = measure_store(family.base, family.experts[0], tmp_path / "work", 1)
    assert list(found.errors) == list(BUDGETS)
    errors = list(found.errors.values())
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[0] < 1
    assert 0 < found.sizes.ties < found.sizes.pieces < found.sizes.store < 1
    assert found.ties_pages >= found.sizes.ties
    assert found.whole_pages >= found.sizes.pieces
    assert not (tmp_path / "work").exists()


def test_table__has_a_row_for_each_fine_tune(cells: list[Cell]) -> None:
    lines = table(cells).splitlines()
    assert len(lines) == 2 + len(cells)
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert lines[2].startswith("| 1e-05 x 4 | ")
    assert lines[3].startswith("| 1e-03 x 4 | ")
