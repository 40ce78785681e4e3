"""How the peer, mergekit, is run: its own environment, its own command line, its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def is_installed(venv: Path) -> bool:
    """Say whether `make test-peers` (or a user) has installed mergekit there."""
    return executable(venv).exists()


def executable(venv: Path) -> Path:
    """The command that merges."""
    return venv / "bin" / "mergekit-yaml"


def command(venv: Path, recipe: Path, out: Path) -> list[str]:
    """Arguments as its documentation shows them for a merge on CPU."""
    return [str(executable(venv)), str(recipe), str(out), "--lazy-unpickle", "--random-seed", "0", "--quiet"]
