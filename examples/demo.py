"""The demonstration behind `make demo`: writes a small model family, merges it three ways, and prints one table.

Run it from the root of the checkout. The models, the recipe `experts.yml` and the training checkpoints that it writes
are those that the commands of README.md and of the guide read. `--remove` removes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mergepipe
from support.demo_files import EXPERTS, NotOursError, demo_models, remove_demo_files, write_demo_files

OUTPUTS = Path(".demo")
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


def main(arguments: list[str]) -> int:
    """Run the demonstration in the working folder."""
    here = Path()
    if arguments == ["--remove"]:
        remove_demo_files(here)
        return 0

    print("writing models/, experts.yml and run/ where they are missing", flush=True)
    try:
        write_demo_files(here)
    except NotOursError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    base, *experts = demo_models(here)
    rows = [row_of_merge(operator, base) for operator in PARAMETERS]
    print_table(rows, [measure_change(base, expert) for expert in experts])
    print("\nNext, with this environment on the path:  export PATH=$PWD/.venv/bin:$PATH")
    print("  mergepipe check experts.yml\n  mergepipe merge experts.yml merged\nREADME.md goes on from here.")
    return 0


def row_of_merge(operator: str, base: Path) -> list[str]:
    """Merge the family by one operator; return the cells of its row."""
    recipe = write_recipe(operator)
    out = OUTPUTS / f"merged-{operator}"
    report = merge(recipe, out)
    change = measure_change(base, out)
    return [
        operator,
        f"{report['seconds']:.1f} s",
        f"{report['read_bytes'] / 1e6:.0f} MB",
        f"{report['output_bytes'] / 1e6:.0f} MB",
        f"{report['peak_rss_bytes'] / 1e6:.0f} MB",
        *cells_of(change),
    ]


def write_recipe(operator: str) -> Path:
    """Write a mergekit recipe of all fine-tunes, with paths relative to itself."""
    lines = [f"merge_method: {operator}", "base_model: ../models/base", "models:"]
    for expert in EXPERTS:
        lines.append(f"  - {{model: ../models/{expert}, parameters: {{{PARAMETERS[operator]}}}}}")
    lines.append("dtype: bfloat16\n")

    OUTPUTS.mkdir(exist_ok=True)
    recipe = OUTPUTS / f"{operator}.yml"
    recipe.write_text("\n".join(lines), encoding="utf-8")
    return recipe


def merge(recipe: Path, out: Path) -> dict[str, float]:
    """Merge by the command line; a snapshot of an earlier demonstration is replaced."""
    command = ["merge", str(recipe), str(out), "--force"]
    print(f"$ mergepipe {' '.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "mergepipe", *command, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:  # it has said why
        sys.exit(done.returncode)
    report: dict[str, float] = json.loads(done.stdout)
    return report


def measure_change(base: Path, model: Path) -> Change:
    """Compare a model with the base, tensor by tensor."""
    base_squares = delta_squares = 0.0
    n_changed = n_elements = 0
    base_tensors = mergepipe.load_file(base)
    model_tensors = mergepipe.load_file(model)
    for name in base_tensors:
        base_N = base_tensors[name].astype(np.float64)
        delta_N = model_tensors[name] - base_N
        base_squares += float(np.square(base_N).sum())
        delta_squares += float(np.square(delta_N).sum())
        n_changed += int(np.count_nonzero(delta_N))
        n_elements += delta_N.size
    return Change((delta_squares / base_squares) ** 0.5, n_changed / n_elements)


def cells_of(change: Change) -> list[str]:
    return [f"{change.relative_norm:.2%}", f"{change.changed_fraction:.0%}"]


def print_table(rows: list[list[str]], experts: list[Change]) -> None:
    """Print a row for each merge, and one for the mean of the fine-tunes. Changes are against the base."""
    mean = Change(
        sum(change.relative_norm for change in experts) / len(experts),
        sum(change.changed_fraction for change in experts) / len(experts),
    )
    headings = ["operator", "time", "read", "written", "peak memory", "change", "elements changed"]
    table = [headings, *rows, ["(a fine-tune, mean)", "", "", "", "", *cells_of(mean)]]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]

    print(f"\na base and {len(experts)} fine-tunes of 34 MB each:\n")
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]))
    print("\nchange: norm of (result - base) over the norm of the base. At this size most of the time is start-up.")
    print("\n".join(f"{row[0]:<10} {OUTPUTS}/merged-{row[0]}/" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
