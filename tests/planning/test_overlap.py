"""What experts have in common, told from statistics, against float64 numpy; in reports of analyses and explanations."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.cli.pages import heat_maps
from mergepipe.cli.printing import report_text
from mergepipe.reports import Overlap
from support.budgets import GRAIN
from support.disk_families import DiskFamily, write_family
from support.model_folders import recipe_of

LAYERS = ("0", "10", "2", "")
N_BLOCKS = 24


def make_family(folder: Path) -> DiskFamily:
    """A base and four experts: two alike, one against them that changes fewer elements, one equal to the first."""
    rng = np.random.default_rng(3)
    names = [f"model.layers.{layer}.w" if layer else "model.embed.weight" for layer in LAYERS]
    base = {name: rng.standard_normal(N_BLOCKS * GRAIN).astype(np.float32) for name in names}
    common = {name: rng.standard_normal(N_BLOCKS * GRAIN) for name in names}

    def expert(sign: float, share: float) -> dict[str, np.ndarray]:
        return {
            name: base_N + np.where(
                rng.random(len(base_N)) < share, 0.01 * (sign * common[name] + rng.standard_normal(len(base_N))), 0
            ).astype(np.float32)
            for name, base_N in base.items()
        }  # fmt: skip

    first = expert(1, 1.0)
    return write_family(folder, [base, first, expert(1, 0.8), expert(-1, 0.3), first])


def tensor_of(layer: str) -> str:
    return f"model.layers.{layer}.w" if layer else "model.embed.weight"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> DiskFamily:
    return make_family(tmp_path_factory.mktemp("overlap"))


def test_overlaps__are_those_of_the_deltas_within_what_they_state(family: DiskFamily, tmp_path: Path) -> None:
    report = mergepipe.analyze(family.places[0], family.places[1:], home=tmp_path, block_elements=GRAIN, threads=2)
    names = [Path(place).name for place in family.places[1:]]
    pairs = list(combinations(range(4), 2))
    layers = ("0", "2", "10", "")
    assert [(x.first, x.second, x.layer) for x in report.overlaps] == [
        (names[a], names[b], layer) for a, b in pairs for layer in layers
    ]
    base, *experts = family.models
    surprises: list[float] = []
    for overlap, (a, b) in zip(report.overlaps, [pair for pair in pairs for _ in layers], strict=True):
        name = tensor_of(overlap.layer)
        one_N, other_N = (experts[e][name].astype(np.float64) - base[name] for e in (a, b))
        norms = np.linalg.norm(one_N), np.linalg.norm(other_N)
        assert overlap.norms == pytest.approx(norms, rel=1e-6)
        assert overlap.changed == (int(np.count_nonzero(one_N)), int(np.count_nonzero(other_N)))
        both = np.count_nonzero(np.logical_and(one_N, other_N))
        assert overlap.both_least <= both <= overlap.both_most
        assert overlap.both == pytest.approx(both, rel=0.02)
        cosine = one_N @ other_N / (norms[0] * norms[1])
        if {a, b} == {0, 3}:
            assert overlap.cosine == pytest.approx(1)
            assert overlap.both == overlap.both_least == both
        else:
            surprises.append(float((overlap.cosine - cosine) / overlap.cosine_error))
    assert max(map(abs, surprises)) < 4
    assert 0.5 < np.std(surprises) < 1.5


def test_overlap__of_gaussian_deltas_tells_the_share_of_equal_signs() -> None:
    rng = np.random.default_rng(0)
    one_N, noise_N = rng.standard_normal((2, 200_000))
    for cosine in (-0.9, -0.3, 0.0, 0.5, 1.0):
        other_N = cosine * one_N + np.sqrt(1 - cosine**2) * noise_N
        assert overlap("0", cosine).same_sign == pytest.approx((one_N * other_N > 0).mean(), abs=0.005)


def overlap(layer: str, cosine: float, norm: float = 1.0) -> Overlap:
    return Overlap(
        first="a", second="b", layer=layer, norms=(norm, norm), cosine=cosine, cosine_error=0.1, changed=(60, 80),
        both=48.0, both_least=40, both_most=60,
    )  # fmt: skip


def test_overlap__of_layers_together_is_that_of_the_joined_deltas() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal((2, 50)) * scale for scale in (1.0, 3.0, 0.2)]
    each = [
        Overlap(
            first="a", second="b", layer=str(i), norms=(float(np.linalg.norm(a)), float(np.linalg.norm(b))),
            cosine=float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), cosine_error=0.1, changed=(50, 50), both=50.0,
            both_least=50, both_most=50,
        )
        for i, (a, b) in enumerate(parts)
    ]  # fmt: skip
    a, b = np.concatenate(parts, axis=1)
    whole = Overlap.over(each)
    assert whole.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert whole.norms == pytest.approx((np.linalg.norm(a), np.linalg.norm(b)))
    assert (whole.changed, whole.both, whole.shared(whole.both)) == ((150, 150), 150.0, 1.0)
    nothing = Overlap.over([overlap("0", 0.0, norm=0.0)])
    assert (nothing.cosine, nothing.cosine_error) == (0.0, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [None, "40%"])
def test_explain__tells_what_analyze_told_once_experts_are_analyzed(
    family: DiskFamily, tmp_path: Path, budget: str | None
) -> None:
    base, *experts = map(str, family.places)
    recipe = recipe_of("linear", {place: {"weight": 0.3} for place in experts}, base)
    mergepipe.merge(recipe, tmp_path / "before", home=tmp_path / "home")
    assert mergepipe.explain(tmp_path / "before", home=tmp_path / "home").overlaps == ()
    told = mergepipe.analyze(base, experts, home=tmp_path / "home", block_elements=GRAIN, threads=2)
    mergepipe.merge(recipe, tmp_path / "after", budget=budget, home=tmp_path / "home")
    explanation = mergepipe.explain(tmp_path / "after", home=tmp_path / "home")
    assert [replace(x, first="", second="") for x in explanation.overlaps] == [
        replace(x, first="", second="") for x in told.overlaps
    ]
    again = mergepipe.analyze(base, experts, home=tmp_path / "home", block_elements=GRAIN)
    assert again.overlaps == told.overlaps
    assert report_text(told).count("same sign") == report_text(explanation).count("same sign") == 6


def test_heat_maps__have_a_row_for_each_pair_and_a_cell_for_each_layer() -> None:
    parts = [overlap("0", 0.5), overlap("1", -0.25), overlap("", 0.0)]
    cosines, shared = heat_maps(parts)
    assert (cosines.title[:7], shared.title[:8]) == ("Cosines", "Elements")
    ((label, cells),) = cosines.rows
    assert label.startswith("a, b: cosine 0.08 ± 0.06, same sign")
    assert [(cell.layer, cell.value) for cell in cells] == [("0", 0.5), ("1", -0.25), ("", 0.0)]
    assert re.match(
        r"layer 1: cosine -0.25 ± 0.10, same sign 42 %, changed by both 52.2 % \(40 % to 75 %\)", cells[1].title
    )
    assert (cosines.low, cosines.high) == (-0.5, 0.5)
    assert shared.low == 0.0 < max(cell.value for _, cells in shared.rows for cell in cells) <= shared.high
    assert heat_maps(()) == []
