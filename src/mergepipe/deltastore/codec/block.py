"""One block, encoded with the codec that suits it and decoded again: the store's codec as a pair of functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, DType, DTypeKind
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.byte_equality import are_equal
from mergepipe.deltastore.codec.byte_parts import corrupt
from mergepipe.deltastore.codec.bytewise import decode_bytewise, encode_bytewise
from mergepipe.deltastore.codec.decode import decode_band_deltas, decode_band_values
from mergepipe.deltastore.codec.encode import BaseRows, encode_bands
from mergepipe.deltastore.codec.levels import BANDED_FROM_ELEMENTS, RECORDED_LEVELS, Codec, Level, Piece
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.kernels.codec import decode_tile
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta

RawBytes = NDArray[np.uint8]
_NO_ERRORS = (0.0,) * len(RECORDED_LEVELS)
_MOST_SQUARES = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block as stored; pieces that are not there are empty.

    `errors`: squared error left at each of `RECORDED_LEVELS`; deltas that are not finite do not count. `counts`:
    elements with |delta| at or above each of the three cuts; 0 for codecs that have no levels.
    """

    codec: Codec
    pieces: Mapping[Piece, RawBytes]
    errors: tuple[float, ...] = _NO_ERRORS
    counts: tuple[int, int, int] = (0, 0, 0)

    @property
    def nbytes(self) -> int:
        return sum(len(content) for content in self.pieces.values())


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What decoding needs beside the pieces: the base's bytes of the block, its dtype, its tensor's bands."""

    base: RawBytes
    dtype: DType
    bands: Bands | None
    where: str


def base_rows(base: RawBytes | None, dtype: DType) -> BaseRows | None:
    """What `encode_block` works out of a base block alone: for who encodes several experts beside it.

    It is good until the same thread asks for that of another block.
    """
    if base is None or dtype is not BF16 or len(base) < BANDED_FROM_ELEMENTS * dtype.itemsize:
        return None
    return BaseRows.of(base.view(np.uint16))


def encode_block(
    base: RawBytes | None, expert: RawBytes, dtype: DType, bands: Bands | None, beside: BaseRows | None = None
) -> EncodedBlock:
    """Encode one block (bytes) beside the same elements of its base, and check every bit of what decoding gives.

    A codec that does not give the expert's bytes back, or does not make them fewer, gives way to a plainer one.
    `beside` is `base_rows` of the base, where they are known.
    """
    if base is not None:
        if are_equal(base, expert):
            return EncodedBlock(Codec.SAME, {})
        for encoded in _attempts(base, expert, dtype, bands, beside):
            if encoded.nbytes < len(expert) and _gives(encoded, BlockContext(base, dtype, bands, "encoding"), expert):
                return encoded
    errors = _NO_ERRORS if base is None else _plain_errors(base, expert, dtype)
    return EncodedBlock(Codec.RAW, {Piece.WHOLE: expert}, errors)


def _attempts(
    base: RawBytes, expert: RawBytes, dtype: DType, bands: Bands | None, beside: BaseRows | None
) -> list[EncodedBlock]:
    banded = None
    if dtype is BF16 and bands is not None and len(expert) >= BANDED_FROM_ELEMENTS * dtype.itemsize:
        banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), bands, beside)
    attempts = [] if banded is None else [EncodedBlock(Codec.BANDS, banded.pieces, banded.errors, banded.counts)]
    if banded is None or attempts[0].nbytes >= len(expert):
        content = {Piece.WHOLE: encode_bytewise(base, expert, dtype)}
        attempts.append(EncodedBlock(Codec.BYTES, content, _plain_errors(base, expert, dtype)))
    return attempts


def _plain_errors(base: RawBytes, expert: RawBytes, dtype: DType) -> tuple[float, ...]:
    """Squared error of a block without levels: all of it is left where nothing is read, and nothing from then on."""
    if dtype.kind is not DTypeKind.FLOAT:
        return _NO_ERRORS
    deltas = _deltas(base, expert, dtype).astype(np.float64)
    squares = float((deltas[np.isfinite(deltas)] ** 2).sum())
    return (min(squares, _MOST_SQUARES), *_NO_ERRORS[1:])


def _deltas(base: RawBytes, expert: RawBytes, dtype: DType) -> Floats:
    n, code = len(base) // dtype.itemsize, dtype.kernel_code
    own, other, deltas = (np.empty(n, np.float32) for _ in range(3))
    decode_tile(base, 0, code, n, own)
    decode_tile(expert, 0, code, n, other)
    take_delta(other, own, n, deltas)
    return deltas


def _gives(encoded: EncodedBlock, context: BlockContext, expert: RawBytes) -> bool:
    decoded = scratch("encode-proof", len(expert), np.uint8)
    decode_block(encoded.codec, encoded.pieces, context, decoded)
    return are_equal(decoded, expert)


def decode_block(codec: Codec, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: RawBytes) -> None:
    """Write the expert's bytes of a block, from all of its pieces.

    Raises:
        CorruptError: the pieces are not what `encode_block` writes.
    """
    if codec is Codec.SAME:
        out[:] = context.base
    elif codec is Codec.BANDS:
        bands = _bands(context)
        base, values = context.base.view(np.uint16), out.view(np.uint16)
        decode_band_values(pieces, base, bands, context.where, values)
    elif codec is Codec.BYTES:
        out[:] = decode_bytewise(pieces[Piece.WHOLE], context.base, context.dtype, context.where)
    else:
        raw = pieces[Piece.WHOLE]
        if len(raw) != len(out):
            raise corrupt(context.where, f"{len(raw)} bytes are stored for a block of {len(out)}")
        out[:] = raw


def decode_deltas(
    codec: Codec, level: Level, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: Floats
) -> None:
    """Write the deltas (float32) of a block as far as `level` knows them; only its pieces are looked at.

    Raises:
        CorruptError: the pieces are not what `encode_block` writes.
    """
    if codec is Codec.SAME or level is Level.NOTHING:
        out[:] = 0
    elif codec is Codec.BANDS:
        bands = _bands(context)
        base = context.base.view(np.uint16)
        decode_band_deltas(pieces, level, base, bands, context.where, out)
    else:
        expert = np.empty(len(context.base), np.uint8)
        decode_block(codec, pieces, context, expert)
        out[:] = _deltas(context.base, expert, context.dtype)


def _bands(context: BlockContext) -> Bands:
    if context.dtype is not BF16:
        raise corrupt(context.where, f"the block is in bands, which {context.dtype.name} has not")
    if context.bands is None:
        raise corrupt(context.where, "the block is in bands, and its tensor has none")
    return context.bands
