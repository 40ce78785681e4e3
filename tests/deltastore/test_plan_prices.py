"""Plans by time: what counts as faster, that bytes stay within the budget, and that results stay what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.api import pack
from mergepipe.cli import main
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, Level
from mergepipe.deltastore.decode_speed import measure_decoding
from mergepipe.errors import RecipeError
from mergepipe.options import MergeOptions, PlanOptions, RunOptions
from mergepipe.planning.candidates.level_ladders import Ladder, ladder_steps
from mergepipe.planning.plan import Plan
from mergepipe.planning.plan_json import parse_plan
from mergepipe.runs.budget import speeds as speeds_module
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.storage.prices import DecodingPrices, Speeds, two_digits
from mergepipe.storage.read_speed import MOST_BYTES, measure_reading
from support.disk_families import DiskFamily, weights_digest, write_family, write_recipe
from support.oracle import MergeCase
from support.rounding import decode, encode

SIZES = {"layers.0.up": 2 * BLOCK_ELEMENTS + 7001, "layers.1.up": BLOCK_ELEMENTS, "layers.1.norm": 700}
AVERAGE = MergeCase("task_arithmetic", (0.4, 0.3, 0.3), (1.0, 1.0, 1.0))
TIES = MergeCase("ties", (0.4, 0.3, 0.3), (0.19, 0.1, 0.15), normalize=True)
DECODING = DecodingPrices({"bands": (1.6, 2.9, 3.0, 3.5, 3.6), "bytes": (13.0,), "same": (0.1,), "raw": (0.2,)})
SLOW, FAST = "10MB/s", "100GB/s"


@pytest.fixture(autouse=True)
def known_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes the same everywhere, so that plans are the same."""
    monkeypatch.setattr("mergepipe.deltastore.decode_speed.measure_decoding", lambda: DECODING)


@pytest.fixture(name="family")
def make_family(tmp_path: Path) -> DiskFamily:
    """A base with two packed experts and a raw one;"""
    rng = np.random.default_rng(0)
    base = {name: encode((rng.standard_normal(n) * 0.02).astype(np.float32), BF16) for name, n in SIZES.items()}
    models = [base]
    for std in (1.5e-4, 3e-4, 6e-4):
        steps = {name: (rng.standard_normal(n) * std).astype(np.float32) for name, n in SIZES.items()}
        models.append({name: encode(decode(base[name].tobytes(), BF16) + steps[name], BF16) for name in SIZES})
    raw = write_family(tmp_path / "raw", models)
    stores = pack(raw.places[0], raw.places[1:3], tmp_path / "stores", threads=2)
    return replace(raw, places=(raw.places[0], *(each.folder for each in stores.experts), raw.places[3]))


def recipe_of(family: DiskFamily, case: MergeCase = AVERAGE, name: str = "recipe") -> Path:
    return write_recipe(family.places[0].parent / f"{name}-{case.operator}.yml", case, family)


def plan_of(family: DiskFamily, budget: str, speed: str | None, case: MergeCase = AVERAGE) -> Plan:
    home = family.places[0].parent / "home"
    price = "bytes" if speed is None else "time"
    return mergepipe.plan(
        recipe_of(family, case), budget, home=home, options=PlanOptions(price=price, storage_speed=speed)
    )


@pytest.mark.parametrize("case", [AVERAGE, TIES], ids=["average", "ties"])
@pytest.mark.parametrize("speed", [FAST, SLOW])
@pytest.mark.parametrize("budget", ["30%", "60%", "100%"])
def test_run__of_plans_by_time_stays_within_them_and_gives_the_full_merge_for_the_full_budget(
    family: DiskFamily, tmp_path: Path, case: MergeCase, speed: str, budget: str
) -> None:
    plan = plan_of(family, budget, speed, case)
    assert parse_plan(plan.to_json()) == plan
    report = mergepipe.run(plan, tmp_path / "out", options=RunOptions(catalog=False))
    assert 0 < report.expert_bytes + report.analysis_bytes <= plan.planned_bytes <= plan.budget_bytes
    manifest = json.loads((tmp_path / "out" / "mergepipe.json").read_text())
    read = sum(each["read_bytes"] for each in manifest["inputs"] if each["role"] == "expert")
    assert read == report.expert_bytes + report.analysis_bytes
    if budget == "100%":
        mergepipe.merge(recipe_of(family, case), tmp_path / "full", options=MergeOptions(catalog=False))
        assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "full")


def test_plan__by_time_takes_less_time_to_decode_on_fast_storage(family: DiskFamily) -> None:
    prices = [plan_of(family, "30%", speed).price for speed in (FAST, SLOW)]
    fast, slow = (price.duration.decoding_seconds for price in prices if price is not None)
    assert fast < slow


def test_plan__by_bytes_knows_nothing_of_the_machine(family: DiskFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds_module, "find_speeds", lambda *_: pytest.fail("a speed was looked for"))
    plan = plan_of(family, "30%", None)
    assert plan.price is None
    assert "price" not in json.loads(plan.to_json())


def test_speeds__are_measured_once_and_kept_rounded_with_a_date(
    family: DiskFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Location] = []

    def counted(store: LocalStore, location: Location, purpose: Purpose) -> float:
        measured.append(location)
        return measure_reading(store, location, purpose)

    monkeypatch.setattr(speeds_module, "measure_reading", counted)
    plans = [
        mergepipe.plan(recipe_of(family), "50%", home=tmp_path, options=PlanOptions(price="time", probe=False))
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert len(measured) == 1
    assert measured[0].is_relative_to(Location.local(family.places[0]))
    price = plans[0].price
    assert price is not None
    assert price.speeds.storage_bytes_per_second == two_digits(price.speeds.storage_bytes_per_second)
    assert "storage measured on 20" in price.speeds.source
    (tmp_path / speeds_module.SPEEDS_NAME).write_text("{")
    mergepipe.plan(recipe_of(family), "50%", home=tmp_path, options=PlanOptions(price="time"))
    assert len(measured) == 2
    mergepipe.merge(
        recipe_of(family),
        tmp_path / "out",
        budget="50%",
        options=MergeOptions(catalog=False, plan=PlanOptions(price="time")),
    )
    assert len(measured) == 3


def test_speeds__of_a_small_file_are_measured_again_with_a_larger_one(
    family: DiskFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter((1e6, 2e9))
    monkeypatch.setattr(speeds_module, "measure_reading", lambda *_: next(found))
    tiny = write_family(tmp_path / "tiny", [{"a": encode(np.full(9000, e, np.float32), BF16)} for e in range(4)])
    speeds = []
    for each in (tiny, family, tiny, family):
        plan = mergepipe.plan(recipe_of(each), "50%", home=tmp_path / "home", options=PlanOptions(price="time"))
        assert plan.price is not None
        speeds.append(plan.price.speeds.storage_bytes_per_second)
    assert speeds == [1e6, 2e9, 2e9, 2e9]


def test_measure_reading__charges_what_it_reads_and_no_more_than_its_limit(tmp_path: Path) -> None:
    for size in (0, 1000, 5 << 20):
        path, store = tmp_path / f"{size}.bin", LocalStore()
        path.write_bytes(bytes(size))
        assert measure_reading(store, Location.local(path), Purpose.BASE) > 0
        assert size - 4096 < store.ledger.usage()[Purpose.BASE] <= min(size, MOST_BYTES)


def test_measure_decoding__knows_every_codec_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = measure_decoding()
    assert found.nanoseconds.keys() == {"same", "bands", "bytes", "raw"}
    for each in found.nanoseconds.values():
        assert len(each) == len(Level) - 1
        assert all(0 < value == two_digits(value) for value in each)


def test_find_steps__by_time_leaves_out_a_level_that_takes_longer_than_a_better_one() -> None:
    cost_KB = np.array([[4096], [8192], [12288]])
    left_KB, one_B = np.array([[0.5], [0.2], [0.0]]), np.ones(1)
    by_bytes = Ladder((1, 3, 5), cost_KB, left_KB, one_B, one_B)
    assert ladder_steps(by_bytes).level_S.tolist() == [1, 3, 5]
    slow_middle = np.array([[1e-6], [9e-6], [2e-6]])
    by_time = replace(by_bytes, decoding_KB=slow_middle, price_of_byte=1e-12)
    steps = ladder_steps(by_time)
    assert steps.level_S.tolist() == [1, 5]
    assert steps.cost_S.sum() == 12288


@pytest.mark.parametrize(
    ("options", "code"),
    [({"price": "tme"}, "option.choice"), ({"storage_speed": "1GB/s"}, "option.pair"),
     ({"price": "time", "storage_speed": "fast"}, "speed.malformed"),
     ({"price": "time", "storage_speed": "0"}, "speed.malformed"),
     ({"price": "time", "storage_speed": "1GB/h"}, "speed.malformed")],
)  # fmt: skip
def test_plan_options__refuse_prices_that_mean_nothing(options: dict[str, str], code: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        PlanOptions(**options)  # type: ignore[arg-type]
    assert refusal.value.code == code


def test_speeds__refuse_what_no_machine_has() -> None:
    for speed, threads in ((0.0, 1), (float("inf"), 1), (1.0, 0)):
        with pytest.raises(ValueError, match=r"speed|threads"):
            Speeds(speed, DECODING, threads, "")
    with pytest.raises(ValueError, match="decoding"):
        DecodingPrices({"bands": (-1.0,)})


def test_cli__prints_the_price_and_what_is_expected_to_take_how_long(
    family: DiskFamily, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, options = str(recipe_of(family)), ["--price", "time", "--storage-speed", FAST, "--home", str(tmp_path)]
    assert main(["plan", recipe, "--budget", "100%", *options]) == 0
    printed = capsys.readouterr().out
    for text in ("price", "100 GB/s", "storage as given", "to read", "to decode"):
        assert text in printed, text
    assert main(["merge", recipe, str(tmp_path / "out"), "--quiet", "--budget", "50%", *options]) == 0
    assert main(["merge", recipe, str(tmp_path / "full"), "--quiet", *options]) == 2
    assert "a full merge reads the same at any price" in capsys.readouterr().err
    assert main(["sweep", recipe, "--budgets", "50%,100%", "--quiet", *options]) == 0
