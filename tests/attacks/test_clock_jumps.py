"""The clock jumps by years while something is made: what a living process works on is not taken for garbage."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from odd_models import write_models

import mergepipe
from mergepipe.snapshots.parts import Claimant, PartsJob
from mergepipe.snapshots.parts_places import FolderParts, parts_directory
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage.ledger import Usage
from support.model_folders import recipe_of

TEN_YEARS = 10 * 365 * 24 * 3600.0
JUMPS = (TEN_YEARS, -TEN_YEARS)
HOLD = """
import fcntl, os, sys
from pathlib import Path
from mergepipe.storage.owned import try_lock, write_owner
staging = Path(sys.argv[1])
staging.mkdir()
folder = os.open(staging, os.O_RDONLY)
assert try_lock(folder)
write_owner(staging, sys.argv[2])
print("working", flush=True)
sys.stdin.read()
"""


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock of this process."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


@pytest.fixture
def working(tmp_path: Path) -> Iterator[Path]:
    """The staging directory of a process that works in it."""
    staging = staging_directory(tmp_path / "out")
    command = [sys.executable, "-c", HOLD, str(staging), "out"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    yield staging
    process.communicate()


@pytest.mark.parametrize("seconds", JUMPS)
def test_gc__after_a_jump_of_the_clock_leaves_the_staging_of_a_living_run(
    working: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    jump(monkeypatch, seconds)
    report = mergepipe.gc([tmp_path], home=tmp_path / "home")
    assert report.garbage == ()
    assert len(report.living) == 1
    assert working.is_dir()


@pytest.mark.parametrize("seconds", JUMPS)
def test_gc__after_a_jump_of_the_clock_leaves_the_parts_of_a_living_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    job = PartsJob("out", mergepipe.__version__, "0" * 32, (("a.safetensors", 9),))
    place = FolderParts(tmp_path / "out", job)
    place.open()
    claim = Claimant(place, "1/1").claim(0, 10)
    assert claim is not None
    assert [claim.is_open for claim in place.account().claims] == [True]
    directory = parts_directory(tmp_path / "out", "0" * 32)
    jump(monkeypatch, seconds)
    assert mergepipe.gc([tmp_path], home=tmp_path / "home").garbage == ()
    assert directory.is_dir()
    place.spend(claim, Usage())  # nobody works there any more: only the clock can tell
    assert len(mergepipe.gc([tmp_path], home=tmp_path / "home").garbage) == (seconds > 0)


@pytest.mark.parametrize("seconds", JUMPS)
def test_merge__during_which_the_clock_jumps_gives_the_same_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each look at the clock is another jump."""
    write_models(tmp_path)
    recipe = recipe_of("linear", {tmp_path / "expert": {"weight": 0.5}}, tmp_path / "base")
    options = mergepipe.MergeOptions(home=tmp_path / "home")
    mergepipe.merge(recipe, tmp_path / "quiet", options=options)
    now, n_looks = time.time, iter(range(1 << 30))
    monkeypatch.setattr(time, "time", lambda: now() + seconds * (next(n_looks) % 3))
    mergepipe.merge(recipe, tmp_path / "jumping", options=options)
    assert mergepipe.verify(tmp_path / "jumping").is_sound
    weights = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("quiet", "jumping")]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
