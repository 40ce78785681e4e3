"""The random words of the kernels against an independent Philox, and their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.kernels.numerics import GROUP_ELEMENTS, fill_random_words
from support.random_oracle import kept_by_dare, philox4x32, stream_key_of, words_of_elements

N = 1 << 18


def words_by_kernel(key: int, first_group: int, n_groups: int) -> NDArray[np.uint32]:
    words = np.zeros(n_groups * GROUP_ELEMENTS, np.uint32)
    fill_random_words(np.uint64(key), first_group, n_groups, words)
    return words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox4x32__gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, GROUP_ELEMENTS - 1))
def test_fill_random_words__gives_element_e_its_word(key: int, group: int, place: int) -> None:
    word, lane = divmod(place, 16)
    counter = 16 * group + lane
    answer = philox4x32((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (key & 0xFFFFFFFF, key >> 32))
    assert words_by_kernel(key, group, 1)[place] == answer[word]


@given(st.integers(0, 2**64 - 1), st.integers(1, 1000))
def test_words_of_elements__agrees_with_the_kernel(key: int, n: int) -> None:
    kernel_words = words_by_kernel(key, 0, -(-n // GROUP_ELEMENTS))[:n]
    np.testing.assert_array_equal(words_of_elements(key, n), kernel_words)


@given(st.integers(0, 2**32), st.integers(1, 40), st.data())
def test_fill_random_words__does_not_depend_on_where_it_starts(first: int, n_groups: int, data: st.DataObject) -> None:
    skipped = data.draw(st.integers(0, n_groups - 1))
    whole = words_by_kernel(99, first, n_groups)
    part = words_by_kernel(99, first + skipped, n_groups - skipped)
    np.testing.assert_array_equal(whole[skipped * GROUP_ELEMENTS :], part)


@given(st.integers(0, 2**70), st.text("0123456789abcdef", min_size=32, max_size=32), st.text(max_size=40))
def test_stream_key__is_the_documented_hash(seed: int, content_id: str, tensor: str) -> None:
    tensor = tensor.encode("utf-8", "ignore").decode()
    assert stream_key(seed, content_id, tensor) == stream_key_of(seed, content_id, tensor)


@pytest.mark.parametrize("density", [0.001, 0.1, 0.2, 0.5, 0.9])
def test_random_words__keep_the_share_that_was_asked_for(density: float) -> None:
    for key in (0, 1, 2**63):
        kept = int(kept_by_dare(key, N, density).sum())
        assert abs(kept - density * N) < 5 * math.sqrt(N * density * (1 - density))


def test_random_words__are_spread_evenly_over_places_and_values() -> None:
    words = words_of_elements(12345, N)
    for counts in (
        np.bincount((words >> np.uint64(24)).astype(np.int64), minlength=256),
        np.bincount(np.arange(N)[words < np.uint64(2**31)] % GROUP_ELEMENTS, minlength=GROUP_ELEMENTS),
    ):
        mean = counts.mean()
        chi_square = float(((counts - mean) ** 2).sum() / mean)
        assert chi_square < len(counts) + 6 * math.sqrt(2 * len(counts))


def test_random_masks__of_experts_tensors_and_seeds_are_independent() -> None:
    density = 0.3
    keys = [stream_key_of(seed, expert * 32, tensor) for seed in (0, 1) for expert in "ab" for tensor in ("q", "k")]
    masks = [kept_by_dare(key, N, density) for key in keys]
    shifted = np.roll(masks[0], 1)
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]] + [(masks[0], shifted)]
    share = density * density
    for first, second in pairs:
        both = int((first & second).sum())
        assert abs(both - share * N) < 5 * math.sqrt(N * share * (1 - share))
