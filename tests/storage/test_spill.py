"""What was read of experts is read again from a scratch file, at no request to their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.spill import SpilledFiles

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
