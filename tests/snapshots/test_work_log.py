"""The work log: read back as it was written, up to wherever it was torn; nothing else is believed."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from mergepipe.errors import StorageError
from mergepipe.snapshots.work_log import LoggedWork, Record, WorkLog, content_identity, forget_work_log, read_work_log
from support.faults import Fault, open_descriptors, replaced, system_error
from support.public_names import CONTENT_NAME, LOG_NAME

UNITS: tuple[Record, ...] = tuple({"kind": "unit", "number": number, "name": "ü"} for number in range(4))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / CONTENT_NAME).mkdir()
    return tmp_path


def write(place: Path, records: tuple[Record, ...], earlier: LoggedWork | None = None) -> None:
    with closing(WorkLog(place, "key", earlier)) as log:
        for number, record in enumerate(records):
            log.append(record, is_durable=number % 2 == 0)


def units_in(place: Path) -> tuple[Record, ...] | None:
    logged = read_work_log(place)
    return None if logged is None else tuple(record for record in logged.records if record["kind"] == "unit")


def test_work_log__reads_as_it_was_written(place: Path) -> None:
    write(place, UNITS)
    logged = read_work_log(place)
    assert logged is not None
    assert (logged.key, logged.n_runs, logged.content) == ("key", 1, content_identity(place))
    assert logged.records[1:] == UNITS
    assert logged.valid_bytes == (place / LOG_NAME).stat().st_size


def test_work_log__cut_anywhere_reads_as_the_records_that_are_whole_and_goes_on_there(place: Path) -> None:
    write(place, UNITS)
    raw = (place / LOG_NAME).read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    for size in range(len(raw) + 1):
        (place / LOG_NAME).write_bytes(raw[:size])
        n_whole = sum(end <= size for end in ends)
        logged = read_work_log(place)
        assert (logged is None) == (n_whole == 0)
        if logged is None:
            continue
        assert logged.valid_bytes == ends[n_whole - 1]
        assert units_in(place) == UNITS[: n_whole - 1]
        write(place, UNITS[2:], logged)
        assert units_in(place) == (*UNITS[: n_whole - 1], *UNITS[2:])


def test_work_log__a_flipped_bit_ends_it_there(place: Path) -> None:
    write(place, UNITS)
    raw = (place / LOG_NAME).read_bytes()
    for bit in range(0, 8 * len(raw), 3):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        (place / LOG_NAME).write_bytes(bytes(damaged))
        logged = read_work_log(place)
        assert logged is None or logged.valid_bytes <= bit // 8
        assert logged is None or units_in(place) == UNITS[: len(logged.records) - 1]


def test_work_log__records_of_another_log_are_not_believed(tmp_path: Path) -> None:
    contents = []
    for name, key in (("one", "a"), ("two", "b")):
        (tmp_path / name / CONTENT_NAME).mkdir(parents=True)
        with closing(WorkLog(tmp_path / name, key)) as log:
            log.append(UNITS[0], is_durable=True)
        contents.append((tmp_path / name / LOG_NAME).read_bytes().splitlines(keepends=True))
    (tmp_path / "one" / LOG_NAME).write_bytes(contents[0][0] + contents[1][1])
    assert units_in(tmp_path / "one") == ()


def test_work_log__of_several_runs_tells_how_many_and_what_was_given_up(place: Path) -> None:
    write(place, UNITS[:1])
    write(place, UNITS[1:2], read_work_log(place))
    logged = read_work_log(place)
    assert logged is not None
    assert (logged.n_runs, logged.content) == (2, content_identity(place))
    with closing(WorkLog(place, "key", logged)) as log:
        log.restart()
        after = read_work_log(place)
        assert after is not None
        assert (after.n_runs, after.content) == (3, None)
        (place / CONTENT_NAME).rmdir()
        (place / CONTENT_NAME).mkdir()
        log.append(UNITS[0], is_durable=True)
    last = read_work_log(place)
    assert last is not None
    assert (last.n_runs, last.content) == (3, content_identity(place))


def test_work_log__there_is_none(place: Path) -> None:
    assert read_work_log(place) is None
    (place / LOG_NAME).touch()
    assert read_work_log(place) is None
    forget_work_log(place)
    forget_work_log(place)
    assert not (place / LOG_NAME).exists()


@pytest.mark.parametrize("name", ["write", "fsync", "open"])
def test_work_log__tells_what_failed(place: Path, name: str) -> None:
    before = open_descriptors()
    fault = Fault(0, system_error(errno.ENOSPC))
    with replaced(os, name, fault.wrap), pytest.raises(StorageError) as caught:
        write(place, UNITS)
    assert fault.fired
    assert caught.value.code == "storage.no-space"
    assert open_descriptors() <= before
