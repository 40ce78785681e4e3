"""Fine-tunes of a public language model on domains, merged by rules, in full and under budgets, and scored.

A family of experts is trained, and what comes out of its merges is scored on held-out windows of the domains. The parts
`trained` and `rules` are two studies of this.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

import mergepipe
from benchmarks import tiny_lm
from benchmarks.deltas import delta_size
from benchmarks.local_text import GENERAL, Domain, gather
from benchmarks.recipes import DENSITY, recipe_text
from benchmarks.reproduce.parts import Needs
from benchmarks.reproduce.results import Entry, Results, ResultsError
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.smollm import make_base
from benchmarks.reproduce.workplace import Workplace, folder_bytes
from benchmarks.tiny_lm import LmShape, Schedule, StepPrinter, Windows, cut_windows

BLOCK_ELEMENTS = 16 * 1024
TOY_SHARE = 50  # of the bytes, in %, where a study only shows that it runs
_QUARTERS = 4  # of a training, after which the held-out loss of an expert is taken
FISHER_BATCHES = 16
_RUNGS, _TRIALS, _TOY_TRIALS = ("10%", "100%"), 40, 4
_CHAIN_STEPS, _TOY_CHAIN_STEPS = (100, 101, 102, 103, 104, 110, 120, 130, 140), (1, 2)  # that end in a checkpoint
CHAIN_RATES = (2e-5, 1e-6)
_TOY_SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
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

    @property
    def is_drawn(self) -> bool:
        """Whether what is read depends on a seed: then a merge is one draw of many."""
        return self.select in ("sample", "random")


DRAWS = 5
_SEEDS_APART = 1000  # of two draws
DEFAULT_FORM = "sample-32"
FORMS = {
    DEFAULT_FORM: Form("sample, 32 Ki", "sample", 2 * BLOCK_ELEMENTS),
    "norm": Form("blocks by norm", "norm", is_analyzed=True),
    "random": Form("blocks at random", "random", is_analyzed=True),
    "packed-sample": Form("packed: sample", "sample", is_packed=True),
    "packed-norm": Form("packed: levels by norm", "norm", is_packed=True),
}
RAW_FORMS, PACKED_FORMS = (DEFAULT_FORM, "norm", "random"), ("packed-sample", "packed-norm")
MERGES = {"ties": "TIES", "linear": "linear", "dare_ties": "DARE-TIES"}  # rules measured in full and under budgets


FEW = ("prose", "headers", "legal", "internet")  # domains of the experts that are merged under budgets
_TOY_RULES = ("linear", "fisher")


@dataclass(frozen=True, slots=True)
class Study:
    """The trainings of a part by kind, and what is measured of their experts.

    `MERGES` are measured in full and, by `FORMS`, at `shares` of the bytes, `rules` by how many experts in full.
    """

    name: str
    kinds: Mapping[str, str]
    domains: tuple[str, ...]
    needs: Callable[[int], Needs]  # of so many families
    shares: tuple[int, ...]
    rules: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # with them experts, a search and a chain
    is_toy: bool = False

    @property
    def n_windows(self) -> int:
        """Held-out windows of each domain."""
        return 4 if self.is_toy else 16

    @property
    def schedules(self) -> dict[str, Schedule]:
        if not self.is_toy:
            return {kind: _TRAININGS[kind] for kind in self.kinds}
        return {kind: replace(_TOY, lora_rank=min(2, _TRAININGS[kind].lora_rank)) for kind in self.kinds}

    def toy(self) -> Study:
        """Return what shows that it runs: one merge, two rules and one share."""
        rules = {n: tuple(name for name in names if name in _TOY_RULES) for n, names in self.rules.items()}
        return replace(self, shares=(TOY_SHARE,), rules=rules, is_toy=True)


def study_needs(study: Study, size: Size) -> Needs:
    return Needs(0, 1) if size.is_toy else study.needs(len(study.kinds) * size.repeats)


def measure_study(study: Study, place: Workplace, size: Size, results: Results) -> None:
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
    for share, form, name in product(study.shares, FORMS, merges):
        for draw, key in enumerate(draw_keys(name, form, share)[: 1 if study.is_toy else None]):
            yield key, partial(family.merged, name, len(FEW), form, share, draw)
    for number in range(len(study.domains)):
        yield f"expert/{number}", partial(family.expert, number)
    if not study.rules:
        return
    if family.kind == "longest":
        yield "search", partial(family.search, _TOY_TRIALS if study.is_toy else _TRIALS)
        for rate in CHAIN_RATES if family.seed == 0 else ():
            yield f"chain/{rate:g}", partial(family.chain, rate, _TOY_CHAIN_STEPS if study.is_toy else _CHAIN_STEPS)


def draw_keys(merge: str, form: str, share: int) -> list[str]:
    """Return the keys of a merge's draws under a budget, the first without a number; the only key of other forms."""
    first = f"{merge}/{form}/{share}"
    return [first, *(f"{first}/draw-{draw}" for draw in range(1, DRAWS if FORMS[form].is_drawn else 1))]


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
            tokenizer = tiny_lm.make_tokenizer((domain.training for domain in self.domains), _TOY_SHAPE.vocab)
            model = tiny_lm.new_model(_TOY_SHAPE, 0)
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
        stored = folder_bytes(self.packed)
        deltas = [asdict(delta_size(self._base.folder, expert)) for expert in self.experts]
        described = {"own_losses": own, "deltas": deltas, "packed_share": stored / self._raw_bytes(self.experts)}
        if not self._base.study.rules:
            return described
        courses = [json.loads(self._course(number).read_text()) for number in range(len(self.experts))]
        return {**described, "courses": courses}

    def expert(self, number: int) -> dict[str, Any]:
        self.train()
        return {"losses": self._base.score(self.experts[number])}

    def merged(self, name: str, n: int = len(FEW), form: str = "", share: int = 0, draw: int = 0) -> dict[str, Any]:
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
        seed = self.seed + _SEEDS_APART * draw
        report, _ = self.place.ours("merge", file, out, *options, "--seed", seed, "--threads", 1)
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
                squares = tiny_lm.squared_gradients(model, self._base.tokens(number), schedule, FISHER_BATCHES)
                file.parent.mkdir(exist_ok=True)
                unfinished = file.with_suffix(".partial")
                save_file({name: tensor.bfloat16().cpu().contiguous() for name, tensor in squares.items()}, unfinished)
                unfinished.rename(file)

    def search(self, n_trials: int) -> dict[str, Any]:
        """Search four weights by half of the windows, with rungs and without at as many bytes; tell all windows."""
        self.train()
        experts = self.experts[: len(FEW)]
        rungs = self._searched(experts, n_trials, _RUNGS)
        plain = self._searched(experts, max(1, round(rungs["expert_bytes"] / self._raw_bytes(experts))), ())
        return {"rungs": rungs, "plain": plain}

    def _searched(self, experts: Sequence[Path], n_trials: int, rungs: Sequence[str]) -> dict[str, Any]:
        weights = Rule("", "task_arithmetic", {"weight": {"search": [0.0, 1.0]}})
        recipe = yaml.safe_load(weights.recipe(self._base.folder, experts))
        place = self.place.within("search")

        def evaluate(folder: Path) -> float:
            return mean(loss for losses in self._base.score(folder, FEW).values() for loss in losses[::2])

        report = mergepipe.search(recipe, place.folder / "best", evaluate, trials=n_trials, rungs=tuple(rungs))
        losses = self._base.score(place.folder / "best", FEW)
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
