"""A folder in which parts merge families on cold files, measured; it refuses what the disk does not hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floor import floor_seconds, make_cold
from benchmarks.peers import Tool
from benchmarks.process import OURS, BenchmarkError, ProcessCost, available_memory_bytes, measure, measure_checked
from benchmarks.recipes import Case
from benchmarks.reproduce.sizes import SHAPES
from support.families import Cosines, FamilyPaths, family_paths, write_family

_INSTRUMENTED = (sys.executable, "-m", "benchmarks.reproduce.instrumented")
_TRAINING_PYTHON = Path(".venv-train/bin/python")
_SLACK_BYTES = 200_000_000
_MEMORY_SHARE = 0.95  # of what is available: a program that takes more is stopped


class NoRoomError(Exception):
    """The disk has not the room that a part needs."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder for families, catalogs and outputs. A family stays in it until `remove`."""

    folder: Path

    def check_room(self, needed_bytes: int) -> None:
        """Refuse to begin where the disk, with what an earlier run has left here, lacks room.

        Raises:
            NoRoomError: it does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        present_bytes = folder_bytes(self.folder)
        free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes + _SLACK_BYTES > free_bytes + present_bytes:
            message = f"{self.folder}: {needed_bytes / 1e9:.1f} GB are needed, {free_bytes / 1e9:.1f} GB are free"
            raise NoRoomError(f"{message}; choose a smaller --size or --max-experts, or another --work")

    def within(self, name: str) -> Workplace:
        """Return a folder of its own in this one."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return Workplace(self.folder / name)

    def family(self, shape: str, n_experts: int, *, is_fitted: bool = False) -> FamilyPaths:
        """Write a family, or find it; `is_fitted` as `support.families.write_family` has it."""
        folder = self.folder / f"{'fitted' if is_fitted else 'family'}-{shape}-{n_experts}"
        if not (folder / "written").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_family(folder, SHAPES[shape], n_experts, is_fitted=is_fitted)
            (folder / "written").touch()
        return family_paths(folder, n_experts)

    def correlated_family(self, shape: str, cosines: Cosines) -> FamilyPaths:
        """Write a family whose experts' deltas have given cosines, or find it."""
        folder = self.folder / f"correlated-{shape}-{len(cosines)}"
        if not (folder / "written").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_family(folder, SHAPES[shape], len(cosines), cosines=cosines)
            (folder / "written").touch()
        return family_paths(folder, len(cosines))

    def remove(self) -> None:
        """Delete everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def ours(
        self,
        *arguments: object,
        cold: Sequence[Path] = (),
        rate: float | None = None,
        phases: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, Any], ProcessCost]:
        """Run our command line on inputs that are `cold`; return its JSON report and its cost.

        Inputs come at `rate` bytes a second, where it is given; the seconds of its phases go to the file `phases`.

        Raises:
            BenchmarkError: the command failed.
        """
        make_cold(cold)
        log = self.folder / "log.txt"
        program = OURS if rate is None else (*_INSTRUMENTED, "--rate", str(rate))
        program = program if phases is None else (*_INSTRUMENTED, "--phases", str(phases))
        command = [*program, *map(str, arguments), "--json"]
        cost = measure_checked(command, log=log, environment=environment)
        text = log.read_text()
        report: dict[str, Any] = json.loads(text[text.index("{") :])
        return report, cost

    def merge(
        self,
        recipe: Path,
        inputs: Sequence[Path],
        *options: object,
        from_plan: bool = False,
        rate: float | None = None,
        repeats: int = 1,
        has_floor: bool = False,
        judge: Callable[[Path], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Merge `recipe`, or a stored plan, on cold `inputs` `repeats` times; return bytes, and all times with medians.

        With `has_floor` the floor of as many bytes of the inputs is measured after each. `judge` gets the last output,
        may move it, and adds to the result.
        """
        out = self.folder / "out"
        files = weight_files(inputs)
        seconds, cpu_seconds, floors, judged = [], [], [], {}
        for left in reversed(range(repeats)):
            shutil.rmtree(out, ignore_errors=True)
            what = ("--plan", recipe, out) if from_plan else (recipe, out)
            report, cost = self.ours("merge", *what, *options, cold=files, rate=rate)
            seconds.append(cost.wall_seconds)
            cpu_seconds.append(cost.cpu_seconds)
            manifest_bytes = (out / "mergepipe.json").stat().st_size
            if judge is not None and not left:
                judged = judge(out)
            shutil.rmtree(out, ignore_errors=True)  # before the floor, which writes as much: there is room for one
            if has_floor:
                floors.append(self.floor(files, report["output_bytes"], report["base_bytes"] + report["expert_bytes"]))
        counts = ("expert_bytes", "base_bytes", "metadata_bytes", "analysis_bytes", "output_bytes", "planned_bytes")
        return {
            **{name: report.get(name) for name in counts},
            "kernel_read_bytes": cost.read_bytes,
            "kernel_written_bytes": cost.written_bytes,
            "peak_rss_bytes": cost.peak_rss_bytes,
            "peak_anonymous_bytes": cost.peak_anonymous_bytes,
            "manifest_bytes": manifest_bytes,
            **_times(seconds, cpu_seconds, floors),
            **judged,
        }

    def floor(self, files: Sequence[Path], output_bytes: int, read_bytes: int) -> float:
        """Measure the seconds to read the first `read_bytes` of the files while `output_bytes` are written."""
        return floor_seconds(files, self.folder / "scratch", output_bytes, read_bytes)

    def peer(self, tool: Tool, case: Case, judge: Callable[[Path], dict[str, Any]] = lambda _: {}) -> dict[str, Any]:
        """Run another program once on a case; return its bytes and times, the floor of all inputs, what `judge` adds.

        Where it needs more memory than the machine has, that is the result: the bytes that it could have.
        """
        recipe, out, log = (self.folder / name for name in ("peer.yml", "out", "log.txt"))
        recipe.write_text(case.recipe)
        shutil.rmtree(out, ignore_errors=True)
        files = case.files()
        make_cold(files)
        memory_bytes = int(_MEMORY_SHARE * available_memory_bytes(Path("/proc/meminfo").read_text()))
        command = tool.command(case, recipe, out)
        cost = measure(command, log=log, environment=tool.environment, memory_bytes=memory_bytes)
        judged = judge(out) if not cost.exit_code else {}
        shutil.rmtree(out, ignore_errors=True)
        printed = log.read_text(errors="replace")
        if cost.exit_code == -signal.SIGKILL or (cost.exit_code and "annot allocate memory" in printed):
            return {"out_of_memory_bytes": memory_bytes, "peak_rss_bytes": cost.peak_rss_bytes}
        if cost.exit_code:
            raise BenchmarkError(f"{tool.name}: exit code {cost.exit_code}\n{printed[-2000:]}")
        total = sum(file.stat().st_size for file in files)
        floors = [self.floor(files, files[0].stat().st_size, total)]
        return {
            "kernel_read_bytes": cost.read_bytes,
            "kernel_written_bytes": cost.written_bytes,
            "peak_rss_bytes": cost.peak_rss_bytes,
            "peak_anonymous_bytes": cost.peak_anonymous_bytes,
            **_times([cost.wall_seconds], [cost.cpu_seconds], floors),
            **judged,
        }


def _times(seconds: Sequence[float], cpu_seconds: Sequence[float], floors: Sequence[float]) -> dict[str, Any]:
    times: dict[str, Any] = {
        "seconds": round(statistics.median(seconds), 3),
        "all_seconds": [round(value, 3) for value in seconds],
        "cpu_seconds": round(statistics.median(cpu_seconds), 3),
    }
    if floors:
        times["floor_seconds"] = round(statistics.median(floors), 3)
    return times


def weight_files(models: Sequence[Path]) -> list[Path]:
    """Return the weight files of model directories, in their order; of a packed expert all files."""
    return [file for model in models for file in sorted(model.glob("*.safetensors")) or _files(model)]


def folder_bytes(folder: Path) -> int:
    """Sum the sizes of all files in a folder and those below it."""
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def training_python() -> Path:
    """Return the interpreter of requirements/train.txt, which has what the Trainer needs.

    Raises:
        BenchmarkError: it is not there.
    """
    python = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", _TRAINING_PYTHON)).absolute()
    if not python.exists():
        raise BenchmarkError(f"{python}: not there; `make {_TRAINING_PYTHON.parents[1]}/.train` installs it")
    return python
