"""Encode a block with the codec that suits it, and decode it again.

Format: codecs in "Index row", docs/internals/formats/delta-store.md. Everything outside `codec` goes through this
module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.codec.arrays import corrupt, scratch
from mergepipe.deltastore.codec.bands import MANTISSA_BITS, decode_band_deltas, decode_band_values, encode_bands
from mergepipe.deltastore.codec.levels import (
    BANDED_FROM_ELEMENTS,
    BYTES_TRIED_BELOW,
    NO_ERRORS,
    PIECES_OF,
    Codec,
    EncodedBlock,
    Level,
    Piece,
    RawBytes,
)
from mergepipe.deltastore.codec.planes import decode_planes, encode_planes
from mergepipe.kernels.codec import decode_all, decode_tile, encode_all
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta

_ALONE_FROM_SHARE = 0.5
"""Blocks that are no larger than this share relative to their base are not encoded without it."""
_MAX_SQUARED_ERROR = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Inputs of decoding other than the pieces: the base's bytes of the block, and its dtype.

    `base` is None for a tensor that its base lacks. Without `base_dtype` it has the dtype `dtype`.
    """

    base: RawBytes | None
    dtype: DType
    where: str
    base_dtype: DType | None = None

    @property
    def is_converted(self) -> bool:
        """Whether the base has another dtype."""
        return self.base_dtype is not None and self.base_dtype is not self.dtype


def raw_block(expert: RawBytes) -> EncodedBlock:
    """Keep a block of a tensor without a base as it is."""
    return EncodedBlock(Codec.RAW, {Piece.WHOLE: expert})


def encode_converted(base: RawBytes, base_dtype: DType, expert: RawBytes, dtype: DType) -> EncodedBlock:
    """Encode a block like `encode_block` relative to a base of another dtype, which is converted; without levels."""
    encoded = encode_block(convert(base, base_dtype, dtype), expert, dtype, None)
    return replace(encoded, errors=_plain_errors(base, expert, dtype, base_dtype))


def convert(base: RawBytes, base_dtype: DType, dtype: DType) -> RawBytes:
    """Convert a block of floats to another dtype, to the nearest, ties to even; the result is in `scratch`."""
    n = len(base) // base_dtype.itemsize
    values, converted = scratch("convert-values", n, np.float32), scratch("converted", n * dtype.itemsize, np.uint8)
    decode_all(base, base_dtype.kernel_code, n, values)
    encode_all(values, converted, dtype.kernel_code)
    return converted


def encode_block(base: RawBytes | None, expert: RawBytes, dtype: DType, cut: float | None) -> EncodedBlock:
    """Encode one block (bytes) relative to the same elements of its base, and verify that it decodes exactly.

    The smallest of the results is taken. Where that does not decode to the expert's bytes it is replaced by the next.
    With `cut` it may be in bands, with deltas from there on in HEAD.
    """
    if base is not None and np.array_equal(base, expert):
        return EncodedBlock(Codec.SAME, {})
    candidates = [] if base is None else _candidates(base, expert, dtype, cut)
    smallest = min((candidate.nbytes for candidate in candidates), default=math.inf)
    if smallest > _ALONE_FROM_SHARE * len(expert):
        candidates.append(EncodedBlock(Codec.STANDALONE, {Piece.WHOLE: encode_planes(None, expert, dtype)}))
    context = BlockContext(base, dtype, "encoding")
    candidates.sort(key=lambda candidate: candidate.nbytes)
    candidates.append(EncodedBlock(Codec.RAW, {Piece.WHOLE: expert}))
    encoded = next(
        c for c in candidates if c.codec is Codec.RAW or (c.nbytes < len(expert) and _decodes_to(c, context, expert))
    )
    return encoded if encoded.codec is Codec.BANDS else replace(encoded, errors=_plain_errors(base, expert, dtype))


def _candidates(base: RawBytes, expert: RawBytes, dtype: DType, cut: float | None) -> list[EncodedBlock]:
    """Encode a block relative to its base, without errors where it has no levels."""
    candidates = []
    if cut is not None and dtype in MANTISSA_BITS and len(expert) >= BANDED_FROM_ELEMENTS * dtype.itemsize:
        banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), cut, dtype)
        candidates.extend([] if banded is None else [banded])
    if not candidates or candidates[0].nbytes >= len(expert) or len(expert) < BYTES_TRIED_BELOW * dtype.itemsize:
        candidates.append(EncodedBlock(Codec.BYTES, {Piece.WHOLE: encode_planes(base, expert, dtype)}))
    return candidates


def _plain_errors(
    base: RawBytes | None, expert: RawBytes, dtype: DType, base_dtype: DType | None = None
) -> tuple[float, ...]:
    """Squared errors of a block without levels: the whole delta at NOTHING, 0 from HEAD on."""
    if base is None or dtype.kind is not DTypeKind.FLOAT:
        return NO_ERRORS
    deltas = _deltas(base, expert, dtype, base_dtype or dtype)
    squares = scratch("squares", len(deltas), np.float64)
    np.multiply(deltas, deltas, out=squares, dtype=np.float64)
    total = float(squares.sum())
    if not math.isfinite(total):
        total = float(squares[np.isfinite(squares)].sum())
    return (min(total, _MAX_SQUARED_ERROR), *NO_ERRORS[1:])


def _deltas(base: RawBytes, expert: RawBytes, dtype: DType, base_dtype: DType) -> Floats:
    """The deltas of a block, in `scratch`."""
    n = len(expert) // dtype.itemsize
    base_values, expert_values, deltas = (
        scratch(f"plain-{name}", n, np.float32) for name in ("base", "expert", "deltas")
    )
    decode_tile(base, 0, base_dtype.kernel_code, n, base_values)
    decode_tile(expert, 0, dtype.kernel_code, n, expert_values)
    take_delta(expert_values, base_values, n, deltas)
    return deltas


def _decodes_to(encoded: EncodedBlock, context: BlockContext, expert: RawBytes) -> bool:
    decoded = scratch("encode-check", len(expert), np.uint8)
    decode_block(encoded.codec, encoded.pieces, context, decoded)
    return bool(np.array_equal(decoded, expert))


def decode_block(codec: Codec, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: RawBytes) -> None:
    """Decode a block from all of its pieces into `out`."""
    if codec is Codec.SAME:
        out[:] = _base(context)
    elif codec is Codec.BANDS:
        decode_band_values(pieces, _base_in_bands(context), context.dtype, context.where, out.view(np.uint16))
    elif codec is Codec.BYTES:
        decode_planes(pieces[Piece.WHOLE], _base(context), context.dtype, context.where, out)
    elif codec is Codec.STANDALONE:
        decode_planes(pieces[Piece.WHOLE], None, context.dtype, context.where, out)
    else:
        raw = pieces[Piece.WHOLE]
        if len(raw) != len(out):
            raise corrupt(context.where, f"{len(raw)} bytes are stored for a block of {len(out)}")
        out[:] = raw


def decode_deltas(
    codec: Codec, level: Level, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: Floats
) -> None:
    """Decode the deltas (float32) of a block as far as `level` has them; only its pieces are read."""
    if level is Level.NOTHING or (codec is Codec.SAME and not context.is_converted):
        out[:] = 0
    elif codec is Codec.BANDS:
        own = {piece: content for piece, content in pieces.items() if piece in PIECES_OF[level]}
        decode_band_deltas(own, _base_in_bands(context), context.dtype, context.where, out)
    else:
        expert = np.empty(len(out) * context.dtype.itemsize, np.uint8)
        decode_block(codec, pieces, context, expert)
        out[:] = _deltas(_stored_base(context), expert, context.dtype, context.base_dtype or context.dtype)


def _base(context: BlockContext) -> RawBytes:
    """The base's bytes in the expert's dtype."""
    base = _stored_base(context)
    if context.base_dtype is not None and context.is_converted:
        return convert(base, context.base_dtype, context.dtype)
    return base


def _stored_base(context: BlockContext) -> RawBytes:
    if context.base is None:
        raise corrupt(context.where, "the block is encoded relative to its base, which lacks its tensor")
    return context.base


def _base_in_bands(context: BlockContext) -> NDArray[np.uint16]:
    """The base's elements of a block of BANDS."""
    if context.dtype not in MANTISSA_BITS or context.is_converted:
        raise corrupt(context.where, f"the block is encoded in bands, which {context.dtype.name} does not support")
    return _stored_base(context).view(np.uint16)
