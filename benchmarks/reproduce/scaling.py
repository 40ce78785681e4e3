"""Part `scaling`: merges under a fixed budget of bytes and in full as experts are added (the papers' operators x K)."""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.peers import PEER_VENV, Tool, installed_peers
from benchmarks.recipes import method_cases
from benchmarks.reproduce.family_recipes import (
    PAPER_BUDGET_SHARE,
    PAPER_OPERATORS,
    SYNTHETIC_TEXT,
    PaperMerge,
)
from benchmarks.reproduce.pages import (
    COST_HEADER,
    ERROR_TEXT,
    Figure,
    Page,
    Series,
    Table,
    cost_cells,
    gb,
    peak_mib,
    percent,
)
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from support.families import FamilyPaths

_PEER_KS = (2, 8, 20)
_TARGET_RATIO = 1.05


def _needs(size: Size) -> Needs:
    n_merged = len(PAPER_OPERATORS) * sum(size.ks) * size.model_bytes * (1 + 2 * size.repeats)
    peers = 20 * len(_PEER_KS) * size.n_experts * size.model_bytes
    return Needs(size.family_bytes + 2 * size.model_bytes, (n_merged + peers) / 1e9 / 60 + size.family_bytes / 4e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, size.n_experts)
    for operator in PAPER_OPERATORS:
        for k in size.ks:
            merge = PaperMerge(place, family, operator, k)
            results.measure(f"{operator}/{k}/full", merge.in_full)
            results.measure(f"{operator}/{k}/budget", partial(merge.under_the_budget, size.model_bytes, size.repeats))
    for tool in () if size.is_toy else _peers(Path(sys.prefix)):
        for operator in PAPER_OPERATORS:
            for k in (k for k in size.ks if k in _PEER_KS):
                cases = method_cases(FamilyPaths(family.base, family.experts[:k]))
                case = next(case for case in cases if case.name == operator)
                results.measure(f"{operator}/{k}/{tool.name}", partial(place.peer, tool, case))


def _peers(venv: Path) -> list[Tool]:
    """Return the naive script and mergekit, where `make test-peers` installed them beside our environment."""
    return installed_peers() or installed_peers(venv.parent / PEER_VENV)


def _page(results: Results) -> Page:
    ks = [int(k) for k in results.size["ks"]]
    first, last = ks[0], ks[-1]
    budget = PAPER_BUDGET_SHARE * results.size["model_bytes"]
    ratios = {
        name: results[f"{operator}/{last}/budget"][results.clock] / results[f"{operator}/{first}/budget"][results.clock]
        for operator, name in PAPER_OPERATORS.items()
    }
    times = ", ".join(f"{ratio:.2f} for {name}" for name, ratio in ratios.items())
    met = all(ratio <= _TARGET_RATIO for ratio in ratios.values())
    errors = [results[f"ties/{k}/budget"]["error"] for k in (first, last)]
    meaning = (
        f"**With a budget in bytes, a merge reads the same amount however many experts you add; opening more experts"
        f" takes some time, and the result keeps less of the full merge.** With"
        f" {gb(budget)} GB of expert reads ({percent(PAPER_BUDGET_SHARE, 1)} of one expert,"
        f" the papers' share), a merge of {last} experts takes this many times the"
        f" {results.clock_name} of one of {first}: {times}"
        f" (target {_TARGET_RATIO}: {'met' if met else 'not met'}). The error of TIES grows from {errors[0]:.3f} to"
        f" {errors[1]:.3f} of what the full merge changes: a budget of this size is a time limit, not a way to merge"
        f" {last} experts well.{_others_text(results, last)}"
    )
    body: list[str | Table | Figure] = [SYNTHETIC_TEXT, "## Under the fixed budget"]
    body += [
        _BUDGET_TEXT,
        _growth_text(results, ks),
        _budget_table(results, ks),
        _time_figure(results, ks),
        _error_figure(results, ks),
    ]
    body += ["## In full, and other programs", _full_table(results, ks), _full_figure(results, ks)]
    return Page("Scaling in the number of experts", meaning, tuple(body))


def _others_text(results: Results, k: int) -> str:
    """Tell how TIES of `k` experts in full compares with other programs, where they were measured."""
    ours, told = results[f"ties/{k}/full"], []
    for tool in ("mergekit", "naive torch"):
        other = results.entries.get(f"ties/{k}/{tool}")
        if other is not None and "out_of_memory_bytes" in other:
            told.append(f"{tool} needs more than {other['out_of_memory_bytes'] / 2**30:.0f} GiB")
        elif other is not None:
            told.append(f"{tool} takes {other[results.clock] / ours[results.clock]:.0f} times as long")
    seconds = f"{ours[results.clock]:.0f} {results.clock_name} and {ours['peak_rss_bytes'] / 2**30:.1f} GiB"
    return f" In full, TIES of {k} experts takes {seconds}; {', '.join(told)}." if told else ""


def _growth_text(results: Results, ks: list[int]) -> str:
    first, last = ks[0], ks[-1]

    def of_each_expert(operator: str) -> float:
        least, most = (results[f"{operator}/{k}/budget"]["cpu_seconds"] for k in (first, last))
        return float(1000 * (most - least) / max(1, last - first))

    told = ", ".join(f"{of_each_expert(operator):.0f} ms for {name}" for operator, name in PAPER_OPERATORS.items())
    return (
        "What grows with the number of experts is their files, statistics, plan and manifest. Each"
        f" further expert takes this much processor time: {told}. Other bytes of TIES:"
        f" {_components(results, first)}; {_components(results, last)}."
    )


_BUDGET_TEXT = (
    "*Expert GB* are requested of the experts, *GB read* counted by the kernel for the whole process; RSS is its"
    " largest memory. The floor reads as many bytes and writes as many, past the page cache. Blocks have 256 Ki"
    f" elements. {ERROR_TEXT}"
)


def other_cells(results: Results, entry: Entry | None) -> tuple[str, str]:
    """Return the seconds and the memory of another program; where it was not measured, empty cells."""
    if entry is None:
        return ("", "")
    if "out_of_memory_bytes" in entry:
        return ("out of memory", f"> {entry['out_of_memory_bytes'] / 2**20:.0f}")
    return (results.told_seconds(entry, "seconds"), peak_mib(entry))


def _budget_table(results: Results, ks: list[int]) -> Table:
    rows = []
    for operator, name in PAPER_OPERATORS.items():
        for k in _table_ks(ks):
            entry = results[f"{operator}/{k}/budget"]
            costs = cost_cells(results, entry)
            rows.append((name, str(k), gb(entry["expert_bytes"]), *costs, f"{entry['error']:.3f}"))
    return Table(("operator", "K", "expert GB", *COST_HEADER, "error"), tuple(rows))


def _components(results: Results, k: int) -> str:
    """Tell what the bytes of a merge by TIES under the budget are."""
    entry = results[f"ties/{k}/budget"]
    read = f"base {gb(entry['base_bytes'])} GB, headers {entry['metadata_bytes'] / 1e6:.2f} MB"
    return f"K = {k}: {read}, written {gb(entry['output_bytes'])} GB, manifest {entry['manifest_bytes'] / 1e6:.2f} MB"


def _table_ks(ks: list[int]) -> list[int]:
    """The numbers of experts that stand in the tables; the figures and the stored results have all."""
    return [k for k in ks if k in _PEER_KS] or ks


def _full_table(results: Results, ks: list[int]) -> Table:
    others = [tool for tool in ("naive torch", "mergekit") if any(key.endswith(f"/{tool}") for key in results.entries)]
    rows = []
    for operator, name in PAPER_OPERATORS.items():
        for k in _table_ks(ks):
            entry = results[f"{operator}/{k}/full"]
            theirs = (other_cells(results, results.entries.get(f"{operator}/{k}/{tool}")) for tool in others)
            read = gb(entry["kernel_read_bytes"])
            rows.append((name, str(k), read, *cost_cells(results, entry), *chain.from_iterable(theirs)))
    columns = (f"{tool}, {what}" for tool in others for what in ("s", "RSS MiB"))
    return Table(("operator", "K", "GB read", *COST_HEADER, *columns), tuple(rows))


def _series(results: Results, ks: list[int], kind: str, value: str) -> tuple[Series, ...]:
    return tuple(
        Series(name, tuple(map(float, ks)), tuple(float(results[f"{operator}/{k}/{kind}"][value]) for k in ks))
        for operator, name in PAPER_OPERATORS.items()
    )


def _time_figure(results: Results, ks: list[int]) -> Figure:
    return Figure(
        "scaling-time", "Time of a merge under the fixed budget", "experts K", results.clock_name,
        _series(results, ks, "budget", results.clock),
    )  # fmt: skip


def _error_figure(results: Results, ks: list[int]) -> Figure:
    return Figure(
        "scaling-error", "Error under the fixed budget", "experts K", "error over what the full merge changes",
        _series(results, ks, "budget", "error"),
    )  # fmt: skip


def _full_figure(results: Results, ks: list[int]) -> Figure:
    return Figure(
        "scaling-full",
        "Time of a merge in full",
        "experts K",
        results.clock_name,
        _series(results, ks, "full", results.clock),
    )


PART = Part("scaling", "AVG, TIES and DARE under a fixed budget and in full, K = 2 to 20", _needs, _measure, _page)
