"""Part `rules`: merge rules, budgets, a search and a chain of checkpoints on longer fine-tunes of eight domains."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

import mergepipe
from benchmarks import tiny_lm
from benchmarks.deltas import delta_size
from benchmarks.recipes import DENSITY
from benchmarks.reproduce.pages import Page, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sampling import FORMS, MERGES, Samples
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.trained import (
    TrainedBase,
    TrainedFamily,
    difference_of,
    half_interval,
    kept_of,
    paired_losses,
    window_losses_of,
)
from benchmarks.reproduce.workplace import Workplace

KINDS = {"longest": "full fine-tuning", "longest-lora": "LoRA of rank 16"}
_FEW = ("prose", "headers", "legal", "internet")
_DOMAINS = (*_FEW, "tables", "tests", "windows", "concurrency")
_BUDGETED, _SHARES, _TOY_SHARES = ("ties", "linear", "dare_ties"), (10, 25), (50,)
_TOLD_FORMS = ("sample-32", "by-norm-16", "norm", "random", "packed-sample", "packed-norm")
_QUARTERS = 4
_FISHER_BATCHES = 16
_RUNGS, _TRIALS = ("5%", "25%", "100%"), 32
_CHAIN_STEPS = (100, 101, 102, 103, 104, 110, 120, 130, 140)  # after which a checkpoint is saved
_CHAIN_RATES = (2e-5, 1e-6)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A merge rule with the values of its parameters: those of each model, and those of the merge."""

    label: str
    method: str
    each: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    by_importance: bool = False  # weights are files of squared gradients
    is_default: bool = True

    def recipe(self, base: Path, experts: Sequence[Path]) -> str:
        content: dict[str, Any] = {"merge_method": self.method}
        if self.method not in ("linear", "karcher"):
            content["base_model"] = str(base)
        models = []
        for expert in experts:
            weight = {"weight": {"file": str(importance_file(expert))}} if self.by_importance else {}
            models.append({"model": str(expert), "parameters": {**self.each, **weight}})
        content |= {"models": models, "parameters": dict(self.common), "dtype": "float32", "out_dtype": "bfloat16"}
        return yaml.safe_dump(content, sort_keys=False)


_THIRD, _ONE = {"weight": 0.3}, {"weight": 1.0}
_SPARSE = {"weight": 0.3, "density": DENSITY}
RULES = {
    "linear": _Rule("linear", "linear", _ONE),
    "task": _Rule("task_arithmetic, 0.3", "task_arithmetic", _THIRD),
    "ties": _Rule("ties, density 0.2", "ties", {"weight": 1.0, "density": DENSITY}),
    "dare_linear": _Rule("dare_linear, 0.3, density 0.2", "dare_linear", _SPARSE),
    "dare_ties": _Rule("dare_ties, 0.3, density 0.2", "dare_ties", _SPARSE),
    "breadcrumbs": _Rule("breadcrumbs, 0.3, density 0.9", "breadcrumbs", {"weight": 0.3, "density": 0.9}),
    "breadcrumbs_ties": _Rule("breadcrumbs_ties, 0.3, 0.9", "breadcrumbs_ties", {"weight": 0.3, "density": 0.9}),
    "della": _Rule("della, density 0.5", "della", {"weight": 1.0, "density": 0.5}),
    "della_linear": _Rule("della_linear, 0.3, density 0.5", "della_linear", {"weight": 0.3, "density": 0.5}),
    "sce": _Rule("sce, top 1", "sce"),
    "model_stock": _Rule("model_stock", "model_stock"),
    "karcher": _Rule("karcher", "karcher"),
    "multislerp": _Rule("multislerp", "multislerp", _ONE),
    "median": _Rule("geometric_median", "geometric_median"),
    "ram": _Rule("ram", "ram"),
    "ramplus": _Rule("ramplus_tl", "ramplus_tl"),
    "magmax": _Rule("magmax", "magmax"),
    "consensus": _Rule("consensus, lambda 0.3", "consensus", _ONE, {"lambda": 0.3}),
    "fisher": _Rule("fisher", "fisher", by_importance=True),
    "sar": _Rule("sar", "sar", by_importance=True),
    "nan_task": _Rule("task_arithmetic, weight: nan", "task_arithmetic", {"weight": "nan"}),
    "nan_ties": _Rule("ties, density 0.2, weight: nan", "ties", {"weight": "nan", "density": DENSITY}),
    "lines": _Rule("task_arithmetic, 0.5, lines 0.3 + 0.7", "task_arithmetic", {"weight": 0.5},
                   {"lambda": {"lines": [0.3, 0.7]}}),
    "task_05": _Rule("task_arithmetic, 0.5", "task_arithmetic", {"weight": 0.5}, is_default=False),
    "sum": _Rule("task_arithmetic, 1", "task_arithmetic", _ONE, is_default=False),
    "ties_05": _Rule("ties, density 0.5", "ties", {"weight": 1.0, "density": 0.5}, is_default=False),
    "ties_1": _Rule("ties, density 1", "ties", {"weight": 1.0, "density": 1.0}, is_default=False),
    "ties_up": _Rule("ties, density 0.2, lambda 1.5", "ties", {"weight": 1.0, "density": DENSITY}, {"lambda": 1.5},
                     is_default=False),
    "dare_05": _Rule("dare_ties, 0.3, density 0.5", "dare_ties", {"weight": 0.3, "density": 0.5}, is_default=False),
    "sce_01": _Rule("sce, top 0.1", "sce", common={"select_topk": 0.1}, is_default=False),
    "magmax_05": _Rule("magmax, lambda 0.5", "magmax", common={"lambda": 0.5}, is_default=False),
    "consensus_06": _Rule("consensus, lambda 0.6", "consensus", _ONE, {"lambda": 0.6}, is_default=False),
    "fisher_15": _Rule("fisher, lambda 1.5", "fisher", common={"lambda": 1.5}, by_importance=True, is_default=False),
    "sar_05": _Rule("sar, lambda 0.5", "sar", common={"lambda": 0.5}, by_importance=True, is_default=False),
    "stock_filter": _Rule("model_stock, filter_wise", "model_stock", common={"filter_wise": True}, is_default=False),
}  # fmt: skip
_OF_EIGHT = ("linear", "task", "ties", "dare_ties", "della", "magmax", "consensus", "fisher", "sar", "model_stock",
             "sce", "nan_ties")  # fmt: skip


def importance_file(expert: Path) -> Path:
    """The squared gradients of an expert on its training text."""
    return expert.with_name(f"importance-{expert.name}") / "model.safetensors"


def _needs(size: Size) -> Needs:
    return Needs(0, 1) if size.is_toy else Needs(12_000_000_000, 10 + len(KINDS) * size.repeats * 1500)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("rules")
    base = base_of(place, is_toy=size.is_toy)
    base.measure(results)
    for seed in range(size.repeats):
        for kind in KINDS:
            family = LongFamily(place, base, kind, seed)
            for key, call in measurements(family, Rules(family, base, seed), is_toy=size.is_toy):
                results.measure(key, call)
            family.place.remove()


def base_of(place: Workplace, *, is_toy: bool) -> TrainedBase:
    return TrainedBase(place, KINDS, is_toy=is_toy, domains=_DOMAINS, n_windows=16)


def measurements(family: LongFamily, rules: Rules, *, is_toy: bool) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Tell what is measured of a family: keys, and what measures them."""
    prefix = f"{family.kind}/{family.seed}"
    yield f"{prefix}/family", family.describe
    few, eight = (("linear", "fisher"), ("linear",)) if is_toy else (tuple(RULES), _OF_EIGHT)
    for number in range(1 if is_toy else len(_DOMAINS)):
        yield f"{prefix}/expert/{number}", partial(rules.expert, number)
    for n, names in ((len(_FEW), few), (len(_DOMAINS), eight)):
        for name in names:
            yield f"{prefix}/rule/{n}/{name}", partial(rules.rule, name, n)
    for merge in _BUDGETED[:1] if is_toy else _BUDGETED:
        yield f"{prefix}/{merge}/full", partial(rules.samples.full, merge)
        for share in _TOY_SHARES if is_toy else _SHARES:
            for form in _TOLD_FORMS[::4] if is_toy else _TOLD_FORMS:
                yield f"{prefix}/{merge}/{form}/{share}", partial(rules.samples.budgeted, merge, form, share)
    if family.kind == "longest":
        n_trials = 4 if is_toy else _TRIALS
        yield f"{prefix}/search", partial(rules.search, n_trials)
        if family.seed == 0:
            steps = (1, 2) if is_toy else _CHAIN_STEPS
            for rate in _CHAIN_RATES:
                yield f"{prefix}/chain/{rate:g}", partial(rules.chain, rate, steps)


class LongFamily(TrainedFamily):
    """Experts of eight domains, whose loss on held-out text is taken four times in their training."""

    def __init__(self, place: Workplace, base: TrainedBase, kind: str, seed: int) -> None:
        super().__init__(place, base, kind, seed)
        self.kind, self.seed, self.base = kind, seed, base

    def observer(self, number: int, model: tiny_lm.LmModel) -> Callable[[int, float], None]:
        printed = super().observer(number, model)
        name, steps, recent = _DOMAINS[number], self.schedule.steps, list[float]()
        course: list[dict[str, float]] = []

        def observe(step: int, loss: float) -> None:
            printed(step, loss)
            recent.append(loss)
            if (step + 1) * _QUARTERS // steps > step * _QUARTERS // steps:
                heldout = mean(self.base.score_loaded(model, [name])[name])
                course.append({"step": step + 1, "training": mean(recent), "heldout": heldout})
                recent.clear()
                model.train()
                self._course(number).write_text(json.dumps(course))

        return observe

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        return {
            **described,
            "courses": [json.loads(self._course(number).read_text()) for number in range(self.base.n_experts)],
        }

    def importances(self) -> None:
        """Write the squared gradients of each expert beside it."""
        self.train()
        tokenizer = tiny_lm.load_tokenizer(self.base.folder)
        for number, expert in enumerate(self.experts):
            if not (file := importance_file(expert)).exists():
                from safetensors.torch import save_file

                model = tiny_lm.load_model(expert)
                tokens = tiny_lm.tokens_of(tokenizer, self.base.domains[1 + number].training)
                schedule = replace(self.schedule, seed=1000 * self.seed + 500 + number)
                squares = tiny_lm.squared_gradients(model, tokens, schedule, _FISHER_BATCHES)
                file.parent.mkdir(exist_ok=True)
                partial_file = file.with_suffix(".partial")
                save_file(
                    {name: tensor.bfloat16().cpu().contiguous() for name, tensor in squares.items()}, partial_file
                )
                partial_file.rename(file)

    def _course(self, number: int) -> Path:
        return self.place.folder / f"course-{number}.json"


class Rules:
    """The merges of one family by rules, what its experts score, a search, and a chain of checkpoints."""

    def __init__(self, family: LongFamily, base: TrainedBase, seed: int, scratch: Workplace | None = None) -> None:
        self.family, self._base = family, base
        self._place = scratch or family.place
        self.samples = Samples(family, base, seed, self._place)

    def expert(self, number: int) -> dict[str, Any]:
        self.family.train()
        return {"losses": self._base.score(self.family.experts[number])}

    def rule(self, name: str, n: int) -> dict[str, Any]:
        rule = RULES[name]
        self.family.train()
        if rule.by_importance:
            self.family.importances()
        recipe = rule.recipe(self._base.folder, self.family.experts[:n])
        return self.samples.merged(recipe, "--no-catalog", n_domains=n)

    def search(self, n_trials: int) -> dict[str, Any]:
        """Search four weights by half of the windows, with rungs and without at as many bytes; tell all windows."""
        self.family.train()
        experts = self.family.experts[: len(_FEW)]
        model_bytes = sum((expert / "model.safetensors").stat().st_size for expert in experts)
        rungs = self._searched(experts, n_trials, _RUNGS)
        plain = self._searched(experts, max(1, round(rungs["expert_bytes"] / model_bytes)), ())
        return {"rungs": rungs, "plain": plain}

    def _searched(self, experts: Sequence[Path], n_trials: int, rungs: Sequence[str]) -> dict[str, Any]:
        models = [{"model": str(expert), "parameters": {"weight": {"search": [0.0, 1.0]}}} for expert in experts]
        recipe = {
            "merge_method": "task_arithmetic", "base_model": str(self._base.folder), "models": models,
            "dtype": "float32", "out_dtype": "bfloat16",
        }  # fmt: skip
        place = self._place.within("search")

        def evaluate(folder: Path) -> float:
            return mean(loss for losses in self._base.score(folder, _FEW).values() for loss in losses[::2])

        report = mergepipe.search(recipe, place.folder / "best", evaluate, trials=n_trials, rungs=tuple(rungs))
        losses = self._base.score(place.folder / "best", _FEW)
        place.remove()
        trials = [{"bytes": trial.expert_bytes, "state": trial.state} for trial in report.trials]
        return {"losses": losses, "expert_bytes": report.expert_bytes, "trials": trials}

    def chain(self, rate: float, steps: Sequence[int]) -> dict[str, Any]:
        """Save checkpoints of a training at a constant rate; pack them in a chain; return the bytes of each."""
        place = self._place.within("chain")
        tokens = tiny_lm.tokens_of(tiny_lm.load_tokenizer(self._base.folder), self._base.domains[4].training)
        schedule = replace(self.family.schedule, steps=10 * max(steps), warmup_fraction=0.05, peak_rate=rate)
        training = tiny_lm.Training(tiny_lm.load_model(self._base.folder), tokens, schedule)
        saved = []
        for step in range(max(steps)):
            training.start(step)
            training.loss()
            if step + 1 in steps:
                saved.append(place.folder / f"step-{step + 1}")
                tiny_lm.save_model(copy.deepcopy(training.model), None, saved[-1])
        training.finish()
        packed = place.folder / "packed"
        place.ours(
            "pack", self._base.folder, *saved, "--chain", len(saved), "--out", packed, "--home", place.folder / "home"
        )
        sizes = [
            sum(file.stat().st_size for file in (packed / each.name).rglob("*") if file.is_file()) for each in saved
        ]
        befores = [self._base.folder, *saved]
        deltas = [asdict(delta_size(*pair)) for pair in zip(befores, saved, strict=False)]
        model_bytes = (saved[0] / "model.safetensors").stat().st_size
        place.remove()
        return {"steps": list(steps), "packed_bytes": sizes, "deltas": deltas, "model_bytes": model_bytes}


# --- the page ---


def _of(entry: Entry, n_domains: int, *, held: bool = False) -> Entry:
    """Return the losses of the first domains; of the windows that the search did not see, where they are `held`."""
    names = _DOMAINS[:n_domains]
    return {"losses": {name: entry["losses"][name][1::2] if held else entry["losses"][name] for name in names}}


def _mean_of(entry: Entry) -> float:
    return mean(window_losses_of(entry))


def _seeds(results: Results, kind: str) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in results.entries if key.startswith(f"{kind}/")})


def _merges(results: Results, kind: str, n: int, rule: str) -> dict[int, Entry]:
    """The merges of one rule by seed."""
    keys = {seed: f"{kind}/{seed}/rule/{n}/{rule}" for seed in _seeds(results, kind)}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def _best_experts(results: Results, kind: str, n: int) -> dict[int, Entry]:
    """Of each seed the one expert of the least loss over the first domains."""
    best: dict[int, Entry] = {}
    for seed in _seeds(results, kind):
        keys = (f"{kind}/{seed}/expert/{number}" for number in range(n))
        experts = [_of(results[key], n) for key in keys if key in results]
        best |= {seed: min(experts, key=_mean_of)} if experts else {}
    return best


def _difference(merges: Mapping[int, Entry], linear: Mapping[int, Entry]) -> tuple[float, float] | None:
    """Mean loss above the linear merge of the same seed, and half of its 95 % interval over windows; None without."""
    pairs = [(merges[seed], linear[seed]) for seed in merges if seed in linear]
    lost = paired_losses(pairs) if pairs else []
    return (mean(lost), half_interval(lost)) if lost else None


def _rows(results: Results, kind: str, n: int) -> dict[str, tuple[str, tuple[float, float] | None]]:
    """By rule: the mean loss, and the difference from linear."""
    linear = _merges(results, kind, n, "linear")
    merges = {name: _merges(results, kind, n, name) for name in RULES}
    merges |= {"expert": _best_experts(results, kind, n), "base": dict.fromkeys(linear, _of(results["base"], n))}
    return {
        name: (f"{mean(map(_mean_of, found.values())):.3f}", _difference(found, linear))
        for name, found in merges.items()
        if found
    }


def _rules_table(results: Results, n: int) -> Table:
    kinds = [kind for kind in KINDS if _merges(results, kind, n, "linear")]
    columns = [_rows(results, kind, n) for kind in kinds]
    labels = {"base": "*base*", "expert": "*best single expert*"}
    labels |= {name: rule.label if rule.is_default else f"{rule.label} †" for name, rule in RULES.items()}
    rows = []
    for name, label in labels.items():
        cells: list[str] = []
        for column in columns:
            loss, difference = column.get(name, ("", None))
            is_told = difference is not None and name != "linear"
            cells += [loss, f"{difference[0]:+.3f} ± {difference[1]:.3f}" if difference and is_told else ""]
        rows += [(label, *cells)] if any(cells) else []
    header = [part for kind in kinds for part in (f"{KINDS[kind]}: loss", "less that of linear")]
    return Table(("rule", *header), tuple(rows))


def _families_table(results: Results) -> Table:
    rows = []
    base = results["base"]["losses"]
    for kind, label in KINDS.items():
        families = [results[key] for seed in _seeds(results, kind) if (key := f"{kind}/{seed}/family") in results]
        for number, name in enumerate(_DOMAINS if families else ()):
            own = [mean(family["own_losses"][number][name]) for family in families]
            courses = [family["courses"][number] for family in families]
            course = [mean(course[quarter]["heldout"] for course in courses) for quarter in range(len(courses[0]))]
            norms = [family["deltas"][number]["relative_norm"] for family in families]
            rows.append(
                (
                    label, name, f"{mean(base[name]):.3f}", f"{mean(own):.3f}",
                    ", ".join(f"{loss:.3f}" for loss in course),
                    f"{mean(course[-1]['training'] for course in courses):.3f}", f"{mean(norms):.4f}",
                    percent(mean(family["deltas"][number]["changed_fraction"] for family in families)),
                )
            )  # fmt: skip
    header = (
        "kind", "domain", "base", "expert, held-out", "held-out after each quarter", "training, last quarter",
        "relative delta norm", "elements that differ",
    )  # fmt: skip
    return Table(header, tuple(rows))


def _budget_table(results: Results, kind: str) -> Table:
    """Gain kept by what is read, with paired differences of the orders."""
    base = _of(results["base"], len(_FEW))
    rows = []

    def of(merge: str, *forms: str) -> list[tuple[Entry, ...]]:
        keys = [f"{kind}/{seed}/{merge}" for seed in _seeds(results, kind)]
        names = [(*(f"{key}/{form}" for form in forms), f"{key}/full") for key in keys]
        return [tuple(results[name] for name in each) for each in names if all(name in results for name in each)]

    for share in _SHARES + _TOY_SHARES:
        for form in _TOLD_FORMS:
            kept = [kept_of(base, [(one, full) for one, full in of(merge, f"{form}/{share}")]) for merge in _BUDGETED]
            label = ("packed: " if FORMS[form].is_packed else "") + FORMS[form].label
            if any(value is not None for value in kept):
                rows.append((f"{share} %", label, *("" if value is None else str(value) for value in kept)))
        for first, second in (("sample-32", "norm"), ("by-norm-16", "norm"), ("norm", "random")):
            told = [
                difference_of(base, [(a, b, full) for a, b, full in of(merge, f"{first}/{share}", f"{second}/{share}")])
                for merge in _BUDGETED
            ]
            label = f"*{FORMS[first].label}* less *{FORMS[second].label}*"
            rows += [(f"{share} %", label, *told)] if any(told) else []
    return Table(("bytes", "what is read", *(MERGES[merge].label for merge in _BUDGETED)), tuple(rows))


def _search_table(results: Results) -> Table:
    rows = []
    for seed in _seeds(results, "longest"):
        if (key := f"longest/{seed}/search") in results:
            found = {name: results[key][name] for name in ("rungs", "plain")}
            held = {name: _of(entry, len(_FEW), held=True) for name, entry in found.items()}
            lost = paired_losses([(held["rungs"], held["plain"])])
            counts = (str(len(entry["trials"])) for entry in found.values())
            read = (f"{entry['expert_bytes'] / 1e9:.1f}" for entry in found.values())
            losses = (f"{_mean_of(entry):.4f}" for entry in held.values())
            rows.append((str(seed), *counts, *read, *losses, f"{mean(lost):+.4f} ± {half_interval(lost):.4f}"))
    header = (
        "seed", "trials with rungs", "without", "GB read with rungs", "without", "loss with rungs", "without",
        "difference",
    )  # fmt: skip
    return Table(header, tuple(rows))


def _chain_table(results: Results) -> Table:
    rows = []
    for rate in _CHAIN_RATES:
        if (key := f"longest/0/chain/{rate:g}") in results:
            entry = results[key]
            steps = [0, *entry["steps"]]
            for number, packed in enumerate(entry["packed_bytes"]):
                delta = entry["deltas"][number]
                rows.append(
                    (
                        f"{rate:g}", f"{steps[number]} to {steps[number + 1]}", f"{packed / 1e6:.1f}",
                        percent(packed / entry["model_bytes"], 1), percent(delta["changed_fraction"], 1),
                        f"{delta['relative_norm']:.5f}",
                    )
                )  # fmt: skip
    return Table(("rate", "steps", "MB", "of the model", "elements that differ", "relative delta norm"), tuple(rows))


def _page(results: Results) -> Page:
    body: list[str | Table] = [_about(results), "## The fine-tunes", _families_table(results), _packed_text(results)]
    for n in (len(_FEW), len(_DOMAINS)):
        table = _rules_table(results, n)
        body += [f"## Rules, {n} experts", table] if table.rows else []
    body.append(_how_to_read())
    for kind, label in KINDS.items():
        table = _budget_table(results, kind)
        body += [f"## Budgets, 4 experts, {label}", table] if table.rows else []
    body.append(
        "*Gain kept*, in %, as in [samples of blocks](sampling.md); differences are paired, in points of the gain."
        " Budgets are shares of the raw bytes, of packed experts too."
    )
    for title, text, table in (
        ("## A search with rungs", _SEARCH_TEXT, _search_table(results)),
        ("## A chain of checkpoints", _CHAIN_TEXT, _chain_table(results)),
    ):
        body += [title, text, table] if table.rows else []
    return Page("Rules on longer fine-tunes", _meaning(results), tuple(body))


_SEARCH_TEXT = (
    f"Four weights of task arithmetic between 0 and 1, searched by every second window; the loss is that of the others."
    f" With rungs: {_TRIALS} trials under budgets of {', '.join(_RUNGS)}; without: as many full merges as that reads."
)
_CHAIN_TEXT = (
    "Full fine-tuning at a constant rate after a warm-up; checkpoints in bfloat16, each packed on the one before"
    " (`mergepipe pack --chain`), the first on the base. Weights alone."
)


def _packed_text(results: Results) -> str:
    told = []
    for kind, label in KINDS.items():
        families = (f"{kind}/{seed}/family" for seed in _seeds(results, kind))
        shares = [results[key]["packed_share"] for key in families if key in results]
        told += [f"{percent(min(shares), 1)} to {percent(max(shares), 1)} ({label})"] if shares else []
    return f"Packed, the experts take {'; '.join(told)} of their raw bytes, tokenizers included." if told else ""


def _meaning(results: Results) -> str:
    told = []
    for kind, label in KINDS.items():
        rows = {name: difference for name, (_, difference) in _rows(results, kind, len(_FEW)).items() if difference}
        ranked = sorted((rows[name][0], name) for name in rows if name in RULES and RULES[name].is_default)
        if len(ranked) > 1:
            worse = [RULES[name].label for lost, name in ranked if lost - rows[name][1] > 0]
            best = f"`{RULES[ranked[0][1]].label}` has the least held-out loss"
            told.append(f"{best} ({label}), {len(worse)} of {len(ranked) - 1} others are worse than `linear`")
    return f"**At their defaults, of four experts, {'; '.join(told)}.**" if told else "**No merge is measured yet.**"


def _about(results: Results) -> str:
    schedule = results["base"]["schedules"]["longest"]
    rates = " and ".join(f"{results['base']['schedules'][kind]['peak_rate']:g} ({KINDS[kind]})" for kind in KINDS)
    gpu, n_windows = results["base"]["gpu"], len(results["base"]["losses"][_DOMAINS[0]])
    seeds = ", ".join(f"{len(_seeds(results, kind))} ({label})" for kind, label in KINDS.items())
    return (
        "The base is that of [fine-tunes of a public language model](trained.md), SmolLM2-135M-Instruct, with eight"
        f" experts on one domain each, which are text and source code of Python's own: {schedule['steps']} steps of"
        f" {schedule['batch']} windows of {schedule['window_tokens']} tokens, matrix products in bfloat16, masters in"
        f" float32, AdamW, peak rates {rates}; seeds: {seeds}{f'; trained on one {gpu}' if gpu else ''}."
        f" Losses are those of {n_windows} held-out windows of each domain, in nats a token. One small model, eight"
        " alike domains and one length of training: of larger models, of instruction tuning and of experts trained by"
        " reinforcement learning nothing follows from here."
    )


def _how_to_read() -> str:
    return (
        "*Loss*: the mean over all windows of the domains of the experts that are merged. *Less that of linear*: the"
        " paired difference by window, means over seeds, ± half of its 95 % interval over windows; below zero is"
        " better than the plain average. †: a setting other than the default; numbers behind a rule are weights, then"
        " density. Weights of 0.3 and density 0.2 are the papers' usual values where mergekit has no default. `fisher`"
        f" and `sar` take the mean squared gradients of {_FISHER_BATCHES} batches of the training text. Every merge is"
        " full; random rules are one draw a seed. `nuslerp`, `slerp`, `nearswap` and `arcee_fusion` take no four"
        " experts."
    )


PART = Part(
    "rules", "every merge rule, budgets, a search and a chain on longer fine-tunes of eight domains", _needs, _measure,
    _page, tells_beginnings=True,
)  # fmt: skip
