"""A home under random commands, crashes among them, always agrees with a dict of what was asked for."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import mergepipe
from mergepipe.errors import OutputError
from mergepipe.reports import MergeReport
from mergepipe.runs import progress
from mergepipe.snapshots import work_log as work_log
from support.crashes import Death, run_killed
from support.disk_families import tree_digest, weights_digest, write_single
from support.refusals import refuses

PLACES = ("one", "two", "three")
MOST_EXPERTS = 4
SHARD_BYTES = 12_000
BLOCK_ELEMENTS = 16_384
MOST_OPERATIONS = 130


@dataclass(frozen=True, slots=True)
class Wish:
    """A merge that could be asked for: an operator over experts by name (`#3`) or over snapshots by place."""

    operator: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What the model knows of a visible snapshot. `is_recorded` is False where a crash may have left it unrecorded."""

    sid: str
    digest: str
    is_recorded: bool


weights = st.sampled_from([0.25, 0.5, 1.0, -0.5])
places = st.sampled_from(PLACES)
operators = st.sampled_from(["linear", "task_arithmetic", "ties"])


class HomeMachine(RuleBasedStateMachine):
    """Register, analyze, plan, run, crash, resume, replace, remove, collect, rebuild, verify."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.home, self.outs, self.models = self.root / "home", self.root / "outs", self.root / "models"
        self.outs.mkdir()
        self.visible: dict[str, Known] = {}
        self.experts: list[str] = []
        self.analyzed: set[str] = set()
        self.wanted: dict[tuple[object, ...], str] = {}
        self.interrupted: dict[str, Wish] = {}
        self.intervals = work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS
        work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = 8_000, 4096, math.inf

    def teardown(self) -> None:
        work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = self.intervals
        shutil.rmtree(self.root)

    # --- models ---

    @initialize()
    def start(self) -> None:
        self._write_model("base", 0)
        self.register()
        self.register()
        self.inputs = tree_digest(self.models)

    @precondition(lambda self: len(self.experts) < MOST_EXPERTS)
    @rule()
    def register(self) -> None:
        name = f"#{len(self.experts)}"
        self._write_model(name, len(self.experts) + 1)
        self.experts.append(name)
        self.inputs = tree_digest(self.models)

    def _write_model(self, name: str, seed: int) -> None:
        rng, base = np.random.default_rng([7, seed]), np.random.default_rng(7)
        shapes = {"embed.weight": (40, 64), "layers.0.weight": (70, 33), "layers.1.weight": (64, 64), "norm": (64,)}
        tensors = {}
        for tensor, shape in shapes.items():
            moved = rng.standard_normal(shape) * 0.01 * (seed > 0)
            tensors[tensor] = (base.standard_normal(shape) + moved).astype(np.float32)
        folder = write_single(self.models / name, tensors)
        (folder / "config.json").write_text(json.dumps({"model_type": "test", "torch_dtype": "float32"}))

    @rule(pick=st.integers(0, MOST_EXPERTS - 1))
    def analyze(self, pick: int) -> None:
        name = self.experts[pick % len(self.experts)]
        report = mergepipe.analyze(
            self.models / "base", [self.models / name], block_elements=BLOCK_ELEMENTS, home=self.home, threads=2
        )
        (found,) = report.experts
        assert found.analyzed_tensors == (0 if name in self.analyzed else found.comparable_tensors)
        self.analyzed.add(name)

    # --- merges ---

    @rule(place=places, operator=operators, picks=st.lists(st.integers(0, 9), min_size=1, max_size=3), data=st.data())
    def merge(self, place: str, operator: str, picks: list[int], data: st.DataObject) -> None:
        wish = self._wish(place, operator, picks, data)
        if place in self.visible:
            before = self.visible[place]
            with refuses(OutputError, "output.exists"):
                self._merge(wish, place, force=False)
            assert self._seen(place) == (before.sid, before.digest)
        self._done(place, wish, self._merge(wish, place, force=place in self.visible))

    @rule(
        place=places, operator=operators, picks=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        at=st.integers(0, MOST_OPERATIONS), death=st.sampled_from(Death), data=st.data(),
    )  # fmt: skip
    def crash(self, place: str, operator: str, picks: list[int], at: int, death: Death, data: st.DataObject) -> None:
        wish, old = self._wish(place, operator, picks, data), self.visible.get(place)
        wanted = self._wanted(wish)
        is_killed = run_killed(lambda: self._merge(wish, place, force=old is not None), at, death)
        seen = self._seen(place)
        if seen is not None and (old is None or seen != (old.sid, old.digest) or not is_killed):
            assert seen[1] == wanted
            self.visible[place] = Known(*seen, is_recorded=not is_killed)
        else:
            assert seen == (None if old is None else (old.sid, old.digest))
            assert is_killed
        if is_killed:
            self.interrupted[place] = wish

    @precondition(lambda self: self.interrupted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.interrupted)))
        wish = self.interrupted[place]
        if any(source in PLACES and source not in self.visible for source in wish.sources):
            del self.interrupted[place]
            return
        self._done(place, wish, self._merge(wish, place, force=place in self.visible))

    @rule(place=places, budget=st.sampled_from(["30%", "70%", "100%"]), operator=operators, data=st.data())
    def plan_and_run(self, place: str, budget: str, operator: str, data: st.DataObject) -> None:
        wish = self._wish(place, operator, [0, 1], data)
        recipe = self._recipe(wish)
        plan = mergepipe.plan(recipe, budget, home=self.home, block_elements=BLOCK_ELEMENTS)
        assert plan.planned_bytes <= plan.budget_bytes
        mergepipe.run(plan, self.root / "again", home=self.home, catalog=False, threads=2)
        digest = weights_digest(self.root / "again")
        shutil.rmtree(self.root / "again")
        report = mergepipe.run(
            plan, self.outs / place, force=place in self.visible, home=self.home, threads=2, shard_bytes=SHARD_BYTES
        )
        assert report.expert_bytes <= plan.planned_bytes
        if budget == "100%":
            assert digest == self._wanted(wish)
        self._note(place, report, digest)

    def _wish(self, place: str, operator: str, picks: list[int], data: st.DataObject) -> Wish:
        known = [*self.experts, *(other for other in sorted(self.visible) if other != place)]
        sources = tuple(dict.fromkeys(known[pick % len(known)] for pick in picks))
        return Wish(operator, sources, tuple(data.draw(weights) for _ in sources))

    def _path(self, source: str) -> Path:
        return self.outs / source if source in PLACES else self.models / source

    def _recipe(self, wish: Wish) -> Path:
        models = []
        for source, weight in zip(wish.sources, wish.weights, strict=True):
            parameters = {"weight": weight} | ({"density": 0.5} if wish.operator == "ties" else {})
            models.append({"model": str(self._path(source)), "parameters": parameters})
        recipe: dict[str, object] = {
            "merge_method": wish.operator,
            "base_model": str(self.models / "base"),
            "models": models,
        }
        if wish.operator == "linear":
            recipe["parameters"] = {"normalize": False}
        path = self.root / "recipe.yml"
        path.write_text(json.dumps(recipe))
        return path

    def _merge(self, wish: Wish, place: str, *, force: bool) -> MergeReport:
        return mergepipe.merge(
            self._recipe(wish), self.outs / place, force=force, home=self.home, threads=2, shard_bytes=SHARD_BYTES
        )

    def _wanted(self, wish: Wish) -> str:
        """What the same merge gives in a place of its own, without a catalog or anything to go on with."""
        contents = tuple(self.visible[s].digest if s in PLACES else s for s in wish.sources)
        key = (wish.operator, contents, wish.weights)
        if key not in self.wanted:
            out = self.root / "wanted"
            mergepipe.merge(self._recipe(wish), out, catalog=False, resume=False, threads=1)
            self.wanted[key] = weights_digest(out)
            shutil.rmtree(out)
        return self.wanted[key]

    def _done(self, place: str, wish: Wish, report: MergeReport) -> None:
        self._note(place, report, self._wanted(wish))

    def _note(self, place: str, report: MergeReport, digest: str) -> None:
        assert self._seen(place) == (report.sid, digest)
        self.visible[place] = Known(report.sid, digest, is_recorded=True)
        self.interrupted.pop(place, None)
        assert mergepipe.lineage(self.outs / place, home=self.home)[0].sid == report.sid

    def _seen(self, place: str) -> tuple[str, str] | None:
        """What stands at a place: its sid and the digest of its weights."""
        out = self.outs / place
        if not out.exists():
            return None
        return json.loads((out / "mergepipe.json").read_text())["sid"], weights_digest(out)

    # --- keeping ---

    @precondition(lambda self: self.visible)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.visible)))
        report = mergepipe.verify(self.outs / place, threads=2, home=self.home)
        assert (report.damages, report.notices) == ((), ())

    @precondition(lambda self: self.visible)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.visible)))
        shutil.rmtree(self.outs / place)
        del self.visible[place]

    @rule()
    def collect(self) -> None:
        listed = mergepipe.gc([self.outs], dry_run=True, home=self.home)
        assert not any(garbage.is_removed for garbage in listed.garbage)
        report = mergepipe.gc([self.outs], home=self.home)
        assert [(g.kind, g.what) for g in report.garbage] == [(g.kind, g.what) for g in listed.garbage]
        assert report.living == ()
        assert sorted(path.name for path in self.outs.iterdir()) == sorted(self.visible)
        while mergepipe.gc([self.outs], home=self.home).garbage:  # what a collected row needed is garbage now
            pass
        rows = mergepipe.list_snapshots(home=self.home)
        needed = {source.sid for row in rows for source in row.inputs}
        assert [row.sid for row in rows if not row.is_present and row.sid not in needed] == []
        self.interrupted.clear()

    @rule()
    def rebuild(self) -> None:
        mergepipe.rebuild_catalog([self.outs], home=self.home)
        self.visible = {place: Known(k.sid, k.digest, is_recorded=True) for place, k in self.visible.items()}
        rows = {(row.path.name, row.sid) for row in mergepipe.list_snapshots(home=self.home) if row.is_present}
        assert rows == {(place, known.sid) for place, known in self.visible.items()}

    # --- what always holds ---

    @invariant()
    def what_is_visible_is_whole_and_what_was_asked_for(self) -> None:
        assert {p.name for p in self.outs.iterdir() if not p.name.startswith(".")} == set(self.visible)
        for place, known in self.visible.items():
            assert self._seen(place) == (known.sid, known.digest)

    @invariant()
    def the_catalog_knows_what_was_published_and_nothing_twice(self) -> None:
        rows = [(row.path.name, row.sid) for row in mergepipe.list_snapshots(home=self.home) if row.is_present]
        assert len(rows) == len(set(rows))
        for place, known in self.visible.items():
            assert not known.is_recorded or (place, known.sid) in rows

    @invariant()
    def inputs_stay_as_they_are(self) -> None:
        if self.experts:
            assert tree_digest(self.models) == self.inputs


@pytest.mark.parametrize(("n_examples", "n_steps"), [(3, 10), pytest.param(30, 30, marks=pytest.mark.slow)])
def test_home__agrees_with_its_model(n_examples: int, n_steps: int) -> None:
    histories = settings(
        max_examples=n_examples, stateful_step_count=n_steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), derandomize=n_steps == 10,
    )  # fmt: skip
    run_state_machine_as_test(HomeMachine, settings=histories)
