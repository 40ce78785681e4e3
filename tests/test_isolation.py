"""Tests share nothing with one another, nor with another run of the suite at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe.cli import main
from mergepipe.snapshots import staging

ROOT = Path(__file__).resolve().parent.parent
SHOW_PLACES = "import pathlib, tempfile; print(tempfile.gettempdir(), pathlib.Path.home(), sep='\\n')"
SURFACE = ("tests/surface", "-p", "no:randomly", "--no-fsync")
earlier_places: set[str] = set()


@pytest.mark.parametrize("turn", [1, 2])
def test_places__are_of_one_test_and_of_the_processes_that_it_starts(turn: int, tmp_path: Path) -> None:
    del turn  # the second time, the places are others
    places = {tempfile.gettempdir(), str(Path.home())}
    ran = subprocess.run([sys.executable, "-S", "-c", SHOW_PLACES], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == places
    assert all(Path(place).is_relative_to(tmp_path.parent) for place in places)
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert not places & earlier_places
    earlier_places.update(places)


@pytest.fixture(scope="module")
def running_search() -> Iterator[Path]:
    """Begin a search as another run of the suite would: outside of any test."""
    with staging.temporary_folder("search") as folder:
        yield folder


def test_gc__sees_no_search_that_another_run_has_begun(
    running_search: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(tmp_path), "--dry-run"]) == 0
    assert running_search.is_dir()
    assert "search" not in capsys.readouterr().out


@pytest.mark.slow
def test_surface__passes_twice_at_once() -> None:
    command = [sys.executable, "-m", "pytest", *SURFACE]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    outputs = [run.communicate(timeout=900)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
