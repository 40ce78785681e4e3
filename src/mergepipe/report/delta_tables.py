"""What making or applying a delta checkpoint did, in a few lines."""

from __future__ import annotations

from mergepipe.escaping import printable
from mergepipe.report.units import format_bytes, format_seconds, plural
from mergepipe.workflows.deltas import DeltaReport

_MOST_TENSORS = 5


def delta_table(report: DeltaReport, how: str) -> str:
    """Sizes, forms, and how far base + delta is from the expert; `how` says what was written."""
    sizes = f"{format_bytes(report.stored_bytes)} {how}, {format_bytes(report.expert_bytes)} the expert"
    forms = f"{report.as_delta} as differences, {report.unchanged} as in the base, {report.in_full} in full"
    lines = [f"{printable(str(report.out))}: {sizes}, {format_seconds(report.seconds)}", f"tensors: {forms}"]
    return "\n".join([*lines, *_exactness(report)])


def _exactness(report: DeltaReport) -> list[str]:
    if not report.inexact:
        return ["base + delta is the expert, bit for bit"]
    elements, tensors = plural(report.differing_elements, "element"), plural(len(report.inexact), "tensor")
    lines = [f"base + delta is not the expert: {elements} of {tensors} differ, by {report.worst:.3g} at most"]
    for tensor in sorted(report.inexact, key=lambda each: (-each.worst, each.name))[:_MOST_TENSORS]:
        lines.append(f"  {printable(tensor.name)}: {plural(tensor.differing, 'element')}, {tensor.worst:.3g} at most")
    return [*lines, "`mergepipe delta --exact` stores such tensors in full"]
