"""Lower densities under a tight budget: the papers' bounded adjustment of operator parameters.

A budget that holds the share `held` of what reading everything costs holds at most that share of the elements that an
operator would keep of a delta. So an expert's density moves down to `max(min_density, held)`, never up and never below
the bound. For operators that trim it is then raised to the next density whose cut the statistics know, so that
thresholds stay exact; if there is none below the recipe's, it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergepipe.planning.choices import AdjustPolicy
from mergepipe.planning.plan import Fallback
from mergepipe.planning.problem import PlanningProblem
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters

NO_DENSITY = "the operator has no density"


def adjust_densities(
    problem: PlanningProblem, policy: AdjustPolicy, held: float, *, needs_cut: bool
) -> tuple[PlanningProblem, tuple[Fallback, ...]]:
    """Lower the problem's densities to what `held` allows; return the new problem and every decision."""
    densities_E = [_known_densities(problem, e) if needs_cut else None for e in range(len(problem.experts))]
    adjuster = _Adjuster(problem, policy, held, densities_E)
    tasks = tuple(adjuster.adjusted(task) for task in problem.resolution.tasks)
    decisions = tuple(adjuster.decisions) or (
        Fallback(f"operator '{problem.operator}'", "nothing adjusted", NO_DENSITY),
    )
    return replace(problem, resolution=replace(problem.resolution, tasks=tasks)), decisions


def adjusted_density(density: float, min_density: float, held: float, known_densities: Sequence[float] | None) -> float:
    """Return the density to use instead of `density`: one of `known_densities` (if given) or `density` itself.

    Laws: never above `density`; never below `min(density, min_density)`; `density` where `held` is 1.
    """
    target = min(density, max(min_density, held))
    if known_densities is None:
        return target
    return min(
        (known_density for known_density in known_densities if target <= known_density < density), default=density
    )


def _known_densities(problem: PlanningProblem, expert: int) -> list[float]:
    """Return the densities whose cut is known in every analysed tensor."""
    density_sets = [set(statistics.densities_D.tolist()) for statistics in problem.statistics[expert].values()]
    return sorted(set.intersection(*density_sets)) if density_sets else []


class _Adjuster:
    """Adjusts the tasks one by one; each distinct set of parameters is adjusted once."""

    def __init__(
        self,
        problem: PlanningProblem,
        policy: AdjustPolicy,
        held: float,
        known_densities: Sequence[Sequence[float] | None],
    ) -> None:
        self.decisions: list[Fallback] = []
        self._texts = [model.text for model in problem.experts]
        self._expert_of = {model: e for e, model in enumerate(problem.resolution.expert_models)}
        self._policy = policy
        self._held = held
        self._known = known_densities
        self._done: dict[tuple[int, tuple[int, ...]], TensorParameters] = {}
        self._decided: set[tuple[int, float]] = set()

    def adjusted(self, task: MergeTask) -> MergeTask:
        if task.action is not Action.MERGE or not any("density" in expert for expert in task.parameters.experts):
            return task
        key = (id(task.parameters), task.expert_models)  # the problem keeps the parameters alive
        if key not in self._done:
            experts = tuple(
                {**parameters, "density": self._density(self._expert_of[model], float(parameters["density"]))}
                for model, parameters in zip(task.expert_models, task.parameters.experts, strict=True)
            )
            self._done[key] = replace(task.parameters, experts=experts)
        return replace(task, parameters=self._done[key])

    def _density(self, e: int, density: float) -> float:
        adjusted = adjusted_density(density, self._policy.min_density, self._held, self._known[e])
        if (e, density) not in self._decided:
            self._decided.add((e, density))
            decision = (
                f"density stays at {density:g}" if adjusted == density else f"density {density:g} -> {adjusted:g}"
            )
            reason = f"the budget holds {100 * self._held:.4g} % of everything; not below {self._policy.min_density:g}"
            self.decisions.append(Fallback(f"expert '{self._texts[e]}'", decision, reason))
        return adjusted
