"""Request that a merge or an analysis packs the experts it reads; compiled code is loaded only if some are packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.engine.observer import Tap
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.reports import NotPacked, PackedExpert


@dataclass(frozen=True, slots=True)
class PackCandidate:
    """An expert considered for packing, as the user names it; a non-empty `reason` excludes it."""

    text: str
    checkpoint: Checkpoint
    reason: str = ""


class ExpertPacker(Protocol):
    """Packs experts from the bytes that the engine reads."""

    @property
    def tap(self) -> Tap | None:
        """The tap through which the engine passes on the bytes it reads; None if nothing is packed."""
        ...

    def finish(self) -> None:
        """Complete the stores, before anything is published."""
        ...

    def publish(self) -> tuple[PackedExpert, ...]:
        """Make the stores visible."""
        ...


class PackRequest(Protocol):
    """The experts that a run packs and those it does not, decided before anything is read."""

    @property
    def outs(self) -> tuple[Path, ...]:
        """The directories of the stores."""
        ...

    @property
    def refused(self) -> tuple[NotPacked, ...]:
        """The experts that are not packed, with reasons."""
        ...

    def open_packer(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[ExpertPacker]:
        """Open a packer for the duration of the context; stores that were not published are removed on exit.

        Tensors that the engine will not read are packed first, by `threads`; `on_tick` is called periodically.
        """
        ...


class NoPacks:
    """Request and packer of a run that packs nothing."""

    tap = None
    outs = ()
    refused = ()

    def open_packer(self, threads: int, on_tick: Callable[[], None]) -> AbstractContextManager[ExpertPacker]:
        """Do nothing."""
        return contextlib.nullcontext(self)

    def finish(self) -> None:
        """Do nothing."""

    def publish(self) -> tuple[PackedExpert, ...]:
        """Return no stores."""
        return ()


def request_packs(
    base: Checkpoint, candidates: Sequence[PackCandidate], tasks: Sequence[MergeTask], out: Path | None
) -> PackRequest:
    """Decide which experts are packed into `out` while `tasks` run, each of which reads all of its tensors.

    Without `out` no expert is packed.

    Raises:
        UnsupportedError, CorruptError, NotFoundError: an expert cannot be packed, see `deltastore.pack.job.job_of`.
    """
    if out is None:
        return NoPacks()
    from mergepipe.runs.packing.tap import request_tap_packs  # compiled

    return request_tap_packs(base, candidates, tasks, out)


def refusal_notices(request: PackRequest) -> tuple[str, ...]:
    """Return one sentence for each expert that is not packed, with the reason."""
    return tuple(f"{refusal.expert} is not packed: {refusal.reason}" for refusal in request.refused)
