"""Another version of an input with equal size, header and time never passes for the one that was read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mergepipe
from mergepipe.errors import ConflictError
from mergepipe.snapshots import work_log as work_log
from mergepipe.storage.contract import version_of
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile, LocalStore
from mergepipe.storage.location import Location
from support.faults import replaced
from support.local_models import manifest_of
from support.refusals import refuses
from support.small_merges import RECIPES, Bench, Recipe, make_bench

SUM = RECIPES["task_arithmetic"]
EPOCH = 0
Change = Callable[[Path], None]


def other_content(path: Path) -> bytes:
    """A new version of a model: as long, with the same header."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = np.roll(np.frombuffer(content[start:], np.uint8), 2).tobytes()
    return bytes(content)


def overwrite(path: Path) -> None:
    content = other_content(path)
    with path.open("r+b") as stream:  # never shorter in between: a reader would see that
        stream.write(content)
    os.utime(path, ns=(EPOCH, EPOCH))


def exchange(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(other_content(path))
    os.utime(other, ns=(EPOCH, EPOCH))
    other.rename(path)


CHANGES: dict[str, Change] = {"overwritten": overwrite, "exchanged": exchange}


@pytest.fixture(name="made", scope="module")
def make_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose times are all the same."""
    folder = tmp_path_factory.mktemp("versions")
    make_bench(folder)
    return folder


@pytest.fixture(name="bench")
def make(made: Path, tmp_path: Path) -> Bench:
    folder = Path(shutil.copytree(made, tmp_path / "bench"))
    for path in folder.glob("*/*"):
        os.utime(path, ns=(EPOCH, EPOCH))
    return Bench(folder)


def expect_of_scratch(bench: Bench, recipe: Recipe, name: str) -> None:
    bench.scratch(recipe, "from-scratch", catalog=False)
    assert bench.digest(name) == bench.digest("from-scratch")


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["base", "expert1"])
@pytest.mark.parametrize("change", CHANGES)
def test_merge__reads_another_version_as_it_is_now(bench: Bench, change: str, model: str) -> None:
    bench.merge(SUM, "first")
    old = bench.digest("first")
    CHANGES[change](bench.only_file(model))
    bench.merge(SUM, "second")
    assert bench.digest("second") != old
    expect_of_scratch(bench, SUM, "second")


@pytest.mark.parametrize("change", CHANGES)
def test_merge__uses_no_statistics_of_another_version(bench: Bench, change: str) -> None:
    ties = RECIPES["ties"]
    mergepipe.analyze(bench.folder / "base", [bench.folder / f"expert{i}" for i in (1, 2)], home=bench.home)
    bench.merge(ties, "first")
    CHANGES[change](bench.only_file("expert1"))
    bench.merge(ties, "second")
    expect_of_scratch(bench, ties, "second")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("model", ["base", "expert1"])
@pytest.mark.parametrize("budget", [None, "50%"])
def test_merge__refuses_an_edit_while_it_reads(bench: Bench, change: str, model: str, budget: str | None) -> None:
    plan = None if budget is None else mergepipe.plan(bench.write(SUM), budget, home=bench.home)

    def edited(read_into: Callable[..., int]) -> Callable[..., int]:
        left = [lambda: CHANGES[change](bench.only_file(model))]

        def read(*arguments: object) -> int:
            done = read_into(*arguments)
            while left and Purpose.METADATA not in arguments:
                left.pop()()
            return done

        return read

    with replaced(LocalFile, "read_into", edited), refuses(ConflictError, "input.changed", model):
        if plan is None:
            bench.scratch(SUM, "out")
        else:
            mergepipe.run(plan, bench.folder / "out", home=bench.home)
    assert not (bench.folder / "out").exists()


def test_merge__refuses_a_directory_that_was_another_one_when_it_was_opened(bench: Bench) -> None:
    own, other, aside = (bench.folder / name for name in ("expert1", "other", "aside"))
    shutil.copytree(own, other)
    overwrite(bench.only_file("other"))

    def swapped(open_file: Callable[..., LocalFile]) -> Callable[..., LocalFile]:
        def opened(store: LocalStore, path: Location, **options: bool) -> LocalFile:
            if path.parent != Location.local(own):
                return open_file(store, path, **options)
            own.rename(aside)
            other.rename(own)
            try:
                return open_file(store, path, **options)
            finally:
                own.rename(other)
                aside.rename(own)

        return opened

    with replaced(LocalStore, "open", swapped), refuses(ConflictError, "input.changed"):
        bench.scratch(SUM, "out")


@pytest.mark.parametrize("time", [-(10**18) - 1, -1, 10**19 + 1])
def test_records__hold_files_of_any_time(bench: Bench, time: int) -> None:
    for model in ("base", "expert1", "expert2"):
        os.utime(bench.only_file(model), ns=(time, time))
    bench.merge(SUM, "out")
    manifest = manifest_of(bench.folder / "out")
    path = bench.only_file("expert1")
    assert manifest.inputs[1].files[0].version == version_of(path, path.stat())
    plan = mergepipe.plan(bench.write(SUM), budget="50%", home=bench.home)
    mergepipe.run(plan, bench.folder / "planned", home=bench.home)
    assert mergepipe.verify(bench.folder / "planned").is_sound
    mergepipe.replay(bench.folder / "planned", bench.folder / "replayed")
    load_file(bench.only_file("replayed"))
