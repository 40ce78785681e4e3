"""The journal: read back as it was written, up to wherever it was torn; nothing else is believed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3

from mergepipe.errors import StorageError
from mergepipe.snapshots.block_digests import root_of
from mergepipe.snapshots.journal import JOURNAL_NAME, Journal, JournalState, expert_bytes_of, read_journal
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage.ledger import Purpose
from support.faults import Fault, open_descriptors, replaced, system_error

USAGE = (("base.safetensors", Purpose.BASE, 10), ("expert.safetensors", Purpose.EXPERT, 100))
MORE = (("base.safetensors", Purpose.BASE, 20), ("expert.safetensors", Purpose.EXPERT, 150))


def digest(name: str, n_blocks: int) -> TensorDigest:
    blocks = tuple(blake3(f"{name}{i}".encode()).digest(16) for i in range(n_blocks))
    return TensorDigest(name, root_of(blocks), blocks)


FIRST = (digest("a", 2), digest("empty", 0))
SECOND = (digest("ü", 1),)


def write(path: Path) -> None:
    with Journal(path) as journal:
        journal.begin("key", (1, 2))
        journal.note_durable(FIRST, USAGE)
        journal.note_durable(SECOND, MORE)
        journal.stop(MORE)


def facts(state: JournalState | None) -> tuple[int, int] | None:
    """What is durable and what was read, in numbers."""
    return None if state is None else (len(state.digests), expert_bytes_of(state.usage))


def test_journal__reads_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / JOURNAL_NAME)
    state = read_journal(tmp_path / JOURNAL_NAME)
    assert state is not None
    assert (state.key, state.content) == ("key", (1, 2))
    assert state.digests == FIRST + SECOND
    assert state.usage == MORE


def test_journal__cut_anywhere_reads_as_the_records_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    write(path)
    raw = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    wanted = [None, (0, 0), (2, 100), (3, 150), (3, 150)]
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        state = read_journal(path)
        n_whole = sum(end <= size for end in ends)
        assert facts(state) == wanted[n_whole]
        assert state is None or state.valid_bytes == ends[n_whole - 1]


def test_journal__a_flipped_bit_ends_it_there(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    write(path)
    raw = path.read_bytes()
    whole = read_journal(path)
    assert whole is not None
    for bit in range(0, 8 * len(raw), 3):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(damaged))
        state = read_journal(path)
        assert state != whole
        assert state is None or (
            state.valid_bytes <= bit // 8 and (FIRST + SECOND)[: len(state.digests)] == state.digests
        )


def test_journal__goes_on_after_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    with Journal(path) as journal:
        journal.begin("key", (1, 2))
        journal.note_durable(FIRST, USAGE)
    with path.open("ab") as stream:
        stream.write(b"0123456789abcdef {torn")
    with Journal(path, read_journal(path)) as journal:
        journal.note_durable(SECOND, MORE)
    state = read_journal(path)
    assert state is not None
    assert state.digests == FIRST + SECOND


def test_journal__records_of_another_journal_are_not_believed(tmp_path: Path) -> None:
    for name, key in (("one", "a"), ("two", "b")):
        with Journal(tmp_path / name) as journal:
            journal.begin(key, (1, 2))
            journal.note_durable(FIRST, USAGE)
    first = (tmp_path / "one").read_bytes().splitlines(keepends=True)
    second = (tmp_path / "two").read_bytes().splitlines(keepends=True)
    (tmp_path / "mixed").write_bytes(first[0] + second[1])
    assert facts(read_journal(tmp_path / "mixed")) == (0, 0)


def test_journal__there_is_none(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "nothing") is None
    (tmp_path / "empty").touch()
    assert read_journal(tmp_path / "empty") is None


@pytest.mark.parametrize("name", ["write", "fsync", "open"])
def test_journal__tells_what_failed(tmp_path: Path, name: str) -> None:
    before = open_descriptors()
    fault = Fault(0, system_error(errno.ENOSPC))
    with replaced(os, name, fault.wrap), pytest.raises(StorageError) as caught:
        write(tmp_path / JOURNAL_NAME)
    assert fault.fired
    assert caught.value.code == "storage.no-space"
    assert open_descriptors() <= before
