"""What randomness is keyed by: a content id per expert from a small sample, and a stream key per expert and tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from mergepipe.budget import Purpose
from mergepipe.canonical import canonical_json
from mergepipe.readers.base import Checkpoint, TensorEntry
from mergepipe.storage.base import RangeFile
from mergepipe.storage.buffers import aligned_buffer, round_up

N_SAMPLES = 32
SAMPLE_BYTES = 2048


def content_id(checkpoint: Checkpoint, files: Mapping[Path, RangeFile]) -> str:
    """Identify a checkpoint by its tensor table and 32 samples of 2 KiB, 32 hex digits.

    Samples are spread evenly over the tensors' bytes in order of name, so the id does not depend on sharding, file
    names or times. At most 32 * 3 pages are read, as analysis. Two checkpoints that agree in every sample share an
    id: their random masks are then the same, nothing else follows from it.
    """
    entries = sorted(checkpoint.tensors.values(), key=lambda entry: entry.name)
    table = [[entry.name, entry.dtype.name, list(entry.shape)] for entry in entries]
    hasher = blake3(canonical_json(table))
    total = sum(entry.nbytes for entry in entries)
    targets = [max(0, total - SAMPLE_BYTES) * i // (N_SAMPLES - 1) for i in range(N_SAMPLES)]
    start = 0
    for entry in entries:
        while targets and targets[0] < start + entry.nbytes:
            hasher.update(_sample(entry, targets.pop(0) - start, files[entry.file]))
        start += entry.nbytes
    return hasher.hexdigest(16)


def _sample(entry: TensorEntry, position: int, file: RangeFile) -> bytes:
    """Up to `SAMPLE_BYTES` of the tensor from `position` on."""
    first = entry.offset + position
    last = min(first + SAMPLE_BYTES, entry.offset + entry.nbytes)
    aligned = first // file.alignment * file.alignment
    nbytes = round_up(last, file.alignment) - aligned
    buffer = aligned_buffer(round_up(nbytes, 4096))
    file.read_into(aligned, buffer.data[:nbytes], Purpose.ANALYSIS)
    return bytes(buffer[first - aligned : last - aligned])


def stream_key(seed: int, expert_content_id: str, tensor: str) -> int:
    """64-bit key of one expert's random stream for one tensor."""
    return int.from_bytes(blake3(canonical_json([seed, expert_content_id, tensor])).digest(8), "little")
