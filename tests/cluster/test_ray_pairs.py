"""Every pair of a kind and place of input, a place of output and options, merged on a Ray cluster: the local bytes.

Needs the environment of `make test-ray`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from support.all_pairs import Row, covering_rows, pair
from support.place_cells import Work, expect, run_in, weights_below, write_subjects
from support.place_rows import (
    commands_of,
    name_of,
    output_of,
    plain,
    result_of,
    tensors_of,
    write_variants,
    written_by,
)
from support.placed_models import PlacedModels, placed_models
from support.ray_merges import NEEDS_RAY, two_nodes

pytestmark = NEEDS_RAY

FACTORS: Final = {
    "verb": ("merge", "run"),
    "kind": ("plain", "quantised", "snapshot", "float32", "sharded", "packed", "adapted", "adapter"),
    "place": ("folder", "hub", "bucket"),
    "output": ("folder", "bucket"),
    "budget": ("none", "60%", "norm", "all"),
    "option": ("none", "json", "dtype"),
}
"""The values of each factor, as in `tests/places/test_pairs.py`."""
_NO_SUCH = {pair(("verb", "merge"), ("budget", "all")), pair(("verb", "run"), ("budget", "none"))}
_ALWAYS: Final = {"memory": "default", "parts": "none", "interruption": "none"}
ROWS: Final = [{**row, **_ALWAYS} for row in covering_rows(FACTORS, _NO_SUCH)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedModels]:
    """What the rows read, in folders of this machine, and the stand-ins of all servers."""
    root = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patched, placed_models(root) as placed:
        patched.setenv("MERGEPIPE_HOME", str(root / "home"))
        placed.lead(patched)
        write_subjects(root)
        write_variants(root)
        yield placed


@pytest.fixture(scope="module")
def nodes(models: PlacedModels) -> Iterator[Any]:  # noqa: ARG001 - it sets the environment of nodes
    """A cluster whose nodes find all servers."""
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def work(models: PlacedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """A working folder, and a home of its own: no row has the statistics of another."""
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    models.lead(monkeypatch)
    return Work(models, tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_row__on_a_cluster_has_the_bytes_of_the_plain_local_run(
    nodes: Any, work: Work, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    out = output_of(row, work)
    *planning, command = commands_of(row, work, out)
    for earlier in planning:
        expect(run_in(work.folder, earlier))
    on_cluster = ["--executor", "ray", "--address", nodes.address, "--shard-size", "40KB"]
    ran = expect(run_in(work.folder, [*command, *on_cluster]))
    if row["option"] == "json":
        ran.json()
    made = weights_below(written_by(row, out, work))
    assert len(made) > 2
    local = work.folder / "plain"
    local.mkdir()
    monkeypatch.setenv("MERGEPIPE_HOME", str(local / "home"))
    wanted, _ = result_of(plain(row), Work(work.models, local))
    assert tensors_of(made) == tensors_of(wanted)
