"""What it costs to find out an expert's content id, which random operators are keyed by."""

from __future__ import annotations

from mergepipe.cost import range_cost_bytes
from mergepipe.engine.identity import N_SAMPLES, SAMPLE_BYTES
from mergepipe.readers.base import Checkpoint


def sample_cost_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that `engine.identity.content_id` requests of the checkpoint's files."""
    entries = sorted(checkpoint.tensors.values(), key=lambda entry: entry.name)
    total = sum(entry.nbytes for entry in entries)
    targets = [max(0, total - SAMPLE_BYTES) * i // (N_SAMPLES - 1) for i in range(N_SAMPLES)]
    cost, start, position = 0, 0, 0
    for entry in entries:
        while position < N_SAMPLES and targets[position] < start + entry.nbytes:
            first = entry.offset + targets[position] - start
            cost += range_cost_bytes(first, min(first + SAMPLE_BYTES, entry.offset + entry.nbytes))
            position += 1
        start += entry.nbytes
    return cost
