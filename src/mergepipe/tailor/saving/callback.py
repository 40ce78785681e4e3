"""Save partial checkpoints under the Hugging Face Trainer, or from a custom training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergepipe.errors import RecipeError, UnsupportedError
from mergepipe.tailor.checkpoint import Framework
from mergepipe.tailor.formats.dcp import METADATA_NAME
from mergepipe.tailor.formats.hf_trainer import LOSS_SCALER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from mergepipe.tailor.saving.engines import find_zero, is_sharded, view_plain, view_zero
from mergepipe.tailor.saving.frameworks import (
    EngineView,
    Ranks,
    current_ranks,
    save_distributed,
    save_distributed_state,
    save_object,
    save_random_state,
    trainer_callback_base,
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
            raise RecipeError.of(
                "option.conflict", "state", f"has the key {reserved[0]!r}, which is taken", "rename it"
            )

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


# --- save partial checkpoints under the Hugging Face Trainer: plain, DDP, DeepSpeed ZeRO-1/2/3 ---


_TrainerCallback: Any = trainer_callback_base()


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
            raise RecipeError.of("option.invalid", "every_steps", f"{every_steps} is no number of steps")
        self._every_steps = every_steps
        self._strategy = strategy
        self._tracker = tracker or (ChangeTracker() if isinstance(strategy, LatestChanged) else None)
        self._writer = BackgroundWriter() if background else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that cannot be composed later, and log the step at which training resumes."""
        _check_arguments(args, kwargs["model"])
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


def _check_arguments(args: Any, model: Any) -> None:
    """Refuse settings under which no composite could be made; before the first step."""
    if args.save_total_limit is not None:
        raise UnsupportedError.of(
            "training.unsupported",
            "save_total_limit",
            "would delete the full checkpoint that partial ones stand on",
            "unset it",
        )
    if args.save_only_model:
        raise UnsupportedError.of("training.unsupported", "save_only_model", "leaves no full checkpoint to resume from")
    if getattr(args, "fsdp", None) or is_sharded(model):
        raise UnsupportedError.of(
            "training.unsupported", "fsdp", "the callback does not save FSDP models in parts",
            "use mergepipe.tailor.saving.save_partial in a loop of your own",
        )  # fmt: skip
