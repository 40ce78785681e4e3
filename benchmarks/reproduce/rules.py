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
    Kept,
    TrainedBase,
    TrainedFamily,
    difference_of,
    half_interval,
    kept_of,
    paired_losses,
    range_told,
    window_losses_of,
)
from benchmarks.reproduce.workplace import Workplace

KINDS = {"longest": "full", "longest-lora": "LoRA"}
_FEW = ("prose", "headers", "legal", "internet")
_DOMAINS = (*_FEW, "tables", "tests", "windows", "concurrency")
_BUDGETED, _SHARES, _TOY_SHARES = ("ties", "linear", "dare_ties"), (10, 25), (50,)
_RAW_FORMS, _PACKED_FORMS = ("sample-32", "by-norm-16", "norm", "random"), ("packed-sample", "packed-norm")
_NOTABLE = 0.01  # nats
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
    "dare_linear": _Rule("dare_linear, 0.3, 0.2", "dare_linear", _SPARSE),
    "dare_ties": _Rule("dare_ties, 0.3, 0.2", "dare_ties", _SPARSE),
    "breadcrumbs": _Rule("breadcrumbs, 0.3, 0.9", "breadcrumbs", {"weight": 0.3, "density": 0.9}),
    "breadcrumbs_ties": _Rule("breadcrumbs_ties, 0.3, 0.9", "breadcrumbs_ties", {"weight": 0.3, "density": 0.9}),
    "della": _Rule("della, density 0.5", "della", {"weight": 1.0, "density": 0.5}),
    "della_linear": _Rule("della_linear, 0.3, 0.5", "della_linear", {"weight": 0.3, "density": 0.5}),
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
    "lines": _Rule("task_arithmetic, 0.5, lines 0.3, 0.7", "task_arithmetic", {"weight": 0.5},
                   {"lambda": {"lines": [0.3, 0.7]}}),
    "task_05": _Rule("task_arithmetic, 0.5", "task_arithmetic", {"weight": 0.5}, is_default=False),
    "sum": _Rule("task_arithmetic, 1", "task_arithmetic", _ONE, is_default=False),
    "ties_05": _Rule("ties, density 0.5", "ties", {"weight": 1.0, "density": 0.5}, is_default=False),
    "ties_1": _Rule("ties, density 1", "ties", {"weight": 1.0, "density": 1.0}, is_default=False),
    "ties_up": _Rule("ties, density 0.2, lambda 1.5", "ties", {"weight": 1.0, "density": DENSITY}, {"lambda": 1.5},
                     is_default=False),
    "dare_05": _Rule("dare_ties, 0.3, 0.5", "dare_ties", {"weight": 0.3, "density": 0.5}, is_default=False),
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
            for form in ("sample-32", "packed-sample") if is_toy else (*_RAW_FORMS, *_PACKED_FORMS):
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
    """The seeds whose families were measured whole."""
    return sorted(
        int(key.split("/")[1]) for key in results.entries if key.startswith(f"{kind}/") and key.endswith("/family")
    )


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


def _rows(results: Results, kind: str, n: int) -> dict[str, tuple[float, float]]:
    """By rule the difference from linear; of linear itself nothing."""
    linear = _merges(results, kind, n, "linear")
    merges = {"base": dict.fromkeys(linear, _of(results["base"], n)), "expert": _best_experts(results, kind, n)}
    merges |= {name: _merges(results, kind, n, name) for name in RULES if name != "linear"}
    found = {name: _difference(of_rule, linear) for name, of_rule in merges.items()}
    return {name: difference for name, difference in found.items() if difference}


def _rules_table(results: Results, n: int) -> Table:
    columns = {kind: differences for kind in KINDS if (differences := _rows(results, kind, n))}
    labels = {"base": "*base*", "expert": "*best single expert*"}
    labels |= {name: rule.label if rule.is_default else f"{rule.label} †" for name, rule in RULES.items()}
    rows = []
    for name, label in labels.items():
        found = [column.get(name) for column in columns.values()]
        cells = ["" if each is None else f"{each[0]:+.3f} ± {each[1]:.3f}" for each in found]
        if any(cells):
            rows.append((label, *cells))
    return Table(("loss less that of linear", *(KINDS[kind] for kind in columns)), tuple(rows))


def _families(results: Results, kind: str) -> list[Entry]:
    return [results[f"{kind}/{seed}/family"] for seed in _seeds(results, kind)]


def _families_table(results: Results) -> Table:
    """One row for each kind: the least and the most over its experts and seeds."""
    rows = []
    base = results["base"]["losses"]
    for kind, families in ((kind, _families(results, kind)) for kind in KINDS):
        if families:
            deltas = [delta for family in families for delta in family["deltas"]]
            own = [pair for family in families for losses in family["own_losses"] for pair in losses.items()]
            gained = [mean(base[name]) - mean(losses) for name, losses in own]
            norms = [delta["relative_norm"] for delta in deltas]
            rows.append(
                (
                    KINDS[kind], str(len(families)), f"{min(norms):.4f} to {max(norms):.4f}",
                    range_told([delta["changed_fraction"] for delta in deltas]),
                    f"{min(gained):.2f} to {max(gained):.2f}",
                    range_told([family["packed_share"] for family in families], 1),
                )
            )  # fmt: skip
    header = ("kind", "seeds", "relative delta norm", "elements that differ", "nats each gains on its domain", "packed")
    return Table(header, tuple(rows))


def _overfitting(results: Results) -> list[str]:
    """Tell the experts whose held-out loss rises by the end."""
    told = []
    for kind, label in KINDS.items():
        for number, name in enumerate(_DOMAINS):
            courses = [family["courses"][number] for family in _families(results, kind)]
            quarters = [mean(quarter["heldout"] for quarter in each) for each in zip(*courses, strict=True)]
            if quarters and quarters[-1] > min(quarters) + _NOTABLE:
                training = mean(course[-1]["training"] for course in courses)
                told.append(
                    f"{name} ({label}): {', '.join(f'{loss:.2f}' for loss in quarters)} after the quarters of the"
                    f" training, on its own text {training:.2f}"
                )
    return [f"Overfit, by held-out loss: {'; '.join(told)}."] if told else []


def _beside(results: Results, kind: str, merge: str, *forms: str) -> list[tuple[Entry, ...]]:
    """Of each seed the merges of some forms, then the full one; of four experts."""
    keys = [f"{kind}/{seed}/{merge}" for seed in _seeds(results, kind)]
    names = [(*(f"{key}/{form}" for form in forms), f"{key}/full") for key in keys]
    return [tuple(results[name] for name in each) for each in names if all(name in results for name in each)]


def _kept(results: Results, kind: str, form: str, share: int) -> list[Kept | None]:
    """What each budgeted merge keeps."""
    base = _of(results["base"], len(_FEW))
    found = (_beside(results, kind, merge, f"{form}/{share}") for merge in _BUDGETED)
    return [kept_of(base, [(one, full) for one, full in pairs]) for pairs in found]


def _budget_table(results: Results) -> Table:
    """Gain kept by what is read, with the paired difference of two orders."""
    base = _of(results["base"], len(_FEW))
    kinds = [kind for kind in KINDS if _seeds(results, kind)]
    rows = []
    for share in _SHARES + _TOY_SHARES:
        for form in _RAW_FORMS if share == _SHARES[-1] else (*_RAW_FORMS, *_PACKED_FORMS):
            kept = [value for kind in kinds for value in _kept(results, kind, form, share)]
            label = ("packed: " if FORMS[form].is_packed else "") + FORMS[form].label
            if any(value is not None for value in kept):
                rows.append((f"{share} %", label, *("" if value is None else str(value) for value in kept)))
        told = []
        for kind, merge in ((kind, merge) for kind in kinds for merge in _BUDGETED):
            triples = _beside(results, kind, merge, f"norm/{share}", f"random/{share}")
            told.append(difference_of(base, [(norm, random, full) for norm, random, full in triples]))
        rows += [(f"{share} %", "norm - random", *told)] if any(told) else []
    columns = (f"{MERGES[merge].label}, {KINDS[kind]}" for kind in kinds for merge in _BUDGETED)
    return Table(("bytes", "what is read", *columns), tuple(rows))


def _search_table(results: Results) -> Table:
    rows = []
    for seed in _seeds(results, "longest"):
        if (key := f"longest/{seed}/search") in results:
            linear = _of(results[f"longest/{seed}/rule/{len(_FEW)}/linear"], len(_FEW), held=True)
            for name, label in (("rungs", "with rungs"), ("plain", "without")):
                entry = results[key][name]
                found = _of(entry, len(_FEW), held=True)
                lost = paired_losses([(found, linear)])
                complete = sum(trial["state"] == "complete" for trial in entry["trials"])
                rows.append(
                    (
                        str(seed), label, str(len(entry["trials"])), str(complete),
                        f"{entry['expert_bytes'] / 1e9:.1f}", f"{_mean_of(found):.4f}",
                        f"{mean(lost):+.3f} ± {half_interval(lost):.3f}",
                    )
                )  # fmt: skip
    return Table(("seed", "search", "trials", "merged in full", "GB read", "loss", "less that of linear"), tuple(rows))


def _chain_table(results: Results) -> Table:
    """By rate the packed bytes of a checkpoint, by the steps since the one before: means."""
    entries = {rate: results[key] for rate in _CHAIN_RATES if (key := f"longest/0/chain/{rate:g}") in results}
    rows, header = [], []
    for rate, entry in entries.items():
        apart: dict[int, list[float]] = {}
        for before, step, packed in zip([0, *entry["steps"]], entry["steps"], entry["packed_bytes"], strict=False):
            apart.setdefault(step - before, []).append(packed)
        header = [f"{n} steps" if n > 1 else "1 step" for n in sorted(apart)]
        means = [mean(apart[n]) for n in sorted(apart)]
        told = (f"{each / 1e6:.1f} MB, {percent(each / entry['model_bytes'], 1)}" for each in means)
        rows.append((f"{rate:g}", *told))
    return Table(("rate", *header), tuple(rows))


def _page(results: Results) -> Page:
    body: list[str | Table] = [_about(results), _families_table(results), *_overfitting(results)]
    for title, text, table in (
        ("## Rules, 4 experts", "", _rules_table(results, len(_FEW))),
        ("## Rules, 8 experts", _HOW_TO_READ, _rules_table(results, len(_DOMAINS))),
        ("## Budgets, 4 experts", _BUDGET_TEXT, _budget_table(results)),
        ("## A search with rungs", _SEARCH_TEXT, _search_table(results)),
        ("## A chain of checkpoints", _CHAIN_TEXT, _chain_table(results)),
    ):
        body += [title, table, *([text] if text else [])] if table.rows else []
    return Page("Rules on longer fine-tunes", _meaning(results), tuple(body))


_HOW_TO_READ = (
    "Held-out loss in nats a token, on the domains of the merged experts: paired differences by window from the plain"
    " average, means over seeds, ± half of the 95 % interval over windows; below zero is better. †: not the default."
    " Numbers are weights, then density; 0.3 and 0.2 are the papers' usual ones. `fisher` and `sar` take mean squared"
    f" gradients of {_FISHER_BATCHES} batches of the training text."
)
_BUDGET_TEXT = (
    "*Gain kept*, in %, and merges are those of [samples](sampling.md); budgets are shares of the raw bytes. At 25 %"
    " packs are read nearly whole. Samples were scaled by one over their share then; since, they are scaled less where"
    " weights change much ([decision 032](../decisions/032-a-sample-is-the-default.md) has what they keep)."
)
_SEARCH_TEXT = (
    "Four weights of task arithmetic between 0 and 1, full fine-tunes, searched by every second window; the loss is of"
    f" the others. With rungs of {', '.join(_RUNGS)}, which all count; without, as many full merges as they read. Both"
    " propose the same first trials."
)
_CHAIN_TEXT = (
    "Full fine-tuning at a nearly constant rate; each checkpoint is packed on the one before (`pack --chain`),"
    " the first, 100 steps on, on the base."
)


def _meaning(results: Results) -> str:
    told, kept = [], []
    for kind, label in KINDS.items():
        rows = _rows(results, kind, len(_FEW))
        defaults = [name for name in rows if name in RULES and RULES[name].is_default]
        if defaults:
            best = min(defaults, key=lambda name: rows[name][0])
            told.append(f"{-rows[best][0]:.3f} of its {rows['base'][0]:.2f} nats (`{RULES[best].method}`, {label})")
        shares = [value.share for form in _RAW_FORMS for value in _kept(results, kind, form, _SHARES[0]) if value]
        packed = [value.share for form in _PACKED_FORMS for value in _kept(results, kind, form, _SHARES[0]) if value]
        kept += [f"{range_told(shares)}, of packs {range_told(packed)} ({label})"] if shares and packed else []
    if not told:
        return "**No merge is measured yet.**"
    worse = ", ".join(f"`{method}`" for method in _always_worse(results))
    return (
        f"**Of four experts no rule at its default beats the plain average by more than {'; '.join(told)}. Worse at"
        f" every setting tried: {worse or 'none'}. At {_SHARES[0]} % of the bytes merges keep of the full merge's gain,"
        f" of raw experts, {'; '.join(kept)}: below zero is worse than the base. Long fine-tunes need packs.**"
    )


def _always_worse(results: Results) -> list[str]:
    """Methods whose every setting is worse than linear by more than its interval and a hundredth, in all kinds."""
    lost: dict[str, list[float]] = {}
    for kind in KINDS:
        for name, difference in _rows(results, kind, len(_FEW)).items():
            if name in RULES:
                lost.setdefault(RULES[name].method, []).append(difference[0] - max(difference[1], _NOTABLE))
    return [method for method, values in lost.items() if min(values) > 0]


def _about(results: Results) -> str:
    schedule = results["base"]["schedules"]["longest"]
    full, lora = (results["base"]["schedules"][kind]["peak_rate"] for kind in KINDS)
    gpu, n_windows = results["base"]["gpu"], len(results["base"]["losses"][_DOMAINS[0]])
    return (
        "The base is that of [fine-tunes of a public language model](trained.md), with eight experts on one domain"
        f" each, text and source code that come with Python: {schedule['steps']} steps of"
        f" {schedule['batch']} windows of {schedule['window_tokens']} tokens, matrix products in bfloat16, masters in"
        f" float32, AdamW, peak rates {full:g} in full and {lora:g} by LoRA of rank 16{f', on a {gpu}' if gpu else ''}"
        f"; {n_windows} held-out windows of each domain. Of larger models, other trainings and reinforcement learning"
        " nothing follows from here."
    )


PART = Part(
    "rules", "every merge rule, budgets, a search and a chain on longer fine-tunes of eight domains", _needs, _measure,
    _page, tells_beginnings=True,
)  # fmt: skip
