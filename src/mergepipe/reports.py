"""The values that calls return: frozen reports of checks, merges and other jobs, and progress reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mergepipe.core.notebooks import Displayed
from mergepipe.storage.contract import Traffic
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from mergepipe.core.notices import DroppedTensor, Notice
    from mergepipe.snapshots.manifest import Input, LeftOutFile


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


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One input of a merge and the bytes of its tensors that are read."""

    role: str
    model: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Displayed):
    """A recipe checked: models, tensors, sizes. Bytes are those of tensors; `disk_bytes` is what the output needs."""

    recipe: str
    operator: str
    models: tuple[ModelUse, ...]
    merged_tensors: int
    copied: tuple[tuple[str, str], ...]
    dropped: tuple[DroppedTensor, ...]
    base_bytes: int
    expert_bytes: int
    output_bytes: int
    disk_bytes: int
    shards: int
    recipe_notices: tuple[Notice, ...] = ()  # what has no effect in the recipe, or another one than it asks for


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """The share of the blocks that an expert changes that is in a merge, `rough` of them at a lower level of its pack.

    Blocks that are known to equal the base are no part of it; the share of an expert that changes nothing is 1.
    """

    model: str
    share: float
    rough: float = 0.0


@dataclass(frozen=True, slots=True)
class BudgetVerdict:
    """What a budgeted merge reads: `planned_bytes` of the `full_bytes` that reading everything costs, by `policy`.

    `experts` begin with those of which least is in the merge; `unread` names those of which nothing is read. Of a
    budget `unspent_bytes` are left for `unspent_reason`, if that is a good part of it. What merges of this kind kept
    of a gain was `measured` on that page; nothing is said of this one.
    """

    policy: str
    is_full: bool
    planned_bytes: int
    full_bytes: int
    experts: tuple[ExpertCoverage, ...]
    unread: tuple[str, ...]
    measured: str
    unspent_bytes: int = 0
    unspent_reason: str = ""


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


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """What became of an adapter's modules; `left_over` are names that its base lacks, which were allowed to be.

    `trained_on` is the model that its configuration names, which may be a quantised form of the base; empty without.
    """

    model: str
    adapted_modules: int
    applied_modules: int
    saved_modules: int
    left_over: tuple[str, ...] = ()
    trained_on: str = ""


@dataclass(frozen=True, slots=True)
class TriedBudget:
    """A budget of a merge with a target loss, the bytes that were read of experts for it, and the loss it gave."""

    budget: str
    expert_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, repr=False)
class MergeReport(Displayed):
    """A finished merge. Bytes are those requested from storage, page rounding included."""

    COMPUTED: ClassVar = ("read_bytes", "bytes_per_second")  # also told as JSON

    out: Path | Location
    sid: str
    operator: str
    merged_tensors: int
    copied_tensors: int
    dropped_tensors: int
    base_bytes: int
    expert_bytes: int
    analysis_bytes: int
    metadata_bytes: int
    output_bytes: int
    seconds: float
    peak_rss_bytes: int
    planned_bytes: int | None = None
    budget_bytes: int | None = None
    notices: tuple[str, ...] = ()
    earlier_expert_bytes: int = 0  # of `expert_bytes`: what earlier runs for this output may have read
    verdict: BudgetVerdict | None = None  # of a merge under a budget
    recipe_notices: tuple[Notice, ...] = ()  # what has no effect in the recipe, or another one than it asks for
    traffic: Traffic = field(default_factory=Traffic)  # requests for remote files, and their bytes by host
    left_out: tuple[LeftOutFile, ...] = ()  # files of the base's directory that are not copied, with the reasons
    tried: tuple[TriedBudget, ...] = ()  # of a merge with a target loss, the one that met it last
    kept: tuple[KeptShare, ...] = ()  # of each expert that was trimmed; of merges in full, not of those under a budget
    adapters: tuple[AppliedAdapter, ...] = ()

    @property
    def read_bytes(self) -> int:
        """All bytes read."""
        return self.base_bytes + self.expert_bytes + self.analysis_bytes + self.metadata_bytes

    @property
    def bytes_per_second(self) -> float:
        """Bytes read and written per second."""
        return (self.read_bytes + self.output_bytes) / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True, repr=False)
class PartReport(Displayed):
    """The result of making a part of an output. Bytes are those that this run requested.

    `made_shards` were made now, `found_shards` of the part were done before. With a `merge` this run has finished the
    output; `is_published` if the output is there, whoever finished it.
    """

    out: Path | Location
    part: str
    made_shards: tuple[str, ...]
    found_shards: tuple[str, ...]
    done_shards: int  # of the whole output
    n_shards: int
    base_bytes: int
    expert_bytes: int
    output_bytes: int
    seconds: float
    is_published: bool
    merge: MergeReport | None = None


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of an output that is made in parts: `done`, `reading` (its worker may live), `interrupted`, `open`."""

    name: str
    size_bytes: int
    state: str
    part: str = ""  # for which it was begun last
    worker: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class PartsStatus(Displayed):
    """The state of an output that is made in parts. `missing_parts` of `n_parts` have shards that are not done.

    Expert bytes: `read_bytes` were or may have been read up to now, `limit_bytes` is the budget (None: unlimited).
    """

    out: Path | Location
    is_published: bool
    shards: tuple[ShardStatus, ...]
    read_bytes: int
    planned_bytes: int
    limit_bytes: int | None
    n_parts: int | None = None
    missing_parts: tuple[int, ...] = ()

    @property
    def done_shards(self) -> int:
        """The number of shards that are done."""
        return sum(shard.state == "done" for shard in self.shards)


@dataclass(frozen=True, slots=True)
class AnalyzedExpert:
    """One expert of an analysis: tensors read now, tensors that can be compared, and those that cannot.

    `statistics` is the file that holds what is known of it; None where nothing can be compared. `packed_bytes` is about
    what a pack of it on the base would take, if it was read now.
    """

    model: str
    analyzed_tensors: int
    comparable_tensors: int
    incomparable: tuple[str, ...]
    statistics: Path | None = None
    packed_bytes: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class AnalyzeReport(Displayed):
    """A finished analysis. `analysis_bytes` were read a second time, for want of memory, or for digests."""

    base: Location
    experts: tuple[AnalyzedExpert, ...]
    home: Path
    base_bytes: int
    expert_bytes: int
    analysis_bytes: int
    seconds: float
    notices: tuple[str, ...] = ()  # files of statistics that were damaged, and are made again


# --- delta stores ---


DOUBTFUL_DELTA = 0.5
"""From here on most of what a delta saves is gone: usual fine-tunes stay below 0.2."""


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


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert as packed: its tensors' bytes, its store's bytes, blocks by codec, and why some are not in bands.

    `is_new`: it was not there yet. `resumed_bytes` of its tensors were packed by an interrupted run. `seconds` is its
    share, by bytes, of the time of all that were packed in one pass.
    """

    expert: Location
    store: Path | Location
    tensor_bytes: int
    store_bytes: int
    blocks: Mapping[str, int]
    outside_bands: Mapping[str, int]
    seconds: float
    is_new: bool
    resumed_bytes: int = 0
    match: BaseMatch | None = None  # how near its base is

    @property
    def folder(self) -> Path:
        """The store as a folder of this machine. RecipeError: `location.invalid`, it lies in a bucket."""
        return Location.of(self.store).local_path

    @property
    def share(self) -> float:
        """The store's bytes as a share of the tensors' bytes."""
        return self.store_bytes / self.tensor_bytes if self.tensor_bytes else 1.0


@dataclass(frozen=True, slots=True, repr=False)
class PackReport(Displayed):
    """Packed experts, and the bytes requested of the tensors of base and experts. `base` is the first candidate."""

    base: Location | None
    experts: tuple[PackedExpert, ...]
    base_bytes: int
    expert_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class UnpackReport(Displayed):
    """An expert restored from its store."""

    store: Location
    base: Location | None
    out: Path
    tensor_bytes: int
    seconds: float


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


@dataclass(frozen=True, slots=True, repr=False)
class ExtractLoraReport(Displayed):
    """A finished extraction. `relative_error` is what the adapter leaves of the whole difference, `left` included."""

    base: Location
    model: Location
    out: Path
    base_model_id: str | None
    tensors: tuple[ExtractedTensor, ...]
    saved_modules: tuple[str, ...]
    left: tuple[NotExtracted, ...]
    relative_error: float
    adapter_bytes: int
    base_bytes: int = 0
    model_bytes: int = 0
    seconds: float = 0.0

    def finished(self, base_bytes: int, model_bytes: int, seconds: float) -> ExtractLoraReport:
        """Return the report with the bytes that were read, and the time."""
        return replace(self, base_bytes=base_bytes, model_bytes=model_bytes, seconds=seconds)


@dataclass(frozen=True, slots=True)
class MergedModule:
    """A module of a merged adapter: its rank, and the share of the square sum of the merged delta that it keeps."""

    module: str
    rank: int
    kept_energy: float


@dataclass(frozen=True, slots=True, repr=False)
class MergeLoraReport(Displayed):
    """Adapters merged into one. `kept_energy` is the share of the square sum of all merged deltas."""

    adapters: tuple[str, ...]
    out: Path
    method: str
    modules: tuple[MergedModule, ...]
    saved_modules: tuple[str, ...]
    kept_energy: float
    adapter_bytes: int
    read_bytes: int
    seconds: float


# --- explanations ---


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The share of one expert in a merge, in blocks of the merged tensors, and its bytes: of everything, planned, read.

    `free` blocks equal the base's and are known without reading, `omitted` ones are not in the merge. Bytes are None
    where nothing planned or nothing read them. Of those read `in_part` are at a level of their store below the last;
    `levels` are blocks by the form in which they are read.
    """

    model: str
    path: str
    read: int
    free: int
    omitted: int
    full_bytes: int | None
    planned_bytes: int | None
    realized_bytes: int | None
    in_part: int = 0
    levels: tuple[tuple[str, int], ...] = ()


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


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Runs of blocks (`0-3,7`) of one tensor that one expert is used in alike, and why."""

    model: str
    use: str
    blocks: str
    reason: str


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One merged tensor: its blocks, the runs that some expert touched, and what every expert does in it."""

    name: str
    blocks: int
    touched: str
    uses: tuple[BlockUse, ...]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A decision of a plan that deviates from the request: what it is about, what was decided, and why."""

    where: str
    decision: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a plan samples: units of elements, the seed, and the probabilities of the tensors' positions.

    The merged delta of each tensor is divided by its probability. `mean_probability` is that of an element.
    """

    unit_elements: int
    seed: int
    least_probability: float
    mean_probability: float
    most_probability: float
    importance: str = ""  # the file that the probabilities follow, if one was given


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Displayed):
    """The experts that contributed to each tensor, and the reasons; from a plan, or from the manifest of a snapshot.

    What only a plan or only a snapshot has is None in the other. A full merge has no plan: every expert is everywhere.
    Blocks that no expert touched hold the base's values, scaled where the operator scales the base.
    """

    kind: str
    path: Path
    sid: str | None
    plan_digest: str | None
    operator: str
    policy: str | None
    on_omit: str | None
    seed: int
    budget_bytes: int | None
    planned_bytes: int | None
    full_bytes: int | None
    realized_bytes: int | None
    block_elements: int
    blocks: int
    touched: int
    experts: tuple[ExpertShare, ...]
    layers: tuple[LayerShare, ...]
    tensors: tuple[TensorUse, ...]
    fallbacks: tuple[Fallback, ...]
    adjustments: tuple[Fallback, ...]
    verdict: BudgetVerdict | None = None
    sampling: Sampling | None = None


# --- sweeps ---


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One merge under a budget, compared with the full merge M.

    `error` is `||M_A - M|| / ||M - M_0||`, `flattering_error` is `||M_A - M|| / ||M||`; None where the divisor is 0.
    `expert_bytes` is everything requested of expert files but headers; `seconds` includes planning. `levels` are blocks
    by the form in which they are read; `unread` names the experts of which nothing is read. `loss` is what the command
    of the sweep printed, if one was given. No error is measured of samples, which are right on average and far from the
    full merge in each draw.
    """

    budget: str
    policy: str
    budget_bytes: int
    planned_bytes: int
    expert_bytes: int
    seconds: float
    error: float | None
    flattering_error: float | None
    levels: tuple[tuple[str, int], ...] = ()
    unread: tuple[str, ...] = ()
    loss: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class SweepReport(Displayed):
    """A recipe merged in full and under several budgets. Errors are taken from outputs, after their rounding.

    `changed_norm` is `||M - M_0||`, `full_norm` is `||M||`, over all tensors of floats.
    """

    recipe: Location
    operator: str
    policy: str
    seed: int
    dtypes: tuple[str, ...]
    full_cost_bytes: int
    full_expert_bytes: int
    full_seconds: float
    changed_norm: float
    full_norm: float
    points: tuple[SweepPoint, ...]
    experts: tuple[str, ...] = ()
    recipe_notices: tuple[Notice, ...] = ()  # what has no effect in the recipe, or another one than it asks for
    full_loss: float | None = None  # of the full merge


# --- searches ---


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search: values by their place in the recipe, and what the evaluation gave, rung by rung.

    `state` is complete, pruned (given up after a rung), fail or running. `losses` are those of the last rung, one for
    each objective. `expert_bytes` were read of experts for all rungs.
    """

    number: int
    state: str
    values: dict[str, float | str | bool | None]
    losses: tuple[float, ...]
    rungs: tuple[float, ...]
    expert_bytes: int
    seconds: float
    failure: str = ""
    is_best: bool = False  # of several objectives: no other trial is better in all


@dataclass(frozen=True, slots=True, repr=False)
class SearchReport(Displayed):
    """The trials of a search, and the snapshot of the best one's values."""

    out: Path
    study: Path
    sid: str
    objectives: tuple[str, ...]
    best: int
    trials: tuple[SearchTrial, ...]

    @property
    def best_trial(self) -> SearchTrial:
        """The trial whose merge was published."""
        return next(trial for trial in self.trials if trial.number == self.best)


# --- snapshots ---


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotReport(Displayed):
    """One published snapshot. `is_present` tells whether its manifest is still at `path`, `is_recorded` whether the
    catalog knows it."""

    sid: str
    path: Path
    operator: str
    created: datetime
    plan_digest: str | None
    base_bytes: int
    expert_bytes: int
    analysis_bytes: int
    output_bytes: int
    inputs: tuple[Input, ...]
    is_present: bool
    is_recorded: bool


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


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Displayed):
    """A verified snapshot and its damage. `replayed` are tensors that were recomputed from the inputs and compared.

    Notices are about what is odd and was so when the snapshot was made, or does not belong to it.
    """

    path: Path | Location
    sid: str
    files: int
    tensors: int
    blocks: int
    read_bytes: int
    seconds: float
    damages: tuple[Damage, ...]
    notices: tuple[str, ...]
    replayed: tuple[str, ...] = ()
    replayed_bytes: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


@dataclass(frozen=True, slots=True, repr=False)
class RepairReport(Displayed):
    """A repaired snapshot: all of its damage is repaired, or an error would have been raised."""

    path: Path
    sid: str
    repaired: tuple[Damage, ...]
    rebuilt_tensors: tuple[str, ...]
    written_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class PushReport(Displayed):
    """The result of a push. `commit` is that of the Hub; `kept_bytes` were in the bucket already."""

    snapshot: Path
    destination: Location
    sid: str
    files: int
    total_bytes: int
    kept_bytes: int
    commit: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that nobody needs, removed or not: `kind` says what it was."""

    kind: str
    what: str
    reason: str
    nbytes: int
    is_removed: bool


@dataclass(frozen=True, slots=True, repr=False)
class GcReport(Displayed):
    """Garbage that was collected, and staging that was kept because its process lives."""

    garbage: tuple[Garbage, ...]
    living: tuple[str, ...]
    is_dry_run: bool

    @property
    def freed_bytes(self) -> int:
        """Bytes given back, or that would be."""
        return sum(item.nbytes for item in self.garbage if item.is_removed or self.is_dry_run)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs: `||A - B||`, and that over `||A||`; None where the shapes differ or nothing was read."""

    name: str
    kind: str
    norm: float | None
    relative: float | None


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotDiff(Displayed):
    """The differences of two snapshots. `settings` and `inputs` are a line each; `recipe` is a diff."""

    a: Path
    b: Path
    a_sid: str
    b_sid: str
    recipe: str
    settings: tuple[str, ...]
    inputs: tuple[str, ...]
    equal_tensors: int
    tensors: tuple[TensorChange, ...]
    norm: float | None
