"""Compute the flat groups of a DeepSpeed ZeRO checkpoint for another number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mergepipe.core.blocks import element_count
from mergepipe.errors import UnsupportedError
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.deepspeed import base_optimizer_path
from mergepipe.tailor.formats.pickle_node import Node

_DEFAULT_SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat group: its parameters in order, the number of a flat group there was before whose states it has the
    form of, and that of its parameter group (stage 3)."""

    names: tuple[str, ...]
    like: int
    options: int


def regrouped(skeleton: TrainingCheckpoint, optimizer_file: Node, world_size: int) -> tuple[FlatGroup, ...]:
    """Compute the flat groups for `world_size` ranks; stage 3 cuts parameter groups by the size of a rank's part.

    Law: at the skeleton's own number of ranks, they are the skeleton's.

    Raises:
        UnsupportedError: the skeleton's groups are not what its own settings make.
    """
    groups = skeleton.flat_groups
    if skeleton.stage != 3:
        return tuple(FlatGroup(names, number, number) for number, names in enumerate(groups))
    options = optimizer_file.at(base_optimizer_path(3)).get("param_groups").elements()
    members = [tuple(node.integer() for node in group.get("params").elements()) for group in options]
    limit = _limit(optimizer_file)
    joined = [tuple(name for i in numbers if i < len(groups) for name in groups[i]) for numbers in members]
    before = [cut for names in joined for cut in _cut(skeleton, names, skeleton.world_size, limit)]
    if tuple(before) != groups or [i for numbers in members for i in numbers] != list(range(len(groups))):
        raise UnsupportedError.of(
            "tailor.world-size.sub-groups", skeleton.path,
            f"its {len(groups)} flat groups are not what {len(options)} parameter groups and a sub_group_size of "
            f"{limit} make", "compose without --world-size",
        )  # fmt: skip
    return tuple(
        FlatGroup(cut, members[number][0], number)
        for number, names in enumerate(joined)
        for cut in _cut(skeleton, names, world_size, limit)
    )


def _limit(optimizer_file: Node) -> int:
    """`sub_group_size` of the configuration the checkpoint was saved with."""
    config = optimizer_file.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    limit = zero.find("sub_group_size") if zero is not None else None
    return (
        int(limit.value) if limit is not None and isinstance(limit.value, int | float) else _DEFAULT_SUB_GROUP_ELEMENTS
    )


def _cut(skeleton: TrainingCheckpoint, names: Sequence[str], world_size: int, limit: int) -> Iterator[tuple[str, ...]]:
    """Cut a parameter group: a sub-group ends as soon as a rank's part of it has `limit` elements."""
    group: list[str] = []
    n_elements = 0
    for name in names:
        group.append(name)
        n_elements += -(-element_count(skeleton.parameters[name]) // world_size)
        if n_elements >= limit:
            yield tuple(group)
            group, n_elements = [], 0
    if group:
        yield tuple(group)
