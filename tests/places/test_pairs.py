"""Every pair of a verb, a kind and place of input, a place of output, and options: the bytes of the plain local run.

The rows of the fast suite are a covering array: each pair of values that exists is in one of them. The slow rows are
one covering array for each verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from tools.reference.places import VERBS

from support.all_pairs import Pair, Row, all_pairs, covering_rows, pair, pairs_of
from support.crashes import Death, count_operations, run_killed
from support.place_cells import Work, expect, run_in, write_subjects
from support.place_rows import Result, commands_of, name_of, output_of, plain, result_of, tensors_of, write_variants
from support.placed_models import PlacedModels, files_of, placed_models

_MODELS = ("plain", "quantised", "snapshot", "float32", "sharded")
_EXPERTS = (*_MODELS, "packed", "adapted", "adapter")
_FOLDERS = ("folder", "bucket", "hub")
_ANYWHERE = (*_FOLDERS, "file")
_MEMORY = ("default", "256MB")
_STOPS = ("none", "stopped")
_OPTIONS = ("none", "json", "dtype", "shard-size")
_BUDGETS = ("none", "60%", "norm")

FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "verb": (
        "check", "merge", "run", "replay", "lora apply", "lora merge", "lora convert", "lora extract",
        "tailor export",
        "tailor average", "tailor compose", "pack", "unpack", "analyze", "moe", "sweep", "verify",
    ),
    "kind": (*_EXPERTS, "checkpoint"),
    "place": ("folder", "hub", "bucket"),
    "output": (*_ANYWHERE, "printed"),
    "budget": (*_BUDGETS, "all"),
    "memory": _MEMORY,
    "parts": ("none", "2 of 2"),
    "interruption": _STOPS,
    "option": _OPTIONS,
}  # fmt: skip
"""The values of each factor; `all` is the budget of `plan --all`, and `printed` the output of a verb that writes none.

`run` is `plan` and then `run`. A training checkpoint is a `checkpoint`; an `adapter` alone is an expert, too.
"""
_ALWAYS: Final = {"place": FACTORS["place"], "budget": ("none",), "memory": ("default",), "parts": ("none",),
                  "interruption": ("none",), "option": ("none", "json")}  # fmt: skip
_MERGED: Final = {"output": _ANYWHERE, "memory": _MEMORY, "interruption": _STOPS}
_ADAPTER: Final = {"output": _FOLDERS, "interruption": _STOPS}
_TAILORED: Final = {"kind": ("checkpoint",), "output": _FOLDERS, "memory": _MEMORY, "interruption": _STOPS}
_TYPED: Final = ("none", "json", "dtype")
VALUES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "check": {"kind": _EXPERTS, "output": ("printed",), "option": _OPTIONS},
    "merge": {**_MERGED, "kind": _EXPERTS, "budget": _BUDGETS, "option": _OPTIONS},
    "run": {
        **_MERGED, "kind": _EXPERTS, "budget": ("60%", "norm", "all"), "parts": FACTORS["parts"], "option": _OPTIONS,
    },
    "replay": {**_MERGED, "kind": ("snapshot",)},
    "lora apply": {**_MERGED, "kind": _MODELS, "option": _OPTIONS},
    "lora merge": {**_ADAPTER, "kind": ("adapter",)},
    "lora convert": {**_ADAPTER, "kind": ("adapter",)},
    "lora extract": {**_ADAPTER, "kind": (*_MODELS, "packed")},
    "tailor export": {**_TAILORED, "option": _TYPED},
    "tailor average": {**_TAILORED, "option": _TYPED},
    "tailor compose": _TAILORED,
    "pack": {"kind": _MODELS, "output": _FOLDERS, "parts": FACTORS["parts"], "interruption": _STOPS},
    "unpack": {"kind": ("packed",), "output": ("folder",), "interruption": _STOPS},
    "analyze": {"kind": (*_MODELS, "packed"), "output": ("printed",), "memory": _MEMORY, "parts": FACTORS["parts"]},
    "moe": {**_MERGED, "kind": (*_MODELS, "adapted"), "option": _TYPED},
    "sweep": {
        "kind": _EXPERTS, "output": ("printed",), "budget": _BUDGETS, "memory": _MEMORY, "option": _TYPED,
    },
    "verify": {"kind": ("snapshot", "packed"), "output": ("printed",), "memory": _MEMORY},
}  # fmt: skip
"""What each verb takes; what is not named here is `_ALWAYS`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Two values of `run` that do not go together, and the code of the one line that says so."""

    first: tuple[str, str]
    second: tuple[str, str]
    code: str


REFUSED: Final = (
    Refused(("parts", "2 of 2"), ("output", "hub"), "output.place"),
    Refused(("parts", "2 of 2"), ("output", "file"), "output.place"),
    Refused(("option", "shard-size"), ("output", "file"), "option.conflict"),
)


def absent_pairs() -> set[Pair]:
    """Return the pairs that no command has, and those that are refused."""
    absent = {pair(refused.first, refused.second) for refused in REFUSED}
    for verb, values in VALUES.items():
        for factor, allowed in {**_ALWAYS, **values}.items():
            absent |= {pair(("verb", verb), (factor, value)) for value in FACTORS[factor] if value not in allowed}
    return absent


ROWS: Final = covering_rows(FACTORS, absent_pairs())
"""Every pair once."""


def rows_of_verbs() -> list[Row]:
    """Return rows in which every pair of values occurs with every verb that has both, without `ROWS`."""
    rows = [row for verb in VALUES for row in covering_rows({**FACTORS, "verb": (verb,)}, absent_pairs())]
    return [row for row in rows if row not in ROWS]


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


@pytest.fixture
def work(models: PlacedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """A working folder, and a home of its own: no row has the statistics of another."""
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    models.lead(monkeypatch)
    return Work(models, tmp_path)


_plain: dict[str, Result] = {}


def check_row(row: Row, work: Work) -> None:
    """Run a row, and compare what it wrote and printed with the plain local run."""
    made, report = result_of(row, work)
    wanted_row = plain(row)
    key = name_of(wanted_row)
    if key not in _plain:
        folder = work.folder / "plain"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("MERGEPIPE_HOME", str(folder / "home"))
            _plain[key] = result_of(wanted_row, Work(work.models, folder))
    wanted, wanted_report = _plain[key]
    assert made or row["output"] == "printed"
    is_split = row["verb"] == "run" and row["parts"] != "none"
    if is_split or row["option"] == "shard-size" or row["output"] == "file":
        assert tensors_of(made) == tensors_of(wanted)
    else:
        assert made == wanted
    if row["parts"] == "none":  # a part reports itself alone
        assert report == wanted_report


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_row__has_the_bytes_of_the_plain_local_run(work: Work, row: Row) -> None:
    check_row(row, work)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of_verbs(), ids=name_of)
def test_row_of_a_verb__has_the_bytes_of_the_plain_local_run(work: Work, row: Row) -> None:
    check_row(row, work)


KILLED: Final = [
    row
    for row in (*ROWS, *rows_of_verbs())
    if row["interruption"] == "stopped" and row["place"] == "folder" and row["output"] == "folder"
]


@pytest.mark.slow
@pytest.mark.parametrize("row", KILLED, ids=name_of)
def test_row__that_was_killed_is_made_by_the_same_command(work: Work, row: Row, tmp_path: Path) -> None:
    """`kill -9` half-way through what the command changes on the disk."""
    uninterrupted = {**row, "interruption": "none"}
    counted = Work(work.models, tmp_path / "counted")
    counted.folder.mkdir()
    *before, command = _first_commands(uninterrupted, counted)
    for earlier in before:
        expect(run_in(counted.folder, earlier))
    n_operations = len(count_operations(partial(run_in, counted.folder, command)))
    *before, command = _first_commands(uninterrupted, work)
    for earlier in before:
        expect(run_in(work.folder, earlier))
    assert run_killed(partial(run_in, work.folder, command), n_operations // 2, Death.BEFORE)
    check_row(uninterrupted, work)


def _first_commands(row: Row, work: Work) -> list[list[str]]:
    """Return the commands of a row up to the first that writes its output."""
    return commands_of(row, work, output_of(row, work))[: 2 if row["verb"] == "run" else 1]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.second[1])
def test_pair__that_is_refused_is_refused_in_one_line(work: Work, refused: Refused) -> None:
    row = {
        "verb": "run", "kind": "plain", "place": "folder", "output": "folder", "budget": "all", "memory": "default",
        "parts": "none", "interruption": "none", "option": "none", **dict([refused.first, refused.second]),
    }  # fmt: skip
    out = output_of(row, work)
    planning, command, *_ = commands_of(row, work, out)
    expect(run_in(work.folder, planning))
    before = files_of(work.folder)
    n_requests = len(work.models.hub.requests)
    ran = run_in(work.folder, command)
    assert (ran.codes, len(ran.error_lines)) == ([refused.code], 1), ran.err
    assert files_of(work.folder) == before
    assert len(work.models.hub.requests) == n_requests


def test_rows__hold_every_pair_that_a_command_has() -> None:
    absent = absent_pairs()
    covered = set().union(*map(pairs_of, ROWS))
    assert not covered & absent
    for missing in set(all_pairs(FACTORS)) - absent - covered:
        values = dict(missing)
        verbs = [
            verb for verb, allowed in VALUES.items()
            if all(value in {**_ALWAYS, "verb": (verb,), **allowed}[factor] for factor, value in values.items())
        ]  # fmt: skip
        assert verbs == [], f"{values} is in no row"


def test_rows__are_of_the_verbs_of_the_table() -> None:
    """Verbs that only read what others print need no rows, nor do repeated merges."""
    without_rows = {
        "plan", "repair", "diff", "explain", "show", "lineage", "push", "search", "tailor inspect", "tailor check",
        "tailor recipe", "without", "lora check",
    }  # fmt: skip
    assert {*VALUES} == {*FACTORS["verb"]} == {verb.name for verb in VERBS} - without_rows
