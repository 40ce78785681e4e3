"""Encode a block with the codec that suits it, and decode it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, F16, DType, DTypeKind
from mergepipe.deltastore.codec.arrays import copied_to_layout, corrupt, in_layout, scratch
from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    F16_MANTISSA_BITS,
    TILE,
    Bands,
    are_finite,
)
from mergepipe.deltastore.codec.levels import (
    BANDED_FROM_ELEMENTS,
    BYTES_TRIED_BELOW,
    PIECES_OF,
    RECORDED_LEVELS,
    Codec,
    Level,
    Piece,
)
from mergepipe.deltastore.codec.piece_headers import CURSOR_FIELDS, END, FAULT, FOUND, MESSAGES, NEEDED, POSITION, Fault
from mergepipe.deltastore.codec.planes import decode_planes, encode_planes
from mergepipe.deltastore.codec.rans import SKIPPED, TOTAL, Bits16, padded_length
from mergepipe.deltastore.codec.residuals import HAS_PDEP
from mergepipe.deltastore.codec.symbol_stages import Contexts
from mergepipe.deltastore.codec.tile_decode import VECTOR_RESIDUALS, VECTOR_SYMBOLS, decode_tiles
from mergepipe.deltastore.codec.tile_encode import (
    COUNTS_SHAPE,
    N_LOOKED_UP,
    choose_tables,
    count_bits,
    encode_pieces,
    work_bytes,
)
from mergepipe.deltastore.codec.vector_symbols import has_vector_decoder
from mergepipe.deltastore.codec.vectors import bytes_equal
from mergepipe.kernels.codec import decode_all, decode_tile, encode_all
from mergepipe.kernels.compiled import Bytes, Counts, Floats
from mergepipe.kernels.merge import take_delta

# --- encode a bf16 or fp16 block relative to a base of that dtype: bands of magnitude, and cells around the base ---
#
# Format: "BANDS" in docs/internals/formats/delta-store.md.


T = TypeVar("T", bound=np.generic)

_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 8
_ESTIMATE_STRIDE = 16
_FAR_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class BandedBlock:
    """One encoded block. `errors`: squared error left at the levels NOTHING, HEAD, HEAD_EXACT, BODY, BODY_EXACT.

    `counts`: elements with |delta| at or above each cut.
    """

    pieces: dict[Piece, NDArray[np.uint8]]
    errors: tuple[float, ...]
    counts: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class BaseContexts:
    """The contexts of a base block, and which of them each element (padded) is in; shared by all its experts."""

    contexts: Contexts
    by_element: Bytes

    @classmethod
    def of(cls, base: Bits16, mantissa_bits: int = BF16_MANTISSA_BITS) -> BaseContexts:
        """Compute the contexts of a base block (bits of bf16 or fp16).

        `by_element` is in `scratch`: valid until the same thread calls this for another block.
        """
        base = copied_to_layout("encode-base", base)
        contexts = Contexts.of(base, mantissa_bits)
        by_element = scratch("encode-contexts", padded_length(len(base)), np.uint8)
        contexts.fill_rows(base, by_element)
        return cls(contexts, by_element)


def encode_bands(
    base: Bits16,
    expert: Bits16,
    bands: Bands,
    prepared: BaseContexts | None = None,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> BandedBlock | None:
    """Encode one block; None where a delta is not finite, which this codec does not support.

    `prepared` are the contexts of `base`, if the caller has them.
    """
    base, expert = copied_to_layout("encode-base", base), copied_to_layout("encode-expert", expert)
    if not _are_supported(base, expert, mantissa_bits):
        return None
    base_contexts = BaseContexts.of(base, mantissa_bits) if prepared is None else prepared
    work = scratch("encode-work", work_bytes(len(base)), np.uint8)
    ends, counts = np.empty(len(BAND_PIECES) + 1, np.int64), np.empty(3, np.int64)
    errors = np.empty(len(RECORDED_LEVELS))
    is_finite = encode_pieces(
        base, expert, mantissa_bits, base_contexts.by_element, base_contexts.contexts.lows, bands.bits,
        _sample_stride(base), work, ends, errors, counts,
    )  # fmt: skip
    if not is_finite:
        return None
    first, *stops = ends.tolist()
    stored = work[first : stops[-1]].copy()
    starts = [first, *stops[:-1]]
    pieces = {
        piece: stored[start - first : stop - first]
        for piece, start, stop in zip(BAND_PIECES, starts, stops, strict=True)
    }
    above_first, above_second, above_third = counts.tolist()
    return BandedBlock(pieces, tuple(errors.tolist()), (above_first, above_second, above_third))


def estimate_bands(base: Bits16, expert: Bits16, bands: Bands, base_contexts: BaseContexts) -> float | None:
    """Estimate the bytes of a block that `encode_bands` encodes, from a sample of its tiles; tables are not counted.

    None where cuts small beside the base's values promise few bytes, and where `encode_bands` may return None.
    """
    contexts = base_contexts.contexts
    if not _are_far_apart(contexts, bands):
        return None
    base, expert = copied_to_layout("encode-base", base), copied_to_layout("encode-expert", expert)
    if not _are_supported(base, expert, contexts.mantissa_bits):
        return None
    cell_bits, widths = np.empty(N_LOOKED_UP, np.uint8), np.empty(N_LOOKED_UP, np.uint8)
    choose_tables(
        base, expert, contexts.mantissa_bits, base_contexts.by_element, contexts.lows, bands.bits,
        _sample_stride(base), cell_bits, widths,
    )  # fmt: skip
    stride = _ESTIMATE_STRIDE if len(base) >= _SAMPLED_FROM else 1
    base_S, expert_S = _sample_tiles(base, stride), _sample_tiles(expert, stride)
    contexts_S = _sample_tiles(base_contexts.by_element[: len(base)], stride)
    work, counts_CK = scratch("encode-work", work_bytes(len(base_S)), np.uint8), np.empty(COUNTS_SHAPE, np.int64)
    residual_bits = count_bits(
        base_S, expert_S, contexts.mantissa_bits, contexts_S, contexts.lows, bands.bits, cell_bits, widths, work,
        counts_CK,
    )  # fmt: skip
    if residual_bits < 0:
        return None
    shares_CK = np.maximum(counts_CK, 1) / np.maximum(counts_CK.sum(axis=1, keepdims=True), 1)
    return float(residual_bits - (counts_CK * np.log2(shares_CK)).sum()) / 8 * (len(base) / len(base_S))


def _sample_stride(base: Bits16) -> int:
    """The distance, in tiles, of those that widths are chosen from."""
    return _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1


def _sample_tiles(by_element: NDArray[T], stride: int) -> NDArray[T]:
    """Copy every `stride`th whole tile."""
    whole = len(by_element) // TILE * TILE
    return by_element[:whole].reshape(-1, TILE)[::stride].flatten()


def _are_far_apart(contexts: Contexts, bands: Bands) -> bool:
    """Whether half of the tensor's deltas are not small beside the block's largest weights."""
    bias = (1 << (14 - contexts.mantissa_bits)) - 1
    return bands.cuts[2] * _FAR_FACTOR >= 2.0 ** (int(contexts.lows[0]) - bias)


def _are_supported(base: Bits16, expert: Bits16, mantissa_bits: int) -> bool:
    """Whether `float_value` reads both as they are: fp16 must be finite."""
    return mantissa_bits != F16_MANTISSA_BITS or (are_finite(base, mantissa_bits) and are_finite(expert, mantissa_bits))


# --- decode a block of codec BANDS: exact values from all pieces, or deltas from the pieces of a level ---
#
# Format: "BANDS" and "Levels" in docs/internals/formats/delta-store.md.


BAND_PIECES = (Piece.HEAD, Piece.HEAD_FINE, Piece.BODY, Piece.BODY_FINE, Piece.REST)
SPARE_BYTES = 1024
_FEATURES = (VECTOR_SYMBOLS if has_vector_decoder() else 0) | (VECTOR_RESIDUALS if HAS_PDEP else 0)
_NOTHING = np.empty(0, np.uint8)
_NO_DELTAS, _NO_VALUES = np.empty(0, np.float32), np.empty(0, np.uint16)
Pieces = Mapping[Piece, NDArray[np.uint8]]
_REQUESTED_P = {level: np.array([piece in PIECES_OF[level] for piece in BAND_PIECES], np.uint8) for level in Level}


def decode_band_values(
    pieces: Pieces, base: Bits16, bands: Bands, where: str, out: Bits16, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode the expert's 16 bits an element from all pieces."""
    blocks = _one_block(pieces, Level.LOSSLESS, base, where)
    decode_band_blocks(blocks, Level.LOSSLESS, bands, lambda _: where, out, _NO_DELTAS, features, mantissa_bits)


def decode_band_deltas(
    pieces: Pieces, level: Level, base: Bits16, bands: Bands, where: str, out: Floats, features: int = _FEATURES,
    mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode deltas: exact where residuals are read, else the centroid of the band or the cell's centre, else 0."""
    blocks = _one_block(pieces, level, base, where)
    decode_band_blocks(blocks, level, bands, lambda _: where, _NO_VALUES, out, features, mantissa_bits)


@dataclass(frozen=True, slots=True)
class BandBlocks:
    """Pieces and base of consecutive blocks of BANDS; all but the last have `block_elements` elements.

    The pieces of block b lie in `stored`, from POSITION to END of `cursors_BPF[b]`; after the last, `stored` has
    `padding_bytes`.
    """

    stored: Bytes
    cursors_BPF: Counts
    base: Bits16
    block_elements: int


def padding_bytes(block_elements: int) -> int:
    """Bytes that must be readable after the last piece, for corrupt ones."""
    return 2 * padded_length(block_elements) + SPARE_BYTES


def decode_band_blocks(
    blocks: BandBlocks, level: Level, bands: Bands, where: Callable[[int], str], values: Bits16, deltas: Floats,
    features: int = _FEATURES, mantissa_bits: int = BF16_MANTISSA_BITS,
) -> None:  # fmt: skip
    """Decode consecutive blocks in one call, like `decode_band_values`, or `decode_band_deltas` without `values`.

    `where` tells errors where the block of a number is.
    """
    n = len(blocks.base)
    if len(values) + len(deltas) != n:  # compiled code does not check bounds
        raise ValueError(f"{n} elements of the base, room for {len(values)} values and {len(deltas)} deltas")
    if not n:
        return
    table, body_table = (scratch(name, (SKIPPED + 1) * TOTAL, np.uint32) for name in ("table", "body-table"))
    decoded_values, decoded_deltas = in_layout("values", values), in_layout("deltas", deltas)
    base, cursors_BPF = copied_to_layout("base", blocks.base), blocks.cursors_BPF.copy()
    decode_tiles(
        blocks.stored,
        cursors_BPF,
        _REQUESTED_P[level],
        base,
        blocks.block_elements,
        mantissa_bits,
        np.array(bands.cuts, np.float32),
        bands.limit,
        features,
        table,
        body_table,
        scratch("codes", padded_length(min(n, blocks.block_elements)), np.uint8),
        decoded_values,
        decoded_deltas,
    )
    faults_BP = cursors_BPF[:, :, FAULT]
    if faults_BP.any():
        block, piece = np.argwhere(faults_BP)[0].tolist()
        cursor = cursors_BPF[block, piece]
        message = MESSAGES[Fault(int(cursor[FAULT]))]
        raise corrupt(where(block), message.format(found=int(cursor[FOUND]), needed=int(cursor[NEEDED])))
    if decoded_values is not values:
        values[:] = decoded_values
    if decoded_deltas is not deltas:
        deltas[:] = decoded_deltas


def _one_block(pieces: Pieces, level: Level, base: Bits16, where: str) -> BandBlocks:
    """Concatenate the pieces of one block, with readable padding after them."""
    n = len(base)
    cursors_PF = np.zeros((len(BAND_PIECES), CURSOR_FIELDS), np.int64)
    contents = [pieces[piece] if piece in PIECES_OF[level] else _NOTHING for piece in BAND_PIECES]
    total = sum(map(len, contents))
    if total > len(contents) * (2 * n + SPARE_BYTES):
        raise corrupt(where, f"{total} bytes are stored for a block of {2 * n}")
    stored = scratch("pieces", total + padding_bytes(n), np.uint8)
    position = 0
    for cursor, content in zip(cursors_PF, contents, strict=True):
        stored[position : position + len(content)] = content
        cursor[POSITION], cursor[END] = position, position + len(content)
        position += len(content)
    return BandBlocks(stored, cursors_PF[None], base, max(n, 1))


# --- encode a block with the codec that suits it, and decode it again ---
#
# Format: codecs in "Index row", docs/internals/formats/delta-store.md. Everything outside `codec` goes through this
# module.


RawBytes = NDArray[np.uint8]
MANTISSA_BITS = {BF16: BF16_MANTISSA_BITS, F16: F16_MANTISSA_BITS}
_NO_ERRORS = (0.0,) * len(RECORDED_LEVELS)
_ALONE_FROM_SHARE = 0.5
"""Blocks that are no larger than this share relative to their base are not encoded without it."""
_ESTIMATE_MARGIN = 1.03
"""A size this many times smaller than the estimate of another decides; else both encodings are made."""
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
    candidates: list[EncodedBlock] = []
    alone = cache(lambda: EncodedBlock(Codec.STANDALONE, {Piece.WHOLE: encode_planes(None, expert, dtype)}))
    if base is not None:
        contexts = base_contexts(base, dtype) if prepared is None and bands is not None else prepared
        if not _is_smaller_alone(base, expert, bands, contexts, alone):
            candidates = _candidates(base, expert, dtype, bands, contexts)
    smallest = min((candidate.nbytes for candidate in candidates), default=math.inf)
    if smallest > _ALONE_FROM_SHARE * len(expert):
        candidates.append(alone())
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
        candidates.append(EncodedBlock(Codec.BYTES, {Piece.WHOLE: encode_planes(base, expert, dtype)}))
    return candidates


def _is_smaller_alone(
    base: RawBytes,
    expert: RawBytes,
    bands: Bands | None,
    contexts: BaseContexts | None,
    alone: Callable[[], EncodedBlock],
) -> bool:
    """Whether a block takes clearly less without the base than in bands, by an estimate of a tenth of these."""
    if bands is None or contexts is None:
        return False
    banded_bytes = estimate_bands(base.view(np.uint16), expert.view(np.uint16), bands, contexts)
    return banded_bytes is not None and alone().nbytes * _ESTIMATE_MARGIN < banded_bytes


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
    """Decode a block from all of its pieces into `out`."""
    if codec is Codec.SAME:
        out[:] = _base(context)
    elif codec is Codec.BANDS:
        bands = _bands(context)
        base_bits, values = _base(context).view(np.uint16), out.view(np.uint16)
        mantissa_bits = MANTISSA_BITS[context.dtype]
        decode_band_values(pieces, base_bits, bands, context.where, values, mantissa_bits=mantissa_bits)
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
