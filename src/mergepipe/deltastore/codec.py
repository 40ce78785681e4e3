"""Encode a block with the codec that suits it, and decode it again; everything outside goes through this module.

Format: codecs in "Index row", and "BYTES and STANDALONE", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, DTypeKind
from mergepipe.deltastore.bands import MANTISSA_BITS, decode_bands, encode_bands
from mergepipe.deltastore.pieces import (
    BANDED_FROM_ELEMENTS,
    BYTES_TRIED_BELOW,
    NO_ERRORS,
    PIECES_OF,
    ByteReader,
    Codec,
    EncodedBlock,
    Level,
    Piece,
    RawBytes,
    concatenate_bytes,
    copied_to_layout,
    corrupt,
    in_layout,
)
from mergepipe.deltastore.planes import (
    ESCAPE,
    Words,
    extract_plane,
    fold_differences,
    fold_quarters,
    insert_plane,
    unfold_differences,
    unfold_quarters,
)
from mergepipe.kernels.codec import decode_all, decode_tile, encode_all
from mergepipe.kernels.compiled import Floats
from mergepipe.kernels.merge import take_delta
from mergepipe.storage.ranges import scratch

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_UNSIGNED: Final[dict[int, type[np.unsignedinteger]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

FORM_PLAIN, FORM_COMPRESSED, FORM_QUARTERS, FORM_SPARSE = range(4)
_MOST_ESCAPES = 1 / 8
"""Four bytes are written as one where at most this share is from `ESCAPE` on: zstd takes at least a bit a byte."""
_LONG_GAP, _MOST_OTHER = 255, 1 / 32
"""Only bytes other than 0 are written, with the gaps before them, where they are at most this share."""
_PARAMETERS: Final[Mapping[int, int]] = {
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.window_log: 18,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.chain_log: 6,
    zstd.CompressionParameter.search_log: 1,
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.target_length: 0,
}
"""Huffman codes, and hardly a match: those that are found by chance in planes of numbers cost more than they save."""

# --- words: differences from the base in value order, folded, in planes of one byte of each ---


def encode_planes(base: RawBytes | None, expert: RawBytes, dtype: DType) -> RawBytes:
    """Encode a block of any dtype relative to the same elements of its base, or to zeros."""
    parts = []
    words = copied_to_layout("plane-expert", _words(expert, dtype))
    base_words = copied_to_layout("plane-base", _words_of(base, expert, dtype))
    folded, plane = scratch("folded", len(words), words.dtype.type), scratch("plane", len(words), np.uint8)
    fold_differences(base_words, words, _flip_of(dtype), folded)
    for byte in range(dtype.itemsize):
        extract_plane(folded, byte, plane)
        parts.append(_packed_plane(plane))
    return concatenate_bytes(*parts)


def decode_planes(content: RawBytes, base: RawBytes | None, dtype: DType, where: str, out: RawBytes) -> None:
    """Decode the expert's bytes into `out`: the inverse of `encode_planes`."""
    reader = ByteReader(content, where)
    words = _words(out, dtype)
    expert = in_layout("plane-out", words)
    folded = scratch("folded", len(expert), _UNSIGNED[dtype.itemsize])
    folded[:] = _unpacked_plane(reader, len(expert), where)
    for byte in range(1, dtype.itemsize):
        insert_plane(_unpacked_plane(reader, len(expert), where), byte, folded)
    reader.end()
    base_words = copied_to_layout("plane-base", _words_of(base, out, dtype))
    unfold_differences(base_words, folded, _flip_of(dtype), expert)
    if expert is not words:
        words[:] = expert


def _words(content: RawBytes, dtype: DType) -> Words:
    """View elements as signed integers."""
    return content.view(f"i{dtype.itemsize}")


def _words_of(base: RawBytes | None, expert: RawBytes, dtype: DType) -> Words:
    """View the base's elements as signed integers; zeros without a base."""
    return _words(np.zeros(len(expert), np.uint8) if base is None else base, dtype)


def _flip_of(dtype: DType) -> np.signedinteger:
    """The `flip` of `fold_differences`."""
    signed: np.dtype[np.signedinteger] = np.dtype(f"i{dtype.itemsize}")
    return signed.type(np.iinfo(signed).max if dtype.kind is DTypeKind.FLOAT else 0)


# --- planes: bytes compressed by zstd; four in one where most are small, only those other than 0 where few are ---


class _OfThread(threading.local):
    """The compressor of a thread: threads that share one wait for each other."""

    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(options=_PARAMETERS)


_OF_THREAD = _OfThread()


def _packed_plane(plane: RawBytes) -> RawBytes:
    """A plane as stored."""
    n_other = np.count_nonzero(plane)
    if n_other <= _MOST_OTHER * len(plane):
        places = np.flatnonzero(plane)
        gaps = _packed_gaps(np.diff(places, prepend=-1) - 1)
        form, n_gaps = np.array([FORM_SPARSE], np.uint8), np.array([len(gaps)], np.uint32)
        return concatenate_bytes(form, n_gaps, _compressed(gaps), _compressed(plane[places]))
    if np.count_nonzero(plane >= ESCAPE) > _MOST_ESCAPES * len(plane):
        return _compressed(plane)
    quarters, escapes = np.empty(-(-len(plane) // 4), np.uint8), scratch("escapes", len(plane) + 4, np.uint8)
    padded = scratch("padded-plane", 4 * len(quarters), np.uint8)
    padded[: len(plane)], padded[len(plane) :] = plane, 0
    count = fold_quarters(padded, quarters, escapes)
    form = np.array([FORM_QUARTERS], np.uint8)
    return concatenate_bytes(form, _compressed(quarters), _compressed(escapes[:count]))


def _packed_gaps(gaps: NDArray[np.int64]) -> RawBytes:
    """Gaps in bytes: as many times `_LONG_GAP` as it goes into a gap, then the rest."""
    n_long = gaps // _LONG_GAP
    packed = np.full(len(gaps) + int(n_long.sum()), _LONG_GAP, np.uint8)
    packed[np.cumsum(n_long + 1) - 1] = gaps % _LONG_GAP
    return packed


def _compressed(content: RawBytes) -> RawBytes:
    """Bytes as stored: compressed where that is smaller."""
    frame = _OF_THREAD.compressor.compress(content.data, zstd.ZstdCompressor.FLUSH_FRAME)
    if len(frame) + 4 >= len(content):
        return concatenate_bytes(np.array([FORM_PLAIN], np.uint8), content)
    size = np.array([len(frame)], np.uint32)
    return concatenate_bytes(np.array([FORM_COMPRESSED], np.uint8), size, np.frombuffer(frame, np.uint8))


def _unpacked_plane(reader: ByteReader, n: int, where: str) -> RawBytes:
    """Read a plane of `n` bytes."""
    form = int(reader.take(np.uint8, 1)[0])
    if form == FORM_SPARSE:
        return _sparse_plane(reader, n, where)
    if form != FORM_QUARTERS:
        return _decompressed(reader, form, n, where)
    quarters = _unpacked(reader, -(-n // 4), where)
    count = int(np.bitwise_count(quarters & (quarters >> 1) & 0x55).sum())
    plane = scratch("padded-plane", 4 * len(quarters), np.uint8)
    unfold_quarters(quarters, np.append(_unpacked(reader, count, where), np.uint8(0)), plane)
    return plane[:n]


def _sparse_plane(reader: ByteReader, n: int, where: str) -> RawBytes:
    """Read the bytes other than 0 of a plane of `n`."""
    count = int(reader.take(np.uint32, 1)[0])
    if count > n:
        raise corrupt(where, f"{count} gaps in a plane of {n} bytes")
    gaps = _unpacked(reader, count, where)
    is_end = gaps < _LONG_GAP
    places = np.cumsum(gaps + is_end, dtype=np.int64)[is_end] - 1
    if len(places) and places[-1] >= n:
        raise corrupt(where, f"a byte at {places[-1]} of a plane of {n}")
    plane = np.zeros(n, np.uint8)
    plane[places] = _unpacked(reader, len(places), where)
    return plane


def _unpacked(reader: ByteReader, n: int, where: str) -> RawBytes:
    """Read `n` bytes as `_compressed` wrote them."""
    return _decompressed(reader, int(reader.take(np.uint8, 1)[0]), n, where)


def _decompressed(reader: ByteReader, form: int, n: int, where: str) -> RawBytes:
    """Read `n` bytes; the size that a frame claims is checked before room is made for it, and not exceeded."""
    if form == FORM_PLAIN:
        return reader.take(np.uint8, n)
    if form != FORM_COMPRESSED:
        raise corrupt(where, f"unknown form {form} of a byte plane")
    frame = reader.take(np.uint8, int(reader.take(np.uint32, 1)[0])).data
    decompressor = zstd.ZstdDecompressor()
    try:
        size = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            raise corrupt(where, f"a frame of unknown size in the place of {n} bytes")
        if size != n:
            raise corrupt(where, f"a frame of {size} bytes in the place of {n}")
        content = decompressor.decompress(frame, n + 1)  # one more, so that the frame's end is read in any case
    except zstd.ZstdError as error:
        raise corrupt(where, f"a frame cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise corrupt(where, "a frame cannot be decompressed: its end is missing")
    if decompressor.unused_data:
        raise corrupt(where, f"{len(decompressor.unused_data)} bytes after a frame")
    return np.frombuffer(content, np.uint8)


# --- encode a block with the codec that suits it, and decode it again ---

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
        decode_bands(pieces, _base_in_bands(context), context.dtype, context.where, out.view(np.uint16))
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
        decode_bands(own, _base_in_bands(context), context.dtype, context.where, deltas=out)
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
