"""The planner's cost is an upper bound of what the engine's joined requests ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import TensorEntry, block_costs_bytes, range_cost_bytes
from mergepipe.core.blocks import BF16, F32, BlockGrid, DType, Span
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES

DTYPES = st.sampled_from([F32, BF16])


def entry(dtype: DType, n: int, offset: int) -> TensorEntry:
    return TensorEntry("t", dtype, (n,), Location.local(Path("/f")), offset, n * dtype.itemsize)


def test_cost__counts_the_pages_that_direct_reads_ask_for() -> None:
    assert PAGE_BYTES == DIRECT_ALIGNMENT_BYTES
    assert range_cost_bytes(0, 1) == range_cost_bytes(4095, 4096) == 4096
    assert range_cost_bytes(4095, 4097) == 8192
    assert range_cost_bytes(5, 5) == range_cost_bytes(5, 5, 1) == 0
    assert range_cost_bytes(4095, 4097, 1) == 2


@given(
    dtype=DTYPES,
    n=st.integers(1, 50_000),
    offset=st.integers(0, 2**40),
    block=st.integers(1, 20_000),
    granularity=st.sampled_from([1, 512, 4096]),
)
def test_block_costs__agree_for_one_and_for_many(
    dtype: DType, n: int, offset: int, block: int, granularity: int
) -> None:
    tensor = replace(entry(dtype, n, offset), granularity_bytes=granularity)
    spans = list(BlockGrid(n, block).spans())[:50]
    many = block_costs_bytes(
        np.full(len(spans), offset),
        np.full(len(spans), dtype.itemsize),
        np.array([span.start for span in spans]),
        np.array([span.n_elements for span in spans]),
        np.full(len(spans), granularity),
    )
    assert many.tolist() == [tensor.cost_bytes(span) for span in spans]
    assert granularity > 1 or sum(many.tolist()) == sum(span.n_elements for span in spans) * dtype.itemsize


@given(dtype=DTYPES, offset=st.integers(0, 10_000), block=st.integers(1, 3000), chosen=st.sets(st.integers(0, 11)))
def test_block_costs__are_at_least_what_joined_requests_ask_for(
    dtype: DType, offset: int, block: int, chosen: set[int]
) -> None:
    tensor = entry(dtype, 12 * block, offset)
    pages: set[int] = set()
    for index in chosen:
        start = offset + index * block * dtype.itemsize
        pages |= set(range(start // PAGE_BYTES, -(-(start + block * dtype.itemsize) // PAGE_BYTES)))
    costs = sum(tensor.cost_bytes(Span(i * block, (i + 1) * block)) for i in chosen)
    assert len(pages) * PAGE_BYTES <= costs
