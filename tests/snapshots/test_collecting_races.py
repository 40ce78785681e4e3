"""Garbage that another process takes care of while it is being looked at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mergepipe import api as keeping
from mergepipe.jobs import gc as collecting
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage.owner import OWNER_NAME, write_owner


def _left_staging(out: Path) -> Path:
    """The staging of a run that is dead: its record names a process of an earlier boot."""
    left = staging_directory(out)
    left.mkdir()
    write_owner(left, out.name)
    record = json.loads((left / OWNER_NAME).read_text())
    record["owner"]["started"] = "0"
    (left / OWNER_NAME).write_text(json.dumps(record))
    return left


def test_gc__passes_over_staging_that_another_process_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _left_staging(tmp_path / "out")

    def removed_by_another(directory: Path) -> bool:
        shutil.rmtree(directory)
        return False

    monkeypatch.setattr(collecting, "remove_dead", removed_by_another)
    assert keeping.gc([tmp_path], home=tmp_path / "home").garbage == ()


def test_gc__tells_of_staging_that_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = _left_staging(tmp_path / "out")
    monkeypatch.setattr(collecting, "remove_dead", lambda _: False)
    (garbage,) = keeping.gc([tmp_path], home=tmp_path / "home").garbage
    assert (garbage.what, garbage.is_removed) == (str(left), False)
