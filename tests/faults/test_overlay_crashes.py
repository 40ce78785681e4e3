"""kill -9 and failing calls while an overlay is made or completed: what is visible is whole, and the next run works."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mergepipe
from mergepipe import api as keeping
from mergepipe.errors import PublishedError, StorageError
from mergepipe.options import MergeOptions, RunOptions
from mergepipe.runs.snapshots import read_manifest_value
from mergepipe.snapshots.overlay.reader import is_overlay
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.crashes import Death, count_operations, run_killed
from support.disk_families import weights_digest
from support.families import TINY, write_family
from support.faults import Fault, replaced, system_error

STEPS = [23, pytest.param(1, marks=pytest.mark.slow)]  # the fast form looks at every 23rd operation
ACCOUNT = {".overlay.mergepipe-staging", "owner.json", "reads"}
"""What a merge under a budget leaves that fails: the account of what it read."""
RECIPE = """\
merge_method: linear
base_model: family/base
models:
- {model: family/expert-1, parameters: {weight: 0.6}}
- {model: family/expert-2, parameters: {weight: 0.4}}
dtype: bfloat16
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Inputs, an overlay, and the whole snapshot as it should be."""
    write_family(tmp_path / "family", TINY, 2)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    (tmp_path / "made").mkdir()
    merge(tmp_path, tmp_path / "wanted", overlay=False)
    merge(tmp_path, tmp_path / "made" / "overlay", overlay=True)  # as deep as its copies: it names inputs relatively
    (tmp_path / "results").mkdir()
    return tmp_path


def merge(root: Path, out: Path, *, overlay: bool) -> None:
    mergepipe.merge(
        root / "recipe.yml",
        out,
        budget="40%",
        force=True,
        options=MergeOptions(threads=2, shard_bytes=30_000, overlay=overlay, resume=False, home=root / "home"),
    )


def crash_everywhere(
    action: Callable[[], object], prepare: Callable[[], None], check: Callable[[], None], step: int
) -> None:
    """Kill the action at every `step`-th operation, check, do it again, check."""
    prepare()
    n_operations = len(count_operations(action))
    crashes = 0
    for death in Death:
        for at in range(0, n_operations, step):
            prepare()
            crashes += run_killed(action, at, death)
            check()
            action()
            check()
    assert crashes > 1.6 * n_operations / step


@pytest.mark.parametrize("step", STEPS)
def test_overlay__killed_at_any_operation_is_whole_or_invisible(root: Path, step: int) -> None:
    out = root / "results" / "overlay"

    def check() -> None:
        if out.exists():
            assert is_overlay(read_manifest_value(LocalStore(), Location.local(out)))
            assert keeping.verify(out).is_sound

    crash_everywhere(
        lambda: merge(root, out, overlay=True), lambda: shutil.rmtree(out, ignore_errors=True), check, step
    )
    assert [path.name for path in out.parent.iterdir()] == ["overlay"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", ["overlay", "whole"])
def test_materialise__killed_at_any_operation_loses_nothing(root: Path, place: str, step: int) -> None:
    source, out, wanted = root / "results" / "overlay", root / "results" / place, weights_digest(root / "wanted")

    def prepare() -> None:
        shutil.rmtree(out.parent)
        shutil.copytree(root / "made" / "overlay", source)

    def complete() -> None:
        if is_overlay(read_manifest_value(LocalStore(), Location.local(source))):
            keeping.materialise(source, out, force=True, options=RunOptions(threads=2, home=root / "home"))

    def check() -> None:
        assert keeping.verify(source).is_sound
        if out.exists() and not is_overlay(read_manifest_value(LocalStore(), Location.local(out))):
            assert keeping.verify(out).is_sound
            assert weights_digest(out) == wanted

    crash_everywhere(complete, prepare, check, step)
    assert weights_digest(out) == wanted


@pytest.mark.parametrize("name", ["write", "fsync"])
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_overlay__a_call_that_fails_is_a_typed_error_and_leaves_nothing(root: Path, name: str, step: int) -> None:
    out = root / "results" / "overlay"
    counting = Fault()
    with replaced(os, name, counting.wrap):
        merge(root, out, overlay=True)
    shutil.rmtree(out)
    failures = 0
    for at in range(0, counting.calls, step):
        fault = Fault(at, system_error(errno.ENOSPC))
        try:
            with replaced(os, name, fault.wrap):
                merge(root, out, overlay=True)
        except PublishedError as error:  # the last call of all: the output is in its place
            failures += error.code == "output.not-durable" and keeping.verify(out).is_sound
        except StorageError as error:
            left = {path.name for path in out.parent.rglob("*")}
            failures += error.code == "storage.no-space" and left <= ACCOUNT
        shutil.rmtree(out, ignore_errors=True)
    assert failures > counting.calls / step / 2
