"""Storage without the calls that only Linux has: the same bytes, read and written by what every POSIX system has."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from pathlib import Path

import pytest

import mergepipe
from mergepipe.cli import main
from mergepipe.errors import UnsupportedError
from mergepipe.storage import owned, owner
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import switch_direct
from support.families import TINY, write_family

ONLY_LINUX = ("posix_fadvise", "posix_fallocate", "O_DIRECT", "O_PATH", "preadv", "sched_getaffinity")


class NoLibrary:
    """A C library that has neither `renameat2` nor `mincore`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


def take_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove from this process what macOS does not have."""
    for name in ONLY_LINUX:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(ctypes, "CDLL", NoLibrary)
    monkeypatch.setattr(owner, "_BOOT_ID", tmp_path / "no-such-file")
    monkeypatch.setattr(owner, "_PROCESSES", tmp_path / "no-such-folder")


def test_merge__without_the_calls_of_linux_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = write_family(tmp_path, TINY, 2)
    models = "".join(f"- {{model: {path}, parameters: {{weight: 0.5, density: 0.5}}}}\n" for path in family.experts)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"merge_method: ties\nbase_model: {family.base}\nmodels:\n{models}")
    mergepipe.merge(recipe, tmp_path / "linux")
    take_away(monkeypatch, tmp_path)
    options = mergepipe.MergeOptions()
    for _ in range(2):  # the second one replaces the first, without an exchange
        mergepipe.merge(recipe, tmp_path / "other", force=True, options=options)
    assert mergepipe.verify(tmp_path / "other").is_sound
    weights = [tmp_path / name / "model.safetensors" for name in ("linux", "other")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_store__without_the_calls_of_linux_reads_exact_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, tmp_path)
    content = bytes(range(256)) * 40
    path = Location.local(tmp_path / "file")
    (tmp_path / "file").write_bytes(content)
    file = LocalStore().open(path, direct=True)
    buffer = memoryview(bytearray(300))
    assert (file.alignment, file.read_into(10_000, buffer, Purpose.BASE)) == (1, 240)
    assert bytes(buffer[:240]) == content[10_000:]
    file.close()
    assert LocalStore().read_metadata(path, 5, 20) == content[5:25]


def test_reserve__without_fallocate_gives_a_new_file_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, tmp_path)
    descriptor = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    try:
        owned.reserve(descriptor, 12_345)
        assert not switch_direct(descriptor, wanted=True)
    finally:
        os.close(descriptor)
    assert (tmp_path / "new").stat().st_size == 12_345


def test_owner__without_proc_a_living_process_is_told_from_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch, tmp_path)
    living = owner.this_process()
    assert living.boot
    assert owner.is_alive(living, 0.0)
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert not owner.is_alive(owner.Owner(child, living.started, living.boot, living.host), 0.0)


def test_sync_file__on_macos_goes_through_the_cache_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[int] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: commands.append(command))
    with (tmp_path / "file").open("wb") as stream:
        owned.sync_file(stream.fileno())
    assert commands == [51]


def test_mergepipe__refuses_windows_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "name", "nt")
    exit_code = main(["--version"])
    with pytest.raises(UnsupportedError):
        _ = mergepipe.merge
    monkeypatch.undo()
    printed = capsys.readouterr()
    assert (exit_code, printed.out) == (6, "")
    assert printed.err == (
        "error: mergepipe runs on Linux, and this system is 'nt'; on Windows, run it inside WSL "
        "[platform.unsupported]\n"
    )
