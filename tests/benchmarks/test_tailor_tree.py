"""The checkpoints and recipes that composition is measured with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from benchmarks.tailor import N_UNITS, Pattern, patterns
from benchmarks.tailor_tree import checkpoint_name, scaled_shapes, write_checkpoint

from mergepipe.tailor import api
from mergepipe.tailor.formats.deepspeed import ZERO_FORMAT

PATTERNS = [pattern for pattern in patterns([2, 8, N_UNITS]) if pattern.units is not None]
_CHECKPOINTS = 8


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: f"{p.name}-{p.n_sources}")
def test_patterns__take_every_unit_at_most_once_and_something_of_every_source(pattern: Pattern) -> None:
    taken = Counter(unit for units in (pattern.units or {}).values() for unit in units)
    assert set(taken.values()) == {1}
    assert set(taken) <= set(range(N_UNITS))
    assert set(pattern.units or {}) | {pattern.n_sources - 1} == set(range(pattern.n_sources))


def test_write_checkpoint__is_one_that_every_pattern_composes(tmp_path: Path) -> None:
    size_bytes = 4_000_000
    pool = tmp_path / "pool"
    pool.write_bytes(bytes(range(256)) * (1 << 18))
    shapes = scaled_shapes(size_bytes)
    for index in range(_CHECKPOINTS):
        write_checkpoint(tmp_path / checkpoint_name(index), shapes, 2, 100 * (index + 1), pool)
    (found,) = api.inspect(tmp_path / checkpoint_name(0)).checkpoints
    assert (found.format, found.missing, found.step) == (ZERO_FORMAT, (), 100)
    assert sum(p.stat().st_size for p in (tmp_path / checkpoint_name(0)).iterdir()) == pytest.approx(
        size_bytes, rel=0.2
    )
    for pattern in (pattern for pattern in PATTERNS if pattern.n_sources <= _CHECKPOINTS):
        (tmp_path / "recipe.yml").write_text(pattern.recipe())
        report = api.check(tmp_path / "recipe.yml")
        assert len(report.plan.assignment.sources) == pattern.n_sources
