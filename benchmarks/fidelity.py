"""The benchmark of what a budget costs in quality: error against the full merge, and held-out loss, by policy."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tiny_lm
from benchmarks.deltas import Tensors, distance, norm, read_tensors, rounded_to_bf16
from benchmarks.fidelity_points import BUDGET_PERCENTS, OPERATORS, POLICIES, Point, points, reference_seed
from benchmarks.fidelity_results import Fidelity, Reference, Report, mean_loss, to_json, to_markdown
from benchmarks.heldout import DEFAULT_ROOT, Heldout, heldout_losses, read_heldout

OURS = (sys.executable, "-m", "mergepipe")
_EXACT_DTYPE, _OUTPUT_DTYPE = "float32", "bfloat16"


class FidelityError(Exception):
    """A merge failed, or gave what it must never give."""


@dataclass(frozen=True, slots=True)
class Family:
    """The trained models that are merged, the text they are scored on, and the base as numbers."""

    base: Path
    experts: tuple[Path, ...]
    heldout: Heldout
    base_tensors: Tensors

    @classmethod
    def read(cls, root: Path, n_experts: int) -> Family:
        """Read what `benchmarks.trained_family` wrote.

        Raises:
            FidelityError: it is not there, or has fewer experts.
        """
        base, experts = root / "base", tuple(root / f"expert-{i}" for i in range(1, n_experts + 1))
        missing = [str(model) for model in (base, *experts) if not model.is_dir()]
        if missing:
            raise FidelityError(f"missing: {', '.join(missing)}; run benchmarks.trained_family first")
        return cls(base, experts, read_heldout(root), read_tensors(base))


@dataclass(frozen=True, slots=True)
class Merger:
    """Runs the command line in `directory`, with a catalog of its own there."""

    program: tuple[str, ...]
    directory: Path
    family: Family
    extra: tuple[str, ...]

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def analyze(self) -> None:
        """Fill a new catalog: nothing an earlier version of the program wrote takes part."""
        shutil.rmtree(self.home, ignore_errors=True)
        models = [str(model) for model in (self.family.base, *self.family.experts)]
        self._call(["analyze", *models, "--home", str(self.home), *self.extra])

    @contextmanager
    def merged(
        self, operator: str, out_dtype: str, arguments: Sequence[str]
    ) -> Iterator[tuple[Path, Mapping[str, float]]]:
        """Merge; give the output directory and the report, then delete the output."""
        recipe, out = self.directory / "recipe.yml", self.directory / "out"
        recipe.write_text(OPERATORS[operator].recipe(self.family.base, self.family.experts, out_dtype))
        shutil.rmtree(out, ignore_errors=True)
        # A merge in full leaves the catalog as `analyze` made it, on the grid that `extra` may ask for.
        more = ["--home", str(self.home), *self.extra] if "--budget" in arguments else ["--no-catalog"]
        command = ["merge", str(recipe), str(out), *arguments, "--json", *more]
        report = json.loads(self._call(command))
        if not out.is_dir():
            raise FidelityError(f"mergepipe {' '.join(command)}: exit code 0, and no output")
        try:
            yield out, report
        finally:
            shutil.rmtree(out)

    def _call(self, arguments: Sequence[str]) -> str:
        done = subprocess.run([*self.program, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise FidelityError(f"mergepipe {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class _Full:
    """The full merge that budgeted ones are compared with."""

    tensors: Tensors
    rounded: Tensors
    expert_bytes: int
    reference: Reference


class Bench:
    """Measures points one after the other; holds at most one full merge (8 bytes an element, twice) in memory."""

    def __init__(self, merger: Merger, seeds: Sequence[int]) -> None:
        self._merger = merger
        self._seeds = seeds
        self._family = merger.family
        self._full_key: tuple[str, int] | None = None
        self._full: _Full | None = None
        self.references: list[Reference] = []

    def measure(self, point: Point) -> Fidelity:
        """Merge under the point's budget and compare.

        Raises:
            FidelityError: more was read than the budget allows, or a full budget gave another result.
        """
        full = self._full_merge(point.operator, reference_seed(point, self._seeds))
        arguments = ["--budget", f"{point.budget_percent}%", "--select", point.policy, "--seed", str(point.seed)]
        with self._merger.merged(point.operator, _EXACT_DTYPE, arguments) as (out, report):
            tensors = read_tensors(out)
            losses = _losses_as_bf16(out, self._family.heldout)
        moved = distance(full.tensors, self._family.base_tensors)
        error = distance(tensors, full.tensors)
        rounded_moved = distance(full.rounded, self._family.base_tensors)
        fidelity = Fidelity(
            point=point,
            expert_bytes=int(report["expert_bytes"]),
            budget_bytes=int(report["budget_bytes"]),
            full_expert_bytes=full.expert_bytes,
            seconds=report["seconds"],
            error=error / moved,
            rounded_error=distance(rounded_to_bf16(tensors), full.rounded) / rounded_moved,
            flattering_error=error / norm(full.tensors),
            losses=losses,
        )
        _check(fidelity)
        return fidelity

    def _full_merge(self, operator: str, seed: int) -> _Full:
        if self._full is None or self._full_key != (operator, seed):
            self._full_key, self._full = (operator, seed), self._new_full_merge(operator, seed)
            if self._full.reference not in self.references:
                self.references.append(self._full.reference)
        return self._full

    def _new_full_merge(self, operator: str, seed: int) -> _Full:
        arguments = ["--seed", str(seed)]
        with self._merger.merged(operator, _EXACT_DTYPE, arguments) as (out, report):
            tensors = read_tensors(out)
            losses = _losses_as_bf16(out, self._family.heldout)
        rounded = rounded_to_bf16(tensors)
        with self._merger.merged(operator, _OUTPUT_DTYPE, arguments) as (out, _):
            if distance(read_tensors(out), rounded) != 0:
                raise FidelityError(f"{operator}: the bfloat16 merge is not the float32 merge, rounded")
        base = self._family.base_tensors
        reference = Reference(operator, seed, distance(tensors, base) / norm(base), losses)
        return _Full(tensors, rounded, int(report["expert_bytes"]), reference)


def _losses_as_bf16(model: Path, heldout: Heldout) -> Mapping[str, float]:
    """Score a float32 output as the bfloat16 output would score."""
    return heldout_losses(model, heldout, as_bf16=True)


def _check(fidelity: Fidelity) -> None:
    point = fidelity.point
    if fidelity.expert_bytes > fidelity.budget_bytes:
        raise FidelityError(f"{point}: read {fidelity.expert_bytes} bytes of at most {fidelity.budget_bytes}")
    if point.budget_percent == 100 and fidelity.error != 0:
        raise FidelityError(f"{point}: a full budget gave an error of {fidelity.error}")


def run(merger: Merger, wanted: Sequence[Point], seeds: Sequence[int]) -> Report:
    """Measure all points, those with the same full merge together, printing as it goes."""
    merger.analyze()
    bench = Bench(merger, seeds)
    base_losses = heldout_losses(merger.family.base, merger.family.heldout)
    measured: dict[Point, Fidelity] = {}
    for point in sorted(wanted, key=lambda p: (list(OPERATORS).index(p.operator), reference_seed(p, seeds))):
        fidelity = measured[point] = bench.measure(point)
        print(
            f"{point.operator} {point.policy} {point.budget_percent} % seed {point.seed}: error {fidelity.error:.4f}, "
            f"read {fidelity.read_fraction:.1%}, loss {mean_loss(fidelity.losses):.4f}",
            flush=True,
        )
    return Report(base_losses, tuple(bench.references), tuple(measured[point] for point in wanted))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGET_PERCENTS), metavar="PERCENT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="for everything that is random")
    parser.add_argument("--threads", type=int, default=2, help="for scoring")
    parser.add_argument("--mergepipe", type=Path, help="another program than this Python's")
    parser.add_argument("--ours", nargs="*", default=[], metavar="ARG", help="more arguments for analyze and merge")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--markdown", type=Path, help="write the tables")
    return parser.parse_args()


def main() -> int:
    options = _options()
    tiny_lm.use_threads(options.threads)
    wanted = list(points(options.operators, options.policies, options.budgets, options.seeds))
    directory = options.root / "work"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        family = Family.read(options.root, options.experts)
        program = OURS if options.mergepipe is None else (str(options.mergepipe),)
        report = run(Merger(program, directory, family, tuple(options.ours)), wanted, options.seeds)
    except FidelityError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tables = to_markdown(report)
    print(tables)
    if options.json:
        options.json.write_text(to_json(report))
    if options.markdown:
        options.markdown.write_text(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
