"""What `make demo` writes, for tests that read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.demo_files import write_demo_files


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make demo` writes, which no test changes."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo_files(folder)
    return folder
