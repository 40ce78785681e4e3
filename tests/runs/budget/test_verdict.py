"""Verdicts state what is missing, say what is worse than the base and what is not spent, by one scale everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from mergepipe.cli.render.explain_page import explain_page
from mergepipe.cli.render.merges import merge_table
from mergepipe.cli.render.sweep import sweep_table
from mergepipe.cli.render.sweep_page import sweep_page
from mergepipe.cli.render.verdicts import verdict_facts
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from support.disk_families import read_snapshot, write_single

GRAIN = 16_384
N_EXPERTS = 8


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and experts that change all but the first tensor, the last expert hardly; all of them were analyzed."""
    folder = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(5)
    base = {f"layers.{t}.w": rng.standard_normal(4 * GRAIN).astype(np.float32) for t in range(6)}
    write_single(folder / "base", base)
    for e in range(N_EXPERTS):
        size = 1e-6 if e == N_EXPERTS - 1 else 1e-2
        moved = {
            name: values
            if name == "layers.0.w"
            else values + size * rng.standard_normal(len(values)).astype(np.float32)
            for name, values in base.items()
        }
        write_single(folder / f"expert-{e}", moved)
    for name, experts, rest in (
        ("sum", range(N_EXPERTS), "merge_method: task_arithmetic\nparameters: {weight: 0.5}\n"),
        ("average", range(N_EXPERTS - 1), "merge_method: linear\nparameters: {weight: 1.0}\n"),
        ("ties", range(N_EXPERTS - 1), "merge_method: ties\nparameters: {weight: 1.0, density: 0.2}\n"),
    ):
        models = "".join(f"- model: expert-{e}\n" for e in experts)
        (folder / f"{name}.yml").write_text(f"{rest}base_model: base\nmodels:\n{models}")
    places = [folder / f"expert-{e}" for e in range(N_EXPERTS)]
    mergepipe.analyze(folder / "base", places, block_elements=GRAIN, options=RunOptions(home=folder / "home"))
    return folder


def merge(family: Path, recipe: str, out: Path, budget: str, **plan: Any) -> Any:
    options = MergeOptions(home=family / "home", plan=PlanOptions(block_elements=GRAIN, **plan), threads=2)
    return mergepipe.merge(family / f"{recipe}.yml", out, budget=budget, options=options)


def measured_error(family: Path, recipe: str, out: Path, tmp_path: Path) -> float:
    full = tmp_path / f"full-{recipe}"
    mergepipe.merge(family / f"{recipe}.yml", full, options=MergeOptions(catalog=False))
    merged, wanted, base = read_snapshot(out), read_snapshot(full), read_snapshot(family / "base")
    lost = sum(float(np.square(merged[name] - wanted[name]).sum()) for name in base)
    return float(np.sqrt(lost / sum(float(np.square(wanted[name] - base[name]).sum()) for name in base)))


def test_verdict__says_of_each_expert_what_is_missing_and_first_of_whom_nothing_is_there(
    family: Path, tmp_path: Path
) -> None:
    report = merge(family, "sum", tmp_path / "out", "25%")
    first, *others = report.verdict.experts
    assert (first.model, first.share) == ("expert-7", 0.0)  # though a sixth of its blocks equal the base
    assert all(0 < expert.share < 1 for expert in others)
    lines = [line for line in merge_table(report).splitlines() if line.startswith("expert ")]
    assert lines[0].endswith("expert-7: nothing of it is in the merge")
    assert all("of the blocks that it changes are missing" in line for line in lines[1:])
    page = explain_page(mergepipe.explain(tmp_path / "out", home=family / "home"))
    assert page.count("expert-7: nothing of it is in the merge") >= 2  # beside the verdict, and at its bar
    whole = merge(family, "sum", tmp_path / "whole", "100%").verdict
    assert [expert.share for expert in whole.experts] == [1.0] * N_EXPERTS


def test_verdict__tells_distances_and_no_gain(family: Path, tmp_path: Path) -> None:
    verdicts = [merge(family, "sum", tmp_path / budget, budget).verdict for budget in ("5%", "25%", "75%", "100%")]
    texts = " ".join(text for verdict in verdicts for _, text in verdict_facts(verdict))
    assert "gain" not in texts
    assert "retrieval" not in texts
    assert verdicts[-1].meaning == "close to the full merge"


def test_sweep__uses_the_scale_of_verdicts_and_names_experts_of_which_nothing_is_read(family: Path) -> None:
    report = mergepipe.sweep(
        family / "sum.yml", ["25%", "50%", "95%"], plan=PlanOptions(block_elements=GRAIN),
        options=RunOptions(home=family / "home", threads=2),
    )  # fmt: skip
    for text in (sweep_table(report), sweep_page(report)):
        assert "for an error of 0.25 (close to the full merge; measured" in " ".join(text.split())
        assert "25%: nothing of expert-7 is in the merge" in text


def test_verdict__of_renormalized_weights_that_make_it_worse_than_the_base_says_so(
    family: Path, tmp_path: Path
) -> None:
    report = merge(family, "average", tmp_path / "out", "20%", where_omitted="renormalize", select="random")
    measured = measured_error(family, "average", tmp_path / "out", tmp_path)
    assert measured > 1.05
    assert report.verdict.expected_error == pytest.approx(measured, rel=0.05)
    assert "worse than the base" in report.verdict.meaning
    assert "worse than the base" in (tmp_path / "out/README.md").read_text()
    sweep = mergepipe.sweep(
        family / "average.yml", ["20%"],
        plan=PlanOptions(block_elements=GRAIN, where_omitted="renormalize", select="random"),
        options=RunOptions(home=family / "home", threads=2),
    )  # fmt: skip
    assert "20%: worse than the base" in sweep_table(sweep)


def test_plan__of_renormalized_weights_is_never_expected_to_be_worse_under_a_larger_budget(family: Path) -> None:
    errors = []
    for share in range(5, 101, 5):
        options = PlanOptions(block_elements=GRAIN, where_omitted="renormalize")
        plan = mergepipe.plan(family / "average.yml", f"{share}%", home=family / "home", options=options)
        assert plan.outlook is not None
        errors.append(plan.outlook.expected_error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_verdict__says_what_of_a_budget_is_not_spent_and_why(family: Path, tmp_path: Path) -> None:
    report = merge(family, "average", tmp_path / "out", "25%", where_omitted="renormalize")
    verdict = report.verdict
    assert verdict.unspent_bytes == report.budget_bytes - report.planned_bytes > report.budget_bytes / 20
    assert verdict.unspent_reason == "reading more within this budget is expected to lose more of the full merge"
    facts = dict(verdict_facts(verdict))
    assert verdict.unspent_reason in facts["unspent"]
    assert verdict.larger_budget_bytes > report.budget_bytes  # it never recommends less than was asked for
    plan = json.loads((tmp_path / "out/mergepipe.json").read_text())["plan"]
    assert [each["decision"] for each in plan["fallbacks"] if each["where"] == "budget"] == [
        f"{verdict.unspent_bytes} of {report.budget_bytes} bytes are left unspent"
    ]
    assert merge(family, "sum", tmp_path / "spent", "25%").verdict.unspent_bytes == 0
