"""A killed budgeted merge of experts of which nothing was known is resumed with the plan that it was begun with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from crash_cases import recording_often

import mergepipe
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.staging import staging_directory
from mergepipe.snapshots.work_log import merge_state, read_work_log
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.crashes import Death, count_operations, run_killed
from support.disk_families import weights_digest, write_single

SMALL, LARGE, N_SMALL = 65_536, 1 << 19, 6
RECIPE = """\
merge_method: ties
base_model: base
models:
- {model: expert-0, parameters: {density: 0.2}}
- {model: expert-1, parameters: {density: 0.2}}
parameters: {weight: 1.0}
"""


@dataclass(frozen=True, slots=True)
class Family:
    """Small tensors that moved much and one large block that hardly moved: what the budget leaves over is known."""

    root: Path

    def run(self, *, resume: bool | None = None, spare_bytes: int = 900_000) -> MergeReport:
        """Merge all but the large block, with what a crash may waste to spare."""
        options = MergeOptions(
            threads=2, shard_bytes=300_000, home=self.root / "home", resume=resume, block_elements=LARGE
        )
        return mergepipe.merge(
            self.root / "recipe.yml", self.root / "results/out", budget=self.budget(spare_bytes), options=options
        )

    def budget(self, spare_bytes: int) -> str:
        """Return a budget for the small tensors and so much more."""
        return f"{2 * N_SMALL * SMALL * 4 + spare_bytes}B"

    def forget(self) -> None:
        """Remove outputs and statistics."""
        shutil.rmtree(self.root / "results", ignore_errors=True)
        shutil.rmtree(self.root / "home", ignore_errors=True)


@pytest.fixture
def family(tmp_path: Path) -> Family:
    rng = np.random.default_rng(5)
    base = {f"layers.{t}.w": rng.standard_normal(SMALL).astype(np.float32) for t in range(N_SMALL)}
    base["zz.large"] = rng.standard_normal(LARGE).astype(np.float32)
    write_single(tmp_path / "base", base)
    for e in range(2):
        moved = {
            name: (values + (1e-6 if name == "zz.large" else 0.01) * rng.standard_normal(len(values))).astype("f4")
            for name, values in base.items()
        }
        write_single(tmp_path / f"expert-{e}", moved)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    return Family(tmp_path)


def test_merge__unprepared_and_killed_is_resumed_with_its_own_plan(family: Family) -> None:
    out = family.root / "results/out"
    with recording_often():
        n_operations = len(count_operations(family.run))
        wanted, plan_digest = weights_digest(out), _plan_digest(out)
        n_resumed = 0
        for at in range(n_operations // 2, n_operations, n_operations // 6):
            family.forget()
            run_killed(family.run, at, Death.BEFORE)
            if out.exists():
                continue
            logged = read_work_log(staging_directory(out))
            state = None if logged is None else merge_state(logged)
            is_durable = state is not None and bool(state.digests)
            report = family.run()
            assert any("resumed" in notice for notice in report.notices) == is_durable
            n_resumed += is_durable
            if is_durable:
                assert (weights_digest(out), _plan_digest(out)) == (wanted, plan_digest)
    assert n_resumed > 0


def _plan_digest(out: Path) -> str | None:
    return read_manifest_value(LocalStore(), Location.local(out)).plan_digest
