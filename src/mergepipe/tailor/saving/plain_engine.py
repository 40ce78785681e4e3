"""View what a rank holds under plain torch, DDP or FSDP2: whole tensors, or rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mergepipe.core.blocks import Span
from mergepipe.errors import UnsupportedError
from mergepipe.tailor.checkpoint import WEIGHT, Framework
from mergepipe.tailor.formats.dcp import DCP_FORMAT
from mergepipe.tailor.formats.hf_optimizer import HF_FORMAT
from mergepipe.tailor.saving.engine_view import EngineView, LocalCounter, LocalShard, Ranks
from mergepipe.tailor.saving.frameworks import local_shard, scalar_options
from mergepipe.tailor.saving.modules import module_tensors


def is_sharded(model: Any) -> bool:
    """Whether some parameter is a DTensor, as FSDP2 makes them."""
    return any(_is_distributed(parameter) for parameter in model.parameters())


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def view_plain(model: Any, optimizer: Any, ranks: Ranks, framework: Framework) -> EngineView:
    """View one rank's part; replicated tensors belong to rank 0. `model` is not wrapped.

    Raises:
        UnsupportedError: tensors cut otherwise than by rows; optimizer states of another shape than their parameter's.
    """
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
            "train.state", name, f"optimizer state {kind!r} has shape {shape}, not {needed}",
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
                "train.rows", name, f"is placed as {tensor.placements}",
                "only FSDP2's sharding along the first dimension is saved",
            )  # fmt: skip
        elif position:
            return None
    return 0 if row is None else row
