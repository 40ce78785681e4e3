"""Positional reads of local files: exact, metered, direct or not, whatever the kernel delivers at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile, LocalStore, resident_fraction
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, aligned_buffer, os_error, round_up
from support.faults import Fault, drop_from_page_cache, open_descriptors, replaced, short_reads, system_error
from support.refusals import refuses


def make_file(folder: Path, nbytes: int) -> tuple[Path, bytes]:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    path = folder / f"file-{nbytes}"
    path.write_bytes(content)
    return path, content


def open_cold(store: LocalStore, path: Path) -> LocalFile:
    """Open for direct reads; skips where the file system has none."""
    drop_from_page_cache(path)
    file = store.open(Location.local(path), direct=True)
    if file.alignment == 1:
        file.close()
        pytest.skip("this file system has no direct reads")
    return file


def read(file: LocalFile, start: int, stop: int, purpose: Purpose = Purpose.BASE) -> tuple[int, bytes]:
    """Read `[start, stop)` rounded outwards to the file's grid; the count, and the bytes of the range."""
    first = start // file.alignment * file.alignment
    last = round_up(stop, file.alignment)
    buffer = aligned_buffer(max(PAGE_BYTES, last - first))
    got = file.read_into(first, buffer.data[: last - first], purpose)
    return got, bytes(buffer[start - first : min(stop - first, got)])


@given(st.data())
@pytest.mark.parametrize("is_direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_read_into__fills_the_buffer_up_to_the_end_of_the_file(
    tmp_path: Path, is_direct: bool, is_short: bool, data: st.DataObject
) -> None:
    nbytes = data.draw(st.sampled_from([1, 4095, 4096, 4097, 40_000, 40_960]))
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    path, content = make_file(tmp_path, nbytes)
    store = LocalStore()
    file = open_cold(store, path) if is_direct else store.open(Location.local(path))
    with replaced(os, "preadv", short_reads if is_short else lambda preadv: preadv):
        got, found = read(file, start, stop)
    file.close()
    assert found == content[start:stop]
    first, last = start // file.alignment * file.alignment, round_up(stop, file.alignment)
    assert got == min(last, nbytes) - first
    assert store.ledger.usage()[Purpose.BASE] == last - first


def test_read_into__tells_of_a_file_that_has_shrunk(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 20_000)
    for is_direct in (False, True):
        path.write_bytes(content)
        store = LocalStore()
        file = open_cold(store, path) if is_direct else store.open(Location.local(path))
        os.truncate(path, 10_000)
        got, found = read(file, 4096, 20_000)
        file.close()
        assert (got, found) == (10_000 - 4096, content[4096:10_000])


def test_read_into__names_the_file_that_failed(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    file = LocalStore().open(Location.local(path))
    with (
        replaced(os, "preadv", Fault(0, system_error(errno.EIO)).wrap),
        pytest.raises(StorageError, match="reading 10 bytes at 0") as caught,
    ):
        read(file, 0, 10)
    file.close()
    assert str(path) in str(caught.value)


def test_open__reads_a_file_in_the_page_cache_from_there(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 50_000)
    store = LocalStore()
    file = store.open(Location.local(path), direct=True)
    file.close()
    assert file.alignment == 1
    assert store.ledger.total_bytes() == 0


def test_open__for_direct_reads_reads_nothing(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 50_000)
    store = LocalStore()
    calls = Fault(None)
    with replaced(os, "preadv", calls.wrap), replaced(os, "pread", calls.wrap):
        open_cold(store, path).close()
    assert calls.calls == 0
    assert store.ledger.total_bytes() == 0
    assert resident_pages(path) == 0


def resident_pages(path: Path) -> int:
    """Whether any page of a file lies in the page cache: 0 if none does."""
    with path.open("rb") as stream:
        return round(resident_fraction(stream.fileno(), path.stat().st_size) * 1e6)


@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_read_into__reads_the_ordinary_way_where_a_direct_read_is_refused(tmp_path: Path, is_short: bool) -> None:
    """As file systems do that take the flag and then refuse the read; what is asked for is counted once."""
    path, content = make_file(tmp_path, 50_001)
    store = LocalStore()
    file = open_cold(store, path)

    def without_direct_reads(preadv: Callable[..., int]) -> Callable[..., int]:
        def read_ordinary(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if is_short:
                return preadv(descriptor, [buffers[0][:999]], offset)
            return preadv(descriptor, buffers, offset)

        return read_ordinary

    with replaced(os, "preadv", without_direct_reads):
        assert read(file, 5000, 20_000) == (16_384 + 4096 - 4096, content[5000:20_000])
        assert read(file, 49_000, 50_001)[1] == content[49_000:]
    file.close()
    assert store.ledger.usage()[Purpose.BASE] == 16_384 + 8192


def test_open__leaves_no_descriptor_when_it_fails(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    before = open_descriptors()
    with replaced(os, "posix_fadvise", Fault(0).wrap), pytest.raises(StorageError):
        LocalStore().open(Location.local(path))
    assert open_descriptors() <= before


def test_read_metadata__tells_of_a_file_that_shrinks(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    before = open_descriptors()
    with replaced(os, "pread", lambda _: lambda *_: b""), refuses(CorruptError, "storage.shrunk"):
        LocalStore().read_metadata(Location.local(path), 0, 10)
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOENT, NotFoundError, "storage.not-found"),
        (errno.ENOSPC, StorageError, "storage.no-space"),
        (errno.EDQUOT, StorageError, "storage.no-space"),
        (errno.EROFS, StorageError, "storage.permission"),
        (errno.EMFILE, StorageError, "storage.exhausted"),
        (errno.EIO, StorageError, "storage.io"),
    ],
)
def test_os_error__keeps_the_meaning(number: int, kind: type[MergePipeError], code: str) -> None:
    error = os_error(system_error(number), Path("/x/y"), "testing")
    assert (type(error), error.code) == (kind, code)
    assert "/x/y" in str(error)


def test_resident_fraction__sees_what_is_cached(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 1 << 20)
    descriptor = os.open(path, os.O_RDONLY)
    assert resident_fraction(descriptor, 1 << 20) == 1.0
    drop_from_page_cache(path)
    assert resident_fraction(descriptor, 1 << 20) < 0.1
    os.close(descriptor)
    assert resident_fraction(descriptor, 1 << 20) == 0.0
