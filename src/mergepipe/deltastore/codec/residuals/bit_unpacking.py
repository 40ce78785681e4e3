"""Unpack a residual stream four residuals at a time with the BMI2 instruction PDEP.

Format: the residuals at the end of HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mergepipe.deltastore.codec.entropy.llvm_vectors import (
    I64,
    array_pointers,
    call_intrinsic,
    core,
    has_features,
)
from mergepipe.deltastore.codec.entropy.rans import Bits16
from mergepipe.kernels.compilation.compiled import Bytes, intrinsic, kernel

_MIN_LOADED_BITS = 57
"""A 64-bit load holds at least this many bits of the stream, at whichever bit of a byte it begins."""


HAS_PDEP = has_features("bmi2")


def _load_word_intrinsic(_typing: Any, stored: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: load 64 bits from any byte offset."""
    signature = core.types.uint64(stored, core.types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at = array_pointers(context, builder, signature, arguments)
        loaded = builder.load(builder.bitcast(builder.gep(array, [at]), I64.as_pointer()))
        loaded.align = 1
        return loaded

    return signature, generate


def _deposit_bits_intrinsic(_typing: Any, bits: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: deposit the lowest bits of `bits` at the ones of `mask`; a constant 0 on machines without PDEP."""
    signature = core.types.uint64(bits, mask)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if not HAS_PDEP:
            return I64(0)
        return call_intrinsic(builder, "llvm.x86.bmi.pdep.64", I64, *arguments)

    return signature, generate


def _count_ones_intrinsic(_typing: Any, mask: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: count the ones of `mask`."""
    return core.types.uint64(mask), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


_load_word: Any = intrinsic(_load_word_intrinsic)
_deposit_bits: Any = intrinsic(_deposit_bits_intrinsic)
count_ones: Any = intrinsic(_count_ones_intrinsic)


@kernel
def unpack_stream(stored: Bytes, position: np.uint64, masks: Bits16, residuals: Bits16) -> np.uint64:
    """Unpack the residuals of one stream, from bit `position` of `stored` on.

    `masks` has as many low ones as each residual has bits, at most 15. Returns the bit position after the last one.
    """
    bit_position, seven = np.uint64(position), np.uint64(7)
    for i in range(len(masks)):
        byte = bit_position >> np.uint64(3)
        loaded = np.uint64(stored[byte]) | (np.uint64(stored[byte + np.uint64(1)]) << np.uint64(8))
        loaded |= np.uint64(stored[byte + np.uint64(2)]) << np.uint64(16)
        residuals[i] = np.uint16((loaded >> (bit_position & seven)) & np.uint64(masks[i]))
        bit_position += count_ones(np.uint64(masks[i]))
    return bit_position


@kernel
def unpack_stream_by_4(stored: Bytes, position: np.uint64, masks: Bits16, residuals: Bits16) -> np.uint64:
    """Unpack like `unpack_stream`, four residuals at a time, where `HAS_PDEP`.

    The length of both arrays is a multiple of 4. `stored` is readable for 16 bytes past the last residual.
    """
    masks64, residuals64 = masks.view(np.uint64), residuals.view(np.uint64)
    bit_position, seven = np.uint64(position), np.uint64(7)
    for i in range(len(masks64)):
        byte, skipped_bits, count = bit_position >> np.uint64(3), bit_position & seven, count_ones(masks64[i])
        bits = _load_word(stored, byte) >> skipped_bits
        if count > np.uint64(_MIN_LOADED_BITS):  # rare
            bits |= (_load_word(stored, byte + np.uint64(8)) << np.uint64(1)) << (np.uint64(63) - skipped_bits)
        residuals64[i] = _deposit_bits(bits, masks64[i])
        bit_position += count
    return bit_position
