"""Part `sampling`: what samples of block positions keep of a merge's gain, beside blocks by norm and at random."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.recipes import OPERATORS, Operator
from benchmarks.reproduce.pages import Figure, Page, Series, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.trained import BLOCK_ELEMENTS, KINDS, LONG_KINDS, Kept, TrainedBase, TrainedFamily, kept_of
from benchmarks.reproduce.workplace import Workplace

_KINDS = {**KINDS, **LONG_KINDS}
_SHARES, _TOLD_SHARES = (10, 25, 5, 50), (10, 25)  # in the order they are measured


@dataclass(frozen=True, slots=True)
class _Merge:
    """A merge of the first `n_experts` of a family."""

    label: str
    operator: Operator
    n_experts: int = 4


@dataclass(frozen=True, slots=True)
class _Form:
    """What is read under a budget: a policy, its blocks, and whether the experts were analysed or packed before.

    Packed experts have blocks of their own; their budget is a share of the bytes that they have unpacked.
    """

    label: str
    select: str
    block_elements: int
    is_analyzed: bool
    is_packed: bool = False

    @property
    def options(self) -> tuple[object, ...]:
        return "--select", self.select, *(() if self.is_packed else ("--block-elements", self.block_elements))


MERGES = {
    "ties": _Merge("TIES", OPERATORS["ties"]),
    "linear": _Merge("linear", OPERATORS["linear"]),
    "task": _Merge("task arithmetic", OPERATORS["task_arithmetic"]),
    "dare_ties": _Merge("DARE-TIES", OPERATORS["dare_ties"]),
    "one": _Merge("one expert", Operator("task_arithmetic", {"weight": 1.0}), 1),
    "sum": _Merge("sum", Operator("task_arithmetic", {"weight": 1.0})),
}
FORMS = {
    "sample-32": _Form("sample, 32 Ki", "sample", 2 * BLOCK_ELEMENTS, is_analyzed=False),
    "norm": _Form("blocks by norm", "norm", BLOCK_ELEMENTS, is_analyzed=True),
    "random": _Form("blocks at random", "random", BLOCK_ELEMENTS, is_analyzed=True),
    "sample-16": _Form("sample, 16 Ki", "sample", BLOCK_ELEMENTS, is_analyzed=False),
    "sample-64": _Form("sample, 64 Ki", "sample", 4 * BLOCK_ELEMENTS, is_analyzed=False),
    "by-norm-16": _Form("sample, 16 Ki, norms on record", "sample", BLOCK_ELEMENTS, is_analyzed=True),
    "packed-norm": _Form("levels by norm", "norm", BLOCK_ELEMENTS, is_analyzed=False, is_packed=True),
    "packed-sample": _Form("sample", "sample", BLOCK_ELEMENTS, is_analyzed=False, is_packed=True),
    "sample-256": _Form("sample, 256 Ki", "sample", 16 * BLOCK_ELEMENTS, is_analyzed=False),
}
_DEFAULT = "sample-32"
_UNTOLD = ("sample-16", "sample-64", "sample-256", "random")  # the last is told of these families by `trained`
_PACKED_TOLD, _PACKED_SHARE = 5, 7.9  # % of the raw bytes that the packed experts of `trained` take
_TOLD_MERGES = ("ties", "linear", "dare_ties")


def _needs(size: Size) -> Needs:
    return Needs(0, 1) if size.is_toy else Needs(3_000_000_000, 2 + len(_KINDS) * size.repeats * 60)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    place = place.within("sampling")
    base = TrainedBase(place, _KINDS, is_toy=size.is_toy)
    base.measure(results)
    for seed in range(size.repeats):
        for kind in _KINDS:
            family = TrainedFamily(place, base, kind, seed)
            for key, call in _measurements(Samples(family, base, seed), size):
                results.measure(f"{kind}/{seed}/{key}", call)
            family.place.remove()


def _measurements(samples: Samples, size: Size) -> Iterator[tuple[str, Callable[[], Entry]]]:
    yield "family", samples.family.gains
    merges, shares = (("ties",), (50,)) if size.is_toy else (tuple(MERGES), _SHARES)
    for merge in merges:
        yield f"{merge}/full", partial(samples.full, merge)
    for share in shares:
        for form in FORMS:
            for merge in merges:
                yield f"{merge}/{form}/{share}", partial(samples.budgeted, merge, form, share)


class Samples:
    """The merges of one family, in full and under budgets; what they write lies in a folder of its own."""

    def __init__(self, family: TrainedFamily, base: TrainedBase, seed: int, scratch: Workplace | None = None) -> None:
        self.family, self._base, self._seed = family, base, seed
        self._place = scratch or family.place

    def full(self, merge: str) -> dict[str, Any]:
        self.family.train()
        return self._merged(merge, self.family.experts, "--no-catalog")

    def budgeted(self, merge: str, form: str, share: int) -> dict[str, Any]:
        self.family.train()
        home = self.family.home if FORMS[form].is_analyzed else self._place.folder / "home-empty"
        if FORMS[form].is_analyzed and not home.exists():
            self.family.analyze()
        if not FORMS[form].is_packed:
            return self._merged(
                merge, self.family.experts, "--budget", f"{share}%", *FORMS[form].options, "--home", home
            )
        self.family.prepare()
        n_experts = MERGES[merge].n_experts
        budget = share * self.family.raw_bytes() * n_experts // (100 * len(self.family.experts))
        packed = [self.family.packed / expert.name for expert in self.family.experts]
        return self._merged(merge, packed, "--budget", f"{budget}B", *FORMS[form].options, "--home", home)

    def _merged(self, merge: str, family: Sequence[Path], *options: object) -> dict[str, Any]:
        chosen = MERGES[merge]
        experts = list(family[: chosen.n_experts])
        recipe = chosen.operator.recipe(self._base.folder, experts, "bfloat16")
        return self.merged(
            recipe, *options, n_domains=len(self._base.heldout) if chosen.n_experts == 1 else len(experts)
        )

    def merged(self, recipe: str, *options: object, n_domains: int) -> dict[str, Any]:
        """Merge a recipe; return the losses in the first domains, and the bytes."""
        file, out = self._place.folder / "recipe.yml", self._place.folder / "out"
        file.write_text(recipe)
        shutil.rmtree(out, ignore_errors=True)
        report, _ = self._place.ours("merge", file, out, *options, "--seed", self._seed, "--threads", 1)
        losses = self._base.score(out, list(self._base.heldout)[:n_domains])
        shutil.rmtree(out)
        return {"losses": losses, "expert_bytes": report["expert_bytes"], "planned_bytes": report["planned_bytes"]}


# --- the page ---


def _kept(results: Results, kind: str, merge: str, form: str, share: int) -> Kept | None:
    keys = [f"{kind}/{seed}/{merge}" for seed in _seeds(results, kind) if f"{kind}/{seed}/{merge}/full" in results]
    pairs = [(f"{key}/{form}/{share}", f"{key}/full") for key in keys]
    return kept_of(results["base"], [(results[one], results[full]) for one, full in pairs if one in results])


def _seeds(results: Results, kind: str) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in results.entries if key.startswith(f"{kind}/")})


def _kinds(results: Results) -> list[str]:
    return [kind for kind in _KINDS if _seeds(results, kind)]


def _page(results: Results) -> Page:
    body: list[str | Table | Figure] = [_about(results), _family_table(results), _how_to_read()]
    for kind in _kinds(results):
        label = _KINDS[kind]
        body += [f"## {label[0].upper()}{label[1:]}", _table(results, kind, is_packed=False), _figure(results, kind)]
        packed = _table(results, kind, is_packed=True)
        told = f"Packed experts take {_PACKED_SHARE} % of their raw bytes here: a larger budget reads all of them."
        body += [told, packed] if packed.rows else []
    return Page("Samples of blocks", _meaning(results), tuple(body))


def _meaning(results: Results) -> str:
    share = _TOLD_SHARES[0]
    kinds = [kind for kind in _kinds(results) if _range(results, kind, share, _DEFAULT, _TOLD_MERGES)]
    if not kinds:
        return "**No merge is measured yet.**"

    def told(form: str) -> str:
        ranges = ((_range(results, kind, share, form, _TOLD_MERGES), _KINDS[kind]) for kind in kinds)
        return ", ".join(f"{kept} ({label})" for kept, label in ranges if kept)

    return (
        f"**At {share} % of the bytes, samples keep {told(_DEFAULT)} of what TIES, linear and DARE-TIES merges gain;"
        f" blocks chosen by norm keep {told('norm')}.** Since, samples are scaled less where weights change much: of"
        " longer fine-tunes they [keep more](../decisions/032-a-sample-is-the-default.md)."
    )


def _range(results: Results, kind: str, share: int, form: str, merges: Iterable[str]) -> str:
    """Tell the least and the most of the gain that merges keep; nothing where none was measured."""
    found = (_kept(results, kind, merge, form, share) for merge in merges)
    shares = sorted(value.share for value in found if value is not None and value.gain > 0)
    return " to ".join(dict.fromkeys(map(percent, (shares[0], shares[-1])))) if shares else ""


def _about(results: Results) -> str:
    schedules = {kind: results["base"]["schedules"][kind] for kind in _kinds(results)}
    trainings = "; ".join(
        f"{_KINDS[kind]}: {schedule['steps']} steps at a rate of {schedule['peak_rate']:g},"
        f" {schedule['steps'] * schedule['batch'] * schedule['window_tokens']} tokens"
        for kind, schedule in schedules.items()
    )
    return (
        "The models are those of [fine-tunes of a public language model](trained.md), each on one domain"
        f" ({trainings}). A [sample](../guide/budget.md#what-is-a-sampled-budget) knows of the experts at most their"
        " norms; blocks by norm and at random were planned from `analyze`. Every merge is one draw. Of larger"
        " models nothing follows from here."
    )


def _how_to_read() -> str:
    return (
        "*Gain kept*, in %: of the mean loss over 24 held-out windows of the four domains, the share of the full"
        " merge's gain over the base; a merge that goes further the same way has more than 100. ±: half of the 95 %"
        " interval over windows of the paired difference. TIES has density 0.2; task arithmetic and DARE-TIES weights"
        " of 0.3, *one expert* and *sum* of 1. *Ki*: elements of a unit that is drawn; blocks have 16 Ki."
    )


def _family_table(results: Results) -> Table:
    """One row for each kind: the least and the most over its experts and seeds."""
    base = results["base"]["losses"]
    rows = []
    for kind in _kinds(results):
        keys = (f"{kind}/{seed}/family" for seed in _seeds(results, kind))
        entries = [results[key] for key in keys if key in results]
        if entries:
            norms = [delta["relative_norm"] for entry in entries for delta in entry["deltas"]]
            own = [pair for entry in entries for losses in entry["own_losses"] for pair in losses.items()]
            gained = [mean(base[name]) - mean(values) for name, values in own]
            ranges = (f"{min(norms):.4f} to {max(norms):.4f}", f"{min(gained):.3f} to {max(gained):.3f}")
            others = (
                [_range(results, kind, share, _DEFAULT, [merge]) for share in _TOLD_SHARES] for merge in ("one", "sum")
            )
            rows.append((_KINDS[kind], str(len(entries)), *ranges, *(", ".join(filter(None, told)) for told in others)))
    kept = f"kept by samples of {' and '.join(map(str, _TOLD_SHARES))} %, of"
    header = (
        "kind",
        "seeds",
        "relative delta norm",
        "nats each gains on its domain",
        f"{kept} one expert",
        f"{kept} a sum",
    )
    return Table(header, tuple(rows))


def _table(results: Results, kind: str, *, is_packed: bool) -> Table:
    """What merges that mean keep, by share of the bytes and what is read: of raw experts, or of packed ones."""
    rows = []
    for share in (_PACKED_TOLD,) if is_packed else _TOLD_SHARES:
        for form, described in FORMS.items():
            if described.is_packed == is_packed and form not in _UNTOLD:
                kept = [_kept(results, kind, merge, form, share) for merge in _TOLD_MERGES]
                if any(value is not None for value in kept):
                    cells = ("" if value is None else str(value) for value in kept)
                    rows.append((f"{share} %", described.label, *cells))
    return Table(("bytes", "what is read", *(MERGES[merge].label for merge in _TOLD_MERGES)), tuple(rows))


def _figure(results: Results, kind: str) -> Figure:
    series = []
    for merge in ("ties", "linear"):
        for form in (_DEFAULT, "norm", "random"):
            kept = {float(share): _kept(results, kind, merge, form, share) for share in sorted(_SHARES)}
            points = {share: value for share, value in kept.items() if value is not None and value.gain > 0}
            if points:
                spread = tuple(value.lost_interval / value.gain for value in points.values())
                ys = tuple(value.share for value in points.values())
                series.append(Series(f"{merge}, {form}", tuple(points), ys, spread, dashed=form != _DEFAULT))
    title = f"Gain of the full merge that is kept ({_KINDS[kind]}), 95 % intervals over windows"
    return Figure(f"sampling-{kind}", title, "budget, % of the expert bytes", "share of the gain", tuple(series))


PART = Part(
    "sampling", "what samples of blocks keep of a merge's gain, beside blocks by norm and at random", _needs, _measure,
    _page, tells_beginnings=True,
)  # fmt: skip
