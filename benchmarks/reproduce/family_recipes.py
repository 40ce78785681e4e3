"""Recipes and judgements that several parts share: the papers' three operators over the first experts of a family."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipes import DENSITY, recipe_text
from benchmarks.reproduce.workplace import Workplace, folder_bytes
from support.families import FamilyPaths

PAPER_OPERATORS: Mapping[str, str] = {"linear": "AVG", "ties": "TIES", "dare_ties": "DARE"}
_PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "linear": {"weight": 1.0},
    "ties": {"weight": 1.0, "density": DENSITY},
    "dare_ties": {"weight": 0.3, "density": DENSITY},  # task vectors are added, not averaged: most take such a weight
}
PAPER_BUDGET_SHARE = 3462 / 16060
"""The papers' fixed budget over the bytes of one expert: 3,462 MB of Llama-3.1-8B in bf16."""
SYNTHETIC_TEXT = (
    "Models are synthetic (normal weights, deltas of one size a tensor): bytes, times and memory carry over to"
    " [real ones](trained.md); errors, choices and sizes of blocks, and sizes of packs do not."
)
FITTED_TEXT = (
    "Models are synthetic, with deltas like those of four fine-tunes of a public 135M model (Adam, 40 steps): one size"
    " in all matrices, rows alike, 16 directions with 26 to 60 % of the squares, little in common but in embeddings."
)


def paper_recipe(operator: str, base: Path, experts: Sequence[Path]) -> str:
    """The recipe of a merge of all `experts` by one of the papers' operators; the base has no part in an average."""
    models = dict.fromkeys(experts, _PARAMETERS[operator])
    return recipe_text(operator, base, models, dtype="float32", out_dtype="bfloat16")


def write_recipe(place: Workplace, family: FamilyPaths, operator: str, k: int) -> Path:
    """Write the recipe of a merge of the first `k` experts."""
    path = place.folder / f"{operator}-{k}.yml"
    path.write_text(paper_recipe(operator, family.base, family.experts[:k]))
    return path


def inputs_of(family: FamilyPaths, k: int) -> list[Path]:
    """Return the base and the first `k` experts."""
    return [family.base, *family.experts[:k]]


def analyzed_home(place: Workplace, family: FamilyPaths, k: int) -> Path:
    """Fill a catalog with the first `k` experts, once."""
    home = place.folder / f"home-{family.base.parent.name}-{k}"
    if not (home / "analyzed").exists():
        place.ours("analyze", *inputs_of(family, k), "--home", home)
        (home / "analyzed").touch()
    return home


def keep_full(place: Workplace, recipe: Path) -> Callable[[Path], dict[str, Any]]:
    """Return what moves a full merge of `recipe` to where `full_merge` looks for it; the one before gives way."""

    def keep(out: Path) -> dict[str, Any]:
        kept = place.folder / "full"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        out.rename(kept / "merged")
        (kept / "recipe.txt").write_text(recipe.read_text())
        return {}

    return keep


def full_merge(place: Workplace, recipe: Path) -> Path:
    """Merge in full, or find the last full merge if it is of this recipe."""
    kept = place.folder / "full"
    name = kept / "recipe.txt"
    if not name.exists() or name.read_text() != recipe.read_text():
        out = place.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        place.ours("merge", recipe, out, "--no-catalog")
        keep_full(place, recipe)(out)
    return kept / "merged"


def judge_against(full: Path, base: Path) -> Callable[[Path], dict[str, Any]]:
    """Return what adds the errors of a merge to its result.

    They are computed in another process: the kernel counts this one's memory as that of the commands it starts.
    """

    def judge(out: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.deltas", str(out), str(full), str(base)]
        errors: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return errors

    return judge


def merge_in_blocks(
    place: Workplace, family: FamilyPaths, share: int, kibi: int, judge: Callable[[Path], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Merge all experts by TIES and norm under a budget of `share` %, analyzed and planned in blocks of a size."""
    recipe, home = write_recipe(place, family, "ties", len(family.experts)), place.folder / f"home-blocks-{kibi}"
    option = ("--block-elements", kibi * 1024)
    shutil.rmtree(home, ignore_errors=True)
    place.ours("analyze", *family.models, *option, "--home", home)
    budget = ("--budget", f"{share}%", "--select", "norm", "--home", home)
    merged = place.merge(recipe, family.models, *budget, *option, judge=judge)
    return {**merged, "catalog_bytes": folder_bytes(home)}


@dataclass(frozen=True, slots=True)
class PaperMerge:
    """A merge of the first `k` experts by one of the papers' operators, measured in full and under their budget."""

    place: Workplace
    family: FamilyPaths
    operator: str
    k: int

    def in_full(self) -> dict[str, Any]:
        """Merge everything; the output stays for `under_the_budget` to be compared with."""
        recipe = self._recipe()
        return self.place.merge(
            recipe, inputs_of(self.family, self.k), "--no-catalog", has_floor=True,
            judge=keep_full(self.place, recipe),
        )  # fmt: skip

    def under_the_budget(self, model_bytes: int, repeats: int) -> dict[str, Any]:
        """Merge `repeats` times what the papers' share of `model_bytes` allows, with analyzed experts."""
        recipe = self._recipe()
        full = full_merge(self.place, recipe)
        home = analyzed_home(self.place, self.family, len(self.family.experts))
        return self.place.merge(
            recipe, inputs_of(self.family, self.k), "--budget", f"{int(PAPER_BUDGET_SHARE * model_bytes)}B",
            "--select", "norm", "--home", home,
            repeats=repeats, has_floor=True, judge=judge_against(full, self.family.base),
        )  # fmt: skip

    def _recipe(self) -> Path:
        return write_recipe(self.place, self.family, self.operator, self.k)
