"""What merges of fine-tunes keep of a gain, with intervals, and the tables and figures that pages have of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.reproduce.fine_tunes import DEFAULT_FORM, FEW, FORMS, MERGES, Study, draw_keys
from benchmarks.reproduce.pages import Figure, Series, Table, percent
from benchmarks.reproduce.results import Entry, Results
from mergepipe.core.units import plural

_T_95 = {
    2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179,
    13: 2.160, 14: 2.145, 15: 2.131, 23: 2.069, 31: 2.040, 63: 1.998, 127: 1.979,
}  # fmt: skip
"""Student's t, by its freedom."""
_SHARE_OF_AN_EXPERT = 100 // len(FEW)
_SAMPLED = ("ties", DEFAULT_FORM, 10)
FEWEST_DRAWS = 3  # of which an interval is told


@dataclass(frozen=True, slots=True)
class Kept:
    """What merges keep of the full merge's gain, over all families and draws there are.

    `gain` and `lost` are in mean nats a token: of the full merges over the base, and of the merges below the full ones.
    `by_merge` are the shares merge by merge. Where they are draws the interval is over these; else `lost_interval` is
    half of the 95 % interval of `lost` over windows, paired.
    """

    gain: float
    lost: float
    by_merge: tuple[float, ...]
    lost_interval: float
    is_drawn: bool

    @property
    def share(self) -> float:
        return mean(self.by_merge)

    @property
    def interval(self) -> float | None:
        """Half of the 95 % interval of the share; None of too few draws."""
        if not self.is_drawn:
            return self.lost_interval / self.gain
        return half_interval(self.by_merge) if len(self.by_merge) >= FEWEST_DRAWS else None

    def __str__(self) -> str:
        if self.gain <= 0:
            return f"{self.lost:+.4f} nats"  # there is no gain to keep a share of
        if self.interval is None:
            return f"{100 * self.share:.0f}, {plural(len(self.by_merge), 'draw')}"
        return f"{100 * self.share:.0f} ± {100 * self.interval:.0f}"


def kept_of(results: Results, kind: str, merge: str, form: str, share: int) -> Kept | None:
    """Return what merges keep of the gains of the full merges beside them; None where there are none."""
    merges = []
    for key in draw_keys(merge, form, share):
        merges += beside(results, kind, key, f"{merge}/full")
    return _kept(results, merges, is_drawn=FORMS[form].is_drawn)


def kept_by_an_expert(results: Results, kind: str, merge: str, n: int) -> Kept | None:
    """Return what the best of `n` experts, for one of which all bytes are read, keeps of the gain of their merge."""
    merges = []
    for *experts, full in beside(results, kind, *(f"expert/{number}" for number in range(n)), f"{merge}/full"):
        scored = [{"losses": {name: expert["losses"][name] for name in full["losses"]}} for expert in experts]
        merges.append((min(scored, key=lambda entry: mean(losses_of(entry))), full))
    return _kept(results, merges, is_drawn=False)


def _kept(results: Results, merges: Sequence[tuple[Entry, ...]], *, is_drawn: bool) -> Kept | None:
    if not merges:
        return None
    gains = [_gain(results, full) for _, full in merges]
    by_merge = tuple(_gain(results, merged) / gain for (merged, _), gain in zip(merges, gains, strict=True))
    lost = paired_losses(merges)
    return Kept(mean(gains), mean(lost), by_merge, half_interval(lost), is_drawn)


def _order_difference(results: Results, kind: str, merge: str, share: int) -> str:
    """Tell what blocks by norm keep more than those at random, in points of the full merge's gain.

    ± is half of the 95 % interval over windows of the paired difference. Empty where there are no merges, or no gain.
    """
    triples = beside(results, kind, f"{merge}/norm/{share}", f"{merge}/random/{share}", f"{merge}/full")
    gain = mean(_gain(results, full) for *_, full in triples) if triples else 0.0
    if gain <= 0:
        return ""
    more = paired_losses([(random, norm) for norm, random, _ in triples])
    return f"{100 * mean(more) / gain:+.1f} ± {100 * half_interval(more) / gain:.1f}"


def _gain(results: Results, merged: Entry) -> float:
    """Return the mean nats that a merge gains over the base, in the domains it was scored in."""
    base = {name: results["base"]["losses"][name] for name in merged["losses"]}
    return mean(losses_of({"losses": base})) - mean(losses_of(merged))


def draws_text(results: Results, kinds: Iterable[str]) -> str:
    """Tell what the intervals of draws are, and that the stored ones are older than what merges do now."""
    text = (
        " ± of samples and of blocks at random: half of the 95 % interval over draws, which are of different families"
        f" where there are several; fewer than {FEWEST_DRAWS} have none. ± of other rows: over windows, paired with the"
        " full merge."
    )
    if any(beside(results, kind, draw_keys(*_SAMPLED)[1]) for kind in kinds):
        return text
    return text + (
        " The samples of this page drew embeddings like other tensors, those of packs by norm, and DARE dropped as much"
        " of what was drawn as of a full merge; [all three were changed](../decisions/032-a-sample-is-the-default.md)."
    )


def paired_losses(pairs: Iterable[tuple[Entry, ...]]) -> list[float]:
    """Return, window by window, what the first merge of each pair loses more than the second, as means over pairs."""
    both = [zip(losses_of(first), losses_of(second), strict=True) for first, second in pairs]
    return [mean(values) for values in zip(*([a - b for a, b in pair] for pair in both), strict=True)]


def losses_of(entry: Entry) -> list[float]:
    """Return the losses of all windows, in one order."""
    return [loss for losses in entry["losses"].values() for loss in losses]


def half_interval(values: Sequence[float]) -> float:
    return _T_95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def seeds_of(results: Results, kind: str) -> list[int]:
    """The seeds whose families were measured."""
    keys = (key.split("/") for key in results.entries if key.endswith("/family"))
    return sorted(int(seed) for of_kind, seed, _ in keys if of_kind == kind)


def beside(results: Results, kind: str, *merges: str) -> list[tuple[Entry, ...]]:
    """Of each seed that has all of these merges, their entries."""
    keys = [[f"{kind}/{seed}/{merge}" for merge in merges] for seed in seeds_of(results, kind)]
    return [tuple(results[key] for key in of_seed) for of_seed in keys if all(key in results for key in of_seed)]


def kinds_of(results: Results, study: Study) -> dict[str, str]:
    return {kind: label for kind, label in study.kinds.items() if seeds_of(results, kind)}


def families_of(results: Results, kind: str) -> list[Entry]:
    return [family for (family,) in beside(results, kind, "family")]


def families_table(results: Results, study: Study, more: Mapping[str, Callable[[str], str]]) -> Table:
    """One row for each kind: the least and the most over its experts and seeds, and what `more` tells of the kind."""
    rows = []
    base = results["base"]["losses"]
    for kind, label in kinds_of(results, study).items():
        families = families_of(results, kind)
        deltas = [delta for family in families for delta in family["deltas"]]
        own = [pair for family in families for losses in family["own_losses"] for pair in losses.items()]
        gained = [mean(base[name]) - mean(losses) for name, losses in own]
        norms = [delta["relative_norm"] for delta in deltas]
        rows.append(
            (
                label, str(len(families)), f"{min(norms):.4f} to {max(norms):.4f}",
                told_range([delta["changed_fraction"] for delta in deltas]), f"{min(gained):.3f} to {max(gained):.3f}",
                *(tell(kind) for tell in more.values()),
            )
        )  # fmt: skip
    header = ("kind", "seeds", "relative delta norm", "elements that differ", "nats each gains on its domain")
    return Table((*header, *more), tuple(rows))


def packed_shares(results: Results, *kinds: str) -> str:
    """Tell what packed experts take of their raw bytes."""
    return told_range([family["packed_share"] for kind in kinds for family in families_of(results, kind)], 1)


def told_range(shares: Sequence[float], digits: int = 0) -> str:
    """Tell the least and the most; nothing of nothing."""
    return " to ".join(dict.fromkeys(percent(f(shares), digits) for f in (min, max))) if shares else ""


def shares_kept(results: Results, kind: str, forms: Iterable[str], share: int) -> list[float]:
    kept = [kept_of(results, kind, merge, form, share) for form in forms for merge in MERGES]
    return [value.share for value in kept if value is not None and value.gain > 0]


def budget_table(results: Results, kinds: Mapping[str, str], told: Mapping[int, Iterable[str]]) -> Table:
    """Gain kept by forms at shares, a column for each kind and merge; with the difference of two orders."""
    columns = [(kind, merge) for kind in kinds for merge in MERGES]
    rows = []

    def add(share: int, label: str, kept: Sequence[Kept | None]) -> None:
        if any(value is not None for value in kept):
            cells = ("" if value is None else str(value) for value in kept)
            rows.append((f"{share} %", label, *cells))

    for share, forms in told.items():
        for form in forms:
            add(share, FORMS[form].label, [kept_of(results, kind, merge, form, share) for kind, merge in columns])
        if share == _SHARE_OF_AN_EXPERT and DEFAULT_FORM in forms:
            of_experts = [kept_by_an_expert(results, kind, merge, len(FEW)) for kind, merge in columns]
            add(share, "the best single expert, in full", of_experts)
        differences = [_order_difference(results, kind, merge, share) for kind, merge in columns]
        rows += [(f"{share} %", "norm - random", *differences)] if "random" in forms and any(differences) else []
    titles = (MERGES[merge] + (f", {kinds[kind]}" if len(kinds) > 1 else "") for kind, merge in columns)
    return Table(("bytes", "what is read", *titles), tuple(rows))


def gain_figure(results: Results, study: Study, kind: str, merges: Sequence[str], forms: Sequence[str]) -> Figure:
    """Draw the gain kept by share of the bytes; the first of the forms is not dashed."""
    series = []
    for merge in merges:
        for form in forms:
            points = {share: kept_of(results, kind, merge, form, share) for share in sorted(study.shares)}
            kept = {float(share): value for share, value in points.items() if value is not None and value.gain > 0}
            if kept:
                ys = tuple(value.share for value in kept.values())
                spread = tuple(value.interval or 0.0 for value in kept.values())
                series.append(Series(f"{merge}, {form}", tuple(kept), ys, spread, dashed=form != forms[0]))
    title = f"Gain of the full merge that is kept ({study.kinds[kind]}), 95 % intervals"
    return Figure(f"{study.name}-{kind}", title, "budget, % of the expert bytes", "share of the gain", tuple(series))
