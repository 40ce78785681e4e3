"""The benchmarks of merges under a budget, on the 0.6B-shaped family: growth of K, budget sweep, blocks, overheads."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.cold import make_cold
from benchmarks.make_family import SHAPES, FamilyRequest, ensure_family
from benchmarks.process import ProcessCost, measure
from support.families import FamilyPaths

OURS = Path(".venv/bin/mergepipe")
GROWTH = (2, 4, 8, 12, 16, 20)
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
BLOCKS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Table:
    """One result: a title, a header and rows of cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", "| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""])


class Bench:
    """Runs our command line on cold files, in a work directory of its own."""

    def __init__(self, family: FamilyPaths, work: Path, repeat: int) -> None:
        self.family = family
        self.work = work
        self.repeat = repeat
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.home = work / "home"

    def recipe(self, operator: str, experts: int, density: float | None = None) -> Path:
        """A recipe over the first experts of the family."""
        parameters: dict[str, float] = {"weight": round(1 / experts, 6)}
        if density is not None:
            parameters["density"] = density
        models = [{"model": str(e.absolute()), "parameters": parameters} for e in self.family.experts[:experts]]
        path = self.work / f"{operator}-{experts}.yml"
        content = {"merge_method": operator, "base_model": str(self.family.base.absolute()), "models": models}
        path.write_text(yaml.safe_dump(content))
        return path

    def files(self, experts: int) -> list[Path]:
        models = (self.family.base, *self.family.experts[:experts])
        return [file for model in models for file in sorted(model.glob("*.safetensors"))]

    def run(self, *arguments: object, experts: int, home: Path | None = None) -> tuple[dict[str, object], ProcessCost]:
        """One command on cold inputs; its JSON report and its cost."""
        make_cold(self.files(experts))
        log = self.work / "log"
        command = [str(OURS), *map(str, arguments), "--json", "--home", str(home or self.home)]
        cost = measure(command, log=log)
        text = log.read_text()
        if cost.exit_code:
            raise SystemExit(f"{' '.join(command)} failed:\n{text}")
        return json.loads(text[text.index("{") :]), cost

    def merge(self, recipe: Path, experts: int, *options: object, repeat: int | None = None) -> Merged:
        """The median of repeated merges."""
        out = self.work / "out"
        runs = []
        for _ in range(repeat or self.repeat):
            report, cost = self.run("merge", recipe, out, "--no-reuse", *options, experts=experts)
            shutil.rmtree(out)
            runs.append((cost.wall_seconds, report, cost))
        runs.sort(key=lambda run: run[0])
        seconds, report, cost = runs[len(runs) // 2]
        return Merged(seconds, tuple(run[0] for run in runs), report, cost)

    def analyze(self, experts: int) -> tuple[dict[str, object], ProcessCost]:
        """Fill the catalog for the first experts."""
        names = [str(e) for e in self.family.experts[:experts]]
        return self.run("analyze", self.family.base, *names, experts=experts)


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge's median time, all times, and the report and cost of the median run."""

    seconds: float
    all_seconds: tuple[float, ...]
    report: dict[str, object]
    cost: ProcessCost

    def gb(self, name: str) -> str:
        value = self.report[name]
        assert isinstance(value, int)
        return f"{value / 1e9:.3f}"


def growth(bench: Bench) -> Table:
    """Fixed budget, growing K, beside the merge in full."""
    budget = sum(file.stat().st_size for file in bench.files(2)[1:]) // 4
    rows = []
    for experts in (k for k in GROWTH if k <= len(bench.family.experts)):
        recipe = bench.recipe("ties", experts, 0.2)
        ours = bench.merge(recipe, experts, "--budget", budget)
        full = bench.merge(recipe, experts, repeat=1)
        rows.append(
            (
                str(experts), ours.gb("expert_bytes"), ours.gb("base_bytes"), ours.gb("output_bytes"),
                f"{ours.seconds:.2f}", f"{ours.cost.peak_rss_bytes / 2**20:.0f}",
                full.gb("expert_bytes"), f"{full.seconds:.2f}",
            )
        )  # fmt: skip
    header = ("K", "expert GB", "base GB", "output GB", "s", "RSS MiB", "in full: expert GB", "in full: s")
    return Table(f"Fixed budget of {budget / 1e9:.3f} GB, growing K (ties, density 0.2)", header, tuple(rows))


def sweep(bench: Bench) -> Table:
    """Budget shares 10 ... 100 %, K = 6."""
    recipe = bench.recipe("ties", 6, 0.2)
    rows = []
    for share in SHARES:
        ours = bench.merge(recipe, 6, "--budget", f"{share}%")
        rows.append((f"{share} %", ours.gb("planned_bytes"), ours.gb("expert_bytes"), f"{ours.seconds:.2f}"))
    return Table("Budget sweep (ties, density 0.2, K = 6)", ("budget", "planned GB", "read GB", "s"), tuple(rows))


def repeats(bench: Bench) -> Table:
    """Five repeats of one budgeted merge."""
    recipe = bench.recipe("ties", 6, 0.2)
    five = bench.merge(recipe, 6, "--budget", "30%", repeat=5)
    times = five.all_seconds
    spread = statistics.stdev(times) / statistics.mean(times)
    row = (five.gb("expert_bytes"), ", ".join(f"{t:.2f}" for t in times), f"{spread:.1%}")
    return Table(
        "Five repeats at 30 % (ties, K = 6)", ("expert GB (each time)", "s", "coefficient of variation"), (row,)
    )


def overheads(bench: Bench) -> Table:
    """ANALYZE, catalog, plan and manifest, K = 6; and what statistics on the way of a merge cost."""
    recipe = bench.recipe("linear", 6)
    plan_path = bench.work / "plan.json"
    _, plan_cost = bench.run("plan", recipe, "--budget", "30%", "-o", plan_path, experts=6)
    plain = bench.merge(recipe, 6, "--no-catalog")
    out = bench.work / "out"
    gathering = []
    for _ in range(bench.repeat):
        fresh = bench.work / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        _, cost = bench.run("merge", recipe, out, "--statistics", experts=6, home=fresh)
        gathering.append(cost.wall_seconds)
        manifest_bytes = (out / "mergepipe.json").stat().st_size
        shutil.rmtree(out)
    names = [str(e) for e in bench.family.experts[:6]]
    shutil.rmtree(bench.work / "fresh", ignore_errors=True)
    _, analyze_cost = bench.run("analyze", bench.family.base, *names, experts=6, home=bench.work / "fresh")
    catalog_bytes = (bench.work / "fresh" / "catalog.sqlite3").stat().st_size
    expert_bytes = sum(file.stat().st_size for file in bench.files(6)[1:])
    extra = statistics.median(gathering) / plain.seconds - 1
    rows = (
        ("ANALYZE of 6 experts, s", f"{analyze_cost.wall_seconds:.2f}"),
        ("catalog, share of expert bytes", f"{catalog_bytes / expert_bytes:.4%}"),
        ("plan (whole process), s", f"{plan_cost.wall_seconds:.2f}"),
        ("stored plan, kB", f"{plan_path.stat().st_size / 1e3:.0f}"),
        ("manifest of a full merge, kB", f"{manifest_bytes / 1e3:.0f}"),
        ("linear in full without a catalog, s", f"{plain.seconds:.2f}"),
        ("linear in full, filling the catalog on its way, s", f"{statistics.median(gathering):.2f} ({extra:+.1%})"),
    )
    return Table("Overheads (K = 6)", ("what", "measured"), rows)


def blocks(bench: Bench) -> Table:
    """Block sizes from 16 Ki to 1 Mi elements, K = 6: catalog, plan, time, and the bound that a linear plan states."""
    recipe = bench.recipe("linear", 6)
    names = [str(e) for e in bench.family.experts[:6]]
    out = bench.work / "out"
    rows = []
    for kibi in BLOCKS:
        home, option = bench.work / f"home-{kibi}", ("--block-elements", kibi * 1024)
        _, analysis = bench.run("analyze", bench.family.base, *names, *option, experts=6, home=home)
        plan, planning = bench.run("plan", recipe, "--budget", "30%", *option, experts=6, home=home)
        seconds = []
        for _ in range(bench.repeat):
            _, cost = bench.run("merge", recipe, out, "--budget", "30%", *option, experts=6, home=home)
            seconds.append(cost.wall_seconds)
            shutil.rmtree(out)
        bound = plan["bound"]
        assert isinstance(bound, dict)
        full_cost = plan["full_cost_bytes"]
        assert isinstance(full_cost, int)
        rows.append(
            (
                f"{kibi} Ki", f"{full_cost / 1e9:.3f}", f"{bound['relative']:.3f}",
                f"{(home / 'catalog.sqlite3').stat().st_size / 1e6:.2f}", f"{analysis.wall_seconds:.1f}",
                f"{planning.wall_seconds:.2f}", f"{statistics.median(seconds):.2f}",
            )
        )  # fmt: skip
        shutil.rmtree(home)
    header = ("block", "cost of all GB", "bound at 30 %", "catalog MB", "ANALYZE s", "plan s", "merge at 30 % s")
    return Table("Block sizes (linear, K = 6)", header, tuple(rows))


PARTS: dict[str, Callable[[Bench], Table]] = {
    "growth": growth,
    "sweep": sweep,
    "repeats": repeats,
    "overheads": overheads,
    "blocks": blocks,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(".bench/family"))
    parser.add_argument("--work", type=Path, default=Path(".bench/budget"))
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    family = ensure_family(FamilyRequest(options.root, options.shape, options.experts, 0))
    bench = Bench(family, options.work, options.repeat)
    bench.analyze(len(family.experts))
    for name in options.parts.split(","):
        text = PARTS[name](bench).markdown()
        print(text, flush=True)
        if options.markdown:
            with options.markdown.open("a") as stream:
                stream.write(text + "\n")
    shutil.rmtree(options.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
