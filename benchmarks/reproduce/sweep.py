"""Part `sweep`: budgets from 10 to 100 % of the expert bytes by every order of selection, and sizes of blocks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recipes import recipe_text
from benchmarks.reproduce.family_recipes import (
    FITTED_TEXT,
    analyzed_home,
    full_merge,
    inputs_of,
    judge_against,
    merge_in_blocks,
    write_recipe,
)
from benchmarks.reproduce.pages import ERROR_TEXT, Figure, Page, Series, Table, gb, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from mergepipe.planning.plan import parse_plan
from support.families import CANCELLING_AND_AGREEING, FamilyPaths

_SHARES, _TOY_SHARES = (10, 30, 50, 70, 90, 100), (50, 100)
ORDERS = {
    "norm": "`norm`", "conflict": "`conflict`", "paper": "the papers' score", "random": "random", "sample": "sample",
}  # fmt: skip
_OPERATOR = "ties"
_CORRELATED, _CORRELATED_SHAPE, _CORRELATED_SHARES = "correlated", "demo", (25, 50)
CONTENT_ORDERS = {order: ORDERS[order] for order in ("conflict", "norm", "paper", "random")}
_CORRELATED_TEXT = (
    "Four experts of the demo's shapes (34 MB each), summed as task vectors: the deltas of two have a cosine of -0.95,"
    " so that they nearly cancel, those of the other two one of 0.95. `conflict`, the papers' conflict-aware order,"
    " knows of it by sketches, and reads first one of the two that agree; the other orders see four deltas of one"
    " length."
)
_TIME_TEXT = (
    "Time falls less than bytes: base and output are read and written under any budget, and on a fast disk the"
    " processor limits the time, because it merges while more is read."
)
_BLOCKS, _TOY_BLOCKS, _BLOCK_SHARE = (16, 64, 256, 1024), (16, 256), 30  # Ki elements; % of the expert bytes


def sweep_ks(size: Size) -> tuple[int, ...]:
    """Return 10 and 20 experts, or the largest numbers that a smaller family has."""
    return tuple(sorted({min(10, size.n_experts), size.n_experts}))


def _needs(size: Size) -> Needs:
    merged = len(_SHARES) * len(ORDERS) * sum(sweep_ks(size)) * size.model_bytes
    return Needs(size.family_bytes + 2 * size.model_bytes, merged / 1e9 / 60 + size.family_bytes / 4e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, size.n_experts, is_fitted=True)
    k = sweep_ks(size)[0]
    for kibi in _TOY_BLOCKS if size.is_toy else _BLOCKS:
        results.measure(
            f"blocks/{kibi}", partial(_block_size, place, FamilyPaths(family.base, family.experts[:k]), kibi)
        )
    for k in sweep_ks(size):
        for share in _TOY_SHARES if size.is_toy else _SHARES:
            for order in ORDERS if share < 100 else ("norm",):
                results.measure(f"{k}/{order}/{share}", partial(_point, place, family, k, order, share))
    shape = "tiny" if size.is_toy else _CORRELATED_SHAPE
    correlated = place.correlated_family(shape, CANCELLING_AND_AGREEING)
    for share in _CORRELATED_SHARES:
        for order in CONTENT_ORDERS:
            key = f"{_CORRELATED}/{order}/{share}"
            results.measure(key, partial(_correlated_point, place, correlated, order, share))


def _point(place: Workplace, family: FamilyPaths, k: int, order: str, share: int) -> dict[str, Any]:
    recipe = write_recipe(place, family, _OPERATOR, k)
    full, home = full_merge(place, recipe), analyzed_home(place, family, len(family.experts))
    plan = place.folder / "plan.json"
    options = ("--budget", f"{share}%", "--select", order, "--home", home)
    place.ours("plan", recipe, *options, "--out", plan)
    result = place.merge(
        plan, inputs_of(family, k), "--home", home,
        from_plan=True, judge=judge_against(full, family.base),
        has_floor=True,
    )  # fmt: skip
    return {**result, "accessed_blocks": accessed_share(plan)}


def _correlated_point(place: Workplace, family: FamilyPaths, order: str, share: int) -> dict[str, Any]:
    """Merge experts that cancel or agree as a sum of task vectors, and compare with their full sum."""
    recipe = place.folder / "correlated.yml"
    recipe.write_text(recipe_text("task_arithmetic", family.base, {model: {"weight": 1.0} for model in family.experts}))
    full, home = full_merge(place, recipe), analyzed_home(place, family, len(family.experts))
    options = ("--budget", f"{share}%", "--select", order, "--home", home)
    return place.merge(recipe, family.models, *options, judge=judge_against(full, family.base))


def _block_size(place: Workplace, family: FamilyPaths, kibi: int) -> dict[str, Any]:
    """Merge in blocks of a size; the error is over the full merge of the same experts."""
    full = full_merge(place, write_recipe(place, family, _OPERATOR, len(family.experts)))
    return merge_in_blocks(place, family, _BLOCK_SHARE, kibi, judge_against(full, family.base))


def accessed_share(path: Path) -> float:
    """Return the share of (expert, block) pairs that a plan reads."""
    plan = parse_plan(path.read_bytes())
    n_read = sum(stop - start for tensor in plan.tensors for access in tensor.access for start, stop in access.blocks)
    n_blocks = sum(len(tensor.access) * -(-tensor.n_elements // plan.block_elements) for tensor in plan.tensors)
    return n_read / n_blocks


def _page(results: Results) -> Page:
    ks = sorted({int(key.split("/")[0]) for key in results.entries if _is_of_family(key)})
    last = ks[-1]
    half = {order: results[f"{last}/{order}/50"]["error"] for order in ORDERS}
    everything = results[f"{last}/norm/100"]["error"]
    shares = _shares(results)
    never_grows = all(
        results[f"{k}/norm/{b}"]["error"] <= results[f"{k}/norm/{a}"]["error"] for k in ks for a, b in pairwise(shares)
    )
    meaning = (
        f"**A budget cuts what is read in proportion, and what it leaves out is missing from the merge.** At half of"
        f" the bytes, TIES of {last} experts is off by these shares of what the full merge changes: "
        + ", ".join(f"{label} {half[order]:.3f}" for order, label in ORDERS.items())
        + f"; at 100 % by {everything:.3f}. A larger budget {'never' if never_grows else 'sometimes'} gave a worse"
        " result by `norm`. A distance is not a loss: [fine-tunes](trained.md) measure what models keep."
    )
    body: list[str | Table | Figure] = [FITTED_TEXT]
    body.append(f"Bytes, blocks (of 256 Ki elements), times and relative l2 are those of `norm`. {ERROR_TEXT}")
    for k in ks:
        body += [f"## K = {k}", _table(results, k), _error_figure(results, k)]
    body += _correlated(results)
    body += ["## Sizes of blocks", *_block_sizes(results), "## Time", _TIME_TEXT, _time_figure(results, ks)]
    return Page("Budget sweep", meaning, tuple(body))


def _table(results: Results, k: int) -> Table:
    rows = []
    for share in _shares(results)[:-1]:
        ours = results[f"{k}/norm/{share}"]
        read = (gb(ours["expert_bytes"]), percent(ours["accessed_blocks"], 1))
        errors = (f"{results[f'{k}/{order}/{share}']['error']:.3f}" for order in ORDERS)
        rows.append((f"{share} %", *read, *errors, f"{ours['relative_l2']:.2e}", f"{ours[results.clock]:.2f}"))
    labels = (f"error, {label}" for label in ORDERS.values())
    return Table(("budget", "GB read", "blocks read", *labels, "relative l2", results.clock_name), tuple(rows))


def _shares(results: Results) -> list[int]:
    return sorted({int(key.split("/")[2]) for key in results.entries if _is_of_family(key)})


def _is_of_family(key: str) -> bool:
    return key.partition("/")[0].isdigit()


def correlated_errors(results: Results, share: int) -> dict[str, float]:
    """Return the errors of experts that cancel or agree, by order; nothing where they were not measured."""
    keys = {order: f"{_CORRELATED}/{order}/{share}" for order in CONTENT_ORDERS}
    return {order: float(results[key]["error"]) for order, key in keys.items() if key in results}


def _correlated(results: Results) -> list[str | Table]:
    """Tell what each order leaves of experts that cancel or agree."""
    rows = []
    for share in _CORRELATED_SHARES:
        errors = correlated_errors(results, share)
        if errors:
            rows.append((f"{share} %", *(f"{errors[order]:.3f}" for order in CONTENT_ORDERS)))
    if not rows:
        return []
    labels = tuple(f"error, {label}" for label in CONTENT_ORDERS.values())
    return ["## Experts that agree or cancel", _CORRELATED_TEXT, Table(("budget", *labels), tuple(rows))]


def _block_sizes(results: Results) -> tuple[str, Table]:
    entries = {int(key.split("/")[1]): entry for key, entry in results.entries.items() if key.startswith("blocks/")}
    rows = [
        (str(kibi), gb(entry["expert_bytes"]), f"{entry['error']:.3f}", f"{entry['cpu_seconds']:.2f}")
        for kibi, entry in sorted(entries.items())
    ]
    text = f"TIES of the fewer experts by `norm`, under a budget of {_BLOCK_SHARE} %."
    return text, Table(("block, Ki", "GB read", "error", "CPU s"), tuple(rows))


def _error_figure(results: Results, k: int) -> Figure:
    series = tuple(_series(results, k, order, "error", label.replace("`", "")) for order, label in ORDERS.items())
    name, title = f"sweep-error-{k}", f"TIES, K = {k}: error by budget"
    return Figure(name, title, "budget, % of the expert bytes", "error over what the full merge changes", series)


def _series(results: Results, k: int, order: str, value: str, label: str) -> Series:
    shares = [share for share in _shares(results) if f"{k}/{order}/{share}" in results]
    ys = tuple(float(results[f"{k}/{order}/{share}"][value]) for share in shares)
    return Series(label, tuple(map(float, shares)), ys)


def _time_figure(results: Results, ks: list[int]) -> Figure:
    series = tuple(_series(results, k, "norm", results.clock, f"K = {k}") for k in ks)
    return Figure("sweep-time", "Time by budget", "budget, % of the expert bytes", results.clock_name, series)


PART = Part(
    "sweep",
    "TIES at 10 to 100 %, K = 10 and 20, five orders, four sizes of blocks; experts that cancel",
    _needs,
    _measure,
    _page,
)
