"""Part `methods`: every method merges two experts in full."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recipes import Case, method_cases
from benchmarks.reproduce.family_recipes import SYNTHETIC_TEXT
from benchmarks.reproduce.pages import COST_HEADER, Page, Table, cost_cells, gb
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace

_K = 2
_TOY_METHODS = ("linear", "ties")


def _needs(size: Size) -> Needs:
    return Needs((_K + 2) * size.model_bytes, size.repeats * 24 * (_K + 1) * size.model_bytes / 20e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    for case in method_cases(place.family(size.shape, _K)):
        if not size.is_toy or case.name in _TOY_METHODS:
            results.measure(case.name, partial(_merge, place, case, size.repeats))


def _merge(place: Workplace, case: Case, repeats: int) -> dict[str, Any]:
    recipe: Path = place.folder / "recipe.yml"
    recipe.write_text(case.recipe)
    return place.merge(recipe, case.models, "--no-catalog", "--memory", "2GiB", repeats=repeats, has_floor=True)


def _page(results: Results) -> Page:
    slowest = max(results.entries, key=lambda name: results[name]["cpu_seconds"])
    most = max(entry["peak_rss_bytes"] for entry in results.entries.values())
    meaning = (
        f"**The method decides how much a merge computes, not what it reads.** Of {_K} experts, each of"
        f" {gb(results.size['model_bytes'])} GB, `{slowest}` takes the most processor time; no merge takes more than"
        f" {most / 2**30:.1f} GiB."
    )
    rows = tuple(
        (name, gb(entry["kernel_read_bytes"]), *cost_cells(results, entry)) for name, entry in results.entries.items()
    )
    return Page("Methods", meaning, (SYNTHETIC_TEXT, Table(("method", "GB read", *COST_HEADER), rows)))


PART = Part("methods", "every method of two experts in full: time and memory", _needs, _measure, _page)
