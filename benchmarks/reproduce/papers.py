"""The papers' figures beside ours, for docs/papers.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from benchmarks.reproduce.compose import ComposeTimes, compose_times
from benchmarks.reproduce.family_recipes import PAPER_OPERATORS
from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.resuming import ALONE, VARIANTS, ZERO3, stored_runs
from benchmarks.reproduce.sweep import CONTENT_ORDERS, correlated_errors
from benchmarks.tailor_resuming import Resumed

_SCALING = {
    # K: naive seconds, theirs under the budget; AVG, TIES, DARE (Llama-3.1-8B, 3,462 MB)
    2: ((31.1, 41.2), (404.3, 37.2), (79.3, 37.8)),
    8: ((136.2, 64.1), (614.3, 51.1), (99.1, 44.7)),
    20: ((363.0, 338.4), (1203.7, 356.3), (464.2, 414.4)),
}
_FIDELITY = {
    # budget, %: touched ratio, relative l2 (Qwen3-0.6B, TIES, K = 20)
    90: (0.180, 7.23e-4),
    80: (0.159, 7.77e-4),
    70: (0.140, 8.30e-4),
    60: (0.119, 8.30e-4),
    50: (0.101, 8.84e-4),
}
_RESUMED = {
    # by what is resumed: final losses in training and on held-out text, of Llama-3.1-8B and of Qwen2.5-7B
    "not interrupted": ("1.58 / 1.58", "1.58 / 1.60"),
    "paper-parity": ("1.58 / 1.58", "1.58 / 1.60"),
    "paper-filter": ("1.59 / 1.59", "1.60 / 1.62"),
}

_LOAD_1B, _LOAD_8B = 0.80, 16.8
_GB_1B, _GB_8B = 17.3, 112.5
_COMPOSED = {
    # pattern and sources: seconds to compose and load, and to load one, of the 1B and of the 8B model
    ("consecutive", 2): ((117.0, _LOAD_1B), (332.4, _LOAD_8B)),
    ("parity", 2): ((233.6, _LOAD_1B), (1027.5, _LOAD_8B)),
    ("consecutive", 8): ((60.4, _LOAD_1B), (279.2, _LOAD_8B)),
    ("consecutive", 18): ((62.5, _LOAD_1B), (None, _LOAD_8B)),
    ("consecutive", 35): ((None, _LOAD_1B), (264.3, _LOAD_8B)),
}


def comparison(results: Mapping[str, Results]) -> str:
    """Write a section for each table of the papers that there are results of."""
    sections: Mapping[str, Callable[[Results], str]] = {
        "scaling": _scaling, "sweep": _fidelity, "resuming": _resuming, "compose": _composing,
    }  # fmt: skip
    texts = [section(results[name]) for name, section in sections.items() if name in results]
    if "sweep" in results:
        texts.append(_conflicts(results["sweep"]))
    if "scaling" in results:
        texts.insert(1, _baseline(results["scaling"]))
    return "\n\n".join(text for text in texts if text)


def _scaling(results: Results) -> str:
    rows = []
    for k in (k for k in results.size["ks"] if k in _SCALING):
        cells = []
        for (naive, theirs), operator in zip(_SCALING[k], PAPER_OPERATORS, strict=True):
            full, budget = (results[f"{operator}/{k}/{kind}"][results.clock] for kind in ("full", "budget"))
            cells += [f"{naive:.0f} / {theirs:.0f}", f"{full:.2f} / {budget:.2f}"]
        rows.append((str(k), *cells))
    header = ["K"]
    for name in PAPER_OPERATORS.values():
        header += [f"{name}, theirs", f"{name}, ours"]
    text = (
        "Seconds in full / under the budget of 21.6 % of one expert. Theirs: Llama-3.1-8B, naive script / MergePipe;"
        f" ours: {results.clock_name} of synthetic models of size `{results.size['name']}`, both by this program."
        " Models and machines differ: compare how the columns grow."
    )
    return f"### Operators and K\n\n{text}\n\n{Table(tuple(header), tuple(rows)).markdown()}"


def _baseline(results: Results) -> str:
    """Return how many times as long the papers' baseline takes as a merge in full, and as one under their budget."""
    rows = []
    for k in (k for k in results.size["ks"] if k in _SCALING):
        for (naive, theirs), (operator, name) in zip(_SCALING[k], PAPER_OPERATORS.items(), strict=True):
            script, mergekit = (results.entries.get(f"{operator}/{k}/{tool}") for tool in ("naive torch", "mergekit"))
            if script is None or mergekit is None:
                continue
            full, budget = (results[f"{operator}/{k}/{kind}"] for kind in ("full", "budget"))
            limited = _times(script, budget, results.clock)
            rows.append(
                (
                    str(k),
                    name,
                    f"{naive / theirs:.1f} x",
                    _times(script, full, results.clock),
                    _times(mergekit, full, results.clock),
                    f"{limited}, error {budget['error']:.3f}" if limited != _DID_NOT_END else limited,
                    f"{_gigabytes(full)}; {_gigabytes(script)}; {_gigabytes(mergekit)}",
                )
            )
    if not rows:
        return ""
    text = (
        "How many times as long other programs take. Theirs: naive script over MergePipe under the budget (64 cores,"
        f" SSD). Ours: {results.clock_name} of the same kind of script in torch, and of mergekit, over this program in"
        " full, where nothing is lost, and under the budget, with the error that this costs. On two cores the script is"
        " bound by the processor, theirs by reading: the ratios have different causes. GB: the largest memory of ours"
        " in full; the script's; mergekit's."
    )
    header = (
        "K", "operator", "budget, theirs", "in full, script", "in full, mergekit", "budget, script", "GB",
    )  # fmt: skip
    return f"### Beside the papers' baseline\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"


_DID_NOT_END = "out of memory"


def _times(other: Entry, ours: Entry, clock: str) -> str:
    return _DID_NOT_END if "out_of_memory_bytes" in other else f"{other[clock] / ours[clock]:.1f} x"


def _gigabytes(entry: Entry) -> str:
    if "out_of_memory_bytes" in entry:
        return f"> {entry['out_of_memory_bytes'] / 1e9:.1f}"
    return f"{entry['peak_rss_bytes'] / 1e9:.1f}"


def _fidelity(results: Results) -> str:
    k = max(results.size["ks"])
    rows = []
    for share, (touched, l2) in _FIDELITY.items():
        if f"{k}/norm/{share}" not in results:
            continue
        entry = results[f"{k}/norm/{share}"]
        rows.append(
            (
                f"{share} %", f"{touched:.3f}", f"{l2:.2e}", f"{entry['accessed_blocks']:.3f}",
                f"{entry['relative_l2']:.2e}", f"{entry['error']:.3f}",
            )
        )  # fmt: skip
    text = (
        f"TIES, theirs on Qwen3-0.6B with K = 20, ours on synthetic models of size `{results.size['name']}` with K ="
        f" {k}. Their *touched* share is 0.247 without a budget, and their budgets are relative to that run; the share"
        " that ours *reads* is 1 there: the two do not compare. *Error*: the distance over what the full merge changes."
    )
    header = (
        "budget", "touched, theirs", "relative l2, theirs", "read, ours", "relative l2, ours", "error, ours",
    )  # fmt: skip
    return f"### Fidelity by budget\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"


def _conflicts(results: Results) -> str:
    """Return the errors of experts that cancel or agree, which the papers' conflict-aware order is for."""
    columns = {share: correlated_errors(results, share) for share in (25, 50)}
    if not all(columns.values()):
        return ""
    rows = [
        (label, *(f"{errors[order]:.3f}" for errors in columns.values())) for order, label in CONTENT_ORDERS.items()
    ]
    text = (
        "Error of a sum of [four experts](benchmarks/sweep.md#experts-that-agree-or-cancel), of which two nearly cancel"
        " and two agree. The papers state no figure for their conflict-aware score."
    )
    header = ("order", *(f"{share} %" for share in columns))
    return f"### Conflict-aware order\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"


def _resuming(results: Results) -> str:
    measured = {variant: runs for variant in VARIANTS if (runs := stored_runs(results, variant))}
    rows = []
    for strategy, theirs in _RESUMED.items():
        ours = (_last_losses([run for run in runs if run.name.startswith(strategy)]) for runs in measured.values())
        rows.append((strategy, *theirs, *ours))
    text = (
        "Last losses in training / on held-out text. Theirs: hundreds of steps under ZeRO-3; ours: [a short"
        " fine-tune](benchmarks/resuming.md), means over seeds. Only differences from the first row compare."
    )
    ours_by = {ALONE: "SmolLM2-135M, ours", ZERO3: "SmolLM2-135M under ZeRO-3, two ranks, ours"}
    ours = (f"{ours_by[variant]} (seeds: {len(variant.entries(results))})" for variant in measured)
    header = ("resumed from", "Llama-3.1-8B, theirs", "Qwen2.5-7B, theirs", *ours)
    return f"### Losses after resuming\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"


def _last_losses(runs: Sequence[Resumed]) -> str:
    final = mean(run.final_loss for run in runs if run.final_loss is not None)
    heldout = mean(run.heldout_after for run in runs if run.heldout_after is not None)
    return f"{final:.3f} / {heldout:.3f}"


def _composing(results: Results) -> str:
    times = compose_times(results)
    rows = []
    for (pattern, n_sources), theirs in _COMPOSED.items():
        ours = (_ours(of_size, pattern, n_sources) for of_size in times)
        sizes = (_GB_1B, _GB_8B)
        cells = (_over(nbytes, *pair) for nbytes, pair in zip(sizes, theirs, strict=True))
        rows.append((f"{pattern}, {n_sources} sources", *cells, *ours))
    loads = " and ".join(
        f"{of_size.loading():.2f} {results.clock_name} of {of_size.size_gb:g} GB"
        for of_size in times if of_size.loading() is not None
    )  # fmt: skip
    text = (
        "Time over that of DeepSpeed's load of one checkpoint of the same size, and in parentheses the GB written a"
        f" second. Their loads take {_LOAD_1B:.2f} and {_LOAD_8B:.1f} s (22 and 7 GB/s, as from memory), ours {loads}:"
        " the ratios alone flatter us. Theirs: composing and loading; 18 and 35 sources are one for each unit. Ours:"
        " [composing](benchmarks/compose.md) by itself, of synthetic checkpoints."
    )
    header = ("composed", f"{_GB_1B} GB, theirs", f"{_GB_8B} GB, theirs", *(f"{t.size_gb:g} GB, ours" for t in times))
    return f"### Time to compose\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}" if loads else ""


def _over(size_gb: float, seconds: float | None, load_seconds: float) -> str:
    return "" if seconds is None else f"{seconds / load_seconds:.0f} ({size_gb / seconds:.2f})"


def _ours(times: ComposeTimes, pattern: str, n_sources: int) -> str:
    """Tell the time over that of loading one, where that was measured, and the throughput."""
    over, throughput = times.over_loading(times.time(pattern, n_sources)), times.throughput(pattern, n_sources)
    return f"{over} ({throughput})".strip() if throughput else ""
