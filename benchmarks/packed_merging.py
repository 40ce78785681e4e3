"""Command that measures what packed experts give a merge: time on slow storage, and error and loss under a budget."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import ml_dtypes  # noqa: F401  safetensors needs its bfloat16
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import safe_open

from benchmarks.cold import make_cold
from benchmarks.deltastore import SLICE
from benchmarks.fidelity_points import OPERATORS
from benchmarks.fidelity_results import mean_loss
from benchmarks.heldout import Heldout, heldout_losses, read_heldout
from mergepipe import api as session
from mergepipe.api import pack
from mergepipe.jobs.plan import PACKED_BLOCK_ELEMENTS
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.reports import MergeReport
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile, LocalStore
from mergepipe.storage.location import Location
from support.families import QWEN3_0_6B, FamilyPaths, family_paths, write_family

RATES = (100e6, 250e6, 500e6, 1e9, math.inf)
BUDGETS = (0.025, 0.05, 0.1, 0.15, 0.25, 1.0)
SLOW_OPERATORS = ("linear", "ties")
BUDGET_OPERATORS = ("linear", "ties", "dare_linear")
MADE = {"slice": SLICE, "0.6b": QWEN3_0_6B}


class PackedMergingError(Exception):
    """A merge gave what it must never give."""


class RateLimit:
    """A storage device of one speed: requests of all threads pass it one after the other, without any latency."""

    def __init__(self, bytes_a_second: float) -> None:
        self._bytes_a_second = bytes_a_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.passed_bytes = 0

    def reserve(self, nbytes: int, now: float) -> float:
        """When a request that is made `now` is through."""
        with self._lock:
            self.passed_bytes += nbytes
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_a_second
            return self._free_at


@contextmanager
def slow_storage(limit: RateLimit) -> Iterator[None]:
    """All that this process reads of local files comes no faster than `limit` allows; reading still happens."""
    read_into, read_metadata = LocalFile.read_into, LocalStore.read_metadata

    def limited_read(file: LocalFile, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        through = limit.reserve(len(buffer), time.perf_counter())
        done = read_into(file, offset, buffer, purpose)
        _sleep_until(through)
        return done

    def limited_metadata(store: LocalStore, location: Location, offset: int, nbytes: int) -> bytes:
        found = read_metadata(store, location, offset, nbytes)
        _sleep_until(limit.reserve(len(found), time.perf_counter()))
        return found

    with ExitStack() as stack:
        stack.enter_context(patch.object(LocalFile, "read_into", limited_read))
        stack.enter_context(patch.object(LocalStore, "read_metadata", limited_metadata))
        yield


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True, slots=True)
class PackedFamily:
    """A family with its experts as they are and packed, in the same order; their tensor bytes."""

    base: Path
    raw: tuple[Path, ...]
    packed: tuple[Path, ...]
    raw_bytes: int

    @property
    def forms(self) -> Mapping[str, tuple[Path, ...]]:
        """Experts by how a budget is spent on them; half of `mixed` are packed."""
        half = len(self.raw) // 2
        return {
            "drop": self.raw,
            "random": self.raw,
            "packed": self.packed,
            "mixed": self.raw[:half] + self.packed[half:],
        }


def packed_family(family: FamilyPaths, stores: Path, threads: int) -> PackedFamily:
    """Pack what is not packed yet."""
    report = pack(family.base, family.experts, stores, threads=threads)
    raw_bytes = sum(expert.tensor_bytes for expert in report.experts)
    return PackedFamily(family.base, family.experts, tuple(e.folder for e in report.experts), raw_bytes)


# --- time on slow storage ---


@dataclass(frozen=True, slots=True)
class SlowMerge:
    """A full merge of experts of one form: what it read, how long it took, a digest of the merged weights.

    `load` is the machine's, runnable threads on average over the last minute.
    """

    operator: str
    experts: int
    form: str
    megabytes_a_second: float
    read_bytes: int
    expert_bytes: int
    seconds: float
    cpu_seconds: float
    load: float
    digest: str


def measure_slow(family: PackedFamily, work: Path, counts: Sequence[int], rates: Sequence[float]) -> list[SlowMerge]:
    """Merge in full at every rate, raw and packed.

    Raises:
        PackedMergingError: raw and packed experts gave other bytes, or the limit was passed by.
    """
    measured = []
    for operator in SLOW_OPERATORS:
        for n in counts:
            pair = [("raw", family.raw[:n]), ("packed", family.packed[:n])]
            for form, experts in pair:  # compiles or loads the loops
                slow_merge(family.base, experts, work, operator, form, math.inf)
            found = [slow_merge(family.base, experts, work, operator, form, r) for r in rates for form, experts in pair]
            if len({each.digest for each in found}) != 1:
                raise PackedMergingError(f"{operator}, {n} experts: packed experts give other bytes than raw ones")
            measured += found
            _say(*(f"{m.operator} {n} {m.form}, {_rate_text(m.megabytes_a_second)}: {m.seconds:.2f} s" for m in found))
    return measured


def slow_merge(
    base: Path, experts: Sequence[Path], work: Path, operator: str, form: str, bytes_a_second: float
) -> SlowMerge:
    """One full merge from cold files, in this process."""
    recipe = _recipe(work, operator, base, experts, "bfloat16")
    make_cold([base, *experts])
    limit, started_cpu = RateLimit(bytes_a_second), time.process_time()
    with slow_storage(limit):
        report = session.merge(recipe, work / "out", options=MergeOptions(catalog=False, threads=2))
    cpu_seconds = time.process_time() - started_cpu
    if report.seconds < limit.passed_bytes / bytes_a_second or limit.passed_bytes < report.expert_bytes:
        raise PackedMergingError(f"{operator}, {form}: {report} did not keep to {bytes_a_second} bytes a second")
    digest = weights_digest(work / "out")
    shutil.rmtree(work / "out")
    return SlowMerge(
        operator=operator,
        experts=len(experts),
        form=form,
        megabytes_a_second=bytes_a_second / 1e6,
        read_bytes=report.read_bytes,
        expert_bytes=report.expert_bytes,
        seconds=report.seconds,
        cpu_seconds=cpu_seconds,
        load=os.getloadavg()[0],
        digest=digest,
    )


def weights_digest(model: Path) -> str:
    """One digest over all weight files."""
    found = blake3()
    for file in sorted(model.glob("*.safetensors")):
        found.update_mmap(file)
    return found.hexdigest()


# --- error and loss under a budget ---


@dataclass(frozen=True, slots=True)
class Budgeted:
    """One merge under a budget, a share of the raw experts' bytes: what it read, how far off it is, how long it took.

    `error` is `‖M_A - M_full‖ / ‖M_full - M_0‖` of float32 outputs; `loss` the mean held-out loss as bfloat16.
    `seconds` of the merge from cold files, by the clock; the plan was made before.
    """

    operator: str
    form: str
    budget: float
    read: float
    error: float
    loss: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class BudgetBench:
    """Merges a family under budgets. `block_elements` is the grid of dropping blocks; other forms have their own."""

    family: PackedFamily
    work: Path
    heldout: Heldout | None
    block_elements: int | None

    def analyze(self, *, is_random: bool) -> None:
        """Learn the norms of raw experts' blocks; stores bring theirs along. Random operators need all content ids."""
        for form in ("drop", "packed", "mixed"):
            wanted = [path for path in self.family.forms[form] if is_random or path in self.family.raw]
            if wanted:
                session.analyze(
                    self.family.base,
                    wanted,
                    densities=(0.2,),
                    block_elements=None if form == "packed" else self._block(form),
                    options=RunOptions(home=self._home(form)),
                )

    def measure(self, operator: str, budgets: Sequence[float]) -> list[Budgeted]:
        """One operator at all budgets.

        Raises:
            PackedMergingError: more was read than the budget, or a full budget gave another result.
        """
        self.analyze(is_random=OPERATORS[operator].is_random)
        full = self.work / "full"
        recipe = _recipe(self.work, operator, self.family.base, self.family.raw, "float32")
        make_cold([self.family.base, *self.family.raw])
        report = session.merge(recipe, full, options=MergeOptions(catalog=False))
        moved = distance(full, self.family.base)
        found = [Budgeted(operator, "full", 1.0, self._read(report), 0.0, self._loss(full), report.seconds)]
        for budget in budgets:
            for form in self.family.forms:
                if budget < 1 or form != "random":
                    found.append(self._point(operator, form, budget, full, moved))
                    _say(str(found[-1]))
        shutil.rmtree(full)
        return found

    def _point(self, operator: str, form: str, budget: float, full: Path, moved: float) -> Budgeted:
        recipe = _recipe(self.work, operator, self.family.base, self.family.forms[form], "float32")
        budget_bytes = int(budget * self.family.raw_bytes) if budget < 1 else None
        plan = session.plan(
            recipe,
            "100%" if budget_bytes is None else f"{budget_bytes}B",
            home=self._home(form),
            options=PlanOptions(select="random" if form == "random" else "norm", block_elements=self._block(form)),
        )
        out = self.work / "out"
        make_cold([self.family.base, *self.family.forms[form]])
        report = session.run(plan, out, options=RunOptions(catalog=False))
        error, loss = distance(out, full) / moved, self._loss(out)
        shutil.rmtree(out)
        if budget_bytes is not None and report.expert_bytes + report.analysis_bytes > budget_bytes:
            raise PackedMergingError(f"{operator} {form}: {report.expert_bytes} bytes of experts of {budget_bytes}")
        if budget_bytes is None and error != 0:
            raise PackedMergingError(f"{operator} {form}: a full budget gave an error of {error}")
        return Budgeted(operator, form, budget, self._read(report), error, loss, report.seconds)

    def _home(self, form: str) -> Path:
        return self.work / f"home-{'drop' if form == 'random' else form}"

    def _block(self, form: str) -> int | None:
        if form == "packed":
            return PACKED_BLOCK_ELEMENTS
        return self.block_elements if form in ("drop", "random") else None

    def _read(self, report: MergeReport) -> float:
        return (report.expert_bytes + report.analysis_bytes) / self.family.raw_bytes

    def _loss(self, model: Path) -> float | None:
        return None if self.heldout is None else mean_loss(heldout_losses(model, self.heldout, as_bf16=True))


def distance(left: Path, right: Path) -> float:
    """`‖left - right‖` of two models of one file, a tensor at a time.

    Raises:
        ValueError: they do not hold the same tensors.
    """
    with (
        safe_open(left / "model.safetensors", framework="numpy") as one,
        safe_open(right / "model.safetensors", framework="numpy") as other,
    ):
        if set(one.keys()) != set(other.keys()):
            raise ValueError(f"{left} and {right} do not hold the same tensors")
        return math.sqrt(sum(_squared(one.get_tensor(name), other.get_tensor(name)) for name in one.keys()))  # noqa: SIM118


def _squared(left: NDArray[np.generic], right: NDArray[np.generic]) -> float:
    """Differences of close float32 are exact; their squares are added in float64."""
    difference_N = (left.astype(np.float32) - right.astype(np.float32)).ravel().astype(np.float64)
    return float(np.dot(difference_N, difference_N))


def _recipe(work: Path, operator: str, base: Path, experts: Sequence[Path], out_dtype: str) -> Path:
    path = work / "recipe.yml"
    path.write_text(OPERATORS[operator].recipe(base, experts, out_dtype))
    return path


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


# --- tables ---


def slow_table(measured: Sequence[SlowMerge]) -> str:
    """Seconds, raw and packed, by rate; processor seconds at their best."""
    rates = sorted({m.megabytes_a_second for m in measured})
    lines = [
        "| operator, experts | form | GB read | CPU s | " + " | ".join(_rate_text(rate) for rate in rates) + " |",
        "|---" * (4 + len(rates)) + "|",
    ]
    for key in dict.fromkeys((m.operator, m.experts, m.form) for m in measured):
        row = {m.megabytes_a_second: m for m in measured if (m.operator, m.experts, m.form) == key}
        read = next(iter(row.values())).read_bytes / 1e9
        cells = [f"{row[rate].seconds:.1f}" if rate in row else "" for rate in rates]
        cpu = min(each.cpu_seconds for each in row.values())
        lines.append(f"| {key[0]}, {key[1]} | {key[2]} | {read:.2f} | {cpu:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rate_text(megabytes_a_second: float) -> str:
    return "no limit" if math.isinf(megabytes_a_second) else f"{megabytes_a_second:.0f} MB/s"


def budget_table(measured: Sequence[Budgeted]) -> str:
    """Errors, with losses where there are some, by budget; what was read where that was less than the budget."""
    return _by_budget(measured, _error_cell)


def seconds_table(measured: Sequence[Budgeted]) -> str:
    """Seconds of the merges of `budget_table`."""
    return _by_budget(measured, lambda found: f"{found.seconds:.1f}")


def _by_budget(measured: Sequence[Budgeted], cell: Callable[[Budgeted], str]) -> str:
    budgets = sorted({m.budget for m in measured})
    lines = ["| operator | form | " + " | ".join(f"{b:.3g} %" for b in (100 * b for b in budgets)) + " |"]
    lines.append("|---" * (2 + len(budgets)) + "|")
    for operator, form in dict.fromkeys((m.operator, m.form) for m in measured):
        row = {m.budget: cell(m) for m in measured if (m.operator, m.form) == (operator, form)}
        lines.append(f"| {operator} | {form} | " + " | ".join(row.get(b, "") for b in budgets) + " |")
    return "\n".join(lines)


def _error_cell(found: Budgeted) -> str:
    unspent = f" [{found.read:.1%}]" if found.read < 0.9 * found.budget else ""
    return f"{found.error:.3f}" + ("" if found.loss is None else f" ({found.loss:.4f})") + unspent


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("slow", "budgets"))
    parser.add_argument("--work", type=Path, required=True, help="a directory for the family, the stores, the outputs")
    parser.add_argument("--family", type=Path, help="measure this family (base, expert-1, ...) instead of making one")
    parser.add_argument("--shape", choices=sorted(MADE), default="slice", help="the shape of the family that is made")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4], help="experts of full merges")
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), help="shares of the raw experts")
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(BUDGET_OPERATORS))
    parser.add_argument("--block-elements", type=int, help="the grid on which blocks are dropped")
    parser.add_argument("--heldout", action="store_true", help="score merges on the family's held-out text")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    root = asked.family or asked.work / "family"
    made = family_paths(root, asked.experts)
    if not made.base.exists():
        made = write_family(root, MADE[asked.shape], asked.experts, threads=asked.threads)
    family = packed_family(made, asked.work / "stores", asked.threads)
    if asked.what == "slow":
        slow = measure_slow(family, asked.work, asked.counts, RATES)
        print(json.dumps([asdict(each) for each in slow], indent=1), slow_table(slow), sep="\n\n")
        return 0
    bench = BudgetBench(family, asked.work, read_heldout(root) if asked.heldout else None, asked.block_elements)
    found = [each for operator in asked.operators for each in bench.measure(operator, asked.budgets)]
    print(json.dumps([asdict(each) for each in found], indent=1), budget_table(found), seconds_table(found), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
