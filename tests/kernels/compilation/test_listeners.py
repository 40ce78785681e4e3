"""Compiling kernels is announced when it happens, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe.kernels.compiled import listen_to_compilation, mark_compilation
from support.source_code import import_file

SOURCE = """
from mergepipe.kernels.compiled import kernel


@kernel
def doubled(x):
    return x + x
"""


def test_kernels__are_announced_when_compiled_and_not_when_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    path = tmp_path / "some_kernels.py"
    path.write_text(SOURCE, encoding="utf-8")
    heard: list[list[bool]] = [[], [], []]
    first, again = import_file(path), import_file(path)
    with listen_to_compilation(heard[0].append):
        assert first.doubled(2) == 4
    with listen_to_compilation(heard[1].append):
        assert first.doubled(3) == 6
    with listen_to_compilation(heard[2].append):
        assert again.doubled(4) == 8
    assert heard == [[True, False], [], []]


def test_listen_to_compilation__hears_a_nested_compilation_once_and_nothing_after_its_end() -> None:
    heard: list[bool] = []
    with listen_to_compilation(heard.append), mark_compilation(), mark_compilation():
        pass
    with mark_compilation():
        pass
    assert heard == [True, False]
