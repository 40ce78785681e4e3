"""Gathered rows: the rows asked for, bit by bit, for no more bytes than their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Readable, TensorEntry
from mergepipe.checkpoints.gathered_rows import (
    LARGE_MEAN_ROWS,
    ZERO,
    GatheredRows,
    RowMap,
    RowRange,
    gathered_rows,
    mean_origin,
    resized,
)
from mergepipe.core.blocks import BF16, F16, F32, DType, Span
from mergepipe.errors import CorruptError
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES
from support.fetching import AlignedFile
from support.rounding import NUMPY_DTYPES

FLOATS = (F32, BF16, F16)


@dataclass(frozen=True, slots=True)
class Stored:
    """One 2-D tensor in a file of its own, and its values."""

    entry: TensorEntry
    file: AlignedFile
    values_RW: NDArray[np.generic]


def stored(
    n_rows: int, width: int, dtype: DType = F32, *, seed: int = 0, gap: int = 12, is_delta: bool = False
) -> Stored:
    values_RW = np.random.default_rng(seed).standard_normal((n_rows, width)).astype(NUMPY_DTYPES[dtype.name])
    path = Path(f"/nowhere/{seed}.safetensors")
    raw = values_RW.tobytes()
    entry = TensorEntry(f"t{seed}", dtype, (n_rows, width), Location.local(path), gap, len(raw), is_delta)
    return Stored(entry, AlignedFile(entry.file, b"\xee" * gap + raw + b"\xee" * 5, Ledger()), values_RW)


def files_of(tensors: Sequence[Stored]) -> dict[Location, AlignedFile]:
    return {tensor.file.location: tensor.file for tensor in tensors}


def fetched(tensor: Readable, span: Span, tensors: Sequence[Stored], purpose: Purpose = Purpose.EXPERT) -> bytes:
    assert isinstance(tensor, GatheredRows)
    out = np.full(span.n_elements * tensor.dtype.itemsize, 0xAB, np.uint8)
    tensor.opened(files_of(tensors))(span, out, purpose)
    return out.tobytes()


def requested_bytes(tensors: Sequence[Stored]) -> int:
    return sum(nbytes for tensor in tensors for _, nbytes, _ in tensor.file.requested)


@st.composite
def gathers(draw: st.DrawFn) -> tuple[list[Stored], GatheredRows, NDArray[np.float64], Span]:
    """Sources of one row length, a map with zeros and means, its values by fancy indexing, and a span."""
    width = draw(st.sampled_from([1, 3, 64, 700, 2048]))
    dtypes = (
        [draw(st.sampled_from(FLOATS))] * 3
        if draw(st.booleans())
        else draw(st.lists(st.sampled_from(FLOATS), min_size=3, max_size=3))
    )
    tensors = [
        stored(draw(st.integers(1, 40)), width, dtype, seed=seed, gap=draw(st.integers(0, 5000)) * 4)
        for seed, dtype in enumerate(dtypes)
    ]
    n_rows = draw(st.integers(1, 60))
    means = ((RowRange(0, 0, 1), RowRange(1, 0, 1)), (RowRange(2, 0, tensors[2].entry.shape[0]),))
    origin_R = np.array(draw(st.lists(st.integers(-3, 2), min_size=n_rows, max_size=n_rows)), np.int32)
    if draw(st.booleans()):
        origin_R[:] = 0
    row_R = np.array([draw(st.integers(0, tensors[max(o, 0)].entry.shape[0] - 1)) for o in origin_R], np.int64)
    sources = tuple(tensor.entry for tensor in tensors)
    dtype = dtypes[0]
    gathered = GatheredRows("g", dtype, sources, RowMap(origin_R, row_R, means))
    values = [tensor.values_RW.astype(np.float64) for tensor in tensors]
    mean = {-2: (values[0][0] + values[1][0]) / 2, -3: values[2].mean(axis=0), ZERO: np.zeros(width)}
    expected = np.stack([values[o][r] if o >= 0 else mean[int(o)] for o, r in zip(origin_R, row_R, strict=True)])
    start = draw(st.integers(0, n_rows * width))
    return tensors, gathered, expected, Span(start, draw(st.integers(start, n_rows * width)))


@given(gathers())
def test_gathered_rows__equal_fancy_indexing_and_cost_what_is_requested(
    case: tuple[list[Stored], GatheredRows, NDArray[np.float64], Span],
) -> None:
    tensors, gathered, expected_RW, span = case
    found = np.frombuffer(fetched(gathered, span, tensors), NUMPY_DTYPES[gathered.dtype.name])
    wanted_32 = expected_RW.ravel()[span.start : span.stop].astype(np.float32)
    assert found.tobytes() == wanted_32.astype(NUMPY_DTYPES[gathered.dtype.name]).tobytes()
    assert requested_bytes(tensors) == gathered.cost_bytes(span)
    assert {purpose for tensor in tensors for *_, purpose in tensor.file.requested} <= {Purpose.EXPERT}


@given(gathers(), st.integers(1, 3000))
def test_cost_bytes__of_a_span_is_at_most_that_of_its_parts(
    case: tuple[list[Stored], GatheredRows, NDArray[np.float64], Span], step: int
) -> None:
    _, gathered, _, span = case
    parts = [Span(at, min(at + step, span.stop)) for at in range(span.start, span.stop, step)]
    assert gathered.cost_bytes(span) <= sum(gathered.cost_bytes(part) for part in parts)


@given(st.permutations(range(30)), st.integers(0, 40))
def test_gathered_rows__an_unknown_row_is_the_fallbacks_own(order: list[int], n_extra: int) -> None:
    expert, base = stored(30, 50, BF16, seed=1), stored(30 + n_extra, 50, BF16, seed=2)
    row_R = np.array([row if row % 3 else -1 for row in order] + [-1] * n_extra, np.int64)
    gathered = gathered_rows(expert.entry, row_R, fallback=base.entry)
    raw = fetched(gathered, Span(0, gathered.n_elements), (expert, base))
    found_RW = np.frombuffer(raw, np.uint16).reshape(-1, 50)
    is_unknown_R = row_R < 0
    assert np.array_equal(found_RW[is_unknown_R], base.values_RW.view(np.uint16)[is_unknown_R])
    assert np.array_equal(found_RW[~is_unknown_R], expert.values_RW.view(np.uint16)[row_R[~is_unknown_R]])


def test_gathered_rows__of_two_dtypes_are_float32_so_that_the_base_is_met_exactly() -> None:
    expert, base = stored(4, 8, F16, seed=1), stored(5, 8, BF16, seed=2)
    gathered = gathered_rows(expert.entry, np.array([0, 1, 2, 3, -1]), fallback=base.entry)
    assert gathered.dtype == F32
    found_RW = np.frombuffer(fetched(gathered, Span(0, 40), (expert, base)), np.float32).reshape(5, 8)
    assert np.array_equal(found_RW[4], base.values_RW[4].astype(np.float32))
    assert np.array_equal(found_RW[:4], expert.values_RW.astype(np.float32))


def test_gathered_rows__an_unknown_row_of_a_delta_is_zero() -> None:
    delta = stored(3, 8, F32, is_delta=True)
    gathered = gathered_rows(delta.entry, np.array([2, -1], np.int64))
    assert gathered.is_delta
    assert gathered.kernel_code == delta.entry.kernel_code
    found_RW = np.frombuffer(fetched(gathered, Span(0, 16), (delta,)), np.float32).reshape(2, 8)
    assert np.array_equal(found_RW, np.stack([delta.values_RW[2], np.zeros(8)]))
    with pytest.raises(ValueError, match="unknown rows of a delta"):
        gathered_rows(delta.entry, np.array([-1], np.int64), fallback=delta.entry)


def test_gathered_rows__may_be_gathered_again() -> None:
    first = stored(20, 33, F32)
    inner = gathered_rows(first.entry, np.arange(19, -1, -1, dtype=np.int64))
    outer = gathered_rows(inner, np.array([3, 4, 5, -1, 0], np.int64))
    found_RW = np.frombuffer(fetched(outer, Span(0, 5 * 33), (first,)), np.float32).reshape(5, 33)
    assert np.array_equal(found_RW[[0, 1, 2, 4]], first.values_RW[[16, 15, 14, 19]])
    assert not found_RW[3].any()
    assert requested_bytes((first,)) <= outer.cost_bytes(Span(0, 5 * 33))


def test_gathered_rows__a_mean_of_many_rows_is_read_once_for_an_opened_tensor() -> None:
    source = stored(LARGE_MEAN_ROWS + 1, 16, F32)
    rows = RowMap(
        np.full(4, mean_origin(0), np.int32), np.zeros(4, np.int64), ((RowRange(0, 0, LARGE_MEAN_ROWS + 1),),)
    )
    gathered = GatheredRows("mean", F32, (source.entry,), rows)
    fetch = gathered.opened(files_of((source,)))
    out = np.empty(64, np.uint8)
    for row in range(4):
        fetch(Span(row * 16, row * 16 + 16), out, Purpose.BASE)
        assert np.array_equal(out.view(np.float32), source.values_RW.astype(np.float64).mean(axis=0).astype(np.float32))
    assert requested_bytes((source,)) == gathered.cost_bytes(Span(0, 16))


def test_gathered_rows__touching_pages_are_one_request_of_a_mebibyte_at_most() -> None:
    source = stored(1200, 1024, F32)
    order_R = np.random.default_rng(0).permutation(1200)
    fetched(gathered_rows(source.entry, order_R), Span(0, 1200 * 1024), (source,))
    assert [nbytes for _, nbytes, _ in source.file.requested] == [1 << 20] * 4 + [151 * PAGE_BYTES + 26 * PAGE_BYTES]


def test_gathered_rows__a_file_that_shrank_is_named() -> None:
    source = stored(100, 1024, F32)
    source.file.content = source.file.content[: 50 * PAGE_BYTES]
    with pytest.raises(CorruptError, match=r"0\.safetensors: gave 0 of the 4108 bytes at byte 405504") as caught:
        fetched(gathered_rows(source.entry, np.array([99], np.int64)), Span(0, 1024), (source,))
    assert caught.value.code == "storage.shrunk"


def test_gathered_rows__refuse_rows_that_no_source_has() -> None:
    source = stored(3, 4)
    with pytest.raises(ValueError, match="rows beyond the 3"):
        gathered_rows(source.entry, np.array([3], np.int64))
    with pytest.raises(ValueError, match="and rows of shape"):
        gathered_rows(source.entry, np.array([0], np.int64), fallback=stored(3, 5).entry)


@pytest.mark.parametrize("n_rows", [2, 7])
def test_resized__keeps_common_rows_and_takes_the_rest_from_the_fallback(n_rows: int) -> None:
    expert, base = stored(4, 6, seed=1), stored(7, 6, seed=2)
    found = resized(expert.entry, n_rows, fallback=base.entry)
    values_RW = np.frombuffer(fetched(found, Span(0, n_rows * 6), (expert, base)), np.float32).reshape(n_rows, 6)
    assert np.array_equal(values_RW, np.concatenate([expert.values_RW[:n_rows], base.values_RW[4:n_rows]]))
    assert resized(expert.entry, 4, fallback=base.entry) is expert.entry


def test_row_map__is_identity__only_for_all_rows_in_order() -> None:
    zeros, rows = np.zeros(3, np.int32), np.arange(3, dtype=np.int64)
    assert RowMap(zeros, rows).is_identity(3)
    assert not RowMap(zeros, rows).is_identity(4)
    assert not RowMap(zeros, rows[::-1].copy()).is_identity(3)
    assert not RowMap(zeros + 1, rows).is_identity(3)
