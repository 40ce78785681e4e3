"""Small files of a GiB: refused by name, by their size alone, before anything of them is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from odd_models import write_models

from mergepipe.cli import main
from mergepipe.storage.contract import SIDECARS_BYTES, TOKENIZER_BYTES

GIB = 1 << 30
MOST_BYTES = 1 << 20  # no other file of these models has a tenth of it

# The file that is a GiB, then what reads it.
CASES = (
    *(
        (f"base/{name}", "merge plain.yml again --memory 64MiB")
        for name in ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
                     "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json")
    ),
    ("expert/config.json", "merge tokenizers.yml again --memory 64MiB"),
    ("base/config.json", "check plain.yml"),
    ("base/generation_config.json", "run plan.json again"),
    ("plain.yml", "check plain.yml"),
    ("plan.json", "run plan.json again"),
    ("out/mergepipe.json", "verify out"),
    ("out/mergepipe.json", "diff out out"),
    ("out/config.json", "verify out"),
    ("out/mergepipe.blocks", "verify out"),
    ("out/mergepipe.json", "gc"),
    ("adapter/adapter_config.json", "merge adapter.yml again"),
)  # fmt: skip


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every read that is asked for at a position."""
    sizes: list[int] = []
    pread = os.pread

    def recorded(descriptor: int, nbytes: int, offset: int) -> bytes:
        sizes.append(nbytes)
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", recorded)
    return sizes


def test_commands__refuse_a_small_file_of_a_gib_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], requested: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_models(tmp_path)
    assert main(["merge", "plain.yml", "out", "--quiet"]) == 0
    assert main(["plan", "plain.yml", "--out", "plan.json", "--budget", "50%"]) == 0
    for name, command in CASES:
        path = tmp_path / name
        content = path.read_bytes()
        os.truncate(path, GIB)
        capsys.readouterr()
        requested.clear()
        exit_code = main(command.split())
        printed = "".join(capsys.readouterr())
        path.write_bytes(content)
        assert not (tmp_path / "again").exists(), name
        assert max(requested, default=0) < MOST_BYTES, (name, command)
        if command == "gc":
            continue
        assert 2 <= exit_code <= 10, (name, command, printed)
        assert path.name in printed, (name, command, printed)
        if not command.startswith("verify"):
            assert f"has {GIB} bytes, at most " in printed, (name, command, printed)
            assert "[storage.too-large]" in printed, (name, command, printed)


def test_merge__refuses_small_files_that_are_too_large_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mergepipe.runs.small_files.SIDECARS_BYTES", 1000)
    write_models(tmp_path)
    for name in ("vocab.txt", "merges.txt"):
        (tmp_path / "base" / name).write_bytes(b"a\n" * 300)
    assert main(["merge", "plain.yml", "out", "--no-catalog"]) == 4
    assert "base: its small files up to " in capsys.readouterr().err
    assert SIDECARS_BYTES >= TOKENIZER_BYTES
