"""Weights stored as codes: each scheme's rule from stored tensors to numbers, and the tensor that is read by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, TensorEntry
from mergepipe.checkpoints.open_files import decoded, once, read_span, whole_cost_bytes
from mergepipe.core.blocks import BF16, F32, DType, Span
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile


@dataclass(frozen=True, slots=True)
class Scheme:
    """How stored tensors make a weight: `rows` of `columns` elements each, in the weight's order.

    What a scheme multiplies, it multiplies in float32 in the order of the library that wrote it, which rounds the
    product to 16 bits afterwards: a weight that is written in these has the library's bits.
    """

    columns: int
    is_unit = False
    """Whether rows lie across all of the stored bytes, so that these are read at once and kept."""

    def spans(self, rows: Span) -> tuple[Span, ...]:
        """The elements that some rows need of each stored tensor, those at the end that it may lack among them.

        Nobody asks it of a unit.
        """
        raise NotImplementedError

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Work out some rows (n, columns) from the bytes of their `spans`, or of a unit from all bytes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CodedTensor(ComputedTensor):
    """A weight that is stored as codes and what they are scaled with, read as float32.

    A span costs the pages of whole rows of its codes and scales, and nothing is kept; a unit costs all of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[TensorEntry, ...]
    scheme: Scheme
    stored_dtype: DType = BF16  # that such a model has where it is not quantised
    is_delta: bool = False
    dtype = F32

    @property
    def is_unit(self) -> bool:
        return self.scheme.is_unit

    def cost_bytes(self, span: Span) -> int:
        if self.is_unit or not span.n_elements:
            return whole_cost_bytes(self.stored) if self.is_unit else 0
        return sum(part.cost_bytes(of_part) for part, of_part in self.parts_of(self.rows_of(span)))

    def rows_of(self, span: Span) -> Span:
        """The rows that a span touches."""
        return Span(span.start // self.scheme.columns, -(-span.stop // self.scheme.columns))

    def parts_of(self, rows: Span) -> tuple[tuple[TensorEntry, Span], ...]:
        """The stored tensors, each with what rows need of it."""
        return tuple(zip(self.stored, self.scheme.spans(rows), strict=False))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps the stored bytes of a unit from its first call on."""
        whole = once(
            lambda purpose: [read_span(part, Span(0, part.n_elements), files, purpose) for part in self.stored]
        )

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            if not span.n_elements:
                return
            rows = self.rows_of(span)
            parts = () if self.is_unit else self.parts_of(rows)
            raw = [read_span(part, of_part, files, purpose) for part, of_part in parts] or whole(purpose)
            values = self.scheme.decode(rows, raw).reshape(-1)
            first = span.start - rows.start * self.scheme.columns
            out.view(np.float32)[:] = values[first : first + span.n_elements]

        return fetch


def _times(values_RC: NDArray[np.float32], scales_RG: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Multiply each stretch of `width` columns of a row in place with its scale; the last one may be cut."""
    n_rows, whole = len(values_RC), values_RC.shape[1] // width
    stretches = values_RC[:, : whole * width].reshape(n_rows, whole, width)  # a view: the last axis is split
    np.multiply(stretches, scales_RG[:, :whole, None], out=stretches)
    values_RC[:, whole * width :] *= scales_RG[:, whole:]
    return values_RC


def elements_of(rows: Span, columns: int, per: int = 1) -> Span:
    """The stored elements of rows of `columns` elements each, `per` of them in one."""
    return Span(rows.start * columns // per, rows.stop * columns // per)


def _nibbles(raw: NDArray[np.uint8], values: NDArray[np.float32], *, high_first: bool = False) -> NDArray[np.float32]:
    """Replace both halves of every byte by one of 16 values."""
    low, high = np.tile(values, 16), np.repeat(values, 16)
    pairs = np.stack((high, low) if high_first else (low, high), axis=1)
    return np.ascontiguousarray(pairs[raw].reshape(*raw.shape[:-1], -1))


U8_EXPONENTS = -1
E8M0_EXPONENTS = -2
"""What stands for the kernel code of scales that are exponents of powers of two: bytes, or a dtype of their own."""
_POWERS_OF_TWO = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.inf)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ScaledFP8(Scheme):
    """FP8 codes times scales: one for all, one for each row, or one for each block of rows and columns.

    `float32(code) * float32(scale)`: transformers and compressed-tensors. Stored: codes, scales, which `scale_kernel`
    says how to read.
    """

    block: tuple[int, int]
    code_kernel: int
    scale_kernel: int

    @property
    def _groups(self) -> int:
        return -(-self.columns // self.block[1])

    def spans(self, rows: Span) -> tuple[Span, ...]:
        of_scales = Span(rows.start // self.block[0], -(-rows.stop // self.block[0]))
        return elements_of(rows, self.columns), elements_of(of_scales, self._groups)

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        values = decoded(raw[0], self.code_kernel).reshape(-1, self.columns)
        scales = _scales(raw[1], self.scale_kernel).reshape(-1, self._groups)
        of_row = np.arange(rows.start, rows.stop) // self.block[0] - rows.start // self.block[0]
        return _times(values, scales[of_row], self.block[1])


@dataclass(frozen=True, slots=True)
class PackedIntegers(Scheme):
    """Integers of 4 or 8 bits in words of 32, times a scale for each group of columns of a row.

    `(code - zero) * scale`: `pack-quantized` of compressed-tensors. Stored: codes, scales, the group of each column
    where they are `grouped` in another order than side by side, and zeros where they are not the middle of all codes;
    zeros are packed along the rows.
    """

    n_bits: int
    groups: int
    scale_kernel: int
    grouped: bool = False

    def spans(self, rows: Span) -> tuple[Span, ...]:
        per = 32 // self.n_bits
        words = Span(rows.start // per, -(-rows.stop // per))
        order = (Span(0, self.columns),) if self.grouped else ()
        return (
            elements_of(rows, self.columns, per),
            elements_of(rows, self.groups),
            *order,
            elements_of(words, self.groups),
        )

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        middle, per = 1 << (self.n_bits - 1), 32 // self.n_bits
        if self.n_bits == 4:
            values = _nibbles(raw[0], np.arange(16, dtype=np.float32) - middle).reshape(-1, self.columns)
        else:
            values = raw[0].astype(np.float32).reshape(-1, self.columns) - middle
        scales = decoded(raw[1], self.scale_kernel).reshape(-1, self.groups)
        width = self.columns // self.groups
        if self.grouped:
            scales, width = scales[:, raw[2].view(np.int32)], 1
        if len(raw) > 2 + self.grouped:
            zeros_WG = _unpacked(raw[-1].view(np.uint32).reshape(-1, self.groups), self.n_bits)
            zeros_RG = zeros_WG.reshape(-1, self.groups)[rows.start % per :][: rows.n_elements].astype(np.float32)
            zeros_RG = zeros_RG[:, raw[2].view(np.int32)] if self.grouped else zeros_RG
            values.reshape(rows.n_elements, -1, width)[:] -= (zeros_RG - middle)[:, :, None]
        return _times(values, scales, width)


@dataclass(frozen=True, slots=True)
class PackedFP4(Scheme):
    """Numbers of 4 bits (E2M1), two in a byte, times a scale for each group of columns of a row.

    NVFP4: FP8 scales, divided by one for all, or (`multiplies`, ModelOpt) times that. MXFP4: scales that are powers of
    two. Stored: codes, scales, which `scale_kernel` says how to read, and for NVFP4 the one for all, whose dtype has
    the code `of_all_kernel`.
    """

    groups: int
    scale_kernel: int
    of_all_kernel: int = -1
    multiplies: bool = False

    def spans(self, rows: Span) -> tuple[Span, ...]:
        return elements_of(rows, self.columns, 2), elements_of(rows, self.groups), Span(0, 1)

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        values = _nibbles(raw[0], _E2M1).reshape(-1, self.columns)
        scales = _scales(raw[1], self.scale_kernel)
        if len(raw) > 2:
            of_all = decoded(raw[2], self.of_all_kernel)[0]
            scales = scales * of_all if self.multiplies else scales / of_all
        return _times(values, scales.reshape(-1, self.groups), self.columns // self.groups)


@dataclass(frozen=True, slots=True)
class StackedMXFP4(Scheme):
    """MXFP4 of the fused experts of gpt-oss: stored expert, output, input; read expert, input, output.

    `n_inputs` rows an expert. Stored: codes (experts, outputs, groups, 16), scales (experts, outputs, groups).
    """

    n_inputs: int
    is_unit = True

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        codes = raw[0].reshape(-1, self.columns, self.n_inputs // 2)
        scales = raw[1].reshape(-1, self.columns, self.n_inputs // 32)
        out = np.empty((rows.n_elements, self.columns), np.float32)
        at = rows.start
        while at < rows.stop:
            expert, first = divmod(at, self.n_inputs)
            last = min(self.n_inputs, first + rows.stop - at)
            start, stop = first // 32, -(-last // 32)
            values = _nibbles(codes[expert, :, start * 16 : stop * 16], _E2M1)
            _times(values, _scales(scales[expert, :, start:stop], U8_EXPONENTS), 32)
            done = at - rows.start
            out[done : done + last - first] = values[:, first - start * 32 : last - start * 32].T
            at += last - first
        return out


@dataclass(frozen=True, slots=True)
class BitsAndBytes4(Scheme):
    """NF4 or FP4 of bitsandbytes: a table of 16 values, times the largest magnitude of each stretch of `columns`.

    Stored: codes, magnitudes, table; where the magnitudes are codes too, theirs for each `nested` of them, and their
    table of 256 values.
    """

    nested: int
    offset: float

    def spans(self, rows: Span) -> tuple[Span, ...]:
        plain = elements_of(rows, self.columns, 2), rows, Span(0, 16)
        if not self.nested:
            return plain
        return *plain, Span(rows.start // self.nested, -(-rows.stop // self.nested)), Span(0, 256)

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        table = raw[2].view(np.float32)
        values = _nibbles(raw[0], table, high_first=True).reshape(-1, self.columns)
        if self.nested:
            outer, codes = raw[3].view(np.float32), raw[4].view(np.float32)
            of_row = np.arange(rows.start, rows.stop) // self.nested - rows.start // self.nested
            largest = codes[raw[1]] * outer[of_row] + np.float32(self.offset)
        else:
            largest = raw[1].view(np.float32)
        return _times(values, largest[:, None], self.columns)


class BitsAndBytes8(Scheme):
    """int8 of bitsandbytes: a code times its row's largest magnitude, over 127. Stored: codes, magnitudes."""

    def spans(self, rows: Span) -> tuple[Span, ...]:
        return elements_of(rows, self.columns), rows

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        values = raw[0].view(np.int8).astype(np.float32).reshape(-1, self.columns)
        return _times(values, raw[1].view(np.float32)[:, None], self.columns) * np.float32(7.874015718698502e-3)


class PackedBits(Scheme):
    """A mask: rows of whole bytes, their lowest bits first, read as zeros and ones. Stored: bytes."""

    __slots__ = ()

    def spans(self, rows: Span) -> tuple[Span, ...]:
        return (elements_of(rows, self.columns, 8),)

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        return np.unpackbits(raw[0], bitorder="little").astype(np.float32)


@dataclass(frozen=True, slots=True)
class PackedTransposed(Scheme):
    """GPTQ and AWQ: integers of a weight stored (inputs, outputs) in words, `(code - zero) * scale` of a group.

    GPTQ packs along the inputs, its zeros are one less than they say (`more` is 1) unless its format is `gptq_v2`. AWQ
    packs along the outputs, in the order `_AWQ_ORDER`. Stored: codes, zeros, scales, and the groups of the inputs where
    they do not lie in order.
    """

    n_bits: int
    n_outputs: int
    more: int
    scale_kernel: int
    is_awq: bool
    is_unit = True

    def decode(self, rows: Span, raw: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        per, n_words = codes_in_words(self.n_bits)
        scales_GR = decoded(raw[2], self.scale_kernel).reshape(-1, self.n_outputs)[:, rows.start : rows.stop]
        first = rows.start // per * per
        words = slice(rows.start // per * n_words, -(-rows.stop // per) * n_words)
        wanted = slice(rows.start - first, rows.stop - first)
        zeros_GW = raw[1].view(np.uint32).reshape(len(scales_GR), -1)[:, words]
        codes = raw[0].view(np.uint32)
        group_C = np.arange(self.columns, dtype=np.int32) // (self.columns // len(scales_GR))
        if len(raw) > 3:
            group_C = raw[3].view(np.int32)
        if self.is_awq:
            codes_CR = _in_rows(codes.reshape(self.columns, -1)[:, words], 4, _AWQ_ORDER)[:, wanted]
            zeros_GR = _in_rows(zeros_GW, 4, _AWQ_ORDER)[:, wanted]
        else:
            codes_WR = codes.reshape(-1, self.n_outputs)[:, rows.start : rows.stop]
            codes_CR = _unpacked(codes_WR, self.n_bits).reshape(self.columns, -1)
            zeros_GR = _in_rows(zeros_GW, self.n_bits)[:, wanted]
        zeros = zeros_GR.astype(np.float32) + self.more
        return np.ascontiguousarray(((codes_CR.astype(np.float32) - zeros[group_C]) * scales_GR[group_C]).T)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _scales(raw: NDArray[np.uint8], kernel: int) -> NDArray[np.float32]:
    """Decode scales: floating point, or exponents of powers of two, as torch does.

    The last exponent is too large for float32 where it is a byte, and a NaN in the dtype.
    """
    if kernel >= 0:
        return decoded(raw, kernel)
    powers = _POWERS_OF_TWO[raw]
    if kernel == E8M0_EXPONENTS:
        powers[raw == 255] = np.nan
    return powers


def codes_in_words(n_bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole words of 32 bits, and these words."""
    return (32, 3) if n_bits == 3 else (32 // n_bits, 1)


def _unpacked(words_WG: NDArray[np.uint32], n_bits: int) -> NDArray[np.uint32]:
    """Cut words (W, G) into codes (W, codes a word, G), the low bits first; codes of 3 bits go on in the next word."""
    if n_bits == 3:
        words_W3G = words_WG.reshape(-1, 3, words_WG.shape[1]).astype(np.uint64)
        low_WG, high_WG = words_W3G[:, 0] | words_W3G[:, 1] << np.uint64(32), words_W3G[:, 1] >> np.uint64(16)
        high_WG |= words_W3G[:, 2] << np.uint64(16)  # from bit 48 on
        codes = [low_WG >> np.uint64(3 * k) for k in range(16)] + [high_WG >> np.uint64(3 * k) for k in range(16)]
        return (np.stack(codes, axis=1) & np.uint64(7)).astype(np.uint32)
    shifts = np.arange(0, 32, n_bits, dtype=np.uint32)[None, :, None]
    return (words_WG[:, None, :] >> shifts) & np.uint32((1 << n_bits) - 1)


def _in_rows(words_RW: NDArray[np.uint32], n_bits: int, order: Sequence[int] = ()) -> NDArray[np.uint32]:
    """Cut the words of rows (R, W) into codes (R, W * codes a word), the low bits first, or in an order."""
    codes_WPR = _unpacked(words_RW.T, n_bits)
    return (codes_WPR[:, list(order)] if order else codes_WPR).reshape(-1, len(words_RW)).T
