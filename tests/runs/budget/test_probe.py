"""A budgeted merge of experts of which nothing is known samples them first, within the budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from mergepipe.errors import LimitError
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.planning.plan_json import parse_plan
from mergepipe.runs.budget import probe
from support.disk_families import read_snapshot, write_single
from support.oracle import reaching

GRAIN = 16_384
N_TENSORS, N_EXPERTS = 6, 3


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and experts whose tensors moved by very different amounts."""
    folder = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(3)
    base = {f"layers.{t}.w": rng.standard_normal(8 * GRAIN).astype(np.float32) for t in range(N_TENSORS)}
    write_single(folder / "base", base)
    for e in range(N_EXPERTS):
        moved = {
            name: (values + rng.lognormal(-6, 1.5) * rng.standard_normal(len(values))).astype(np.float32)
            for name, values in base.items()
        }
        write_single(folder / f"expert-{e}", moved)
    for density in ("0.2", "0.37"):
        models = "".join(f"  - {{model: expert-{e}, parameters: {{density: {density}}}}}\n" for e in range(N_EXPERTS))
        text = f"merge_method: ties\nbase_model: base\nmodels:\n{models}parameters: {{weight: 1.0}}\n"
        (folder / f"ties-{density}.yml").write_text(text)
    models = "".join(f"  - {{model: expert-{e}, parameters: {{weight: {10.0 ** (-9 * e)}}}}}\n" for e in range(2))
    (folder / "skewed.yml").write_text(f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{models}")
    return folder


def _merge(family: Path, out: Path, home: Path, budget: str | None, density: str = "0.2", **plan: Any) -> Any:
    options = MergeOptions(home=home, plan=PlanOptions(block_elements=GRAIN, **plan), threads=2)
    return mergepipe.merge(family / f"ties-{density}.yml", out, budget=budget, options=options)


def _error(family: Path, out: Path, full: Path) -> float:
    merged, wanted, base = read_snapshot(out), read_snapshot(full), read_snapshot(family / "base")
    lost = sum(float(np.square(merged[name] - wanted[name]).sum()) for name in base)
    return float(np.sqrt(lost / sum(float(np.square(wanted[name] - base[name]).sum()) for name in base)))


def test_merge__without_statistics_comes_close_to_the_analysed_plan(family: Path, tmp_path: Path) -> None:
    home = tmp_path / "analysed"
    _merge(family, tmp_path / "full", tmp_path / "none", None)
    experts = [family / f"expert-{e}" for e in range(N_EXPERTS)]
    mergepipe.analyze(family / "base", experts, block_elements=GRAIN, options=RunOptions(home=home))
    for budget in ("10%", "25%", "50%"):
        _merge(family, tmp_path / f"a{budget}", home, budget)
        report = _merge(family, tmp_path / f"p{budget}", tmp_path / f"home{budget}", budget)
        assert report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes
        analysed, probed = (_error(family, tmp_path / f"{kind}{budget}", tmp_path / "full") for kind in "ap")
        assert probed <= 1.25 * analysed
    unprobed = _merge(family, tmp_path / "unprobed", tmp_path / "other", "25%", probe=False)
    advice = "\n".join(unprobed.notices)
    assert "nothing is known of tensors, and what is read of them is spread evenly: `mergepipe analyze" in advice
    assert "estimates" not in advice
    assert _error(family, tmp_path / "unprobed", tmp_path / "full") > 1.5 * probed


def test_merge__that_probes_says_so_and_charges_its_samples_each_time(family: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = _merge(family, tmp_path / "first", home, "25%")
    plan = json.loads((tmp_path / "first/mergepipe.json").read_text())["plan"]
    assert sum("known from a sample" in each["decision"] for each in plan["fallbacks"]) == N_EXPERTS
    assert all(each["side_bytes"] > 0 for each in plan["models"] if each["role"] == "expert")
    (advice,) = (n for n in first.notices if n.startswith("the plan is made from estimates: `mergepipe analyze"))
    assert "once (what 2 merges under this budget save), and" in advice  # 4 models, less than a quarter of 3 read
    _merge(family, tmp_path / "second", home, "25%")
    again = json.loads((tmp_path / "second/mergepipe.json").read_text())["plan"]
    assert again["digest"] == plan["digest"]


def test_merge__for_a_target_error_needs_no_preparation(family: Path, tmp_path: Path) -> None:
    full = _merge(family, tmp_path / "full", tmp_path / "none", None)
    options = MergeOptions(home=tmp_path / "home", plan=PlanOptions(block_elements=GRAIN))
    report = mergepipe.merge(family / "ties-0.2.yml", tmp_path / "out", target_error="40%", options=options)
    assert 0 < report.expert_bytes + report.analysis_bytes < 0.9 * full.expert_bytes
    assert _error(family, tmp_path / "out", tmp_path / "full") < 0.5


def test_merge__of_very_many_blocks_samples_none(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_BLOCKS", 2 * N_TENSORS * N_EXPERTS)
    report = _merge(family, tmp_path / "out", tmp_path / "home", "50%")
    plan = json.loads((tmp_path / "out/mergepipe.json").read_text())["plan"]
    assert not any("known from a sample" in fallback["decision"] for fallback in plan["fallbacks"])
    assert 0 < report.expert_bytes <= plan["budget_bytes"]


def test_merge__of_many_blocks_samples_a_part_of_them(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = []
    monkeypatch.setattr(probe, "MOST_OF_EVERYTHING", 1.0)  # so that this small family is sampled densely
    monkeypatch.setattr(probe, "MOST_OF_BUDGET", 0.9)
    for most in (probe.MOST_SAMPLES, N_TENSORS * N_EXPERTS):
        monkeypatch.setattr(probe, "MOST_SAMPLES", most)
        _merge(family, tmp_path / f"out-{most}", tmp_path / f"home-{most}", "50%")
        plan = json.loads((tmp_path / f"out-{most}/mergepipe.json").read_text())["plan"]
        assert sum("known from a sample" in fallback["decision"] for fallback in plan["fallbacks"]) == N_EXPERTS
        sampled.append(sum(model.get("side_bytes", 0) for model in plan["models"]))
    assert 0 < sampled[1] < sampled[0]


def test_merge__of_everything_probes_nothing_and_is_the_full_merge(family: Path, tmp_path: Path) -> None:
    full = _merge(family, tmp_path / "full", tmp_path / "home", None)
    report = _merge(family, tmp_path / "all", tmp_path / "home", "100%")
    assert report.expert_bytes == full.expert_bytes
    assert _error(family, tmp_path / "all", tmp_path / "full") == 0.0
    assert report.verdict.expected_error == 0.0
    assert not any("mergepipe analyze" in notice for notice in report.notices)


@pytest.mark.parametrize("density", ["0.2", "0.37"])
def test_plan__any_density_is_planned_by_blocks_with_an_error_of_its_share(
    family: Path, tmp_path: Path, density: str
) -> None:
    home = tmp_path / "home"
    experts = [family / f"expert-{e}" for e in range(N_EXPERTS)]
    mergepipe.analyze(family / "base", experts, block_elements=GRAIN, options=RunOptions(home=home))
    plan = mergepipe.plan(family / f"ties-{density}.yml", "30%", home=home, options=PlanOptions(block_elements=GRAIN))
    assert not any("read whole" in each.decision for each in plan.fallbacks)
    notices = [each for each in plan.fallbacks if "histograms" in each.decision]
    assert len(notices) == (0 if density == "0.2" else N_EXPERTS)
    base = read_snapshot(family / "base")
    for tensor in plan.tensors:
        for e, access in enumerate(tensor.access):
            if access.cut is None:
                continue
            delta_N = (read_snapshot(family / f"expert-{e}")[tensor.name] - base[tensor.name]).reshape(-1)
            assert abs(float(reaching(delta_N, access.cut).mean()) - float(density)) < 0.002


def test_merge__strict_refuses_an_expert_of_which_nothing_is_read(family: Path, tmp_path: Path) -> None:
    plan = PlanOptions(block_elements=GRAIN)
    options = MergeOptions(home=tmp_path / "home", plan=plan)
    report = mergepipe.merge(family / "skewed.yml", tmp_path / "out", budget="20%", options=options)
    assert [notice for notice in report.notices if "'expert-1': nothing of it is read" in notice]
    assert report.verdict is not None
    assert report.verdict.unread == ("expert 'expert-1'",)
    assert "Warning: nothing was read of" in (tmp_path / "out/README.md").read_text()
    for strict in (replace(options, strict=True), replace(options, plan=replace(plan, strict=True))):
        with pytest.raises(LimitError) as caught:
            mergepipe.merge(family / "skewed.yml", tmp_path / "strict", budget="20%", options=strict)
        assert caught.value.code == "plan.expert-unread"
    assert not (tmp_path / "strict").exists()


def test_merge__under_a_budget_ends_with_a_verdict(family: Path, tmp_path: Path) -> None:
    report = _merge(family, tmp_path / "out", tmp_path / "home", "25%")
    verdict = report.verdict
    assert verdict.expected_error is not None
    assert 0 < verdict.larger_expected_error < verdict.expected_error < 1
    assert report.budget_bytes < verdict.larger_budget_bytes < 2 * report.budget_bytes
    assert {expert.model for expert in verdict.experts} == {f"expert-{e}" for e in range(N_EXPERTS)}
    assert all(0 < expert.share < 1 for expert in verdict.experts)
    assert verdict.meaning == "a part of the merge"
    outlook = json.loads((tmp_path / "out/mergepipe.json").read_text())["plan"]["outlook"]
    assert outlook["expected_error"] == verdict.expected_error
    card = (tmp_path / "out/README.md").read_text()
    assert f"{verdict.expected_error:g}" in card
    assert "`expert-0`" in card.split("## Budget")[1]
    whole = _merge(family, tmp_path / "all", tmp_path / "home", "100%").verdict
    assert whole.expected_error == 0.0
    assert "close to the full merge" in whole.meaning
    assert _merge(family, tmp_path / "full", tmp_path / "home", None).verdict is None


def test_plan__with_an_outlook_survives_json(family: Path, tmp_path: Path) -> None:
    plan = mergepipe.plan(
        family / "ties-0.2.yml", "30%", home=tmp_path / "home", options=PlanOptions(block_elements=GRAIN)
    )
    assert plan.outlook is not None
    assert parse_plan(plan.to_json(), Path("plan")) == plan
