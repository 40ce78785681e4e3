"""A task that makes a part of a plan and waits in the middle, so that a test can end its node or process there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mergepipe.engine.make_part import make_part
from mergepipe.engine.output_parts import Part, PartResult
from mergepipe.engine.work import MergeWork
from mergepipe.errors import LimitError
from mergepipe.jobs import merge_on_ray
from mergepipe.runs import parts
from mergepipe.storage.contract import Store

PLACE = "MERGEPIPE_TEST_PLACE"
"""A folder: tasks write a file there that names their node and process, and go on when `go` lies in it."""


def make_slowly(payload: bytes) -> bytes:
    """Make a part as ever, but wait before each shard that reads experts, after its reading is on record."""
    parts.make_part = _waiting  # type: ignore[attr-defined, assignment]  # this process makes nothing else
    return merge_on_ray.make_part_of_plan(payload)


def _waiting(work: MergeWork, part: Part, folder: Path, store: Store, *more: Any) -> PartResult:
    import ray

    ledger = store.ledger
    if ledger.expert_limit_bytes == ledger.usage().expert_bytes:
        return make_part(work, part, folder, store, *more)
    place = Path(os.environ[PLACE])
    new = place / f"new-{os.getpid()}"
    new.write_text(str(os.getpid()))
    new.rename(place / f"at-{ray.get_runtime_context().get_node_id()}")
    while not (place / "go").exists():
        time.sleep(0.02)
    return make_part(work, part, folder, store, *more)


def refuse(payload: bytes) -> bytes:
    """Raise an error of ours."""
    raise LimitError.of("test.failure", payload.decode(), "fails")


def die(_: bytes) -> bytes:
    """End this process as a lack of memory would."""
    os._exit(1)


def name_node(_: bytes) -> bytes:
    """Return where this is, after a moment, so that every node gets a task."""
    import ray

    time.sleep(0.5)
    node: str = ray.get_runtime_context().get_node_id()
    return node.encode()
