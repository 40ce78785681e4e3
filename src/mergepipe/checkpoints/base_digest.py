"""Digest a few samples of a base, to refuse deltas that were made against another one."""

from __future__ import annotations

from blake3 import blake3

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.core.canonical_json import canonical_json
from mergepipe.storage.contract import Store

SAMPLES = 64
SAMPLE_BYTES = 2048


def base_digest(store: Store, base: Checkpoint) -> str:
    """32 hex digits over the names, dtypes and shapes of all tensors and the middle of up to 64 of them.

    Independent of sharding, file names and times. Reads at most 128 KiB, as metadata.
    """
    entries = sorted((e for e in base.tensors.values() if isinstance(e, TensorEntry)), key=lambda entry: entry.name)
    hasher = blake3(canonical_json([[e.name, e.dtype.name, list(e.shape)] for e in entries]))
    n = min(SAMPLES, len(entries))
    for entry in (entries[i * len(entries) // n] for i in range(n)):
        start = max(0, entry.nbytes - SAMPLE_BYTES) // 2
        hasher.update(store.read_metadata(entry.file, entry.offset + start, min(SAMPLE_BYTES, entry.nbytes)))
    return hasher.hexdigest(length=16)
