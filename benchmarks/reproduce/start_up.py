"""Part `start_up`: what commands cost that have little to do: processor seconds of whole processes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.process import OURS, measure_checked
from benchmarks.recipes import recipe_text
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from support.families import FamilyPaths

_K = 3
_RUNS = 7
_SETTINGS = {"PYTHONDONTWRITEBYTECODE": ""}  # users have compiled Python


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("start-up")
    family = place.family("tiny" if size.is_toy else "demo", _K)
    for command in ("--version", "check", "merge"):
        results.measure(command, partial(_least, place, family, command, 1 if size.is_toy else _RUNS))


def _least(place: Workplace, family: FamilyPaths, command: str, n_runs: int) -> dict[str, Any]:
    """Run a command once for what Python compiles, then some times more; return the least that it took."""
    costs = [_run(place, family, command, _SETTINGS) for _ in range(1 + n_runs)][1:]
    return {name: min(cost[name] for cost in costs) for name in costs[0]}


def _run(place: Workplace, family: FamilyPaths, command: str, settings: Mapping[str, str]) -> dict[str, float]:
    recipe, out, home = (place.folder / name for name in ("recipe.yml", "out", "home"))
    models = {expert: {"weight": 0.5, "density": 0.3} for expert in family.experts}
    recipe.write_text(recipe_text("dare_ties", family.base, models, dtype="bfloat16"))
    for left in (out, home):
        shutil.rmtree(left, ignore_errors=True)
    arguments = {"--version": (), "check": (str(recipe),), "merge": (str(recipe), str(out), "--quiet")}[command]
    environment = {**settings, "MERGEPIPE_HOME": str(home)}
    cost = measure_checked([*OURS, command, *arguments], log=place.folder / "log.txt", environment=environment)
    return {"seconds": cost.wall_seconds, "cpu_seconds": cost.cpu_seconds}


def _page(results: Results) -> Page:
    version, merge = (results[command]["cpu_seconds"] for command in ("--version", "merge"))
    meaning = f"**A command starts in {version:.2f} processor seconds, and merges a small model in {merge:.2f}.**"
    about = f"DARE-TIES of {_K} experts of 34 MB (tiny ones at size `toy`); the least of {_RUNS} runs."
    rows = tuple(
        (name, f"{entry['cpu_seconds']:.2f}", f"{entry['seconds']:.2f}") for name, entry in results.entries.items()
    )
    return Page("Start-up", meaning, (about, Table(("command", "CPU s", "s"), rows)))


PART = Part("start_up", "small commands", lambda _: Needs(300_000_000, 2), _measure, _page)
