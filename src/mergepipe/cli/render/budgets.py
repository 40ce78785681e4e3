"""Plans, verdicts, explanations, sweeps and searches as text tables for people."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from mergepipe.cli.render.layout import (
    Fact,
    available_columns,
    columns_text,
    facts_text,
    listed,
    notice_facts,
    number_text,
    share_text,
)
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, format_percent, format_seconds
from mergepipe.planning.budget import Policy
from mergepipe.planning.plan import Plan
from mergepipe.reports import BudgetVerdict, ExpertShare, Explanation, LayerShare, Sampling, SearchReport, SweepReport
from mergepipe.runs.budget.verdict import WHOLE, analysis_advice, blocks_by_level, verdict_of

_MOST_TRIALS = 10  # that a search lists


def verdict_sentence(verdict: BudgetVerdict) -> str:
    """Say how much is read and how it is chosen, and where the gain of such merges was measured."""
    if verdict.is_full:
        return "The full merge: everything of the experts is read."
    share = share_text(verdict.planned_bytes, verdict.full_bytes)
    read = f"{share} of the experts' bytes are read, by policy '{verdict.policy}'"
    return f"{read}. What such merges kept of a gain: {verdict.measured}."


def unspent_text(verdict: BudgetVerdict) -> str:
    """Say what of the budget is not used, and why; nothing where that is little."""
    return f"{format_bytes(verdict.unspent_bytes)}: {verdict.unspent_reason}." if verdict.unspent_bytes else ""


def verdict_facts(verdict: BudgetVerdict | None) -> list[Fact]:
    """Return the lines of a table that tell a verdict: it first, then what is missing of whom."""
    if verdict is None:
        return []
    unspent = unspent_text(verdict)
    return [
        ("verdict", verdict_sentence(verdict)),
        *([("unspent", unspent)] if unspent else []),
        *(("expert", line) for line in coverage_lines(verdict)),
    ]


def coverage_lines(verdict: BudgetVerdict) -> list[str]:
    """Return a line for each expert, those of which nothing is read first: what is missing of it."""
    return [f"{expert.model}: {missing_text(expert.share, expert.rough)}" for expert in verdict.experts]


def missing_text(share: float, rough: float = 0.0) -> str:
    """Say what is missing of an expert, by the share of the blocks that it changes that is in the merge."""
    if not share:
        return "nothing of it is in the merge"
    text = f"{share_text(1 - share, 1)} of the blocks that it changes are missing"
    text = "all blocks that it changes are in the merge" if share == 1 else text
    return f"{text}, {share_text(rough, 1)} are rough" if rough else text


MOST_GROUPS = 24
_GROUP_COLUMNS = 9
_MOST_NAME = 28


def levels_text(levels: Sequence[tuple[str, int]]) -> str:
    """Shares of the blocks that are read: `largest exactly 40 %, whole 60 %`."""
    total = sum(count for _, count in levels)
    return ", ".join(f"{name} {format_percent(count / total)}" for name, count in levels) if total else "-"


def grouped_layers(layers: Sequence[LayerShare], experts: Sequence[str]) -> list[Sequence[LayerShare]]:
    """Return runs of layers, as many as fit into a line, those outside of layers on their own."""
    columns = available_columns()
    names = min(max((len(name) for name in experts), default=0), _MOST_NAME) + 2
    room = MOST_GROUPS if columns is None else (columns - max(names, _MOST_NAME)) // _GROUP_COLUMNS
    most = min(max(room, 2), MOST_GROUPS)
    numbered, unnumbered = [x for x in layers if x.layer], [x for x in layers if not x.layer]
    size = max(1, -(-len(numbered) // (most - 1)))
    return [*(numbered[i : i + size] for i in range(0, len(numbered), size)), *([unnumbered] if unnumbered else [])]


def layers_range(group: Sequence[LayerShare]) -> str:
    """Name a run of layers: `4-7`, or `others`."""
    first, last = group[0].layer, group[-1].layer
    return (first if first == last else f"{first}-{last}") or "others"


MAX_GROUPS = 6
MAX_RUN_CHARACTERS = 60

_NUMBER = re.compile(r"\d+")


class _Choice(Protocol):
    """A fallback or an adjustment."""

    @property
    def where(self) -> str: ...
    @property
    def decision(self) -> str: ...
    @property
    def reason(self) -> str: ...


def plan_table(plan: Plan, stored: Path | None) -> str:
    """Show what a plan reads of every expert, and missing statistics."""
    is_graded = any(access.levels for tensor in plan.tensors for access in tensor.access)
    blocks = sum(-(-tensor.n_elements // plan.block_elements) for tensor in plan.tensors)
    rows = []
    for e, model in enumerate(model for model in plan.models if model.role == "expert"):
        accesses = [access for tensor in plan.tensors if (access := tensor.access_of(e)) is not None]
        used_blocks = sum(access.n_blocks for access in accesses)
        free = sum(stop - start for access in accesses for start, stop in access.free)
        rows.append([
            model.model, format_bytes(model.planned_bytes), share_text(model.planned_bytes, model.full_cost_bytes),
            share_text(used_blocks, blocks), share_text(free, blocks),
            *([levels_text(blocks_by_level(accesses))] if is_graded else []),
        ])  # fmt: skip
    head = [
        *verdict_facts(verdict_of(plan)),
        ("operator", plan.operator),
        ("policy", f"{plan.policy}, where omitted: {plan.on_omit}"),
        ("budget", _of_everything(plan.budget_bytes, plan.full_cost_bytes)),
        ("planned", _of_everything(plan.planned_bytes, plan.full_cost_bytes)),
        *_sampling_facts(plan.sampling),
    ]
    tail = [
        *_choices("fallback", plan.fallbacks),
        *_choices("adjusted", plan.adjustments),
        *notice_facts(plan.recipe_notices),
        *(("advice", advice) for advice in analysis_advice(plan)),
        ("digest", plan.digest),
        *([("stored", str(stored))] if stored is not None else []),
    ]
    graded = ["how closely"] if is_graded else []
    table = columns_text(["expert", "read", "of it", "blocks read", "as the base", *graded], rows)
    return f"{facts_text(head)}\n\n{table}\n\n{facts_text(tail)}"


def explain_table(explanation: Explanation) -> str:
    """An explanation: the whole, by expert, by layer, and tensors that were asked for."""
    parts = [facts_text(_explain_facts(explanation)), _expert_table(explanation), _layer_table(explanation)]
    tail = [*_choices("fallback", explanation.fallbacks), *_choices("adjusted", explanation.adjustments)]
    parts.extend([facts_text(tail)] if tail else [])
    for tensor in explanation.tensors:
        rows = [[use.model, use.use, _shortened(use.blocks), use.reason] for use in tensor.uses]
        title = f"{printable(tensor.name)}: {tensor.blocks} blocks, touched: {_shortened(tensor.touched) or 'none'}"
        parts.append(f"{title}\n{columns_text(['expert', 'use', 'blocks', 'why'], rows, left=4)}")
    return "\n\n".join(parts)


def _explain_facts(explanation: Explanation) -> list[Fact]:
    facts: list[Fact] = [
        *verdict_facts(explanation.verdict),
        (explanation.kind, explanation.sid or explanation.plan_digest or ""),
        ("operator", explanation.operator),
    ]
    if explanation.policy is None:
        facts.append(("plan", "none: a full merge, every expert is everywhere"))
    else:
        facts.append(("policy", f"{explanation.policy}, where omitted: {explanation.on_omit}"))
        facts.append(("budget", _of_everything(explanation.budget_bytes or 0, explanation.full_bytes or 0)))
        facts.append(("planned", _of_everything(explanation.planned_bytes or 0, explanation.full_bytes or 0)))
        facts.extend(_sampling_facts(explanation.sampling))
        if explanation.sid is not None:
            facts.append(("plan digest", explanation.plan_digest or ""))
    if explanation.realized_bytes is not None:
        facts.append(("realized", format_bytes(explanation.realized_bytes)))
    text = (
        f"{explanation.touched} of {explanation.blocks} blocks ({share_text(explanation.touched, explanation.blocks)})"
    )
    facts.append(("touched", f"{text} hold something of an expert; the others are the base's"))
    return facts


def _sampling_facts(sampling: Sampling | None) -> list[Fact]:
    """Tell the units of a sample, how probable each was, and what merged deltas are multiplied by."""
    if sampling is None:
        return []
    least, mean, most = sampling.least_probability, sampling.mean_probability, sampling.most_probability
    drawn = f"units of {sampling.unit_elements} elements, drawn with probability {mean:.3g} ({least:.3g} to {most:.3g})"
    factor = f", times {1 / most:.3g} to {1 / least:.3g}" if least > 0 else ""
    by = f", by the importance in {sampling.importance}" if sampling.importance else ""
    return [("sample", f"{drawn}{by}, seed {sampling.seed}; merged deltas are divided by it{factor}")]


def _expert_table(explanation: Explanation) -> str:
    head = ["expert", "read", "as the base", "omitted", "planned", "realized"]
    graded = ["blocks read"] if _is_graded(explanation) else []
    return columns_text(head + graded, [_expert_row(expert, explanation) for expert in explanation.experts])


def _is_graded(explanation: Explanation) -> bool:
    """Whether some blocks are read at a level of their store."""
    return any(name != WHOLE for expert in explanation.experts for name, _ in expert.levels)


def _expert_row(expert: ExpertShare, explanation: Explanation) -> list[str]:
    counts = [share_text(count, explanation.blocks) for count in (expert.read, expert.free, expert.omitted)]
    row = [expert.model, *counts, _bytes_or_dash(expert.planned_bytes), _bytes_or_dash(expert.realized_bytes)]
    if _is_graded(explanation):
        row.append(levels_text(expert.levels))
    return row


def _layer_table(explanation: Explanation) -> str:
    """Show the coverage of experts by layer: an expert a row, groups of layers the columns."""
    names = [expert.model for expert in explanation.experts]
    groups = grouped_layers(explanation.layers, names)
    blocks = [sum(layer.blocks for layer in group) for group in groups]
    touched = [sum(layer.touched for layer in group) for group in groups]
    taking_part = [[sum(layer.taking_part[e] for layer in group) for group in groups] for e in range(len(names))]
    rows = [
        ["blocks", *map(str, blocks)],
        *(
            [name, *(share_text(count, whole) for count, whole in zip(counts, blocks, strict=True))]
            for name, counts in (("touched", touched), *zip(names, taking_part, strict=True))
        ),
    ]
    table = columns_text(["in layers", *(layers_range(group) for group in groups)], rows)
    return f"{table}\n(by expert: blocks read, or equal to the base's)"


def _choices(label: str, choices: Iterable[_Choice]) -> list[Fact]:
    """One line for all that differ in names and numbers only."""
    groups: dict[tuple[str, str], list[_Choice]] = defaultdict(list)
    for choice in choices:
        groups[_NUMBER.sub("#", choice.decision.partition(" '")[0]), _NUMBER.sub("#", choice.reason)].append(choice)
    lines = [(label, _group_text(group)) for group in list(groups.values())[:MAX_GROUPS]]
    n_more = sum(len(group) for group in list(groups.values())[MAX_GROUPS:])
    return [*lines, (label, f"and {n_more} more: see the plan")] if n_more else lines


def _group_text(group: Sequence[_Choice]) -> str:
    first = group[0]
    return f"{listed([choice.where for choice in group])}: {first.decision} ({first.reason})"


def _of_everything(nbytes: int, full_bytes: int) -> str:
    return f"{format_bytes(nbytes)}, {share_text(nbytes, full_bytes)} of {format_bytes(full_bytes)}"


def _bytes_or_dash(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_RUN_CHARACTERS else f"{text[: MAX_RUN_CHARACTERS - 3]}..."


def verdict_text(report: SweepReport) -> str:
    """Say what was measured: a loss by a command, or distances, which say little."""
    if report.full_loss is not None:
        return f"the loss of the full merge is {loss_text(report.full_loss)}; those under budgets are below"
    if report.policy == Policy.SAMPLE:
        return "a sample is right on average, and far from the full merge in each draw: measure a loss with --evaluate"
    return "distances say nothing of a gain: measure a loss with --evaluate"


def unread_lines(report: SweepReport) -> list[str]:
    """Return a line for each budget under which nothing is read of some expert, by the policy that was chosen."""
    points = (point for point in report.points if point.policy == report.policy and point.unread)
    return [f"{point.budget}: nothing of {listed(point.unread)} is in the merge" for point in points]


def measured(report: SweepReport) -> tuple[bool, bool]:
    """Whether errors were measured, and losses."""
    points = report.points
    return any(point.error is not None for point in points), any(point.loss is not None for point in points)


def loss_text(loss: float | None) -> str:
    """Return a loss with six significant digits: those of near merges differ in the third or fourth."""
    return "-" if loss is None else f"{loss:.6g}"


def rounding_note(report: SweepReport) -> str:
    """Return the note on the rounding that errors are measured against."""
    return f"errors are taken from the outputs, after rounding to {', '.join(report.dtypes)}"


def sweep_table(report: SweepReport) -> str:
    """Budget by budget and policy by policy: error, bytes, time."""
    has_errors, has_losses = measured(report)
    error_facts = [
        ("error", "distance to the full merge, as a share of what the full merge changes"),
        ("of norm", "the same distance as a share of the full merge's norm"),
        ("note", rounding_note(report)),
    ] if has_errors else []  # fmt: skip
    facts = [
        ("verdict", verdict_text(report)),
        *(("unread", line) for line in unread_lines(report)),
        ("operator", report.operator),
        ("full merge", f"{format_bytes(report.full_expert_bytes)} of the experts read, "
                       f"{format_seconds(report.full_seconds)}"),
        ("changes", f"the full merge is {number_text(report.changed_norm)} away from the base, "
                    f"{share_text(report.changed_norm, report.full_norm)} of its own norm"),
        *error_facts,
        *notice_facts(report.recipe_notices),
    ]  # fmt: skip
    is_graded = any(name != WHOLE for point in report.points for name, _ in point.levels)
    graded = ["blocks read"] if is_graded else []
    losses, errors = ["loss"] * has_losses, ["error", "of norm"] * has_errors
    head = ["budget", "policy", "read", "of all", "time", *losses, *errors, *graded]
    rows = [
        [
            point.budget,
            point.policy,
            format_bytes(point.expert_bytes),
            share_text(point.expert_bytes, report.full_cost_bytes),
            format_seconds(point.seconds),
            *([loss_text(point.loss)] if has_losses else []),
            *([number_text(x) for x in (point.error, point.flattering_error)] if has_errors else []),
            *([levels_text(point.levels)] if is_graded else []),
        ]
        for point in report.points
    ]
    return f"{facts_text(facts)}\n\n{columns_text(head, rows, left=2)}"


def search_table(report: SearchReport) -> str:
    """The values that were published, and the trials, best first."""
    best, counts = report.best_trial, Counter(trial.state for trial in report.trials)
    facts = [
        *((name, str(value)) for name, value in best.values.items()),
        *(zip(report.objectives, map(loss_text, best.losses), strict=True)),
        ("trials", ", ".join(f"{count} {state}" for state, count in counts.items())),
        ("experts read", format_bytes(sum(trial.expert_bytes for trial in report.trials))),
        *(("failed", f"trial {trial.number}: {trial.failure}") for trial in report.trials if trial.failure),
        ("study", str(report.study)),
        ("output", str(report.out)),
    ]
    complete = [trial for trial in report.trials if trial.losses]
    sign = -1 if report.objectives[0].endswith(":max") else 1
    complete.sort(key=lambda trial: (not trial.is_best, sign * trial.losses[0]))
    rows = [
        [str(trial.number), *map(loss_text, trial.losses), *(_value_text(trial.values[name]) for name in best.values),
         format_seconds(trial.seconds)]
        for trial in complete[:_MOST_TRIALS]
    ]  # fmt: skip
    head = ["trial", *report.objectives, *best.values, "time"]
    return f"{facts_text(facts)}\n\n{columns_text(head, rows)}"


def _value_text(value: float | str | bool | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
