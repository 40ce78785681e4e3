"""Command that holds what packed experts lose under a budget against how much full merges differ by seed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.fidelity_points import OPERATORS
from benchmarks.fidelity_results import mean_loss
from benchmarks.heldout import Heldout, heldout_losses, read_heldout
from benchmarks.packed_merging import BUDGET_OPERATORS
from mergepipe import api as session
from mergepipe.options import MergeOptions
from support.families import FamilyPaths, family_paths

_FULL = "full"


@dataclass(frozen=True, slots=True)
class FullMerge:
    """A merge in full: the mean held-out loss over the experts' domains of its bfloat16 output.

    `family` counts families of one base that differ in the experts' training seed; `seed` is the merge's.
    """

    operator: str
    family: int
    seed: int
    loss: float


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A merge under a budget, of family number `family`, by how its experts are read: its mean held-out loss."""

    operator: str
    family: int
    form: str
    budget: float
    loss: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of full merges' losses over training seeds and over the merge's own; None where one is."""

    training: float | None
    merging: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One operator at one budget: how far a form is from the full merge of the same family, beside the latter's noise.

    `loss` and `lost` (above the full merge) are means over the families, `furthest` is the largest distance in any.
    """

    operator: str
    form: str
    budget: float
    loss: float
    lost: float
    furthest: float
    noise: Noise

    @property
    def is_within_noise(self) -> bool | None:
        """Whether in every family the distance is at most what training seeds deviate by; None if that is unknown."""
        return None if self.noise.training is None else self.furthest <= self.noise.training


def full_merges(
    family: FamilyPaths, number: int, heldout: Heldout, work: Path, operators: Sequence[str], seeds: Sequence[int]
) -> Iterator[FullMerge]:
    """Merge in full and score: random operators under all `seeds`, others under the first."""
    work.mkdir(parents=True, exist_ok=True)
    recipe, out = work / "recipe.yml", work / "out"
    shutil.rmtree(out, ignore_errors=True)
    for operator in operators:
        recipe.write_text(OPERATORS[operator].recipe(family.base, family.experts, "bfloat16"))
        for seed in seeds if OPERATORS[operator].is_random else seeds[:1]:
            session.merge(recipe, out, seed=seed, options=MergeOptions(catalog=False))
            yield FullMerge(operator, number, seed, mean_loss(heldout_losses(out, heldout)))
            shutil.rmtree(out)


def read_budgeted(path: Path, family: int) -> list[Budgeted]:
    """What `benchmarks.packed_merging budgets --heldout` printed of one family; its full merges have the budget 1."""
    entries: list[dict[str, Any]] = json.JSONDecoder().raw_decode(path.read_text())[0]
    return [Budgeted(e["operator"], family, e["form"], e["budget"], e["loss"]) for e in entries]


def verdicts(full: Sequence[FullMerge], budgeted: Sequence[Budgeted]) -> list[Verdict]:
    """One for each operator, form and budget below 1 of `budgeted`, in its order.

    Raises:
        ValueError: a budgeted merge's own full merge is not in `budgeted`.
    """
    noise = {operator: noise_of(operator, full) for operator in dict.fromkeys(each.operator for each in full)}
    in_full = {(b.operator, b.family): b.loss for b in budgeted if b.form == _FULL}
    return [
        _verdict([b for b in budgeted if (b.operator, b.form, b.budget) == key], in_full, noise)
        for key in dict.fromkeys((b.operator, b.form, b.budget) for b in budgeted if b.budget < 1)
    ]


def _verdict(same: Sequence[Budgeted], in_full: Mapping[tuple[str, int], float], noise: Mapping[str, Noise]) -> Verdict:
    first = same[0]
    if first.operator not in noise or any((each.operator, each.family) not in in_full for each in same):
        raise ValueError(f"{first.operator}: no full merge to compare with")
    lost = [each.loss - in_full[each.operator, each.family] for each in same]
    return Verdict(
        operator=first.operator,
        form=first.form,
        budget=first.budget,
        loss=fmean(each.loss for each in same),
        lost=fmean(lost),
        furthest=max(map(abs, lost)),
        noise=noise[first.operator],
    )


def noise_of(operator: str, full: Sequence[FullMerge]) -> Noise:
    """Over families at the first seed, and over the seeds of the first family."""
    mine = [each for each in full if each.operator == operator]
    by_family = [each.loss for each in mine if each.seed == mine[0].seed]
    by_seed = [each.loss for each in mine if each.family == mine[0].family]
    return Noise(*(stdev(losses) if len(losses) > 1 else None for losses in (by_family, by_seed)))


def full_table(full: Sequence[FullMerge]) -> str:
    """Markdown: losses of full merges, a row for each operator and seed, a column for each family."""
    families = sorted({each.family for each in full})
    lines = ["| operator | merge's seed | " + " | ".join(f"family {n}" for n in families) + " |"]
    lines.append("|---" * (2 + len(families)) + "|")
    for operator, seed in dict.fromkeys((each.operator, each.seed) for each in full):
        row = {each.family: each.loss for each in full if (each.operator, each.seed) == (operator, seed)}
        cells = [f"{row[n]:.4f}" if n in row else "" for n in families]
        lines.append(f"| {operator} | {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict_table(found: Sequence[Verdict]) -> str:
    """Markdown: what is lost, beside the noise."""
    lines = [
        "| operator | form | budget | loss | above the full | furthest | training seeds | merge's seeds | within |",
        "|---" * 9 + "|",
    ]
    for each in found:
        noises = ["" if noise is None else f"{noise:.4f}" for noise in (each.noise.training, each.noise.merging)]
        within = {True: "yes", False: "no", None: ""}[each.is_within_noise]
        lines.append(
            f"| {each.operator} | {each.form} | {each.budget:.1%} | {each.loss:.4f} | {each.lost:+.4f} "
            f"| {each.furthest:.4f} | {noises[0]} | {noises[1]} | {within} |"
        )
    return "\n".join(lines) + "\n"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", type=Path, nargs="+", help="families of one base, by different training seeds")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(BUDGET_OPERATORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of random operators")
    parser.add_argument("--full", type=Path, help="full merges measured before are read from here, others are added")
    parser.add_argument("--budgeted", type=Path, nargs="*", default=[], help="outputs of packed_merging, by family")
    parser.add_argument("--work", type=Path, required=True, help="a directory for outputs")
    parser.add_argument("--threads", type=int, default=1, help="for scoring")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options(arguments)
    full: list[FullMerge] = []
    if asked.full is not None and asked.full.exists():
        full = [FullMerge(**entry) for entry in json.loads(asked.full.read_text())]
    for number, root in enumerate(asked.families):
        if any(each.family == number for each in full):
            continue
        heldout = read_heldout(root)
        for each in full_merges(
            family_paths(root, asked.experts), number, heldout, asked.work, asked.operators, asked.seeds
        ):
            print(each, file=sys.stderr, flush=True)
            full.append(each)
        if asked.full is not None:
            asked.full.write_text(json.dumps([asdict(each) for each in full], indent=1) + "\n")
    print(full_table(full))
    budgeted = [each for number, path in enumerate(asked.budgeted) for each in read_budgeted(path, number)]
    if budgeted:
        print(verdict_table(verdicts(full, budgeted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
