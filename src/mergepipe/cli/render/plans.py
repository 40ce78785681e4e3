"""Plans and explanations as text tables for people."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from mergepipe.cli.render.layout import Fact, columns_text, facts_text, listed, notice_facts, share_text
from mergepipe.cli.render.levels import grouped_layers, layers_range, levels_text
from mergepipe.cli.render.verdicts import verdict_facts
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes
from mergepipe.planning.level_counts import WHOLE, blocks_by_level
from mergepipe.planning.plan import Plan
from mergepipe.reports import ExpertShare, Explanation, Sampling
from mergepipe.runs.budget.verdict import analysis_advice, verdict_of

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
        used_blocks = sum(
            access.n_blocks + sum(stop - start for start, stop, _ in access.shared) for access in accesses
        )
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
    head = ["expert", "read", "shared", "as the base", "omitted", "planned", "realized"]
    graded = ["blocks read"] if _is_graded(explanation) else []
    return columns_text(head + graded, [_expert_row(expert, explanation) for expert in explanation.experts])


def _is_graded(explanation: Explanation) -> bool:
    """Whether some blocks are read at a level of their store."""
    return any(name != WHOLE for expert in explanation.experts for name, _ in expert.levels)


def _expert_row(expert: ExpertShare, explanation: Explanation) -> list[str]:
    counts = [
        share_text(count, explanation.blocks) for count in (expert.read, expert.shared, expert.free, expert.omitted)
    ]
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
    return f"{table}\n(by expert: blocks read, shared, or equal to the base's)"


def _choices(label: str, choices: Iterable[_Choice]) -> list[Fact]:
    """One line for all that differ in names and numbers only."""
    groups: dict[tuple[str, str], list[_Choice]] = defaultdict(list)
    for choice in choices:
        groups[_NUMBER.sub("#", _before_name(choice.decision)), _NUMBER.sub("#", choice.reason)].append(choice)
    lines = [(label, _group_text(group)) for group in list(groups.values())[:MAX_GROUPS]]
    n_more = sum(len(group) for group in list(groups.values())[MAX_GROUPS:])
    return [*lines, (label, f"and {n_more} more: see the plan")] if n_more else lines


def _before_name(text: str) -> str:
    return text.partition(" '")[0]


def _group_text(group: Sequence[_Choice]) -> str:
    first = group[0]
    return f"{listed([choice.where for choice in group])}: {first.decision} ({first.reason})"


def _of_everything(nbytes: int, full_bytes: int) -> str:
    return f"{format_bytes(nbytes)}, {share_text(nbytes, full_bytes)} of {format_bytes(full_bytes)}"


def _bytes_or_dash(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _shortened(text: str, most: int = MAX_RUN_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
