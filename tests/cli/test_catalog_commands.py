"""`ls`, `show`, `lineage` and `catalog`: what they print, and what a catalog in trouble does to every command."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import CATALOG_NAME
from mergepipe.cli.printing import REPORT_FORMAT
from support.command_line import Runner, Workplace

NEEDING = [
    ("analyze", "family/base", "family/expert-1", "--quiet"),
    ("plan", "recipe.yml", "--budget", "50%"),
    ("ls",),
    ("show", "abcd"),
    ("lineage", "abcd"),
    ("explain", "abcd"),
    ("catalog", "stats"),
]
"""Commands that cannot do without the catalog."""


@pytest.fixture
def catalog(work: Workplace, run: Runner) -> Path:
    """The file of a catalog that knows one snapshot."""
    assert run("analyze", work.family.base, *work.family.experts, "-q").exit_code == 0
    assert run("merge", work.recipe, work.out, "-q").exit_code == 0
    return work.root / "home" / CATALOG_NAME


def sid_of(out: Path) -> str:
    sid: str = json.loads((out / "mergepipe.json").read_text())["sid"]
    return sid


# --- snapshots ---


def test_ls__an_empty_home_stays_empty(work: Workplace, run: Runner) -> None:
    assert run("ls").out == "no snapshots\n"
    assert run("ls", "--json").json() == {"format": REPORT_FORMAT, "snapshots": []}
    assert not (work.root / "home").exists()


def test_show__a_snapshot_the_catalog_does_not_know(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out, "-q", "--no-catalog")
    shown = run("show", work.out, "--json").json()
    assert (shown["sid"], shown["is_recorded"]) == (sid_of(work.out), False)
    assert "catalog rebuild" in run("show", work.out).out


def test_ls__filters_by_model_operator_and_day(work: Workplace, run: Runner) -> None:
    recipe = work.root / "one.yml"
    recipe.write_text(
        "merge_method: task_arithmetic\nbase_model: family/base\nmodels:\n"
        "- {model: family/expert-1, parameters: {weight: 1}}\n"
    )
    run("merge", work.recipe, work.out, "-q")
    run("merge", recipe, work.root / "one", "-q")

    def listed(*filters: str) -> list[str]:
        return [Path(row["path"]).name for row in run("ls", *filters, "--json").json()["snapshots"]]

    assert listed() == listed("--with", "family/expert-1") == listed("--since", "2020-01-01") == ["one", "out"]
    assert listed("--with", "expert-2") == ["out"]
    assert listed("--operator", "task_arithmetic", "--with", "family/base") == ["one"]
    assert listed("--with", "family/none") == listed("--since", "2999-01-01") == listed("--operator", "slerp") == []
    assert listed("--since", "2100-01-01") == []
    assert run("ls", "--since", "yesterday").exit_code == 2
    shutil.rmtree(work.out)
    assert [row["is_present"] for row in run("ls", "--json").json()["snapshots"]] == [True, False]
    assert f"{work.out} (gone)" in run("ls").out


@pytest.mark.usefixtures("catalog")
def test_lineage__down_shows_what_was_made_from_a_snapshot(work: Workplace, run: Runner) -> None:
    recipe = work.root / "second.yml"
    recipe.write_text(
        "merge_method: linear\nbase_model: family/base\nmodels:\n- {model: out, parameters: {weight: 1}}\n"
    )
    second = work.root / "second"
    run("merge", recipe, second, "-q")
    nodes = run("lineage", work.out, "--down", "--json").json()["nodes"]
    assert [(node["depth"], node["role"], node["path"]) for node in nodes] == [
        (0, "snapshot", str(work.out)), (1, "expert", str(second)),
    ]  # fmt: skip
    assert nodes[1]["sid"] == sid_of(second)
    lines = run("lineage", work.out, "--down").out.splitlines()
    assert lines[1].startswith(f"└─ expert of {second} = linear {sid_of(second)[:12]}, ")
    graph = run("lineage", work.out, "--down", "--dot").out
    assert f'"{sid_of(work.out)}" -> "{sid_of(second)}"' in graph


def test_lineage__of_a_snapshot_that_is_not_recorded_says_what_to_do(work: Workplace, run: Runner) -> None:
    run("merge", work.recipe, work.out, "-q", "--no-catalog")
    ran = run("lineage", work.out)
    assert (ran.exit_code, ran.codes) == (3, ["snapshot.not-found"])
    assert f"mergepipe catalog rebuild {work.out}" in ran.err
    assert run("catalog", "rebuild", work.out).exit_code == 0
    assert run("lineage", work.out).exit_code == 0


# --- a catalog in trouble ---


def damaged(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 999")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The catalog held by somebody else."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize("trouble", [(9, "catalog.locked"), (4, "catalog.damaged"), (6, "catalog.newer")])
def test_commands__that_need_the_catalog_say_what_is_wrong_with_it_and_leave_it_alone(
    work: Workplace, run: Runner, monkeypatch: pytest.MonkeyPatch, trouble: tuple[int, str]
) -> None:
    exit_code, code = trouble
    with Catalog.open(work.root / "home") as catalog:
        path = catalog.path
    monkeypatch.setitem(Catalog.open.__func__.__kwdefaults__, "timeout_seconds", 0.1)  # type: ignore[attr-defined]
    if code == "catalog.damaged":
        damaged(path)
    if code == "catalog.newer":
        newer(path)
    before = path.read_bytes()
    with held(path) if code == "catalog.locked" else nullcontext():
        for command in NEEDING:
            ran = run(*command)
            assert (ran.exit_code, ran.codes) == (exit_code, [code])
            assert ("mergepipe catalog rebuild" in ran.err) == (code == "catalog.damaged")
    if code != "catalog.locked":
        assert path.read_bytes() == before
