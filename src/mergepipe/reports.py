"""The values that calls return: frozen reports of checks, merges and other jobs, and progress reports.

`core.display` shows them by the labels of their fields and properties, in order; `--json` has all fields.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from math import asin, hypot, pi
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mergepipe.core.display import (
    Displayed,
    Fact,
    Table,
    names_by_reason,
    share_text,
    shorten_names,
    shown,
    text_of,
    told,
)
from mergepipe.core.units import first_names, format_bytes, format_percent, format_rate, plural
from mergepipe.storage.contract import Traffic
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from mergepipe.core.outcome import DroppedTensor, Notice
    from mergepipe.snapshots.manifest import Input, LeftOutFile

WHOLE = "whole"
"""The level of blocks that are read unencoded, or in full."""
_MOST_RUN_CHARACTERS, _MOST_CHOICES, _MOST_LAYER_GROUPS, _MOST_TRIALS, _MOST_CHANGES = 60, 6, 8, 10, 40
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: its phase, and bytes read and written so far of all that are expected.

    `notices` are what the user should know before all else is done; each comes once. `earlier_bytes` of those done are
    of an interrupted run that this one resumes. `retries` are requests for remote files that were made again.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    notices: tuple[str, ...] = ()
    earlier_bytes: int = 0
    retries: int = 0


ProgressCallback = Callable[[Progress], None]


class ByteProgress:
    """Reports the bytes of one phase that are done, of `total_bytes`; without a callback it only counts them."""

    def __init__(self, on_progress: ProgressCallback | None, phase: str, total_bytes: int, done_bytes: int = 0) -> None:
        self._on_progress = on_progress
        self._phase = phase
        self._total_bytes = total_bytes
        self.done_bytes = done_bytes

    def add(self, nbytes: int) -> None:
        """Count more bytes, and report."""
        self.report(self.done_bytes + nbytes)

    def report(self, done_bytes: int) -> None:
        """Report how many bytes are done."""
        self.done_bytes = done_bytes
        if self._on_progress is not None:
            self._on_progress(Progress(self._phase, self.done_bytes, self._total_bytes))


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One input of a merge and the bytes of its tensors that are read."""

    role: str
    model: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that is copied from the base, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CheckReport(Displayed):
    """A recipe checked: models, tensors, sizes. Bytes are those of tensors; `disk_bytes` is what the output needs.

    `free_bytes` are free in the working directory.
    """

    recipe: str
    operator: str = shown("operator")
    models: tuple[ModelUse, ...] = shown("{role}", "{model} ({tensors:tensor}, {bytes})")
    base_bytes: int = shown("reads", "base {base_bytes}, experts {expert_bytes}")
    expert_bytes: int
    output_bytes: int = shown("writes", "{output_bytes} in {shards:file}")
    shards: int
    disk_bytes: int = shown("disk", lambda report: _disk_text(report.disk_bytes, report.free_bytes))
    free_bytes: int
    spectral: str = shown("spectral", "{spectral}", default="")
    merged_tensors: int = shown(
        "tensors", lambda r: f"{r.merged_tensors} merged, {len(r.copied)} copied, {len(r.dropped)} dropped"
    )
    copied: tuple[CopiedTensor, ...] = shown(
        "copied", lambda r: names_by_reason((x.reason, x.tensor) for x in r.copied), once=True
    )
    dropped: tuple[DroppedTensor, ...] = shown(
        "dropped", lambda r: names_by_reason((f"{x.model}, {x.reason}", x.tensor) for x in r.dropped), once=True
    )
    recipe_notices: tuple[Notice, ...] = shown("{kind}", str, default=())


def _disk_text(needed_bytes: int, free_bytes: int) -> str:
    enough = "" if free_bytes >= needed_bytes else ": not enough"
    return f"{format_bytes(needed_bytes)} needed, {format_bytes(free_bytes)} free here{enough}"


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """The share of an expert's bytes that a merge reads; `rough` of its blocks are read at a lower level of its pack.

    Blocks that are known to equal the base are no part of it; the share of an expert that changes nothing is 1.
    """

    model: str
    share: float
    rough: float = 0.0

    def __str__(self) -> str:
        return f"{self.model}: {missing_text(self.share, self.rough)}"


def missing_text(share: float, rough: float = 0.0) -> str:
    """Say what is missing of an expert, by the share of the bytes with its changes that is read."""
    if not share:
        return "nothing of it is read"
    text = f"{format_percent(1 - share)} of the bytes that it changes are not read"
    text = "all bytes that it changes are read" if share == 1 else text
    return f"{text}, {format_percent(rough)} of its blocks are approximate" if rough else text


def read_share(read_blocks: int, omitted_blocks: int, planned_bytes: int, full_bytes: int) -> float:
    """Return the share of an expert's bytes that is read: 1 where no block is omitted, 0 where none is read."""
    if not omitted_blocks:
        return 1.0
    if not read_blocks:
        return 0.0
    return planned_bytes / full_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetVerdict(Displayed):
    """The reads of a budgeted merge: `planned_bytes` of the `full_bytes` that reading everything costs, by `policy`.

    `experts` begin with those of which least is in the merge; `unread` names those of which nothing is read. Of a
    budget `unspent_bytes` are left for `unspent_reason`, if that is a good part of it. `measured` says what merges of
    this kind kept of a gain, and on which page; this merge was not measured. A sample multiplies merged deltas by
    `most_factor` at most.
    """

    policy: str = shown("verdict", lambda verdict: verdict.sentence)
    is_full: bool
    planned_bytes: int
    full_bytes: int
    experts: tuple[ExpertCoverage, ...] = shown("expert")
    unread: tuple[str, ...]
    measured: str
    most_factor: float = 1.0
    unspent_bytes: int = shown("unspent", "{unspent_bytes}: {unspent_reason}.", optional=True, default=0)
    unspent_reason: str = ""
    bound: OmissionBound | None = shown(
        "bound",
        lambda verdict: str(verdict.bound) if verdict.bound and verdict.bound.is_worse_than_the_base else "",
        default=None,
    )

    @property
    def sentence(self) -> str:
        """How much is read and how it is chosen, and where the gain of such merges was measured."""
        if self.is_full:
            return "The full merge: everything of the experts is read."
        read = f"{share_text(self.planned_bytes, self.full_bytes)} of the experts' bytes are read"
        return f"{read}, by policy '{self.policy}'{self.moved}. Gain that such merges kept: {self.measured}."

    @property
    def moved(self) -> str:
        """How far a sample moves what it reads, where that is twice as far or more; empty of other policies."""
        return f", with changes scaled by up to {self.most_factor:.3g}" if self.most_factor >= 2 else ""


@dataclass(frozen=True, slots=True)
class KeptShare:
    """How many elements of an expert a rule that trims keeps, of all in the tensors that it trims.

    They are those with the largest differences from the base (breadcrumbs: below the very largest). Where fewer
    elements differ than are kept, the rest of them equal the base.
    """

    model: str
    kept_elements: int
    elements: int

    @property
    def share(self) -> float:
        """Share of the elements that is kept."""
        return self.kept_elements / self.elements

    def __str__(self) -> str:
        if self.kept_elements == self.elements:
            return f"all of {self.model}: its density is 1, so nothing is trimmed"
        return f"{format_percent(self.share)} of {self.model}, by size of the difference"


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """Counts of an adapter's modules; `left_over` are names that its base lacks, which were allowed.

    `trained_on` is the model that its configuration names, which may be a quantised form of the base; empty without.
    """

    model: str
    adapted_modules: int
    applied_modules: int
    saved_modules: int
    left_over: tuple[str, ...] = ()
    trained_on: str = ""

    def __str__(self) -> str:
        applied = f"{self.applied_modules} of {plural(self.adapted_modules, 'adapted module')} applied"
        left = f"{len(self.left_over)} not applied" + (f": {shorten_names(self.left_over)}" if self.left_over else "")
        base = f"; trained on {self.trained_on}" if self.trained_on else ""
        return f"{self.model}: {applied}, {plural(self.saved_modules, 'saved module')} replaced, {left}{base}"


@dataclass(frozen=True, slots=True)
class TriedBudget:
    """A budget of a merge with a target loss, the bytes that were read of experts for it, and the loss it gave."""

    budget: str
    expert_bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class SurvivingChange:
    """The share of the change from the base that rounding to `dtype` kept, in all and by tensor.

    It is the projection of what was written on what was meant: 1 where nothing is lost on average. Of a large tensor an
    eighth of the elements is measured. Tensors that no model changes are not listed.
    """

    dtype: str
    rounding: str
    share: float
    tensors: Mapping[str, float]

    def __str__(self) -> str:
        how = "" if self.rounding == "nearest" else f" ({self.rounding})"
        return f"to {self.dtype}{how} kept {100 * self.share:.0f} % of the change"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class MergeReport(Displayed):
    """A finished merge. Bytes are those requested from storage, page rounding included.

    `earlier_expert_bytes` of `expert_bytes` may have been read by earlier runs for this output. `kept` has each expert
    that was trimmed, of merges in full; `tried` the budgets of a merge with a target loss, the one that met it last;
    `left_out` files of the base's directory that are not copied; `traffic` requests for remote files;
    `requantisation_error` what FP8 lost of weights that are stored like the base (root mean squares, relative);
    `rounding` what rounding kept of the change, where the output's dtype does not hold every result.
    """

    COMPUTED: ClassVar = ("read_bytes", "bytes_per_second")

    verdict: BudgetVerdict | None = shown(default=None)  # of a merge under a budget
    summary: str = shown("merged", default="")  # of adapters that were folded into a base
    operator: str = shown("operator", lambda report: "" if report.summary else report.operator)
    base_bytes: int = shown("base read")
    expert_bytes: int = shown("experts read")
    earlier_expert_bytes: int = shown(
        "read before", "up to {earlier_expert_bytes} of it, by interrupted runs", optional=True, default=0
    )
    analysis_bytes: int = shown("read again", optional=True)
    planned_bytes: int | None = None
    budget_bytes: int | None = shown(
        "budget", "{budget_bytes}: {planned_use_bytes} read of {planned_bytes} planned", default=None
    )
    tried: tuple[TriedBudget, ...] = shown(
        "tried", "{budget}: loss {loss}, {expert_bytes} read from experts", default=()
    )
    metadata_bytes: int = shown("total read", lambda report: _tried_text(report.tried))
    output_bytes: int = shown("written")
    traffic: Traffic = shown("requests", lambda r: _requests_text(r.traffic), default_factory=Traffic)
    seconds: float = shown("time")

    @property
    @told("speed")
    def bytes_per_second(self) -> float:
        """Bytes read and written per second."""
        return (self.read_bytes + self.output_bytes) / max(self.seconds, 1e-9)

    peak_rss_bytes: int = shown("peak memory")
    merged_tensors: int = shown(
        "tensors", "{merged_tensors} merged, {copied_tensors} copied, {dropped_tensors} dropped"
    )
    copied_tensors: int
    dropped_tensors: int
    kept: tuple[KeptShare, ...] = shown("kept", str, default=())
    requantisation_error: float | None = shown(
        "stored", "like the base: FP8, relative root mean square error {requantisation_error}", default=None
    )
    rounding: SurvivingChange | None = shown("rounding", lambda r: str(r.rounding or ""), default=None)
    adapters: tuple[AppliedAdapter, ...] = shown("adapter", default=())
    sid: str = shown("snapshot")
    recipe_notices: tuple[Notice, ...] = shown("{kind}", str, default=())
    notices: tuple[str, ...] = shown("notice", default=())
    left_out: tuple[LeftOutFile, ...] = shown(
        "not copied", lambda r: names_by_reason((x.reason, x.name) for x in r.left_out), once=True, default=()
    )
    out: Path | Location = shown("output")

    @property
    def read_bytes(self) -> int:
        """All bytes read."""
        return self.base_bytes + self.expert_bytes + self.analysis_bytes + self.metadata_bytes

    @property
    def planned_use_bytes(self) -> int:
        """Bytes that count in a plan: everything requested of expert files but headers."""
        return self.expert_bytes + self.analysis_bytes


def _tried_text(tried: Sequence[TriedBudget]) -> str:
    total = format_bytes(sum(one.expert_bytes for one in tried))
    return f"{total} from experts, plus the base each time" if tried else ""


def _requests_text(traffic: Traffic) -> str:
    counts = traffic.counts
    retries = f", {counts.retries} of them retries" if counts.retries else ""
    lost = f" ({format_bytes(counts.retried_bytes)} lost)" if counts.retried_bytes else ""
    hosts = "".join(f"; {format_bytes(nbytes)} from {host}" for host, nbytes in traffic.bytes_by_host.items())
    return f"{counts.requests}{retries}{lost}{hosts}" if counts.requests else ""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PartReport(Displayed):
    """The result of making a part of an output. Bytes are those that this run requested.

    `made_shards` were made now, `found_shards` of the part were done before. With a `merge` this run has finished the
    output; `is_published` if the output is there, whoever finished it. `done_shards` are of the whole output.
    """

    part: str = shown("part")
    made_shards: tuple[str, ...] = shown(
        "shards", lambda r: f"{len(r.made_shards)} made, {len(r.found_shards)} done before", once=True
    )
    found_shards: tuple[str, ...]
    base_bytes: int = shown("base read")
    expert_bytes: int = shown("experts read")
    output_bytes: int = shown("written")
    seconds: float = shown("time")
    done_shards: int
    n_shards: int
    is_published: bool = shown("whole output", lambda r: _state(r.is_published, r.done_shards, r.n_shards))
    out: Path | Location = shown("output")
    merge: MergeReport | None = shown(default=None)


def _state(is_published: bool, done_shards: int, n_shards: int) -> str:
    return "published" if is_published else f"{done_shards} of {n_shards} shards are done"


@dataclass(frozen=True, slots=True)
class ShardStatus(Displayed):
    """One shard of an output that is made in parts: `done`, `reading` (its worker may live), `interrupted`, `open`.

    It was begun last for `part` by `worker`.
    """

    name: str = shown("shard")
    size_bytes: int = shown("size")
    state: str = shown("state")
    part: str = shown("part", default="")
    worker: str = shown("worker", default="")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PartsStatus(Displayed):
    """The state of an output that is made in parts. `missing_parts` of `n_parts` have shards that are not done.

    Expert bytes: `read_bytes` were or may have been read up to now, `limit_bytes` is the budget (None: unlimited).
    """

    out: Path | Location = shown("output")
    is_published: bool = shown("state", lambda r: _state(r.is_published, r.done_shards, len(r.shards)))
    read_bytes: int = shown("experts read", "{read_bytes} of {planned_bytes} planned", optional=True)
    planned_bytes: int
    limit_bytes: int | None = shown("budget")
    n_parts: int | None = shown("missing parts", lambda status: status.missing_text, default=None)
    missing_parts: tuple[int, ...] = ()
    shards: tuple[ShardStatus, ...] = shown()

    @property
    def missing_text(self) -> str:
        """The parts that have shards to be made."""
        return ", ".join(f"{number}/{self.n_parts}" for number in self.missing_parts) or "none"

    @property
    def done_shards(self) -> int:
        """The number of shards that are done."""
        return sum(shard.state == "done" for shard in self.shards)


@dataclass(frozen=True, slots=True)
class AnalyzedExpert:
    """One expert of an analysis: tensors read now, tensors that can be compared, and those that cannot.

    `statistics` is the file that holds what is known of it; None where nothing can be compared.
    """

    model: str
    analyzed_tensors: int
    comparable_tensors: int
    incomparable: tuple[str, ...]
    statistics: Path | None = None

    def __str__(self) -> str:
        n_known = self.comparable_tensors - self.analyzed_tensors
        parts = [f"{self.analyzed_tensors} read now", f"{n_known} known before"]
        if self.incomparable:
            parts.append(f"not comparable: {shorten_names(self.incomparable)}")
        return f"{self.model} ({plural(self.comparable_tensors, 'tensor')}: {', '.join(parts)})"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AnalyzeReport(Displayed):
    """A finished analysis. `analysis_bytes` were read a second time, for want of memory, or for digests.

    `notices` are of files of statistics that were damaged, and are made again.
    """

    base: Location
    experts: tuple[AnalyzedExpert, ...] = shown("expert")
    home: Path = shown("statistics", lambda r: [x.statistics for x in r.experts if x.statistics])
    base_bytes: int = shown("base read")
    expert_bytes: int = shown("experts read")
    analysis_bytes: int = shown("read again", optional=True)
    seconds: float = shown("time")
    notices: tuple[str, ...] = shown("notice", default=())
    overlaps: tuple[Overlap, ...] = ()

    @property
    @told()
    def overlap_table(self) -> Table | None:
        """What experts have in common, by layer."""
        return overlap_table(self.overlaps)


# --- delta stores ---


DOUBTFUL_DELTA = 0.5
"""From here on most of what a delta saves is gone: usual fine-tunes stay below 0.2."""
_CODEC_WORDS = {
    "same": "equal to the base",
    "bands": "in levels",
    "bytes": "without levels",
    "raw": "unencoded",
    "standalone": "without the base",
}


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """How close an expert is to a base: the norm of the sampled deltas over that of the weights' deviations.

    Weights that the base lacks, or has in another shape or in a dtype that is not converted, count as unrelated.
    `nearest_fraction`: the share of `n_samples` at which no other candidate is nearer; `next_base` is the second best
    of several.
    """

    base: Location
    relative_delta: float
    n_samples: int
    nearest_fraction: float = 1.0
    next_base: Location | None = None
    next_delta: float | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether the deltas are so large that this is hardly the base of the expert."""
        return self.relative_delta >= DOUBTFUL_DELTA

    @property
    def is_sure(self) -> bool:
        """Whether the base was told from all others: nearest nearly everywhere, and no other nearly as near."""
        is_far_ahead = self.next_delta is None or self.relative_delta <= 0.9 * self.next_delta
        return self.n_samples > 0 and not self.is_doubtful and self.nearest_fraction >= 0.9 and is_far_ahead

    def __str__(self) -> str:
        text = (
            f"{self.base}, deltas of {format_percent(self.relative_delta)} of the weights, nearest at "
            f"{format_percent(self.nearest_fraction)} of {self.n_samples} samples"
        )
        if self.next_base is not None and self.next_delta is not None:
            text += f"; next is {self.next_base} with {format_percent(self.next_delta)}"
        return text if self.is_sure else f"{text}; uncertain"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExpert(Displayed):
    """One expert as packed: its tensors' bytes, its store's bytes, blocks by codec, and why some are not in bands.

    `is_new`: it was not there yet. `resumed_bytes` of its tensors were packed by an interrupted run. `seconds` is its
    share, by bytes, of the time of all that were packed in one pass. `match` tells how near its base is.
    """

    expert: Location
    store: Path | Location = shown("store")
    tensor_bytes: int = shown("expert")
    store_bytes: int = shown("packed")

    @property
    @told("share")
    def share(self) -> float:
        """The store's bytes as a share of the tensors' bytes."""
        return self.store_bytes / self.tensor_bytes if self.tensor_bytes else 1.0

    blocks: Mapping[str, int]
    outside_bands: Mapping[str, int]
    seconds: float = shown("time", optional=True)
    is_new: bool = shown("speed", lambda r: format_rate(r.tensor_bytes / r.seconds) if r.is_new and r.seconds else "")
    resumed_bytes: int = 0
    match: BaseMatch | None = None

    @property
    @told("blocks")
    def blocks_text(self) -> str:
        """How the blocks can be read, and why some have no levels."""
        if not self.is_new:
            return "packed before, unchanged"
        if not self.blocks and not self.outside_bands:  # a sparse patch has none
            return ""
        blocks = ", ".join(f"{plural(count, 'block')} {_CODEC_WORDS[codec]}" for codec, count in self.blocks.items())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.outside_bands.items())
        before = f"; {format_bytes(self.resumed_bytes)} by an interrupted run" if self.resumed_bytes else ""
        return (blocks or "no blocks") + (f" (without levels: {reasons})" if reasons else "") + before

    @property
    def folder(self) -> Path:
        """The store as a folder of this machine. RecipeError: `location.invalid`, it lies in a bucket."""
        return Location.of(self.store).local_path


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PackReport(Displayed):
    """Packed experts, and the bytes requested of the tensors of base and experts. `base` is the first candidate."""

    base: Location | None
    experts: tuple[PackedExpert, ...] = shown()
    base_bytes: int
    expert_bytes: int
    seconds: float = shown("base", lambda report: report.choices)

    @property
    def choices(self) -> list[str]:
        """The base that was chosen among several for each expert, and how sure that is."""
        matches = [(expert.store, expert.match) for expert in self.experts]
        return [f"{store}: {match}" for store, match in matches if match is not None and match.next_base is not None]


@dataclass(frozen=True, slots=True, repr=False)
class UnpackReport(Displayed):
    """An expert restored from its store."""

    store: Location
    base: Location | None
    out: Path = shown("output")
    tensor_bytes: int = shown("restored")
    seconds: float = shown("time")

    @property
    @told("speed")
    def bytes_per_second(self) -> float:
        """Bytes of tensors per second."""
        return self.tensor_bytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class ExtractedTensor:
    """A tensor whose difference an adapter holds: its rank, and the share of the difference's norm that is left."""

    name: str
    module: str
    rank: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class NotExtracted:
    """A tensor that an adapter does not hold, why, and the norm of its difference; None where it cannot be taken."""

    name: str
    reason: str
    norm: float | None


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ExtractLoraReport(Displayed):
    """A finished extraction. `relative_error` is what the adapter leaves of the whole difference, `left` included."""

    base: Location = shown("base model", lambda r: r.base_model_id or "no id on the Hub; set it with --base-model-id")
    model: Location
    tensors: tuple[ExtractedTensor, ...] = shown("adapted", lambda r: _adapted_text(r.tensors, "tensor"), once=True)
    relative_error: float = shown("error", lambda report: report.error_text)
    saved_modules: tuple[str, ...] = shown("saved in full", "{saved_modules}", once=True)
    left: tuple[NotExtracted, ...] = shown(
        "left out", lambda r: names_by_reason((x.reason, x.name) for x in r.left), once=True
    )
    base_model_id: str | None
    base_bytes: int = shown("base read", default=0)
    model_bytes: int = shown("model read", default=0)
    seconds: float = shown("time", default=0.0)
    adapter_bytes: int = shown("written")
    sid: str = shown("snapshot", default="")
    notices: tuple[str, ...] = shown("notice", default=())
    out: Path | Location = shown("output")

    @property
    def error_text(self) -> str:
        """The share of the difference that the adapter lacks, and of the tensor of which it lacks most."""
        worst = max(self.tensors, key=lambda tensor: tensor.relative_error, default=None)
        error = f"{format_percent(self.relative_error)} of the difference's norm is not in the adapter"
        return error if worst is None else f"{error}, at most {format_percent(worst.relative_error)} of {worst.name}"


def _adapted_text(adapted: Sequence[ExtractedTensor | MergedModule], noun: str) -> str:
    """How many tensors or modules an adapter has, and their least and largest rank."""
    ranks = sorted({one.rank for one in adapted})
    span = " to ".join(map(str, dict.fromkeys((ranks[0], ranks[-1])))) if ranks else "-"
    return f"{plural(len(adapted), noun)} of rank {span}"


@dataclass(frozen=True, slots=True)
class MergedModule:
    """A module of a merged adapter: its rank, and the share of the square sum of the merged delta that it keeps."""

    module: str
    rank: int
    kept_energy: float


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class MergeLoraReport(Displayed):
    """Adapters merged into one. `kept_energy` is the share of the square sum of all merged deltas."""

    adapters: tuple[str, ...]
    method: str = shown("method")
    modules: tuple[MergedModule, ...] = shown("adapted", lambda r: _adapted_text(r.modules, "module"), once=True)
    saved_modules: tuple[str, ...] = shown("saved in full", "{saved_modules}", once=True)
    kept_energy: float = shown("kept", lambda report: report.kept_text)
    read_bytes: int = shown("read")
    seconds: float = shown("time")
    adapter_bytes: int = shown("written")
    sid: str = shown("snapshot")
    notices: tuple[str, ...] = shown("notice", default=())
    out: Path | Location = shown("output")

    @property
    def kept_text(self) -> str:
        """The share of the deltas that is kept, and of the module that keeps least."""
        worst = min(self.modules, key=lambda module: module.kept_energy, default=None)
        kept = f"{format_percent(self.kept_energy)} of the squared norm of the merged deltas"
        if worst is None or worst.kept_energy == 1:
            return kept
        return f"{kept}, at least {format_percent(worst.kept_energy)} ({worst.module})"


class Verdict(StrEnum):
    """What a check of an adapter finds of one tensor."""

    FITS = "fits"  # without a merged model: it would be applied
    NOTHING = "changes nothing"  # its delta is zero
    NO_MODULE = "not in the base"
    NOT_FINITE = "infinities or NaN"
    APPLIED = "applied"
    PARTLY = "partly applied"
    SCALED = "at another scale"
    MISPLACED = "another change"  # that of another module, or its own one transposed
    ABSENT = "not applied"
    CHANGED = "neither base nor applied"
    MISSING = "not in the model"
    UNKNOWN = "cannot be told"


_TOLD_BY_NOTHING = (Verdict.UNKNOWN, Verdict.NOTHING, Verdict.NO_MODULE)


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """A tensor that an adapter changes, or that differs though it does not.

    `rank` and `scale` are those of the adapter's factors. `found_scale` is the multiple of the change that the model
    has, 1 where it is applied. `rounded_share` is the share of the changed elements that rounding to the model's dtype
    gives back to the base.
    """

    name: str
    kind: str
    verdict: Verdict
    rank: int | None = None
    scale: float | None = None
    found_scale: float | None = None
    rounded_share: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CheckedKind(Displayed):
    """All tensors of one kind, such as `q_proj`, with one verdict."""

    kind: str = shown("kind")
    tensors: int = shown("tensors")
    verdict: str = shown("verdict")
    ranks: tuple[int, ...] = shown("rank", once=True)
    scales: tuple[float, ...] = shown("scale", lambda row: _span_text(row.scales), once=True)
    found_scales: tuple[float, ...] = shown("times", lambda row: _span_text(row.found_scales), once=True)
    rounded_share: float | None = shown("rounded away")
    details: tuple[str, ...] = shown("for instance", lambda row: row.details[0], once=True)

    @classmethod
    def of(cls, kind: str, verdict: Verdict, tensors: Sequence[CheckedTensor]) -> CheckedKind:
        """Sum up tensors of one kind and verdict."""
        shares = [tensor.rounded_share for tensor in tensors if tensor.rounded_share is not None]
        return cls(
            kind=kind,
            tensors=len(tensors),
            verdict=verdict.value,
            ranks=tuple(sorted({tensor.rank for tensor in tensors if tensor.rank is not None})),
            scales=tuple(sorted({tensor.scale for tensor in tensors if tensor.scale is not None})),
            found_scales=tuple(sorted({t.found_scale for t in tensors if t.found_scale is not None})),
            rounded_share=sum(shares) / len(shares) if shares else None,
            details=tuple(dict.fromkeys(tensor.detail for tensor in tensors if tensor.detail)),
        )


def _span_text(values: Sequence[float]) -> str:
    """Write the least and the largest of some numbers."""
    texts = dict.fromkeys(f"{value:.3g}" for value in values)
    return " to ".join([*texts][:: max(len(texts) - 1, 1)])


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CheckLoraReport(Displayed):
    """An adapter checked: against a base alone, or against the model that is said to be the two.

    `tensors` are those that the adapter changes, `others` those that differ from the base though it does not;
    `unchanged_tensors` counts the rest. `is_applied` is None where nothing can be told; without a model it says whether
    `apply_lora` would apply all of the adapter.
    """

    COMPUTED: ClassVar = ("is_applied", "verdict")

    @property
    @told("verdict")
    def verdict(self) -> str:
        """The answer in one line."""
        counts = Counter(tensor.verdict for tensor in self.tensors)
        total = len(self.tensors)
        best = Verdict.FITS if self.model is None else Verdict.APPLIED
        if self.model is None and not self.is_applied:
            return f"{'does not fit' if len(counts) > 1 else 'nothing to apply'}: {_counts_text(counts)}"
        if self.is_applied is None:
            return f"cannot be told: {_counts_text(counts)}"
        if self.is_applied:
            rest = Counter({verdict: count for verdict, count in counts.items() if verdict != best})
            more = f"; {_counts_text(rest)}" if rest else ""
            return f"{best}: {counts[best]} of {plural(total, 'tensor')}{more}"
        n_others = len(self._differing)
        others = f"; {plural(n_others, 'tensor')} beside them {_do(n_others)} not equal the base"
        if n_others > self.unchanged_tensors:
            return f"made of another base: {_counts_text(counts)}{others}"
        is_absent = not n_others and counts.keys() <= {Verdict.ABSENT, *_TOLD_BY_NOTHING}
        name = "not applied" if is_absent else "not as the adapter says"
        return f"{name}: {_counts_text(counts)}{others if n_others else ''}"

    base: Location = shown("base")
    adapter: Location = shown("adapter")
    model: Location | None = shown("model")
    trained_on: str = shown("trained on")
    tensors: tuple[CheckedTensor, ...]
    others: tuple[CheckedTensor, ...]
    unchanged_tensors: int = shown("beside them", lambda report: report.beside_text)
    extra_tensors: tuple[str, ...] = shown("not in the base", lambda r: shorten_names(r.extra_tensors), once=True)
    read_bytes: int = shown("read")
    seconds: float = shown("time")
    notices: tuple[str, ...] = shown("notice")

    @property
    @told()
    def kinds(self) -> tuple[CheckedKind, ...]:
        """The tensors by kind and verdict; those that the adapter does not change come last."""
        groups: dict[tuple[str, Verdict], list[CheckedTensor]] = {}
        for tensor in (*self.tensors, *self.others):
            groups.setdefault((tensor.kind, tensor.verdict), []).append(tensor)
        return tuple(CheckedKind.of(kind, verdict, tensors) for (kind, verdict), tensors in groups.items())

    @property
    def _differing(self) -> list[CheckedTensor]:
        """The tensors that the adapter does not change, and that are known not to be the base's."""
        return [tensor for tensor in self.others if tensor.verdict not in _TOLD_BY_NOTHING]

    @property
    def beside_text(self) -> str:
        """How many tensors the adapter leaves alone are as in the base; empty without a model."""
        if self.model is None:
            return ""
        return (
            f"{self.unchanged_tensors} of {plural(self.unchanged_tensors + len(self.others), 'tensor')} as in the base"
        )

    @property
    def is_applied(self) -> bool | None:
        """Whether all that can be told is as it should be; None where nothing can be told."""
        best = Verdict.FITS if self.model is None else Verdict.APPLIED
        verdicts = {tensor.verdict for tensor in self.tensors}
        if self.model is None and Verdict.NO_MODULE in verdicts and Verdict.NOT_FINITE not in verdicts:
            return None
        if self._differing or not verdicts <= {best, *_TOLD_BY_NOTHING}:
            return False
        return True if best in verdicts else None


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _counts_text(counts: Counter[Verdict]) -> str:
    """Write verdicts with their numbers: `28 applied, 28 not applied`."""
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ConvertLoraReport(Displayed):
    """An adapter in another form. `modules` have the names of that form.

    `folded_exactly` are modules whose scale went into the factor B without a change of its dtype, `folded_in_float32`
    those whose B is float32 for it.
    """

    adapter: str
    read_form: str = shown("from")
    form: str = shown("to")
    modules: tuple[str, ...] = shown("adapted", lambda report: report.adapted_text, once=True)
    ranks: tuple[int, ...]
    saved_modules: tuple[str, ...] = shown("saved in full", "{saved_modules}", once=True)
    folded_exactly: tuple[str, ...] = shown("scale in B", lambda report: report.folded_text, once=True)
    folded_in_float32: tuple[str, ...]
    read_bytes: int = shown("read", default=0)
    seconds: float = shown("time", default=0.0)
    adapter_bytes: int = shown("written")
    sid: str = shown("snapshot", default="")
    notices: tuple[str, ...] = shown("notice", default=())
    out: Path | Location = shown("output")

    @property
    def adapted_text(self) -> str:
        """How many modules the adapter has, and their least and largest rank."""
        span = " to ".join(map(str, dict.fromkeys((self.ranks[0], self.ranks[-1])))) if self.ranks else "-"
        return f"{plural(len(self.modules), 'module')} of rank {span}"

    @property
    def folded_text(self) -> str:
        """Of how many modules the scale is part of a factor, and in which dtype; empty of none."""
        texts = []
        if self.folded_exactly:
            texts.append(f"exactly, in the dtype of B, of {plural(len(self.folded_exactly), 'module')}")
        if self.folded_in_float32:
            texts.append(f"in float32 of {plural(len(self.folded_in_float32), 'module')}")
        return "; ".join(texts)


# --- explanations ---


def levels_text(levels: Sequence[tuple[str, int]]) -> str:
    """Shares of the blocks that are read: `largest exactly 40 %, whole 60 %`; empty where all are read whole."""
    total = sum(count for _, count in levels)
    is_whole = all(name == WHOLE for name, _ in levels)
    return "" if is_whole else ", ".join(f"{name} {format_percent(count / total)}" for name, count in levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare(Displayed):
    """The share of one expert in a merge, in blocks of the merged tensors, and its bytes: of everything, planned, read.

    `free` blocks equal the base's and are known without reading, `omitted` ones are not in the merge. Bytes are None
    where nothing planned or nothing read them. Of those read `in_part` are at a level of their store below the last;
    `levels` are blocks by the form in which they are read.
    """

    model: str = shown("expert")
    path: str
    read: int = shown("read", lambda expert: expert.share_of(expert.read))
    free: int = shown("equals base", lambda expert: expert.share_of(expert.free))
    omitted: int = shown("omitted", lambda expert: expert.share_of(expert.omitted))
    full_bytes: int | None
    planned_bytes: int | None = shown("planned", lambda expert: expert.planned_text)
    realized_bytes: int | None = shown("realized")
    in_part: int = 0
    levels: tuple[tuple[str, int], ...] = shown("levels", lambda expert: levels_text(expert.levels), default=())

    @property
    def planned_text(self) -> str:
        """The planned bytes, and their share of all that reading it in full costs."""
        if self.planned_bytes is None or self.full_bytes is None:
            return ""
        return f"{format_bytes(self.planned_bytes)}, {share_text(self.planned_bytes, self.full_bytes)}"

    def share_of(self, n_blocks: int) -> str:
        """A number of blocks as a share of all that the expert has."""
        return share_text(n_blocks, self.read + self.free + self.omitted)


@dataclass(frozen=True, slots=True, repr=False)
class ExpertMask(Displayed):
    """A written mask: the share of bits that are set, and the norm of what is lost of the expert's delta, as a share.

    That is at the best `scale` of the masked delta, the `value` of a recipe that restores the expert.
    """

    model: str = shown("mask of")
    file: str = shown("file")
    set_fraction: float = shown("set", lambda mask: format_percent(mask.set_fraction))
    scale: float = shown("scale")
    lost_fraction: float = shown("lost", lambda mask: format_percent(mask.lost_fraction))


@dataclass(frozen=True, slots=True)
class LayerShare:
    """Blocks of one layer, those that some expert touched, and per expert those it takes part in.

    `layer` is the first number in the tensors' names, empty for tensors outside of layers. `levels` are blocks of all
    experts by the form in which they are read.
    """

    layer: str
    blocks: int
    touched: int
    taking_part: tuple[int, ...]
    levels: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What the deltas of two experts have in common in one layer (`layer` as in `LayerShare`), from statistics alone.

    On record are the `norms` of both, and how many elements each of them has `changed`. The `cosine` is estimated from
    16 random projections of each block, with the standard error `cosine_error`. How many elements `both` change is what
    it would be if the changes in a block were independent; for certain it is from `both_least` to `both_most`.
    """

    first: str
    second: str
    layer: str
    norms: tuple[float, float]
    cosine: float
    cosine_error: float
    changed: tuple[int, int]
    both: float
    both_least: int
    both_most: int

    @property
    def same_sign(self) -> float:
        """The share of elements with one sign that Gaussian deltas of this cosine have: `1/2 + arcsin(c) / pi`."""
        return 0.5 + asin(self.cosine) / pi

    def shared(self, both: float) -> float:
        """Return `both` as a share of the elements that one of the experts changes at least; 0 where none is."""
        return both / max(sum(self.changed) - both, 1.0)

    def __str__(self) -> str:
        share, least, most = (format_percent(self.shared(n)) for n in (self.both, self.both_least, self.both_most))
        cosine = f"cosine {round(self.cosine, 2) + 0.0:.2f} ± {self.cosine_error:.2f}"
        return f"{cosine}, same sign {format_percent(self.same_sign)}, changed by both {share} ({least} to {most})"

    @classmethod
    def over(cls, parts: Sequence[Overlap]) -> Overlap:
        """Return the overlap of several layers together."""
        first = [part.norms[0] for part in parts]
        second = [part.norms[1] for part in parts]
        norms = hypot(*first), hypot(*second)
        share_P = [a * b / (norms[0] * norms[1] or 1.0) for a, b in zip(first, second, strict=True)]
        return replace(
            parts[0], layer="", norms=norms,
            cosine=max(-1.0, min(1.0, sum(share * part.cosine for share, part in zip(share_P, parts, strict=True)))),
            cosine_error=hypot(*(share * part.cosine_error for share, part in zip(share_P, parts, strict=True))),
            changed=(sum(part.changed[0] for part in parts), sum(part.changed[1] for part in parts)),
            both=sum(part.both for part in parts), both_least=sum(part.both_least for part in parts),
            both_most=sum(part.both_most for part in parts),
        )  # fmt: skip


def overlap_table(overlaps: Sequence[Overlap]) -> Table | None:
    """Three rows for each two experts, a column for neighbouring layers; None where nothing is known."""
    groups = _layer_groups(part.layer for part in overlaps)
    rows: list[tuple[str, ...]] = []
    for pair in dict.fromkeys((part.first, part.second) for part in overlaps):
        parts = [part for part in overlaps if (part.first, part.second) == pair]
        cells: list[Overlap | None] = [Overlap.over(parts)]
        for group in groups.values():
            of_group = [part for part in parts if part.layer in group]
            cells.append(Overlap.over(of_group) if of_group else None)
        rows += [
            (f"{', '.join(pair)}: cosine", *("-" if x is None else f"{round(x.cosine, 2) + 0.0:.2f}" for x in cells)),
            ("  standard error", *("-" if x is None else f"{x.cosine_error:.2f}" for x in cells)),
            ("  same sign, estimated", *("-" if x is None else format_percent(x.same_sign) for x in cells)),
            ("  changed by both, est.", *("-" if x is None else format_percent(x.shared(x.both)) for x in cells)),
        ]
    return Table(("overlap in layers", "all", *groups), tuple(rows)) if rows else None


@dataclass(frozen=True, slots=True)
class BlockUse(Displayed):
    """Runs of blocks (`0-3,7`) of one tensor that one expert is used in alike, and why."""

    model: str = shown("expert")
    use: str = shown("use")
    blocks: str = shown("blocks", lambda use: _shortened(use.blocks))
    reason: str = shown("why")


@dataclass(frozen=True, slots=True)
class TensorUse(Displayed):
    """One merged tensor: its blocks, the runs that some expert touched, and what every expert does in it."""

    name: str = shown("tensor")
    blocks: int = shown("blocks")
    touched: str = shown("touched", lambda tensor: _shortened(tensor.touched))
    uses: tuple[BlockUse, ...] = shown()


def _shortened(runs: str) -> str:
    return runs if len(runs) <= _MOST_RUN_CHARACTERS else f"{runs[: _MOST_RUN_CHARACTERS - 3]}..."


@dataclass(frozen=True, slots=True)
class Fallback:
    """A decision of a plan that deviates from the request: what it is about, what was decided, and why."""

    where: str
    decision: str
    reason: str


def grouped_choices(choices: Iterable[Fallback]) -> list[str]:
    """Return one line for all that differ in names and numbers only."""
    groups: dict[tuple[str, str], list[Fallback]] = {}
    for choice in choices:
        alike = _NUMBER.sub("#", choice.decision.partition(" '")[0]), _NUMBER.sub("#", choice.reason)
        groups.setdefault(alike, []).append(choice)
    lines: list[str] = []
    n_more = 0
    for group in groups.values():
        if len(lines) == _MOST_CHOICES:
            n_more += len(group)
            continue
        names = first_names([choice.where for choice in group], 4)
        lines.append(f"{names}: {group[0].decision} ({group[0].reason})")
    return [*lines, f"and {n_more} more: see the plan"] if n_more else lines


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a plan samples: units of elements, the seed, and the probabilities of the tensors' positions.

    The merged delta of each tensor is divided by its probability. The least and the most are those of tensors of which
    anything was drawn, `mean_probability` is that of an element of any, and `importance` the file that probabilities
    follow, if one was given.
    """

    unit_elements: int
    seed: int
    least_probability: float
    mean_probability: float
    most_probability: float
    importance: str = ""

    def __str__(self) -> str:
        least, mean, most = self.least_probability, self.mean_probability, self.most_probability
        units = f"units of {self.unit_elements} elements, drawn with probability {least:.3g} to {most:.3g}"
        by = f", by the importance in {self.importance}" if self.importance else ""
        factor = f" by {1 / most:.3g} to {1 / least:.3g}" if least > 0 else ""
        return f"{units} ({mean:.3g} over all tensors){by}, seed {self.seed}; merged deltas are multiplied{factor}"


@dataclass(frozen=True, slots=True)
class OmissionBound:
    """Upper bounds on the distance from the full merge, before rounding: of a plan, and of one that reads nothing.

    `drifts`: the weights of what is read are divided by their own sum.
    """

    distance: float
    nothing_read: float
    drifts: bool = False

    def __post_init__(self) -> None:
        if not (self.distance >= 0 and self.nothing_read >= 0):
            raise ValueError(f"not two distances: {self.distance} and {self.nothing_read}")

    @property
    def is_worse_than_the_base(self) -> bool:
        """Whether the plan's bound exceeds that of reading nothing, which only weights that are divided anew do."""
        return self.distance > self.nothing_read

    def __str__(self) -> str:
        percent = share_text(self.distance, self.nothing_read) if self.nothing_read else "100 %"
        text = f"at most {self.distance:.4g} from the full merge, {percent} of the bound of reading nothing"
        if not self.drifts:
            return f"{text} (omission bound, Proposition 2)"
        worse = ": worse than the base" if self.is_worse_than_the_base else ""
        return f"{text}{worse} (coefficient drift, equations 16 to 18)"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Explanation(Displayed):
    """The experts that contributed to each tensor, and the reasons; from a plan, or from the manifest of a snapshot.

    What only a plan or only a snapshot has is None in the other. A full merge has no plan: every expert is everywhere.
    Blocks that no expert touched hold the base's values, scaled where the operator scales the base. `advice` names the
    command that would make a plan exact.
    """

    verdict: BudgetVerdict | None = shown(default=None)
    kind: str = shown("{kind}", lambda r: str(r.path) if r.path != Path() else "not stored")
    path: Path | Location
    sid: str | None = shown("sid")
    plan_digest: str | None = shown("plan digest")
    summary: str = shown("is", default="")
    operator: str = shown("operator", lambda explanation: "" if explanation.summary else explanation.operator)
    policy: str | None = shown("policy", "{policy}, where omitted: {on_omit}")
    on_omit: str | None
    seed: int = shown(
        "plan",
        lambda r: "none: a full merge, all experts are read in full" if r.policy is None and not r.summary else "",
    )
    full_bytes: int | None
    budget_bytes: int | None = shown("budget", lambda r: _of_everything(r.budget_bytes, r.full_bytes))
    planned_bytes: int | None = shown("planned", lambda r: _of_everything(r.planned_bytes, r.full_bytes))
    sampling: Sampling | None = shown("sample", default=None)
    bound: OmissionBound | None = shown("bound", default=None)
    realized_bytes: int | None = shown("realized")
    block_elements: int
    blocks: int
    touched: int = shown(
        "touched", "{touched} of {blocks:block} contain changes of an expert; the others equal the base"
    )
    experts: tuple[ExpertShare, ...] = shown()
    layers: tuple[LayerShare, ...]

    @property
    @told()
    def layer_table(self) -> Table | None:
        """The share of each expert by layer: blocks read, or equal to the base's."""
        names = _layer_groups(layer.layer for layer in self.layers)
        labels = ("touched", *(expert.model for expert in self.experts))
        columns = []  # one for each group of layers
        for group in names.values():
            layers = [layer for layer in self.layers if layer.layer in group]
            blocks = sum(layer.blocks for layer in layers)
            counts = [layer.touched for layer in layers], *zip(*(layer.taking_part for layer in layers), strict=True)
            columns.append([share_text(sum(of_row), blocks) for of_row in counts])
        rows = zip(labels, *columns, strict=True)
        return Table(("in layers", *names), tuple(rows))

    overlaps: tuple[Overlap, ...] = ()

    @property
    @told()
    def overlap_table(self) -> Table | None:
        """What experts have in common, by layer."""
        return overlap_table(self.overlaps)

    fallbacks: tuple[Fallback, ...] = shown("fallback", lambda r: grouped_choices(r.fallbacks), once=True)
    adjustments: tuple[Fallback, ...] = shown("adjusted", lambda r: grouped_choices(r.adjustments), once=True)
    recipe_notices: tuple[Notice, ...] = shown("{kind}", str, default=())
    advice: tuple[str, ...] = shown("advice", default=())
    tensors: tuple[TensorUse, ...] = shown()
    masks: tuple[ExpertMask, ...] = shown(default=())


def _layer_groups(layers: Iterable[str]) -> dict[str, list[str]]:
    """Group neighbouring layers by a name, so that there are few columns; what lies outside of layers comes last."""
    distinct = dict.fromkeys(layers)
    numbered = [layer for layer in distinct if layer]
    size = max(1, -(-len(numbered) // _MOST_LAYER_GROUPS))
    groups = [numbered[i : i + size] for i in range(0, len(numbered), size)]
    named = {"-".join(dict.fromkeys((group[0], group[-1]))): group for group in groups}
    return {**named, "others": [""]} if "" in distinct else named


def _of_everything(nbytes: int, full_bytes: int) -> str:
    return f"{format_bytes(nbytes)}, {share_text(nbytes, full_bytes)} of {format_bytes(full_bytes)}"


# --- sweeps ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint(Displayed):
    """One merge under a budget, compared with the full merge M.

    `error` is `||M_A - M|| / ||M - M_0||`, `flattering_error` is `||M_A - M|| / ||M||`; None where the divisor is 0.
    `expert_bytes` is everything requested of expert files but headers, and `share` that of what the full merge
    requested; `seconds` includes planning. `levels` are blocks by the form in which they are read; `unread` names the
    experts of which nothing is read. `loss` is what the command of the sweep printed, if one was given. No error is
    measured of samples, which are right on average and far from the full merge in each draw.
    """

    budget: str = shown("budget")
    policy: str = shown("policy")
    budget_bytes: int
    planned_bytes: int
    expert_bytes: int = shown("read")
    share: float = shown("of all")
    seconds: float = shown("time")
    loss: float | None = shown("loss", default=None)
    error: float | None = shown("error")
    flattering_error: float | None = shown("of norm")
    levels: tuple[tuple[str, int], ...] = shown("levels", lambda point: levels_text(point.levels), default=())
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SweepReport(Displayed):
    """A recipe merged in full and under several budgets. Errors are taken from outputs, after their rounding.

    `changed_norm` is `||M - M_0||`, `full_norm` is `||M||`, over all tensors of floats; `full_loss` is that of the full
    merge.
    """

    recipe: Location
    policy: str = shown("verdict", lambda report: report.verdict)
    experts: tuple[str, ...] = shown("unread", lambda r: r.unread_lines, once=True, default=())
    operator: str = shown("operator")
    seed: int
    full_cost_bytes: int
    full_expert_bytes: int = shown("full merge", "{full_expert_bytes} read from experts, {full_seconds}")
    full_seconds: float
    changed_norm: float = shown("changes", lambda r: f"the full merge is {r.changed_norm:.3g} away from the base, "
                       f"{share_text(r.changed_norm, r.full_norm)} of its own norm")  # fmt: skip
    full_norm: float
    dtypes: tuple[str, ...] = shown("note", lambda report: report.error_note, once=True)
    recipe_notices: tuple[Notice, ...] = shown("{kind}", str, default=())
    points: tuple[SweepPoint, ...] = shown()
    full_loss: float | None = None

    @property
    def verdict(self) -> str:
        """The measure in one sentence: a loss by a command, or distances, which say little."""
        if self.full_loss is not None:
            return f"the loss of the full merge is {self.full_loss:.6g}; those under budgets are below"
        if self.policy == "sample":
            return (
                "a sample is right on average, but each draw is far from the full merge: measure a loss with --evaluate"
            )
        return "distances do not measure quality: measure a loss with --evaluate"

    @property
    def unread_lines(self) -> list[str]:
        """A line for each budget under which nothing is read of some expert, by the policy that was chosen."""
        points = (point for point in self.points if point.policy == self.policy and point.unread)
        return [f"{point.budget}: nothing from {first_names(point.unread, 4)} is in the merge" for point in points]

    @property
    def error_note(self) -> str:
        """A definition of errors; empty where none was measured."""
        if all(point.error is None for point in self.points):
            return ""
        shares = "errors are distances from the full merge, relative to the change that it makes and to its norm"
        return f"{shares}; they are measured on the outputs, after rounding to {', '.join(self.dtypes)}"


# --- searches ---


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search: values by their place in the recipe, and what the evaluation gave, rung by rung.

    `state` is complete, pruned (given up after a rung), fail or running. `losses` are those of the last rung, one for
    each objective. `expert_bytes` were read of experts for all rungs. Of several objectives a trial `is_best` if no
    other is better in all.
    """

    number: int
    state: str
    values: dict[str, float | str | bool | None]
    losses: tuple[float, ...]
    rungs: tuple[float, ...]
    expert_bytes: int
    seconds: float
    failure: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SearchReport(Displayed):
    """The trials of a search, and the snapshot of the best one's values."""

    trials: tuple[SearchTrial, ...] = shown(
        "trials", lambda r: ", ".join(f"{n} {x}" for x, n in Counter(x.state for x in r.trials).items()), once=True
    )
    best: int
    objectives: tuple[str, ...] = shown("failed", lambda report: report.failures, once=True)
    study: Path = shown("study")
    sid: str = shown("snapshot")
    out: Path = shown("output")

    @property
    def best_trial(self) -> SearchTrial:
        """The trial whose merge was published."""
        return next(trial for trial in self.trials if trial.number == self.best)

    @property
    def failures(self) -> list[str]:
        """A line for each trial that failed."""
        return [f"trial {trial.number}: {trial.failure}" for trial in self.trials if trial.failure]

    @property
    @told("experts read")
    def expert_bytes(self) -> int:
        """Bytes read of experts for all trials."""
        return sum(trial.expert_bytes for trial in self.trials)

    @property
    @told()
    def best_trials(self) -> Table:
        """The best trials, the one that was published first."""
        names = tuple(self.best_trial.values)
        sign = -1 if self.objectives[0].endswith(":max") else 1
        complete = [trial for trial in self.trials if trial.losses]
        complete.sort(key=lambda trial: (trial.number != self.best, not trial.is_best, sign * trial.losses[0]))
        rows = []
        for trial in complete[:_MOST_TRIALS]:
            numbers = (*trial.losses, *(trial.values[name] for name in names))
            shown_numbers = [text_of("loss", number) for number in numbers]
            rows.append((str(trial.number), *shown_numbers, text_of("seconds", trial.seconds)))
        return Table(("trial", *self.objectives, *names, "time"), tuple(rows))


# --- snapshots ---


_NOT_IN_CATALOG = "not in the catalog: `mergepipe catalog rebuild` adds it"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SnapshotReport(Displayed):
    """One published snapshot. `is_present` tells whether its manifest is still at `path`, `is_recorded` whether the
    catalog knows it. Of one in a bucket or repository nothing says when it was made. `version` and what follows are of
    its manifest: empty in a list, and where it is gone. `touched`: tensors that a list was asked for, with the blocks
    that experts contributed to."""

    sid: str = shown("snapshot")
    path: Path | Location = shown("path", lambda snapshot: snapshot.place)
    created: datetime | None = shown("made (UTC)")
    summary: str = shown("is", default="")
    operator: str = shown("operator")
    plan_digest: str | None = shown("plan")
    inputs: tuple[Input, ...] = shown(
        "{role}",
        lambda x: f"{x.model} ({format_bytes(x.read_bytes)} read)" + (f", snapshot {x.sid[:12]}" if x.sid else ""),
    )
    base_bytes: int = shown("read", "base {base_bytes}, experts {expert_bytes}")
    expert_bytes: int
    analysis_bytes: int
    output_bytes: int = shown("written")
    is_present: bool
    is_recorded: bool = shown("notice", lambda r: "" if r.is_recorded or r.created is None else _NOT_IN_CATALOG)
    version: str = shown("version", default="")
    seed: int | None = shown("seed", default=None)
    dtypes: tuple[str, ...] = shown("dtype", lambda r: ", ".join(r.dtypes), once=True, default=())
    notices: tuple[str, ...] = shown("notice", str, default=())
    recipe: str = shown(default="")
    touched: tuple[TensorUse, ...] = shown(default=())

    @property
    def place(self) -> str:
        """The path, and whether it is gone."""
        return str(self.path) if self.is_present else f"{self.path} (gone)"


@dataclass(frozen=True, slots=True)
class RemadeSnapshot:
    """A snapshot `sid` at `path` that is made again at `out`, as `new_sid` (None until then), and the bytes of that.

    Under a budget `expert_bytes` is what it may read of the experts.
    """

    sid: str
    path: Path
    out: Path
    base_bytes: int = 0
    expert_bytes: int = 0
    output_bytes: int = 0
    new_sid: str | None = None


@dataclass(frozen=True, slots=True)
class NotRemade:
    """A snapshot that holds a model and cannot be made again without it, and why."""

    sid: str
    path: Path
    reason: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WithoutReport(Displayed):
    """Snapshots made again without a model, parents first, and those that cannot be."""

    expert: str = shown("without")
    remade: tuple[RemadeSnapshot, ...]
    not_remade: tuple[NotRemade, ...] = ()
    is_dry_run: bool

    @property
    @told()
    def lines(self) -> list[Fact]:
        """A line for each snapshot, and the bytes of all."""
        verb = "would make" if self.is_dry_run else "made"
        lines = []
        for item in self.remade:
            bytes_read = f"base {format_bytes(item.base_bytes)}, experts {format_bytes(item.expert_bytes)}"
            lines.append(
                (verb, f"{item.out} from {item.path} (reads {bytes_read}; writes {format_bytes(item.output_bytes)})")
            )
        lines += [("cannot make", f"{item.path}: {item.reason}") for item in self.not_remade]
        lines.append(("reads", format_bytes(sum(item.base_bytes + item.expert_bytes for item in self.remade))))
        lines.append(("writes", format_bytes(sum(item.output_bytes for item in self.remade))))
        return lines


# --- verification, repair, garbage ---


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged range of a snapshot: in `file`, bytes `[start, stop)` of it, in `tensor` where it is one.

    `kind` is `missing`, `size`, `header`, `block`, `small-file`, `blocks-file`, `config`, `index` or `replay`, of a
    packed expert `pack`.
    """

    kind: str
    file: str
    tensor: str
    start: int
    stop: int
    message: str

    def __str__(self) -> str:
        place = f" bytes {self.start} to {self.stop - 1}" if self.stop > self.start else ""
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        return f"{self.file}{place}{tensor}: {self.message}"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class VerifyReport(Displayed):
    """A verified snapshot and its damage. `replayed` are tensors that were recomputed from the inputs and compared.

    A report is true if the snapshot is sound, so that `if verify(snapshot):` does what it says.
    Notices are about what is odd and was so when the snapshot was made, or does not belong to it.
    """

    COMPUTED: ClassVar = ("is_sound",)
    sid: str = shown("snapshot", "{sid} {path}")
    path: Path | Location
    read_bytes: int = shown("read")
    seconds: float = shown("time")

    @property
    @told("speed")
    def bytes_per_second(self) -> float:
        """Bytes read per second."""
        return self.read_bytes / max(self.seconds, 1e-9)

    files: int = shown("checked", lambda report: report.checked)
    tensors: int
    blocks: int
    replayed: tuple[str, ...] = shown("recomputed", "{replayed:tensor}, {replayed_bytes}", once=True, default=())
    replayed_bytes: int = 0
    notices: tuple[str, ...] = shown("notice")
    damages: tuple[Damage, ...] = shown("damaged")

    @property
    @told("result")
    def result(self) -> str:
        """Whether the snapshot is sound."""
        return "sound" if self.is_sound else f"DAMAGED in {plural(len(self.damages), 'place')}"

    @property
    def checked(self) -> str:
        """The number of blocks, or of a composite of whole files, that were compared."""
        files = plural(self.files, "file")
        blocks = f"{plural(self.blocks, 'block')} of {plural(self.tensors, 'tensor')} in {files}"
        return blocks if self.tensors else f"{files}, every byte"

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages

    def __bool__(self) -> bool:
        return self.is_sound


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RepairReport(Displayed):
    """A repaired snapshot: all of its damage is repaired, or an error would have been raised."""

    sid: str = shown("snapshot", "{sid} {path}")
    path: Path
    repaired: tuple[Damage, ...] = shown("repaired")
    rebuilt_tensors: tuple[str, ...] = shown("recomputed", "{rebuilt_tensors:tensor}", once=True)
    written_bytes: int = shown("written", optional=True)
    seconds: float = shown("result", lambda r: "sound" if r.repaired else "sound: nothing to repair")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PushReport(Displayed):
    """The result of a push. `commit` is that of the Hub; `kept_bytes` were in the bucket already."""

    snapshot: Path
    destination: Location = shown("output")
    sid: str = shown("snapshot", "{sid} {snapshot}")
    files: int = shown("pushed", "{files:file}, {total_bytes}")
    total_bytes: int
    kept_bytes: int = shown("already there", optional=True)
    commit: str = shown("commit")
    seconds: float = shown("time")


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that nobody needs, removed or not: `kind` says what it was."""

    kind: str
    what: str
    reason: str
    nbytes: int
    is_removed: bool


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class GcReport(Displayed):
    """Garbage that was collected, and staging that was kept because its process lives."""

    garbage: tuple[Garbage, ...]
    living: tuple[str, ...] = shown("living")
    is_dry_run: bool

    @property
    @told()
    def lines(self) -> list[Fact]:
        """A line for each piece of garbage: whether it was removed, and its bytes."""
        verb = "would remove" if self.is_dry_run else "removed"
        return [
            *(
                (verb if item.is_removed or self.is_dry_run else "could not remove",
                 f"{item.kind} {item.what} ({item.reason}{', ' + format_bytes(item.nbytes) if item.nbytes else ''})")
                for item in self.garbage
            ),
            ("would free" if self.is_dry_run else "freed", format_bytes(self.freed_bytes)),
        ]  # fmt: skip

    @property
    def freed_bytes(self) -> int:
        """Bytes given back, or that would be."""
        return sum(item.nbytes for item in self.garbage if item.is_removed or self.is_dry_run)


@dataclass(frozen=True, slots=True)
class TensorChange(Displayed):
    """A tensor that differs: `||A - B||`, and that over `||A||`; None where the shapes differ or nothing was read."""

    name: str = shown("tensor")
    kind: str = shown("what differs")
    norm: float | None = shown("||a - b||")
    relative: float | None = shown("/ ||a||")


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class SnapshotDiff(Displayed):
    """The differences of two snapshots. `settings` and `inputs` are a line each; `recipe` is a diff."""

    a_sid: str = shown("a", "{a_sid} {a}")
    b_sid: str = shown("b", "{b_sid} {b}")
    a: Path | Location
    b: Path | Location
    settings: tuple[str, ...] = shown("setting")
    inputs: tuple[str, ...] = shown("input")
    tensors: tuple[TensorChange, ...]
    equal_tensors: int = shown("tensors", lambda r: f"{r.equal_tensors} equal, {len(r.tensors)} different")
    norm: float | None = shown("||a - b||")
    recipe: str = shown()

    @property
    @told()
    def largest_changes(self) -> tuple[TensorChange, ...]:
        """The tensors that changed most."""
        return tuple(sorted(self.tensors, key=lambda change: -(change.norm or 0.0))[:_MOST_CHANGES])

    @property
    @told()
    def left_out(self) -> str:
        """The number of rows that are not shown; empty where all are."""
        n_more = len(self.tensors) - _MOST_CHANGES
        if n_more <= 0:
            return ""
        return f"{plural(n_more, 'more tensor')} with smaller differences: `mergepipe diff --json` lists all"
