"""Digests of bytes that pass by are those of the file, in whatever order and pieces these come."""

from __future__ import annotations

import hashlib
import random
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.core.blocks import DTYPES
from mergepipe.jobs.analyze import MOST_READ_AGAIN_FRACTION, PassingDigests
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location

U8 = DTYPES["U8"]
HEADER_BYTES = 10
SIZES = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), min_size=1, max_size=6)


def write(path: Path, sizes: list[tuple[bool, int]]) -> tuple[list[TensorEntry], bytes]:
    """A file of tensors behind a header; return those that pass by, and its bytes."""
    offset, shown = HEADER_BYTES, []
    for number, (is_shown, size) in enumerate(sizes):
        if is_shown:
            shown.append(TensorEntry(str(number), U8, (size,), Location.local(path), offset, size))
        offset += size
    content = np.random.default_rng(offset).bytes(offset)
    path.write_bytes(content)
    return shown, content


@given(SIZES, st.integers(1, 30), st.sampled_from((0, 20, 10_000)), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_finish__is_the_digest_of_the_file_or_nothing(
    sizes: list[tuple[bool, int]], piece: int, waiting_bytes: int, order: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, store = Location.local(Path(folder) / "file"), LocalStore()
        shown, content = write(path.local_path, sizes)
        file = store.open(path)
        digests = PassingDigests({path: file}, shown, waiting_bytes)
        pieces = [(entry, first) for entry in shown for first in range(0, entry.nbytes, piece)]
        order.shuffle(pieces)
        for entry, first in (*pieces, *pieces[:2]):
            start = entry.offset + first
            stop = min(start + piece, entry.offset + entry.nbytes)
            digests.show(entry, first, np.frombuffer(content[start:stop], np.uint8))
        found = digests.finish()
        file.close()
    unseen = len(content) - sum(entry.nbytes for entry in shown)
    read_bytes = store.ledger.usage()[Purpose.ANALYSIS]
    assert read_bytes <= unseen + len(content) * MOST_READ_AGAIN_FRACTION
    if found or waiting_bytes > len(content):
        assert found == {path: hashlib.sha256(content).hexdigest()}
        assert waiting_bytes <= len(content) or read_bytes == unseen
