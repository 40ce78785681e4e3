"""What is told of a resumed run."""

from __future__ import annotations

import pytest
from benchmarks.tailor_resuming import Resumed, print_table
from benchmarks.tailor_training import Setting

pytestmark = pytest.mark.transformers


def resumed(name: str, seed: int, *excess: float) -> Resumed:
    return Resumed(name, seed, (0, 50, 100), 0.5, 4.5, 4.25, excess)


@pytest.mark.parametrize(
    ("excess", "expected"),
    [
        ([0.0] * 10, 0),
        ([0.5] * 3 + [0.0] * 12, 3),  # 10 steps of nothing begin there
        ([0.08] + [0.0] * 9, 0),  # one step of ten counts for a tenth
        ([0.5] * 30, None),
        ([0.0] * 9, None),  # too few to say
    ],
)
def test_recovered_after__is_the_first_step_whose_next_ten_are_within_a_hundredth(
    excess: list[float], expected: int | None
) -> None:
    assert resumed("a", 1, *excess).recovered_after == expected


def test_print_table__tells_means_and_ranges_over_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(400, 50, 20, 1e-3, "constant")
    flat, falling = [0.2] * 5 + [0.0] * 15, [0.4] * 5 + [0.0] * 15
    print_table(setting, [resumed("a", 1, *flat), resumed("a", 2, *falling), Resumed("b", 1, (), None, 4.0, None, ())])
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert first == "| a | 50% | 2 of 3 (100) | 4.500 | +0.300 (+0.200..+0.400) | +0.000 | 5 |  | 4.250 |"
    assert second.startswith("| b |  |  | 4.000 |")
