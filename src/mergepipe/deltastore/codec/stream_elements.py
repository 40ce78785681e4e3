"""Collect the elements of one residual stream of a tile side by side, and put decoded elements back in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir

from mergepipe.deltastore.codec.element_codes import (
    FIRST_BODY_CODE,
    FIRST_CELL_CODE,
    LAST_CELL_CODE,
    N_CODES,
    STREAM_CODES,
)
from mergepipe.deltastore.codec.rans import Bits16
from mergepipe.deltastore.codec.vectors import (
    I8,
    I16,
    I64,
    array_pointers,
    broadcast,
    call_intrinsic,
    constant_vector,
    core,
    has_features,
    load_vector,
    mask_of,
    store_vector,
)
from mergepipe.kernels.compiled import Bits64, Bytes, Counts, Floats, intrinsic, kernel

Elements = TypeVar("Elements", Bits16, Floats)
DECODED_TILE = 4096
"""Elements that are decoded at a time: fewer cost more calls, more do not fit into the first cache."""
ROUND = 64
"""Elements that are collected at once: tiles are padded to a multiple of this, with code 0, which is in no stream."""
STREAM_ROOM = DECODED_TILE + ROUND
"""Length of an array for the elements of one stream: whole vectors are stored past the last one."""
ALL_ROOM = 3 * STREAM_ROOM + 1
"""Length of an array for the elements of all streams, and a zero."""
_POSITION_BITS = 16
_FIRST = tuple(first for first, _ in STREAM_CODES)
_LAST = tuple(last for _, last in STREAM_CODES)
_V8, _V16 = ir.VectorType(I8, ROUND), ir.VectorType(I16, ROUND // 2)

HAS_COMPRESSION = has_features("avx512bw", "avx512vl", "avx512vbmi2")


def _compressed(builder: Any, values: Any, mask: Any) -> Any:
    """LLVM: move the lanes of a mask (an integer) to the front."""
    kind = values.type
    name = f"llvm.x86.avx512.mask.compress.v{kind.count}i{kind.element.width}"
    return call_intrinsic(builder, name, kind, values, constant_vector(0, kind), mask_of(builder, mask, kind))


def _count(builder: Any, mask: Any) -> Any:
    """LLVM: the number of ones of a mask."""
    count = builder.ctpop(mask)
    return count if count.type == I64 else builder.zext(count, I64)


def _mask_of_codes(builder: Any, codes: Any, first: Any, last: Any) -> Any:
    """LLVM: a mask of 64 bits of the codes from `first` to `last`, which are numbers or vectors."""
    lowest, highest = (constant_vector(v, _V8) if isinstance(v, int) else v for v in (first, last))
    is_selected = builder.icmp_unsigned("<=", builder.sub(codes, lowest), builder.sub(highest, lowest))
    return builder.bitcast(is_selected, I64)


def _part(builder: Any, mask: Any, part: int, lanes: int) -> Any:
    """LLVM: the bits of one vector of `lanes` lanes out of a mask of 64 bits."""
    return builder.trunc(builder.lshr(mask, I64(part * lanes)), ir.IntType(lanes))


def _collect_intrinsic(
    _typing: Any, codes: Any, n: Any, first: Any, last: Any, octets: Any, halves: Any, octets_out: Any, halves_out: Any
) -> tuple[Any, Callable[..., Any]]:
    """LLVM: `collect_vector`."""
    signature = core.types.int64(codes, n, first, last, octets, halves, octets_out, halves_out)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes_pointer, count, first, last, octets_pointer, halves_pointer, *outputs = array_pointers(
            context, builder, signature, arguments
        )
        lowest, highest = (broadcast(builder, builder.trunc(code, I8), _V8) for code in (first, last))
        position = core.cgutils.alloca_once_value(builder, I64(0))
        with core.cgutils.for_range_slice(builder, I64(0), count, I64(ROUND), I64) as (start, _):
            mask = _mask_of_codes(builder, load_vector(builder, codes_pointer, start, _V8), lowest, highest)
            at = builder.load(position)
            octets = load_vector(builder, octets_pointer, start, _V8)
            store_vector(builder, _compressed(builder, octets, mask), outputs[0], at)
            for half in range(2):
                part = _part(builder, mask, half, _V16.count)
                values = load_vector(builder, halves_pointer, builder.add(start, I64(half * _V16.count)), _V16)
                store_vector(builder, _compressed(builder, values, part), outputs[1], at)
                at = builder.add(at, _count(builder, part))
            builder.store(at, position)
        return builder.load(position)

    return signature, generate


def _make_place(n_streams: int) -> Callable[..., Any]:
    """Make the intrinsic that places the elements of the first `n_streams` streams."""

    def place(_typing: Any, codes: Any, n: Any, elements: Any, placed: Any) -> tuple[Any, Callable[..., Any]]:
        signature = core.types.void(codes, n, elements, placed)
        bits = elements.dtype.bitwidth
        vector = ir.VectorType(ir.IntType(bits), 512 // bits)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes_pointer, count, elements_pointer, placed_pointer = array_pointers(
                context, builder, signature, arguments
            )
            elements_pointer, placed_pointer = (
                builder.bitcast(pointer, vector.element.as_pointer()) for pointer in (elements_pointer, placed_pointer)
            )
            positions = [
                core.cgutils.alloca_once_value(builder, I64(stream * STREAM_ROOM)) for stream in range(n_streams)
            ]
            with core.cgutils.for_range_slice(builder, I64(0), count, I64(ROUND), I64) as (start, _):
                round_codes = load_vector(builder, codes_pointer, start, _V8)
                masks = [
                    _mask_of_codes(builder, round_codes, _FIRST[stream], _LAST[stream]) for stream in range(n_streams)
                ]
                for part in range(ROUND // vector.count):
                    values = constant_vector(0, vector)
                    for position, stream_mask in zip(positions, masks, strict=True):
                        mask, at = _part(builder, stream_mask, part, vector.count), builder.load(position)
                        values = call_intrinsic(
                            builder, f"llvm.x86.avx512.mask.expand.v{vector.count}i{bits}", vector,
                            load_vector(builder, elements_pointer, at, vector), values, mask_of(builder, mask, vector),
                        )  # fmt: skip
                        builder.store(builder.add(at, _count(builder, mask)), position)
                    store_vector(builder, values, placed_pointer, builder.add(start, I64(part * vector.count)))
            return context.get_dummy_value()

        return signature, generate

    return place


_collect: Any = intrinsic(_collect_intrinsic)
_place_head: Any = intrinsic(_make_place(1))
_place_all: Any = intrinsic(_make_place(len(STREAM_CODES)))


@kernel
def collect_scalar(
    codes: Bytes, n: int, first: int, last: int, octets: Bytes, halves: Bits16, octets_out: Bytes, halves_out: Bits16
) -> int:
    """Collect like `collect`, on any machine."""
    count, lowest, most = np.uint64(0), np.uint8(first), np.uint8(last - first)
    for i in range(n):
        code, octet, half = codes[i], octets[i], halves[i]
        octets_out[count], halves_out[count] = octet, half  # overwritten by the next unless it is counted
        count += np.uint64(np.uint8(code - lowest) <= most)
    return int(count)


@kernel
def collect_vector(
    codes: Bytes, n: int, first: int, last: int, octets: Bytes, halves: Bits16, octets_out: Bytes, halves_out: Bits16
) -> int:
    """Collect like `collect`, on machines with AVX-512 VBMI2."""
    return int(_collect(codes, n, first, last, octets, halves, octets_out, halves_out))


@kernel
def _first_positions(n_streams: int, shifts: Bits64, steps: Bits64) -> np.uint64:
    """Fill what a code shifts and adds to a word that holds the positions of all streams; return the word at first.

    Tables of codes instead of branches. Codes of no stream, or of streams left out, stay at the last position.
    """
    shifts[:], steps[:] = np.uint64(3 * _POSITION_BITS), np.uint64(0)
    positions = np.uint64(3 * STREAM_ROOM) << np.uint64(3 * _POSITION_BITS)
    for stream in range(n_streams):
        first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_CELL_CODE
        stop = FIRST_BODY_CODE if stream == 0 else FIRST_CELL_CODE if stream == 1 else LAST_CELL_CODE + 1
        shift = np.uint64(stream * _POSITION_BITS)
        shifts[first:stop], steps[first:stop] = shift, np.uint64(1) << shift
        positions |= np.uint64(stream * STREAM_ROOM) << shift
    return np.uint64(positions)


@kernel
def collect_streams_scalar(
    codes: Bytes, n: int, base: Bits16, n_streams: int, stream_codes: Bytes, stream_base: Bits16, counts: Counts
) -> None:
    """Collect like `collect_streams`, on any machine."""
    shifts, steps = np.empty(N_CODES, np.uint64), np.empty(N_CODES, np.uint64)
    positions, mask = _first_positions(n_streams, shifts, steps), np.uint64((1 << _POSITION_BITS) - 1)
    for i in range(n):
        code, base_bits = codes[i], base[i]
        at = (positions >> shifts[np.uint64(code)]) & mask
        stream_codes[at], stream_base[at] = code, base_bits
        positions += steps[np.uint64(code)]
    for stream in range(n_streams):
        position = (positions >> np.uint64(stream * _POSITION_BITS)) & mask
        counts[stream] = np.int64(position) - stream * STREAM_ROOM


@kernel
def collect_streams_vector(
    codes: Bytes, n: int, base: Bits16, n_streams: int, stream_codes: Bytes, stream_base: Bits16, counts: Counts
) -> None:
    """Collect like `collect_streams`, on machines with AVX-512 VBMI2."""
    for stream in range(n_streams):
        first = 1 if stream == 0 else FIRST_BODY_CODE if stream == 1 else FIRST_CELL_CODE
        last = FIRST_BODY_CODE - 1 if stream == 0 else FIRST_CELL_CODE - 1 if stream == 1 else LAST_CELL_CODE
        at, stop = stream * STREAM_ROOM, (stream + 1) * STREAM_ROOM
        own_codes, own_base = stream_codes[at:stop], stream_base[at:stop]
        counts[stream] = collect_vector(codes, n, first, last, codes, base, own_codes, own_base)


@kernel
def place_scalar(codes: Bytes, n: int, elements: Elements, placed: Elements, n_streams: int) -> None:
    """Place like `place`, on any machine."""
    shifts, steps = np.empty(N_CODES, np.uint64), np.empty(N_CODES, np.uint64)
    positions, mask = _first_positions(n_streams, shifts, steps), np.uint64((1 << _POSITION_BITS) - 1)
    for i in range(n):
        code = np.uint64(codes[i])
        placed[i] = elements[(positions >> shifts[code]) & mask]
        positions += steps[code]


@kernel
def place_vector(codes: Bytes, n: int, elements: Elements, placed: Elements, n_streams: int) -> None:
    """Place like `place`, on machines with AVX-512 VBMI2."""
    if n_streams == 1:
        _place_head(codes, n, elements, placed)
    else:
        _place_all(codes, n, elements, placed)


collect = collect_vector if HAS_COMPRESSION else collect_scalar
"""Copy what `octets` and `halves` hold for the codes from `first` to `last`, among the first `n` elements of a tile.

`n` is a multiple of `ROUND`. Returns their number. The outputs have `STREAM_ROOM` elements; those after the last are
undefined.
"""
collect_streams = collect_streams_vector if HAS_COMPRESSION else collect_streams_scalar
"""Copy codes and base of the first `n_streams` (1 or 3) streams of a tile, side by side by stream, and count them.

`n` is a multiple of `ROUND`; the outputs (`ALL_ROOM`) have those of stream s from `s * STREAM_ROOM` on. Elements after
the last of each are undefined.
"""
place = place_vector if HAS_COMPRESSION else place_scalar
"""Write the elements of the first `n_streams` (1 or 3) streams to the places of their codes, 0 to all others.

`n` is a multiple of `ROUND`; `elements` (`ALL_ROOM`) has those of stream s from `s * STREAM_ROOM` on, of floats or 16
bits, and a zero at the end.
"""
