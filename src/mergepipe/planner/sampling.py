"""What it costs to find out an expert's content id, which random operators are keyed by."""

from __future__ import annotations

from mergepipe.cost import range_cost_bytes
from mergepipe.engine.identity import samples
from mergepipe.readers.base import Checkpoint, TensorEntry


def sample_cost_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that `engine.identity.content_id` requests of the checkpoint's files."""
    cost = 0
    for sample in samples(checkpoint):
        if isinstance(sample.tensor, TensorEntry):
            offset = sample.tensor.offset
            cost += range_cost_bytes(offset + sample.first, offset + sample.stop)
        else:
            cost += sample.tensor.cost_bytes(sample.span)
    return cost
