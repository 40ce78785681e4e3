"""Save partial checkpoints from a custom training loop, under plain torch, DDP or FSDP2."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergepipe.errors import RecipeError
from mergepipe.tailor.checkpoint import Framework
from mergepipe.tailor.formats.dcp import METADATA_NAME
from mergepipe.tailor.saving.background import BackgroundWriter
from mergepipe.tailor.saving.changes import ChangeTracker
from mergepipe.tailor.saving.frameworks import (
    current_ranks,
    save_distributed,
    save_distributed_state,
    save_random_state,
)
from mergepipe.tailor.saving.modules import unwrapped
from mergepipe.tailor.saving.partial_run import FULL, PartialRun
from mergepipe.tailor.saving.partial_writer import write_together
from mergepipe.tailor.saving.plain_engine import view_plain
from mergepipe.tailor.saving.save_log import SaveRecord
from mergepipe.tailor.saving.unit_choice import Strategy

_OWN_KEYS = ("model", "optim")


def save_partial(
    run: Path,
    model: Any,
    optimizer: Any,
    *,
    step: int,
    strategy: Strategy,
    tracker: ChangeTracker | None = None,
    state: Mapping[str, Any] | None = None,
    writer: BackgroundWriter | None = None,
) -> SaveRecord:
    """Save the units that are due into `run`, after an optimizer step. Call it on every rank.

    The first save of a run is full: a torch.distributed.checkpoint directory, which `load` takes, and so is what is
    composed of it and of the partial ones. Neither model nor optimizer is modified. `tracker` is needed by
    `LatestChanged`.

    `state` is the loop's own: what torch.distributed.checkpoint can save, with the same keys on every rank and at
    every save, as `{"step": step, "scheduler": scheduler.state_dict()}`; `load` gives it back from full saves and
    composites. Each rank's random states are written beside it, for `restore_random_state`.

    With a `writer` a partial save returns when its values are copied to the host, and is written behind the training
    step. Give the same one at every save, and use it as a context manager around the loop.

    Raises:
        RecipeError: `state` has a key that is taken.
        UnsupportedError: a model or optimizer that cannot be saved in parts; nothing was written.
        LimitError: the budget is smaller than a unit.
        MergePipeError: a rank could not write; nothing of this save (or, with a `writer`, of the one before) is
            visible, earlier ones are as they were.
    """
    ranks = current_ranks()
    inner = unwrapped(model)
    view = view_plain(inner, optimizer, ranks, Framework.TORCH)
    loop = LoopState(inner, optimizer, dict(state or {}), ranks.rank)
    saves = PartialRun(run, strategy, ranks, tracker, writer)
    history = saves.history(step)
    if history:
        return saves.save(view, step, history, loop.write)
    started = time.perf_counter()
    name = saves.free_name(f"{FULL}-{step}")
    write_together(run / name, ranks, loop.write_full, lambda *_: 0)
    return saves.note_full(view, step, name, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class LoopState:
    """The state that a training loop resumes from, beside the tensors of its units."""

    model: Any
    optimizer: Any
    state: dict[str, Any]
    rank: int

    def __post_init__(self) -> None:
        reserved = [key for key in _OWN_KEYS if key in self.state]
        if reserved:
            raise RecipeError.of("train.state", "state", f"has the key {reserved[0]!r}, which is taken", "rename it")

    def write_full(self, folder: Path) -> None:
        """Write the whole checkpoint, on all ranks together."""
        save_distributed(self.model, self.optimizer, self.state, folder)
        save_random_state(folder / f"rng_state_{self.rank}.pth")

    def write(self, folder: Path) -> Iterable[Path]:
        """Write this rank's part beside a partial save's shard: torch's form, so that composites can point to it."""
        random_state = folder / f"rng_state_{self.rank}.pth"
        save_random_state(random_state)
        yield random_state
        if self.rank == 0:
            save_distributed_state(self.model, self.optimizer, self.state, folder)
            yield folder / METADATA_NAME
            yield from sorted(folder.glob("*.distcp"))
