"""Stores plans in files: written beside, then renamed, so that a file is an old plan, the new one, or not there."""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe.errors import OutputError
from mergepipe.plan import PLAN_NAME, Plan
from mergepipe.storage.local import os_error
from mergepipe.storage.regular import read_head

_HEAD_BYTES = 400
_DOING = "writing the plan"


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan; of what stands there only another plan is replaced.

    Raises:
        OutputError: `plan.not-a-plan`.
        StorageError, NotFoundError: it cannot be written there.
    """
    beside = path.with_name(f".{path.name}.mergepipe-{os.getpid()}")
    try:
        if path.exists() and not _is_plan(path):
            message = "exists, and is not a plan of mergepipe"
            raise OutputError.of("plan.not-a-plan", path, message, "choose another name")
        try:
            with beside.open("xb") as stream:
                stream.write(plan.to_json())
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, path, _DOING) from error


def _is_plan(path: Path) -> bool:
    return path.is_file() and f'"format": "{PLAN_NAME}/'.encode() in read_head(path, _HEAD_BYTES)
