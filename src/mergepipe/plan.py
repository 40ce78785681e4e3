"""The plan: which blocks of which expert are read, with which parameters, at which cost; frozen, digested, reusable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

PLAN_FORMAT = "mergepipe-plan/1"

Scalar = float | bool


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

    blocks: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[int, int, int], ...] = ()
    threshold_bits: int | None = None
    products: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        for runs in (self.blocks, self.free):
            for start, stop in runs:
                if not 0 <= start < stop:
                    raise ValueError(f"not a run of blocks: [{start}, {stop})")
            if any(a[1] >= b[0] for a, b in pairwise(runs)):
                raise ValueError("runs of blocks must be sorted, disjoint and joined where they touch")

    @property
    def n_blocks(self) -> int:
        """Blocks read from this expert's own file."""
        return sum(stop - start for start, stop in self.blocks)


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
    """A decided merge. Laws: `from_json(to_json(p)) == p`; the digest is the same on every machine."""

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
        experts = sum(model.role == "expert" for model in self.models)
        for tensor in self.tensors:
            if not len(tensor.access) == len(tensor.experts) == experts:
                raise ValueError(f"{tensor.name}: {len(tensor.access)} accesses for {experts} experts")
