"""Where the catalog lives: what was asked for, else the environment, else the platform's user data folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

HOME_VARIABLE = "MERGEPIPE_HOME"
CATALOG_NAME = "catalog.sqlite3"


def resolve_home(explicit: Path | None, environment: Mapping[str, str] | None = None, platform: str = "") -> Path:
    """Choose the home directory, absolute; nothing is created.

    `explicit` wins over $MERGEPIPE_HOME, which wins over the platform's user data folder. Empty variables count as
    not set, and so does an $XDG_DATA_HOME that is not absolute. `environment` and `platform` are the process's own
    if they are not given.
    """
    environment = os.environ if environment is None else environment
    if explicit is not None:
        return _absolute(explicit)
    asked = environment.get(HOME_VARIABLE, "")
    if asked:
        return _absolute(Path(asked))
    return _absolute(_user_data_folder(environment, platform or sys.platform)) / "mergepipe"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - `..` goes, links stay as the user knows them


def _user_data_folder(environment: Mapping[str, str], platform: str) -> Path:
    if platform == "darwin":
        return Path("~/Library/Application Support")
    asked = Path(environment.get("XDG_DATA_HOME", ""))
    return asked if asked.is_absolute() else Path("~/.local/share")
