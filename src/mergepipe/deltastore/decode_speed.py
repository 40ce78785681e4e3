"""Measure the speed of decoding: blocks of each codec, encoded in memory and decoded as a merge decodes them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mergepipe.core.blocks import BF16, DType
from mergepipe.deltastore.band_sample import choose_bands
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.block import (
    BlockContext,
    EncodedBlock,
    RawBytes,
    decode_block,
    decode_deltas,
    encode_block,
)
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, PIECES_OF, Codec, Level, Piece
from mergepipe.deltastore.index import CHECK_BYTES, digest
from mergepipe.kernels.compilation.compiled import Floats
from mergepipe.storage.prices import DecodingPrices, two_digits

REPETITIONS = 7
_WEIGHT_SIZE, _DELTA_SIZE = 0.02, 1e-4  # standard deviations: deltas of 0.5 %


def measure_decoding() -> DecodingPrices:
    """Measure the processor time per element by codec and level, verification of digests included.

    Takes about half a second. Memory: 16 MiB.
    """
    base_N, expert_N = _examples()
    base, expert = _as_bf16(base_N), _as_bf16(expert_N)
    bands = choose_bands(expert_N - base_N, is_sample=False)
    blocks = {
        Codec.SAME: EncodedBlock(Codec.SAME, {}),
        Codec.BANDS: encode_block(base, expert, BF16, bands),
        Codec.BYTES: encode_block(base, expert, BF16, None),
        Codec.RAW: EncodedBlock(Codec.RAW, {Piece.WHOLE: expert}),
    }
    levels = [level for level in Level if level is not Level.NOTHING]
    nanoseconds = {
        codec.name.lower(): tuple(_nanoseconds(block, level, base, BF16, bands) for level in levels)
        for codec, block in blocks.items()
    }
    return DecodingPrices(nanoseconds)


def _examples() -> tuple[Floats, Floats]:
    rng = np.random.default_rng(0)
    base_N = (rng.standard_normal(BLOCK_ELEMENTS) * _WEIGHT_SIZE).astype(np.float32)
    return base_N, base_N + (rng.standard_normal(BLOCK_ELEMENTS) * _DELTA_SIZE).astype(np.float32)


def _as_bf16(values_N: Floats) -> RawBytes:
    """The upper halves of float32, rounded half up: close enough for timing."""
    halves_N = ((values_N.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return halves_N.view(np.uint8)


def _nanoseconds(block: EncodedBlock, level: Level, base: RawBytes, dtype: DType, bands: Bands) -> float:
    context = BlockContext(base, dtype, bands, "timing")
    nothing = np.empty(0, np.uint8)
    pieces = {piece: block.pieces.get(piece, nothing) for piece in PIECES_OF[level]}
    values, deltas_N = np.empty(len(base), np.uint8), np.empty(len(base) // dtype.itemsize, np.float32)

    def once() -> None:
        digest(base)
        for content in pieces.values():
            digest(content, CHECK_BYTES)
        if level is Level.LOSSLESS:
            decode_block(block.codec, pieces, context, values)
        else:
            decode_deltas(block.codec, level, pieces, context, deltas_N)

    return two_digits(_least_seconds(once) / len(deltas_N) * 1e9)


def _least_seconds(action: Callable[[], None]) -> float:
    """Processor time of the fastest repetition, without the first, which may compile."""
    action()
    seconds = []
    for _ in range(REPETITIONS):
        started = time.thread_time()
        action()
        seconds.append(time.thread_time() - started)
    return min(seconds)
