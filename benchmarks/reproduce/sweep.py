"""Part `sweep`: budgets from 10 to 100 % of the expert bytes, in our order, at random and by the papers' score."""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.process import measure_checked
from benchmarks.reproduce.family_recipes import (
    SYNTHETIC_TEXT,
    analyzed_home,
    full_merge,
    inputs_of,
    judge_against,
    write_recipe,
)
from benchmarks.reproduce.pages import Figure, Page, Series, Table, gb, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.scaling import ERROR_TEXT
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from mergepipe.planning.plan import parse_plan
from support.families import FamilyPaths

_SHARES, _TOY_SHARES = tuple(range(10, 101, 10)), (50, 100)
ORDERS = {"norm": "ours (`norm`)", "paper": "the papers' score", "random": "random"}
_OPERATOR = "ties"
_TABLE_STEP = 2  # every second budget stands in the tables; the figures and the stored results have all


def sweep_ks(size: Size) -> tuple[int, ...]:
    """Return 10 and 20 experts, or the largest numbers that a smaller family has."""
    return tuple(sorted({min(10, size.n_experts), size.n_experts}))


def _needs(size: Size) -> Needs:
    merged = len(_SHARES) * len(ORDERS) * sum(sweep_ks(size)) * size.model_bytes
    return Needs(size.family_bytes + 2 * size.model_bytes, merged / 1e9 / 60 + size.family_bytes / 4e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size)
    for k in sweep_ks(size):
        for share in _TOY_SHARES if size.is_toy else _SHARES:
            for order in ORDERS if share < 100 else ("norm",):
                results.measure(f"{k}/{order}/{share}", partial(_point, place, family, k, order, share))


def _point(place: Workplace, family: FamilyPaths, k: int, order: str, share: int) -> dict[str, Any]:
    recipe = write_recipe(place, family, _OPERATOR, k)
    full, home = full_merge(place, recipe), analyzed_home(place, family, len(family.experts))
    plan = place.folder / "plan.json"
    if order == "paper":
        log = place.folder / "log.txt"
        script = (sys.executable, "-m", "benchmarks.reproduce.paper_score")
        measure_checked([*script, str(recipe), f"{share}%", str(plan), "--home", str(home)], log=log)
    else:
        options = ("--budget", f"{share}%", "--select", order, "--home", home)
        place.ours("plan", recipe, *options, "--out", plan)
    result = place.merge(
        plan, inputs_of(family, k), "--home", home,
        from_plan=True, judge=judge_against(full, family.base),
        has_floor=True,
    )  # fmt: skip
    return {**result, "accessed_blocks": accessed_share(plan)}


def accessed_share(path: Path) -> float:
    """Return the share of (expert, block) pairs that a plan reads."""
    plan = parse_plan(path.read_bytes())
    n_read = sum(stop - start for tensor in plan.tensors for access in tensor.access for start, stop in access.blocks)
    n_blocks = sum(len(tensor.access) * -(-tensor.n_elements // plan.block_elements) for tensor in plan.tensors)
    return n_read / n_blocks


def _page(results: Results) -> Page:
    ks = sorted({int(key.split("/")[0]) for key in results.entries})
    last = ks[-1]
    half = {order: results[f"{last}/{order}/50"]["error"] for order in ORDERS}
    everything = results[f"{last}/norm/100"]["error"]
    shares = _shares(results)
    never_grows = all(
        results[f"{k}/norm/{b}"]["error"] <= results[f"{k}/norm/{a}"]["error"] for k in ks for a, b in pairwise(shares)
    )
    apart = max(
        abs(results[f"{k}/norm/{share}"]["error"] - results[f"{k}/paper/{share}"]["error"])
        for k in ks for share in shares if share < 100
    )  # fmt: skip
    meaning = (
        f"**A budget cuts what is read in proportion, and what it leaves out is missing from the merge.** At half of"
        f" the bytes, TIES of {last} experts has an error of {half['norm']:.3f} of what the full merge changes with our"
        f" order, {half['paper']:.3f} with the papers' score and {half['random']:.3f} with blocks at random; at 100 %"
        f" it is {everything:.3f}. Our order and the papers' are at most {apart:.3f} apart here. A larger budget"
        f" {'never' if never_grows else 'sometimes'} gave a worse result in our order. The papers' relative l2 is small"
        " for all, because it divides by the weights, not by what merging changes."
    )
    body: list[str | Table | Figure] = [SYNTHETIC_TEXT]
    body.append(f"Bytes, blocks (of 256 Ki elements), times and relative l2 are those of our order. {ERROR_TEXT}")
    for k in ks:
        body += [f"## K = {k}", _table(results, k), _error_figure(results, k)]
    body += ["## Blocks and time", _blocks_figure(results, ks), _time_figure(results, ks)]
    return Page("Budget sweep", meaning, tuple(body))


def _table(results: Results, k: int) -> Table:
    rows = []
    for share in _shares(results)[::_TABLE_STEP]:
        ours = results[f"{k}/norm/{share}"]
        entries = (_entry(results, k, order, share) for order in ORDERS)
        rows.append(
            (
                f"{share} %", gb(ours["expert_bytes"]), percent(ours["accessed_blocks"], 1),
                *("" if entry is None else f"{entry['error']:.3f}" for entry in entries),
                f"{ours['relative_l2']:.2e}", f"{ours['seconds']:.2f}", f"{ours['cpu_seconds']:.2f}",
                results.over_floor(ours),
            )
        )  # fmt: skip
    errors = (f"error, {label}" for label in ORDERS.values())
    header = ("budget", "GB read", "blocks read", *errors, "relative l2", "s", "CPU s", "x floor")
    return Table(header, tuple(rows))


def _shares(results: Results) -> list[int]:
    return sorted({int(key.split("/")[2]) for key in results.entries})


def _entry(results: Results, k: int, order: str, share: int) -> Entry | None:
    return results.entries.get(f"{k}/{order}/{share}")


def _error_figure(results: Results, k: int) -> Figure:
    series = tuple(_series(results, k, order, "error", label.replace("`", "")) for order, label in ORDERS.items())
    name, title = f"sweep-error-{k}", f"TIES, K = {k}: error by budget"
    return Figure(name, title, "budget, % of the expert bytes", "error over what the full merge changes", series)


def _series(results: Results, k: int, order: str, value: str, label: str) -> Series:
    shares = [share for share in _shares(results) if _entry(results, k, order, share) is not None]
    ys = tuple(float(results[f"{k}/{order}/{share}"][value]) for share in shares)
    return Series(label, tuple(map(float, shares)), ys)


def _blocks_figure(results: Results, ks: list[int]) -> Figure:
    series = tuple(_series(results, k, "norm", "accessed_blocks", f"K = {k}") for k in ks)
    title = "Share of blocks read (the papers' accessed-block ratio)"
    return Figure("sweep-blocks", title, "budget, % of the expert bytes", "share of (expert, block)", series)


def _time_figure(results: Results, ks: list[int]) -> Figure:
    series = tuple(_series(results, k, "norm", results.clock, f"K = {k}") for k in ks)
    return Figure("sweep-time", "Time by budget", "budget, % of the expert bytes", results.clock_name, series)


PART = Part("sweep", "TIES at 10 to 100 % of the bytes, K = 10 and 20, three orders", _needs, _measure, _page)
