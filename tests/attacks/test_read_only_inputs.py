"""Inputs on a file system that is mounted for reading only: everything works, and nothing is tried beside them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from odd_models import RECIPES, write_models

from mergepipe.cli import main
from support.training_trees import decoder_shapes, known_states, write_hf


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models, a snapshot, a store, a checkpoint, that cannot be written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a folder for reading only needs root")
    root = tmp_path_factory.mktemp("read-only")
    inputs = root / "inputs"
    inputs.mkdir()
    write_models(inputs)
    (inputs / "plain.yml").write_text(RECIPES["plain"])
    (inputs / "compose.yml").write_text("default: checkpoint-7\n")
    write_hf(inputs / "checkpoint-7", known_states(decoder_shapes()))
    with contextlib.chdir(inputs):
        for command in (
            "merge plain.yml snapshot", "pack base expert --out packed", "plan plain.yml --budget 50% --out plan.json",
        ):  # fmt: skip
            assert main([*command.split(), "--home", str(root / "first")]) == 0
    mounted = subprocess.run(["mount", "--bind", inputs, inputs], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is refused: {mounted.stderr!r}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", inputs], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            (inputs / "base" / "new").touch()
        yield inputs
    finally:
        subprocess.run(["umount", inputs], check=True)


@pytest.mark.parametrize(
    "command",
    [
        "check IN/plain.yml",
        "plan IN/plain.yml --budget 50% --out plan.json --home home",
        "analyze IN/base IN/expert --home home",
        "merge IN/plain.yml merged --home home",
        "merge IN/plain.yml merged --budget 50% --home home",
        "run IN/plan.json merged --home home",
        "pack IN/base IN/expert --out packed --home home",
        "unpack IN/packed/expert --out restored",
        "verify IN/snapshot --home home",
        "verify IN/snapshot --deep 5% --home home",
        "verify IN/packed/expert --home home",
        "diff IN/snapshot IN/snapshot --home home",
        "show IN/snapshot --home home",
        "replay IN/snapshot again --home home",
        "tailor inspect IN/checkpoint-7",
        "tailor check IN/compose.yml",
        "merge IN/plain.yml IN/merged --home home",
        "pack IN/base IN/expert --out IN/new --home home",
        "plan IN/plain.yml --budget 50% --out IN/new.json --home home",
        "analyze IN/base IN/expert --home IN/home",
    ],
)
def test_command__reads_what_cannot_be_written_or_says_in_one_line_where_it_cannot_write(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = os.path.relpath(inputs)
    writes_there = any(word in command for word in ("IN/merged", "IN/new", "IN/home"))
    exit_code = main([word.replace("IN", place) for word in command.split()])
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (exit_code, len(errors)) == ((8, 1) if writes_there else (0, 0)), errors
    assert all("inputs" in error and "Read-only file system" in error for error in errors)
