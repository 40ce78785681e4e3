"""Training engines made of known arrays, and ranks made of threads: partial saving without a framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DTYPES, Span
from mergepipe.tailor.checkpoint import Framework
from mergepipe.tailor.formats.partial import PartialManifest
from mergepipe.tailor.saving.frameworks import EngineView, LocalShard, Ranks
from mergepipe.tailor.saving.partial_run import open_partial
from mergepipe.tailor.selection import Unit
from support.public_names import ZERO_FORMAT
from support.training_trees import KnownStates

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


def known_view(known: KnownStates, rank: int = 0, world_size: int = 1) -> EngineView:
    """An engine as ZeRO-3 cuts it: each state of each parameter in equal parts, one a rank, the last one shorter."""
    shards = []
    for (name, kind), array in known.arrays.items():
        share = -(-array.size // world_size)
        span = Span(min(rank * share, array.size), min((rank + 1) * share, array.size))
        if span.n_elements:
            shards.append(_shard(name, kind, span, array.reshape(-1)[span.start : span.stop]))
    layout = PartialManifest(
        ZERO_FORMAT, Framework.DEEPSPEED, 3, world_size, 0, dict(known.shapes), {}, (tuple(known.shapes),), (),
        (tuple(known.shapes),), ({"lr": 0.1},), (),
    )  # fmt: skip
    return EngineView(layout, (lambda: float(known.step),), tuple(shards), writes_counters=True)


def _shard(name: str, kind: str, span: Span, part: NDArray[np.float32]) -> LocalShard:
    def sample(n_elements: int) -> NDArray[np.float32]:
        return part[:: max(1, -(-part.size // n_elements))].copy()

    return LocalShard(name, kind, DTYPES["F32"], span, lambda: part.copy().view(np.uint8), sample)


@dataclass(slots=True)
class _Meeting:
    """Where the threads of one group exchange values."""

    barrier: threading.Barrier
    values: list[Any] = field(default_factory=list)
    other: _Meeting | None = None

    @classmethod
    def of(cls, world_size: int) -> _Meeting:
        return cls(threading.Barrier(world_size, timeout=30), [None] * world_size)


@dataclass(frozen=True, slots=True)
class ThreadRank(Ranks):
    """One thread of a group, as a rank."""

    meeting: _Meeting = field(default_factory=lambda: _Meeting.of(1))

    def gather(self, value: _Value) -> list[_Value]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        found: list[_Value] = list(self.meeting.values)
        self.meeting.barrier.wait()
        return found

    def for_another_thread(self) -> ThreadRank:
        self.gather(None)
        if self.rank == 0:
            self.meeting.other = _Meeting.of(self.world_size)
        self.gather(None)
        assert self.meeting.other is not None
        return replace(self, meeting=self.meeting.other)


def on_ranks(world_size: int, act: Callable[[Ranks], _Result]) -> list[_Result | Exception]:
    """Let every rank `act` in a thread of its own; return what each returned or raised."""
    meeting = _Meeting.of(world_size)

    def one(rank: int) -> _Result | Exception:
        try:
            return act(ThreadRank(rank, world_size, meeting=meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def write_partial(
    folder: Path,
    known: KnownStates,
    units: Sequence[Unit] = (),
    *,
    lacks: str = "",
    world_size: int = 2,
    change: Callable[[EngineView], EngineView] = lambda view: view,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a partial checkpoint of some units, or of all but one; rank 0 writes small files beside its shard."""

    def write_extra(staged: Path) -> list[Path]:
        for name, content in files.items():
            (staged / name).write_bytes(content)
        return [staged / name for name in files]

    def write(ranks: Ranks) -> int:
        view = change(known_view(known, ranks.rank, world_size))
        saved = tuple(units) or tuple(unit for unit in view.units.parameters if str(unit) != lacks)
        extra = (lambda _: ()) if ranks.rank else write_extra
        return open_partial(view.saving(saved, known.step), folder, ranks, extra, copies=False)(ranks)

    results = on_ranks(world_size, write)
    assert all(isinstance(result, int) for result in results), results
