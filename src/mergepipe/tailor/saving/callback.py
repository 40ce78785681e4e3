"""Save partial checkpoints under the Hugging Face Trainer, or from a custom training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from mergepipe.core.blocks import Span
from mergepipe.errors import RecipeError, invalid_option, library
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework
from mergepipe.tailor.formats.dcp import DCP_FORMAT, METADATA_NAME
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT, cut_alone, cut_together
from mergepipe.tailor.formats.hf_trainer import (
    HF_FORMAT,
    LOSS_SCALER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from mergepipe.tailor.formats.partial import PartialManifest
from mergepipe.tailor.saving.frameworks import (
    EngineView,
    LocalShard,
    Ranks,
    current_ranks,
    local_shard,
    module_tensors,
    save_distributed,
    save_distributed_state,
    save_object,
    save_random_state,
    scalar_options,
    unsupported_training,
    unwrapped,
)
from mergepipe.tailor.saving.partial_run import FULL, BackgroundWriter, PartialRun, write_together
from mergepipe.tailor.saving.unit_choice import ChangeTracker, LatestChanged, SaveRecord, Strategy

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
        if getattr(args, "fsdp", None) or any(_is_distributed(parameter) for parameter in kwargs["model"].parameters()):
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


# --- view what a rank holds under plain torch, DDP or FSDP2: whole tensors, or rows of them ---


def _is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 makes them."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def view_plain(model: Any, optimizer: Any, ranks: Ranks, framework: Framework) -> EngineView:
    """View one rank's part; replicated tensors belong to rank 0. `model` is not wrapped."""
    stored, tied, name_of = module_tensors(model)
    shards = [s for n, t in stored.items() for s in _shards(n, WEIGHT, t, ranks)]
    counters: dict[tuple[str, ...], Callable[[], float]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = name_of(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == "step":
                counters[name,] = partial(float, value)
            elif hasattr(value, "shape"):
                shape, needed = tuple(value.shape), tuple(parameter.shape)
                if shape != needed:
                    hint = "only optimizers whose states have their parameter's shape are saved in parts, as AdamW"
                    raise unsupported_training(name, f"optimizer state {kind!r} has shape {shape}, not {needed}", hint)
                shards += _shards(name, kind, value, ranks)
    layout = PartialManifest(
        origin=DCP_FORMAT if framework is Framework.TORCH else HF_FORMAT,
        framework=framework,
        stage=None,
        world_size=ranks.world_size,
        step=0,
        parameters={name: tuple(tensor.shape) for name, tensor in stored.items()},
        tied=tied,
        flat_groups=(),
        units=(),
        counters=tuple(counters),
        options=tuple(scalar_options(group) for group in optimizer.param_groups),
        shards=(),
    )
    return EngineView(layout, tuple(counters.values()), tuple(shards), writes_counters=ranks.rank == 0)


def _shards(name: str, kind: str, tensor: Any, ranks: Ranks) -> Iterator[LocalShard]:
    """Return this rank's part of a tensor: none or one shard."""
    if not _is_distributed(tensor):
        if ranks.rank == 0 and tensor.numel():
            yield local_shard(name, kind, Span(0, tensor.numel()), tensor)
        return
    place = _rows(name, tensor)
    local = tensor.to_local()
    if place is not None and local.numel():
        start = place * (tensor.numel() // tensor.shape[0])
        yield local_shard(name, kind, Span(start, start + local.numel()), local)


def _rows(name: str, tensor: Any) -> int | None:
    """The first row this rank holds of a DTensor; None where another rank writes the same rows."""
    coordinate = tensor.device_mesh.get_coordinate()
    row = None
    for position, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_shard(0) and row is None:
            row = position * -(-tensor.shape[0] // size)
        elif not placement.is_replicate():
            message = f"is placed as {tensor.placements}"
            raise unsupported_training(name, message, "only FSDP2's sharding along the first dimension is saved")
        elif position:
            return None
    return 0 if row is None else row


# --- view what a rank of DeepSpeed ZeRO (stages 1, 2 and 3) holds: flat partitions cut at the parameters ---


_STAGE12_FLATS = "single_partition_of_fp32_groups"
_STAGE3_FLATS = "fp32_partitioned_groups_flat"


def find_zero(optimizer: Any) -> Any | None:
    """The ZeRO optimizer inside wrappers of it; None where there is none."""
    inner = optimizer
    while inner is not None:
        if hasattr(inner, _STAGE12_FLATS) or hasattr(inner, _STAGE3_FLATS):
            return inner
        inner = getattr(inner, "optimizer", None)
    return None


def view_zero(zero: Any, model: Any, ranks: Ranks, framework: Framework) -> EngineView:
    """View one rank's part. `model` is the module inside the engine."""
    stored, tied, name_of = module_tensors(model)
    is_stage3 = hasattr(zero, _STAGE3_FLATS)
    if is_stage3 and getattr(zero, "swap_optimizer", False):
        raise unsupported_training("ZeRO-3", "optimizer state that is swapped to disk is not saved")
    groups: list[dict[str, tuple[int, ...]]] = []
    counters: dict[tuple[str, ...], Callable[[], float]] = {}
    shards: list[LocalShard] = []
    for flat, members in _flat_groups(zero):
        shapes = {name_of(p): tuple(p.ds_shape if is_stage3 else p.shape) for p in members}
        groups.append(shapes)
        state = zero.optimizer.state.get(flat, {})
        flats = {kind: value for kind, value in state.items() if getattr(value, "ndim", 0) == 1}
        odd = [kind for kind, value in flats.items() if value.numel() < flat.numel()]
        if odd:
            raise unsupported_training("ZeRO", f"optimizer state {odd[0]!r} is not one value an element")
        if is_stage3:
            shares = [parameter.partition_numel() for parameter in members]
            for (name, shape), share in zip(shapes.items(), shares, strict=True):
                if share * ranks.world_size < prod(shape):
                    raise unsupported_training(name, "is not partitioned over all ranks")
            cut = cut_alone(shapes, shares, ranks.rank)
        else:
            if sum(map(prod, shapes.values())) > ranks.world_size * flat.numel():
                raise unsupported_training("ZeRO", "the ranks do not partition the group alone")
            cut = cut_together(shapes, flat.numel(), ranks.rank)
        parts = [part for part in cut if part[1].n_elements]
        for kind, values in ({FP32: flat} | flats).items():
            for name, span, start in parts:
                shards.append(local_shard(name, kind, span, values[start : start + span.n_elements]))
        # fused optimizers keep the counter among the options of the parameter group
        steps = [holder["step"] for holder in (state, *zero.optimizer.param_groups) if "step" in holder]
        if steps:
            counters[tuple(shapes)] = partial(float, steps[0])
    grouped = {name: shape for shapes in groups for name, shape in shapes.items()}
    ungrouped = {} if is_stage3 else {n: tuple(t.shape) for n, t in stored.items() if n not in grouped}
    if not is_stage3 and ranks.rank == 0:
        shards += [local_shard(n, WEIGHT, Span(0, t.numel()), t) for n, t in stored.items() if t.numel()]
    layout = PartialManifest(
        origin=ZERO_FORMAT,
        framework=framework,
        stage=3 if is_stage3 else (2 if zero.partition_gradients else 1),
        world_size=ranks.world_size,
        step=0,
        parameters=grouped | ungrouped,
        tied=tied,
        flat_groups=tuple(tuple(shapes) for shapes in groups),
        units=(),
        counters=tuple(counters),
        options=tuple(scalar_options(group) for group in zero.optimizer.param_groups),
        shards=(),
    )
    return EngineView(layout, tuple(counters.values()), tuple(shards), writes_counters=True)


def _flat_groups(zero: Any) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's flat partition of masters, and the parameters of its group."""
    if hasattr(zero, _STAGE3_FLATS):
        return zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
    return zip(zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, strict=True)
