"""The plan as a frozen, digested value: which blocks of which expert are read, with which parameters, at which cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import le, lt
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from mergepipe.core.display import Displayed, shown
from mergepipe.core.outcome import Notice
from mergepipe.core.records import AsText, RecordFormat, Seed, Size, encode
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import OutputError
from mergepipe.operators.statistics import Cut
from mergepipe.recipes.tasks import TensorParameters
from mergepipe.reports import Fallback, OmissionBound, Sampling
from mergepipe.storage.contract import FileId
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import replace_durably
from mergepipe.storage.output_places import output_place
from mergepipe.storage.ranges import os_error, read_head

Runs: TypeAlias = tuple[tuple[int, int], ...]
LeveledRuns: TypeAlias = tuple[tuple[int, int, int], ...]

NOTHING_READ = "nothing of it is read"
"""The decision of the notices about experts that a plan leaves out."""

UNSPENT = "are left unspent"
"""The end of the decision of the notice about a budget of which a good part is not used."""

READS_ALL = "all"
"""The policy of a plan that reads everything, and that no budget limits."""

SAMPLES = "sample"
"""The policy of a plan that reads a sample of block positions."""

ALL = 126
"""The level of what is read as it is: above every level of a store."""

_LARGEST_BITS = 2**32 - 1
_LONGEST_INDEX = 18  # digits
_HEAD_BYTES = 400


# --- runs of blocks as text ---


def format_runs(runs: Runs) -> str:
    """Format half-open runs with the last block included: `((0, 4), (7, 8))` is `0-3,7`."""
    return ",".join(_run_text(start, stop) for start, stop in runs)


def parse_runs(text: str) -> Runs:
    """The inverse of `format_runs`."""
    return tuple(map(_run_of, text.split(",")))


def _format_leveled(runs: LeveledRuns) -> str:
    return ",".join(f"{_run_text(start, stop)}@{level}" for start, stop, level in runs)


def _parse_leveled(text: str) -> LeveledRuns:
    leveled_runs = []
    for part in text.split(","):
        run, at, level = part.partition("@")
        if not at or not _is_index(level):
            raise ValueError(f"'{part[:40]}' is not a run of blocks at a level")
        leveled_runs.append((*_run_of(run), int(level)))
    return tuple(leveled_runs)


def _run_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _run_of(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not _is_index(first) or (dash and not _is_index(last)):
        raise ValueError(f"'{text[:40]}' is not a run of blocks")
    return int(first), int(last if dash else first) + 1


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_INDEX


_RunsText: TypeAlias = Annotated[Runs, AsText(format_runs, parse_runs)]
_LeveledText: TypeAlias = Annotated[LeveledRuns, AsText(_format_leveled, _parse_leveled)]


# --- the plan ---


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An input of the plan. `identity` identifies it in the digest: its content id, or its headers' digest.

    `files` are its files as they were when planned, and `side_bytes` of `planned_bytes` what reading its index costs.
    """

    role: str
    model: str
    path: str
    identity: str
    content_id: str | None
    files: tuple[FileId, ...]
    full_cost_bytes: Size
    planned_bytes: Size
    side_bytes: Size = 0

    def __post_init__(self) -> None:
        if not 0 <= self.side_bytes <= self.planned_bytes:
            raise ValueError(f"{self.model}: {self.side_bytes} of {self.planned_bytes} bytes for its index")
        object.__setattr__(self, "files", tuple(file.without_place() for file in self.files))


@dataclass(frozen=True, slots=True)
class Access:
    """The blocks of an expert's tensor that are read, or need not be; each kind as sorted, disjoint, half-open runs.

    `blocks` are read, `free` ones equal the base's. `levels` are of the blocks that are read those that are read in
    part, with their level.
    """

    blocks: _RunsText = ()
    free: _RunsText = ()
    levels: _LeveledText = ()

    def __post_init__(self) -> None:
        for runs in (self.blocks, self.free):
            flat = tuple(chain.from_iterable(runs))
            if flat and not (flat[0] >= 0 and all(map(lt, flat, flat[1:]))):
                raise ValueError("runs of blocks must be sorted, disjoint, not empty and joined where they touch")
        if self.free:
            flat = tuple(chain.from_iterable(self.runs))
            if not all(map(le, flat, flat[1:])):
                raise ValueError("a block is planned twice")
        if any(not (0 <= start < stop and 0 < level < ALL) for start, stop, level in self.levels):
            raise ValueError("not a run of blocks at a level: at 0 nothing is read")
        if any(a[1] > b[0] or (a[1] == b[0] and a[2] == b[2]) for a, b in pairwise(self.levels)):
            raise ValueError("runs of blocks at a level must be sorted, disjoint and joined where they touch")
        for start, stop, _ in self.levels:
            if not any(a <= start and stop <= b for a, b in self.blocks):
                raise ValueError(f"blocks {start} to {stop - 1} have a level, and are not read")

    @property
    def n_blocks(self) -> int:
        """Blocks that are read."""
        return sum(stop - start for start, stop in self.blocks)

    @property
    def runs(self) -> Runs:
        """All runs of any kind, sorted."""
        return tuple(sorted((*self.blocks, *self.free)))


Products: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One merged tensor: its size, and what is read of each of its experts.

    `parameters` is the index of the operator's parameters in force among those of the plan, and `models` says which of
    the plan's experts its experts are. `reads` are the distinct accesses, `read_of` says which of them is each
    expert's; without it all have the first. `cuts` and `products` are by expert the tensor-wide quantities that the
    operator wants, where they are known: of the magnitudes and of the inner products.
    With a `probability` below 1 the blocks are a sample, drawn by it: the merged delta is divided by it.
    """

    name: str
    n_elements: Size
    parameters: Size
    models: tuple[Size, ...]
    reads: tuple[Access, ...]
    read_of: tuple[Size, ...] = ()
    cuts: tuple[Cut | None, ...] = ()
    products: tuple[Products | None, ...] = ()
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or (not self.probability and self.is_drawn):
            raise ValueError(f"{self.name}: not the probability of what is read: {self.probability}")
        places = self.read_of or (0,) * len(self.models)
        if set(places) != set(range(len(self.reads))):
            raise ValueError(f"{self.name}: {len(self.reads)} accesses, of which experts have {list(self.read_of)}")
        for values in (places, self.cuts or places, self.products or places):
            if len(values) != len(self.models):
                raise ValueError(f"{self.name}: {len(values)} values for {len(self.models)} experts")
        for cut in self.cuts:
            if cut is not None and not 0 <= min(cut) <= max(cut) <= _LARGEST_BITS:
                raise ValueError(f"{self.name}: not three numbers of 32 bits: {list(cut)}")

    @property
    def is_drawn(self) -> bool:
        """Whether any of its blocks is read, or known to equal the base's."""
        return any(access.runs for access in self.reads)

    @property
    def access(self) -> tuple[Access, ...]:
        """The access of each of its experts."""
        return tuple(self.reads[place] for place in self.read_of) if self.read_of else self.reads * len(self.models)

    @property
    def cuts_E(self) -> tuple[Cut | None, ...]:
        """The known cut of each of its experts."""
        return self.cuts or (None,) * len(self.models)


@dataclass(frozen=True, slots=True)
class ImportanceRecord:
    """The importances that the probabilities of a sample follow: the path of the file, and a digest of the numbers.

    The path is true on one machine only, so not in the digest of the plan.
    """

    path: str
    digest: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Plan(Displayed):
    """A decided merge. Laws: `parse_plan(p.to_json()) == p`; the digest is the same on every machine.

    `parameters` are the distinct sets of the operator's parameters, and `vocabulary` digests how tokens are aligned,
    where a recipe asks for a tokenizer, or a mixture's prompts as tokens. `recipe_notices` say what has no effect in
    the recipe; the digest is without them. `bound` is known of some plans, and follows from the rest: the digest is
    without it, too.
    """

    operator: str = shown("operator")
    policy: str = shown("policy", "{policy}, where omitted: {on_omit}")
    on_omit: str
    seed: Seed
    block_elements: Size
    budget_bytes: Size = shown("budget")
    planned_bytes: Size = shown("planned", "{planned_bytes} of {full_cost_bytes}")
    full_cost_bytes: Size
    recipe: str
    models: tuple[PlannedModel, ...]
    parameters: tuple[TensorParameters, ...]
    tensors: tuple[PlannedTensor, ...]
    fallbacks: tuple[Fallback, ...] = ()
    adjustments: tuple[Fallback, ...] = ()
    vocabulary: str | None = None
    importance: ImportanceRecord | None = None
    recipe_notices: tuple[Notice, ...] = ()
    bound: OmissionBound | None = shown("bound", default=None)

    def __post_init__(self) -> None:
        experts = sum(model.role == "expert" for model in self.models)
        if not 0 <= self.planned_bytes <= self.budget_bytes:
            raise ValueError(f"planned {self.planned_bytes} bytes of a budget of {self.budget_bytes}")
        if self.block_elements < 1:
            raise ValueError(f"blocks of {self.block_elements} elements")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("a tensor is planned twice")
        for tensor in self.tensors:
            if tensor.parameters >= len(self.parameters):
                raise ValueError(f"{tensor.name}: there is no set of parameters {tensor.parameters}")
            if len(self.parameters[tensor.parameters].experts) != len(tensor.models):
                raise ValueError(f"{tensor.name}: parameters of other than {len(tensor.models)} experts")
            if len(set(tensor.models)) < len(tensor.models) or not all(0 <= e < experts for e in tensor.models):
                raise ValueError(f"{tensor.name}: not experts of this plan: {list(tensor.models)}")
            n_blocks = -(-tensor.n_elements // self.block_elements)
            if any(access.runs and access.runs[-1][1] > n_blocks for access in tensor.reads):
                raise ValueError(f"{tensor.name}: a run of blocks ends past the last of {n_blocks} blocks")

    @property
    def digest(self) -> str:
        """32 hex digits: BLAKE3-128 of the canonical JSON, without paths and files of models. Computed on each call."""
        content = encode(self)
        assert isinstance(content, dict)
        for name in ("recipe_notices", "bound"):
            content.pop(name, None)
        content["models"] = encode(tuple(replace(model, path="", files=()) for model in self.models))
        if self.importance is not None:
            content["importance"] = self.importance.digest
        return digest_of({"format": PLAN_FORMAT.title, **content})

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that may be read from experts, in however many runs; None where nothing limits them."""
        return None if self.policy == READS_ALL else self.budget_bytes

    @property
    def sampling(self) -> Sampling | None:
        """How the plan samples; None if it does not."""
        if self.policy != SAMPLES:
            return None
        tensors = [tensor for tensor in self.tensors if tensor.n_elements]
        probabilities = [tensor.probability for tensor in tensors if tensor.is_drawn] or [1.0]
        sampled = math.fsum(tensor.probability * tensor.n_elements for tensor in tensors)
        mean = sampled / sum(tensor.n_elements for tensor in tensors) if tensors else 1.0
        followed = "" if self.importance is None else self.importance.path
        return Sampling(self.block_elements, self.seed, min(probabilities), mean, max(probabilities), followed)

    def to_json(self) -> bytes:
        """Readable JSON (`docs/internals/formats/plan.md`; `schemas/plan.schema.json`)."""
        return PLAN_FORMAT.to_json(self)


# --- plans in files ---


PLAN_FORMAT: Final = RecordFormat(
    "mergepipe-plan", 6, Plan, "make the plan again (`mergepipe plan`)", stated=("digest",), is_sealed=False
)


def parse_plan(raw: bytes, where: object = "plan") -> Plan:
    """Parse what `Plan.to_json` wrote. Raises as `RecordFormat.parse`."""
    return PLAN_FORMAT.parse(raw, where)


def store_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, complete or not at all; only another plan is replaced.

    Raises:
        OutputError: `output.not-ours`, something else stands there.
        StorageError, NotFoundError: it cannot be written there.
    """
    path = output_place(path).local_path
    try:
        if path.is_symlink():
            message = "is a link, and nothing is written through links"
            raise OutputError.of("output.link", path, message, "name the file itself")
        if path.exists() and not (path.is_file() and PLAN_FORMAT.recognises(read_head(path, _HEAD_BYTES))):
            message = "exists, and is not a plan of mergepipe"
            raise OutputError.of("output.not-ours", path, message, "choose another name")
    except OSError as error:
        raise os_error(error, path, "writing the plan") from error
    replace_durably(path, plan.to_json(), Ledger())
