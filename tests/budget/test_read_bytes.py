"""Expert bytes of budgeted runs as the operating system counts them: within the plan, as reported, as recorded.

The record is tests/golden/surface/read-bytes; `pytest tests/budget/test_read_bytes.py --update-goldens` writes it anew.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from budget_cases import CASES, Setting, make_setting
from tracing import STRACE, traced_server

from mergepipe import pack
from mergepipe.core.blocks import BF16
from support.budgets import AWKWARD, GRAIN, TensorPlanOf
from support.disk_families import write_recipe
from support.goldens import Goldens

RUNS = (
    ("linear", "norm", "20%", False), ("linear", "conflict", "60%", False), ("linear", "random", "35%", True),
    ("task_arithmetic", "sample", "50%", False), ("task_arithmetic", "norm", "150kB", True),
    ("ties", "norm", "30%", True), ("ties", "sample", "25%", False), ("dare_linear", "norm", "10%", False),
    ("dare_ties", "norm", "45%", True), ("dare_ties", "random", "0", False), ("slerp", "norm", "100%", False),
)  # fmt: skip
"""Operator, policy, budget, and whether the experts are packed."""
PACKED_GRAIN = 1 << 18
WIDE = TensorPlanOf("layers.9.wide", (600_001,), BF16, (BF16,), frozen_share=0.2)


def make_settings(folder: Path, operator: str) -> dict[bool, Setting]:
    """A family with its statistics; the same with its experts packed."""
    setting = make_setting(folder, CASES[operator], plans=(*AWKWARD, WIDE))
    base, *experts = setting.family.places
    stores = [expert.folder for expert in pack(base, experts, folder / "stores", threads=2).experts]
    family = replace(setting.family, places=(base, *stores))
    packed = replace(setting, family=family, recipe=write_recipe(folder / "packed.yml", setting.case, family))
    setting.analyze()
    packed = packed.with_home("packed-home")
    packed.analyze(PACKED_GRAIN)
    return {False: setting, True: packed}


@pytest.mark.thorough
def test_expert_bytes__of_budgeted_runs_are_what_the_system_counts(tmp_path: Path, goldens: Goldens) -> None:
    trial = shutil.which("strace") and subprocess.run([*STRACE, "-e", "trace=none", "true"], check=False).returncode
    if trial != 0:
        pytest.skip("strace may not trace here")
    settings = {name: make_settings(tmp_path / name, name) for name in dict.fromkeys(run[0] for run in RUNS)}
    rows = ["operator policy budget experts: budgeted bytes, planned, counted by the system"]
    with traced_server(tmp_path) as server:
        for number, (operator, policy, budget, is_packed) in enumerate(RUNS):
            setting = settings[operator][is_packed]
            plan = setting.plan(budget, policy, block_elements=PACKED_GRAIN if is_packed else GRAIN)
            for file in (file for place in setting.family.places for file in (place, *place.rglob("*"))):
                if file.is_file():
                    file.read_bytes()  # of what is not in memory whole pages are read
            path = tmp_path / f"{number}.plan.json"
            path.write_bytes(plan.to_json())
            traced = server.run(path, tmp_path / f"out-{number}", setting.home)
            counted = sum(traced.tensor_bytes(place) for place in setting.family.places[1:])
            assert traced.answer["error"] is None
            assert counted == traced.answer["expert"] + traced.answer["analysis"]
            assert counted <= plan.planned_bytes <= plan.budget_bytes
            name = f"{operator} {policy} {budget} {'packed' if is_packed else 'plain'}"
            rows.append(f"{name}: {plan.budget_bytes}, {plan.planned_bytes}, {counted}")
    goldens.check("read-bytes", {"runs": "\n".join([*rows, ""])})
