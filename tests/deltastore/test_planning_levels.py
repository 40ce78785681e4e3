"""Plans that mix levels of packed experts with blocks of raw ones: sound, consistent, and as good as they say."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import mergepipe
from mergepipe import Plan, pack
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.pieces import Level
from mergepipe.engine.planned_access import level_of_blocks
from mergepipe.options import PlanOptions
from mergepipe.planning.budget import Policy
from mergepipe.planning.plan import ALL, parse_plan
from mergepipe.planning.problem import Ladder, ladder_steps
from support.disk_families import DiskFamily, read_snapshot, weights_digest, write_family, write_recipe
from support.model_folders import recipe_of, write_adapter
from support.oracle import MergeCase
from support.public_names import BLOCK_ELEMENTS
from support.rounding import decode, encode

SIZES = {"layers.0.up": 3 * BLOCK_ELEMENTS + 7001, "layers.1.up": 2 * BLOCK_ELEMENTS, "layers.1.norm": 700}
STDS = (1.5e-4, 3e-4, 6e-4)
AVERAGE = MergeCase("task_arithmetic", (0.4, 0.3, 0.3), (1.0, 1.0, 1.0))
TIES = MergeCase("ties", (0.4, 0.3, 0.3), (0.19, 0.1, 0.15), normalize=True)
POLICIES = ("norm", "conflict", "random")


@dataclass(frozen=True, slots=True)
class Place:
    """A family, packed, and packed but for its last expert; the catalog's home, which knows the raw and the mixed."""

    raw: DiskFamily
    packed: DiskFamily
    mixed: DiskFamily
    home: Path

    def recipe(self, case: MergeCase, name: str = "mixed", out_dtype: str | None = None) -> Path:
        family = {"mixed": self.mixed, "raw": self.raw, "packed": self.packed}[name]
        return write_recipe(self.home / f"{case.operator}-{name}-{out_dtype}.yml", case, family, out_dtype)


def values(n: int, seed: int, std: float) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * std).astype(np.float32)


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("levels")
    base = {name: encode(values(n, i, 0.02), BF16) for i, (name, n) in enumerate(SIZES.items())}
    models = [base]
    for e, std in enumerate(STDS):
        moved = {}
        for i, (name, stored) in enumerate(base.items()):
            step = values(len(stored), 100 + 10 * e + i, std * (1 + i))
            moved[name] = encode(decode(stored.tobytes(), BF16) + step, BF16)
        models.append(moved)
    raw = write_family(folder / "raw", models)
    stores = pack(raw.places[0], raw.places[1:], folder / "stores", threads=2)
    packed = (raw.places[0], *(expert.folder for expert in stores.experts))
    home = folder / "home"
    home.mkdir()
    mergepipe.analyze(raw.places[0], [*packed[1:3], *raw.places[1:]], home=home)
    return Place(raw, replace(raw, places=packed), replace(raw, places=(*packed[:3], raw.places[3])), home)


@pytest.fixture(name="folder")
def make_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mergepipe-levels-"))
    yield folder
    shutil.rmtree(folder)


def plan_of(place: Place, case: MergeCase, budget: str, policy: str = "norm") -> Plan:
    return mergepipe.plan(place.recipe(case), budget, home=place.home, select=policy)


def levels_EB(plan: Plan) -> NDArray[np.int16]:
    """Levels of all blocks, tensor after tensor: 0 where nothing is read."""
    columns = []
    for tensor in plan.tensors:
        n_blocks = -(-tensor.n_elements // plan.block_elements)
        columns.append(np.maximum(level_of_blocks(tensor, n_blocks), 0))
    return np.concatenate(columns, axis=1)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [AVERAGE, TIES], ids=["average", "ties"])
@pytest.mark.parametrize("policy", POLICIES)
def test_plan__reads_levels_within_every_budget(place: Place, case: MergeCase, policy: str) -> None:
    plans = [plan_of(place, case, f"{share}%", policy) for share in (0, 7, 20, 45, 70, 100)]
    levels = [levels_EB(plan) for plan in plans]
    assert not levels[0].any()
    for plan in plans:
        assert plan.planned_bytes <= plan.budget_bytes
        assert parse_plan(plan.to_json()) == plan
    assert (levels[0] < levels[-1]).any()
    assert plans[-1].planned_bytes == plans[-1].full_cost_bytes
    partial = {int(level) for each in levels for level in np.unique(each)} - {0, ALL}
    # a sum reads levels that leave something out in this order only
    assert (Level.HEAD in partial) == (case is TIES or policy == "norm")


@pytest.mark.parametrize("case", [AVERAGE, TIES], ids=["average", "ties"])
def test_plan__of_everything_gives_the_bytes_of_the_merge_in_full(place: Place, folder: Path, case: MergeCase) -> None:
    report = mergepipe.run(plan_of(place, case, "100%"), folder / "planned", home=place.home)
    mergepipe.merge(place.recipe(case, "raw"), folder / "full", catalog=False)
    assert weights_digest(folder / "planned") == weights_digest(folder / "full")
    assert report.expert_bytes + report.analysis_bytes <= plan_of(place, case, "100%").planned_bytes
    if case is TIES:
        assert Level.LOSSLESS not in levels_EB(plan_of(place, case, "100%"))


@pytest.mark.thorough
@given(
    share=st.integers(0, 100), policy=st.sampled_from(POLICIES), case=st.sampled_from([AVERAGE, TIES]),
    threads=st.integers(1, 3), memory=st.integers(40 << 20, 200 << 20),
)  # fmt: skip
@settings(deadline=None, max_examples=settings.default.max_examples // 3)  # type: ignore[union-attr]
def test_run__of_levels_reads_no_more_than_planned_whatever_the_run(
    place: Place, share: int, policy: str, case: MergeCase, threads: int, memory: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(place, case, f"{share}%", policy)
        report = mergepipe.run(plan, Path(name) / "out", catalog=False, threads=threads, memory_bytes=memory)
        again = mergepipe.run(plan, Path(name) / "again", catalog=False)
        assert weights_digest(Path(name) / "out") == weights_digest(Path(name) / "again")
        for each in (report, again):
            assert each.expert_bytes + each.analysis_bytes <= plan.planned_bytes <= plan.budget_bytes


def float32_error(place: Place, plan: Plan, folder: Path) -> float:
    mergepipe.run(plan, folder / "out", force=True, catalog=False)
    found, models = read_snapshot(folder / "out"), place.raw.models
    left = whole = 0.0
    for name in SIZES:
        base, *experts = (decode(model[name].tobytes(), BF16).astype(np.float64) for model in models)
        change = np.einsum("e,en->n", AVERAGE.weights, np.stack(experts) - base)
        left += float(np.square(found[name].astype(np.float64) - base - change).sum())
        whole += float(np.square(change).sum())
    return float(np.sqrt(left / whole))


def test_plan__of_levels_beats_dropping_blocks_of_the_originals(place: Place, folder: Path) -> None:
    recipes = {name: place.recipe(AVERAGE, name, "float32") for name in ("raw", "mixed", "packed")}
    full = mergepipe.plan(recipes["raw"], "100%", home=place.home).full_cost_bytes
    by_norm = PlanOptions(select="norm")
    budget = f"{full // 8}B"
    plans = {name: mergepipe.plan(recipe, budget, home=place.home, options=by_norm) for name, recipe in recipes.items()}
    errors = {name: float32_error(place, plan, folder) for name, plan in plans.items()}
    assert errors["packed"] < 0.5 * errors["raw"]
    assert errors["packed"] < errors["mixed"] < errors["raw"]


ladders = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=n, max_size=n),
        st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=n, max_size=n),
    )
)


@given(drawn=ladders)
def test_find_steps__go_up_to_the_last_level_at_falling_rates(drawn: tuple[list[list[int]], list[list[float]]]) -> None:
    costs_BK, errors_BK = np.array(drawn[0]).cumsum(axis=1), np.sort(np.array(drawn[1]), axis=1)[:, ::-1]
    left_KB = errors_BK[:, 1:].T.copy()
    left_KB[-1] = 0
    ladder = Ladder((1, 3, 4, ALL), 4096 * costs_BK.T.copy(), left_KB, errors_BK[:, 0].copy(), errors_BK[:, 0].copy())
    steps = ladder_steps(ladder)
    for block in range(len(costs_BK)):
        own = steps.block_S == block
        assert steps.level_S[own][-1] == ALL
        assert (np.diff(steps.level_S[own]) > 0).all()
        assert (np.diff(steps.rate_S[own]) <= 0).all()
        assert steps.cost_S[own].sum() == ladder.cost_KB[-1, block]
        assert steps.gain_S[own].sum() == pytest.approx(ladder.unread_B[block])


def test_explain__tells_levels_by_expert(place: Place, folder: Path) -> None:
    plan = plan_of(place, AVERAGE, "15%")
    (folder / "plan.json").write_bytes(plan.to_json())
    found = mergepipe.explain(folder / "plan.json", tensor="layers.0.up")
    assert found.experts[0].in_part + found.experts[1].in_part > 0
    assert found.experts[2].in_part == 0
    levels = level_of_blocks(plan.tensors[0], -(-plan.tensors[0].n_elements // plan.block_elements))
    told = {use.use for use in found.tensors[0].uses if "level" in use.use}
    assert told == {f"read at level {level}" for level in np.unique(levels) if 0 < level < ALL}


def test_verify__makes_a_merge_of_levels_again(place: Place, folder: Path) -> None:
    mergepipe.run(plan_of(place, AVERAGE, "20%"), folder / "out", home=place.home)
    report = mergepipe.verify(folder / "out", deep_fraction=1.0, home=place.home)
    assert report.is_sound
    assert set(report.replayed) == set(SIZES)


def test_plan__of_packed_experts_alone_needs_no_analysis_and_takes_larger_blocks(place: Place, folder: Path) -> None:
    by_norm = PlanOptions(select="norm")
    plan = mergepipe.plan(place.recipe(AVERAGE, "packed", "float32"), "15%", home=folder / "empty", options=by_norm)
    assert plan.block_elements == 8 * BLOCK_ELEMENTS
    fine = mergepipe.plan(
        place.recipe(AVERAGE, "packed"), "15%", home=folder / "empty", select="norm", block_elements=BLOCK_ELEMENTS
    )
    assert plan.full_cost_bytes < fine.full_cost_bytes


def test_plan__mixes_a_store_a_raw_expert_and_an_adapter(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base_N, name = values(1024 * 768, 1, 0.02), "model.layers.0.mlp.up_proj.weight"
    models_N = (base_N, base_N + values(base_N.size, 5, 3e-4), base_N + values(base_N.size, 6, 3e-4))
    family = write_family(tmp_path / "raw", [{name: encode(each, BF16).reshape(1024, 768)} for each in models_N])
    module, low = name.removesuffix(".weight"), {"lora_A": (4, 768), "lora_B": (1024, 4)}
    parts = {f"{module}.{part}.weight": 0.01 * rng.standard_normal(shape, np.float32) for part, shape in low.items()}
    adapter = write_adapter(tmp_path / "adapter", parts, lora_alpha=4, target_modules=["up_proj"])
    store = pack(family.places[0], family.places[1:2], tmp_path / "stores", threads=2).experts[0].folder
    digests = []
    for first in (family.places[1], store):
        models = {place: {"weight": 0.3} for place in (first, family.places[2], adapter)}
        recipe = recipe_of("task_arithmetic", models, family.places[0])
        mergepipe.analyze(family.places[0], [first, family.places[2], adapter], home=tmp_path / "home")
        mergepipe.run(mergepipe.plan(recipe, "100%", home=tmp_path / "home"), tmp_path / "out", force=True)
        digests.append(weights_digest(tmp_path / "out"))
    assert digests[0] == digests[1]
    plan = mergepipe.plan(recipe, "20%", home=tmp_path / "home", select="norm")
    assert plan.tensors[0].access[0].levels
    assert plan.tensors[0].access[2].blocks
    report = mergepipe.run(plan, tmp_path / "some", catalog=False)
    assert report.expert_bytes + report.analysis_bytes <= plan.planned_bytes


@pytest.mark.parametrize("rule", ["magmax", "geometric_median"])
def test_plan__of_everything_reads_what_the_dtype_of_the_expert_alone_changes(tmp_path: Path, rule: str) -> None:
    wide, narrow = np.array([1, 1e6, 1 + 1e-6], np.float32), np.array([1, np.inf, 1], np.float16)
    base, expert = write_family(tmp_path, ({"w": wide, "v": wide[2:]}, {"w": narrow, "v": narrow[2:]})).places
    store = pack(base, [expert], tmp_path / "stores").experts[0].folder
    recipe = {"merge_method": rule, "base_model": str(base), "models": [{"model": str(store)}]}
    full = dict(mergepipe.merged_tensors(recipe))
    for policy in Policy:
        planned = mergepipe.merged_tensors(recipe, budget="100%", select=policy)
        assert all(tensor.tobytes() == full[name].tobytes() for name, tensor in planned)
