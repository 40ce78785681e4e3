"""Part `payoff`: what analyzing and packing cost against what later merges save, by the speed of the storage."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.process import ProcessCost
from benchmarks.reproduce.family_recipes import (
    SYNTHETIC_TEXT,
    full_merge,
    judge_against,
    paper_recipe,
    write_recipe,
)
from benchmarks.reproduce.pages import Figure, Page, Series, Table, gb
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size, k_at_most
from benchmarks.reproduce.workplace import Workplace, folder_bytes, weight_files
from support.families import FamilyPaths

_RATES: Mapping[str, float | None] = {"100 MB/s": 100e6, "1 GB/s": 1e9, "local disk": None}
_K = 8
_BUDGET = "25%"
_OPERATOR = "ties"
_MOST_MERGES = 10
_EXACT = {"full": "0", "packed": "0"}  # these merge everything, bit for bit
_PREPARATIONS = {"analyzed": "analyze", "packed": "pack"}
_STRATEGIES = {
    "full": "every merge in full",
    "sampled": f"sample of {_BUDGET}, nothing prepared",
    "analyzed": f"analyze once, budget of {_BUDGET}",
    "packed": "pack once, every merge in full",
}


def _needs(size: Size) -> Needs:
    family_bytes = (k_at_most(size.ks, _K) + 1) * size.model_bytes
    disk_bytes = size.family_bytes + 2 * size.model_bytes + family_bytes // 3
    return Needs(disk_bytes, (3.5 * family_bytes / 100e6 + 10 * family_bytes / 1e9) / 60 + size.family_bytes / 4e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, size.n_experts)
    k = k_at_most(size.ks, _K)
    work = _Work(place, FamilyPaths(family.base, family.experts[:k]))
    for name, rate in _RATES.items() if not size.is_toy else [("local disk", None)]:
        for step in ("full", "sampled", "analyze", "analyzed", "pack", "packed"):
            results.measure(f"{name}/{step}", partial(getattr(work, step), name, rate))


class _Work:
    """The steps, each of which a resumed run can begin with: what a step needs of one before it is made again."""

    def __init__(self, place: Workplace, family: FamilyPaths) -> None:
        self._place, self._family = place, family
        self._recipe = write_recipe(place, family, _OPERATOR, len(family.experts))

    def full(self, name: str, rate: float | None) -> dict[str, Any]:
        return self._merge(rate, "--no-catalog")

    def sampled(self, name: str, rate: float | None) -> dict[str, Any]:
        return self._merge(rate, "--budget", _BUDGET, "--select", "sample", "--no-catalog")

    def analyze(self, name: str, rate: float | None) -> dict[str, Any]:
        home, models = self._home(name, "analyze"), self._family.models
        shutil.rmtree(home, ignore_errors=True)
        _, cost = self._place.ours("analyze", *models, "--home", home, cold=weight_files(models), rate=rate)
        return {**_cost(cost), "catalog_bytes": folder_bytes(home)}

    def analyzed(self, name: str, rate: float | None) -> dict[str, Any]:
        if not self._home(name, "analyze").exists():
            self.analyze(name, None)
        return self._merge(
            rate, "--budget", _BUDGET, "--select", "norm", "--home", self._home(name, "analyze"), judged=True
        )

    def pack(self, name: str, rate: float | None) -> dict[str, Any]:
        shutil.rmtree(self._packed, ignore_errors=True)
        models = self._family.models
        _, cost = self._place.ours(
            "pack", *models, "--out", self._packed, "--home", self._place.folder / "home-pack",
            cold=weight_files(models), rate=rate,
        )  # fmt: skip
        return {**_cost(cost), "packed_bytes": folder_bytes(self._packed)}

    def packed(self, name: str, rate: float | None) -> dict[str, Any]:
        if not self._packed.exists():
            self.pack(name, None)
        base, experts = self._family.base, [self._packed / expert.name for expert in self._family.experts]
        recipe = self._place.folder / "packed.yml"
        recipe.write_text(paper_recipe(_OPERATOR, base, experts))
        return self._place.merge(recipe, [base, *experts], "--no-catalog", rate=rate)

    @property
    def _packed(self) -> Path:
        return self._place.folder / "packed"

    def _home(self, name: str, step: str) -> Path:
        return self._place.folder / f"home-{step}-{name.replace('/', '').replace(' ', '')}"

    def _merge(self, rate: float | None, *options: object, judged: bool = False) -> dict[str, Any]:
        judge = judge_against(full_merge(self._place, self._recipe), self._family.base) if judged else None
        return self._place.merge(self._recipe, self._family.models, *options, rate=rate, judge=judge)


def _cost(cost: ProcessCost) -> dict[str, Any]:
    seconds, cpu_seconds = round(cost.wall_seconds, 3), round(cost.cpu_seconds, 3)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "kernel_read_bytes": cost.read_bytes}


def step_seconds(results: Results, rate: str, step: str) -> float:
    return float(results[f"{rate}/{step}"]["seconds"])


def total_seconds(results: Results, rate: str, strategy: str, n_merges: int) -> float:
    """Add up a strategy's preparation and its first `n_merges` merges at one speed of storage."""

    def of(step: str) -> float:
        return step_seconds(results, rate, step)

    match strategy:
        case "full":
            return n_merges * of("full")
        case "sampled":
            return n_merges * of("sampled")
        case "analyzed":
            return of("analyze") + n_merges * of("analyzed")
        case _:
            return of("pack") + n_merges * of("packed")


def first_paying_merge(results: Results, rate: str, strategy: str) -> int | None:
    """Return the first merge after which a strategy has taken less time than full merges; None if none of 100 is."""
    totals = ((n, total_seconds(results, rate, strategy, n)) for n in range(1, 101))
    return next((n for n, seconds in totals if seconds < total_seconds(results, rate, "full", n)), None)


def _page(results: Results) -> Page:
    rates = _stored_rates(results)
    slow, local = rates[0], rates[-1]
    strategies = _stored_strategies(results)
    paying = {strategy: first_paying_merge(results, slow, strategy) for strategy in strategies}
    packed = {rate: step_seconds(results, rate, "packed") / step_seconds(results, rate, "full") for rate in rates}
    merges = {strategy: _merge_number(paying[strategy]) for strategy in ("analyzed", "packed")}
    meaning = (
        f"**For one merge, prepare nothing; for many merges where reading is slow, pack the experts.** At"
        f" {slow} a merge of packed experts takes {packed[slow]:.2f} times as long as the full one, on a local disk"
        f" {packed[local]:.2f} times;"
        f" at {slow} packing has paid at {merges['packed']}, an analysis at {merges['analyzed']}."
        " Packed experts alone save bytes and give the full result, bit for bit."
    )
    rule = (
        "Analyzing K experts reads as much as a full merge of them. Under a budget of a share `s` it has paid at the"
        " first merge beyond `(1 + 1/K) / (1 - s)` where reading takes all the time (with 8 experts the second at 25 %,"
        " the third at 50 %), later where processors do."
    )
    body = (
        SYNTHETIC_TEXT,
        rule,
        _table(results),
        _figure(results),
    )
    return Page("When does a budget pay?", meaning, body)


def _stored_rates(results: Results) -> list[str]:
    """Return the storage speeds that there are results of, the slowest first."""
    return list(dict.fromkeys(key.rsplit("/", 1)[0] for key in results.entries))


def _stored_strategies(results: Results) -> dict[str, str]:
    """Return the strategies that there are results of, by name."""
    measured = {key.rsplit("/", 1)[1] for key in results.entries}
    return {strategy: label for strategy, label in _STRATEGIES.items() if strategy in measured}


def _merge_number(number: int | None) -> str:
    return "no merge up to the hundredth" if number is None else f"merge {number}"


def _figure(results: Results) -> Figure:
    numbers = tuple(range(1, _MOST_MERGES + 1))
    series = []
    for rate in _stored_rates(results):
        for strategy in list(_stored_strategies(results))[1:]:
            shares = tuple(
                total_seconds(results, rate, strategy, n) / total_seconds(results, rate, "full", n) for n in numbers
            )
            series.append(
                Series(f"{strategy}, {rate}", tuple(map(float, numbers)), shares, dashed=rate != "local disk")
            )
    return Figure(
        "payoff", "Time of all merges so far, over that of full merges", "merges", "share (below 1 it has paid)",
        tuple(series),
    )  # fmt: skip


def _table(results: Results) -> Table:
    """What each strategy's preparation and merges read and take, and the merge at which it has paid."""
    rows = []
    for rate in _stored_rates(results):
        for strategy, label in _stored_strategies(results).items():
            number = first_paying_merge(results, rate, strategy)
            pays = "" if strategy == "full" else "never" if number is None else str(number)
            steps = (_PREPARATIONS.get(strategy), strategy)
            cells = (cell for step in steps for cell in _step_cells(results, rate, step))
            entry = results[f"{rate}/{strategy}"]
            error = f"{entry['error']:.3f}" if "error" in entry else _EXACT.get(strategy, "")
            ten = f"{total_seconds(results, rate, strategy, _MOST_MERGES):.0f}"
            rows.append((rate, label, *cells, ten, pays, error))
    columns = (f"{what}, {step}" for step in ("preparing", "a merge") for what in ("GB read", "s"))
    return Table(
        ("storage", "strategy", *columns, f"s, {_MOST_MERGES} merges", "pays from merge", "error"), tuple(rows)
    )


def _step_cells(results: Results, rate: str, step: str | None) -> tuple[str, str]:
    if step is None:
        return ("", "")
    return gb(results[f"{rate}/{step}"]["kernel_read_bytes"]), f"{step_seconds(results, rate, step):.1f}"


PART = Part("payoff", "analyze, sample, pack: after how many merges each has paid", _needs, _measure, _page)
