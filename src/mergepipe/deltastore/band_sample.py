"""Choose the bands of a tensor from a sample of its deltas, before the pass that encodes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.core.blocks import DType, Span
from mergepipe.deltastore.codec.arrays import scratch
from mergepipe.deltastore.codec.block import RawBytes
from mergepipe.deltastore.codec.element_codes import Bands
from mergepipe.deltastore.codec.levels import BAND_DENSITIES
from mergepipe.kernels.codec import decode_tile
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.ranges import read_exact

READ_WHOLE_ELEMENTS = 128 * 1024
_STRETCHES = 32
_STRETCH_ELEMENTS = 4096
_MARGIN_DEVIATIONS = 4.0
_SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))
_LARGEST = float(np.finfo(np.float32).max)
_SECOND_BAND_WIDTH = 0.4
"""Minimum width as a fraction of the cut: the first band then holds 1 to 8 % of normally distributed deltas."""


def sample_spans(n_elements: int) -> tuple[Span, ...]:
    """The spans to sample: all of a small tensor, else spans of equal length at equal distances."""
    if n_elements <= READ_WHOLE_ELEMENTS:
        return (Span(0, n_elements),)
    step = (n_elements - _STRETCH_ELEMENTS) // (_STRETCHES - 1)
    return tuple(Span(i * step, i * step + _STRETCH_ELEMENTS) for i in range(_STRETCHES))


def bands_of(base: Sample, expert: Sample) -> Bands:
    """Choose the bands of a tensor from samples of it and of its base, which has the same dtype."""
    deltas = scratch("band-sample", sum(map(len, expert.stretches)) // expert.dtype.itemsize, np.float32)
    start = 0
    for stretch, other in zip(base.stretches, expert.stretches, strict=True):
        stop = start + len(stretch) // expert.dtype.itemsize
        _fill_deltas(stretch, other, expert.dtype, deltas[start:stop])
        start = stop
    return choose_bands(deltas, is_sample=expert.n_elements > READ_WHOLE_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Sample:
    """The bytes at `sample_spans` of a tensor of `n_elements`."""

    dtype: DType
    n_elements: int
    stretches: tuple[RawBytes, ...]


def read_sample(entry: TensorEntry, file: RangeFile, purpose: Purpose) -> Sample:
    """Read a sample of a tensor: at most 256 KiB, in whole pages."""
    spans = sample_spans(entry.n_elements)
    return Sample(
        entry.dtype, entry.n_elements, tuple(read_exact(file, *_byte_range(entry, span), purpose) for span in spans)
    )


def fetch_sample(tensor: ComputedTensor, fetch: Fetch, purpose: Purpose) -> Sample:
    """Take a sample of a tensor that is decoded: the stretches of `sample_spans`, fetched one by one."""
    stretches = []
    for span in sample_spans(tensor.n_elements):
        stretches.append(np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8))
        fetch(span, stretches[-1], purpose)
    return Sample(tensor.dtype, tensor.n_elements, tuple(stretches))


def sample_of(content: RawBytes, dtype: DType) -> Sample:
    """Take the sample of a tensor that is in memory as a whole; it consists of views."""
    size = dtype.itemsize
    n = len(content) // size
    return Sample(dtype, n, tuple(content[span.start * size : span.stop * size] for span in sample_spans(n)))


def choose_bands(deltas: Floats, *, is_sample: bool) -> Bands:
    """Choose the cuts of deltas (float32, not modified): bands 1 to 2 and 1 to 3 hold `BAND_DENSITIES` of them.

    From a sample, each band is made a little larger, so that it most likely holds its share of the whole tensor. The
    width of the second band and, if possible, the third is a power of two: residuals of whole bits address all its
    values.
    """
    magnitudes = np.abs(deltas)
    is_finite = np.isfinite(magnitudes)
    if not is_finite.all():
        magnitudes = magnitudes[is_finite]
    magnitudes.sort()  # at 16 lanes a time faster than a partition
    magnitudes = magnitudes[::-1]
    second, third = (_cut_at(magnitudes, density, is_sample=is_sample) for density in BAND_DENSITIES)
    first = second + _power_of_two(_SECOND_BAND_WIDTH * second)
    if second > third and _power_of_two(second - third) < second:
        third = second - _power_of_two(second - third)
    return Bands((first if first <= _LARGEST else second, second, third))


def _cut_at(magnitudes: Floats, density: float, *, is_sample: bool) -> float:
    """The magnitude that `density` of the tensor reaches; `magnitudes` are descending."""
    n = len(magnitudes)
    margin = _MARGIN_DEVIATIONS * math.sqrt(density * (1 - density) / n) if is_sample and n else 0.0
    rank = min(math.ceil((density + margin) * n), n)
    return max(float(magnitudes[rank - 1]), _SMALLEST) if rank else _SMALLEST


def _power_of_two(width: float) -> float:
    """The smallest power of two that is not less than `width` > 0."""
    mantissa, exponent = math.frexp(width)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _byte_range(entry: TensorEntry, span: Span) -> tuple[int, int]:
    start = entry.offset + span.start * entry.dtype.itemsize
    return start, start + span.n_elements * entry.dtype.itemsize


def _fill_deltas(base: RawBytes, expert: RawBytes, dtype: DType, deltas: Floats) -> None:
    n = len(deltas)
    base_values, expert_values = (scratch(f"band-{name}", n, np.float32) for name in ("base", "expert"))
    decode_tile(base, 0, dtype.kernel_code, n, base_values)
    decode_tile(expert, 0, dtype.kernel_code, n, expert_values)
    take_delta(expert_values, base_values, n, deltas)
