"""Report a packed expert: sizes, number of blocks by codec, reasons for blocks outside bands."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mergepipe.core.blocks import BlockGrid, element_count
from mergepipe.deltastore.checkpoint import OpenedStore
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BANDED_FROM_ELEMENTS, BLOCK_ELEMENTS, Codec
from mergepipe.deltastore.header import PackedEntry
from mergepipe.deltastore.pack.builder import PackJob
from mergepipe.reports import PackedExpert


def packed_facts(job: PackJob, opened: OpenedStore, *, is_new: bool) -> PackedExpert:
    """Describe the store of a job, by its header and index."""
    return PackedExpert(
        expert=job.expert.path,
        store=job.place.local_path if job.place.is_local else job.place,
        tensor_bytes=job.expert.tensor_bytes,
        store_bytes=sum(file.size_bytes for file in opened.fingerprints),
        blocks=blocks_by_codec(opened),
        outside_bands=blocks_outside_bands(opened),
        seconds=0.0,
        is_new=is_new,
    )


def blocks_by_codec(opened: OpenedStore) -> dict[str, int]:
    """Count the blocks of each codec."""
    codecs, counts = np.unique(opened.index.rows["codec"], return_counts=True)
    named = zip((Codec(int(codec)).name.lower() for codec in codecs), counts, strict=True)
    return {name: int(count) for name, count in sorted(named)}


def blocks_outside_bands(opened: OpenedStore) -> dict[str, int]:
    """Count the blocks of the simpler codecs by reason."""
    reasons: Counter[str] = Counter()
    for tensor in opened.header.tensors:
        for block, span in enumerate(BlockGrid(element_count(tensor.shape), BLOCK_ELEMENTS).spans()):
            codec = opened.index.codec(tensor.first_row + block)
            if codec not in (Codec.SAME, Codec.BANDS) and opened.header.base:
                reasons[_reason(tensor, span.n_elements, codec)] += 1
    return dict(sorted(reasons.items()))


def _reason(tensor: PackedEntry, n_elements: int, codec: Codec) -> str:
    if not tensor.has_base:
        return "no such tensor in the base"
    if tensor.dtype not in BANDED_DTYPES:
        return f"{tensor.dtype.name}, which has no bands"
    if n_elements < BANDED_FROM_ELEMENTS:
        return f"fewer than {BANDED_FROM_ELEMENTS} elements"
    if codec is Codec.STANDALONE:
        return "smaller without the base"
    return "not finite, or no smaller in levels" if codec is Codec.BYTES else "no smaller in any codec"
