"""The plan as a frozen, digested value: which blocks of which expert are read, with which parameters, at which cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import le, lt
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from mergepipe.core.canonical_json import digest_of
from mergepipe.core.notebooks import Displayed
from mergepipe.core.notices import Notice
from mergepipe.core.records import AsText, RecordFormat, Seed, Size, encode
from mergepipe.errors import OutputError
from mergepipe.operators.statistics import Cut
from mergepipe.recipes.tasks import TensorParameters
from mergepipe.reports import Fallback, Sampling
from mergepipe.storage.file_version import FileId
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import replace_durably
from mergepipe.storage.ranges import os_error, read_head

Runs: TypeAlias = tuple[tuple[int, int], ...]
SharedRuns: TypeAlias = tuple[tuple[int, int, int], ...]

NOTHING_READ = "nothing of it is read"
"""The decision of the notices about experts that a plan leaves out."""

UNSPENT = "are left unspent"
"""The end of the decision of the notice about a budget of which a good part is not used."""

READS_ALL = "all"
"""The policy of a plan that reads everything, and that no budget limits."""

SAMPLES = "sample"
"""The policy of a plan that reads a sample of block positions."""

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


def _format_shared(runs: SharedRuns) -> str:
    return ",".join(f"{_run_text(start, stop)}@{source}" for start, stop, source in runs)


def _parse_shared(text: str) -> SharedRuns:
    shared_runs = []
    for part in text.split(","):
        run, at, source = part.partition("@")
        if not at or not _is_index(source):
            raise ValueError(f"'{part[:40]}' is not a run of shared blocks")
        shared_runs.append((*_run_of(run), int(source)))
    return tuple(shared_runs)


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
_SharedText: TypeAlias = Annotated[SharedRuns, AsText(_format_shared, _parse_shared)]


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


@dataclass(frozen=True, slots=True)
class Access:
    """The access to one tensor of one expert: blocks read, free, shared, and levels.

    `blocks` are half-open runs of block indices to be read, sorted and disjoint. `free` are runs that need no read
    because they equal the base. `shared` maps runs to the expert (an index) whose identical bytes serve them.
    `cut` is the whole tensor's magnitude cut, for operators that trim. `levels` maps runs of the blocks that
    are read, but only in part, to the level at which they are.
    """

    blocks: _RunsText = ()
    free: _RunsText = ()
    shared: _SharedText = ()
    cut: Cut | None = None
    products: tuple[float, float, float] | None = None
    levels: _SharedText = ()

    def __post_init__(self) -> None:
        for runs in (self.blocks, self.free):
            flat = tuple(chain.from_iterable(runs))
            if flat and not (flat[0] >= 0 and all(map(lt, flat, flat[1:]))):
                raise ValueError("runs of blocks must be sorted, disjoint, not empty and joined where they touch")
        _check_shared(self.shared, "shared")
        _check_shared(self.levels, "graded")
        if any(level == 0 for _, _, level in self.levels):
            raise ValueError("a block that is read at level 0 is not read")
        if self.cut is not None and not 0 <= min(self.cut) <= max(self.cut) <= _LARGEST_BITS:
            raise ValueError(f"not three numbers of 32 bits: {list(self.cut)}")

    @property
    def n_blocks(self) -> int:
        """Blocks read from this expert's own file."""
        return sum(stop - start for start, stop in self.blocks)

    @property
    def runs(self) -> Runs:
        """All runs of any kind, sorted."""
        return tuple(sorted((*self.blocks, *self.free, *((start, stop) for start, stop, _ in self.shared))))


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One merged tensor: its size, and one `Access` for each of its experts.

    `parameters` is the index of the operator's parameters in force among those of the plan, and `models` says which of
    the plan's experts its experts are.
    With a `probability` below 1 the blocks are a sample, drawn by it: the merged delta is divided by it.
    """

    name: str
    n_elements: Size
    parameters: Size
    access: tuple[Access, ...]
    models: tuple[Size, ...]
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or (not self.probability and any(access.runs for access in self.access)):
            raise ValueError(f"{self.name}: not the probability of what is read: {self.probability}")

    @property
    def factor(self) -> float:
        """What the merged delta is multiplied by; 1 where no sample was drawn, or nothing of it."""
        return 1 / self.probability if self.probability else 1.0

    def access_of(self, expert: int) -> Access | None:
        """Return the access of one of the plan's experts; None if it does not contribute to this tensor."""
        return self.access[self.models.index(expert)] if expert in self.models else None


@dataclass(frozen=True, slots=True)
class ImportanceRecord:
    """What the probabilities of a sample follow: where it was read, and a digest of its numbers by tensor.

    The path is true on one machine only, so not in the digest of the plan.
    """

    path: str
    digest: str


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Displayed):
    """A decided merge. Laws: `parse_plan(p.to_json()) == p`; the digest is the same on every machine.

    `parameters` are the distinct sets of the operator's parameters, and `vocabulary` digests how tokens are aligned,
    where a recipe asks for a tokenizer. `recipe_notices` say what has no effect in the recipe; the digest is without
    them.
    """

    operator: str
    policy: str
    on_omit: str
    seed: Seed
    block_elements: Size
    budget_bytes: Size
    planned_bytes: Size
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
            if not len(tensor.access) == len(self.parameters[tensor.parameters].experts) == len(tensor.models):
                raise ValueError(f"{tensor.name}: {len(tensor.access)} accesses for {len(tensor.models)} experts")
            if len(set(tensor.models)) < len(tensor.models) or not all(0 <= e < experts for e in tensor.models):
                raise ValueError(f"{tensor.name}: not experts of this plan: {list(tensor.models)}")
            n_blocks = -(-tensor.n_elements // self.block_elements)
            _check_runs(tensor, n_blocks)

    @property
    def digest(self) -> str:
        """32 hex digits: BLAKE3-128 of the canonical JSON, without paths and files of models. Computed on each call."""
        content = encode(self)
        assert isinstance(content, dict)
        content.pop("recipe_notices", None)
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
        probabilities = [tensor.probability for tensor in tensors] or [1.0]
        sampled = math.fsum(tensor.probability * tensor.n_elements for tensor in tensors)
        mean = sampled / sum(tensor.n_elements for tensor in tensors) if tensors else 1.0
        followed = "" if self.importance is None else self.importance.path
        return Sampling(self.block_elements, self.seed, min(probabilities), mean, max(probabilities), followed)

    def to_json(self) -> bytes:
        """Readable JSON (`docs/internals/formats/plan.md`; `schemas/plan.schema.json`)."""
        return PLAN_FORMAT.to_json(self)


def _check_shared(runs: SharedRuns, kind: str) -> None:
    if not runs:
        return
    if any(not (0 <= start < stop and source >= 0) for start, stop, source in runs):
        raise ValueError(f"not a run of {kind} blocks")
    if any(a[1] > b[0] or (a[1] == b[0] and a[2] == b[2]) for a, b in pairwise(runs)):
        raise ValueError(f"runs of {kind} blocks must be sorted, disjoint and joined where they touch")


def _check_runs(tensor: PlannedTensor, n_blocks: int) -> None:
    """Check that runs lie in the grid and are disjoint, and that the serving expert reads every shared block."""
    for expert, access in enumerate(tensor.access):
        for runs in (access.blocks, access.free, access.shared):
            if runs and runs[-1][1] > n_blocks:
                raise ValueError(f"{tensor.name}: a run of blocks ends past the last of {n_blocks} blocks")
        if access.free or access.shared:
            flat = tuple(chain.from_iterable(access.runs))
            if not all(map(le, flat, flat[1:])):
                raise ValueError(f"{tensor.name}: a block of expert {expert} is planned twice")
        for start, stop, _ in access.levels:
            if not any(a <= start and stop <= b for a, b in access.blocks):
                raise ValueError(f"{tensor.name}: blocks {start} to {stop - 1} have a level, and are not read")
        for start, stop, source in access.shared:
            if source == expert or source >= len(tensor.access):
                raise ValueError(f"{tensor.name}: expert {source} cannot serve expert {expert}")
            if not any(a <= start and stop <= b for a, b in tensor.access[source].blocks):
                raise ValueError(f"{tensor.name}: blocks {start} to {stop - 1} of expert {source} are not read")


# --- plans in files ---


PLAN_FORMAT: Final = RecordFormat(
    "mergepipe-plan", 5, Plan, "make the plan again (`mergepipe plan`)", stated=("digest",), is_sealed=False
)


def parse_plan(raw: bytes, where: object = "plan") -> Plan:
    """Parse what `Plan.to_json` wrote. Raises as `RecordFormat.parse`."""
    return PLAN_FORMAT.parse(raw, where)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan to a file, which holds the old one, the new one, or does not exist; replace nothing but a plan."""
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
