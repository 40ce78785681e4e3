"""Part `resuming`: LLMTailor's parity and filter at a fine-tuning rate, on a public language model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tiny_lm
from benchmarks.process import BenchmarkError
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.smollm import make_base
from benchmarks.reproduce.workplace import Workplace, training_python
from benchmarks.tailor_resuming import RECOVERED_NATS, RESULT, Resumed, table_of
from benchmarks.tailor_training import Setting

_CHECKPOINT_BYTES = 1_620_000_000  # weights and two moments in float32
_CHECKPOINTS = 4  # those of three steps, and a composite
_SETTING = Setting(at=20, every=2, after=20, rate=2e-5, schedule="linear")


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train: `where` it ran, said on the page, and `prefix`, before the seed in the names of its entries."""

    prefix: str
    where: str
    about: str
    ranks: int
    window_tokens: int

    def options(self) -> list[str]:
        """Return the options of the command that runs a seed."""
        setting = [f"--{name}={value}" for name, value in asdict(_SETTING).items()]
        return [*setting, f"--ranks={self.ranks}", f"--window-tokens={self.window_tokens}"]

    def entries(self, results: Results) -> list[Entry]:
        """Return the stored entries of its seeds."""
        return [entry for key, entry in results.entries.items() if key.startswith(self.prefix)]


ALONE = Variant("alone/", "By one process", "**One process.**", 1, 256)
ZERO3 = Variant(
    "zero3/", "By two ranks under ZeRO-3",
    "**Two ranks under DeepSpeed's ZeRO-3**, in bfloat16 with masters and moments in float32; composed from and into"
    " the ranks' own files.",
    2, 128,
)  # fmt: skip
VARIANTS = (ALONE, ZERO3)


def _needs(size: Size) -> Needs:
    return Needs(0, 3) if size.is_toy else Needs(_CHECKPOINTS * _CHECKPOINT_BYTES, 2 + 15 * size.repeats)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("resuming")
    make = _make_toy if size.is_toy else make_base
    for variant in VARIANTS:
        for seed in range(1, size.repeats + 1):
            results.measure(f"{variant.prefix}{seed}", partial(_resume, place, make, variant, seed))


def _make_toy(out: Path, work: Path) -> None:
    """Write a new model of eight small layers into `out`."""
    if not out.exists():
        text = (Path(__file__).parent / "resuming.py").read_text()
        shape = tiny_lm.LmShape(300, hidden=32, layers=8, kv_heads=1, head_dim=16, intermediate=64)
        tiny_lm.save_model(tiny_lm.new_model(shape, 0), tiny_lm.make_tokenizer([text], shape.vocab), work / "toy")
        (work / "toy").rename(out)


def _resume(place: Workplace, make: Callable[[Path, Path], None], variant: Variant, seed: int) -> dict[str, Any]:
    python, base, work = training_python(), place.folder / "base", place.folder / f"work-{seed}"
    make(base, place.within("packages").folder)
    shutil.rmtree(work, ignore_errors=True)
    command = [python, "-m", "benchmarks.tailor_resuming", work, "--base", base, "--seeds", seed, *variant.options()]
    if subprocess.run([*map(str, command)], check=False).returncode:
        raise BenchmarkError(f"resuming seed {seed} failed; what it printed is above")
    found: dict[str, Any] = json.loads((work / RESULT).read_text())
    shutil.rmtree(work)
    return found


def stored_runs(results: Results, variant: Variant) -> list[Resumed]:
    """Return the runs of all seeds of a variant."""
    stored = (run for entry in variant.entries(results) for run in entry["results"])
    return [Resumed(**{**run, "ages": tuple(run["ages"]), "excess": tuple(run["excess"])}) for run in stored]


def _page(results: Results) -> Page:
    variants = [variant for variant in VARIANTS if variant.entries(results)]
    told = " ".join(f"{variant.where}: {_cost(stored_runs(results, variant))}." for variant in variants)
    meaning = f"**What resuming from a composite costs at a fine-tuning rate.** {told}"
    tables = [piece for variant in variants for piece in (_about(results, variant), _table(results, variant))]
    setting = Setting(**variants[0].entries(results)[0]["setting"])
    columns = (
        "SmolLM2-135M-Instruct, dequantized ([fine-tunes of a public language model](trained.md)), is fine-tuned by the"
        f" Trainer with AdamW at a peak rate of {setting.rate:g}, falling to nothing over {setting.last} steps, saved"
        f" every {setting.every} steps, and interrupted at step {setting.at}. Of these saves, composites contain what"
        " the paper's strategies would have saved; each is resumed to the end on the same batches. Columns *steps*:"
        " losses above those of the run that was not interrupted, in nats; *recovered*: the step after which ten steps"
        f" are within {RECOVERED_NATS} on average; *last losses*: the mean of the last ten. Means over seeds, with the"
        " lowest and highest."
    )
    return Page("Resuming a fine-tune from composites", meaning, (columns, *tables))


def _about(results: Results, variant: Variant) -> str:
    entries = variant.entries(results)
    return f"{variant.about} Steps of {entries[0]['step_tokens']} tokens; seeds: {len(entries)}."


def _table(results: Results, variant: Variant) -> Table:
    runs, setting = stored_runs(results, variant), Setting(**variant.entries(results)[0]["setting"])
    return table_of(setting, runs)


def _cost(runs: list[Resumed]) -> str:
    """Tell of every composite whether its last losses are back at those of the run that was not interrupted."""
    told = []
    for name in dict.fromkeys(run.name for run in runs if run.ages):
        ends = {run.seed: run.final_excess for run in runs if run.name == name}
        late = [seed for seed, excess in ends.items() if excess >= RECOVERED_NATS]
        back = (
            f"**not back within {RECOVERED_NATS} nats in {len(late)} of {len(ends)} seeds**"
            if late
            else (f"back within {RECOVERED_NATS} nats")
        )
        told.append(f"{name}: {back}, at most {max(ends.values()):+.4f} at the end")
    return "; ".join(told)


PART = Part(
    "resuming", "LLMTailor's parity and filter at a fine-tuning rate: losses after resuming", _needs, _measure, _page
)
