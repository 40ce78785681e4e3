"""Part `resuming`: LLMTailor's parity and filter at a fine-tuning rate, on a public language model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tiny_lm
from benchmarks.merge import BenchmarkError
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.smollm import make_base
from benchmarks.reproduce.workplace import Workplace
from benchmarks.tailor_resuming import RESULT, Resumed, Setting, table_of

_SETTING = Setting(at=20, every=2, after=20, rate=2e-5, schedule="linear")
_DEFAULT_PYTHON = Path(".venv-train/bin/python")
_CHECKPOINT_BYTES = 1_620_000_000  # weights and two moments in float32


def training_python() -> Path:
    """Return the interpreter of requirements/train.txt, which has what the Trainer needs.

    Raises:
        BenchmarkError: it is not there.
    """
    python = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", _DEFAULT_PYTHON)).absolute()
    if not python.exists():
        raise BenchmarkError(f"{python}: not there; `make {_DEFAULT_PYTHON.parents[1]}/.train` installs it")
    return python


def _needs(size: Size) -> Needs:
    return Needs(0, 1) if size.is_toy else Needs(7 * _CHECKPOINT_BYTES, 2 + 8 * size.repeats)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("resuming")
    make = _make_toy if size.is_toy else make_base
    for seed in range(1, size.repeats + 1):
        results.measure(str(seed), partial(_resume, place, make, seed))


def _make_toy(out: Path, work: Path) -> None:
    """Write a new model of eight small layers into `out`."""
    if not out.exists():
        text = (Path(__file__).parent / "resuming.py").read_text()
        shape = tiny_lm.LmShape(300, hidden=32, layers=8, kv_heads=1, head_dim=16, intermediate=64)
        tiny_lm.save_model(tiny_lm.new_model(shape, 0), tiny_lm.make_tokenizer([text], shape.vocab), work / "toy")
        (work / "toy").rename(out)


def _resume(place: Workplace, make: Callable[[Path, Path], None], seed: int) -> dict[str, Any]:
    python, base, work = training_python(), place.folder / "base", place.folder / f"work-{seed}"
    make(base, place.within("packages").folder)
    shutil.rmtree(work, ignore_errors=True)
    options = [f"--{name}={getattr(_SETTING, name)}" for name in ("at", "every", "after", "rate", "schedule")]
    command = [python, "-m", "benchmarks.tailor_resuming", work, "--base", base, *options, "--seeds", str(seed)]
    if subprocess.run([*map(str, command)], check=False).returncode:
        raise BenchmarkError(f"resuming seed {seed} failed; what it printed is above")
    found: dict[str, Any] = json.loads((work / RESULT).read_text())
    shutil.rmtree(work)
    return found


def stored_runs(results: Results) -> list[Resumed]:
    """Return the runs of all seeds."""
    stored = (run for entry in results.entries.values() for run in entry["results"])
    return [Resumed(**{**run, "ages": tuple(run["ages"]), "excess": tuple(run["excess"])}) for run in stored]


def _page(results: Results) -> Page:
    runs, setting = stored_runs(results), Setting(**next(iter(results.entries.values()))["setting"])
    header, rows = table_of(setting, runs)
    kept = [number for number, _ in enumerate(header) if any(row[number] for row in rows)]
    table = Table(tuple(header[n] for n in kept), tuple(tuple(row[n] for n in kept) for row in rows))
    about = (
        f"SmolLM2-135M-Instruct, dequantized (see [fine-tunes of a public language model](trained.md)), is fine-tuned"
        f" by the Trainer with AdamW at a peak rate of {setting.rate:g}, falling to nothing over"
        f" {setting.at + setting.after} steps of 512 tokens, and interrupted at step {setting.at}. Composites are made"
        f" of full saves as a run with a save every {setting.every} steps by the paper's strategies would have them;"
        f" each is resumed to the end on the same batches. The columns \"steps\" are its losses above those of the run"
        f" that was not interrupted, in nats; *recovered*: the step after which ten steps are within 0.01 on average;"
        f" *last losses*: the mean of the last ten. Seeds: {len(results.entries)}"
        f"{', means with the lowest and highest' if len(results.entries) > 1 else ''}."
    )  # fmt: skip
    return Page("Resuming a fine-tune from composites", _meaning(runs), (about, table))


def _meaning(runs: list[Resumed]) -> str:
    told = []
    for name in dict.fromkeys(run.name for run in runs if run.ages):
        of_name = [run for run in runs if run.name == name]
        worst = max(sum(run.excess[-10:]) / 10 for run in of_name)
        if all(run.recovered_after is not None for run in of_name):
            told.append(f"{name}: back within 0.01 nats, at most {worst:+.4f} at the end")
        else:
            told.append(f"{name}: **not back within 0.01 nats**, {worst:+.4f} at the end")
    return f"**What resuming from a composite costs at a fine-tuning rate.** {'; '.join(told)}."


PART = Part(
    "resuming", "LLMTailor's parity and filter at a fine-tuning rate: losses after resuming", _needs, _measure, _page
)
