"""Garbage that another process takes care of while it is being looked at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mergepipe import keeping
from mergepipe.publish import staging_directory
from mergepipe.workflows import collecting


def test_gc__passes_over_staging_that_another_process_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = staging_directory(tmp_path / "out")
    left.mkdir()
    (left / "owner.json").write_text("{}")

    def removed_by_another(directory: Path) -> bool:
        shutil.rmtree(directory)
        return False

    monkeypatch.setattr(collecting, "remove_dead", removed_by_another)
    assert keeping.gc([tmp_path], home=tmp_path / "home").garbage == ()


def test_gc__tells_of_staging_that_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = staging_directory(tmp_path / "out")
    left.mkdir()
    (left / "owner.json").write_text("{}")
    monkeypatch.setattr(collecting, "remove_dead", lambda _: False)
    (garbage,) = keeping.gc([tmp_path], home=tmp_path / "home").garbage
    assert (garbage.what, garbage.is_removed) == (str(left), False)
