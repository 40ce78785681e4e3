"""The delta of an adapter, element by element, however it is asked for."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import random

from mergepipe.checkpoints.adapted_tensors import Adapted, LowRankDelta
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import BF16, F16, F32, DType, Span
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES
from support.fetching import aligned_files, fetched
from support.rounding import decode, encode

SIZES = st.integers(1, 40)
DTYPES = st.sampled_from([F32, BF16, F16])


def stored(path: Path, name: str, values: NDArray[np.float32], dtype: DType, gap: int) -> TensorEntry:
    """`values` in a file of their own, `gap` bytes from its start."""
    raw = encode(values, dtype).tobytes()
    path.write_bytes(b"\xee" * gap + raw + b"\xee" * 3)
    return TensorEntry(name, dtype, values.shape, Location.local(path), gap, len(raw))


def low_rank(
    root: Path, rows: int, columns: int, rank: int, dtype: DType = F32, gap: int = 0, *, transposed: bool = False
) -> LowRankDelta:
    up = stored(root / "up", "up", random(rows, rank), dtype, gap)
    down = stored(root / "down", "down", random(rank, columns, seed=1), dtype, gap)
    return LowRankDelta("w", up, down, 0.75, transposed)


def expected(delta: LowRankDelta) -> NDArray[np.float64]:
    up, down = (fetched(entry).astype(np.float64) for entry in delta.stored)
    made = 0.75 * (up @ down)
    return made.T if delta.transposed else made


@st.composite
def cut_deltas(draw: st.DrawFn) -> tuple[tuple[int, int, int, DType, int, bool], list[int]]:
    rows, columns, rank = draw(SIZES), draw(SIZES), draw(st.integers(1, 20))
    cuts = draw(st.lists(st.integers(0, rows * columns), max_size=6))
    shape = (rows, columns, rank, draw(DTYPES), draw(st.integers(0, 5000)), draw(st.booleans()))
    return shape, sorted({0, rows * columns, *cuts})


@given(cut_deltas())
def test_low_rank_delta__any_spans_give_the_same_bits_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, int, int, DType, int, bool], list[int]]
) -> None:
    (rows, columns, rank, dtype, gap, transposed), edges = case
    delta = low_rank(tmp_path_factory.mktemp("d"), rows, columns, rank, dtype, gap, transposed=transposed)
    whole = fetched(delta)
    parts = fetched(delta, [Span(a, b) for a, b in pairwise(edges)])
    assert np.array_equal(parts.view(np.uint32), whole.view(np.uint32))
    np.testing.assert_allclose(whole, expected(delta), rtol=1e-5, atol=1e-5)


def test_low_rank_delta__sums_in_the_order_of_the_rank(tmp_path: Path) -> None:
    delta = low_rank(tmp_path, 3, 1500, 7)
    up, down = map(fetched, delta.stored)
    total = np.zeros((3, 1500), np.float32)
    for k in range(7):
        total += up[:, k : k + 1] * down[k]
    total *= np.float32(0.75)
    assert np.array_equal(fetched(delta).view(np.uint32), total.view(np.uint32))


def test_low_rank_delta__is_the_same_from_many_threads_and_reads_once(tmp_path: Path) -> None:
    delta = low_rank(tmp_path, 64, 333, 8)
    files, ledger = aligned_files([delta])
    fetch = delta.opened(files)
    out = np.empty(delta.n_elements * 4, np.uint8)
    edges = [*range(0, delta.n_elements, 1777), delta.n_elements]

    def work(first: int) -> None:
        for start, stop in list(pairwise(edges))[first::4]:
            fetch(Span(start, stop), out[start * 4 : stop * 4], Purpose.EXPERT)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(out.view(np.uint32), fetched(delta).ravel().view(np.uint32))
    assert ledger.usage()[Purpose.EXPERT] == delta.cost_bytes(Span(0, 1)) == 4 * PAGE_BYTES


def test_low_rank_delta__describes_itself(tmp_path: Path) -> None:
    delta = low_rank(tmp_path, 5, 9, 2, BF16, transposed=True)
    with pytest.raises(ValueError, match="no product"):
        LowRankDelta("w", delta.up, delta.up, 1.0)
    assert (delta.shape, delta.n_elements, delta.dtype) == ((9, 5), 45, F32)
    assert (delta.is_delta, delta.is_unit, delta.nbytes) == (True, True, (5 + 9) * 2 * 2)
    assert delta.stored == (delta.up, delta.down)


@given(st.lists(st.integers(0, 12 * 31), max_size=4), st.integers(0, 5000))
def test_adapted__is_weights_plus_delta_for_any_spans(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], gap: int
) -> None:
    root = tmp_path_factory.mktemp("a")
    delta = low_rank(root, 12, 31, 3)
    values = random(12, 31, seed=5)
    weights = stored(root / "weights", "w", values, BF16, gap)
    both = Adapted(weights, delta)
    edges = sorted({0, 12 * 31, *cuts})
    sums = decode(encode(values, BF16), BF16).reshape(12, 31) + fetched(delta)
    assert np.array_equal(fetched(both, [Span(a, b) for a, b in pairwise(edges)]), sums)
    assert (both.is_delta, both.is_unit, both.nbytes) == (False, False, weights.nbytes + delta.nbytes)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda dtype: dtype.name)
def test_adapted__is_rounded_once_to_its_dtype(tmp_path: Path, dtype: DType) -> None:
    delta = low_rank(tmp_path, 12, 600, 5)
    weights = stored(tmp_path / "weights", "w", random(12, 600, seed=5), BF16, 3000)
    rounded = Adapted(weights, delta, dtype=dtype)
    files, _ = aligned_files([rounded])
    raw = np.empty(rounded.n_elements * dtype.itemsize, np.uint8)
    fetch = rounded.opened(files)
    for start, stop in pairwise([0, 1, 599, 2500, rounded.n_elements]):
        fetch(Span(start, stop), raw[start * dtype.itemsize : stop * dtype.itemsize], Purpose.BASE)
    assert raw.tobytes() == encode(fetched(Adapted(weights, delta)), dtype).tobytes()


def test_low_rank_delta__experts_of_a_layer_read_their_common_factors_once(tmp_path: Path) -> None:
    up = stored(tmp_path / "up", "up", random(6, 3 * 5), F32, 0)
    down = stored(tmp_path / "down", "down", random(5 * 3, 8, seed=1), F32, 0)
    deltas = [LowRankDelta(f"w{e}", up, down, 0.5, n_experts=5, expert=e, rows=(2, 6)) for e in range(5)]
    files, ledger = aligned_files(deltas)
    for e, delta in enumerate(deltas):
        values = np.empty(delta.n_elements, np.float32)
        delta.opened(files)(Span(0, delta.n_elements), values.view(np.uint8), Purpose.EXPERT)
        up_MR = fetched(up).reshape(6, 3, 5)[2:, :, e].astype(np.float64)
        expected = 0.5 * up_MR @ fetched(down).reshape(5, 3, 8)[e].astype(np.float64)
        np.testing.assert_allclose(values.reshape(4, 8), expected, rtol=1e-5, atol=1e-5)
    assert ledger.usage()[Purpose.EXPERT] == deltas[0].cost_bytes(Span(0, 1))
