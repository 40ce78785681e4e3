"""What a merge under a budget asks of expert files, as strace and the kernel's counters see it from outside."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from budget_cases import CASES, POLICIES, Setting, make_setting, useful_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from tracing import PAGE_BYTES, STRACE, TracedRun, TracedServer, traced_server

from mergepipe import Plan, analyze, pack
from mergepipe.core.blocks import BF16
from mergepipe.storage.local import resident_fraction
from support.budgets import AWKWARD, GRAIN, TensorPlanOf, make_budget_models, smallest_memory, tensor_plans
from support.disk_families import DiskFamily, write_recipe, write_sharded
from support.public_names import BLOCK_ELEMENTS, HEADER_NAME, INDEX_NAME, LOG_NAME, OWNER_NAME
from support.slow_cases import slow_unless

EVERY_POLICY = (*POLICIES, "sample")
BUDGETS = ("0", "8192B", "7%", "35%", "80%", "100%")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedServer]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trial = subprocess.run([*STRACE, "-e", "trace=none", "true"], capture_output=True, check=False)
    if trial.returncode != 0:
        pytest.skip("strace may not trace here")
    with traced_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@dataclass(slots=True)
class Tracer:
    """Runs plans of a setting under the tracer and checks each."""

    server: TracedServer
    setting: Setting
    runs: int = 0

    def run(
        self, plan: Plan, *, memory_bytes: int | None = None, cold: bool = False, fault_at: int | None = None
    ) -> TracedRun:
        """Run a plan and check that what was read is within it."""
        self.runs += 1
        folder = self.setting.folder
        path, out = folder / f"plan-{self.runs}.json", folder / f"traced-{self.runs}"
        path.write_bytes(plan.to_json())
        traced = self.server.run(
            path,
            out,
            self.setting.home,
            memory_bytes=memory_bytes,
            cold=self.setting.family.places if cold else (),
            fault_at=fault_at,
        )
        check_soundness(plan, traced, self.setting.family)
        assert out.exists() == (traced.answer["error"] is None)
        if out.exists():
            check_record(out, traced, self.setting.family)
            shutil.rmtree(out)
        return traced


def check_soundness(plan: Plan, traced: TracedRun, family: DiskFamily) -> None:
    """Bytes requested <= planned <= budget, for every expert, and nothing was read in another way."""
    assert plan.planned_bytes <= plan.budget_bytes
    total = 0
    for model, place in zip(plan.models[1:], family.places[1:], strict=True):
        of_expert = traced.tensor_bytes(place)
        assert of_expert <= model.planned_bytes
        total += of_expert
        for file, reads in traced.of_place(place).items():
            assert reads.other <= {"mmap PROT_READ"}  # for mincore: which pages are in memory, none is touched
            assert reads.metadata_bytes <= _metadata_bytes(Path(file))
            if file.endswith(INDEX_NAME):
                assert reads.plain == []  # it is read as the expert's, and counted
            if file.endswith(".safetensors"):
                assert all(offset + nbytes <= _header_bytes(Path(file)) for offset, nbytes in reads.plain)
    assert total <= plan.planned_bytes
    if traced.answer["error"] is None:
        assert total == traced.answer["expert"] + traced.answer["analysis"]


def check_record(out: Path, traced: TracedRun, family: DiskFamily) -> None:
    """The manifest says of every expert what the kernel saw."""
    manifest = json.loads((out / "mergepipe.json").read_text())
    for record, place in zip(manifest["inputs"], family.places, strict=True):
        assert record["read_bytes"] == traced.tensor_bytes(place) + _original_bytes(place, traced)
    experts = sum(record["read_bytes"] for record in manifest["inputs"][1:])
    assert manifest["realized"]["expert"] + manifest["realized"]["analysis"] == experts


def _original_bytes(place: Path, traced: TracedRun) -> int:
    """What was read of what a store was packed from."""
    header = place / HEADER_NAME
    return traced.tensor_bytes(Path(json.loads(header.read_text())["expert"])) if header.is_file() else 0


def _header_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _metadata_bytes(file: Path) -> int:
    return _header_bytes(file) if file.suffix == ".safetensors" else file.stat().st_size


OPERATORS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")


@pytest.mark.parametrize("name", slow_unless({"linear", "dare_ties", "slerp"}.__contains__, OPERATORS))
def test_budgeted_merge__requests_no_more_than_was_planned(tmp_path: Path, server: TracedServer, name: str) -> None:
    number = list(CASES).index(name)
    setting = make_setting(tmp_path, CASES[name], layout=number)
    setting.analyze()
    coarse = setting.with_home("coarse")
    coarse.analyze(2 * GRAIN)
    partial = setting.forgetful("partial", 0.4)
    empty = setting.with_home("empty")
    spent = 0
    for i, policy in enumerate(EVERY_POLICY):
        for j, budget in enumerate(BUDGETS):
            if (i + j + number) % 3:
                continue  # a third of the squares of the board, another one for the next operator
            known, block = [(setting, GRAIN), (coarse, 2 * GRAIN), (partial, GRAIN), (empty, GRAIN)][(i + j) // 2 % 4]
            make_plan = functools.partial(known.plan, budget, policy, block_elements=block)
            plan = useful_plan(make_plan)
            if plan is None:
                assert policy == "sample"  # which begins with a position of all experts
                continue
            memory = smallest_memory(plan, tmp_path / f"refused-{i}-{j}") if i % 2 == 0 else None
            traced = Tracer(server, known, runs=100 * i + 10 * j).run(plan, memory_bytes=memory, cold=j % 3 == 0)
            assert traced.answer["error"] is None
            spent += traced.answer["expert"]
    assert spent > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless("ties".__eq__, ("task_arithmetic", "ties", "dare_linear")))
def test_budgeted_merge__of_packed_experts_requests_no_more_than_was_planned(
    tmp_path: Path, server: TracedServer, name: str
) -> None:
    wide = TensorPlanOf("layers.9.wide", (2 * BLOCK_ELEMENTS + 70_001,), BF16, (BF16,), frozen_share=0.2)
    raw = make_setting(tmp_path, CASES[name], plans=(*AWKWARD, wide))
    base, *experts = raw.family.places
    stores = [expert.folder for expert in pack(base, experts[:-1], tmp_path / "stores", threads=2).experts]
    family = replace(raw.family, places=(base, *stores, experts[-1]))
    recipe = write_recipe(tmp_path / "packed.yml", raw.case, family)
    setting = replace(raw, family=family, recipe=recipe)
    setting.analyze(BLOCK_ELEMENTS)
    partial = 0
    of_raw = setting.with_home("of-raw")  # of packs their indices are known
    analyze(base, experts[-1:], home=of_raw.home)
    grids = [(setting, BLOCK_ELEMENTS), (of_raw, BLOCK_ELEMENTS), (of_raw, 2 * BLOCK_ELEMENTS), (of_raw, 3 * GRAIN)]
    for i, ((known, block), budget) in enumerate(product(grids, ("7%", "30%", "100%"))):
        plan = known.plan(budget, EVERY_POLICY[i % len(EVERY_POLICY)], block_elements=block)
        memory = smallest_memory(plan, tmp_path / f"refused-{i}") if i % 2 else None
        traced = Tracer(server, known, runs=10 * i).run(plan, memory_bytes=memory, cold=i % 2 == 0)
        assert traced.answer["error"] is None
        partial += any(access.levels for tensor in plan.tensors for access in tensor.access)
    assert partial > 1 or name != "ties"  # only rules that trim need less than all of a block


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless({"dare_ties"}.__contains__, ("task_arithmetic", "ties", "dare_ties")))
def test_budgeted_merge__of_cold_files_reads_no_more_from_the_disk(
    tmp_path: Path, server: TracedServer, name: str
) -> None:
    setting = make_setting(tmp_path, CASES[name])
    setting.analyze()
    tracer = Tracer(server, setting)
    base_bytes = sum(array.nbytes for array in setting.family.models[0].values())
    n_files = sum(len(list(place.rglob("*"))) or 1 for place in setting.family.places)
    physical = []
    tracer.run(setting.plan("50%"))  # loads what the server's program needs from the disk
    for budget in ("0", "30%", "100%"):
        plan = setting.plan(budget)
        # Twice: pages of the program that memory pressure took away are read again, which adds to either by chance.
        least = min(tracer.run(plan, cold=True).answer["physical"] for _ in range(2))
        # Beside the experts: the base in full, and of each file its header and its inode.
        allowed = plan.planned_bytes + base_bytes + n_files * 8 * PAGE_BYTES
        assert least <= allowed
        physical.append(least)
    if physical[-1] == 0:
        pytest.skip("this file system's reads are not counted")
    assert physical == sorted(physical)
    assert physical[-1] - physical[0] >= 0.9 * setting.plan("100%").planned_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("budget", ["0", "100000B"])
def test_budgeted_merge__of_many_small_files_costs_nothing_to_open_them(
    tmp_path: Path, server: TracedServer, budget: str
) -> None:
    """Of the files of 150 shards nothing but headers gets into memory beside what is planned, in whole pages."""
    plans = tuple(TensorPlanOf(f"layers.{i:02}", (5000,), BF16, (BF16,)) for i in range(50))
    models = make_budget_models(3, plans=plans)
    places = tuple(write_sharded(tmp_path / f"model-{i}", model, 50) for i, model in enumerate(models))
    family = DiskFamily(models, places)
    recipe = write_recipe(tmp_path / "recipe.yml", CASES["linear"], family)
    setting = Setting(tmp_path, CASES["linear"], family, recipe, tmp_path / "home")
    plan = setting.plan(budget)
    files = [file for place in places[1:] for file in place.glob("*.safetensors")]
    assert len(files) == 150
    traced = Tracer(server, setting).run(plan, cold=True)
    requested = sum(traced.tensor_bytes(place) for place in places[1:])
    assert (requested > 0) == (budget != "0")
    assert requested <= int(budget.removesuffix("B"))
    pages_in_memory = sum(_resident_pages(file) for file in files)
    headers = sum(-(-_header_bytes(file) // PAGE_BYTES) for file in files)
    assert pages_in_memory <= headers + requested // PAGE_BYTES


def _resident_pages(file: Path) -> int:
    with file.open("rb") as stream:
        size = file.stat().st_size
        return round(resident_fraction(stream.fileno(), size) * -(-size // PAGE_BYTES))


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless({"ties"}.__contains__, ("linear", "ties", "dare_ties")))
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["warm", "cold"])
def test_budgeted_merge__whose_read_fails_stays_within_the_plan(
    tmp_path: Path, server: TracedServer, name: str, cold: bool
) -> None:
    setting = make_setting(tmp_path, CASES[name], layout=1)
    setting.analyze()
    tracer = Tracer(server, setting)
    plan = setting.plan("45%", "random")
    failed = 0
    for at in range(1000):
        traced = tracer.run(plan, cold=cold, fault_at=at)
        if not traced.answer["fired"]:
            break
        assert traced.answer["error"] == "storage.io"
        failed += 1
    assert failed >= 3
    assert traced.answer["error"] is None
    assert not list(tmp_path.glob("traced-*"))
    accounts = [sorted(path.name for path in staging.iterdir()) for staging in tmp_path.glob(".*")]
    assert all(names == [LOG_NAME, OWNER_NAME] for names in accounts)  # what was read counts when it is run again


def check_random_merge(server: TracedServer, data: st.DataObject) -> None:
    """Make any small family, plan any merge of it, and run that under the tracer, which checks."""
    draw = data.draw
    case, seed = CASES[draw(st.sampled_from(sorted(CASES)))], draw(st.integers(0, 2**32))
    block = GRAIN * draw(st.sampled_from([1, 1, 2, 16]))
    budget = draw(st.one_of(st.integers(0, 100).map("{}%".format), st.integers(0, 1 << 20).map("{}B".format)))
    policy, forgotten_share = draw(st.sampled_from(EVERY_POLICY)), draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    with tempfile.TemporaryDirectory() as folder:
        plans, layout = draw(tensor_plans(len(case.weights))), draw(st.integers(0, 2))
        setting = make_setting(Path(folder), case, layout=layout, seed=seed, plans=plans)
        if forgotten_share < 1:
            setting.analyze(block)
            setting = setting.forgetful("partial", forgotten_share, seed)
        plan = useful_plan(lambda: setting.plan(budget, policy, block_elements=block, seed=seed))
        if plan is None:
            return
        memory = smallest_memory(plan, Path(folder) / "refused") if draw(st.booleans()) else None
        fault_at = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
        traced = Tracer(server, setting).run(plan, memory_bytes=memory, cold=draw(st.booleans()), fault_at=fault_at)
        assert traced.answer["error"] in ((None, "storage.io") if traced.answer["fired"] else (None,))


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=6)
def test_budgeted_merge__of_any_family_is_sound(server: TracedServer, data: st.DataObject) -> None:
    check_random_merge(server, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=600)
def test_budgeted_merge__of_any_of_very_many_families_is_sound(server: TracedServer, data: st.DataObject) -> None:
    check_random_merge(server, data)
