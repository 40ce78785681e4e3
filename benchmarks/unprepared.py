"""Command that compares budgeted TIES merges of analysed experts with those of experts of which nothing is known."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import mergepipe
from benchmarks.deltas import merge_errors
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from support.families import QWEN3_0_6B, FamilyPaths, write_family

BUDGETS = ("10%", "25%", "50%")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the family lies, and the recipe that merges it."""

    root: Path
    family: FamilyPaths
    recipe: Path

    def merge(self, name: str, home: Path, budget: str | None, *, probe: bool = True) -> tuple[Path, int | None]:
        """Merge into `root/name`; return where that is, and the budget in bytes."""
        options = MergeOptions(home=home, resume=False, plan=PlanOptions(probe=probe))
        out = self.root / name
        report = mergepipe.merge(self.recipe, out, budget=budget, force=True, options=options)
        return out, report.budget_bytes

    def error(self, out: Path, full: Path) -> float:
        """Compute the distance to the full merge over that of the full merge to the base."""
        return merge_errors(out, full, self.family.base).error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".bench/unprepared"))
    parser.add_argument("--layers", type=int, default=QWEN3_0_6B.layers, help="fewer need less disk")
    parser.add_argument("--experts", type=int, default=4)
    options = parser.parse_args()
    bench = _prepare(options.root, options.layers, options.experts)
    analysed = options.root / "analysed"
    mergepipe.analyze(bench.family.models[0], bench.family.models[1:], options=RunOptions(home=analysed))
    full, _ = bench.merge("full", options.root / "none", None)
    print("| budget | unprepared | `--no-probe` | analysed, as many bytes | unprepared over it | analysed |")
    print("|---|---|---|---|---|---|")
    nbytes: int | None = None
    for budget in BUDGETS:
        errors = {}
        for kind in ("unprepared", "blind", "analysed", "share"):
            # who knows that blocks equal the base takes a share of fewer bytes
            requested = f"{nbytes}B" if kind == "analysed" else budget
            home = analysed if kind in ("analysed", "share") else options.root / f"{kind}-{budget}"
            out, budget_bytes = bench.merge("budgeted", home, requested, probe=kind != "blind")
            nbytes = budget_bytes if kind == "unprepared" else nbytes
            errors[kind] = bench.error(out, full)
            shutil.rmtree(out)
        shown = " | ".join(f"{errors[kind]:.3f}" for kind in ("unprepared", "blind", "analysed"))
        more = f"{errors['unprepared'] / errors['analysed'] - 1:+.1%}"
        print(f"| {budget} | {shown} | {more} | {errors['share']:.3f} |", flush=True)
    return 0


def _prepare(root: Path, layers: int, n_experts: int) -> Bench:
    family = write_family(root / "family", replace(QWEN3_0_6B, layers=layers), n_experts)
    models = "".join(f"  - {{model: {place}, parameters: {{weight: 1.0}}}}\n" for place in family.models[1:])
    text = f"merge_method: ties\nbase_model: {family.models[0]}\nmodels:\n{models}"
    recipe = root / "recipe.yml"
    recipe.write_text(f"{text}parameters: {{density: 0.2}}\ndtype: bfloat16\n")
    return Bench(root, family, recipe)


if __name__ == "__main__":
    sys.exit(main())
