"""Verdicts state what is read and what is missing of whom, and nothing of a gain that was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from mergepipe.cli.pages import explain_page, sweep_page
from mergepipe.cli.printing import report_text
from mergepipe.options import MergeOptions, RunOptions
from support.disk_families import write_single

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
    options = MergeOptions(home=family / "home", block_elements=GRAIN, **plan, threads=2)
    return mergepipe.merge(family / f"{recipe}.yml", out, budget=budget, options=options)


def test_verdict__says_of_each_expert_what_is_missing_and_first_of_whom_nothing_is_there(
    family: Path, tmp_path: Path
) -> None:
    report = merge(family, "sum", tmp_path / "out", "25%", select="norm")
    first, *others = report.verdict.experts
    assert (first.model, first.share) == ("expert-7", 0.0)  # though a sixth of its blocks equal the base
    assert all(0 < expert.share < 1 for expert in others)
    lines = [line for line in report_text(report).splitlines() if line.startswith("expert ")]
    assert lines[0].endswith("expert-7: nothing of it is in the merge")
    assert all("of the blocks that it changes are missing" in line for line in lines[1:])
    page = explain_page(mergepipe.explain(tmp_path / "out", home=family / "home"))
    assert page.count("expert-7: nothing of it is in the merge") >= 2  # beside the verdict, and at its bar
    whole = merge(family, "sum", tmp_path / "whole", "100%").verdict
    assert [expert.share for expert in whole.experts] == [1.0] * N_EXPERTS


def test_verdict__states_policy_share_and_where_gains_were_measured(family: Path, tmp_path: Path) -> None:
    verdict = merge(family, "sum", tmp_path / "out", "25%", select="norm").verdict
    assert (verdict.policy, verdict.is_full, verdict.measured) == ("norm", False, "docs/benchmarks/trained.md")
    assert 0 < verdict.planned_bytes <= verdict.full_bytes / 4
    assert "Nothing is known of this one" in (tmp_path / "out/README.md").read_text()
    sample = merge(family, "sum", tmp_path / "sample", "25%").verdict
    assert sample.measured == "docs/benchmarks/rules.md"
    whole = merge(family, "sum", tmp_path / "whole", "100%").verdict
    assert whole.is_full
    assert "this is the full merge" in (tmp_path / "whole/README.md").read_text()


def test_sweep__names_experts_of_which_nothing_is_read(family: Path) -> None:
    report = mergepipe.sweep(
        family / "sum.yml", ["25%"], select="norm", block_elements=GRAIN,
        options=RunOptions(home=family / "home", threads=2),
    )  # fmt: skip
    for text in (report_text(report), sweep_page(report)):
        assert "25%: nothing of expert-7 is in the merge" in text
