"""What is told of a resumed run."""

from __future__ import annotations

import pytest
from benchmarks.tailor_resuming import Resumed

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
