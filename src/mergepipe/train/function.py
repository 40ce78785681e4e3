"""`save_partial`: partial saving for a training loop of one's own, under plain torch, DDP or FSDP2."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mergepipe.tailor.checkpoint import Format, Framework
from mergepipe.tailor.save_log import SaveRecord
from mergepipe.train.changes import ChangeTracker
from mergepipe.train.choice import Strategy
from mergepipe.train.frameworks import current_ranks, save_distributed
from mergepipe.train.modules import unwrapped
from mergepipe.train.partial_run import FULL, PartialRun
from mergepipe.train.plain import view_plain
from mergepipe.train.saving import write_together


def save_partial(
    run: Path,
    model: Any,
    optimizer: Any,
    *,
    step: int,
    strategy: Strategy,
    tracker: ChangeTracker | None = None,
) -> SaveRecord:
    """Save the units whose turn it is into `run`, after an optimizer step; call it on every rank.

    The first save of a run is full: under FSDP2 a torch.distributed.checkpoint directory, which `load` takes, else
    one in our own form. Neither model nor optimizer is modified. `tracker` is needed by `LatestChanged`.

    Raises:
        UnsupportedError: a model or optimizer that cannot be saved in parts; nothing was written.
        LimitError: the budget is smaller than a unit.
        MergePipeError: a rank could not write; nothing of this save is visible, earlier ones are as they were.
    """
    ranks = current_ranks()
    inner = unwrapped(model)
    view = view_plain(inner, optimizer, ranks, Framework.TORCH)
    saves = PartialRun(run, strategy, ranks, tracker)
    history = saves.history(step)
    if history or view.origin is not Format.DCP:
        return saves.save(view, step, history)
    started = time.perf_counter()
    name = saves.free_name(f"{FULL}-{step}")
    write_together(run / name, ranks, lambda staged: save_distributed(inner, optimizer, staged), lambda *_: 0)
    return saves.note_full(view, step, name, time.perf_counter() - started)
