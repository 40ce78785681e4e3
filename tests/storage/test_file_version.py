"""The version of a file changes with its bytes, whatever its times are set to."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mergepipe.storage import contract
from mergepipe.storage.contract import modified_at, version_of


def status(mtime_ns: int, ctime_ns: int, inode: int = 7) -> os.stat_result:
    return cast(os.stat_result, SimpleNamespace(st_mtime_ns=mtime_ns, st_ctime_ns=ctime_ns, st_ino=inode))


def test_version_of__changes_with_a_write_whose_time_is_set_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.utime(path, ns=(0, 0))
    before = version_of(path, path.stat())
    path.write_bytes(b"new")
    os.utime(path, ns=(0, 0))
    assert version_of(path, path.stat()) != before


@pytest.mark.parametrize("other", [status(1, 2, 8), status(1, 3), status(-1, 2), status(10**19, 2)])
def test_version_of__holds_every_time_and_inode(tmp_path: Path, other: os.stat_result) -> None:
    assert version_of(tmp_path, status(1, 2)) != version_of(tmp_path, other)
    assert version_of(tmp_path, status(1, 2, 2**64 - 1)).endswith(f".{2**64 - 1}")


@pytest.mark.parametrize(("read_only", "is_trusted"), [(True, False), (False, True)])
def test_version_of__in_an_image_that_repeats_its_times_is_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool, is_trusted: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0))
    here = version_of(tmp_path, status(10**9, 10**9))
    assert here == version_of(tmp_path, status(10**9, 10**9))
    monkeypatch.setattr(contract, "_PROCESS", "another")
    assert (here == version_of(tmp_path, status(10**9, 10**9))) == is_trusted
    assert version_of(tmp_path, status(10**9, 10**9 + 5)) == f"{10**9}.{10**9 + 5}.7"


def test_modified_at__is_the_epoch_beyond_all_calendars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_mtime=1e18))
    assert modified_at(tmp_path) == datetime.fromtimestamp(0, UTC)
