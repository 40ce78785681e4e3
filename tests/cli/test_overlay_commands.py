"""`merge --overlay` and `materialise`: what they print, how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Runner, Workplace, make_workplace


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def test_overlay__is_made_verified_and_completed(work: Workplace, run: Runner) -> None:
    overlay, whole = work.root / "overlay", work.root / "whole"
    assert run("merge", work.recipe, work.out).exit_code == 0
    ran = run("merge", work.recipe, overlay, "--overlay")
    assert ran.exit_code == 0
    assert "`mergepipe materialise` makes the whole snapshot" in ran.out
    assert run("verify", overlay).exit_code == 0
    ran = run("materialise", overlay, whole)
    assert ran.exit_code == 0
    assert ran.out.splitlines()[-1].split()[:2] == ["result", "sound:"]
    assert (whole / "model.safetensors").read_bytes() == (work.out / "model.safetensors").read_bytes()
    assert run("materialise", overlay, whole, "--force", "--quiet").out == ""
    found = run("materialise", overlay, "--force", "--json").json()
    assert found["written_bytes"] == (overlay / "model.safetensors").stat().st_size
    assert run("merge", work.recipe, work.root / "again", "--overlay", "--base", "x").exit_code == 2


def test_overlay__errors_have_their_exit_codes(work: Workplace, run: Runner) -> None:
    overlay = work.root / "overlay"
    run("merge", work.recipe, overlay, "--overlay", "--budget", "50%")
    ran = run("materialise", overlay)
    assert (ran.exit_code, "[overlay.in-place]" in ran.err) == (7, True)
    ran = run("repair", overlay)
    assert (ran.exit_code, "[snapshot.overlay]" in ran.err) == (6, True)
    ran = run("analyze", overlay, work.family.experts[0])
    assert (ran.exit_code, "[model.overlay]" in ran.err, "mergepipe materialise" in ran.err) == (6, True, True)
    work.family.base.rename(work.root / "moved")
    assert run("verify", overlay).exit_code == 4
    ran = run("materialise", overlay, work.root / "whole")
    assert (ran.exit_code, "[overlay.base-changed]" in ran.err) == (9, True)
    assert run("materialise", overlay, work.root / "whole", "--base", work.root / "moved").exit_code == 0
    assert run("merge", work.recipe, work.out, "--overlay", "--keep-sums").exit_code == 2
