"""Philox4x32-10 from its paper, and which random word belongs to which element: a second source for DARE's masks.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

import json

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

WORD_BITS = 32
_WORD = (1 << WORD_BITS) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio, and sqrt(3) - 1
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox on one counter, in plain integers."""
    left_0, right_0, left_1, right_1 = counter
    for turn in range(_ROUNDS):
        key_0, key_1 = ((k + turn * step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True))
        product_0 = left_0 * _MULTIPLIERS[0]
        product_1 = left_1 * _MULTIPLIERS[1]
        left_0, right_0, left_1, right_1 = (
            (product_1 >> WORD_BITS) ^ right_0 ^ key_0,
            product_1 & _WORD,
            (product_0 >> WORD_BITS) ^ right_1 ^ key_1,
            product_0 & _WORD,
        )
    return left_0, right_0, left_1, right_1


def words_of_elements(stream_key: int, n_elements: int) -> NDArray[np.uint64]:
    """The random word of each of the first `n_elements` elements: 64 elements share 16 counters of 4 words.

    The same rounds as `philox4x32`, on all counters at once.
    """
    n_groups = -(-n_elements // 64)
    word, shift = np.uint64(_WORD), np.uint64(WORD_BITS)
    counters = np.arange(16 * n_groups, dtype=np.uint64)
    lanes = [counters & word, counters >> shift, np.zeros_like(counters), np.zeros_like(counters)]
    for turn in range(_ROUNDS):
        key_0 = np.uint64(((stream_key & _WORD) + turn * _KEY_STEPS[0]) & _WORD)
        key_1 = np.uint64(((stream_key >> WORD_BITS) + turn * _KEY_STEPS[1]) & _WORD)
        product_0, product_1 = lanes[0] * np.uint64(_MULTIPLIERS[0]), lanes[2] * np.uint64(_MULTIPLIERS[1])
        lanes = [
            (product_1 >> shift) ^ lanes[1] ^ key_0,
            product_1 & word,
            (product_0 >> shift) ^ lanes[3] ^ key_1,
            product_0 & word,
        ]
    by_counter = np.stack(lanes)  # 4 words, 16 * n_groups counters
    by_group = by_counter.reshape(4, n_groups, 16).transpose(1, 0, 2)
    return by_group.reshape(-1)[:n_elements]


def kept_by_dare(stream_key: int, n_elements: int, density: float) -> NDArray[np.bool_]:
    """Which elements survive: those whose word, as a fraction of 2**32, is below `density` (rounded to 32 bits)."""
    return words_of_elements(stream_key, n_elements) < np.uint64(round(density * 2**WORD_BITS))


def stream_key_of(seed: int, content_id: str, tensor: str) -> int:
    """The key of one expert's stream for one tensor: the first 8 bytes of a hash of what it depends on."""
    text = json.dumps([seed, content_id, tensor], separators=(",", ":"), ensure_ascii=False)
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little")
