"""Save partial checkpoints under the Hugging Face Trainer, or from a custom training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mergepipe.errors import RecipeError, invalid_option, library
from mergepipe.tailor.checkpoint import Framework
from mergepipe.tailor.formats.dcp import METADATA_NAME
from mergepipe.tailor.formats.hf_trainer import LOSS_SCALER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from mergepipe.tailor.saving.engine_views import find_zero, is_distributed, view_plain, view_zero
from mergepipe.tailor.saving.frameworks import (
    EngineView,
    Ranks,
    current_ranks,
    save_distributed,
    save_distributed_state,
    save_object,
    save_random_state,
    unsupported_training,
    unwrapped,
)
from mergepipe.tailor.saving.partial_run import FULL, BackgroundWriter, PartialRun, write_together
from mergepipe.tailor.saving.save_log import SaveRecord
from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, Strategy

# --- save partial checkpoints from a custom training loop, under plain torch, DDP or FSDP2 ---


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
    own = dict(state or {})
    reserved = [key for key in _OWN_KEYS if key in own]
    if reserved:
        message = f"has the key {reserved[0]!r}, which is reserved"
        raise RecipeError.of("option.conflict", "state", message, "rename it")
    ranks = current_ranks()
    inner = unwrapped(model)
    view = view_plain(inner, optimizer, ranks, Framework.TORCH)
    random_name = f"rng_state_{ranks.rank}.pth"

    def write_full(folder: Path) -> None:
        """Write the whole checkpoint, on all ranks together."""
        save_distributed(inner, optimizer, own, folder)
        save_random_state(folder / random_name)

    def write_extra(folder: Path) -> Iterable[Path]:
        """Write this rank's part beside a partial save's shard: torch's form, so that composites can point to it."""
        save_random_state(folder / random_name)
        yield folder / random_name
        if ranks.rank == 0:
            save_distributed_state(inner, optimizer, own, folder)
            yield folder / METADATA_NAME
            yield from sorted(folder.glob("*.distcp"))

    saves = PartialRun(run, strategy, ranks, tracker, writer)
    history = saves.history(step)
    if history:
        return saves.save(view, step, history, write_extra)
    started = time.perf_counter()
    name = saves.free_name(f"{FULL}-{step}")
    write_together(run / name, ranks, write_full)
    return saves.note_full(view, step, name, time.perf_counter() - started)


# --- save partial checkpoints under the Hugging Face Trainer: plain, DDP, DeepSpeed ZeRO-1/2/3 ---


_TrainerCallback: Any = library("transformers", "PartialCheckpointCallback", "train").TrainerCallback


class PartialCheckpointCallback(_TrainerCallback):  # type: ignore[misc]
    """Saves the units whose turn it is every `every_steps` steps into the Trainer's output directory.

    The first save of a run is full and is the Trainer's own: it is asked to save a checkpoint at that step. Partial
    ones are `partial-STEP` beside it, with the scheduler, random states and the Trainer's state of their step. Set
    `save_strategy="no"`, or save rarely: each full save that the Trainer makes is taken into account.

    With `background` a save takes the time of a copy to the host, and is written behind the training step; a failure
    is raised by the next save, or when training ends.
    """

    def __init__(
        self, every_steps: int, strategy: Strategy, *, tracker: ChangeTracker | None = None, background: bool = False
    ) -> None:
        if every_steps < 1:
            raise invalid_option("every_steps", f"{every_steps} is not a number of steps")
        self._every_steps = every_steps
        self._strategy = strategy
        self._tracker = tracker or (ChangeTracker() if isinstance(strategy, LatestChanged) else None)
        self._writer = BackgroundWriter() if background else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that cannot be composed later, and log the step at which training resumes."""
        if args.save_total_limit is not None:
            message = "would delete the full checkpoint that the partial ones depend on"
            raise unsupported_training("save_total_limit", message, "unset it")
        if args.save_only_model:
            raise unsupported_training("save_only_model", "leaves no full checkpoint to resume from")
        if getattr(args, "fsdp", None) or any(is_distributed(parameter) for parameter in kwargs["model"].parameters()):
            message = "the callback does not save FSDP models in parts"
            hint = "use mergepipe.tailor.saving.save_partial in a loop of your own"
            raise unsupported_training("fsdp", message, hint)
        self._saves(args).start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save a partial checkpoint when it is due, unless the Trainer is about to save a full one."""
        if state.global_step % self._every_steps or control.should_save:
            return control
        saves = self._saves(args)
        history = saves.history(state.global_step)
        if not history:
            control.should_save = True
            return control
        view = _view(saves.ranks, **kwargs)
        small = {SCHEDULER_NAME: kwargs["lr_scheduler"].state_dict(), **_loss_scale(kwargs["optimizer"])}
        saves.save(view, state.global_step, history, _extra_files(saves.ranks, state, small))
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a full checkpoint that the Trainer has written."""
        saves = self._saves(args)
        name = f"checkpoint-{state.global_step}"
        if all(saves.ranks.gather((saves.run / name).is_dir())):
            saves.note_full(_view(saves.ranks, **kwargs), state.global_step, name)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the save that is being written."""
        if self._writer is not None:
            self._writer.wait()

    def _saves(self, args: Any) -> PartialRun:
        return PartialRun(Path(args.output_dir), self._strategy, current_ranks(), self._tracker, self._writer)


def _view(ranks: Ranks, *, model: Any, optimizer: Any, **_: Any) -> EngineView:
    zero = find_zero(optimizer)
    if zero is not None:
        return view_zero(zero, unwrapped(model), ranks, Framework.TRANSFORMERS)
    inner = getattr(optimizer, "optimizer", optimizer)
    return view_plain(unwrapped(model), inner, ranks, Framework.TRANSFORMERS)


def _loss_scale(optimizer: Any) -> dict[str, Any]:
    """The state of fp16's loss scaler by its file, where there is one: DeepSpeed's own, or the Trainer's."""
    zero = find_zero(optimizer)
    if zero is not None:
        return {LOSS_SCALER_NAME: vars(zero.loss_scaler)} if zero.dynamic_loss_scale else {}
    scaler = getattr(optimizer, "scaler", None)
    return {} if scaler is None else {SCALER_NAME: scaler.state_dict()}


def _extra_files(ranks: Ranks, state: Any, small: dict[str, Any]) -> Callable[[Path], Iterable[Path]]:
    """Write the small files of a Trainer checkpoint, under the Trainer's names; `small` is of rank 0."""

    def write(folder: Path) -> Iterable[Path]:
        suffix = f"_{ranks.rank}" if ranks.world_size > 1 else ""
        random_state = folder / f"rng_state{suffix}.pth"
        save_random_state(random_state)
        yield random_state
        if ranks.rank == 0:
            state.save_to_json(str(folder / TRAINER_STATE_NAME))
            yield folder / TRAINER_STATE_NAME
            for name, value in small.items():
                save_object(value, folder / name)
                yield folder / name

    return write
