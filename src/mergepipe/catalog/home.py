"""Locate the home folder: an explicit path, else the environment, else the platform's user data folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

HOME_VARIABLE = "MERGEPIPE_HOME"
CATALOG_NAME = "catalog.sqlite3"


def statistics_folder(home: Path) -> Path:
    """Return the folder that holds statistics by content."""
    return home / "statistics"


def resolve_home(explicit: Path | None, environment: Mapping[str, str] | None = None, platform: str = "") -> Path:
    """Choose the home directory, absolute; nothing is created.

    `explicit` has precedence over $MERGEPIPE_HOME, which has precedence over the platform's user data folder. Empty
    variables count as unset, as does an $XDG_DATA_HOME that is not absolute. `environment` and `platform` default to
    those of the process.
    """
    environment = os.environ if environment is None else environment
    if explicit is not None:
        return _absolute(explicit)
    configured = environment.get(HOME_VARIABLE, "")
    if configured:
        return _absolute(Path(configured))
    return _absolute(_user_data_folder(environment, platform or sys.platform)) / "mergepipe"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolves `..` but keeps links, as the user wrote them


def _user_data_folder(environment: Mapping[str, str], platform: str) -> Path:
    if platform == "darwin":
        return Path("~/Library/Application Support")
    configured = Path(environment.get("XDG_DATA_HOME", ""))
    return configured if configured.is_absolute() else Path("~/.local/share")
