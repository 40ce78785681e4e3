"""An exact range is read whole or refused, by the one function that everything reads with; from scratch files too."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.open_files import read_matrix, read_span
from mergepipe.core.blocks import F32, Span
from mergepipe.deltastore.encode_pass import read_sample
from mergepipe.deltastore.index import read_index
from mergepipe.errors import CorruptError
from mergepipe.jobs.diff import norm
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import LocalFile, LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.output import OutputFile, SpilledFiles
from mergepipe.storage.ranges import KEPT_BYTES, read_descriptor_range, read_exact, request, request_bytes, scratch
from mergepipe.tailor.checkpoint import Piece, StateReader, StoredState
from mergepipe.tailor.copy_plan import CopyRange, FilePlan
from mergepipe.tailor.copy_writer import FEWEST_BYTES, write_files
from support.faults import replaced
from support.fetching import AlignedFile
from support.local_models import open_local
from support.refusals import refuses
from support.safetensors_bytes import file_bytes, record
from support.source_code import trees_with
from support.stores import InMemoryFile, InMemoryStore

N_ELEMENTS = 4096
ENTRY = TensorEntry("t", F32, (N_ELEMENTS,), Location.local(Path("model.safetensors")), 0, 4 * N_ELEMENTS)


def file_of(content: bytes, *, is_paged: bool, ledger: Ledger | None = None) -> AlignedFile | InMemoryFile:
    """A file in memory."""
    path = Location.parse("file")
    ledger = Ledger() if ledger is None else ledger
    return AlignedFile(path, content, ledger) if is_paged else InMemoryStore({path: content}, ledger).open(path)


@given(st.binary(max_size=9000), st.data(), st.booleans())
def test_read_exact__gives_what_lies_in_the_range_and_asks_for_the_request(
    content: bytes, data: st.DataObject, is_paged: bool
) -> None:
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    ledger = Ledger()
    file = file_of(content, is_paged=is_paged, ledger=ledger)
    assert read_exact(file, start, stop, Purpose.EXPERT).tobytes() == content[start:stop]
    assert ledger.usage()[Purpose.EXPERT] == request_bytes(file, start, stop)


@pytest.mark.parametrize("is_paged", [False, True])
def test_read_exact__refuses_a_range_past_the_end(is_paged: bool) -> None:
    file = file_of(bytes(5000), is_paged=is_paged)
    with refuses(CorruptError, "storage.shrunk", r"^file: gave \d+ of the \d+ bytes at byte \d+"):
        read_exact(file, 4990, 5001, Purpose.EXPERT)


def test_read_exact__fills_the_array_that_it_is_given() -> None:
    out = np.zeros(20, np.uint8)
    content = read_exact(file_of(bytes(range(100)), is_paged=False), 7, 17, Purpose.EXPERT, out)
    assert np.shares_memory(content, out)
    assert out.tolist() == [*range(7, 17), *[0] * 10]


def test_request__needs_what_it_is_told_to_need() -> None:
    file, out = file_of(bytes(10), is_paged=False), np.empty(16, np.uint8)
    request(file, 0, out, 10, Purpose.BASE)
    with pytest.raises(CorruptError, match="gave 10 of the 11 bytes at byte 0"):
        request(file, 0, out, 11, Purpose.BASE)


def test_read_descriptor_range__goes_on_after_short_reads(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    descriptor = os.open(path, os.O_RDONLY)

    def by_sevens(pread: Callable[..., bytes]) -> Callable[..., bytes]:
        return lambda number, nbytes, offset: pread(number, min(nbytes, 7), offset)

    try:
        with replaced(os, "pread", by_sevens):
            assert read_descriptor_range(descriptor, path, 3, 50) == bytes(range(3, 53))
        with pytest.raises(CorruptError, match="gave 10 of the 11 bytes at byte 90"):
            read_descriptor_range(descriptor, path, 90, 11)
    finally:
        os.close(descriptor)


def resume_output(path: Path) -> None:
    """Open an output of which more is said to be written than is there."""
    path.write_bytes(bytes(10))
    with OutputFile(path, 9000, Ledger(), written_bytes=4196):
        pass


def read_state(path: Path) -> None:
    """Read the values of a training state."""
    state = StoredState(
        "p", "exp_avg", F32, ENTRY.shape, (Piece(Location.local(path), 0, ENTRY.nbytes, Span(0, N_ELEMENTS)),)
    )
    with StateReader(LocalStore()) as reader:
        reader.read(state, Span(0, N_ELEMENTS))


def copy_range(path: Path) -> None:
    """Copy a range of one file to another."""
    plan = FilePlan("out", (CopyRange(Location.local(path), 0, ENTRY.nbytes, is_skeleton=True),))
    write_files(LocalStore(), [(plan, path.with_name("out"))], FEWEST_BYTES, lambda _: None)


def opened(path: Path) -> dict[Location, LocalFile]:
    """The file, as what reads blocks is given it."""
    return {ENTRY.file: LocalStore().open(Location.local(path))}


def ignore(_nbytes: int) -> None:
    """Take no notice of progress."""


CALLERS: dict[str, Callable[[Path], object]] = {
    "span": lambda path: read_span(ENTRY, Span(100, 4000), opened(path), Purpose.BASE),
    "matrix": lambda path: read_matrix(ENTRY, opened(path), Purpose.BASE),
    "content id": lambda path: content_id(
        open_local(path),
        {Location.local(path): LocalStore().open(Location.local(path))},
    ),
    "norm": lambda path: norm(LocalStore(), open_local(path), ignore),
    "band sample": lambda path: read_sample(
        ENTRY, {ENTRY.file: LocalStore().open(Location.local(path))}, Purpose.ANALYSIS
    ),
    "packed index": lambda path: read_index(LocalStore(), Location.local(path), 5000, Purpose.EXPERT),
    "training state": read_state,
    "copied range": copy_range,
    "resumed output": resume_output,
}


@pytest.mark.parametrize("caller", CALLERS)
def test_callers__refuse_a_file_that_ends_early(caller: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"t": record(0, ENTRY.nbytes, shape=list(ENTRY.shape))}, bytes(ENTRY.nbytes)))

    def ends_early(read_into: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: min(read_into(*arguments), 100)

    with replaced(LocalFile, "read_into", ends_early), refuses(CorruptError, "storage.shrunk"):
        CALLERS[caller](path)


# Short reads are no error there: the rest of a whole file (to its own end), and kept ranges, which pass on what the
# file below says.
SHORT_READS = {
    "storage/ranges.py": {"read_into", "pread", "preadv"},
    "storage/output.py": {"read_into"},
    "checkpoints/content_id.py": {"read_into"},  # a file that shows what is read of it, and returns what it was given
}


def test_package__reads_ranges_through_one_module() -> None:
    found: dict[str, set[str]] = {}
    for module, tree in trees_with("read_into", "pread"):
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in ("read_into", "pread", "preadv"):  # type: ignore[attr-defined]
                found.setdefault(module, set()).add(node.func.attr)  # type: ignore[attr-defined]
    assert found == SHORT_READS


CONTENT = bytes(range(256)) * 64


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_spilled_files__request_each_range_of_an_expert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed_files: bool
) -> None:
    if not has_unnamed_files:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, scratch = tmp_path / "expert", tmp_path / "scratch"
    path.write_bytes(CONTENT)
    scratch.mkdir()
    store, location = LocalStore(), Location.local(path)
    expert = store.open(location)
    files = SpilledFiles({location: expert}, scratch)
    ranges = [(0, 4096, Purpose.EXPERT), (16000, 4096, Purpose.EXPERT), (100, 50, Purpose.BASE)]

    def read_all() -> list[bytes]:
        found = []
        for offset, nbytes, purpose in ranges:
            buffer = bytearray(nbytes)
            count = files[location].read_into(offset, memoryview(buffer), purpose)
            found.append(bytes(buffer[:count]))
        return found

    expected = [CONTENT[offset : offset + nbytes] for offset, nbytes, _ in ranges]
    assert read_all() == expected
    first = store.ledger.usage()
    files.replay()
    assert read_all() == expected
    again = store.ledger.usage() - first
    assert (again[Purpose.EXPERT], again[Purpose.BASE]) == (0, 50)
    assert list(scratch.iterdir()) == []
    assert files[location].read_into(8, memoryview(bytearray(8)), Purpose.EXPERT) == 8  # another range: from the file
    assert (store.ledger.usage() - first)[Purpose.EXPERT] == 8
    files.close()
    expert.close()


def test_scratch__is_a_thread_s_own_and_kept_up_to_a_limit() -> None:
    first = scratch("test", 1000, np.uint32)
    assert first.ctypes.data == scratch("test", 10, np.uint8).ctypes.data
    assert first.ctypes.data % 4096 == 0
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(scratch("test", 1000, np.uint32).ctypes.data))
    thread.start()
    thread.join()
    assert others != [first.ctypes.data]
    assert len(scratch("test", KEPT_BYTES + 1, np.uint8)) == KEPT_BYTES + 1
    assert scratch("test", 1000, np.uint32).ctypes.data == first.ctypes.data
