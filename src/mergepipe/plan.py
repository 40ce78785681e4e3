"""The plan: which blocks of which expert are read, with which parameters, at which cost; frozen, digested, reusable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import le, lt

from mergepipe.canonical import canonical_json, digest_of

PLAN_NAME = "mergepipe-plan"
PLAN_VERSION = 1
PLAN_FORMAT = f"{PLAN_NAME}/{PLAN_VERSION}"

Scalar = float | bool
Runs = tuple[tuple[int, int], ...]
SharedRuns = tuple[tuple[int, int, int], ...]

_LARGEST_BITS = 2**32 - 1
_MACHINE_KEYS = ("path", "files")  # of a model: true on one machine only, so not in the digest


@dataclass(frozen=True, slots=True)
class FileBinding:
    """An input file as the plan found it. Not part of the digest: another machine has other times."""

    name: str
    size_bytes: int
    mtime_ns: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """An input of the plan. `identity` is what the digest knows it by: its content id, or its headers' digest."""

    role: str
    model: str
    path: str
    identity: str
    content_id: str | None
    files: tuple[FileBinding, ...]
    full_cost_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Access:
    """What is read of one tensor from one expert.

    `blocks` are half-open runs of block indices to be read, sorted and disjoint. `free` are runs that need no read
    because they equal the base. `shared` maps runs to the expert (an index) whose identical bytes serve them.
    `threshold_bits` is the whole tensor's magnitude cut, for operators that trim.
    """

    blocks: Runs
    free: Runs = ()
    shared: SharedRuns = ()
    threshold_bits: int | None = None
    products: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        for runs in (self.blocks, self.free):
            flat = tuple(chain.from_iterable(runs))
            if flat and not (flat[0] >= 0 and all(map(lt, flat, flat[1:]))):
                raise ValueError("runs of blocks must be sorted, disjoint, not empty and joined where they touch")
        if any(not (0 <= start < stop and source >= 0) for start, stop, source in self.shared):
            raise ValueError("not a run of shared blocks")
        if any(a[1] > b[0] or (a[1] == b[0] and a[2] == b[2]) for a, b in pairwise(self.shared)):
            raise ValueError("runs of shared blocks must be sorted, disjoint and joined where they touch")
        if self.threshold_bits is not None and not 0 <= self.threshold_bits <= _LARGEST_BITS:
            raise ValueError(f"not the bits of a float32: {self.threshold_bits}")

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
    """One merged tensor: its size, the operator's parameters in force, and one `Access` per expert."""

    name: str
    n_elements: int
    globals: Mapping[str, Scalar]
    anchor: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    access: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A decision that was made for want of something better, and why."""

    where: str
    decision: str
    reason: str


@dataclass(frozen=True, slots=True)
class OmissionBound:
    """Upper bounds on what omission costs: `absolute` on ||M_full - M_A||, before output rounding.

    `relative` divides by an estimate of ||M_full - M_0|| from the same norms, for reading only.
    """

    absolute: float
    relative: float | None


@dataclass(frozen=True, slots=True)
class Plan:
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
    bound: OmissionBound | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.planned_bytes <= self.budget_bytes:
            raise ValueError(f"planned {self.planned_bytes} bytes of a budget of {self.budget_bytes}")
        if self.block_elements < 1:
            raise ValueError(f"blocks of {self.block_elements} elements")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("a tensor is planned twice")
        experts = sum(model.role == "expert" for model in self.models)
        for tensor in self.tensors:
            if not len(tensor.access) == len(tensor.experts) == experts:
                raise ValueError(f"{tensor.name}: {len(tensor.access)} accesses for {experts} experts")
            _check_runs(tensor, -(-tensor.n_elements // self.block_elements))

    @property
    def digest(self) -> str:
        """32 hex digits: BLAKE3-128 of the canonical JSON without what is true on one machine only. Worked out anew."""
        content = _content(self)
        content["models"] = [_without(_model_content(model), _MACHINE_KEYS) for model in self.models]
        return digest_of(content)

    def to_json(self) -> bytes:
        """Readable JSON (`docs/format/plan.md`; `schemas/plan.schema.json`)."""
        return (json.dumps(self.content(), indent=1, ensure_ascii=False) + "\n").encode()

    def content(self) -> dict[str, object]:
        """What `to_json` writes, as plain values."""
        return {"digest": self.digest, **_content(self)}


def _check_runs(tensor: PlannedTensor, n_blocks: int) -> None:
    """Runs lie in the grid and are disjoint over the kinds; shared blocks are read from the expert that serves them."""
    for expert, access in enumerate(tensor.access):
        if any(runs and runs[-1][1] > n_blocks for runs in (access.blocks, access.free, access.shared)):
            raise ValueError(f"{tensor.name}: a run of blocks ends past the last of {n_blocks} blocks")
        flat = tuple(chain.from_iterable(access.runs)) if access.free or access.shared else ()
        if not all(map(le, flat, flat[1:])):
            raise ValueError(f"{tensor.name}: a block of expert {expert} is planned twice")
        for start, stop, source in access.shared:
            if source == expert or source >= len(tensor.access):
                raise ValueError(f"{tensor.name}: expert {source} cannot serve expert {expert}")
            if not any(a <= start and stop <= b for a, b in tensor.access[source].blocks):
                raise ValueError(f"{tensor.name}: blocks {start} to {stop - 1} of expert {source} are not read")


# --- to JSON ---


def _content(plan: Plan) -> dict[str, object]:
    """The plan but its digest, in the order in which a reader wants it."""
    parameters = _ParameterTable()
    tensors = [_tensor_content(tensor, parameters.index_of(tensor)) for tensor in plan.tensors]
    bound = plan.bound
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
        "bound": None if bound is None else _bound_content(bound),
        "fallbacks": [_fallback_content(each) for each in plan.fallbacks],
        "adjustments": [_fallback_content(each) for each in plan.adjustments],
        "models": [_model_content(model) for model in plan.models],
        "recipe": plan.recipe,
        "parameters": parameters.rows,
        "tensors": tensors,
    }


class _ParameterTable:
    """The distinct sets of parameters, in order of first use: most tensors have the same."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self._known: dict[bytes, int] = {}

    def index_of(self, tensor: PlannedTensor) -> int:
        row: dict[str, object] = {
            "globals": _scalars(tensor.globals),
            "anchor": _scalars(tensor.anchor),
            "experts": [_scalars(each) for each in tensor.experts],
        }
        index = self._known.setdefault(canonical_json(row), len(self.rows))
        if index == len(self.rows):
            self.rows.append(row)
        return index


def _scalars(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value if isinstance(value, bool) else float(value) for name, value in values.items()}


def _tensor_content(tensor: PlannedTensor, parameters: int) -> dict[str, object]:
    access = [_access_content(each) for each in tensor.access]
    return {"name": tensor.name, "n_elements": tensor.n_elements, "parameters": parameters, "access": access}


def _access_content(access: Access) -> dict[str, object]:
    content: dict[str, object] = {}
    if access.blocks:
        content["read"] = format_runs(access.blocks)
    if access.free:
        content["free"] = format_runs(access.free)
    if access.shared:
        content["shared"] = ",".join(f"{_run_text(start, stop)}@{source}" for start, stop, source in access.shared)
    if access.threshold_bits is not None:
        content["threshold_bits"] = access.threshold_bits
    if access.products is not None:
        content["products"] = list(access.products)
    return content


def _model_content(model: PlannedModel) -> dict[str, object]:
    return {
        "role": model.role,
        "model": model.model,
        "identity": model.identity,
        "content_id": model.content_id,
        "full_cost_bytes": model.full_cost_bytes,
        "planned_bytes": model.planned_bytes,
        "path": model.path,
        "files": [
            {"name": f.name, "size_bytes": f.size_bytes, "mtime_ns": f.mtime_ns, "header_digest": f.header_digest}
            for f in model.files
        ],
    }


def _bound_content(bound: OmissionBound) -> dict[str, object]:
    content: dict[str, object] = {"absolute": bound.absolute}
    return content if bound.relative is None else {**content, "relative": bound.relative}


def _fallback_content(fallback: Fallback) -> dict[str, object]:
    return {"where": fallback.where, "decision": fallback.decision, "reason": fallback.reason}


def _without(content: Mapping[str, object], keys: Sequence[str]) -> dict[str, object]:
    return {key: value for key, value in content.items() if key not in keys}


def format_runs(runs: Runs) -> str:
    """Half-open runs as people write them, last block included: `((0, 4), (7, 8))` is `0-3,7`."""
    return ",".join(_run_text(start, stop) for start, stop in runs)


def _run_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
