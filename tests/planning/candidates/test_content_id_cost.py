"""What content ids are said to cost is what the engine requests for them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.content_id import content_id
from mergepipe.planning.problem import sample_cost_bytes
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES
from mergepipe.storage.location import Location
from support.planning_problems import checkpoint


class CountingFile:
    """A file of zeros that is read in pages."""

    location = Location.parse("/zeros")
    size_bytes = 2**62
    alignment = DIRECT_ALIGNMENT_BYTES
    version = ""

    def __init__(self) -> None:
        self.requested_bytes = 0

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        self.requested_bytes += len(buffer)
        return len(buffer)

    def close(self) -> None:
        """Nothing to close."""


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 40_000), min_size=1, max_size=6),
    first_offset=st.integers(0, 9000),
)
def test_sample_cost__is_what_the_engine_requests(sizes: dict[str, int], first_offset: int) -> None:
    model = checkpoint("m", {name: np.zeros(n, np.float32) for name, n in sizes.items()}, first_offset)
    file = CountingFile()
    content_id(model, {tensor.stored[0].file: file for tensor in model.tensors.values()})
    assert sample_cost_bytes(model) == file.requested_bytes
