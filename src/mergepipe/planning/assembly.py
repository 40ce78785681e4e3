"""Assemble a plan from a selection: runs of blocks per tensor and expert, models, fallback notices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.canonical_json import canonical_json
from mergepipe.core.records import encode
from mergepipe.planning.candidates import Candidates, KnownStatistics
from mergepipe.planning.plan import NOTHING_READ, UNSPENT, Access, PlannedModel, PlannedTensor, Runs, SharedRuns
from mergepipe.planning.problem import Columns, PlanningModel, PlanningProblem
from mergepipe.planning.rules import ALL, Rules
from mergepipe.planning.selection import Selection
from mergepipe.recipes.tasks import TensorParameters
from mergepipe.reports import Fallback

MOST_UNSPENT = 1 / 20  # of a budget: less is what no further block fits into
SPREAD = "it was analysed by larger blocks; `mergepipe analyze --block-elements {}` makes them exact"


def planned_tensors(
    candidates: Candidates, selection: Selection, rules: Rules
) -> tuple[tuple[TensorParameters, ...], tuple[PlannedTensor, ...]]:
    """Return the distinct parameters, in order of first use, and one `PlannedTensor` per merged tensor."""
    if selection.drawn_B is not None:  # what is equal to the base takes part in a sample's cuts where it was drawn
        candidates = replace(candidates, free_EB=candidates.free_EB & selection.drawn_B)
    access = [_accesses(e, candidates, selection, rules) for e in range(candidates.n_experts)]
    slot_ET, probability_T = candidates.columns.slot_ET, selection.probability_T
    tensors: list[PlannedTensor] = []
    parameters: dict[bytes, TensorParameters] = {}
    place_of: dict[bytes, int] = {}
    for t, task in enumerate(candidates.columns.tasks):
        key = canonical_json(encode(task.parameters))
        parameters.setdefault(key, task.parameters)
        ordered = candidates.columns.participants(t)
        tensors.append(
            PlannedTensor(
                name=task.name,
                n_elements=task.base.n_elements,
                parameters=place_of.setdefault(key, len(place_of)),
                access=tuple(_among_participants(access[e][t], slot_ET[:, t]) for e in ordered),
                models=tuple(ordered),
                probability=1.0 if probability_T is None else float(probability_T[t]),
            )
        )
    return tuple(parameters.values()), tuple(tensors)


def _among_participants(access: Access, slot_E: NDArray[np.int16]) -> Access:
    """Rewrite the serving experts of shared runs to their index among the tensor's experts."""
    if not access.shared:
        return access
    shared = tuple((start, stop, int(slot_E[source])) for start, stop, source in access.shared)
    return replace(access, shared=shared)


def _accesses(e: int, candidates: Candidates, selection: Selection, rules: Rules) -> list[Access]:
    columns = candidates.columns
    read = _runs(selection.read_EB[e], columns)
    level_B = selection.level_EB[e].astype(np.int16)
    levels = _shared_runs((level_B > 0) & (level_B < ALL), level_B, columns)
    free = _runs(candidates.free_EB[e], columns)
    shared = _shared_runs(selection.served_EB[e], candidates.served_by_EB[e], columns)
    is_partial_B = (level_B > 0) & (level_B < ALL)
    for t in range(len(columns.tasks)):
        if (e, t) in candidates.ladders:
            inside = columns.of_tensor(t)
            is_partial_B[inside] &= level_B[inside] < candidates.ladders[e, t].levels_K[-1]
    is_missing_B = ~(selection.read_EB[e] | candidates.free_EB[e]) | is_partial_B
    n_missing_T = np.bincount(columns.tensor_B[is_missing_B], minlength=len(columns.tasks))
    # what is read in full, or all that the rule needs of it, has its exact cut computed on the way, what is sampled
    # that of the sample
    samples = selection.drawn_B is not None
    cuts_exactly = [(e, t) in rules.cut_errors and (samples or not n_missing_T[t]) for t in range(len(columns.tasks))]
    return [
        Access(
            blocks=read[t],
            free=free[t],
            shared=shared[t],
            cut=None if cuts_exactly[t] else rules.cuts.get((e, t)),
            products=rules.products.get((e, t)),
            levels=levels[t],
        )
        for t in range(len(columns.tasks))
    ]


def _runs(mask_B: NDArray[np.bool_], columns: Columns) -> list[Runs]:
    """Return per tensor the half-open runs of True, counted from the tensor's first block."""
    start_R, stop_R, cut_T = _edges(mask_B, np.zeros(len(mask_B), np.int16), columns)
    pairs = list(zip(start_R.tolist(), stop_R.tolist(), strict=True))
    return [tuple(pairs[a:b]) for a, b in pairwise(cut_T)]


def _shared_runs(mask_B: NDArray[np.bool_], source_B: NDArray[np.int16], columns: Columns) -> list[SharedRuns]:
    if not mask_B.any():
        return [()] * len(columns.tasks)
    start_R, stop_R, cut_T = _edges(mask_B, source_B, columns)
    first_R = np.flatnonzero(mask_B & _begins(mask_B, source_B, columns))
    triples = list(zip(start_R.tolist(), stop_R.tolist(), source_B[first_R].tolist(), strict=True))
    return [tuple(triples[a:b]) for a, b in pairwise(cut_T)]


def _begins(mask_B: NDArray[np.bool_], value_B: NDArray[np.int16], columns: Columns) -> NDArray[np.bool_]:
    """Mark the blocks that begin a run: their mask or value differs from the block before."""
    begins_B = np.ones(len(mask_B), np.bool_)
    begins_B[1:] = (mask_B[1:] != mask_B[:-1]) | (value_B[1:] != value_B[:-1])
    begins_B[1:] |= columns.tensor_B[1:] != columns.tensor_B[:-1]
    return begins_B


def _edges(
    mask_B: NDArray[np.bool_], value_B: NDArray[np.int16], columns: Columns
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Return starts and stops of runs inside their tensors, and the index of each tensor's first run."""
    begins_B = _begins(mask_B, value_B, columns)
    start_R = np.flatnonzero(mask_B & begins_B)
    stop_R = np.flatnonzero(mask_B & np.append(begins_B[1:], True)) + 1
    cut_T = np.searchsorted(start_R, columns.first_T).tolist()
    first_R = columns.first_T[columns.tensor_B[start_R]]
    return start_R - first_R, stop_R - first_R, cut_T


def planned_models(
    problem: PlanningProblem,
    full_E: NDArray[np.int64],
    planned_E: NDArray[np.int64],
    side_E: NDArray[np.int64],
) -> tuple[PlannedModel, ...]:
    """Build all `PlannedModel`s; models that are never an expert are read in full where they are the base."""
    expert_of = {model: e for e, model in enumerate(problem.resolution.expert_models)}
    models = []
    for index, model in enumerate(problem.models):
        e = expert_of.get(index)
        if e is None:
            base_bytes = problem.resolution.base_bytes_of(index)
            models.append(_planned_model("base", model, base_bytes, base_bytes))
        else:
            planned = _planned_model("expert", model, int(full_E[e]), int(planned_E[e]))
            models.append(replace(planned, side_bytes=int(side_E[e])))
    return tuple(models)


def _planned_model(role: str, model: PlanningModel, full_cost_bytes: int, planned_bytes: int) -> PlannedModel:
    return PlannedModel(
        role=role,
        model=model.text,
        path=str(model.checkpoint.path),
        identity=model.identity,
        content_id=model.content_id,
        files=model.checkpoint.files,
        full_cost_bytes=full_cost_bytes,
        planned_bytes=planned_bytes,
    )


def whole_tensor_fallbacks(
    problem: PlanningProblem, columns: Columns, reasons: Mapping[tuple[int, int], str]
) -> tuple[Fallback, ...]:
    """Build one notice per expert and reason, naming the first tensor."""
    tensors: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (e, t), reason in sorted(reasons.items()):
        tensors[e, reason].append(t)
    return tuple(
        Fallback(
            f"expert '{problem.experts[e].text}'",
            f"{len(places)} of {len(columns.tasks)} tensors are read whole or not at all, from "
            f"'{columns.tasks[places[0]].name}' on",
            reason,
        )
        for (e, reason), places in tensors.items()
    )


def unknown_fallbacks(
    problem: PlanningProblem, columns: Columns, unknown: Mapping[tuple[int, int], str]
) -> tuple[Fallback, ...]:
    """Build one notice per expert and reason of tensors that are planned by blocks though nothing is known of them."""
    counts = Counter((e, reason) for (e, _), reason in sorted(unknown.items()))
    return tuple(
        Fallback(
            f"expert '{problem.experts[e].text}'",
            f"the blocks of {n} of {len(columns.tasks)} tensors are spread over the model, whatever is in them",
            reason,
        )
        for (e, reason), n in counts.items()
    )


def estimate_fallbacks(
    problem: PlanningProblem, columns: Columns, known_statistics: KnownStatistics, rules: Rules
) -> tuple[Fallback, ...]:
    """Build notices per expert: that its norms are spread, that cuts come from a histogram."""
    notices = []
    for e, model in enumerate(problem.experts):
        spread_T = known_statistics.known_ET[e] & ~known_statistics.exact_ET[e]
        of_histogram = [error for (expert, _), error in rules.cut_errors.items() if expert == e]
        where, n_tensors = f"expert '{model.text}'", len(columns.tasks)
        if spread_T.any():
            n_spread = int(spread_T.sum())
            decision = f"the norms of {n_spread} of {n_tensors} tensors are those of larger blocks, spread evenly"
            notices.append(Fallback(where, decision, SPREAD.format(problem.block_elements)))
        if of_histogram:
            decision = f"the magnitude cuts of {len(of_histogram)} of {n_tensors} tensors are taken from histograms"
            reason = f"the share that is kept is off by at most {max(of_histogram):.2g} where a tensor is read in part"
            notices.append(Fallback(where, decision, reason))
    return tuple(notices)


def unread_fallbacks(problem: PlanningProblem, budget_bytes: int) -> tuple[Fallback, ...]:
    """Build one notice for each expert whose index does not fit the budget."""
    fallbacks = []
    for e in sorted(problem.unread) if budget_bytes else ():
        model = problem.experts[e]
        cost = 0 if model.checkpoint.encoded is None else model.checkpoint.encoded.cost_bytes
        reason = f"its index costs {cost} bytes, which the budget of {budget_bytes} bytes does not hold as well"
        fallbacks.append(Fallback(f"expert '{model.text}'", NOTHING_READ, reason))
    return tuple(fallbacks)


def unspent_fallbacks(budget_bytes: int, planned_bytes: int, full_bytes: int) -> tuple[Fallback, ...]:
    """Build the notice of a budget of which a good part is left though something could still be read."""
    unspent_bytes = budget_bytes - planned_bytes
    if planned_bytes >= full_bytes or unspent_bytes <= MOST_UNSPENT * budget_bytes:
        return ()
    reason = "what else could be read comes in larger pieces"
    return (Fallback("budget", f"{unspent_bytes} of {budget_bytes} bytes {UNSPENT}", reason),)


def starved_fallbacks(
    problem: PlanningProblem, candidates: Candidates, selection: Selection, budget_bytes: int
) -> tuple[Fallback, ...]:
    """Build one notice for each expert that differs from the base and of which the budget reads nothing."""
    if not budget_bytes:
        return ()
    contributes_E = (selection.read_EB | selection.served_EB).any(axis=1)
    differs_E = (~candidates.free_EB).any(axis=1)
    unread_E = np.isin(np.arange(candidates.n_experts), list(problem.unread))
    reason = f"within {budget_bytes} bytes the blocks of other experts come first"
    return tuple(
        Fallback(f"expert '{problem.experts[e].text}'", NOTHING_READ, reason)
        for e in np.flatnonzero(differs_E & ~contributes_E & ~unread_E).tolist()
    )
