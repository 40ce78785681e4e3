"""Makes parts of a merge from pickled values, in this process or another one."""

from __future__ import annotations

import pickle
from pathlib import Path

from mergepipe.engine.make_part import make_part
from mergepipe.engine.work import EngineOptions, PartResult
from mergepipe.storage.local import LocalStore

OPTIONS = EngineOptions(threads=2, memory_bytes=64 << 20)


def make_pickled(work_and_part: bytes, folder: Path) -> PartResult:
    """Make a part with nothing but its value and a store of its own."""
    work, part = pickle.loads(work_and_part)
    return make_part(work, part, folder, LocalStore(), OPTIONS)
