"""What the fidelity benchmark measured, as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.fidelity_points import Point
from benchmarks.local_text import GENERAL


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One budgeted merge beside the full merge of the same operator and seed.

    `error` is `‖M_A - M_full‖ / ‖M_full - M_0‖` before rounding, `rounded_error` the same of the bfloat16 outputs,
    `flattering_error` is `‖M_A - M_full‖ / ‖M_full‖`. `losses` are those of the bfloat16 output, by domain.
    """

    point: Point
    expert_bytes: int
    budget_bytes: int
    full_expert_bytes: int
    seconds: float
    error: float
    rounded_error: float
    flattering_error: float
    losses: Mapping[str, float]

    @property
    def read_fraction(self) -> float:
        return self.expert_bytes / self.full_expert_bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """A full merge: its held-out losses, and how far it moved from the base: `‖M_full - M_0‖ / ‖M_0‖`."""

    operator: str
    seed: int
    relative_delta_norm: float
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything of one run of the benchmark."""

    base_losses: Mapping[str, float]
    references: tuple[Reference, ...]
    measured: tuple[Fidelity, ...]


def mean_loss(losses: Mapping[str, float]) -> float:
    """Mean over the experts' domains: all but the base's general text."""
    return fmean(loss for domain, loss in losses.items() if domain != GENERAL)


def to_json(report: Report) -> str:
    """All numbers, and the realized share of expert bytes."""
    content = asdict(report)
    for entry, fidelity in zip(content["measured"], report.measured, strict=True):
        entry["read_fraction"] = fidelity.read_fraction
    return json.dumps(content, indent=1) + "\n"


def to_markdown(report: Report) -> str:
    """Per operator three tables, policies by budgets: error, error after rounding, mean held-out loss."""
    parts = [_losses_line(report)]
    for operator in dict.fromkeys(fidelity.point.operator for fidelity in report.measured):
        measured = [fidelity for fidelity in report.measured if fidelity.point.operator == operator]
        parts += [
            _table(f"{operator}: relative error", measured, lambda f: f.error),
            _table(f"{operator}: relative error after rounding to bfloat16", measured, lambda f: f.rounded_error),
            _table(f"{operator}: mean held-out loss", measured, lambda f: mean_loss(f.losses)),
            _table(f"{operator}: share of expert bytes read", measured, lambda f: f.read_fraction),
        ]
    return "\n\n".join(parts) + "\n"


def _losses_line(report: Report) -> str:
    lines = [
        "| model | seeds | relative delta norm | mean held-out loss | general |",
        "|---|---|---|---|---|",
        f"| base | | | {mean_loss(report.base_losses):.4f} | {report.base_losses[GENERAL]:.4f} |",
    ]
    for operator in dict.fromkeys(reference.operator for reference in report.references):
        of_operator = [r for r in report.references if r.operator == operator]
        norm = fmean(r.relative_delta_norm for r in of_operator)
        loss, general = (fmean(values) for values in zip(*map(_loss_pair, of_operator), strict=True))
        lines.append(f"| full {operator} | {len(of_operator)} | {norm:.4f} | {loss:.4f} | {general:.4f} |")
    return "\n".join(lines)


def _loss_pair(reference: Reference) -> tuple[float, float]:
    return mean_loss(reference.losses), reference.losses[GENERAL]


def _table(title: str, measured: Sequence[Fidelity], value: Callable[[Fidelity], float]) -> str:
    budgets = sorted({fidelity.point.budget_percent for fidelity in measured})
    policies = dict.fromkeys(fidelity.point.policy for fidelity in measured)
    header = "| policy | " + " | ".join(f"{budget} %" for budget in budgets) + " |"
    lines = [f"**{title}**", "", header, "|---" * (1 + len(budgets)) + "|"]
    for policy in policies:
        cells = (_cell(_values(measured, policy, budget, value)) for budget in budgets)
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _values(
    measured: Sequence[Fidelity], policy: str, budget_percent: int, value: Callable[[Fidelity], float]
) -> list[float]:
    """The seeds of one cell. With everything read there is one policy, shown for all."""
    at_budget = [fidelity for fidelity in measured if fidelity.point.budget_percent == budget_percent]
    return [value(f) for f in at_budget if f.point.policy == policy or budget_percent == 100]


def _cell(values: Sequence[float]) -> str:
    """Mean, and half the range over seeds."""
    if not values:
        return ""
    half_range = (max(values) - min(values)) / 2
    return f"{fmean(values):.4f}" + (f" ± {half_range:.4f}" if len(values) > 1 else "")
