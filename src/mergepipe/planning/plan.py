"""The plan as a frozen, digested value: which blocks of which expert are read, with which parameters, at which cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from operator import le, lt

from mergepipe.core.canonical_json import canonical_json, digest_of
from mergepipe.core.notebooks import Displayed
from mergepipe.core.notices import Notice
from mergepipe.operators.statistics import Cut
from mergepipe.reports import Sampling

PLAN_NAME = "mergepipe-plan"
PLAN_VERSION = 4
PLAN_FORMAT = f"{PLAN_NAME}/{PLAN_VERSION}"

Scalar = float | bool
Runs = tuple[tuple[int, int], ...]
SharedRuns = tuple[tuple[int, int, int], ...]

NOTHING_READ = "nothing of it is read"
"""The decision of the notices about experts that a plan leaves out."""

UNSPENT = "are left unspent"
"""The end of the decision of the notice about a budget of which a good part is not used."""

READS_ALL = "all"
"""The policy of a plan that reads everything, and that no budget limits."""

SAMPLES = "sample"
"""The policy of a plan that reads a sample of block positions."""

_LARGEST_BITS = 2**32 - 1
_MACHINE_KEYS = ("path", "files")  # of a model: true on one machine only, so not in the digest


@dataclass(frozen=True, slots=True)
class FileBinding:
    """An input file as it was when planned. Not part of the digest: modification times differ between machines.

    `sha256` is None, and not written, where it was unknown.
    """

    name: str
    size_bytes: int
    version: str
    header_digest: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An input of the plan. `identity` identifies it in the digest: its content id, or its headers' digest.

    `side_bytes` of `planned_bytes` are what reading its index costs.
    """

    role: str
    model: str
    path: str
    identity: str
    content_id: str | None
    files: tuple[FileBinding, ...]
    full_cost_bytes: int
    planned_bytes: int
    side_bytes: int = 0

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

    blocks: Runs
    free: Runs = ()
    shared: SharedRuns = ()
    cut: Cut | None = None
    products: tuple[float, float, float] | None = None
    levels: SharedRuns = ()

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
    """One merged tensor: its size, the operator's parameters in force, and one `Access` for each of its experts.

    `models` says which of the plan's experts these are.
    With a `probability` below 1 the blocks are a sample, drawn by it: the merged delta is divided by it.
    """

    name: str
    n_elements: int
    globals: Mapping[str, Scalar]
    anchor: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    access: tuple[Access, ...]
    models: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class Fallback:
    """A decision that deviates from the request, and the reason."""

    where: str
    decision: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Displayed):
    """A decided merge. Laws: `parse_plan(p.to_json()) == p`; the digest is the same on every machine."""

    operator: str
    block_elements: int
    seed: int
    policy: str
    on_omit: str
    budget_bytes: int
    planned_bytes: int
    full_cost_bytes: int
    recipe: str
    models: tuple[PlannedModel, ...]
    tensors: tuple[PlannedTensor, ...]
    fallbacks: tuple[Fallback, ...] = ()
    adjustments: tuple[Fallback, ...] = ()
    vocabulary: str | None = None  # digest of how tokens are aligned, where a recipe asks for a tokenizer
    importance: ImportanceRecord | None = None  # what the probabilities of a sample follow, if that was given
    recipe_notices: tuple[Notice, ...] = ()  # what has no effect in the recipe; no part of the digest

    def __post_init__(self) -> None:
        experts = sum(model.role == "expert" for model in self.models)
        if not 0 <= self.planned_bytes <= self.budget_bytes:
            raise ValueError(f"planned {self.planned_bytes} bytes of a budget of {self.budget_bytes}")
        if self.block_elements < 1:
            raise ValueError(f"blocks of {self.block_elements} elements")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("a tensor is planned twice")
        for tensor in self.tensors:
            if not len(tensor.access) == len(tensor.experts) == len(tensor.models):
                raise ValueError(f"{tensor.name}: {len(tensor.access)} accesses for {len(tensor.models)} experts")
            if len(set(tensor.models)) < len(tensor.models) or not all(0 <= e < experts for e in tensor.models):
                raise ValueError(f"{tensor.name}: not experts of this plan: {list(tensor.models)}")
            n_blocks = -(-tensor.n_elements // self.block_elements)
            _check_runs(tensor, n_blocks)

    @property
    def digest(self) -> str:
        """32 hex digits: BLAKE3-128 of the canonical JSON without machine-specific keys. Computed on each call."""
        return _digest(self, _content(self))

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
        return (json.dumps(self.content(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def content(self) -> dict[str, object]:
        """Return the content of `to_json` as plain values."""
        content = _content(self)
        return {"digest": _digest(self, content), **content}


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


# --- to JSON ---


def _content(plan: Plan) -> dict[str, object]:
    """Return the plan's JSON content without its digest, in reading order."""
    parameters = _ParameterTable()
    n_experts = sum(model.role == "expert" for model in plan.models)
    tensors = [_tensor_content(tensor, parameters.index_of(tensor), n_experts) for tensor in plan.tensors]
    optional: dict[str, object] = {}
    if plan.vocabulary is not None:
        optional["vocabulary"] = plan.vocabulary
    if plan.importance is not None:
        optional["importance"] = asdict(plan.importance)
    if plan.recipe_notices:
        optional["recipe_notices"] = [_notice_content(notice) for notice in plan.recipe_notices]
    return {
        "format": PLAN_FORMAT,
        "operator": plan.operator,
        "policy": plan.policy,
        "on_omit": plan.on_omit,
        "seed": plan.seed,
        "block_elements": plan.block_elements,
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": plan.planned_bytes,
        "full_cost_bytes": plan.full_cost_bytes,
        "fallbacks": [_fallback_content(fallback) for fallback in plan.fallbacks],
        "adjustments": [_fallback_content(adjustment) for adjustment in plan.adjustments],
        "models": [_model_content(model) for model in plan.models],
        **optional,
        "recipe": plan.recipe,
        "parameters": parameters.rows,
        "tensors": tensors,
    }


def _digest(plan: Plan, content: Mapping[str, object]) -> str:
    """Return the digest of a plan whose `_content` is given."""
    content = _without(content, ("recipe_notices",))
    content["models"] = [_without(_model_content(model), _MACHINE_KEYS) for model in plan.models]
    if plan.importance is not None:
        content["importance"] = plan.importance.digest
    return digest_of(content)


class _ParameterTable:
    """The distinct sets of parameters, in order of first use."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self._known: dict[bytes, int] = {}

    def index_of(self, tensor: PlannedTensor) -> int:
        row: dict[str, object] = {
            "globals": _scalars(tensor.globals),
            "anchor": _scalars(tensor.anchor),
            "experts": [_scalars(expert) for expert in tensor.experts],
        }
        index = self._known.setdefault(canonical_json(row), len(self.rows))
        if index == len(self.rows):
            self.rows.append(row)
        return index


def _scalars(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value if isinstance(value, bool) else float(value) for name, value in values.items()}


def _tensor_content(tensor: PlannedTensor, parameters: int, n_experts: int) -> dict[str, object]:
    access = [_access_content(access_row) for access_row in tensor.access]
    content = {"name": tensor.name, "n_elements": tensor.n_elements, "parameters": parameters, "access": access}
    if tensor.models != tuple(range(n_experts)):
        content["models"] = list(tensor.models)
    if tensor.probability < 1:
        content["probability"] = tensor.probability
    return content


def _access_content(access: Access) -> dict[str, object]:
    content: dict[str, object] = {}
    if access.blocks:
        content["read"] = format_runs(access.blocks)
    if access.free:
        content["free"] = format_runs(access.free)
    if access.shared:
        content["shared"] = _shared_text(access.shared)
    if access.cut is not None:
        content["cut"] = list(access.cut)
    if access.products is not None:
        content["products"] = list(access.products)
    if access.levels:
        content["levels"] = _shared_text(access.levels)
    return content


def _files_content(files: Iterable[FileBinding]) -> list[dict[str, object]]:
    return [
        {
            "name": f.name,
            "size_bytes": f.size_bytes,
            "version": f.version,
            "header_digest": f.header_digest,
            **({} if f.sha256 is None else {"sha256": f.sha256}),
        }
        for f in files
    ]


def _model_content(model: PlannedModel) -> dict[str, object]:
    optional: dict[str, object] = {"side_bytes": model.side_bytes} if model.side_bytes else {}
    return {
        "role": model.role,
        "model": model.model,
        "identity": model.identity,
        "content_id": model.content_id,
        "full_cost_bytes": model.full_cost_bytes,
        "planned_bytes": model.planned_bytes,
        "path": model.path,
        "files": _files_content(model.files),
        **optional,
    }


def _notice_content(notice: Notice) -> dict[str, object]:
    return {**asdict(notice), "other_lines": list(notice.other_lines)}


def _fallback_content(fallback: Fallback) -> dict[str, object]:
    return {"where": fallback.where, "decision": fallback.decision, "reason": fallback.reason}


def _without(content: Mapping[str, object], keys: Sequence[str]) -> dict[str, object]:
    return {key: value for key, value in content.items() if key not in keys}


def format_runs(runs: Runs) -> str:
    """Format half-open runs with the last block included: `((0, 4), (7, 8))` is `0-3,7`."""
    return ",".join(_run_text(start, stop) for start, stop in runs)


def _shared_text(runs: SharedRuns) -> str:
    return ",".join(f"{_run_text(start, stop)}@{source}" for start, stop, source in runs)


def _run_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
