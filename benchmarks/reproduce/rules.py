"""Part `rules`: longer fine-tunes on eight domains; every merge rule, budgets, a search and a chain of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from benchmarks.reproduce.fine_tunes import (
    CHAIN_RATES,
    DEFAULT_FORM,
    FEW,
    FISHER_BATCHES,
    PACKED_FORMS,
    RAW_FORMS,
    RULES,
    TOY_SHARE,
    Study,
    measure_study,
    study_needs,
)
from benchmarks.reproduce.kept_gains import (
    beside,
    budget_table,
    draws_text,
    families_of,
    families_table,
    half_interval,
    kinds_of,
    losses_of,
    packed_shares,
    paired_losses,
    seeds_of,
    shares_kept,
    told_range,
)
from benchmarks.reproduce.pages import Page, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results

_NOTABLE = 0.01  # nats
_OF_EIGHT = (
    "linear", "task", "ties", "dare_ties", "della", "magmax", "consensus", "fisher", "sar", "model_stock", "sce",
    "nan_ties",
)  # fmt: skip
STUDY = Study(
    "rules",
    {"longest": "full", "longest-lora": "LoRA"},
    (*FEW, "tables", "tests", "windows", "concurrency"),
    needs=lambda n: Needs(12_000_000_000, 10 + n * 1500),
    shares=(10, 25),
    rules={4: tuple(RULES), 8: _OF_EIGHT},
)


def _page(results: Results) -> Page:
    families = families_table(results, STUDY, {"packed": partial(packed_shares, results)})
    body: list[str | Table] = [_about(results), families, *_overfitting(results)]
    for title, text, table in (
        ("## Rules, 4 experts", "", _rules_table(results, 4)),
        ("## Rules, 8 experts", _RULES_TEXT, _rules_table(results, 8)),
        ("## Budgets, 4 raw experts", "", _rules_budgets(results, RAW_FORMS)),
        ("## Budgets, 4 packed experts", _budget_text(results), _rules_budgets(results, PACKED_FORMS)),
        ("## A search with rungs", _SEARCH_TEXT, _search_table(results)),
        ("## A chain of checkpoints", _CHAIN_TEXT, _chain_table(results)),
    ):
        body += [title, table, *([text] if text else [])] if table.rows else []
    return Page("Rules on longer fine-tunes", _meaning(results), tuple(body))


def _rules_budgets(results: Results, forms: Sequence[str]) -> Table:
    return budget_table(results, kinds_of(results, STUDY), dict.fromkeys((10, 25, TOY_SHARE), forms))


def _budget_text(results: Results) -> str:
    n_sampled, n_seeds = len(beside(results, "longest", f"ties/{DEFAULT_FORM}/10")), len(seeds_of(results, "longest"))
    return (
        "*Gain kept*, in %, and merges are those of [fine-tunes](trained.md); budgets are shares of the raw bytes."
        f" Samples of full fine-tunes: {n_sampled} of {n_seeds} seeds." + draws_text(results, STUDY.kinds)
    )


def _overfitting(results: Results) -> list[str]:
    """Tell the experts whose held-out loss rises by the end."""
    told = []
    for kind, label in STUDY.kinds.items():
        for number, name in enumerate(STUDY.domains):
            courses = [family["courses"][number] for family in families_of(results, kind)]
            quarters = [mean(quarter["heldout"] for quarter in each) for each in zip(*courses, strict=True)]
            if quarters and quarters[-1] > min(quarters) + _NOTABLE:
                training = mean(course[-1]["training"] for course in courses)
                told.append(
                    f"{name} ({label}): {', '.join(f'{loss:.2f}' for loss in quarters)} after the quarters of the"
                    f" training, on its own text {training:.2f}"
                )
    return [f"Overfit, by held-out loss: {'; '.join(told)}."] if told else []


def _differences(results: Results, kind: str, n: int) -> dict[str, tuple[float, float]]:
    """By rule the mean loss above linear's, and half of its 95 % interval over windows; of linear itself nothing."""
    base = {"losses": {name: results["base"]["losses"][name] for name in STUDY.domains[:n]}}
    pairs: dict[str, list[tuple[Entry, ...]]] = {"base": [], "expert": []}
    for (linear,) in beside(results, kind, f"rule/{n}/linear"):
        pairs["base"].append((base, linear))
    for *experts, linear in beside(results, kind, *(f"expert/{number}" for number in range(n)), f"rule/{n}/linear"):
        scored = [{"losses": {name: expert["losses"][name] for name in base["losses"]}} for expert in experts]
        pairs["expert"].append((min(scored, key=lambda entry: mean(losses_of(entry))), linear))
    pairs |= {name: beside(results, kind, f"rule/{n}/{name}", f"rule/{n}/linear") for name in RULES if name != "linear"}
    lost = {name: paired_losses(of_rule) for name, of_rule in pairs.items() if of_rule}
    return {name: (mean(values), half_interval(values)) for name, values in lost.items()}


def _rules_table(results: Results, n: int) -> Table:
    columns = {kind: differences for kind in STUDY.kinds if (differences := _differences(results, kind, n))}
    labels = {"base": "*base*", "expert": "*best single expert*"}
    labels |= {name: rule.label if rule.is_default else f"{rule.label} †" for name, rule in RULES.items()}
    rows = []
    for name, label in labels.items():
        cells = [f"{of[name][0]:+.3f} ± {of[name][1]:.3f}" if name in of else "" for of in columns.values()]
        if any(cells):
            rows.append((label, *cells))
    return Table(("loss less that of linear", *(STUDY.kinds[kind] for kind in columns)), tuple(rows))


def _search_table(results: Results) -> Table:
    rows = []
    for seed, (search, linear) in enumerate(beside(results, "longest", "search", "rule/4/linear")):
        for name in ("rungs", "plain"):
            entry = search[name]
            label = f"rungs of {', '.join(entry['rungs'])}" if entry["rungs"] else "without"
            best, held = (_unseen(losses) for losses in (entry, linear))
            lost = paired_losses([(best, held)])
            complete = sum(trial["state"] == "complete" for trial in entry["trials"])
            rows.append(
                (
                    str(seed), label, str(len(entry["trials"])), str(complete), f"{entry['expert_bytes'] / 1e9:.1f}",
                    f"{mean(losses_of(best)):.4f}", f"{mean(lost):+.3f} ± {half_interval(lost):.3f}",
                )
            )  # fmt: skip
    return Table(("seed", "search", "trials", "merged in full", "GB read", "loss", "less that of linear"), tuple(rows))


def _unseen(entry: Entry) -> Entry:
    """Return the losses of the windows that the search did not see."""
    return {"losses": {name: losses[1::2] for name, losses in entry["losses"].items()}}


def _chain_table(results: Results) -> Table:
    """By rate the packed bytes of a checkpoint, by the steps since the one before: means."""
    rows, header = [], []
    for rate in CHAIN_RATES:
        for (entry,) in beside(results, "longest", f"chain/{rate:g}"):
            apart: dict[int, list[float]] = {}
            for before, step, packed in zip([0, *entry["steps"]], entry["steps"], entry["packed_bytes"], strict=False):
                apart.setdefault(step - before, []).append(packed)
            header = [f"{n} steps" if n > 1 else "1 step" for n in sorted(apart)]
            means = [mean(apart[n]) for n in sorted(apart)]
            told = (f"{each / 1e6:.1f} MB, {percent(each / entry['model_bytes'], 1)}" for each in means)
            rows.append((f"{rate:g}", *told))
    return Table(("rate", *header), tuple(rows))


_RULES_TEXT = (
    "Held-out loss in nats a token, on the domains of the merged experts: paired differences by window from the plain"
    " average, means over seeds, ± half of the 95 % interval over windows; below zero is better. †: not the default."
    " Numbers are weights, then density; 0.3 and 0.2 are the papers' usual ones. `fisher` and `sar` take mean squared"
    f" gradients of {FISHER_BATCHES} batches of the training text."
)
_SEARCH_TEXT = (
    "Four weights of task arithmetic between 0 and 1, full fine-tunes, searched by every second window; the loss is of"
    " the others. After a rung of 10 % the best third of the trials so far goes on; all bytes read are counted. Without"
    " rungs, full merges are tried until they have read as much. Both searches propose the same first trials."
)
_CHAIN_TEXT = (
    "Full fine-tuning at a nearly constant rate; each checkpoint is packed on the one before (`pack --chain`),"
    " the first, 100 steps on, on the base. TRL's delta sync moves 20 to 35 MB of 1.2 GB (1.7 to 2.9 %) a step at 0.6B."
)


def _meaning(results: Results) -> str:
    told, kept = [], []
    for kind, label in STUDY.kinds.items():
        rows = _differences(results, kind, 4)
        defaults = [name for name in rows if name in RULES and RULES[name].is_default]
        if defaults:
            best = min(defaults, key=lambda name: rows[name][0])
            told.append(f"{-rows[best][0]:.3f} of its {rows['base'][0]:.2f} nats (`{RULES[best].method}`, {label})")
        raw, packed, norm = (
            told_range(shares_kept(results, kind, [form], STUDY.shares[0]))
            for form in (DEFAULT_FORM, PACKED_FORMS[0], "norm")
        )
        if raw and packed and norm:
            kept.append(f"{raw}, of packs {packed}, whole blocks by norm {norm} ({label})")
    if not told:
        return "**No merge is measured yet.**"
    return (
        f"**Of four experts no rule at its default beats the plain average by more than {'; '.join(told)}. Worse at"
        f" every setting tried: {', '.join(f'`{method}`' for method in _always_worse(results)) or 'none'}. At"
        f" {STUDY.shares[0]} % of the bytes samples keep of a full merge's gain, in the mean of a cell's draws,"
        f" {'; '.join(kept)}: below zero is worse than the base.**"
    )


def _always_worse(results: Results) -> list[str]:
    """Methods whose every setting is worse than linear by more than its interval and a hundredth, in all kinds."""
    lost: dict[str, list[float]] = {}
    for kind in STUDY.kinds:
        for name, difference in _differences(results, kind, 4).items():
            if name in RULES:
                lost.setdefault(RULES[name].method, []).append(difference[0] - max(difference[1], _NOTABLE))
    return [method for method, values in lost.items() if min(values) > 0]


def _about(results: Results) -> str:
    schedule = results["base"]["schedules"]["longest"]
    full, lora = (results["base"]["schedules"][kind]["peak_rate"] for kind in STUDY.kinds)
    gpu, n_windows = results["base"]["gpu"], len(results["base"]["losses"][FEW[0]])
    return (
        "The base is that of [fine-tunes of a public language model](trained.md), with eight experts on one domain"
        f" each, text and source code that come with Python: {schedule['steps']} steps of"
        f" {schedule['batch']} windows of {schedule['window_tokens']} tokens, matrix products in bfloat16, masters in"
        f" float32, AdamW, peak rates {full:g} in full and {lora:g} by LoRA of rank 16{f', on a {gpu}' if gpu else ''}"
        f"; {n_windows} held-out windows of each domain. Nothing follows from this for larger models or"
        " other kinds of training."
    )


PART = Part(
    STUDY.name, "every merge rule, budgets, a search and a chain on longer fine-tunes of eight domains",
    partial(study_needs, STUDY), partial(measure_study, STUDY), _page, tells_beginnings=True,
)  # fmt: skip
