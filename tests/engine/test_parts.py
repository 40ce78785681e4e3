"""The parts of an output: how its shards are dealt to them, and what is told while one is made.

That parts make the bytes of the whole, whoever makes which, is tested of `run_part` in `tests/jobs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.engine.make_part import make_part
from mergepipe.engine.observer import Observer
from mergepipe.engine.output_parts import split, split_sizes
from mergepipe.engine.work import EngineOptions, plan_output
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.work import merge_work
from mergepipe.storage.local import LocalStore
from support.disk_families import make_models, write_family
from support.local_models import open_recipe


def test_make_part__reports_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergepipe.engine.pipeline.TICK_SECONDS", 0.0)  # a report at every event
    base, *experts = map(str, write_family(tmp_path / "family", make_models(3)).places)
    models = [{"model": expert, "parameters": {"weight": 0.4}} for expert in experts]
    recipe, out, store = tmp_path / "recipe.yml", tmp_path / "out", LocalStore()
    recipe.write_text(yaml.safe_dump({"merge_method": "linear", "base_model": base, "models": models}))
    inputs = open_recipe(recipe, store)
    output = plan_output(inputs.resolution.tasks, 30_000)
    work, part = merge_work(inputs, output, None, 5, store, CatalogLink(None)), split(output, 2)[1]
    reports: list[set[str]] = []
    out.mkdir()

    def report() -> None:
        reports.append({path.name for path in out.iterdir()})

    make_part(work, part, out, store, EngineOptions(threads=2, memory_bytes=64 << 20), Observer(report))
    names = {output.shards[shard].name for shard in part.shards}
    assert set().union(*reports) == {path.name for path in out.iterdir()} == names


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.integers(1, 7))
def test_split__deals_every_shard_once_and_evenly(sizes: list[int], n_parts: int) -> None:
    parts = split_sizes(sizes, n_parts)
    assert len(parts) == n_parts
    assert sorted(shard for part in parts for shard in part.shards) == list(range(len(sizes)))
    loads = [sum(sizes[shard] for shard in part.shards) for part in parts]
    assert max(loads) - min(loads) <= max(sizes)
