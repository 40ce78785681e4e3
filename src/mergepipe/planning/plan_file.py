"""Write plans to files atomically: the file holds the old plan, the new one, or does not exist."""

from __future__ import annotations

from pathlib import Path

from mergepipe.errors import OutputError
from mergepipe.planning.plan import PLAN_NAME, Plan
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.local import os_error
from mergepipe.storage.output import replace_durably
from mergepipe.storage.ranges import read_head

_HEAD_BYTES = 400


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan; refuse to replace a file that is not a plan."""
    try:
        _check_replaceable(path)
    except OSError as error:
        raise os_error(error, path, "writing the plan") from error
    replace_durably(path, plan.to_json(), Ledger())


def _check_replaceable(path: Path) -> None:
    if path.is_symlink():
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the file itself")
    if path.exists() and not _is_plan(path):
        message = "exists, and is not a plan of mergepipe"
        raise OutputError.of("output.not-ours", path, message, "choose another name")


def _is_plan(path: Path) -> bool:
    return path.is_file() and f'"format": "{PLAN_NAME}/'.encode() in read_head(path, _HEAD_BYTES)
