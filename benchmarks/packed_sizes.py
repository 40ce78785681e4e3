"""Command that fine-tunes one expert at a grid of rates and steps, and measures how small each is as a delta store."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.deltastore import Sizes, choose_levels, level_tables, measure_average, measure_sizes, packed_tensors
from benchmarks.fidelity_points import OPERATORS
from benchmarks.local_text import Domain, TextError, gather
from benchmarks.trained_family import (
    FamilyError,
    Member,
    TrainedRequest,
    add_options,
    finished,
    request_of,
    train_family,
)
from mergepipe import api as session
from mergepipe.api import pack
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.deltastore.checkpoint import open_store
from mergepipe.options import MergeOptions
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location

RATES = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4)
STEPS = (30, 100, 300)
BUDGETS = (0.05, 0.1, 0.15, 0.25)


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """One packed expert, in shares of its tensor bytes.

    `whole_pages` and `ties_pages` are what merges of it alone read: everything, and what TIES needs.
    `errors` are those of its delta by budget, relative to the delta: of an average of this expert alone.
    """

    sizes: Sizes
    whole_pages: float
    ties_pages: float
    errors: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One fine-tune of the grid: how far it went, what it learned of its domain, how small it is."""

    peak_rate: float
    steps: int
    domain: str
    relative_norm: float
    changed_fraction: float
    base_loss: float
    loss: float
    store: StoreSizes


@dataclass(frozen=True, slots=True)
class Grid:
    """Fine-tunes of expert `number` of a family, all from its base, each in a folder of its own under `root`.

    `text_of` gathers the domains of so many experts.
    """

    root: Path
    family: Path
    request: TrainedRequest
    number: int
    text_of: Callable[[int], Sequence[Domain]] = gather

    def cells(self, rates: Sequence[float], steps: Sequence[int], threads: int) -> Iterator[Cell]:
        """Train what is not there yet, and measure; in the order of the rates, then of the steps.

        Raises:
            FamilyError: something else is in a folder, or the family's base is not the one asked for.
        """
        for rate in rates:
            for n_steps in steps:
                expert = replace(self.request.expert, peak_rate=rate, steps=n_steps)
                folder = self.root / f"{_rate_text(rate)}x{n_steps}"
                yield self._cell(folder, replace(self.request, expert=expert), threads)

    def _cell(self, folder: Path, request: TrainedRequest, threads: int) -> Cell:
        base, member = finished(folder, request) or self._train(folder, request)
        if member.delta is None:
            raise FamilyError(f"{folder} holds {member.name}, which is no expert; remove the folder")
        store = measure_store(folder / "base", folder / member.name, folder / "work", threads)
        return Cell(
            peak_rate=request.expert.peak_rate,
            steps=request.expert.steps,
            domain=member.domain,
            relative_norm=member.delta.relative_norm,
            changed_fraction=member.delta.changed_fraction,
            base_loss=base.losses[member.domain],
            loss=member.losses[member.domain],
            store=store,
        )

    def _train(self, folder: Path, request: TrainedRequest) -> list[Member]:
        domains = self.text_of(request.experts)
        return train_family(folder, request, domains, only=[self.number], base_of=self.family)


def measure_store(base: Path, expert: Path, work: Path, threads: int) -> StoreSizes:
    """Pack an expert into `work`, measure, and remove `work`."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    packed = pack(base, [expert], work / "stores", threads=threads).experts[0]
    read = {name: _merge_reads(base, packed.folder, work, name) for name in ("linear", "ties")}
    store = LocalStore()
    base_checkpoint = open_checkpoint(store, Location.local(base))
    checkpoint = open_store(store, Location.local(packed.folder), base_checkpoint)
    measured = StoreSizes(
        sizes=measure_sizes([checkpoint]),
        whole_pages=read["linear"] / packed.tensor_bytes,
        ties_pages=read["ties"] / packed.tensor_bytes,
        errors=delta_errors(store, base_checkpoint, checkpoint, threads),
    )
    shutil.rmtree(work)
    return measured


def _merge_reads(base: Path, store: Path, work: Path, operator: str) -> int:
    recipe, out = work / "recipe.yml", work / "out"
    recipe.write_text(OPERATORS[operator].recipe(base, [store], "bfloat16"))
    report = session.merge(recipe, out, options=MergeOptions(catalog=False))
    shutil.rmtree(out)
    return report.expert_bytes + report.analysis_bytes


def delta_errors(store: LocalStore, base: Checkpoint, packed: Checkpoint, threads: int) -> dict[float, float]:
    """What is left of the delta's norm where a share of the expert's bytes is read, in levels by error a byte."""
    costs_BL, errors_BL = level_tables([packed])
    tensors = packed_tensors(packed)
    total = sum(tensor.n_elements * tensor.stored_dtype.itemsize for tensor in tensors)
    paths = {entry.file for tensor in tensors for entry in tensor.stored}
    found = {}
    with open_files(store, paths | {base.root / file.name for file in base.files}) as files:
        for budget in BUDGETS:
            levels_B = choose_levels(costs_BL, errors_BL, budget * total)
            is_all = bool((errors_BL[np.arange(len(levels_B)), levels_B] == 0).all())
            found[budget] = 0.0 if is_all else measure_average([packed], files, levels_B, threads)
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each fine-tune."""
    lines = [
        "| peak rate x steps | relative delta norm | changed | loss on its text | gain | store | tensors | in pages "
        "| TIES(0.2) | in pages | " + " | ".join(f"error at {100 * b:.0f} %" for b in BUDGETS) + " |",
        "|---" * (10 + len(BUDGETS)) + "|",
    ]
    return "\n".join(lines + [_row(cell) for cell in cells]) + "\n"


def _row(cell: Cell) -> str:
    sizes, store = cell.store.sizes, cell.store
    inexact = "" if sizes.ties_exact_tensors == sizes.tensors else f" ({sizes.ties_exact_tensors} of {sizes.tensors})"
    cells = [
        f"{_rate_text(cell.peak_rate)} x {cell.steps}",
        f"{cell.relative_norm:.5f}",
        f"{cell.changed_fraction:.1%}",
        f"{cell.loss:.4f}",
        f"{cell.base_loss - cell.loss:.4f}",
        f"{sizes.store:.1%}",
        f"{sizes.pieces:.1%}",
        f"{store.whole_pages:.1%}",
        f"{sizes.ties:.1%}{inexact}",
        f"{store.ties_pages:.1%}",
        *(f"{store.errors[budget]:.3f}" for budget in BUDGETS),
    ]
    return "| " + " | ".join(cells) + " |"


def _rate_text(rate: float) -> str:
    """All digits, as in 2e-05."""
    return np.format_float_scientific(rate, trim="-", exp_digits=2)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--grid", type=Path, required=True, help="a directory for the fine-tunes; --root has the base")
    parser.add_argument("--grid-rates", type=float, nargs="+", default=list(RATES), help="peak learning rates")
    parser.add_argument("--grid-steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--number", type=int, default=1, help="which expert of the family is trained")
    parser.add_argument("--json", type=Path, help="write everything measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    grid = Grid(options.grid, options.root, request_of(options), options.number)
    found = []
    try:
        for cell in grid.cells(options.grid_rates, options.grid_steps, options.threads):
            found.append(cell)
            print(_row(cell), file=sys.stderr, flush=True)
    except (FamilyError, TextError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
