"""Where the bands of a tensor begin, estimated from a sample of its deltas before its one pass."""

from __future__ import annotations

import math

import numpy as np

from mergepipe.blocks import BF16, Span
from mergepipe.budget import Purpose
from mergepipe.deltastore.bands import Bands
from mergepipe.deltastore.block import RawBytes
from mergepipe.deltastore.levels import BAND_DENSITIES
from mergepipe.deltastore.packed import read_range
from mergepipe.kernels.codec import decode_tile
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta
from mergepipe.readers.base import TensorEntry
from mergepipe.storage.base import RangeFile

READ_WHOLE_ELEMENTS = 128 * 1024
_STRETCHES = 32
_STRETCH_ELEMENTS = 4096
_MARGIN_DEVIATIONS = 4.0
_SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))


def sample_spans(n_elements: int) -> tuple[Span, ...]:
    """The stretches to look at: all of a small tensor, else equal ones at equal distances."""
    if n_elements <= READ_WHOLE_ELEMENTS:
        return (Span(0, n_elements),)
    step = (n_elements - _STRETCH_ELEMENTS) // (_STRETCHES - 1)
    return tuple(Span(i * step, i * step + _STRETCH_ELEMENTS) for i in range(_STRETCHES))


def sample_bands(base: TensorEntry, base_file: RangeFile, expert: TensorEntry, expert_file: RangeFile) -> Bands:
    """Read a sample of a bf16 tensor and of its base, and choose where the bands begin.

    Memory: some MiB. Reads at most 256 KiB of each file.
    """
    deltas = []
    for span in sample_spans(expert.n_elements):
        own = read_range(base_file, *_byte_range(base, span), Purpose.BASE)
        other = read_range(expert_file, *_byte_range(expert, span), Purpose.ANALYSIS)
        deltas.append(_deltas(own, other, span.n_elements))
    return choose_bands(np.concatenate(deltas), is_sample=expert.n_elements > READ_WHOLE_ELEMENTS)


def choose_bands(deltas: Floats, *, is_sample: bool) -> Bands:
    """Cuts at or a little below the magnitudes where `BAND_DENSITIES` of the deltas lie (float32, not modified).

    From a sample, each band is made a little larger, so that it holds its share of the whole tensor all the same.
    """
    magnitudes = np.abs(deltas)
    magnitudes = np.sort(magnitudes[np.isfinite(magnitudes)])[::-1]
    cuts = []
    for density in BAND_DENSITIES:
        n = len(magnitudes)
        margin = _MARGIN_DEVIATIONS * math.sqrt(density * (1 - density) / n) if is_sample and n else 0.0
        rank = min(math.ceil((density + margin) * n), n)
        cuts.append(max(float(magnitudes[rank - 1]), _SMALLEST) if rank else _SMALLEST)
    return Bands((cuts[0], cuts[1], cuts[2]))


def _byte_range(entry: TensorEntry, span: Span) -> tuple[int, int]:
    start = entry.offset + span.start * entry.dtype.itemsize
    return start, start + span.n_elements * entry.dtype.itemsize


def _deltas(base: RawBytes, expert: RawBytes, n: int) -> Floats:
    own, other, deltas = (np.empty(n, np.float32) for _ in range(3))
    decode_tile(base, 0, BF16.kernel_code, n, own)
    decode_tile(expert, 0, BF16.kernel_code, n, other)
    take_delta(other, own, n, deltas)
    return deltas
