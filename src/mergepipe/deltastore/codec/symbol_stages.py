"""Contexts of a base block, and the encoding of both stages of symbols: coder states and words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.element_codes import (
    BF16_MANTISSA_BITS,
    BODY_SYMBOLS,
    HEAD_SYMBOLS,
    N_EXPONENTS,
    choose_context_bounds,
    count_exponents,
    fill_body_contexts,
    fill_contexts,
    split_codes,
)
from mergepipe.deltastore.codec.rans import (
    LANES,
    MAX_CONTEXTS,
    Bits16,
    encode_symbols,
)
from mergepipe.deltastore.codec.rans_vector_encoder import (
    FREQUENCY_PLANES_BYTES,
    HAS_VECTOR_ENCODER,
    encode_codes_vector,
    fill_frequency_planes,
)
from mergepipe.kernels.compiled import Bits32, Bytes, Counts, kernel

# --- divide the exponents of a base block into contexts, whose elements share symbol frequencies ---
#
# Format: "Contexts", and the first parts of HEAD, in docs/internals/formats/delta-store.md.


_MIN_SHARE = 64
_MIN_ELEMENTS = 512
_SAMPLED_FROM = 64 * 1024
_SAMPLE_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Contexts:
    """Context c covers base exponents from `lows[c]` up to below `lows[c - 1]`; the last low is 0."""

    lows: NDArray[np.uint8]
    mantissa_bits: int = BF16_MANTISSA_BITS

    @property
    def count(self) -> int:
        return len(self.lows)

    def fill_rows(self, base: Bits16, contexts: Bytes) -> None:
        """Write the context of each element to `contexts`, whose length is padded."""
        context_of_exponent = np.empty(N_EXPONENTS, np.uint8)
        upper = N_EXPONENTS
        for context, low in enumerate(self.lows.tolist()):
            context_of_exponent[low:upper] = context
            upper = low
        fill_contexts(base, self.mantissa_bits, len(base), context_of_exponent, contexts)

    @classmethod
    def of(cls, base: Bits16, mantissa_bits: int = BF16_MANTISSA_BITS) -> Contexts:
        """Choose contexts for a base block so that each, from the largest exponents down, has enough elements."""
        counts, lows = np.zeros(N_EXPONENTS, np.int64), np.empty(MAX_CONTEXTS, np.uint8)
        stride = _SAMPLE_STRIDE if len(base) >= _SAMPLED_FROM else 1
        count_exponents(base, mantissa_bits, stride, counts)
        enough = max(len(base) // _MIN_SHARE, _MIN_ELEMENTS) // stride
        return cls(lows[: choose_context_bounds(counts, enough, lows)], mantissa_bits)

    @property
    def stored(self) -> NDArray[np.uint8]:
        """The bytes as stored: one byte of count, then the lows."""
        return np.concatenate([np.array([self.count], np.uint8), self.lows])


# --- encode both stages of symbols: coder states and words ---
#
# Format: "Coded symbols" in docs/internals/formats/delta-store.md. The head stage holds the symbols of bands 1 and 2,
# the body stage those of all other elements.


@kernel
def encode_stages_vector(
    contexts: Bytes, codes: Bytes, n: int, head: Bits16, body: Bits16, words: Bits16, states: Bits32, ends: Counts
) -> None:
    """Encode both stages with the instructions of `HAS_VECTOR_ENCODER`."""
    planes = np.zeros(FREQUENCY_PLANES_BYTES, np.uint8)
    fill_frequency_planes(head, body, planes)
    encode_codes_vector(contexts, codes, n, planes, words, states, ends)


@kernel
def encode_stages_scalar(
    contexts: Bytes, codes: Bytes, n: int, head: Bits16, body: Bits16, words: Bits16, states: Bits32, ends: Counts
) -> None:
    """Encode like `encode_stages_vector`, on any machine."""
    symbols, body_symbols, body_contexts = np.empty(n, np.uint8), np.empty(n, np.uint8), np.empty(n, np.uint8)
    split_codes(codes, n, symbols, body_symbols)
    fill_body_contexts(contexts, symbols, n, body_contexts)
    half = len(words) // 2
    ends[0] = encode_symbols(symbols, contexts, n, head, HEAD_SYMBOLS, words[:half], states[:LANES])
    ends[1] = half + encode_symbols(body_symbols, body_contexts, n, body, BODY_SYMBOLS, words[half:], states[LANES:])


encode_stages = encode_stages_vector if HAS_VECTOR_ENCODER else encode_stages_scalar
"""Encode both stages of a block from contexts and codes (both padded to `n`) and frequencies by context and symbol.

`words` has two halves of `n + 1`, which are filled from their ends; `ends` are set to the indices of the first words,
`states` (two times `LANES`) to the decoder's initial states.
"""
