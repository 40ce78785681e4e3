"""Split an output into parts of whole shards, each made by one worker, and the result that a finished part has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mergepipe.engine.work import OutputPlan
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage.ledger import Usage


@dataclass(frozen=True, slots=True)
class Part:
    """Some shards of an output, by their ascending indices: what one worker makes.

    Law: its bytes do not depend on who makes it, nor on the other parts.
    """

    shards: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.shards) != sorted(set(self.shards)) or (self.shards and self.shards[0] < 0):
            raise ValueError(f"not ascending indices of shards: {self.shards}")


def whole(output: OutputPlan) -> Part:
    """Return the part that is everything."""
    return Part(tuple(range(len(output.shards))))


def split(output: OutputPlan, n_parts: int) -> tuple[Part, ...]:
    """Deal the shards to parts so that the largest part is small; with fewer shards than parts some are empty.

    Laws: the parts are disjoint and cover the output; equal outputs are split alike.
    """
    return split_sizes([shard.file_bytes for shard in output.shards], n_parts)


def split_sizes(file_bytes: Sequence[int], n_parts: int) -> tuple[Part, ...]:
    """Deal shards of these sizes to parts, as `split` does."""
    if n_parts < 1:
        raise ValueError(f"an output has at least one part, not {n_parts}")
    shards_of: list[list[int]] = [[] for _ in range(n_parts)]
    bytes_of = [0] * n_parts
    for index in sorted(range(len(file_bytes)), key=lambda index: (-file_bytes[index], index)):
        part = bytes_of.index(min(bytes_of))
        shards_of[part].append(index)
        bytes_of[part] += file_bytes[index]
    return tuple(Part(tuple(sorted(shards))) for shards in shards_of)


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of a finished part: the digests of its tensors by shard, and the bytes it read and wrote.

    Law: a part made again gives an equal result.
    """

    digests_of: Mapping[int, tuple[TensorDigest, ...]] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

    @property
    def digests(self) -> tuple[TensorDigest, ...]:
        """The digests of all tensors, in output order."""
        return tuple(digest for shard in sorted(self.digests_of) for digest in self.digests_of[shard])
