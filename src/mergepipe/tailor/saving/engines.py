"""View what a rank holds under plain torch, DDP or FSDP2, and under DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mergepipe.core.blocks import Span
from mergepipe.errors import UnsupportedError
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework
from mergepipe.tailor.formats.dcp import DCP_FORMAT
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT
from mergepipe.tailor.formats.hf_trainer import HF_FORMAT
from mergepipe.tailor.saving.frameworks import (
    EngineView,
    LocalCounter,
    LocalShard,
    ModuleTensors,
    Ranks,
    local_shard,
    module_tensors,
    scalar_options,
)

# --- view what a rank holds under plain torch, DDP or FSDP2: whole tensors, or rows of them ---


def is_sharded(model: Any) -> bool:
    """Whether some parameter is a DTensor, as FSDP2 makes them."""
    return any(_is_distributed(parameter) for parameter in model.parameters())


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def view_plain(model: Any, optimizer: Any, ranks: Ranks, framework: Framework) -> EngineView:
    """View one rank's part; replicated tensors belong to rank 0. `model` is not wrapped."""
    module = module_tensors(model)
    shards = [s for n, t in module.stored.items() for s in _shards(n, WEIGHT, t, ranks)]
    counters = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = module.name_of(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == "step":
                counters.append(LocalCounter((name,), _reader(value)))
            elif hasattr(value, "shape"):
                _check_shape(name, kind, value, parameter)
                shards += _shards(name, kind, value, ranks)
    return EngineView(
        origin=DCP_FORMAT if framework is Framework.TORCH else HF_FORMAT,
        framework=framework,
        stage=None,
        world_size=ranks.world_size,
        parameters={name: tuple(tensor.shape) for name, tensor in module.stored.items()},
        tied=module.tied,
        flat_groups=(),
        options=tuple(scalar_options(group) for group in optimizer.param_groups),
        counters=tuple(counters),
        shards=tuple(shards),
        writes_counters=ranks.rank == 0,
    )


def _reader(value: Any) -> Callable[[], float]:
    return lambda: float(value)


def _check_shape(name: str, kind: str, value: Any, parameter: Any) -> None:
    shape, needed = tuple(value.shape), tuple(parameter.shape)
    if shape != needed:
        raise UnsupportedError.of(
            "training.unsupported", name, f"optimizer state {kind!r} has shape {shape}, not {needed}",
            "only optimizers whose states have their parameter's shape are saved in parts, as AdamW",
        )  # fmt: skip


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
            raise UnsupportedError.of(
                "training.unsupported", name, f"is placed as {tensor.placements}",
                "only FSDP2's sharding along the first dimension is saved",
            )  # fmt: skip
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
    module = module_tensors(model)
    is_stage3 = hasattr(zero, _STAGE3_FLATS)
    if is_stage3 and getattr(zero, "swap_optimizer", False):
        raise UnsupportedError.of(
            "training.unsupported", "ZeRO-3", "optimizer state that is swapped to disk is not saved"
        )
    groups = _stage3_groups(zero, module, ranks) if is_stage3 else _stage12_groups(zero, module, ranks)
    grouped = {name: shape for group in groups for name, shape in group.shapes.items()}
    ungrouped = {} if is_stage3 else {n: tuple(t.shape) for n, t in module.stored.items() if n not in grouped}
    shards = [shard for group in groups for shard in group.shards()]
    if not is_stage3 and ranks.rank == 0:
        shards += [local_shard(n, WEIGHT, Span(0, t.numel()), t) for n, t in module.stored.items() if t.numel()]
    return EngineView(
        origin=ZERO_FORMAT,
        framework=framework,
        stage=3 if is_stage3 else (2 if zero.partition_gradients else 1),
        world_size=ranks.world_size,
        parameters=grouped | ungrouped,
        tied=module.tied,
        flat_groups=tuple(tuple(group.shapes) for group in groups),
        options=tuple(scalar_options(group) for group in zero.optimizer.param_groups),
        counters=tuple(counter for group in groups if (counter := group.counter(zero)) is not None),
        shards=tuple(shards),
        writes_counters=True,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements `span` of a parameter, at `start` of the flat partition."""

    name: str
    span: Span
    start: int


@dataclass(frozen=True, slots=True)
class _Group:
    """One flat group: its parameters' shapes in order, this rank's parts, and the flat tensors by kind."""

    shapes: dict[str, tuple[int, ...]]
    parts: tuple[_Part, ...]
    flats: dict[str, Any]
    state: dict[str, Any]

    def shards(self) -> Iterator[LocalShard]:
        for kind, flat in self.flats.items():
            for part in self.parts:
                tensor = flat[part.start : part.start + part.span.n_elements]
                yield local_shard(part.name, kind, part.span, tensor)

    def counter(self, zero: Any) -> LocalCounter | None:
        """The step counter: in the state, or (fused optimizers) among the options of the parameter group."""
        if "step" in self.state:
            return LocalCounter(tuple(self.shapes), _reader(self.state["step"]))
        counters = [group["step"] for group in zero.optimizer.param_groups if "step" in group]
        return LocalCounter(tuple(self.shapes), _reader(counters[0])) if counters else None


def _group(zero: Any, flat: Any, shapes: dict[str, tuple[int, ...]], parts: tuple[_Part, ...]) -> _Group:
    state = zero.optimizer.state.get(flat, {})
    flats = {kind: value for kind, value in state.items() if getattr(value, "ndim", 0) == 1}
    odd = [kind for kind, value in flats.items() if value.numel() < flat.numel()]
    if odd:
        raise UnsupportedError.of(
            "training.unsupported", "ZeRO", f"optimizer state {odd[0]!r} is not one value an element"
        )
    return _Group(shapes, parts, {FP32: flat} | flats, state)


def _stage12_groups(zero: Any, module: ModuleTensors, ranks: Ranks) -> list[_Group]:
    """Build the groups of stages 1 and 2: parameters in sequence, cut in equal parts across parameter boundaries."""
    groups = []
    for flat, members in zip(zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, strict=True):
        begin = ranks.rank * flat.numel()
        shapes, parts, start = {}, [], 0
        for parameter in members:
            name, n_elements = module.name_of(parameter), parameter.numel()
            shapes[name] = tuple(parameter.shape)
            first = max(begin - start, 0)
            last = min(begin + flat.numel() - start, n_elements)
            if first < last:
                parts.append(_Part(name, Span(first, last), start + first - begin))
            start += n_elements
        if start > ranks.world_size * flat.numel():
            raise UnsupportedError.of("training.unsupported", "ZeRO", "the ranks do not partition the group alone")
        groups.append(_group(zero, flat, shapes, tuple(parts)))
    return groups


def _stage3_groups(zero: Any, module: ModuleTensors, ranks: Ranks) -> list[_Group]:
    """Build the groups of stage 3: each parameter is cut alone; a sub-group concatenates the rank's parts."""
    groups = []
    for flat, members in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        shapes, parts, start = {}, [], 0
        for parameter in members:
            name, shape = module.name_of(parameter), tuple(parameter.ds_shape)
            share = parameter.partition_numel()
            if share * ranks.world_size < prod(shape):
                raise UnsupportedError.of("training.unsupported", name, "is not partitioned over all ranks")
            shapes[name] = shape
            first = ranks.rank * share
            last = min(first + share, prod(shape))
            if first < last:
                parts.append(_Part(name, Span(first, last), start))
            start += share
        groups.append(_group(zero, flat, shapes, tuple(parts)))
    return groups
