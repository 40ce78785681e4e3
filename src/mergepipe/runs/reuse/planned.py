"""Plan with reuse: blocks of earlier snapshots cost nothing, and the freed budget is spent on further blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mergepipe.engine.work import MergeWork, OutputPlan
from mergepipe.planning.plan import Plan, ReusedSnapshot, Runs
from mergepipe.planning.planner import Ranking
from mergepipe.recipes.resolve.tasks import MergeTask
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.runs.reuse.blocks import EarlierSnapshot, EarlierSnapshots, ReusableTensor, Reuse, find_reuse
from mergepipe.runs.reuse.keys import NamedKeys, SourceNames
from mergepipe.runs.work import planned_access, renormalizes

MAX_EARLIER_BUDGETS = 8
MAX_STEPS = 10
CLOSE_ENOUGH = 1 / 256  # of the budget

TasksOf = Callable[[Plan], tuple[MergeTask, ...]]
"""Returns the tasks with a plan's parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class ReusingPlanner:
    """Plans from a ranking without charging for blocks that `snapshots` already hold.

    An unknown content id is empty: then no block of that expert is reused under random operators.
    """

    ranking: Ranking
    inputs: Inputs
    tasks_of: TasksOf
    content_ids: Mapping[int, str]
    snapshots: EarlierSnapshots

    def plan(self) -> Plan:
        """Return the longest prefix found whose charged cost fits the budget.

        The charged cost need not grow with the prefix: adding an expert to a block may make it equal to one of an
        earlier snapshot. So the full merge and the cost of earlier plans are tried before a bisection.
        With a target error, the prefix that reaches it is returned.
        """
        budget = self.ranking.budget_bytes
        best = self._charged(budget)
        if self.ranking.options.target_error is not None or not self._has_snapshots:
            return replace(best, outlook=self.ranking.outlook(best))
        above = self.ranking.everything_bytes
        for limit in self._trial_budgets():
            if limit <= best.budget_bytes:
                break
            tried = self._charged(limit)
            if tried.planned_bytes <= budget:
                best = tried
                break
            above = limit
        for _ in range(MAX_STEPS):
            limit = (best.budget_bytes + above) // 2
            if best.reuse == () or limit - best.budget_bytes <= max(1, int(budget * CLOSE_ENOUGH)):
                break
            tried = self._charged(limit)
            best, above = (tried, above) if tried.planned_bytes <= budget else (best, limit)
        return replace(best, budget_bytes=budget, outlook=self.ranking.outlook(best))

    @property
    def _has_snapshots(self) -> bool:
        return any(True for _ in self.snapshots)

    def _trial_budgets(self) -> list[int]:
        """List the prefix costs above the budget that are tried, in descending order."""
        full = self.ranking.everything_bytes
        earlier = [cost for snapshot in self.snapshots if (cost := _prefix_cost(snapshot)) is not None and cost < full]
        return sorted({full, *list(dict.fromkeys(earlier))[:MAX_EARLIER_BUDGETS]}, reverse=True)

    def _charged(self, limit_bytes: int) -> Plan:
        """Plan the prefix of a limit, without the cost of blocks it can reuse."""
        plan = self.ranking.plan(limit_bytes)
        if not self._has_snapshots:
            return plan
        tasks = self.tasks_of(plan)
        work = MergeWork(
            OutputPlan((), tasks),
            plan.operator,
            plan.seed,
            self.content_ids,
            repeats=self.inputs.repeats,
            access=planned_access(plan),
            renormalize=renormalizes(plan),
        )
        store = self.snapshots.store
        keys = NamedKeys(work, tasks, SourceNames.of(store, [checkpoint for _, _, checkpoint in self.inputs.leaves()]))
        reuse = find_reuse(work, tasks, keys, self.snapshots)
        return _with_reuse(plan, reuse, self.ranking)


def _prefix_cost(earlier: EarlierSnapshot) -> int | None:
    """Return what an earlier plan charged plus what it saved by reuse; None for a full merge."""
    content = earlier.manifest.plan
    if content is None:
        return None
    planned, reuse = content.get("planned_bytes"), content.get("reuse", ())
    saved = [sum(snapshot["saved_bytes"]) for snapshot in reuse] if isinstance(reuse, list | tuple) else []
    return planned + sum(saved) if isinstance(planned, int) else None


def _with_reuse(plan: Plan, reuse: Reuse, ranking: Ranking) -> Plan:
    """Add the reused blocks to a plan and subtract their cost."""
    planned = {tensor.name for tensor in plan.tensors}
    reused = {name: tensor for name, tensor in reuse.known.items() if name in planned}
    if not reused:
        return plan
    runs = {name: _runs(tensor, plan.block_elements) for name, tensor in reused.items()}
    earlier = {tensor.snapshot.sid: tensor.snapshot for tensor in reused.values()}
    snapshots, saved_E = [], np.zeros(sum(model.role == "expert" for model in plan.models), np.int64)
    for sid, snapshot in earlier.items():
        runs_of_snapshot = {name: runs[name] for name, tensor in reused.items() if tensor.snapshot.sid == sid}
        own_E = ranking.read_cost_E(plan, runs_of_snapshot)
        saved_E += own_E
        snapshots.append(ReusedSnapshot(sid, str(snapshot.path), tuple(own_E.tolist())))
    index = {sid: i for i, sid in enumerate(earlier)}
    of_experts = iter(saved_E.tolist())
    return replace(
        plan,
        planned_bytes=plan.planned_bytes - int(saved_E.sum()),
        models=tuple(
            replace(model, planned_bytes=model.planned_bytes - next(of_experts)) if model.role == "expert" else model
            for model in plan.models
        ),
        tensors=tuple(
            replace(t, reused=tuple((a, b, index[reused[t.name].snapshot.sid]) for a, b in runs[t.name]))
            if t.name in runs
            else t
            for t in plan.tensors
        ),
        reuse=tuple(snapshots),
    )


def _runs(tensor: ReusableTensor, block_elements: int) -> Runs:
    return tuple((span.start // block_elements, -(-span.stop // block_elements)) for span in tensor.reusable.spans)
