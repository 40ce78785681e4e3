"""Folding a LoRA into its base by `mergepipe lora apply` and by PEFT: seconds and peak memory of whole processes.

`python -m benchmarks.apply_adapter FOLDER [--shape 0.6b] [--rounds 3]` writes the models below FOLDER, which needs room
for three of them, and prints a line for each program: the medians of rounds in which the programs take turns.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.floor import make_cold
from benchmarks.process import OURS, Clocks, ProcessCost, measure_checked, processors_of_others
from benchmarks.reproduce.sizes import SHAPES
from support.demo_files import write_adapter
from support.families import write_family

_BY_PEFT = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""


def main(arguments: Sequence[str]) -> int:
    """Measure both programs."""
    parser = argparse.ArgumentParser(prog="benchmarks.apply_adapter", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)

    folder: Path = options.folder
    base = folder / "base"
    adapter = folder / "adapter"
    if not adapter.exists():
        shape = SHAPES[options.shape]
        write_family(folder, shape, 0)
        adapter.mkdir()
        write_adapter(adapter, shape)

    out = folder / "out"
    paths = [str(base), str(adapter)]
    programs = {
        "mergepipe lora apply": [*OURS, "lora", "apply", *paths, "-o", str(out), "--no-catalog"],
        "PEFT merge_and_unload, save_pretrained": [sys.executable, "-c", _BY_PEFT, *paths, str(out)],
    }
    costs: dict[str, list[ProcessCost]] = {name: [] for name in programs}
    before = Clocks.read()
    for _ in range(options.rounds):
        for name, command in programs.items():
            shutil.rmtree(out, ignore_errors=True)
            make_cold([*base.iterdir(), *adapter.iterdir()])
            costs[name].append(measure_checked(command, log=folder / "log.txt"))
    others = processors_of_others(before, Clocks.read())

    for name, rounds in costs.items():
        print(
            f"{name}: {statistics.median(cost.wall_seconds for cost in rounds):.1f} s, "
            f"{statistics.median(cost.cpu_seconds for cost in rounds):.1f} processor seconds, "
            f"{statistics.median(cost.peak_anonymous_bytes for cost in rounds) / 2**20:.0f} MiB"
        )
    print(f"other programs used {others:.1f} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
