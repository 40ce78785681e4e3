"""The benchmark of full-read merges: the I/O floor, MergePipe, a naive torch script and mergekit, on cold files."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import peer_mergekit
from benchmarks.cold import make_cold
from benchmarks.floor import FloorResult, FloorSetting
from benchmarks.make_family import SHAPES, FamilyRequest, add_family_options, ensure_family, family_request
from benchmarks.process import ProcessCost, measure
from benchmarks.recipes import Case, cases
from benchmarks.results import COLUMNS, Row, Run, cells, summarise, this_machine, to_json, to_markdown
from mergepipe.errors import MergePipeError
from support.families import family_bytes

OURS = Path(".venv/bin/mergepipe")
PEER_VENV = Path(".venv-peer")
NAIVE = Path(__file__).with_name("naive_torch.py")
NAIVE_OPERATORS = ("linear", "task_arithmetic", "ties", "dare_ties")
OPERATORS = ("linear", "task_arithmetic", "ties", "breadcrumbs", "dare_ties", "dare_linear", "slerp")
_SLACK_BYTES = 1_000_000_000
_PLAIN_WIDTH = 160


class BenchmarkError(Exception):
    """A tool failed, or there is no room: nothing to report."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One program to time: how to call it for a case, a recipe file and an output directory."""

    name: str
    command: Callable[[Case, Path, Path], Sequence[str]]
    environment: Mapping[str, str]
    operators: tuple[str, ...]


def ours(executable: Path, arguments: Sequence[str]) -> Tool:
    """MergePipe by its command line."""

    def command(_case: Case, recipe: Path, out: Path) -> Sequence[str]:
        return [str(executable), "merge", str(recipe), str(out), "--json", "--quiet", *arguments]

    return Tool("mergepipe", command, {}, OPERATORS)


def naive(venv: Path) -> Tool:
    """The whole-tensor torch script."""

    def command(case: Case, _recipe: Path, out: Path) -> Sequence[str]:
        return [str(venv / "bin/python"), str(NAIVE), case.operator, str(out), *map(str, case.inputs)]

    return Tool("naive torch", command, {}, NAIVE_OPERATORS)


def mergekit(venv: Path) -> Tool:
    """The peer, by its command line."""

    def command(_case: Case, recipe: Path, out: Path) -> Sequence[str]:
        return peer_mergekit.command(venv, recipe, out)

    return Tool("mergekit", command, peer_mergekit.ENVIRONMENT, OPERATORS)


@dataclass(frozen=True, slots=True)
class Bench:
    """A working directory in which one tool at a time merges one case."""

    directory: Path
    floor_settings: tuple[str, ...]

    def timed(self, tool: Tool, case: Case) -> Run:
        """Measure the floor, then the tool, both on cold files."""
        inputs = case.input_files()
        floor = measure_floor(self.directory, inputs, self.floor_settings)
        make_cold(inputs)
        cost = self.merged(tool, case)
        return Run(tool.name, case.operator, sum(file.stat().st_size for file in inputs), cost, floor)

    def merged(self, tool: Tool, case: Case) -> ProcessCost:
        """Run the tool once, check that it wrote a whole model, delete that.

        Raises:
            BenchmarkError: it failed, or its output is too small.
        """
        recipe, out, log = (self.directory / name for name in ("recipe.yml", "out", "log.txt"))
        recipe.write_text(case.recipe)
        try:
            cost = measure(tool.command(case, recipe, out), log=log, environment=tool.environment)
            written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if cost.exit_code or written < 0.99 * case.input_files()[0].stat().st_size:
            tail = log.read_text(errors="replace")[-2000:]
            raise BenchmarkError(
                f"{tool.name} {case.operator}: exit code {cost.exit_code}, {written} bytes written\n{tail}"
            )
        return cost


def measure_floor(directory: Path, inputs: Sequence[Path], settings: Sequence[str], *more: str) -> FloorResult:
    """Measure the floor in a process of its own, so that its buffers do not count as anybody's memory."""
    return FloorResult(**json.loads(_floor(directory, inputs, "--json", "--setting", *settings, *more)))


def calibrated(directory: Path, inputs: Sequence[Path]) -> tuple[str, ...]:
    """Find the fastest ways of asking."""
    return tuple(_floor(directory, inputs, "--calibrate").split())


def _floor(directory: Path, inputs: Sequence[Path], *options: str) -> str:
    command = [sys.executable, "-m", "benchmarks.floor", "--scratch", str(directory / "scratch")]
    log = directory / "floor.txt"
    cost = measure([*command, *options, "--", *map(str, inputs)], log=log)
    if cost.exit_code:
        raise BenchmarkError(f"the floor failed:\n{log.read_text(errors='replace')[-2000:]}")
    return log.read_text()


def schedule(tools: Sequence[tuple[Tool, int]], chosen: Sequence[Case]) -> Iterator[tuple[Tool, Case]]:
    """Order the runs in rounds over all tools and cases; a tool with fewer repeats sits out the later rounds."""
    for round_number in range(max(repeat for _, repeat in tools)):
        for tool, repeat in tools:
            for case in chosen:
                if round_number < repeat and case.operator in tool.operators:
                    yield tool, case


def warm_up(directory: Path, tool: Tool, operators: Sequence[str]) -> None:
    """Merge a tiny family once per operator: compiled code is cached once per machine, not per run."""
    tiny = ensure_family(FamilyRequest(directory / "tiny", "tiny", 2, 0))
    bench = Bench(directory, ())
    for operator in operators:
        bench.merged(tool, cases(tiny)[operator])


def _tools(options: argparse.Namespace) -> list[tuple[Tool, int]]:
    tools: list[tuple[Tool, int]] = []
    if not options.no_ours:
        tools.append((ours(options.mergepipe, options.ours), options.repeat))
    if not options.no_peers and peer_mergekit.is_installed(options.peer_venv):
        tools.append((naive(options.peer_venv), options.peer_repeat))
        tools.append((mergekit(options.peer_venv), options.peer_repeat))
    if not tools:
        raise BenchmarkError("nothing to run: no peer environment (make test-peers), and MergePipe was left out")
    return tools


def _check_disk(directory: Path, request: FamilyRequest) -> None:
    needed_bytes = 2 * family_bytes(SHAPES[request.shape], 0) + _SLACK_BYTES
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise BenchmarkError(f"outputs need {needed_bytes} bytes in {directory}, {free_bytes} bytes are free")


def _run(options: argparse.Namespace, console: Console) -> list[Run]:
    request = family_request(options)
    family = ensure_family(request)
    chosen = [case for operator, case in cases(family).items() if operator in options.operators]
    directory = request.root / "work"
    directory.mkdir(exist_ok=True)
    _check_disk(directory, request)
    tools = _tools(options)
    if not options.no_ours:
        warm_up(directory, tools[0][0], [case.operator for case in chosen])
    settings = tuple(map(str, options.floor_setting)) or calibrated(directory, chosen[0].input_files())
    console.print(f"floor: the fastest of {', '.join(settings)} (threads x MiB a request)")
    bench = Bench(directory, settings)
    runs = []
    for tool, case in schedule(tools, chosen):
        run = bench.timed(tool, case)
        runs.append(run)
        console.print(
            f"{tool.name} {case.operator}: {run.cost.wall_seconds:.2f} s, floor {run.floor.seconds:.2f} s",
            highlight=False,
        )
    return runs


def _print_table(console: Console, rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_family_options(parser)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--repeat", type=int, default=3, help="rounds of MergePipe")
    parser.add_argument("--peer-repeat", type=int, default=1, help="rounds of the naive script and mergekit")
    parser.add_argument("--no-peers", action="store_true", help="leave out the naive script and mergekit")
    parser.add_argument("--no-ours", action="store_true", help="leave out MergePipe")
    parser.add_argument("--mergepipe", type=Path, default=OURS)
    parser.add_argument("--peer-venv", type=Path, default=PEER_VENV)
    parser.add_argument("--ours", nargs="*", default=[], metavar="ARG", help="more arguments for mergepipe merge")
    ways = "THREADSxMIB; of several the fastest counts; by default the fastest are looked for first"
    parser.add_argument("--floor-setting", type=FloorSetting.parse, nargs="+", default=[], help=ways)
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--markdown", type=Path, help="write the table")
    return parser.parse_args()


def main() -> int:
    options = _options()
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    title = f"{options.shape}, {options.experts} experts"
    try:
        runs = _run(options, console)
    except (BenchmarkError, MergePipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows, machine = summarise(runs), this_machine()
    _print_table(console, rows, title)
    if options.json:
        options.json.write_text(to_json(rows, runs, machine, title))
    if options.markdown:
        options.markdown.write_text(to_markdown(rows, machine, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
