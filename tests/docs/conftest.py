"""What `make demo` writes, for tests that read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.demo_files import write_demo_files


@pytest.fixture(scope="session")
def demo_files() -> Iterator[Path]:
    """A folder with what `make demo` writes, which no test changes; its path is short, so that no table is wrapped."""
    with TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent) / "demo"
        folder.mkdir()
        write_demo_files(folder)
        yield folder
