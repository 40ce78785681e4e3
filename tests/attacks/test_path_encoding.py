"""Folders with names that are not UTF-8: refused by name before the first write, never in the middle of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from odd_models import write_models
from test_special_files import write_training

from mergepipe.cli import main
from mergepipe.snapshots import work_log

COMMANDS = (
    "merge plain.yml out --no-catalog", "check plain.yml", "plan plain.yml --out plan.json --budget 50%",
    "pack base expert --out packs", "tailor compose hf.yml out", "tailor check hf.yml", "analyze base expert",
)  # fmt: skip


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / os.fsdecode(b"odd\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes only names in UTF-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_models(folder)
    write_training(folder)
    return folder


def test_commands__refuse_inputs_in_folders_that_are_not_utf_8(
    odd_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(odd_folder.rglob("*"))
    for command in COMMANDS:
        exit_code = main(command.split())
        printed = capsys.readouterr().err
        assert (exit_code, "odd\\udcff" in printed, "UTF-8" in printed) == (6, True, True), (command, printed)
    assert sorted(odd_folder.rglob("*")) == before


def test_merge__writes_into_folders_that_are_not_utf_8(
    odd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work_log, "UNIT_SECONDS", 0)
    write_models(tmp_path / "plain")
    assert main(["merge", str(tmp_path / "plain" / "plain.yml"), "out", "--no-catalog"]) == 0, capsys.readouterr()
    assert main(["verify", str(odd_folder / "out")]) == 0
