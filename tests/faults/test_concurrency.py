"""Sixteen processes merge, analyse, list and collect garbage on one home: no record is lost or doubled, none hangs."""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import mergepipe
from mergepipe.errors import ConflictError, MergePipeError
from support.families import TINY, write_family

WORKERS = 16
SHORT_SECONDS, LONG_SECONDS = 0.5, 60.0
PATIENCE_SECONDS = 120.0
ALLOWED = ("output.busy", "output.changed")


def make_place(root: Path) -> Path:
    write_family(root / "family", TINY, 2)
    for weight in range(4):
        (root / f"recipe-{weight}.yml").write_text(
            "merge_method: linear\nbase_model: family/base\nmodels:\n"
            f"- {{model: family/expert-1, parameters: {{weight: 0.{weight + 1}}}}}\n"
            "- {model: family/expert-2, parameters: {weight: 0.4}}\n"
        )
    (root / "results").mkdir()
    mergepipe.merge(root / "recipe-0.yml", root / "first", home=root / "elsewhere")  # load what is needed, once
    mergepipe.analyze(root / "family/base", [root / "family/expert-1"], home=root / "elsewhere")
    return root


def merge_own(root: Path, worker: int, turn: int, published: list[str]) -> None:
    out = root / "results" / f"own-{worker}-{turn}"
    mergepipe.merge(root / f"recipe-{turn % 4}.yml", out, budget="60%" if turn % 2 else None, home=root / "home")
    published.append(out.name)


def merge_same(root: Path, _worker: int, turn: int, published: list[str]) -> None:
    """To the same place as others: one wins, the others are told so."""
    out = root / "results" / f"same-{turn % 3}"
    mergepipe.merge(root / f"recipe-{turn % 4}.yml", out, force=True, home=root / "home")
    published.append(out.name)


def analyze(root: Path, _worker: int, turn: int, _published: list[str]) -> None:
    mergepipe.analyze(root / "family/base", [root / f"family/expert-{turn % 2 + 1}"], home=root / "home")


def list_all(root: Path, _worker: int, _turn: int, _published: list[str]) -> None:
    for each in mergepipe.list_snapshots(home=root / "home"):
        mergepipe.lineage(str(each.path), home=root / "home")


def collect(root: Path, _worker: int, _turn: int, _published: list[str]) -> None:
    assert mergepipe.gc([root / "results"], home=root / "home").garbage == ()


ACTIONS: list[Callable[[Path, int, int, list[str]], None]] = [merge_own, merge_same, analyze, list_all, collect]


def work(root: Path, worker: int, until: float) -> dict[str, object]:
    """Act at random until it is time, at least once; what was published, what went wrong, and how much was done."""
    rng = random.Random(worker)
    published: list[str] = []
    wrong: list[str] = []
    turns = 0
    while not turns or time.monotonic() < until:
        turns += 1
        try:
            rng.choice(ACTIONS)(root, worker, turns, published)
        except MergePipeError as error:
            if not (isinstance(error, ConflictError) and error.code in ALLOWED):
                wrong.append(f"{error.code}: {error}")
        except Exception:
            wrong.append(traceback.format_exc())
    return {"published": published, "wrong": wrong, "turns": turns}


def run_all(root: Path, seconds: float) -> list[dict[str, object]]:
    """Run all workers in processes of their own, and read what each says."""
    until = time.monotonic() + seconds
    children = {}
    for worker in range(WORKERS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (root / f"worker-{worker}.json").write_text(json.dumps(work(root, worker, until)))
                code = 0
            finally:
                os._exit(code)
        children[child] = worker
    deadline = until + PATIENCE_SECONDS
    while children and time.monotonic() < deadline:
        for child in tuple(children):  # each by its number: a process that compiles kernels may be among the others
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0
                del children[child]
        time.sleep(0.05)
    assert children == {}  # else some hang
    return [json.loads((root / f"worker-{worker}.json").read_text()) for worker in range(WORKERS)]


def check_crowd(root: Path, seconds: float) -> None:
    found = run_all(make_place(root), seconds)
    assert [line for each in found for line in each["wrong"]] == []  # type: ignore[attr-defined] # of JSON
    published = {name for each in found for name in each["published"]}  # type: ignore[attr-defined] # of JSON
    assert published
    paths = [each.path.name for each in mergepipe.list_snapshots(home=root / "home")]
    assert sorted(paths) == sorted(published)
    assert sorted(path.name for path in (root / "results").iterdir()) == sorted(published)
    for name in sorted(published)[:20]:
        assert mergepipe.verify(root / "results" / name).is_sound
    print(f"{sum(int(str(each['turns'])) for each in found)} actions, {len(published)} snapshots")


@pytest.mark.thorough
def test_home__serves_sixteen_processes(tmp_path: Path) -> None:
    check_crowd(tmp_path, SHORT_SECONDS)


@pytest.mark.slow
def test_home__serves_sixteen_processes_for_a_minute(tmp_path: Path) -> None:
    check_crowd(tmp_path, LONG_SECONDS)
