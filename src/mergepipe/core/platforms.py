"""Refuse the platforms on which MergePipe does not run."""

from __future__ import annotations

import os

from mergepipe.errors import UnsupportedError


def check_platform() -> None:
    """Refuse a system that is not POSIX."""
    if os.name != "posix":
        message = f"mergepipe runs on Linux, and this system is '{os.name}'"
        raise UnsupportedError.of("platform.unsupported", "", message, "on Windows, run it inside WSL")
