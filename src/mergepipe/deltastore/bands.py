"""Codec BANDS: elements of 16 bits as steps from the base in value order, the largest deltas apart from the rest.

Format: "BANDS" in docs/internals/formats/delta-store.md. A *step* is the difference of two elements' ranks among all
values of their dtype, signed so that it is positive away from zero. Its distribution depends on the exponent of the
base, which is known without a byte being read: ranges of exponents are the *contexts* of the coded numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from mergepipe.core.blocks import BF16, F16, DType
from mergepipe.deltastore.pieces import Codec, EncodedBlock, Piece, copied_to_layout, corrupt, in_layout
from mergepipe.deltastore.symbols import (
    MAX_CONTEXTS,
    N_STATES,
    SKIPPED,
    STATES_BYTES,
    TABLE_ENTRIES,
    TILE,
    WORDS_ROOM,
    decode_numbers,
    encode_numbers,
    read_numbers,
)
from mergepipe.kernels.codec import decode_tile
from mergepipe.kernels.compiled import (
    Bits16,
    Bits32,
    Bits64,
    Bytes,
    Counts,
    Doubles,
    Floats,
    exported,
    kernel,
    template,
)
from mergepipe.kernels.merge import take_delta
from mergepipe.storage.ranges import scratch

MANTISSA_BITS: Final[dict[DType, int]] = {BF16: 7, F16: 10}
_N_EXPONENTS = 256
_MIN_SHARE, _MIN_ELEMENTS = 64, 512
_COUNTED_FROM, _COUNTED_STRIDE = 64 * 1024, 4
_LARGEST_TABLES = MAX_CONTEXTS * (4 + 2 * 32) + STATES_BYTES + 1 + MAX_CONTEXTS
_BIT15: Final = 0x8000
_MESSAGE = "the coded numbers of a block in bands are not valid"
_NO_VALUES, _NO_DELTAS = np.empty(0, np.uint16), np.empty(0, np.float32)


def encode_bands(base: Bits16, expert: Bits16, cut: float, dtype: DType) -> EncodedBlock | None:
    """Encode one block; deltas from `cut` on are in HEAD. None where a delta is not finite."""
    n, mantissa_bits = len(base), MANTISSA_BITS[dtype]
    base, expert = copied_to_layout("encode-base", base), copied_to_layout("encode-expert", expert)
    rows, head, rest = (scratch(f"encode-{name}", n, np.uint16) for name in ("rows", "head", "rest"))
    squares = np.zeros(2)
    count = _split_steps(base, expert, dtype.kernel_code, np.float32(cut), head, rest, squares)
    if count < 0:
        return None
    lows = _context_bounds(base, mantissa_bits)
    symbols, words = scratch("encode-symbols", n, np.uint8), scratch("encode-words", n + 1, np.uint32)
    content = scratch("encode-content", 6 * n + 2 * _LARGEST_TABLES, np.uint8)
    head_end, rest_end = _encode_pieces(base, mantissa_bits, lows, len(lows), head, rest, rows, symbols, words, content)
    contexts = np.array([len(lows), *lows], np.uint8)
    pieces = {Piece.HEAD: np.concatenate([contexts, content[:head_end]]), Piece.REST: content[head_end:rest_end].copy()}
    return EncodedBlock(Codec.BANDS, pieces, (float(squares[0]), float(squares[1])), int(count))


def decode_bands(
    pieces: Mapping[Piece, Bytes],
    base: Bits16,
    dtype: DType,
    where: str,
    values: Bits16 = _NO_VALUES,
    deltas: Floats = _NO_DELTAS,
) -> None:
    """Decode the expert's 16 bits an element from both pieces, or deltas: without REST those outside HEAD are 0."""
    n, mantissa_bits = len(base), MANTISSA_BITS[dtype]
    if len(values) + len(deltas) != n:  # compiled code does not check bounds
        raise ValueError(f"{n} elements of the base, room for {len(values)} values and {len(deltas)} deltas")
    lows, head = _split_contexts(pieces[Piece.HEAD], where)
    contents = [head, pieces[Piece.REST]] if Piece.REST in pieces else [head]
    if sum(map(len, contents)) > 6 * n + 2 * _LARGEST_TABLES:
        raise corrupt(where, f"{sum(map(len, contents))} bytes are stored for a block of {2 * n}")
    positions, work = np.zeros(2, np.uint64), []
    for number, content in enumerate(contents):
        table, states = scratch(f"table-{number}", TABLE_ENTRIES, np.uint64), np.zeros(4, np.uint64)
        words = scratch(f"words-{number}", len(content) // 2 + 1 + WORDS_ROOM, np.uint16)
        first_bit = read_numbers(copied_to_layout("band-piece", content), len(lows), table, states, words)
        if first_bit < 0:
            raise corrupt(where, _MESSAGE)
        positions[number] = first_bit % 8
        work.append((words, first_bit // 8, states, table))
    decoded_values, decoded_deltas = in_layout("band-values", values), in_layout("band-deltas", deltas)
    is_whole = _decode_tiles(
        copied_to_layout("band-base", base), mantissa_bits, dtype.kernel_code, lows, positions,
        *work[0], *work[-1], len(work) > 1, decoded_values, decoded_deltas,
    )  # fmt: skip
    if not is_whole:
        raise corrupt(where, _MESSAGE)
    if decoded_values is not values:
        values[:] = decoded_values
    if decoded_deltas is not deltas:
        deltas[:] = decoded_deltas


def _split_contexts(head: Bytes, where: str) -> tuple[Bytes, Bytes]:
    """Split HEAD into the lowest exponents of the contexts and the coded numbers."""
    n_contexts = int(head[0]) if len(head) else 0
    lows = head[1 : 1 + n_contexts].copy()
    is_valid = 0 < len(lows) == n_contexts <= MAX_CONTEXTS and not lows[-1]
    if not is_valid or (np.diff(lows.astype(np.int64)) >= 0).any():
        raise corrupt(where, "the contexts of a block in bands are no descending exponents that end with 0")
    return lows, head[1 + n_contexts :]


# --- contexts: ranges of the base's exponents ---


def _context_bounds(base: Bits16, mantissa_bits: int) -> Bytes:
    """Merge exponents, from the largest down, until each context has enough elements; the lowest exponent of each."""
    counts, stride = np.zeros(_N_EXPONENTS, np.int64), _COUNTED_STRIDE if len(base) >= _COUNTED_FROM else 1
    _count_exponents(base, mantissa_bits, stride, counts)
    enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
    lows: list[int] = []
    n_elements, n_left = 0, int(counts.sum())
    for exponent in np.flatnonzero(counts)[::-1].tolist():
        n_elements, n_left = n_elements + int(counts[exponent]), n_left - int(counts[exponent])
        if n_elements >= enough and n_left >= enough and len(lows) < MAX_CONTEXTS - 1 and exponent > 0:
            lows.append(exponent)
            n_elements = 0
    return np.array([*lows, 0], np.uint8)


@exported("counts")
def _count_exponents(base: Bits16, mantissa_bits: int, stride: int, counts: Counts) -> None:
    """Add the exponents of every `stride`th element to `counts`."""
    shift = np.uint16(mantissa_bits)
    for i in range(0, len(base), stride):
        counts[np.uint64((base[np.uint64(i)] & np.uint16(_BIT15 - 1)) >> shift)] += 1


@template
def _fill_rows(base: Bits16, mantissa_bits: int, lows: Bytes, rows: Bits16) -> None:
    """Write the row of each element's context: how many contexts lie above its exponent."""
    lowest = np.zeros(MAX_CONTEXTS, np.int16)  # nothing is below the last, nor below those that are missing
    for context in range(len(lows)):
        lowest[context] = np.int64(lows[context]) << mantissa_bits
    first, second, third, fourth, fifth, sixth, seventh = lowest[:7]
    for i in range(len(base)):
        magnitude, above = np.int16(base[i] & np.uint16(_BIT15 - 1)), np.uint16(0)
        for low in (first, second, third, fourth, fifth, sixth, seventh):
            above = np.uint16(above + np.uint16(magnitude < low))
        rows[i] = np.uint16(above * np.uint16(N_STATES))


@template
def _skip_others(numbers: Bits16, rows: Bits16, n: int) -> None:
    """Mark the elements that have a number as skipped: the other piece has none of them."""
    for i in range(n):
        is_other = np.uint16(-np.uint16(numbers[i] != np.uint16(0)))
        rows[i] = np.uint16(np.uint16(rows[i] & np.uint16(~is_other)) | np.uint16(np.uint16(SKIPPED) & is_other))


# --- steps: differences of ranks, folded to numbers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... ---


@template
def _sign_mask(bits: np.uint16) -> np.uint16:
    """All ones of a negative element, else 0."""
    return np.uint16(np.int16(bits) >> np.int16(15))


@template
def _rank(bits: np.uint16) -> np.uint16:
    """The rank of an element among all 65536: of its value, and -0 below 0. Its own inverse but for the sign."""
    return np.uint16(bits ^ np.uint16(_sign_mask(bits) | np.uint16(_BIT15)))


@kernel
def _values_of_steps(base: Bits16, head: Bits16, rest: Bits16, values: Bits16) -> None:
    """Add the steps of both pieces, one of which is 0, to the base."""
    one = np.uint16(1)
    for i in range(len(values)):
        number, bits = np.uint16(head[i] | rest[i]), base[i]
        step = np.uint16(np.uint16(number >> one) ^ np.uint16(-np.uint16(number & one)))
        sign = _sign_mask(bits)
        rank = np.uint16(_rank(bits) + np.uint16(np.uint16(step ^ sign) - sign))
        values[i] = np.uint16(rank ^ np.uint16(np.uint16(~_sign_mask(rank)) | np.uint16(_BIT15)))


@kernel
def _numbers_of_tile(base: Bits16, expert: Bits16, deltas: Floats, cut: np.float32, head: Bits16, rest: Bits16) -> None:
    """Write the steps of a tile's elements, each to one of the pieces."""
    one = np.uint16(1)
    for i in range(len(base)):
        sign = _sign_mask(base[i])
        step = np.uint16(np.uint16(np.uint16(_rank(expert[i]) - _rank(base[i])) ^ sign) - sign)
        number = np.uint16(np.uint16(step << one) ^ _sign_mask(step))
        is_head = np.uint16(-np.uint16(abs(deltas[i]) >= cut))
        head[i], rest[i] = np.uint16(number & is_head), np.uint16(number & np.uint16(~is_head))


@kernel
def _square_tile(deltas: Floats, cut: np.float32, squares: Doubles, rest_squares: Doubles) -> int:
    """Write the squares of deltas, and those in REST with 0 for the others; return how many are in HEAD."""
    count = np.int64(0)
    for i in range(len(deltas)):
        square, is_head = np.float64(deltas[i]) * np.float64(deltas[i]), abs(deltas[i]) >= cut
        squares[i], rest_squares[i] = square, np.float64(0.0) if is_head else square
    for i in range(len(deltas)):
        count += np.int64(abs(deltas[i]) >= cut)
    return int(count)


@kernel
def _sum(values: Doubles) -> np.float64:
    """Add up values, every fourth apart: additions do not wait for each other."""
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    for i in range(0, len(values), 4):
        first += values[i]
        second += values[i + 1]
        third += values[i + 2]
        fourth += values[i + 3]
    return np.float64((first + second) + (third + fourth))


@exported("head", "rest", "squares")
def _split_steps(
    base: Bits16, expert: Bits16, code: int, cut: np.float32, head: Bits16, rest: Bits16, squares: Doubles
) -> int:
    """Write the numbers of both pieces, and the squares of all deltas and of those in REST.

    Returns how many are in HEAD, or -1 where a delta is not finite.
    """
    base_values, deltas = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    expert_values, tile_squares, count = np.empty(TILE, np.float32), np.zeros((2, TILE)), 0
    squares[:] = 0.0
    for start in range(0, len(base), TILE):
        stop = min(start + TILE, len(base))
        m, tile_base, tile_expert = stop - start, base[start:stop], expert[start:stop]
        decode_tile(tile_base.view(np.uint8), 0, code, m, base_values)
        decode_tile(tile_expert.view(np.uint8), 0, code, m, expert_values)
        take_delta(expert_values, base_values, m, deltas)
        _numbers_of_tile(tile_base, tile_expert, deltas, cut, head[start:stop], rest[start:stop])
        count += _square_tile(deltas[:m], cut, tile_squares[0], tile_squares[1])
        tile_squares[:, m:] = 0.0
        for i in range(2):
            squares[i] += _sum(tile_squares[i])
    return count if np.isfinite(squares[0]) else -1


@exported("rows", "symbols", "words", "content")
def _encode_pieces(
    base: Bits16, mantissa_bits: int, lows: Bytes, n_contexts: int, head: Bits16, rest: Bits16,
    rows: Bits16, symbols: Bytes, words: Bits32, content: Bytes,
) -> tuple[int, int]:  # fmt: skip
    """Encode both pieces, one after the other, into `content`; return where they end."""
    for start in range(0, len(rows), TILE):
        stop = min(start + TILE, len(rows))
        _fill_rows(base[start:stop], mantissa_bits, lows, rows[start:stop])
    head_end = encode_numbers(head, rows, n_contexts, symbols, words, content)
    _skip_others(head, rows, len(rows))
    return head_end, head_end + encode_numbers(rest, rows, n_contexts, symbols, words, content[head_end:])


@exported("head_states", "rest_states", "values", "deltas")
def _decode_tiles(
    base: Bits16, mantissa_bits: int, code: int, lows: Bytes, positions: Bits64,
    head_words: Bits16, head_bytes: int, head_states: Bits64, head_table: Bits64,
    rest_words: Bits16, rest_bytes: int, rest_states: Bits64, rest_table: Bits64, has_rest: bool,
    values: Bits16, deltas: Floats,
) -> bool:  # fmt: skip
    """Decode a block to `values`, or to `deltas` if these are as long; whether the pieces end where the block does.

    Without `has_rest` its arrays are not used, and its deltas are 0.
    """
    rows, expert = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    head, rest = np.empty(TILE, np.uint16), np.zeros(TILE, np.uint16)
    base_values, expert_values = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    head_end, rest_end = np.uint64(8 * head_bytes), np.uint64(8 * rest_bytes) if has_rest else np.uint64(0)
    head_position, rest_position = positions[0], positions[1]
    for start in range(0, len(base), TILE):
        if head_position > head_end or rest_position > rest_end:
            return False  # before a tile reads past the room behind its piece
        stop = min(start + TILE, len(base))
        m, tile_base = stop - start, base[start:stop]
        n_padded = (m + 3) // 4 * 4
        _fill_rows(tile_base, mantissa_bits, lows, rows)
        rows[m:n_padded] = np.uint16(SKIPPED)
        head_position = decode_numbers(head_words, head_position, head_states, head_table, rows, n_padded, head)
        if has_rest:
            _skip_others(head, rows, m)
            rest_position = decode_numbers(rest_words, rest_position, rest_states, rest_table, rows, n_padded, rest)
        if len(deltas) == 0:
            _values_of_steps(tile_base, head, rest, values[start:stop])
        else:
            _values_of_steps(tile_base, head, rest, expert[:m])
            decode_tile(tile_base.view(np.uint8), 0, code, m, base_values)
            decode_tile(expert.view(np.uint8), 0, code, m, expert_values)
            take_delta(expert_values, base_values, m, deltas[start:stop])
    left = head_states.sum() + (rest_states.sum() if has_rest else np.uint64(0))
    return bool(head_position == head_end and rest_position == rest_end and left == np.uint64(0))
