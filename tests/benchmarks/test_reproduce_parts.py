"""Tests of benchmarks.reproduce's parts, measured at toy size: they run, resume, and give pages."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import pytest
from benchmarks.local_text import GENERAL, Domain
from benchmarks.process import BenchmarkError
from benchmarks.recipes import method_cases
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.instrumented import RateLimit, slow_storage
from benchmarks.reproduce.pages import Table
from benchmarks.reproduce.registry import PARTS
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.workplace import Workplace
from benchmarks.reproduce.writing import markdown_files

from mergepipe.operators.registry import operator_specs
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import TINY, write_family

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


def measure(part: str, tmp_path: Path, *more: str) -> int:
    folders = [f"--{name}={tmp_path / name}" for name in ("work", "results", "anew")]
    return main(["measure", part, "--size", "toy", *folders, *more])


@pytest.mark.parametrize("part", [
    "mergekit", "methods", "scaling", "models", "memory", "sweep", "overheads", "payoff", "compose", "remote",
    "start_up",
])  # fmt: skip
def test_part__is_measured_and_gives_a_page(part: str, tmp_path: Path) -> None:
    assert measure(part, tmp_path) == 0
    assert not (tmp_path / "work").exists()
    text = markdown_files(PARTS, tmp_path / "results")[f"{part}.md"]
    assert "nan" not in text.lower().split()
    results = Results.read(tmp_path / f"results/{part}.json")
    for key, entry in results.entries.items():
        if entry.get("planned_bytes") is not None:
            assert entry["expert_bytes"] <= entry["planned_bytes"], key
        if key.endswith("/100"):
            assert entry["error"] == 0
        assert entry.get("catalog_bytes", 40_000) >= 40_000  # the statistics, which are most of it


def test_cases__cover_every_operator_that_reads_experts(tmp_path: Path) -> None:
    names = {case.name for case in method_cases(write_family(tmp_path, TINY, 2))}
    assert names == {name for name, spec in operator_specs().items() if spec.max_experts != 0}


def test_workplace__a_command_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"exit code \d+\n(?s:.*)missing\.yml"):
        Workplace(tmp_path).ours("merge", tmp_path / "missing.yml", tmp_path / "out")


def test_part__is_resumed_without_measuring_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure("payoff", tmp_path, "--keep") == 0
    stored = tmp_path / "results/payoff.json"
    before = stored.read_text()
    stored.write_text(before.replace('"is_complete": true', '"is_complete": false'))  # as if stopped at its end

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a command was run again")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert measure("payoff", tmp_path) == 0
    assert stored.read_text() == before


WORDS = {
    GENERAL: "one two three four five six seven apple pear plum for if else",
    "prose": "apple pear plum cherry quince",
    "headers": "for while if else return",
    "legal": "red green blue white black",
    "internet": "iron gold tin lead zinc",
    "tables": "oak elm ash fir yew",
    "tests": "ant bee fly moth wasp",
    "windows": "north east south west up",
    "concurrency": "sun moon star mars venus",
}


def write_text(root: Path, names: Iterable[str]) -> None:
    domains = []
    for name in names:
        source = random.Random(name)
        training, heldout = (" ".join(source.choices(WORDS[name].split(), k=n)) for n in (1500, 1000))
        domains.append(Domain(name, training, heldout))
    root.mkdir(parents=True)
    (root / "text.json").write_text(json.dumps([asdict(domain) for domain in domains]))


@pytest.mark.transformers
def test_trained__tells_the_gain_kept_by_each_form(tmp_path: Path) -> None:
    write_text(tmp_path / "work/trained", list(WORDS)[:5])
    assert measure("trained", tmp_path) == 0
    text = markdown_files(PARTS, tmp_path / "results")["trained.md"]
    assert "| 50 % | sample, 32 Ki |" in text
    stored = tmp_path / "results/trained.json"
    others = stored.read_text().replace('"steps": 3', '"steps": 4')
    stored.write_text(others.replace('"is_complete": true', '"is_complete": false'))
    assert measure("trained", tmp_path) == 1  # results of other trainings are not added to


@pytest.mark.transformers
def test_rules__tells_rules_budgets_a_search_and_a_chain(tmp_path: Path) -> None:
    write_text(tmp_path / "work/rules", WORDS)
    assert measure("rules", tmp_path) == 0
    results = Results.read(tmp_path / "results/rules.json")
    tables = [piece for piece in PARTS["rules"].page(results).body if isinstance(piece, Table)]
    headers = ["kind", *["loss less that of linear"] * 2, "bytes", "bytes", "seed", "rate"]
    assert [table.header[0] for table in tables] == headers
    base, linear = (
        mean(loss for name in list(WORDS)[1:5] for loss in results[key]["losses"][name])
        for key in ("base", "longest/0/rule/4/linear")
    )
    assert float(tables[1].rows[0][1].split()[0]) == pytest.approx(base - linear, abs=1e-3)
    assert {row[0] for row in tables[-1].rows} == {"2e-05", "1e-06"}


def test_rate_limit__lets_requests_pass_one_after_the_other() -> None:
    limit = RateLimit(100.0)
    assert limit.reserve(50, now=1.0) == 1.5
    assert limit.reserve(100, now=1.2) == 2.5
    assert limit.reserve(10, now=4.0) == 4.1
    assert limit.passed_bytes == 160


def test_slow_storage__counts_every_byte_and_changes_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    limit, buffer = RateLimit(math.inf), bytearray(40)
    with slow_storage(limit):
        file = LocalStore().open(Location.local(path))
        assert file.read_into(10, memoryview(buffer), Purpose.EXPERT) == 40
        file.close()
        assert LocalStore().read_metadata(Location.local(path), 90, 100) == bytes(range(90, 100))
    assert bytes(buffer) == bytes(range(10, 50))
    assert limit.passed_bytes == 50
