"""`verify`, `repair`, `replay`, `diff`, `gc`, `lineage --dot` and `merge --resume`: what they print, how they end."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from mergepipe.snapshots import work_log as work_log
from mergepipe.snapshots.staging import staging_directory
from support.command_line import Runner, Workplace
from support.faults import Fault, replaced, system_error


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_verify__tells_soundness_by_its_exit_code(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out)
    ran = run("verify", work.out, "--deep", "20%")
    assert (ran.exit_code, [line for line in ran.error_lines if not line.startswith("verify: ")]) == (0, [])
    assert ran.out.splitlines()[-1].split() == ["result", "sound"]
    assert "made again" in ran.out
    assert run("verify", work.out, "--quiet").out == ""
    damage(work.out / "model.safetensors")
    ran = run("verify", work.out)
    assert ran.exit_code == 4
    assert "model.safetensors bytes" in ran.out
    assert "tensor model." in ran.out
    found = run("verify", work.out, "--json")
    assert found.exit_code == 4
    assert not found.json()["is_sound"]
    assert [each["kind"] for each in found.json()["report"]["damages"]] == ["block"]


def test_diff__tells_what_differs(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out)
    work.recipe.write_text(work.recipe.read_text().replace("0.6", "0.2"))
    run("merge", work.recipe, work.root / "other")
    lines = run("diff", work.out, work.root / "other").out
    assert "-    parameters: {weight: 0.6}" in lines
    assert "||a - b||" in lines
    assert run("diff", work.out, work.root / "other", "--fast", "--quiet").out == ""
    found = run("diff", work.out, work.root / "other", "--fast", "--json").json()
    assert found["tensors"]
    assert {each["norm"] for each in found["tensors"]} == {None}


def test_merge__says_what_is_kept_and_goes_on(work: Workplace, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_log, "UNIT_BYTES", 10_000)
    merge = ("merge", work.recipe, work.out, "--shard-size", "30kB")
    assert "[resume.nothing]" in run(*merge, "--resume").err
    with replaced(os, "ftruncate", Fault(2, system_error(errno.ENOSPC)).wrap):
        ran = run(*merge)
    assert ran.exit_code == 8
    kept = re.fullmatch(
        r"error: (\d+)% of out is durable: the same command resumes there, .* \[run.kept\]", ran.error_lines[-1]
    )
    assert kept is not None
    assert 0 < int(kept[1]) < 100
    found = run("gc", work.root, "--dry-run")
    assert f"staging {staging_directory(work.out)}" in found.out
    assert "would free" in found.out
    with replaced(os, "ftruncate", Fault(1, KeyboardInterrupt()).wrap):
        ran = run(*merge, "--resume", "--json")
    assert len(ran.error_lines) == 1
    told = re.match(r"interrupted: nothing was published; (\d+)% of out is durable: ", ran.err)
    assert told is not None
    assert int(told[1]) >= int(kept[1])
    ran = run(*merge, "--resume")
    assert ran.exit_code == 0
    assert f"resuming at {told[1]}%" in ran.err
    assert f"resumed an interrupted run at {told[1]}%" in ran.out
    assert run("verify", work.out).exit_code == 0
    found = run("gc", work.root, "--json")
    assert (found.exit_code, found.json()["garbage"]) == (0, [])
