"""Encode a block with the codec that suits it, and decode it again.

Format: codecs in "Index row", docs/internals/formats/delta-store.md. Everything outside `codec` goes through this
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, DType, DTypeKind
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.decode import decode_band_deltas, decode_band_values
from mergepipe.deltastore.codec.encode import BaseContexts, encode_bands
from mergepipe.deltastore.codec.generic.byte_equality import bytes_equal
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.generic.bytewise import decode_bytewise, encode_bytewise
from mergepipe.deltastore.codec.generic.standalone import (
    decode_standalone,
    encode_standalone,
    estimate_standalone,
)
from mergepipe.deltastore.codec.levels import BANDED_FROM_ELEMENTS, RECORDED_LEVELS, Codec, Level, Piece
from mergepipe.deltastore.codec.scratch import scratch
from mergepipe.deltastore.codec.tiles.element_codes import BF16_MANTISSA_BITS, F16_MANTISSA_BITS
from mergepipe.kernels.codec import decode_all, decode_tile, encode_all
from mergepipe.kernels.compilation.compiled import Floats
from mergepipe.kernels.merge import take_delta

RawBytes = NDArray[np.uint8]
MANTISSA_BITS = {BF16: BF16_MANTISSA_BITS, F16: F16_MANTISSA_BITS}
_NO_ERRORS = (0.0,) * len(RECORDED_LEVELS)
_ALONE_FROM_SHARE = 0.5
"""Blocks that are no larger than this share relative to their base are not encoded without it."""
_MAX_SQUARED_ERROR = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block as stored; absent pieces are empty.

    `errors`: squared error left at each of `RECORDED_LEVELS`; deltas that are not finite do not count.
    `counts`: elements with |delta| at or above each of the three cuts; 0 for codecs without levels.
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
    """Inputs of decoding other than the pieces: the base's bytes of the block, its dtype, its tensor's bands.

    `base` is None for a tensor that its base lacks. Without `base_dtype` it has the dtype `dtype`.
    """

    base: RawBytes | None
    dtype: DType
    bands: Bands | None
    where: str
    base_dtype: DType | None = None

    @property
    def is_converted(self) -> bool:
        """Whether the base has another dtype."""
        return self.base_dtype is not None and self.base_dtype is not self.dtype


def base_contexts(base: RawBytes | None, dtype: DType) -> BaseContexts | None:
    """Compute the part of `encode_block` that depends on the base alone, to share it among several experts.

    None where no part does. The result is valid until the same thread calls this again.
    """
    if base is None or dtype not in MANTISSA_BITS or len(base) < BANDED_FROM_ELEMENTS * dtype.itemsize:
        return None
    return BaseContexts.of(base.view(np.uint16), MANTISSA_BITS[dtype])


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


def encode_block(
    base: RawBytes | None, expert: RawBytes, dtype: DType, bands: Bands | None, prepared: BaseContexts | None = None
) -> EncodedBlock:
    """Encode one block (bytes) relative to the same elements of its base, and verify that it decodes exactly.

    The smallest of the results is taken. Where that does not decode to the expert's bytes it is replaced by the next.
    `prepared` is `base_contexts` of the base, if the caller has it.
    """
    if base is not None and bytes_equal(base, expert):
        return EncodedBlock(Codec.SAME, {})
    candidates = [] if base is None else _candidates(base, expert, dtype, bands, prepared)
    if base is None or _may_be_smaller_alone(expert, dtype, min(candidate.nbytes for candidate in candidates)):
        content = {Piece.WHOLE: encode_standalone(expert, dtype)}
        candidates.append(EncodedBlock(Codec.STANDALONE, content, _plain_errors(base, expert, dtype)))
    context = BlockContext(base, dtype, bands, "encoding")
    for encoded in sorted(candidates, key=lambda candidate: candidate.nbytes):
        if encoded.nbytes < len(expert) and _decodes_to(encoded, context, expert):
            return encoded
    return EncodedBlock(Codec.RAW, {Piece.WHOLE: expert}, _plain_errors(base, expert, dtype))


def _candidates(
    base: RawBytes, expert: RawBytes, dtype: DType, bands: Bands | None, prepared: BaseContexts | None
) -> list[EncodedBlock]:
    """Encode a block relative to its base; in the last one all elements can be expressed."""
    banded = None
    if dtype in MANTISSA_BITS and bands is not None and len(expert) >= BANDED_FROM_ELEMENTS * dtype.itemsize:
        banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), bands, prepared, MANTISSA_BITS[dtype])
    candidates = [] if banded is None else [EncodedBlock(Codec.BANDS, banded.pieces, banded.errors, banded.counts)]
    if banded is None or candidates[0].nbytes >= len(expert):
        content = {Piece.WHOLE: encode_bytewise(base, expert, dtype)}
        candidates.append(EncodedBlock(Codec.BYTES, content, _plain_errors(base, expert, dtype)))
    return candidates


def _may_be_smaller_alone(expert: RawBytes, dtype: DType, nbytes: int) -> bool:
    """Whether encoding without the base may take less than `nbytes`."""
    return nbytes > _ALONE_FROM_SHARE * len(expert) and estimate_standalone(expert, dtype).estimated_bytes < nbytes


def _plain_errors(
    base: RawBytes | None, expert: RawBytes, dtype: DType, base_dtype: DType | None = None
) -> tuple[float, ...]:
    """Squared errors of a block without levels: the whole delta at NOTHING, 0 from HEAD on."""
    if base is None or dtype.kind is not DTypeKind.FLOAT:
        return _NO_ERRORS
    deltas = _deltas(base, expert, dtype, base_dtype or dtype).astype(np.float64)
    squares = float((deltas[np.isfinite(deltas)] ** 2).sum())
    return (min(squares, _MAX_SQUARED_ERROR), *_NO_ERRORS[1:])


def _deltas(base: RawBytes, expert: RawBytes, dtype: DType, base_dtype: DType) -> Floats:
    n = len(expert) // dtype.itemsize
    base_values, expert_values, deltas = (np.empty(n, np.float32) for _ in range(3))
    decode_tile(base, 0, base_dtype.kernel_code, n, base_values)
    decode_tile(expert, 0, dtype.kernel_code, n, expert_values)
    take_delta(expert_values, base_values, n, deltas)
    return deltas


def _decodes_to(encoded: EncodedBlock, context: BlockContext, expert: RawBytes) -> bool:
    decoded = scratch("encode-check", len(expert), np.uint8)
    decode_block(encoded.codec, encoded.pieces, context, decoded)
    return bytes_equal(decoded, expert)


def decode_block(codec: Codec, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: RawBytes) -> None:
    """Decode a block from all of its pieces into `out`.

    Raises:
        CorruptError: the pieces are not a valid encoding.
    """
    if codec is Codec.SAME:
        out[:] = _base(context)
    elif codec is Codec.BANDS:
        bands = _bands(context)
        base_bits, values = _base(context).view(np.uint16), out.view(np.uint16)
        mantissa_bits = MANTISSA_BITS[context.dtype]
        decode_band_values(pieces, base_bits, bands, context.where, values, mantissa_bits=mantissa_bits)
    elif codec is Codec.BYTES:
        out[:] = decode_bytewise(pieces[Piece.WHOLE], _base(context), context.dtype, context.where)
    elif codec is Codec.STANDALONE:
        decode_standalone(pieces[Piece.WHOLE], context.dtype, context.where, out)
    else:
        raw = pieces[Piece.WHOLE]
        if len(raw) != len(out):
            raise corrupt(context.where, f"{len(raw)} bytes are stored for a block of {len(out)}")
        out[:] = raw


def decode_deltas(
    codec: Codec, level: Level, pieces: Mapping[Piece, RawBytes], context: BlockContext, out: Floats
) -> None:
    """Decode the deltas (float32) of a block as far as `level` has them; only its pieces are read.

    Raises:
        CorruptError: the pieces are not a valid encoding.
    """
    if level is Level.NOTHING or (codec is Codec.SAME and not context.is_converted):
        out[:] = 0
    elif codec is Codec.BANDS:
        bands = _bands(context)
        base_bits, mantissa_bits = _base(context).view(np.uint16), MANTISSA_BITS[context.dtype]
        decode_band_deltas(pieces, level, base_bits, bands, context.where, out, mantissa_bits=mantissa_bits)
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


def _bands(context: BlockContext) -> Bands:
    if context.dtype not in MANTISSA_BITS:
        raise corrupt(context.where, f"the block is encoded in bands, which {context.dtype.name} does not support")
    if context.bands is None:
        raise corrupt(context.where, "the block is encoded in bands, but the header has no cuts for its tensor")
    return context.bands
