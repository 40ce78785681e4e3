"""What callers get back: typed, frozen reports of checks and merges, and progress on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mergepipe.recipe.resolve import DroppedTensor


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: its phase, and bytes read and written so far of all that are expected."""

    phase: str
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One input of a merge and the bytes of its tensors that are read."""

    role: str
    model: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a merge would do. Bytes are those of tensors; `disk_bytes` is what the output needs."""

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


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did. Bytes are those requested from storage, page rounding included."""

    out: Path
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

    @property
    def read_bytes(self) -> int:
        """Everything read."""
        return self.base_bytes + self.expert_bytes + self.analysis_bytes + self.metadata_bytes

    @property
    def bytes_per_second(self) -> float:
        """Bytes read and written per second."""
        return (self.read_bytes + self.output_bytes) / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class AnalyzedExpert:
    """One expert of an analysis: tensors read now, tensors that can be compared, and those that cannot."""

    model: str
    analyzed_tensors: int
    comparable_tensors: int
    incomparable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnalyzeReport:
    """What an analysis did. `analysis_bytes` were read a second time, for want of memory."""

    base: Path
    experts: tuple[AnalyzedExpert, ...]
    home: Path
    base_bytes: int
    expert_bytes: int
    analysis_bytes: int
    seconds: float
    is_probe: bool
