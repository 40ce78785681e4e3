"""For the crash tests: a small merge with several files and journal records, and what must hold after any crash."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mergepipe
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import LimitError
from mergepipe.jobs.verify import verify_snapshot
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport
from mergepipe.runs.recovery import resume as resuming
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
            options=MergeOptions(
                threads=2,
                shard_bytes=SHARD_BYTES,
                home=self.home,
                resume=resume,
            ),
        )

    def run_after_crash(self) -> MergeReport:
        """Resume; where the budget does not cover what the crash may have read, begin anew with the whole budget."""
        try:
            return self.run()
        except LimitError as error:
            if self.budget is None or error.code != "resume.budget":
                raise
            return self.run(resume=False)

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
    before = resuming.INTERVAL_BYTES, resuming.RESERVED_BYTES, resuming.INTERVAL_SECONDS
    resuming.INTERVAL_BYTES, resuming.RESERVED_BYTES, resuming.INTERVAL_SECONDS = 10_000, 4096, math.inf
    try:
        yield
    finally:
        resuming.INTERVAL_BYTES, resuming.RESERVED_BYTES, resuming.INTERVAL_SECONDS = before
