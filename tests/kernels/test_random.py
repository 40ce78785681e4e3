"""The random words of the kernels against an independent Philox, and dropping by rank, against sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import stream_key
from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.merge import MARK_BYTES, MARK_ELEMENTS, keep_marked, mark_nonzero
from mergepipe.kernels.numerics import GROUP_ELEMENTS, fill_random_words
from mergepipe.kernels.ranked import drop_ranked
from support.random_oracle import kept_by_dare, philox4x32, stream_key_of

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


KEY = np.uint64(0x1234567890ABCDEF)


def sorted_survivors(
    values_N: NDArray[np.float32], first: int, row_elements: int, lowest: float, spread: float
) -> NDArray[np.bool_]:
    """Who survives, by sorting every row; equal elements have the mean of their ranks."""
    words = np.empty((first + len(values_N)) // GROUP_ELEMENTS * GROUP_ELEMENTS + GROUP_ELEMENTS, np.uint32)
    fill_random_words(KEY, 0, len(words) // GROUP_ELEMENTS, words)
    words_RL = words[first : first + len(values_N)].reshape(-1, row_elements)
    magnitudes_RL = (values_N.view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1, row_elements)
    sorted_RL = np.sort(magnitudes_RL, axis=1)
    pairs = list(zip(sorted_RL, magnitudes_RL, strict=True))
    first_RL, stop_RL = (np.stack([np.searchsorted(s, m, side) for s, m in pairs]) for side in ("left", "right"))
    halves_RL = first_RL + stop_RL - 1
    shares_RL = halves_RL / (2 * row_elements - 2) if row_elements > 1 else np.full(halves_RL.shape, 0.5)
    survives_RL: NDArray[np.bool_] = words_RL < (lowest + spread * shares_RL) * 2.0**32
    return survives_RL.ravel()


def few_values(rng: np.random.Generator, n: int) -> NDArray[Any]:
    return np.rint(rng.standard_normal(n) * 2) / 1024


def wide_range(rng: np.random.Generator, n: int) -> NDArray[Any]:
    return rng.standard_normal(n) * np.exp2(rng.integers(-120, 100, n))


def nearly_equal(rng: np.random.Generator, n: int) -> NDArray[Any]:
    return 1.0 + rng.integers(0, 200, n) * 2.0**-23


def undefined_ones(rng: np.random.Generator, n: int) -> NDArray[Any]:
    return np.where(rng.random(n) < 0.3, rng.choice([np.nan, np.inf, -np.inf, 0.0], n), rng.standard_normal(n))


KINDS = (np.random.Generator.standard_normal, few_values, wide_range, nearly_equal, undefined_ones)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_elements", [1, 2, 5, 63, 1024, 3072, 5000])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), bounds=st.sampled_from([(0.35, 0.3), (0.01, 0.0), (0.05, 0.9), (0.9, 0.0999)]))
def test_drop_ranked__equals_sorting_every_row(
    kind: Any, row_elements: int, seed: int, bounds: tuple[float, float]
) -> None:
    rng = np.random.default_rng(seed)
    n, first = 3 * row_elements, int(rng.integers(0, 4)) * row_elements
    values_N = kind(rng, n).astype(np.float32)
    left_N = values_N.copy()
    drop_ranked(left_N, first, row_elements, KEY, *bounds)
    wanted_N = np.where(sorted_survivors(values_N, first, row_elements, *bounds), values_N, np.float32(0.0))
    np.testing.assert_array_equal(left_N, wanted_N)
    assert row_elements < 1024 or 0 < np.count_nonzero(left_N) < np.count_nonzero(values_N)


@pytest.mark.parametrize("row_elements", [512, 8192])
def test_drop_ranked__keeps_equal_elements_alike_wherever_they_are(row_elements: int) -> None:
    rng, n_rows = np.random.default_rng(1), (1 << 21) // row_elements
    values_N = few_values(rng, n_rows * row_elements).astype(np.float32)
    left_N = values_N.copy()
    drop_ranked(left_N, 0, row_elements, KEY, 0.35, 0.3)
    is_equal_RL = (np.abs(values_N) == np.unique(np.abs(values_N))[1]).reshape(n_rows, row_elements)
    is_left_RL = is_equal_RL & (left_N != 0).reshape(n_rows, row_elements)
    shares = [is_left_RL[:, half].sum() / is_equal_RL[:, half].sum() for half in _halves(row_elements)]
    n_equal = int(is_equal_RL.sum()) // 2
    assert abs(shares[0] - shares[1]) < 5 * np.sqrt(0.5 / n_equal)


def _halves(row_elements: int) -> tuple[slice, slice]:
    return slice(0, row_elements // 2), slice(row_elements // 2, row_elements)


@given(n=st.integers(1, 2048), seed=st.integers(0, 2**32))
def test_marks__say_which_elements_are_not_zero(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values_N = undefined_ones(rng, TILE_ELEMENTS).astype(np.float32)
    kept_N = np.where((rng.random(TILE_ELEMENTS) < 0.5) & (np.arange(TILE_ELEMENTS) < n), values_N, np.float32(0.0))
    marks = np.full(-(-n // MARK_ELEMENTS) * MARK_BYTES, 0xEE, np.uint8)
    mark_nonzero(np.where(np.arange(TILE_ELEMENTS) < n, kept_N, values_N), n, marks)
    assert np.unpackbits(marks).sum() == np.count_nonzero(kept_N)
    keep_marked(values_N, n, marks, found_N := np.empty_like(values_N))
    np.testing.assert_array_equal(found_N[:n], kept_N[:n])
