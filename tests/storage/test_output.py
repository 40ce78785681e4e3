"""Sequential output files: exact to the byte, and never left open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import NotFoundError, StorageError
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.output import CHUNK_BYTES, OutputFile, sync_directory, write_all_durably, write_durably
from mergepipe.storage.ranges import aligned_buffer
from support.faults import Fault, open_descriptors, replaced, short_writes, system_error
from support.refusals import refuses

SIZES = [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5000]


def write(path: Path, content: bytes, cuts: list[int], ledger: Ledger) -> None:
    edges = [0, *sorted(cuts), len(content)]
    with OutputFile(path, len(content), ledger) as output:
        for start, stop in pairwise(edges):
            part = content[start:stop]
            output.append(part if start % 2 else np.frombuffer(part, np.uint8))
        output.close()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_output_file__holds_exactly_what_was_appended(tmp_path: Path, nbytes: int, is_short: bool) -> None:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    ledger = Ledger()
    before = open_descriptors()
    with replaced(os, "pwrite", short_writes if is_short else lambda pwrite: pwrite):
        write(tmp_path / "out", content, [nbytes // 3, nbytes // 2], ledger)
    assert (tmp_path / "out").read_bytes() == content
    assert ledger.usage()[Purpose.OUTPUT] == nbytes
    assert open_descriptors() <= before


@given(st.data())
def test_output_file__does_not_depend_on_how_it_is_cut(tmp_path: Path, data: st.DataObject) -> None:
    content = np.random.default_rng(0).bytes(data.draw(st.integers(0, 20_000)))
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=5))
    path = tmp_path / "out"
    path.unlink(missing_ok=True)
    write(path, content, cuts, Ledger())
    assert path.read_bytes() == content


@pytest.mark.parametrize("sizes", [(3 << 20,), (8192, 2 << 20, 4096), (4096, (2 << 20) + 5, 1 << 20), (7, 1 << 20)])
@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_output_file__writes_large_buffers_on_the_grid_in_place(
    tmp_path: Path, sizes: tuple[int, ...], *, is_short: bool
) -> None:
    ledger, parts = Ledger(), [aligned_buffer(size) for size in sizes]
    for seed, part in enumerate(parts):
        part[:] = np.random.default_rng(seed).integers(0, 256, len(part), np.uint8)
    with (
        replaced(os, "pwrite", short_writes if is_short else lambda pwrite: pwrite),
        OutputFile(tmp_path / "out", sum(sizes), ledger) as output,
    ):
        for part in parts:
            output.append(part)
        output.close()
    assert (tmp_path / "out").read_bytes() == b"".join(part.tobytes() for part in parts)
    assert ledger.usage()[Purpose.OUTPUT] == sum(sizes)


@pytest.mark.parametrize("written", [b"", b"xx", b"xxxx"])
def test_output_file__refuses_to_close_with_another_size(tmp_path: Path, written: bytes) -> None:
    before = open_descriptors()
    with OutputFile(tmp_path / "out", 3, Ledger()) as output:
        output.append(written)
        with pytest.raises(ValueError, match="3 declared"):
            output.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("name", ["posix_fallocate", "pwrite", "ftruncate", "fsync"])
def test_output_file__tells_what_failed_and_leaves_no_descriptor(tmp_path: Path, name: str) -> None:
    before = open_descriptors()
    with (
        replaced(os, name, Fault(0, system_error(errno.ENOSPC)).wrap),
        refuses(StorageError, "storage.no-space") as caught,
    ):
        write(tmp_path / "out", b"x" * 5000, [], Ledger())
    assert str(tmp_path / "out") in str(caught.value)
    assert open_descriptors() <= before


def test_output_file__reserves_its_space_before_anything_is_written(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out", 1 << 20, Ledger()):
        assert (tmp_path / "out").stat().st_blocks * 512 >= 1 << 20


def test_output_file__where_it_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        OutputFile(tmp_path / "nowhere" / "out", 1, Ledger())


def test_write_durably__writes_a_new_file_only(tmp_path: Path) -> None:
    ledger = Ledger()
    write_durably(tmp_path / "file", b"abc", ledger)
    sync_directory(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"abc"
    assert ledger.usage()[Purpose.OUTPUT] == 3
    with pytest.raises(StorageError):
        write_durably(tmp_path / "file", b"other", ledger)
    assert (tmp_path / "file").read_bytes() == b"abc"
    with pytest.raises(NotFoundError):
        sync_directory(tmp_path / "nowhere")


def test_write_all_durably__makes_every_new_file_durable_and_charges_it(tmp_path: Path) -> None:
    contents = {tmp_path / f"file-{i}": bytes([i]) * i for i in range(40)}
    synced: list[Path] = []

    def noted(fsync: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        return call

    ledger, before = Ledger(), open_descriptors()
    with replaced(os, "fsync", noted):
        write_all_durably(contents, ledger)
    assert {path: path.read_bytes() for path in contents} == contents
    assert sorted(synced) == sorted(contents)
    assert ledger.usage()[Purpose.OUTPUT] == sum(map(len, contents.values()))
    assert open_descriptors() <= before
    with pytest.raises(StorageError):
        write_all_durably({tmp_path / "file-3": b"other"}, ledger)


@pytest.mark.parametrize("name", ["open", "write", "fsync"])
def test_write_all_durably__tells_what_failed_and_leaves_no_descriptor(tmp_path: Path, name: str) -> None:
    before = open_descriptors()
    with (
        replaced(os, name, Fault(1, system_error(errno.ENOSPC)).wrap),
        refuses(StorageError, "storage.no-space") as caught,
    ):
        write_all_durably({tmp_path / "a": b"1", tmp_path / "b": b"2"}, Ledger())
    assert str(tmp_path) in str(caught.value)
    assert open_descriptors() <= before
