"""For the crash tests: a small merge with several files and logged units, and what must hold after any crash."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mergepipe
from mergepipe.engine.work import EngineOptions
from mergepipe.jobs.verify import verify_snapshot
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport
from mergepipe.runs import progress
from mergepipe.snapshots import work_log as work_log
from mergepipe.storage.location import Location
from support.disk_families import weights_digest
from support.families import TINY, write_family

SHARD_BYTES = 30_000
ENGINE = EngineOptions(2, 1 << 28)
RECIPE = """\
merge_method: {operator}
base_model: family/base
models:
- {{model: family/expert-1, parameters: {{weight: 0.6}}}}
- {{model: family/expert-2, parameters: {{weight: 0.4}}}}
dtype: bfloat16
"""


@dataclass(frozen=True, slots=True)
class CrashJob:
    """A merge into `out`, by force or not, under a budget or not."""

    root: Path
    wanted: str
    budget: str | None = None
    force: bool = False

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def out(self) -> Path:
        return self.root / "results" / "out"

    def run(self, *, resume: bool | None = None) -> MergeReport:
        """Merge, or resume what is there."""
        return mergepipe.merge(
            self.root / "recipe.yml",
            self.out,
            budget=self.budget,
            force=self.force,
            options=MergeOptions(threads=2, shard_bytes=SHARD_BYTES, home=self.home, resume=resume),
        )

    def check_whole(self) -> None:
        """What is visible is the new snapshot, to the byte, and nothing lies beside it."""
        assert weights_digest(self.out) == self.wanted
        report = verify_snapshot(
            Location.local(self.out), ENGINE, 0.0, None, started=time.perf_counter(), on_progress=None
        )
        assert (report.damages, report.notices) == ((), ())


def make_job(root: Path, *, budget: str | None = None, force: bool = False) -> CrashJob:
    """Write the inputs, and learn what the merge gives when nothing interferes."""
    write_family(root / "family", TINY, 2)
    (root / "recipe.yml").write_text(RECIPE.format(operator="linear"))
    job = CrashJob(root, "", budget, force)
    mergepipe.merge(
        root / "recipe.yml",
        root / "wanted",
        budget=budget,
        options=MergeOptions(shard_bytes=SHARD_BYTES, home=job.home),
    )
    return CrashJob(root, weights_digest(root / "wanted"), budget, force)


@contextlib.contextmanager
def recording_often() -> Iterator[None]:
    """Record every few kilobytes, whatever the time."""
    before = work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS
    work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = 10_000, 4096, math.inf
    try:
        yield
    finally:
        work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = before
