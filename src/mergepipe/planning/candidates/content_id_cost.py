"""Compute the cost of an expert's content id, which keys random operators."""

from __future__ import annotations

from mergepipe.checkpoints.content_id import samples
from mergepipe.checkpoints.contract import Checkpoint, TensorEntry, range_cost_bytes


def sample_cost_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that `checkpoints.content_id.content_id` requests of the checkpoint's files."""
    cost = 0
    for sample in samples(checkpoint):
        if isinstance(sample.tensor, TensorEntry):
            offset = sample.tensor.offset
            cost += range_cost_bytes(offset + sample.first, offset + sample.stop, sample.tensor.granularity_bytes)
        else:
            cost += sample.tensor.cost_bytes(sample.span)
    return cost
