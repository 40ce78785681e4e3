"""Indices of packed experts in plans: counted as the expert's, read once, left alone where a budget is too small."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe import Plan, pack
from mergepipe.core.blocks import BF16
from mergepipe.errors import LimitError
from mergepipe.options import MergeOptions, PlanOptions
from mergepipe.planning.plan import NOTHING_READ
from mergepipe.storage.ledger import Ledger, Purpose
from support.disk_families import DiskFamily, weights_digest, write_family, write_recipe
from support.oracle import MergeCase
from support.public_names import BLOCK_ELEMENTS, INDEX_NAME
from support.rounding import decode, encode

CASES = {
    "average": MergeCase("task_arithmetic", (0.4, 0.6), (1.0, 1.0)),
    "ties": MergeCase("ties", (0.4, 0.6), (0.19, 0.1), normalize=True),
    "dare": MergeCase("dare_linear", (0.4, 0.6), (0.5, 0.5)),
}
SIZES = {"layers.0.up": BLOCK_ELEMENTS + 5000, "layers.1.norm": 700}


@pytest.fixture(name="family", scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> DiskFamily:
    rng = np.random.default_rng(0)
    base = {name: encode((rng.standard_normal(n) * 0.02).astype(np.float32), BF16) for name, n in SIZES.items()}
    models = [base]
    for std in (2e-4, 4e-4):
        steps = {name: (rng.standard_normal(n) * std).astype(np.float32) for name, n in SIZES.items()}
        models.append({name: encode(decode(base[name].tobytes(), BF16) + steps[name], BF16) for name in SIZES})
    folder = tmp_path_factory.mktemp("side")
    raw = write_family(folder / "raw", models)
    stores = pack(raw.places[0], raw.places[1:], folder / "stores", threads=2)
    return replace(raw, places=(raw.places[0], *(each.folder for each in stores.experts)))


@pytest.fixture(name="charges")
def watch_charges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Purpose, int]]:
    """Every charge of every ledger, in order."""
    found: list[tuple[str, Purpose, int]] = []
    charge = Ledger.charge

    def noted(ledger: Ledger, file: str, purpose: Purpose, nbytes: int) -> None:
        found.append((file, purpose, nbytes))
        charge(ledger, file, purpose, nbytes)

    monkeypatch.setattr(Ledger, "charge", noted)
    return found


def index_reads(charges: list[tuple[str, Purpose, int]]) -> list[tuple[str, Purpose, int]]:
    return [each for each in charges if each[0].endswith(INDEX_NAME)]


def recipe_of(family: DiskFamily, name: str, folder: Path) -> Path:
    return write_recipe(folder / f"{name}.yml", CASES[name], family)


BY_NORM = PlanOptions(select="norm")  # levels; a sample reads all experts at a position or none


def plan_of(family: DiskFamily, budget: str, folder: Path, name: str = "average") -> Plan:
    return mergepipe.plan(recipe_of(family, name, folder), budget, home=folder / "home", options=BY_NORM)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", ["30%", "100%"])
def test_merge__under_a_budget_reads_each_index_once_as_the_experts(
    family: DiskFamily, tmp_path: Path, charges: list[tuple[str, Purpose, int]], name: str, budget: str
) -> None:
    recipe = recipe_of(family, name, tmp_path)
    report = mergepipe.merge(
        recipe, tmp_path / "out", budget=budget, options=BY_NORM.common(MergeOptions, home=tmp_path / "home")
    )
    reads = index_reads(charges)
    sizes = {str(place / INDEX_NAME): (place / INDEX_NAME).stat().st_size for place in family.places[1:]}
    assert sorted(reads) == sorted((file, Purpose.EXPERT, size) for file, size in sizes.items())
    charged = sum(n for _, purpose, n in charges if purpose in (Purpose.EXPERT, Purpose.ANALYSIS))
    assert report.planned_bytes is not None
    assert report.budget_bytes is not None
    assert charged == report.expert_bytes + report.analysis_bytes <= report.planned_bytes <= report.budget_bytes


def test_plan__charges_whole_pages_of_each_index(family: DiskFamily, tmp_path: Path) -> None:
    plan = plan_of(family, "100%", tmp_path)
    for model, place in zip(plan.models[1:], family.places[1:], strict=True):
        assert model.side_bytes == -(-(place / INDEX_NAME).stat().st_size // 4096) * 4096
        stored = sum(file.stat().st_size for file in place.glob("*.bin"))
        assert stored + model.side_bytes <= model.planned_bytes
    assert plan.planned_bytes == plan.full_cost_bytes


def test_run__of_a_stored_plan_reads_the_index_again_and_within_the_plan(
    family: DiskFamily, tmp_path: Path, charges: list[tuple[str, Purpose, int]]
) -> None:
    plan = plan_of(family, "100%", tmp_path)
    assert len(index_reads(charges)) == 2
    charges.clear()
    report = mergepipe.run(plan, tmp_path / "out", catalog=False)
    assert len(index_reads(charges)) == 2
    assert report.expert_bytes + report.analysis_bytes <= plan.planned_bytes


BETWEEN = "16000B"  # two indices and a block, or one index and two


@pytest.mark.parametrize("name", CASES)
def test_plan__leaves_an_expert_alone_whose_index_the_budget_does_not_hold(
    family: DiskFamily,
    tmp_path: Path,
    charges: list[tuple[str, Purpose, int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    with pytest.raises(LimitError, match="the 8192B of all indices"):
        plan_of(family, "5000B", tmp_path, name)
    assert [file for file, _, _ in index_reads(charges)] == [str(family.places[1] / INDEX_NAME)]
    charges.clear()
    monkeypatch.setattr("mergepipe.jobs.plan.find_unread", lambda *_: frozenset({1}))
    plan = plan_of(family, BETWEEN, tmp_path, name)
    assert [file for file, _, _ in index_reads(charges)] == [str(family.places[1] / INDEX_NAME)]
    notice = next(each for each in plan.fallbacks if each.decision == "nothing of it is read")
    named = notice.where.removeprefix("expert '").removesuffix("'")
    assert (tmp_path / named).resolve() == family.places[2]  # as the recipe would name it, from where it lies
    assert "index" in notice.reason
    charges.clear()
    report = mergepipe.run(plan, tmp_path / "out", catalog=False)
    read = {file for file, purpose, _ in charges if purpose in (Purpose.EXPERT, Purpose.ANALYSIS)}
    assert not any(file.startswith(str(family.places[2])) for file in read)
    assert report.expert_bytes + report.analysis_bytes <= plan.planned_bytes <= int(BETWEEN[:-1])


def test_plan__of_a_useless_budget_names_one_that_is_useful(family: DiskFamily, tmp_path: Path) -> None:
    with pytest.raises(LimitError) as refusal:
        plan_of(family, "8193B", tmp_path)
    named = re.search(r"the smallest useful budget is (\d+)B", str(refusal.value))
    assert named is not None
    least_bytes = int(named.group(1))
    assert plan_of(family, f"{least_bytes}B", tmp_path).planned_bytes <= least_bytes
    with pytest.raises(LimitError):
        plan_of(family, f"{least_bytes - 1}B", tmp_path)


def test_plan__without_a_budget_has_no_notices_of_what_it_does_not_read(family: DiskFamily, tmp_path: Path) -> None:
    assert not any(fallback.decision == NOTHING_READ for fallback in plan_of(family, "0", tmp_path).fallbacks)


@pytest.mark.parametrize("budget", ["0", "0%"])
def test_merge__under_a_budget_that_holds_no_index_is_the_base_and_reads_no_index(
    family: DiskFamily, tmp_path: Path, charges: list[tuple[str, Purpose, int]], budget: str
) -> None:
    out = tmp_path / "out"
    report = mergepipe.merge(recipe_of(family, "average", tmp_path), out, budget=budget, home=tmp_path)
    assert index_reads(charges) == []
    assert report.expert_bytes + report.analysis_bytes == 0
    assert (weights_digest(out) == weights_digest(family.places[0])) or report.planned_bytes == 0
