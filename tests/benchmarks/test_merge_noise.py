"""What benchmarks.merge_noise says of losses under a budget beside losses by seed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.local_text import GENERAL, Domain
from benchmarks.merge_noise import (
    Budgeted,
    FullMerge,
    Noise,
    full_table,
    main,
    noise_of,
    read_budgeted,
    verdict_table,
    verdicts,
)
from benchmarks.packed_merging import main as packed_merging

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too

FULL = [
    FullMerge("ties", 0, 0, 3.0),
    FullMerge("ties", 1, 0, 3.02),
    FullMerge("dare_linear", 0, 0, 2.0),
    FullMerge("dare_linear", 0, 1, 2.4),
    FullMerge("dare_linear", 1, 0, 2.1),
]


def budgeted(form: str, losses: tuple[float, float], operator: str = "ties") -> list[Budgeted]:
    """Two families' merges at a budget of a tenth, after their full merges at 3."""
    full = [Budgeted(operator, family, "full", 1.0, 3.0) for family in range(2)]
    return full + [Budgeted(operator, family, form, 0.1, loss) for family, loss in enumerate(losses)]


def test_noise_of__is_over_families_at_one_seed_and_over_seeds_of_one_family() -> None:
    noise = noise_of("dare_linear", FULL)
    assert noise.training == pytest.approx(0.1 / 2**0.5)
    assert noise.merging == pytest.approx(0.4 / 2**0.5)


def test_noise_of__is_unknown_where_nothing_varies() -> None:
    assert noise_of("ties", FULL).merging is None
    assert noise_of("ties", FULL[:1]) == Noise(None, None)


def test_verdicts__compare_each_family_with_its_own_full_merge() -> None:
    (verdict,) = verdicts(FULL, budgeted("packed", (3.01, 2.994)))
    assert (verdict.operator, verdict.form, verdict.budget) == ("ties", "packed", 0.1)
    assert verdict.loss == pytest.approx(3.002)
    assert verdict.lost == pytest.approx(0.002)
    assert verdict.furthest == pytest.approx(0.01)
    assert verdict.is_within_noise is True


def test_verdicts__one_family_further_away_than_the_noise_is_not_within_it() -> None:
    (verdict,) = verdicts(FULL, budgeted("packed", (2.98, 3.02)))
    assert verdict.lost == pytest.approx(0)
    assert verdict.is_within_noise is False


def test_verdicts__say_nothing_where_the_noise_is_unknown() -> None:
    (verdict,) = verdicts(FULL[:1], budgeted("packed", (3.0, 3.0)))
    assert verdict.is_within_noise is None


@pytest.mark.parametrize("found", [budgeted("drop", (3.1, 3.1))[2:], budgeted("drop", (3.1, 3.1), "linear")])
def test_verdicts__need_a_full_merge(found: list[Budgeted]) -> None:
    with pytest.raises(ValueError, match=f"{found[0].operator}: no full merge"):
        verdicts(FULL, found)


def test_read_budgeted__takes_what_packed_merging_prints(tmp_path: Path) -> None:
    entry = {"operator": "ties", "form": "packed", "budget": 0.1, "read": 0.09, "error": 0.2, "loss": 3.5}
    (tmp_path / "printed").write_text(json.dumps([entry], indent=1) + "\n\n| operator | form |\n")
    assert read_budgeted(tmp_path / "printed", 1) == [Budgeted("ties", 1, "packed", 0.1, 3.5)]


def test_tables__leave_empty_what_was_not_measured() -> None:
    assert full_table(FULL).splitlines()[3:] == [
        "| dare_linear | 0 | 2.0000 | 2.1000 |",
        "| dare_linear | 1 | 2.4000 |  |",
    ]
    found = verdicts(FULL, budgeted("packed", (3.01, 3.0)))
    assert verdict_table(found).splitlines()[2:] == [
        "| ties | packed | 10.0% | 3.0050 | +0.0050 | 0.0100 | 0.0141 |  | yes |"
    ]


@pytest.mark.transformers
def test_main__measures_each_family_once_and_compares_it_with_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    families = [str(tmp_path / f"seed-{seed}") for seed in range(2)]
    train_two_families(tmp_path)
    capsys.readouterr()
    place = ["--work", str(tmp_path / "work"), "--experts", "2", "--operators", "ties", "dare_linear"]
    assert packed_merging(["budgets", *place, "--family", families[0], "--budgets", "0.3", "--heldout"]) == 0
    (tmp_path / "budgeted").write_text(capsys.readouterr().out)

    arguments = [*families, *place, "--full", str(tmp_path / "full.json"), "--budgeted", str(tmp_path / "budgeted")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    entries = json.loads((tmp_path / "full.json").read_text())
    full = {(e["operator"], e["family"], e["seed"]): e["loss"] for e in entries}
    dare = {("dare_linear", family, seed) for family in range(2) for seed in range(3)}
    assert full.keys() == {("ties", 0, 0), ("ties", 1, 0)} | dare
    assert len(set(full.values())) == len(full)
    own = {b.operator: b.loss for b in read_budgeted(tmp_path / "budgeted", 0) if b.form == "full"}
    assert own == {"ties": pytest.approx(full["ties", 0, 0]), "dare_linear": pytest.approx(full["dare_linear", 0, 0])}
    rows = [line for line in printed.splitlines() if "30.0%" in line]
    assert len(rows) == 2 * 4

    (tmp_path / "seed-0/expert-1/model.safetensors").unlink()
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed


def train_two_families(root: Path) -> None:
    """Two experts of one base, by two seeds."""
    from benchmarks.tiny_lm import LmShape, Schedule
    from benchmarks.trained_family import TrainedRequest, train_family

    shape = LmShape(vocab=300, hidden=32, layers=2, kv_heads=1, head_dim=16, intermediate=64, context=64)
    base = Schedule(steps=12, peak_rate=1e-2, batch=4, window_tokens=32, muon=True)
    request = TrainedRequest(2, 0, shape, base, replace(base, steps=6, peak_rate=2e-3, muon=False), 1)
    source = random.Random(0)
    domains = [
        Domain(name, " ".join(source.choices(words, k=3000)), " ".join(source.choices(words, k=1500)))
        for name, words in ((GENERAL, ["one", "two", "if"]), ("fruit", ["pear", "plum"]), ("code", ["if", "else"]))
    ]
    train_family(root / "seed-0", request, domains)
    other = replace(request, expert=replace(request.expert, seed=1))
    train_family(root / "seed-1", other, domains, base_of=root / "seed-0")
