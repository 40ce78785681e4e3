"""The papers' figures beside ours, for docs/papers.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean

from benchmarks.reproduce.family_recipes import PAPER_OPERATORS
from benchmarks.reproduce.overheads import overheads_table
from benchmarks.reproduce.pages import Table, percent
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.resuming import stored_runs

_SCALING = {
    # K: naive seconds, theirs under the budget; AVG, TIES, DARE (Llama-3.1-8B, 3,462 MB)
    2: ((31.1, 41.2), (404.3, 37.2), (79.3, 37.8)),
    4: ((37.3, 51.0), (491.8, 42.3), (78.1, 45.4)),
    8: ((136.2, 64.1), (614.3, 51.1), (99.1, 44.7)),
    12: ((191.9, 84.2), (633.1, 80.3), (128.0, 84.7)),
    16: ((195.2, 173.5), (941.4, 198.7), (248.9, 210.0)),
    20: ((363.0, 338.4), (1203.7, 356.3), (464.2, 414.4)),
}
_FIDELITY = {
    # budget, %: touched ratio, relative l2, P95 block error (Qwen3-0.6B, TIES, K = 20)
    90: (0.180, 7.23e-4, 3.66e-3),
    80: (0.159, 7.77e-4, 3.66e-3),
    70: (0.140, 8.30e-4, 3.98e-3),
    60: (0.119, 8.30e-4, 3.98e-3),
    50: (0.101, 8.84e-4, 3.98e-3),
}
_BLOCKS = {
    # Ki elements: expert MB, seconds of TIES and of DARE
    16: (4040, 77.3, 83.9),
    32: (3520, 61.5, 62.5),
    64: (3226, 52.0, 50.4),
    128: (3199, 45.3, 46.3),
    256: (3390, 46.3, 46.3),
    512: (3773, 45.0, 46.8),
}
_RESUMED = {
    # by what is resumed: final losses in training and on held-out text, of Llama-3.1-8B and of Qwen2.5-7B
    "not interrupted": ("1.58 / 1.58", "1.58 / 1.60"),
    "paper-parity": ("1.58 / 1.58", "1.58 / 1.60"),
    "paper-filter": ("1.59 / 1.59", "1.60 / 1.62"),
}


def comparison(results: Mapping[str, Results]) -> str:
    """Write a section for each table of the papers that there are results of."""
    sections: Mapping[str, Callable[[Results], str]] = {
        "scaling": _scaling, "sweep": _fidelity, "overheads": _overheads, "resuming": _resuming,
    }  # fmt: skip
    return "\n\n".join(section(results[name]) for name, section in sections.items() if name in results)


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
        "Seconds in full / under the budget of 21.6 % of one expert. Theirs: Llama-3.1-8B, naive script and MergePipe;"
        f" ours: {results.clock_name} at size `{results.size['name']}`, both by this program"
        " ([scaling](benchmarks/scaling.md) has the naive script and mergekit, where they were measured). Models and"
        " machines differ: compare how the columns grow."
    )
    return f"### Operators and K\n\n{text}\n\n{Table(tuple(header), tuple(rows)).markdown()}"


def _fidelity(results: Results) -> str:
    k = max(int(key.split("/")[0]) for key in results.entries)
    rows = []
    for share, (touched, l2, p95) in _FIDELITY.items():
        if f"{k}/norm/{share}" not in results:
            continue
        entry = results[f"{k}/norm/{share}"]
        rows.append(
            (
                f"{share} %", f"{touched:.3f}", f"{l2:.2e}", f"{p95:.2e}", f"{entry['accessed_blocks']:.3f}",
                f"{entry['relative_l2']:.2e}", f"{entry['p95_block']:.2e}", f"{entry['error']:.3f}",
            )
        )  # fmt: skip
    text = (
        f"TIES, theirs on Qwen3-0.6B with K = 20 (budgets relative to a run that touches 0.247 of the blocks), ours at"
        f" size `{results.size['name']}` with K = {k}, relative to the merge in full. The last column is ours alone:"
        " the distance over what the full merge changes. By the papers' measures even the base is near the full merge."
    )
    header = (
        "budget", "touched, theirs", "relative l2, theirs", "P95, theirs", "touched, ours", "relative l2, ours",
        "P95, ours", "error, ours",
    )  # fmt: skip
    return f"### Fidelity by budget\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"


def _overheads(results: Results) -> str:
    rows = []
    for kibi, (nbytes, ties, dare) in _BLOCKS.items():
        if f"blocks/ties/{kibi}" not in results:
            continue
        ours = [results[f"blocks/{operator}/{kibi}"] for operator in ("ties", "dare_ties")]
        seconds = (f"{entry['seconds']:.2f}" for entry in ours)
        rows.append((str(kibi), str(nbytes), f"{ties}", f"{dare}", f"{ours[0]['expert_bytes'] / 1e6:.0f}", *seconds))
    header = ("block, Ki", "expert MB, theirs", "TIES s", "DARE s", "expert MB, ours", "TIES s", "DARE s")
    blocks = Table(header, tuple(rows)).markdown()
    growth = 1 - results["blocks/ties/256"]["cpu_seconds"] / results["blocks/ties/16"]["cpu_seconds"]
    text = f"Ours at size `{results.size['name']}`: 256 Ki take {percent(growth)} less processor time than 16 Ki."
    return "\n\n".join(["### Overheads", overheads_table(results).markdown(), "### Block sizes", text, blocks])


def _resuming(results: Results) -> str:
    runs = stored_runs(results)
    rows = []
    for strategy, theirs in _RESUMED.items():
        of_strategy = [run for run in runs if run.name.startswith(strategy)]
        final = mean(run.final_loss for run in of_strategy if run.final_loss is not None)
        heldout = mean(run.heldout_after for run in of_strategy if run.heldout_after is not None)
        rows.append((strategy, *theirs, f"{final:.3f} / {heldout:.3f}"))
    text = (
        "Last losses in training / on held-out text. Theirs: hundreds of steps of models of 7 and 8 billion"
        f" parameters; ours: [SmolLM2-135M](benchmarks/resuming.md), seeds: {len(results.entries)}. Losses of other"
        " models on other text do not compare; the differences from the first row do."
    )
    header = ("resumed from", "Llama-3.1-8B, theirs", "Qwen2.5-7B, theirs", "SmolLM2-135M, ours")
    return f"### Losses after resuming\n\n{text}\n\n{Table(header, tuple(rows)).markdown()}"
