"""Compiled code that somebody else could have put there is not run, and nothing is written through a link there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe.kernels.compiled import listen_to_compilation, sources_digest
from support.source_code import import_file

SOURCE = """
from mergepipe.kernels.compiled import kernel


@kernel
def doubled(x):
    return x * 2


@kernel
def tripled(x):
    return x * 3
"""
SOMEBODY = 65534

pytestmark = pytest.mark.timeout(100)  # for what waits for ever


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the source of two kernels, whose code is kept in `cache` beside it."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "kept_kernels.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def call(place: Path, name: str = "doubled") -> tuple[int, bool]:
    """Call a kernel as a new process would; return its result, and whether it was compiled."""
    heard: list[bool] = []
    with listen_to_compilation(heard.append):
        result = getattr(import_file(place / "kept_kernels.py"), name)(7)
    return result, bool(heard)


def kept_files(place: Path, name: str = "doubled") -> list[Path]:
    return sorted(path for path in (place / "cache").rglob(f"*.{name}-*") if path.suffix not in (".nbi", ".nbc"))


def kept_file(place: Path, name: str = "doubled") -> Path:
    """Compile a kernel; return the file with its code."""
    assert call(place, name) == (7 * {"doubled": 2, "tripled": 3}[name], True)
    assert call(place, name)[1] is False
    (path,) = kept_files(place, name)
    return path


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a file away needs root")
    os.chown(path, SOMEBODY, SOMEBODY)


def move_behind_a_link(path: Path) -> None:
    aside = path.parent.parent / "aside"
    path.rename(aside)
    path.symlink_to(aside)


def open_to(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


@pytest.mark.thorough
@pytest.mark.parametrize("change", [give_away, open_to(0o770), open_to(0o702), open_to(0o1777), move_behind_a_link])
def test_code__in_a_folder_that_others_could_have_filled_is_not_run(
    place: Path, change: Callable[[Path], None]
) -> None:
    path = kept_file(place)
    content = path.read_bytes()
    change(path.parent)
    before = path.stat()
    for _ in range(2):  # nor is a new one written there
        assert call(place) == (14, True)
    assert path.read_bytes() == content
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("change", [give_away, open_to(0o660), open_to(0o602), move_behind_a_link])
def test_code__in_a_file_that_others_could_have_written_is_not_run_but_replaced(
    place: Path, change: Callable[[Path], None]
) -> None:
    path = kept_file(place)
    content = path.read_bytes()
    change(path)
    target = path.resolve()
    before = target.stat().st_mtime_ns
    assert call(place) == (14, True)
    assert not path.is_symlink()
    status = path.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)
    assert target == path or (target.read_bytes(), target.stat().st_mtime_ns) == (content, before)
    assert call(place) == (14, False)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_code__whose_place_is_taken_is_compiled_and_nothing_waits(place: Path, make: Callable[[Path], object]) -> None:
    path = kept_file(place)
    path.unlink()
    make(path)
    assert call(place) == (14, True)
    assert path.is_dir() or call(place) == (14, False)


def test_code__of_another_kernel_is_not_run_under_this_name(place: Path) -> None:
    doubled, tripled = kept_file(place), kept_file(place, "tripled")
    doubled.write_bytes(tripled.read_bytes())
    assert call(place) == (14, True)


@pytest.mark.thorough
@pytest.mark.parametrize("damage", ["cut", "empty", "digest", "content", "longer"])
def test_code__that_is_damaged_is_compiled_again(place: Path, damage: str) -> None:
    path = kept_file(place)
    content = bytearray(path.read_bytes())
    if damage in ("digest", "content"):
        content[0 if damage == "digest" else len(content) // 2] ^= 1
    damaged = {"cut": content[:-1], "empty": bytearray(), "longer": content + b"\0"}
    path.write_bytes(damaged.get(damage, content))
    assert call(place) == (14, True)
    assert call(place) == (14, False)


def test_code__of_another_processor_is_not_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_file(place)
    kernels: Any = import_file(place / "kept_kernels.py")
    codegen = type(kernels.doubled.dispatcher.targetctx.codegen())
    with monkeypatch.context() as patch:
        triple, cpu, features = kernels.doubled.dispatcher.targetctx.codegen().magic_tuple()
        patch.setattr(codegen, "magic_tuple", lambda _: (triple, cpu, f"{features},-avx512f"))
        assert call(place) == (14, True)
        assert call(place) == (14, False)
    assert call(place) == (14, False)
    assert len(kept_files(place)) == 2


def test_code__of_other_sources_or_settings_is_not_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_file(place)
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_BOUNDSCHECK", "1")
        assert call(place)[1] is True
    (place / "kept_kernels.py").write_text(SOURCE.replace("x * 2", "x * 2 + 21"), encoding="utf-8")
    sources_digest.cache_clear()
    assert call(place) == (35, True)


def test_code__is_kept_for_this_user_alone_below_a_folder_of_all(place: Path) -> None:
    (place / "cache").chmod(0o1777)
    previous = os.umask(0)
    try:
        path = kept_file(place)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(os.geteuid()) in path.parent.name


@pytest.mark.parametrize("home", ["missing", "/proc", "file", ""])
def test_code__of_a_user_without_a_home_to_write_is_compiled(
    place: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (place / "file").touch()
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place / home) if home else "relative")
    before = set(place.rglob("*"))
    assert [call(place) for _ in range(2)] == [(14, True)] * 2
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.thorough
def test_code__written_by_two_processes_at_once_is_whole(place: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(place)!r})
import kept_kernels
from mergepipe.kernels.compiled import listen_to_compilation
heard = []
with listen_to_compilation(heard.append):
    print(kept_kernels.doubled(7), *heard)
"""
    run = [sys.executable, "-c", program]
    writers = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {writer.communicate()[0] for writer in writers} <= {"14 True False\n", "14\n"}
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "14\n"
    (path,) = kept_files(place)
    assert list(path.parent.iterdir()) == [path]


def test_code__that_finds_no_space_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept_file(place)
    path.unlink()

    def refuse(_descriptor: int, _content: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        assert call(place) == (14, True)
    assert list(path.parent.iterdir()) == []


def test_code__kept_is_bounded_and_the_oldest_goes_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergepipe.kernels import compiled

    doubled = kept_file(place)
    os.utime(doubled, (1, 1))
    monkeypatch.setattr(compiled, "CACHE_BYTES", doubled.stat().st_size * 3 // 2)
    tripled = kept_file(place, "tripled")
    assert sorted(tripled.parent.iterdir()) == [tripled]


@pytest.mark.thorough
def test_code__of_a_module_that_no_other_process_can_import_is_compiled(place: Path) -> None:
    """Processes of their own: within one, numba remembers what it needs the module for."""
    program = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("<anywhere>", {str(place / "kept_kernels.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.doubled(7))
"""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ended.stdout == "14\n"
