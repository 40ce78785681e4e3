"""Packing on the way as a merge or an analysis sees it: nothing of it is loaded where nothing is packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.engine.passes import Tap
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.reports import NotPacked, PackedExpert


@dataclass(frozen=True, slots=True)
class Candidate:
    """An expert that may be packed, as the user names it; `reason` says why not, where that is known already."""

    text: str
    checkpoint: Checkpoint
    reason: str = ""


class Along(Protocol):
    """Packs while the engine reads."""

    @property
    def tap(self) -> Tap | None:
        """What the engine shows its bytes to."""
        ...

    def finish(self) -> None:
        """Complete the stores, before anything is published."""
        ...

    def publish(self) -> tuple[PackedExpert, ...]:
        """Make the stores visible."""
        ...


class AlongPlan(Protocol):
    """Who is packed, and who is not; decided before anything is read."""

    @property
    def outs(self) -> tuple[Path, ...]:
        """Where the stores go."""
        ...

    @property
    def refused(self) -> tuple[NotPacked, ...]:
        """Who is not packed, and why."""
        ...

    def begun(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[Along]:
        """Pack while the context lasts; nothing stays but what was published.

        What the engine will not read is read first, in `threads`; `on_tick` is called on the way.
        """
        ...


class NothingPacked:
    """The plan, and the packing, of a run that packs nothing."""

    tap = None
    outs = ()
    refused = ()

    def begun(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[Along]:
        """Do nothing."""
        return contextlib.nullcontext(self)

    def finish(self) -> None:
        """Do nothing."""

    def publish(self) -> tuple[PackedExpert, ...]:
        """There is nothing."""
        return ()


def along_plan(
    base: Checkpoint, candidates: Sequence[Candidate], tasks: Sequence[MergeTask], out: Path | None
) -> AlongPlan:
    """Decide who is packed into `out` while `tasks` are run, each of which reads all of its tensors.

    Without `out` nobody is.

    Raises:
        UnsupportedError, CorruptError, NotFoundError: an expert's directory cannot be packed, as in `packing.job_of`.
    """
    if out is None:
        return NothingPacked()
    from mergepipe.runs.pack_tap import plan_along  # compiled

    return plan_along(base, candidates, tasks, out)


def refusals(plan: AlongPlan) -> tuple[str, ...]:
    """Who is not packed and why, in a sentence each."""
    return tuple(f"{each.expert} is not packed: {each.reason}" for each in plan.refused)
