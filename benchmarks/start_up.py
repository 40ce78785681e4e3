"""What commands cost that have little to do: processor and wall seconds of whole processes, on the demo family.

`python -m benchmarks.start_up [--root .bench/demo] [--repeats 15] [--first]`

Commands run in turn; the table gives the least and the median. `--first` also measures the first merge ever, with a
folder for compiled kernels that is empty.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.make_family import FamilyRequest, ensure_family
from benchmarks.process import ProcessCost, measure_checked
from benchmarks.recipes import recipe_text
from support.families import FamilyPaths

N_EXPERTS = 3
TARGETS = {"ls": 0.25, "check": 0.25, "plan": 0.25, "plan again": 0.25, "merge": 0.5}
"""Wall seconds on a quiet machine."""
FIRST_TARGET_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of the catalog and outputs."""

    work: Path

    def run(self, arguments: Sequence[str], settings: Mapping[str, str] | None = None) -> ProcessCost:
        """Run one command to its end."""
        environment = {"MERGEPIPE_HOME": str(self.work / "home"), **(settings or {})}
        command = [sys.executable, "-m", "mergepipe", *arguments]
        return measure_checked(command, log=self.work / "log.txt", environment=environment)

    def commands(self, recipe: Path) -> Mapping[str, Sequence[str]]:
        """The commands by their names in the table: a first plan samples the experts, the same again does not."""
        return {
            "--version": ("--version",),
            "ls": ("ls",),
            "check": ("check", str(recipe)),
            "plan": ("plan", str(recipe), "--budget", "50%"),
            "plan again": ("plan", str(recipe), "--budget", "50%"),
            "merge": ("merge", str(recipe), str(self.work / "merged"), "--quiet"),
        }

    def clear(self) -> None:
        """Remove what the last round left, the catalog too."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)


def write_recipe(root: Path, family: FamilyPaths) -> Path:
    """Write the recipe of a DARE-TIES merge."""
    recipe = root / "recipe.yml"
    each = {"weight": 0.5, "density": 0.3}
    recipe.write_text(recipe_text("dare_ties", family.base, family.experts, each, dtype="bfloat16"), encoding="utf-8")
    return recipe


def measure_rounds(place: Place, recipe: Path, repeats: int) -> dict[str, list[ProcessCost]]:
    """Run every command in turn; costs by command, those of the first round left out."""
    costs: dict[str, list[ProcessCost]] = {}
    for number in range(repeats + 1):
        place.clear()
        for name, arguments in place.commands(recipe).items():
            cost = place.run(arguments)
            if number:  # the first compiles Python, and kernels where there are none
                costs.setdefault(name, []).append(cost)
    return costs


def first_merge(place: Place, recipe: Path) -> ProcessCost:
    """Merge where no compiled kernels are kept yet."""
    place.clear()
    return place.run(place.commands(recipe)["merge"], {"NUMBA_CACHE_DIR": str(place.work / "kernels")})


def table(costs: Mapping[str, Sequence[ProcessCost]]) -> list[str]:
    """The lines of the table."""
    lines = ["| command | CPU s least, median | wall s least, median | target |", "|---|---|---|---|"]
    for name, runs in costs.items():
        cells = []
        for seconds in ([run.cpu_seconds for run in runs], [run.wall_seconds for run in runs]):
            cells.append(f"{min(seconds):.2f}, {statistics.median(seconds):.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {TARGETS.get(name, '')} |")
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".bench/demo"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    root = options.root.absolute()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled Python
    recipe = write_recipe(root, ensure_family(FamilyRequest(root, "demo", N_EXPERTS, 0)))
    place = Place(root / "work")
    print("\n".join(table(measure_rounds(place, recipe, options.repeats))), flush=True)
    if options.first:
        cost = first_merge(place, recipe)
        seconds = f"CPU {cost.cpu_seconds:.1f} s, wall {cost.wall_seconds:.1f} s (target {FIRST_TARGET_SECONDS:.0f})"
        print(f"first merge ever: {seconds}", flush=True)


if __name__ == "__main__":
    main()
