"""Fixtures of the tests of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.published_forms import MODELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with empty models, in which recipes are written."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in (*MODELS, "a", "b", "c", "org/with+plus", "2024"):
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to("a")
    (folder / "one.safetensors").touch()
    return folder
