"""A plan from the catalog to the output: the same everywhere, refused if inputs changed, sound if little is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from budget_cases import CASES, POLICIES, Setting, make_setting

import mergepipe
from mergepipe import Catalog
from mergepipe.core.blocks import F32
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, UnsupportedError
from mergepipe.options import MergeOptions, RunOptions
from support.budgets import GRAIN, TensorPlanOf, smallest_memory
from support.disk_families import weights_digest
from support.refusals import refuses

PLANNER = """
import sys
import mergepipe
from mergepipe import PlanOptions
recipe, home, *policies = sys.argv[1:]
for policy in policies:
    print(mergepipe.plan(recipe, "35%", home=home, select=policy, block_elements=16384).digest)
"""


def is_within(setting: Setting, plan_budget: str, name: str) -> bool:
    """Whether a merge under a budget keeps to it, whatever is known."""
    report = mergepipe.merge(setting.recipe, setting.folder / name, budget=plan_budget, home=setting.home)
    assert report.planned_bytes is not None
    assert report.budget_bytes is not None
    return report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes


@pytest.mark.thorough
def test_plan__has_the_same_digest_in_every_process(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"])
    setting.analyze()
    digests = [setting.plan("35%", policy).digest for policy in POLICIES]
    for hash_seed in ("0", "12345"):
        found = subprocess.run(
            [sys.executable, "-c", PLANNER, str(setting.recipe), str(setting.home), *POLICIES],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        assert found.stdout.split() == digests


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear", "ties", "dare_ties"])
@pytest.mark.parametrize("share", [0.3, 1.0], ids=["some", "all"])
def test_plan__without_statistics_records_it_and_is_sound(tmp_path: Path, name: str, share: float) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    poor = setting.forgetful("poor", share)
    for budget in ("25%", "75%"):
        plan = poor.plan(budget)
        assert any("no statistics" in fallback.reason for fallback in plan.fallbacks)
        report = mergepipe.run(plan, tmp_path / f"out-{budget}", home=poor.home)
        assert 0 < report.expert_bytes + report.analysis_bytes <= plan.planned_bytes <= plan.budget_bytes


def test_plan__of_a_file_changed_since_its_analysis_does_not_use_its_statistics(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["task_arithmetic"])
    setting.analyze()
    known = setting.plan("40%")
    for file in setting.family.places[1].rglob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    with refuses(UnsupportedError, "plan.unsupported", "expert1': has no statistics and others have"):
        setting.plan("40%")
    assert known.fallbacks == ()
    assert weights_digest(setting.run(setting.plan("100%"), "all")) == weights_digest(setting.full())
    plan = setting.plan("40%", "random")
    assert [f.where for f in plan.fallbacks if "no statistics" in f.reason] == ["expert './models/expert1'"]
    report = mergepipe.run(plan, tmp_path / "out", home=setting.home)
    assert report.expert_bytes <= plan.planned_bytes <= plan.budget_bytes


def _touch(place: Path) -> None:
    for file in place.rglob("*.safetensors"):
        os.utime(file)


def _alter(place: Path) -> None:
    file = sorted(place.rglob("*.safetensors"))[0]
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")


def _truncate(place: Path) -> None:
    file = sorted(place.rglob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size - 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (_touch, (ConflictError,)),
        (_alter, (ConflictError,)),
        (_truncate, (CorruptError,)),
        (shutil.rmtree, (NotFoundError,)),
    ],
    ids=["touched", "altered", "truncated", "gone"],
)
@pytest.mark.parametrize("victim", [0, 1], ids=["base", "expert"])
def test_run__of_a_plan_whose_inputs_changed_is_refused(
    tmp_path: Path, change: Callable[[Path], None], kinds: tuple[type[MergePipeError], ...], victim: int
) -> None:
    setting = make_setting(tmp_path, CASES["ties"])
    setting.analyze()
    plan = setting.plan("40%")
    change(setting.family.places[victim])
    with pytest.raises(kinds) as caught:
        mergepipe.run(plan, tmp_path / "results" / "out", home=setting.home)
    assert not isinstance(caught.value, ConflictError) or caught.value.code == "input.changed"
    assert not (tmp_path / "results").exists()


def test_catalog__that_cannot_be_used_stops_plans_but_not_merges(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"])
    setting.analyze()
    plan = setting.plan("40%")
    shutil.rmtree(setting.home)
    setting.home.write_text("a file where the folder should be")
    with refuses(MergePipeError, "catalog.io"):
        setting.plan("40%")
    report = mergepipe.merge(setting.recipe, tmp_path / "merged", home=setting.home)
    assert any("catalog is not used" in notice for notice in report.notices)
    assert weights_digest(tmp_path / "merged") == weights_digest(setting.full())
    report = mergepipe.run(plan, tmp_path / "planned", home=setting.home)
    assert report.notices
    assert report.expert_bytes <= plan.planned_bytes
    assert is_within(setting, "30%", "budgeted")
    assert setting.home.read_text() == "a file where the folder should be"


def test_catalog__with_a_damaged_record_stops_no_merge_and_records_it(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, CASES["ties"])
    options = MergeOptions(home=setting.home)
    assert not mergepipe.merge(setting.recipe, tmp_path / "first", options=options).notices
    (record,) = (setting.home / "snapshots").iterdir()
    record.write_text("no record")
    assert not mergepipe.merge(setting.recipe, tmp_path / "merged", options=options).notices
    assert record.read_text() == "no record"
    record.unlink()
    assert [row.path for row in Catalog(setting.home).snapshots()] == [tmp_path / "merged"]


@pytest.mark.parametrize("name", ["ties", "slerp"])
def test_plan__of_tensors_above_the_memory_cap_reads_nothing_twice(tmp_path: Path, name: str) -> None:
    setting = make_setting(tmp_path, CASES[name], plans=(TensorPlanOf("w", (9 * GRAIN + 1,), F32, (F32,)),))
    plan, refused = setting.plan("100%"), tmp_path / "refused"  # nothing is known: cuts and products must be worked out
    small = RunOptions(memory_bytes=smallest_memory(plan, refused), home=setting.home)
    reports = [
        mergepipe.run(plan, tmp_path / "small", options=small),
        mergepipe.run(plan, tmp_path / "large", home=setting.home),
    ]
    for report in reports:
        assert report.analysis_bytes == 0
        assert report.expert_bytes <= plan.planned_bytes
    assert weights_digest(tmp_path / "small") == weights_digest(tmp_path / "large") == weights_digest(setting.full())
    assert reports[0].base_bytes > reports[1].base_bytes  # the base is read again
