"""View what a rank holds: whole tensors or rows under torch, DDP and FSDP2, flat partitions under DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

from mergepipe.core.blocks import Span
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework
from mergepipe.tailor.formats.dcp import DCP_FORMAT
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT, cut_alone, cut_together
from mergepipe.tailor.formats.hf_trainer import HF_FORMAT
from mergepipe.tailor.formats.partial import PartialManifest
from mergepipe.tailor.saving.frameworks import (
    EngineView,
    LocalShard,
    Ranks,
    local_shard,
    module_tensors,
    scalar_options,
    unsupported_training,
)


def is_distributed(tensor: Any) -> bool:
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
    if not is_distributed(tensor):
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
