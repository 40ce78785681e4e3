"""What benchmarks.packed_merging measures: a device of one speed, full merges on it, merges under budgets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.packed_merging import (
    BudgetBench,
    Budgeted,
    PackedFamily,
    PackedMergingError,
    RateLimit,
    SlowMerge,
    budget_table,
    distance,
    main,
    measure_slow,
    packed_family,
    seconds_table,
    slow_merge,
    slow_storage,
    slow_table,
)
from safetensors.numpy import save_file

from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import TINY, write_family

pytestmark = pytest.mark.slow  # `make test-benchmarks`, which CI runs too


@pytest.fixture(scope="module", name="family")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> PackedFamily:
    folder = tmp_path_factory.mktemp("packed-merging")
    return packed_family(write_family(folder / "family", TINY, 4), folder / "stores", 2)


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


def test_forms__of_mixed_have_every_expert_once_and_half_of_them_packed(family: PackedFamily) -> None:
    mixed = family.forms["mixed"]
    assert mixed == (*family.raw[:2], *family.packed[2:])


def test_slow_merge__takes_as_long_as_its_bytes_need(family: PackedFamily, tmp_path: Path) -> None:
    measured = slow_merge(family.base, family.raw[:2], tmp_path, "linear", "raw", 2e6)
    assert measured.expert_bytes >= family.raw_bytes // 2
    assert measured.seconds >= measured.read_bytes / 2e6
    assert not (tmp_path / "out").exists()


def test_measure_slow__refuses_experts_that_are_not_those_that_were_packed(
    family: PackedFamily, tmp_path: Path
) -> None:
    merges = measure_slow(family, tmp_path, [2], [math.inf])
    assert [(m.operator, m.form) for m in merges] == [(o, f) for o in ("linear", "ties") for f in ("raw", "packed")]
    with pytest.raises(PackedMergingError, match="other bytes"):
        measure_slow(replace(family, packed=family.packed[::-1]), tmp_path, [2], [math.inf])


def test_budget_bench__reads_less_is_further_off_and_everything_is_exact(family: PackedFamily, tmp_path: Path) -> None:
    bench = BudgetBench(family, tmp_path, None, 16384)
    found = bench.measure("linear", [0.0, 0.5, 1.0])
    by_point = {(m.form, m.budget): m for m in found}
    assert set(by_point) == {("full", 1.0), *((f, b) for f in family.forms for b in (0.0, 0.5, 1.0))} - {
        ("random", 1.0)
    }
    for form in family.forms:
        assert by_point[form, 0.0].read == 0
        assert by_point[form, 0.0].error >= by_point[form, 0.5].error
        assert by_point[form, 0.5].read <= 0.5
    # experts with the base's embeddings have them for nothing, wherever that is known
    assert by_point["drop", 0.0].error == pytest.approx(1)
    assert all(by_point[form, 1.0].error == 0 for form in ("drop", "packed", "mixed"))


def test_budget_bench__spends_nothing_on_finding_out_what_random_operators_are_keyed_by(
    family: PackedFamily, tmp_path: Path
) -> None:
    bench = BudgetBench(family, tmp_path, None, None)
    read = {
        operator: {m.form: m.read for m in bench.measure(operator, [1.0])} for operator in ("linear", "dare_linear")
    }
    assert read["linear"]["packed"] > 0
    assert read["dare_linear"]["packed"] == read["linear"]["packed"]


def test_distance__is_over_all_tensors_and_needs_the_same_ones(tmp_path: Path) -> None:
    for name, tensors in {
        "one": {"a": np.zeros(4, np.float32), "b": np.ones(2, np.float32)},
        "other": {"a": np.full(4, 2, np.float32), "b": np.array([1, 4], np.float32)},
        "less": {"a": np.zeros(4, np.float32)},
    }.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert distance(tmp_path / "one", tmp_path / "other") == 5
    with pytest.raises(ValueError, match="same tensors"):
        distance(tmp_path / "one", tmp_path / "less")


def test_tables__have_a_row_per_form_and_a_column_per_condition() -> None:
    slow = [SlowMerge("ties", 4, "raw", rate, 2_000_000_000, 0, 12.34, 5.66, 9.0, "") for rate in (math.inf, 100.0)]
    assert slow_table(slow).splitlines()[0] == "| operator, experts | form | GB read | CPU s | 100 MB/s | no limit |"
    assert slow_table(slow).splitlines()[2] == "| ties, 4 | raw | 2.00 | 5.7 | 12.3 | 12.3 |"
    budgets = [
        Budgeted("ties", "drop", 0.05, 0.049, 0.5, 3.0, 2.04),
        Budgeted("ties", "drop", 1.0, 0.2, 0.0, None, 1.96),
    ]
    assert budget_table(budgets).splitlines()[0] == "| operator | form | 5 % | 100 % |"
    assert budget_table(budgets).splitlines()[2] == "| ties | drop | 0.500 (3.0000) | 0.000 [20.0%] |"
    assert seconds_table(budgets).splitlines()[2] == "| ties | drop | 2.0 | 2.0 |"


def test_main__prints_everything_measured_as_json(
    family: PackedFamily, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--work", str(tmp_path), "--family", str(family.base.parent), "--experts", "2"]
    assert main(["budgets", *place, "--operators", "ties", "--budgets", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out.split("\n\n")[0])
    assert [each["form"] for each in found] == ["full", "drop", "random", "packed", "mixed"]
