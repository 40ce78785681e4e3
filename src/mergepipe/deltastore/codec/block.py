"""Encode a block with the codec that suits it, and decode it again.

Format: codecs in "Index row", docs/internals/formats/delta-store.md. Everything outside `codec` goes through this
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, DType, DTypeKind
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.decode import decode_band_deltas, decode_band_values
from mergepipe.deltastore.codec.encode import BaseContexts, encode_bands, estimate_bands
from mergepipe.deltastore.codec.generic.byte_equality import bytes_equal
from mergepipe.deltastore.codec.generic.byte_reader import corrupt
from mergepipe.deltastore.codec.generic.bytewise import decode_bytewise, encode_bytewise
from mergepipe.deltastore.codec.generic.standalone import (
    PrefixChoice,
    decode_standalone,
    encode_standalone,
    estimate_standalone,
)
from mergepipe.deltastore.codec.levels import (
    BANDED_FROM_ELEMENTS,
    BYTES_TRIED_BELOW,
    RECORDED_LEVELS,
    Codec,
    Level,
    Piece,
)
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
_ESTIMATE_MARGIN = 1.03
"""An estimate this many times another decides between the two; nearer ones are settled by encoding both."""
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
    Where estimates show that encoding without the base takes clearly less, only that is done.
    `prepared` is `base_contexts` of the base, if the caller has it.
    """
    if base is not None and bytes_equal(base, expert):
        return EncodedBlock(Codec.SAME, {})
    estimate = cache(partial(estimate_standalone, expert, dtype))
    candidates: list[EncodedBlock] = []
    if base is not None:
        contexts = base_contexts(base, dtype) if prepared is None and bands is not None else prepared
        if not _is_smaller_alone(base, expert, bands, contexts, estimate):
            candidates = _candidates(base, expert, dtype, bands, contexts)
    smallest = min((candidate.nbytes for candidate in candidates), default=math.inf)
    if smallest > _ALONE_FROM_SHARE * len(expert) and estimate().estimated_bytes < smallest:
        candidates.append(EncodedBlock(Codec.STANDALONE, {Piece.WHOLE: encode_standalone(expert, dtype, estimate())}))
    context = BlockContext(base, dtype, bands, "encoding")
    candidates.sort(key=lambda candidate: candidate.nbytes)
    candidates.append(EncodedBlock(Codec.RAW, {Piece.WHOLE: expert}))
    encoded = next(
        c for c in candidates if c.codec is Codec.RAW or (c.nbytes < len(expert) and _decodes_to(c, context, expert))
    )
    return encoded if encoded.codec is Codec.BANDS else replace(encoded, errors=_plain_errors(base, expert, dtype))


def _candidates(
    base: RawBytes, expert: RawBytes, dtype: DType, bands: Bands | None, contexts: BaseContexts | None
) -> list[EncodedBlock]:
    """Encode a block relative to its base, without errors; in the last one all elements can be expressed."""
    candidates = []
    if contexts is not None and bands is not None:
        mantissa_bits = MANTISSA_BITS[dtype]
        banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), bands, contexts, mantissa_bits)
        if banded is not None:
            candidates.append(EncodedBlock(Codec.BANDS, banded.pieces, banded.errors, banded.counts))
    if not candidates or candidates[0].nbytes >= len(expert) or len(expert) < BYTES_TRIED_BELOW * dtype.itemsize:
        candidates.append(EncodedBlock(Codec.BYTES, {Piece.WHOLE: encode_bytewise(base, expert, dtype)}))
    return candidates


def _is_smaller_alone(
    base: RawBytes,
    expert: RawBytes,
    bands: Bands | None,
    contexts: BaseContexts | None,
    estimate: Callable[[], PrefixChoice],
) -> bool:
    """Whether encoding without the base takes clearly less than in bands, by estimates that cost a tenth of either."""
    if bands is None or contexts is None:
        return False
    banded_bytes = estimate_bands(base.view(np.uint16), expert.view(np.uint16), bands, contexts)
    return banded_bytes is not None and estimate().estimated_bytes * _ESTIMATE_MARGIN < banded_bytes


def _plain_errors(
    base: RawBytes | None, expert: RawBytes, dtype: DType, base_dtype: DType | None = None
) -> tuple[float, ...]:
    """Squared errors of a block without levels: the whole delta at NOTHING, 0 from HEAD on."""
    if base is None or dtype.kind is not DTypeKind.FLOAT:
        return _NO_ERRORS
    deltas = _deltas(base, expert, dtype, base_dtype or dtype)
    squares = scratch("squares", len(deltas), np.float64)
    np.multiply(deltas, deltas, out=squares, dtype=np.float64)
    total = float(squares.sum())
    if not math.isfinite(total):
        total = float(squares[np.isfinite(squares)].sum())
    return (min(total, _MAX_SQUARED_ERROR), *_NO_ERRORS[1:])


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
