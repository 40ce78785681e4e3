"""Ctrl-C at any moment: it comes through, and leaves no trace."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

import mergepipe
from mergepipe.engine import pipeline
from mergepipe.jobs import merge as merging
from mergepipe.options import MergeOptions
from mergepipe.reports import Progress
from mergepipe.snapshots import staging as publish
from mergepipe.storage import owned
from mergepipe.storage.output import OutputFile
from support.disk_families import make_models, tree_digest, weights_digest, write_family, write_recipe
from support.faults import Fault, open_descriptors, replaced, worker_threads
from support.oracle import MergeCase

CASE = MergeCase("ties", (0.7, 0.5), (0.5, 0.3), normalize=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    recipe = write_recipe(tmp_path / "recipe.yml", CASE, write_family(tmp_path / "in", make_models(2)))
    mergepipe.merge(recipe, tmp_path / "wanted")
    return recipe


def run(recipe: Path) -> None:
    mergepipe.merge(
        recipe, recipe.parent / "new" / "out", options=MergeOptions(threads=2, shard_bytes=100_000, catalog=False)
    )


def check_no_trace(recipe: Path, inputs_digest: str) -> None:
    """No output at all, or the whole of it where the interrupt came after the last step."""
    folder = recipe.parent / "new"
    assert worker_threads(patience_seconds=5) == []
    assert tree_digest(recipe.parent / "in") == inputs_digest
    if (folder / "out").exists():
        assert [p.name for p in folder.iterdir()] == ["out"]
        assert weights_digest(folder / "out") == weights_digest(recipe.parent / "wanted")
        shutil.rmtree(folder)
    assert not folder.exists()


PLACES = [
    (pipeline.Pipeline, "_start"), (pipeline.Pipeline, "_admit"), (pipeline.Pipeline, "_begin_pass"),
    (pipeline.Pipeline, "_handle"), (pipeline.Pipeline, "_after_compute"), (OutputFile, "_open"),
    (merging, "make_part"), (merging, "write_durably"), (publish, "sync_directory"), (owned, "renameat2"),
    (fcntl, "flock"), (os, "mkdir"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "more"])
def test_merge__interrupted_at_a_call_leaves_no_trace(
    recipe: Path, owner: object, name: str, afterwards: bool, is_short: bool
) -> None:
    digest = tree_digest(recipe.parent / "in")
    counter = Fault()
    with replaced(owner, name, counter.wrap):
        run(recipe)
    shutil.rmtree(recipe.parent / "new")
    assert counter.calls > 0
    few = {0 if afterwards else 1, counter.calls // 2, counter.calls - 1}
    calls = few if is_short else few | {0, 1, 2, 7}
    for at in sorted(calls & set(range(counter.calls))):
        descriptors = open_descriptors()
        fault = Fault(at, KeyboardInterrupt(), afterwards=afterwards)
        with replaced(owner, name, fault.wrap), pytest.raises(KeyboardInterrupt):
            run(recipe)
        check_no_trace(recipe, digest)
        if (afterwards, name) != (True, "_open"):  # there the interrupt takes the descriptor on its way to its owner
            assert open_descriptors() <= descriptors


@pytest.mark.parametrize("at", [0, 1, 3, 10])
def test_merge__interrupted_from_the_progress_callback_leaves_no_trace(
    recipe: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe.engine.pipeline.TICK_SECONDS", 0.0)  # a report at every event
    digest = tree_digest(recipe.parent / "in")
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mergepipe.merge(
            recipe,
            recipe.parent / "new" / "out",
            options=MergeOptions(shard_bytes=2000, catalog=False),
            on_progress=interrupt,
        )
    check_no_trace(recipe, digest)
