"""The demonstration behind `make demo`: a small family, merged three ways by the command line, and one table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.core.units import format_bytes, format_rate, format_seconds
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import DEMO, FamilyPaths, family_paths, write_family

N_EXPERTS = 3
PARAMETERS = {
    "linear": "weight: 1.0",
    "ties": "weight: 1.0, density: 0.2",
    "dare_ties": "weight: 0.5, density: 0.3",
}


@dataclass(frozen=True, slots=True)
class Change:
    """How far a model is from the base: the norm of the difference over the base's, and the share of elements."""

    relative_norm: float
    changed_fraction: float


def main(root: Path) -> int:
    """Run the demonstration under `root`."""
    family = make_family(root / "family")
    rows = []
    for operator, parameters in PARAMETERS.items():
        recipe = write_recipe(root, operator, parameters, family)
        out = root / f"merged-{operator}"
        report = merge(recipe, out)
        rows.append((operator, report, measure_change(family.base, out), out))
    experts = [measure_change(family.base, expert) for expert in family.experts]
    print_table(rows, experts)
    print(f"\nrecipes: {root}/*.yml; to see what one would do:  .venv/bin/mergepipe check {root}/ties.yml")
    return 0


def make_family(root: Path) -> FamilyPaths:
    """The family under `root`, written if it is not there yet."""
    paths = family_paths(root, N_EXPERTS)
    if all((model / "config.json").exists() for model in paths.models):
        return paths
    print(f"writing a base and {N_EXPERTS} experts to {root}/")
    return write_family(root, DEMO, N_EXPERTS)


def write_recipe(root: Path, operator: str, parameters: str, family: FamilyPaths) -> Path:
    """Write a mergekit recipe with paths relative to itself."""
    lines = [f"merge_method: {operator}", f"base_model: {family.base.relative_to(root)}", "models:"]
    for expert in family.experts:
        lines += [f"  - model: {expert.relative_to(root)}", f"    parameters: {{{parameters}}}"]
    recipe = root / f"{operator}.yml"
    recipe.write_text("\n".join([*lines, "dtype: bfloat16", ""]), encoding="utf-8")
    return recipe


def merge(recipe: Path, out: Path) -> dict[str, float]:
    """Merge by the command line; a snapshot of an earlier demonstration is replaced."""
    command = ["merge", str(recipe), str(out), "--force"]
    print(f"$ mergepipe {' '.join(command)}", flush=True)
    ran = subprocess.run([sys.executable, "-m", "mergepipe", *command, "--json"], stdout=subprocess.PIPE, check=False)
    if ran.returncode != 0:  # it has said why
        sys.exit(ran.returncode)
    report: dict[str, float] = json.loads(ran.stdout)
    return report


def measure_change(base: Path, model: Path) -> Change:
    """Compare a model with the base, tensor by tensor."""
    base_squares = delta_squares = 0.0
    changed = total = 0
    for base_N, model_N in paired_tensors(base, model):
        delta_N = model_N.astype(np.float64) - base_N
        base_squares += float(np.square(base_N, dtype=np.float64).sum())
        delta_squares += float(np.square(delta_N).sum())
        changed += int(np.count_nonzero(delta_N))
        total += delta_N.size
    return Change((delta_squares / base_squares) ** 0.5, changed / total)


def paired_tensors(base: Path, model: Path) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """The tensors of both, by name."""
    opened = [open_checkpoint(LocalStore(), Location.local(path.absolute())) for path in (base, model)]
    for name in sorted(opened[0].tensors):
        yield read_tensor(opened[0], name), read_tensor(opened[1], name)


def read_tensor(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """One bf16 tensor, flat."""
    (entry,) = checkpoint.tensors[name].stored
    stored_N = np.fromfile(entry.file.local_path, "<u2", entry.n_elements, offset=entry.offset)
    return (stored_N.astype(np.uint32) << np.uint32(16)).view(np.float32)


def print_table(rows: list[tuple[str, dict[str, float], Change, Path]], experts: list[Change]) -> None:
    """One line for each merge. Changes are against the base."""
    table = Table(title=f"base + {N_EXPERTS} experts of {format_bytes(DEMO.n_parameters() * 2)} each")
    for heading in ("operator", "time", "speed", "read", "written", "peak memory", "change", "elements changed"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for operator, report, change, _ in rows:
        table.add_row(
            operator,
            format_seconds(report["seconds"]),
            format_rate(report["bytes_per_second"]),
            format_bytes(report["read_bytes"]),
            format_bytes(report["output_bytes"]),
            format_bytes(report["peak_rss_bytes"]),
            f"{change.relative_norm:.2%}",
            f"{change.changed_fraction:.0%}",
        )
    mean_norm = sum(change.relative_norm for change in experts) / len(experts)
    mean_fraction = sum(change.changed_fraction for change in experts) / len(experts)
    table.add_row("(an expert, mean)", *([""] * 5), f"{mean_norm:.2%}", f"{mean_fraction:.0%}")
    Console(width=None if sys.stdout.isatty() else 110).print("", table)
    print("change: norm of (result - base) over the norm of the base; at this size most of the time is start-up\n")
    for operator, _, _, out in rows:
        print(f"{operator:<10} {out}/")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo")))
