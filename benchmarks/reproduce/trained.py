"""Part `trained`: experts fine-tuned on four domains from a base of ours, in full and by LoRA; what budgets cost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.deltas import delta_size, merge_errors
from benchmarks.fidelity_points import OPERATORS
from benchmarks.heldout import heldout_losses, read_heldout
from benchmarks.local_text import GENERAL
from benchmarks.merge import BenchmarkError
from benchmarks.reproduce.pages import Figure, Page, Series, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.real_family import DEFAULT_ROOT, PRETRAINING, SHAPE, STATE_NAME, read_domains
from benchmarks.reproduce.results import Results, ResultsError
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from benchmarks.tiny_lm import LmShape, Schedule, state_steps
from benchmarks.trained_family import TrainedRequest, train_family

_SEEDS = (0, 1, 2)
_SHARES, _TOLD_SHARE = (5, 10, 25, 50), (10,)
_FORMS = {"norm": "blocks by norm", "random": "blocks at random", "packed": "packed"}
_KINDS = {"full": "full fine-tuning", "lora": "LoRA of rank 16"}
_MERGED = ("linear", "ties", "dare_ties")
_BLOCK_ELEMENTS = 16 * 1024
_T_95 = 4.303  # Student's t for three seeds
_TOY_SHAPE = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
_ROOT_VARIABLE = "MERGEPIPE_REAL_FAMILY"


@dataclass(frozen=True, slots=True)
class _Training:
    """How the family is trained from a base that has seen `base_steps` steps at its peak rate."""

    shape: LmShape
    base: Schedule
    experts: Mapping[str, Schedule]
    windows: int

    @property
    def base_tokens(self) -> int:
        return self.base.steps * self.base.batch * self.base.window_tokens

    def request(self, kind: str, seed: int) -> TrainedRequest:
        return TrainedRequest(4, 0, self.shape, self.base, replace(self.experts[kind], seed=seed), threads=1)


def _training(size: Size, root: Path) -> _Training:
    if size.is_toy:
        base = replace(PRETRAINING, steps=12, decay_steps=4, batch=4, window_tokens=32, bf16=False)
        quick = Schedule(steps=3, peak_rate=1e-3, batch=2, window_tokens=32)
        return _Training(_TOY_SHAPE, base, {"full": quick, "lora": replace(quick, lora_rank=2)}, 4)
    state = root / STATE_NAME
    if not state.exists():
        command = f"python -m benchmarks.reproduce.real_family --root {root}"
        raise BenchmarkError(f"{state}: the base is not pre-trained; let `{command}` run for hours, then stop it")
    steps = state_steps(state)
    decay = max(1, steps // 5)
    base = replace(PRETRAINING, steps=steps + decay, decay_steps=decay)
    usual = Schedule(steps=200, peak_rate=2e-5, batch=4, window_tokens=256, weight_decay=0.0, bf16=True)
    return _Training(SHAPE, base, {"full": usual, "lora": replace(usual, peak_rate=2e-4, lora_rank=16)}, 24)


def _needs(size: Size) -> Needs:
    n_models = 4 * len(_SEEDS) * len(_KINDS)
    n_merges = len(_KINDS) * len(_SEEDS) * len(_MERGED) * (1 + len(_FORMS) * len(_SHARES))
    is_toy = size.is_toy
    return Needs(0 if is_toy else 4_500_000_000, n_merges * 0.1 if is_toy else n_models * 12 + n_merges * 0.4)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    root = Path(os.environ.get(_ROOT_VARIABLE, DEFAULT_ROOT))
    training = _training(size, root)
    _check_same_base(results, training)
    for kind in _KINDS:
        for seed in _SEEDS[:1] if size.is_toy else _SEEDS:
            family = _Family(place, root, training, kind, seed)
            results.measure(f"{kind}/{seed}/family", family.train)
            for operator in _MERGED[:1] if size.is_toy else _MERGED:
                results.measure(f"{kind}/{seed}/{operator}/full", partial(family.full, operator))
                for form in _FORMS:
                    for share in _TOLD_SHARE if size.is_toy else _SHARES:
                        key = f"{kind}/{seed}/{operator}/{form}/{share}"
                        results.measure(key, partial(family.budgeted, operator, form, share))


def _check_same_base(results: Results, training: _Training) -> None:
    """Refuse to add to results of a base that was trained for another time."""
    stored = results.entries.get(f"full/{_SEEDS[0]}/family")
    if stored is not None and stored["base_tokens"] != training.base_tokens:
        message = f"has results of a base of {stored['base_tokens']} tokens, this one sees {training.base_tokens}"
        raise ResultsError(f"{results.path}: {message}; --replace measures all anew")


class _Family:
    """Four experts of one kind and seed; trained, packed and analyzed when first needed."""

    def __init__(self, place: Workplace, root: Path, training: _Training, kind: str, seed: int) -> None:
        self._place, self._root, self._training, self._kind, self._seed = place, root, training, kind, seed
        self._folder = place.folder / f"trained-{kind}-{seed}"
        self._first = place.folder / f"trained-full-{_SEEDS[0]}"
        self._base = self._folder / "base"
        self._experts = [self._folder / f"expert-{number}" for number in range(1, 5)]

    def train(self) -> dict[str, Any]:
        self._prepare()
        heldout = read_heldout(self._folder)
        sizes = [delta_size(self._base, expert) for expert in self._experts]
        stored = sum(file.stat().st_size for file in (self._folder / "packed").rglob("*") if file.is_file())
        raw = sum((expert / "model.safetensors").stat().st_size for expert in self._experts)
        return {
            "base_losses": heldout_losses(self._base, heldout),
            "own_losses": [heldout_losses(expert, heldout) for expert in self._experts],
            "deltas": [asdict(size) for size in sizes], "packed_share": stored / raw,
            "base_tokens": self._training.base_tokens,
        }  # fmt: skip

    def full(self, operator: str) -> dict[str, Any]:
        self._prepare()
        return {"losses": heldout_losses(self._full(operator), read_heldout(self._folder))}

    def budgeted(self, operator: str, form: str, share: int) -> dict[str, Any]:
        self._prepare()
        full, out = self._full(operator), self._place.folder / "out"
        experts = [self._folder / "packed" / e.name for e in self._experts] if form == "packed" else self._experts
        raw = sum((expert / "model.safetensors").stat().st_size for expert in self._experts)
        options = ("--budget", f"{share * raw // 100}B", "--select", "random" if form == "random" else "norm")
        blocks = () if form == "packed" else ("--block-elements", _BLOCK_ELEMENTS)
        shutil.rmtree(out, ignore_errors=True)
        report, _ = self._place.ours(
            "merge", self._recipe(operator, experts), out, *options, *blocks, "--seed", self._seed,
            "--home", self._folder / "home", "--no-reuse",
        )  # fmt: skip
        losses = heldout_losses(out, read_heldout(self._folder))
        errors = asdict(merge_errors(out, full, self._base))
        shutil.rmtree(out)
        return {"losses": losses, "expert_bytes": report["expert_bytes"], **errors}

    def _prepare(self) -> None:
        if (self._folder / "packed" / self._experts[-1].name).exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._root / STATE_NAME
        is_first = self._folder == self._first
        if is_first and state.exists() and not (self._folder / STATE_NAME).exists():
            shutil.copy(state, self._folder / STATE_NAME)
        train_family(
            self._folder,
            self._training.request(self._kind, self._seed),
            read_domains(self._root),
            base_of=None if is_first else self._first,
            heldout_windows=self._training.windows,
        )
        models, home = [self._base, *self._experts], self._folder / "home"
        self._place.ours("analyze", *models, "--home", home, "--block-elements", _BLOCK_ELEMENTS)
        self._place.ours("pack", *models, "--out", self._folder / "packed", "--home", self._folder / "home-pack")

    def _full(self, operator: str) -> Path:
        full = self._folder / f"merged-{operator}"
        if not full.exists():
            recipe = self._recipe(operator, self._experts)
            self._place.ours("merge", recipe, full, "--no-catalog", "--no-reuse", "--seed", self._seed)
        return full

    def _recipe(self, operator: str, experts: list[Path]) -> Path:
        path = self._place.folder / "trained.yml"
        path.write_text(OPERATORS[operator].recipe(self._base, experts, "bfloat16"))
        return path


def _gains(results: Results, kind: str, operator: str, form: str, share: int) -> list[float]:
    """Return, by seed, how much of the full merge's gain in mean loss over the experts' domains is kept."""
    kept = []
    for seed in _seeds(results):
        base = _mean_loss(results[f"{kind}/{seed}/family"]["base_losses"])
        full = _mean_loss(results[f"{kind}/{seed}/{operator}/full"]["losses"])
        merged = _mean_loss(results[f"{kind}/{seed}/{operator}/{form}/{share}"]["losses"])
        kept.append((base - merged) / (base - full))
    return kept


def _mean_loss(losses: Mapping[str, float]) -> float:
    return mean(loss for domain, loss in losses.items() if domain != GENERAL)


def _seeds(results: Results) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in results.entries})


def _stored(results: Results, position: int) -> list[str]:
    """Return the values at one place of the keys, in the order of the measurements."""
    return list(dict.fromkeys(key.split("/")[position] for key in results.entries if key.count("/") == 4))


def _half_interval(values: list[float]) -> float:
    return _T_95 * stdev(values) / len(values) ** 0.5 if len(values) > 2 else 0.0


def _page(results: Results) -> Page:
    kept = {(o, f): mean(_gains(results, "full", o, f, 10)) for o in _stored(results, 2) for f in _FORMS}
    base = results[f"full/{_seeds(results)[0]}/family"]
    told = "; ".join(
        f"{operator} {percent(kept[operator, 'packed'])} packed, {percent(kept[operator, 'norm'])} in blocks by norm,"
        f" {percent(kept[operator, 'random'])} at random"
        for operator in _stored(results, 2)
    )
    meaning = (
        f"**At a tenth of the bytes, pack; blocks dropped are quality dropped.** Of what the full merge of four"
        f" fine-tunes gains over the base, a merge of 10 % of the bytes keeps: {told}. The base has seen"
        f" {base['base_tokens'] / 1e6:.1f}M tokens: it is young, and its fine-tunes move more than those of a finished"
        f" model."
    )
    body: list[str | Table | Figure] = [_family_table(results)]
    for kind, label in _KINDS.items():
        body += [f"## {label[0].upper()}{label[1:]}", _gain_table(results, kind), _figure(results, kind)]
        body.append(_perplexity_table(results, kind))
    return Page("Fine-tunes of our own", meaning, tuple(body))


def _family_table(results: Results) -> Table:
    rows = []
    for kind, label in _KINDS.items():
        for seed in _seeds(results):
            entry = results[f"{kind}/{seed}/family"]
            norms = ", ".join(f"{delta['relative_norm']:.4f}" for delta in entry["deltas"])
            changed = ", ".join(percent(delta["changed_fraction"]) for delta in entry["deltas"])
            rows.append((label, str(seed), norms, changed, percent(entry["packed_share"], 1)))
    return Table(("kind", "seed", "relative delta norms", "elements that differ", "packed"), tuple(rows))


def _gain_table(results: Results, kind: str) -> Table:
    rows = []
    for operator in _stored(results, 2):
        for form, label in _FORMS.items():
            cells = []
            for share in map(int, _stored(results, 4)):
                values = _gains(results, kind, operator, form, share)
                cells.append(f"{percent(mean(values))} ± {percent(_half_interval(values))}")
            rows.append((operator, label, *cells))
    header = ("operator", "what is read", *(f"gain kept at {share} %" for share in map(int, _stored(results, 4))))
    return Table(header, tuple(rows))


def _perplexity_table(results: Results, kind: str) -> Table:
    """Perplexity by domain, of the first seed: base, full merge and 10 % of the bytes."""
    import math

    seed = _seeds(results)[0]
    base = results[f"{kind}/{seed}/family"]["base_losses"]
    rows = [("base", "", *(f"{math.exp(loss):.2f}" for loss in base.values()))]
    for operator in _stored(results, 2):
        full = results[f"{kind}/{seed}/{operator}/full"]["losses"]
        rows.append((operator, "in full", *(f"{math.exp(full[domain]):.2f}" for domain in base)))
        for form, label in _FORMS.items():
            losses = results[f"{kind}/{seed}/{operator}/{form}/10"]["losses"]
            rows.append((operator, f"10 %, {label}", *(f"{math.exp(losses[domain]):.2f}" for domain in base)))
    return Table(("merge", "read", *(f"perplexity, {domain}" for domain in base)), tuple(rows))


def _figure(results: Results, kind: str) -> Figure:
    series = []
    for operator in _stored(results, 2):
        for form in _FORMS:
            values = [_gains(results, kind, operator, form, share) for share in map(int, _stored(results, 4))]
            ys, spread = tuple(map(mean, values)), tuple(map(_half_interval, values))
            xs = tuple(map(float, _stored(results, 4)))
            series.append(Series(f"{operator}, {form}", xs, ys, spread, dashed=form != "packed"))
    title = f"Gain of the full merge that is kept ({_KINDS[kind]}), 95 % intervals over seeds"
    return Figure(f"trained-{kind}", title, "budget, % of the expert bytes", "share of the gain", tuple(series))


PART = Part("trained", "four domains, full fine-tuning and LoRA: perplexity kept by budgets", _needs, _measure, _page)
