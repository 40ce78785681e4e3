"""Compute the flat groups of a DeepSpeed ZeRO checkpoint for another number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.core.blocks import element_count
from mergepipe.core.values import dataclass
from mergepipe.errors import UnsupportedError
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.composition.request.restack import restacked_names
from mergepipe.tailor.formats.deepspeed import base_optimizer_path
from mergepipe.tailor.formats.pickle_node import Node
from mergepipe.tailor.units import UnitKind

_DEFAULT_SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat group: its parameters in order, the number of a flat group there was before whose states it has the
    form of, and that of its parameter group (stage 3)."""

    names: tuple[str, ...]
    like: int
    options: int


def regrouped(
    skeleton: TrainingCheckpoint, optimizer_file: Node, world_size: int, layers: Sequence[int] | None = None
) -> tuple[FlatGroup, ...]:
    """Compute the flat groups for `world_size` ranks; stage 3 cuts parameter groups by the size of a rank's part.

    With `layers` they are those of a model of other parameters that stacks these layers of the skeleton's.

    Law: at the skeleton's own number of ranks, they are the skeleton's.

    Raises:
        UnsupportedError: the skeleton's groups are not what its own settings make.
    """
    groups = skeleton.flat_groups
    if skeleton.stage != 3:
        return tuple(
            FlatGroup(tuple(name for name, _ in _restacked(skeleton, names, layers)), number, number)
            for number, names in enumerate(groups)
        )
    options = optimizer_file.at(base_optimizer_path(3)).get("param_groups").elements()
    members = [tuple(node.integer() for node in group.get("params").elements()) for group in options]
    limit = _limit(optimizer_file)
    joined = [tuple(name for i in numbers if i < len(groups) for name in groups[i]) for numbers in members]
    before = [cut for names in joined for cut in _cut(skeleton, _pairs(names), skeleton.world_size, limit)]
    if tuple(before) != groups or [i for numbers in members for i in numbers] != list(range(len(groups))):
        raise UnsupportedError.of(
            "tailor.world-size.sub-groups", skeleton.path,
            f"its {len(groups)} flat groups are not what {len(options)} parameter groups and a sub_group_size of "
            f"{limit} make", "compose without --world-size",
        )  # fmt: skip
    return tuple(
        FlatGroup(cut, members[number][0], number)
        for number, names in enumerate(joined)
        for cut in _cut(skeleton, _restacked(skeleton, names, layers), world_size, limit)
    )


def _pairs(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _restacked(
    skeleton: TrainingCheckpoint, names: Sequence[str], layers: Sequence[int] | None
) -> tuple[tuple[str, str], ...]:
    """Return the group's parameters in the result, each with its name in the skeleton.

    Raises:
        UnsupportedError: the group holds some layers and not others: their number would be another.
    """
    if layers is None:
        return _pairs(names)
    held = {unit for unit in map(skeleton.units.unit_of, names) if unit.kind is UnitKind.LAYER}
    if held and len(held) < skeleton.units.n_layers:
        raise UnsupportedError.of(
            "tailor.restack.groups", skeleton.path,
            f"its optimizer has groups of single layers, as that of {min(held)}, and would need others",
            f"stack {skeleton.units.n_layers} layers of the same kinds",
        )  # fmt: skip
    return restacked_names(names, skeleton.units, layers)


def _limit(optimizer_file: Node) -> int:
    """`sub_group_size` of the configuration the checkpoint was saved with."""
    config = optimizer_file.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    limit = zero.find("sub_group_size") if zero is not None else None
    return (
        int(limit.value) if limit is not None and isinstance(limit.value, int | float) else _DEFAULT_SUB_GROUP_ELEMENTS
    )


def _cut(
    skeleton: TrainingCheckpoint, pairs: Sequence[tuple[str, str]], world_size: int, limit: int
) -> Iterator[tuple[str, ...]]:
    """Cut a parameter group: a sub-group ends as soon as a rank's part of it has `limit` elements."""
    group: list[str] = []
    n_elements = 0
    for name, before in pairs:
        group.append(name)
        n_elements += -(-element_count(skeleton.parameters[before]) // world_size)
        if n_elements >= limit:
            yield tuple(group)
            group, n_elements = [], 0
    if group:
        yield tuple(group)
