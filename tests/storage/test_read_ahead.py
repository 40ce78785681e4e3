"""What is read ahead is requested once, and serves the reads that come after."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from mergepipe.errors import CorruptError, MergePipeError, StorageError
from mergepipe.storage.buffers import BufferPool
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.read_ahead import PIECE_BYTES, FileRange, ReadAhead

PLACE = Location.parse("https://host/model.safetensors")
CONTENT = np.random.default_rng(0).integers(0, 256, 2 * PIECE_BYTES + 12_345, np.uint8)


class RecordedFile:
    """A file in memory that records its requests; it refuses them while `is_broken`."""

    location, size_bytes, alignment, version = PLACE, len(CONTENT), 1, "v1"

    def __init__(self) -> None:
        self.requests: list[tuple[int, int, Purpose]] = []
        self.is_broken = False
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        with self._lock:
            self.requests.append((offset, len(buffer), purpose))
        if self.is_broken:
            raise StorageError.of("storage.connection", PLACE, "broke")
        part = CONTENT[offset : offset + len(buffer)]
        buffer[: len(part)] = part.data
        return len(part)

    def close(self) -> None: ...


def ahead_of(file: RecordedFile, ranges: Sequence[tuple[int, int]]) -> ReadAhead:
    """Read some ranges to their end."""
    opened: RangeFile = file
    ahead = ReadAhead(lambda _: opened, [FileRange(PLACE, *each) for each in ranges], Purpose.BASE, workers=2)
    ahead.start()
    for thread in ahead._threads:
        thread.join()
    return ahead


def read(file: RangeFile, start: int, stop: int, purpose: Purpose = Purpose.BASE) -> bytes:
    """Read a range; the rest of the buffer beyond the end of the file is left out."""
    buffer = bytearray(stop - start)
    nbytes = file.read_into(start, memoryview(buffer), purpose)
    return bytes(buffer[:nbytes])


def test_read_ahead__serves_every_read_and_requests_each_byte_once() -> None:
    recorded = RecordedFile()
    # two ranges that touch, of more than a piece; then a gap and the last bytes
    ahead = ahead_of(recorded, [(100, 1000), (1000, PIECE_BYTES + 500), (len(CONTENT) - 10, len(CONTENT))])
    ahead.stop()
    file = ahead.over(recorded)
    step = 1_000_003
    content = b"".join(read(file, start, start + step) for start in range(0, len(CONTENT), step))
    assert content == CONTENT.tobytes()
    assert sum(nbytes for _, nbytes, _ in recorded.requests) == len(CONTENT)
    assert {purpose for _, _, purpose in recorded.requests} == {Purpose.BASE}
    assert recorded.requests[:1] == [(100, PIECE_BYTES, Purpose.BASE)]
    assert not any(ahead._requested.values())  # everything served is released
    ahead.close()


def test_read_ahead__serves_nothing_before_it_is_stopped_and_no_other_purpose() -> None:
    recorded = RecordedFile()
    ahead = ahead_of(recorded, [(0, 1000)])
    file = ahead.over(recorded)
    assert read(file, 0, 10) == CONTENT[:10].tobytes()
    ahead.stop()
    assert read(file, 0, 20, Purpose.EXPERT) == CONTENT[:20].tobytes()
    assert read(file, 0, 30) == CONTENT[:30].tobytes()
    assert recorded.requests == [(0, 1000, Purpose.BASE), (0, 10, Purpose.BASE), (0, 20, Purpose.EXPERT)]
    ahead.close()


def test_read_ahead__failed_range_is_requested_by_its_reader() -> None:
    recorded = RecordedFile()
    recorded.is_broken = True
    ahead = ahead_of(recorded, [(0, 1000)])
    ahead.stop()
    file = ahead.over(recorded)
    with pytest.raises(MergePipeError, match="broke"):
        read(file, 0, 10)
    recorded.is_broken = False
    assert read(file, 5, 50) == CONTENT[5:50].tobytes()
    ahead.close()


def test_read_ahead__stopped_requests_nothing_more() -> None:
    recorded = RecordedFile()
    ahead = ReadAhead(lambda _: recorded, [FileRange(PLACE, 0, len(CONTENT))], Purpose.BASE, workers=2)
    ahead.stop()
    ahead.start()
    ahead.close()
    assert recorded.requests == []


def test_read_ahead__of_a_file_that_lost_its_end_serves_nothing_of_it() -> None:
    file, stop = RecordedFile(), len(CONTENT) + 10
    file.size_bytes = stop
    ahead = ahead_of(file, [(0, stop)])
    ahead.stop()
    with pytest.raises(CorruptError) as caught:
        read(ahead.over(file), 2 * PIECE_BYTES, stop)
    assert caught.value.code == "storage.shrunk"


def test_limit_memory__a_pool_and_a_read_ahead_never_hold_more_than_the_cap() -> None:
    file, n_buffers = RecordedFile(), 4
    ahead = ahead_of(file, [(0, len(CONTENT))])
    ahead.stop()
    pool = BufferPool(PIECE_BYTES, n_buffers * PIECE_BYTES, ahead)
    assert pool.take(is_urgent=False) is not None  # beside all that was read
    assert pool.take(is_urgent=False) is None
    for n_made in range(2, n_buffers + 1):
        assert pool.take(is_urgent=True) is not None
        assert n_made * PIECE_BYTES + ahead._held_bytes() <= n_buffers * PIECE_BYTES
    assert ahead._held_bytes() == 0
    assert read(ahead.over(file), 0, len(CONTENT)) == CONTENT.tobytes()  # requested again
    assert len(file.requests) > 3


def test_limit_memory__holds_for_what_is_read_ahead_later() -> None:
    file = RecordedFile()
    opened: RangeFile = file
    ahead = ReadAhead(lambda _: opened, [FileRange(PLACE, 0, len(CONTENT))], Purpose.BASE, workers=2)
    assert ahead.limit_memory(PIECE_BYTES, drops=False)
    ahead.start()
    for thread in ahead._threads:
        thread.join()
    assert file.requests == [(0, PIECE_BYTES, Purpose.BASE)]
    ahead.stop()
    assert read(ahead.over(file), 0, len(CONTENT)) == CONTENT.tobytes()
