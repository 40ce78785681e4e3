"""Part `overheads`: what planning, catalog, manifest and flushing cost, block sizes, and repeats of the same merge."""

from __future__ import annotations

import json
import shutil
from functools import partial
from statistics import mean, stdev
from typing import Any

from benchmarks.reproduce.family_recipes import (
    PAPER_BUDGET_SHARE,
    SYNTHETIC_TEXT,
    analyzed_home,
    inputs_of,
    merge_in_blocks,
    write_recipe,
)
from benchmarks.reproduce.pages import Figure, Page, Series, Table, gb, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size, k_at_most
from benchmarks.reproduce.workplace import Workplace, folder_bytes, weight_files
from support.families import FamilyPaths

_K = 16
_SHARE = 30  # % of the expert bytes; the papers' overheads are at a budget that reads about as much
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # Ki elements
_PAPER_BLOCKS = {
    # Ki elements: expert MB and seconds of TIES (Qwen3-0.6B)
    16: (4040, 77.3), 32: (3520, 61.5), 64: (3226, 52.0), 128: (3199, 45.3), 256: (3390, 46.3), 512: (3773, 45.0),
}  # fmt: skip
_TOY_BLOCKS = (16, 256)
_STABLE_KS = (4, 8, 12, 16, 20)
_REPEATS = 5
_TARGET_CATALOG_SHARE = 0.0002
_ABLATION = {
    # the papers' table 3; what is left out: the budget (8.57 GB of 26.4 GB), and theirs: expert GB, seconds
    "nothing": ("32.46%", "8.0", "22.8"),
    "the budget, not the plan": ("100%", "", ""),
    "the plan too": (None, "26.4", "104.7"),
}


def _needs(size: Size) -> Needs:
    k = k_at_most(size.ks, _K)
    read = (len(_BLOCKS) * 2 + 2 + len(_ABLATION)) * k * size.model_bytes + len(
        _STABLE_KS
    ) * _REPEATS * 3 * size.model_bytes
    return Needs(size.family_bytes + 3 * size.model_bytes, read / 1e9 / 60 + size.family_bytes / 4e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, size.n_experts)
    k = k_at_most(size.ks, _K)
    first = FamilyPaths(family.base, family.experts[:k])
    results.measure("analyze", partial(_analyze, place, first))
    results.measure("merge", partial(_phases, place, family, k))
    budget = int(PAPER_BUDGET_SHARE * size.model_bytes)
    for stable_k in (n for n in _STABLE_KS if n in size.ks) if not size.is_toy else size.ks[-1:]:
        for repeat in range(2 if size.is_toy else _REPEATS):
            results.measure(f"stability/{stable_k}/{repeat}", partial(_merge, place, family, stable_k, f"{budget}B"))
    for left_out, (share, *_) in _ABLATION.items():
        results.measure(f"ablation/{left_out}", partial(_merge, place, family, max(size.ks), share))
    for kibi in _TOY_BLOCKS if size.is_toy else _BLOCKS:
        results.measure(f"blocks/ties/{kibi}", partial(merge_in_blocks, place, first, _SHARE, kibi))


def _analyze(place: Workplace, family: FamilyPaths) -> dict[str, Any]:
    home = place.folder / "home-overheads"
    shutil.rmtree(home, ignore_errors=True)
    files = weight_files(family.models)
    _, cost = place.ours("analyze", *family.models, "--home", home, cold=files)
    catalog_bytes = folder_bytes(home)
    shutil.rmtree(home)
    expert_bytes = sum(file.stat().st_size for file in weight_files(family.experts))
    return {
        "seconds": cost.wall_seconds, "cpu_seconds": cost.cpu_seconds, "kernel_read_bytes": cost.read_bytes,
        "catalog_bytes": catalog_bytes, "expert_bytes": expert_bytes,
        "floor_seconds": place.floor(files, 1, sum(file.stat().st_size for file in files)),
    }  # fmt: skip


def _phases(place: Workplace, family: FamilyPaths, k: int) -> dict[str, Any]:
    """Merge once with its phases timed from inside."""
    recipe, home = write_recipe(place, family, "ties", k), analyzed_home(place, family, len(family.experts))
    out, phases, plan = (place.folder / name for name in ("out", "phases.json", "plan.json"))
    shutil.rmtree(out, ignore_errors=True)
    budget = ("--budget", f"{_SHARE}%", "--select", "norm", "--home", home)
    _, planning = place.ours("plan", recipe, *budget, "--out", plan)
    report, cost = place.ours("merge", recipe, out, *budget, cold=weight_files(inputs_of(family, k)), phases=phases)
    entry = {
        "seconds": cost.wall_seconds, "kernel_read_bytes": cost.read_bytes, "kernel_written_bytes": cost.written_bytes,
        "planned_bytes": report["planned_bytes"], "expert_bytes": report["expert_bytes"],
        "base_bytes": report["base_bytes"], "output_bytes": report["output_bytes"],
        "phases": json.loads(phases.read_text()), "plan_command_seconds": planning.wall_seconds,
        "plan_bytes": plan.stat().st_size, "manifest_bytes": (out / "mergepipe.json").stat().st_size,
    }  # fmt: skip
    shutil.rmtree(out)
    return entry


def _merge(place: Workplace, family: FamilyPaths, k: int, budget: str | None) -> dict[str, Any]:
    recipe, inputs = write_recipe(place, family, "ties", k), inputs_of(family, k)
    if budget is None:
        return place.merge(recipe, inputs, "--no-catalog")
    home = analyzed_home(place, family, len(family.experts))
    return place.merge(recipe, inputs, "--budget", budget, "--select", "norm", "--home", home)


def _page(results: Results) -> Page:
    analyze, merge = results["analyze"], results["merge"]
    share = analyze["catalog_bytes"] / analyze["expert_bytes"]
    phases, total = merge["phases"], merge["seconds"]
    met = "met" if share <= _TARGET_CATALOG_SHARE else "not met"
    meaning = (
        f"**Besides reading and merging, a merge under a budget of this size spends"
        f" {percent(phases['planning'] / total, 1)} of its time on planning and"
        f" {percent(phases['publish'] / total, 1)} on publishing.** The catalog takes {percent(share, 4)} of the"
        f" experts' bytes (target"
        f" {percent(_TARGET_CATALOG_SHARE, 2)}: {met}), which are {gb(analyze['expert_bytes'])} GB here."
    )
    body = (
        SYNTHETIC_TEXT,
        overheads_table(results),
        *_ablation(results),
        *_stability(results),
        "## Block sizes",
        f"TIES under a budget of {_SHARE} %. Small blocks pay for whole pages and for the catalog;"
        " [sweep](sweep.md) has what each size loses.",
        _block_table(results),
    )
    return Page("Overheads", meaning, body)


def overheads_table(results: Results) -> Table:
    """Return what is beside the expert bytes of a merge, with the papers' figures."""
    analyze, merge, k = results["analyze"], results["merge"], k_at_most(results.size["ks"], _K)
    phases, total = merge["phases"], merge["seconds"]
    planned, executed = merge["planned_bytes"], merge["expert_bytes"]
    rows = (
        ("expert bytes planned, read", f"{gb(planned)}, {gb(executed)} GB ({executed / planned:.3f})", "1.18"),
        ("planning, in the merge", f"{phases['planning']:.2f} s, {percent(phases['planning'] / total, 2)}", "1.04 %"),
        ("`mergepipe plan`, whole process", f"{merge['plan_command_seconds']:.2f} s", "1.21 s"),
        ("waiting for the disk (fsync, all threads)", f"{phases['flush']:.2f} s", ""),
        (
            "stored plan, manifest",
            f"{merge['plan_bytes'] / 1e3:.0f} kB, {merge['manifest_bytes'] / 1e3:.0f} kB",
            "manifest: 812 kB",
        ),
        (
            "catalog",
            f"{analyze['catalog_bytes'] / 1e6:.2f} MB, {percent(_catalog_of_io(results), 3)} of all I/O",
            "3.79 %",
        ),
        ("ANALYZE over the floor", results.over_floor(analyze), ""),
        ("merge", f"{total:.2f} s", "116.6 s"),
    )
    return Table((f"TIES, K = {k}, budget of {_SHARE} %", "measured", "papers (Qwen3-0.6B, K = 16)"), rows)


def _catalog_of_io(results: Results) -> float:
    merge = results["merge"]
    return float(results["analyze"]["catalog_bytes"] / (merge["kernel_read_bytes"] + merge["kernel_written_bytes"]))


def _ablation(results: Results) -> tuple[str | Table, ...]:
    rows = []
    for left_out, (_, *theirs) in _ABLATION.items():
        entry = results[f"ablation/{left_out}"]
        read, seconds = (gb(entry[name]) for name in ("expert_bytes", "kernel_read_bytes")), f"{entry['seconds']:.2f}"
        rows.append((left_out, *read, seconds, f"{entry['cpu_seconds']:.2f}", *theirs))
    header = (
        "left out", "expert GB", "kernel read GB", "s", "CPU s", "expert GB, theirs", "s, theirs (Qwen3-0.6B, K = 20)",
    )  # fmt: skip
    text = (
        f"TIES of {max(results.size['ks'])} experts, analyzed. Without the budget, the plan reads all that is not known"
        " to equal the base. The papers also switch off how their planner scales a budget (8.0 GB, 34.5 s); ours does"
        " not scale it."
    )
    return ("## Without a budget, without a plan", text, Table(header, tuple(rows)))


def _stability(results: Results) -> tuple[str | Table | Figure, ...]:
    ks = sorted({int(key.split("/")[1]) for key in results.entries if key.startswith("stability/")})
    times = {
        k: [float(results[key][results.clock]) for key in results.entries if key.startswith(f"stability/{k}/")]
        for k in ks
    }
    varied = sorted(map(_variation, times.values()))
    figure = Figure(
        "overheads-stability", f"TIES under a fixed budget, {_REPEATS} repeats", "experts K", results.clock_name,
        (Series("mean and standard deviation", tuple(map(float, ks)), tuple(mean(times[k]) for k in ks),
                tuple(stdev(times[k]) for k in ks)),),
    )  # fmt: skip
    text = (
        f"The same merge {_REPEATS} times, as in [scaling](scaling.md): coefficients of variation of"
        f" {percent(varied[0], 1)} to {percent(varied[-1], 1)}. Theirs: deviation below 5 %."
    )
    return ("## Repeats", text, figure)


def _variation(values: list[float]) -> float:
    return stdev(values) / mean(values)


def _block_table(results: Results) -> Table:
    rows = []
    stored = {int(key.split("/")[2]): entry for key, entry in results.entries.items() if key.startswith("blocks/ties/")}
    for kibi, entry in sorted(stored.items()):
        times = (f"{entry['seconds']:.2f}", f"{entry['cpu_seconds']:.2f}")
        ours = (f"{entry['expert_bytes'] / 1e6:.0f}", *times, f"{entry['catalog_bytes'] / 1e6:.2f}")
        rows.append((str(kibi), *ours, *map(str, _PAPER_BLOCKS.get(kibi, ("", "")))))
    header = ("block, Ki", "expert MB", "s", "CPU s", "catalog MB", "expert MB, theirs", "s, theirs (Qwen3-0.6B)")
    return Table(header, tuple(rows))


PART = Part("overheads", "planning, catalog, flush, block sizes, repeats (K = 16)", _needs, _measure, _page)
