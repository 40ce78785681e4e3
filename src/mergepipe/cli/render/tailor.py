"""Reports of tailor as text tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.cli.printing import report_json
from mergepipe.core.escaping import printable
from mergepipe.core.records import encode
from mergepipe.core.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from mergepipe.core.strict_json import JsonValue
    from mergepipe.snapshots.composite import AverageRecord, UnitStaleness
    from mergepipe.tailor.composition import CompositionReport
    from mergepipe.tailor.reports import Change, CheckpointReport, DiffReport, InspectReport, UnitReport

_STALE_NOTE = (
    "Old weights raise the loss after resuming; old optimizer moments hardly do. A small model early in training "
    "resumed 0.57 nats higher with units 200 steps apart, and 0.02 nats higher with units 50 steps apart. "
    "`mergepipe tailor diff` shows how far two checkpoints are apart."
)


def inspect_table(report: InspectReport) -> str:
    """Each checkpoint, its units, and whether they fit together."""
    blocks = [_checkpoint(checkpoint) for checkpoint in report.checkpoints]
    if len(report.checkpoints) > 1:
        verdict = "parts of these can be composed" if report.comparable else "parts of these cannot be composed:"
        blocks.append("\n".join([verdict, *(f"  {printable(reason)}" for reason in report.reasons)]))
    return "\n\n".join(blocks)


def _checkpoint(report: CheckpointReport) -> str:
    stage = f" stage {report.stage}" if report.stage is not None else ""
    head = [
        printable(report.path),
        f"  {report.format}{stage}, for {report.framework}, step {report.step}, {plural(report.world_size, 'rank')}, "
        f"{format_bytes(report.bytes)}",
    ]
    head += [f"  {printable(alias)} is tied to {printable(owner)}" for alias, owner in report.tied.items()]
    head += [f"  missing: {printable(name)}" for name in report.missing[:10]]
    kinds = list(dict.fromkeys(kind for unit in report.units for kind in unit.bytes))
    rows = [["unit", "params", *kinds, "adam step"], *(_unit_row(unit, kinds) for unit in report.units)]
    return "\n".join([*head, *_aligned(rows)])


def _unit_row(unit: UnitReport, kinds: Sequence[str]) -> list[str]:
    steps = ", ".join(f"{step:g}" for step in unit.adam_steps) + (" (shared)" if unit.shared_step else "")
    sizes = [format_bytes(unit.bytes.get(kind, 0)) for kind in kinds]
    return [printable(unit.unit), str(unit.parameters), *sizes, steps or "-"]


def composition_table(report: CompositionReport) -> str:
    """Show the source and staleness of each unit of a composition, and what was or would be written."""
    plan = report.plan
    if report.average is not None:
        return "\n".join([*_averaged(report, report.average), *_outcome(report)])
    skeleton, state = plan.assignment.skeleton, plan.assignment.state
    rows = [["unit", "from", "step", "age", "adam step", "policy"], *(_staleness_row(unit) for unit in plan.staleness)]
    lines = _aligned(rows)
    lines += ["", f"state from  {printable(str(state.path))} (step {state.step})"]
    lines += [f"structure   {printable(str(skeleton.path))}"] if state is not skeleton else []
    lines += [f"writes      {format_bytes(plan.output_bytes)} in {plural(len(plan.files), 'file')}"]
    lines += _outcome(report)
    if any(source.age for unit in plan.staleness for source in unit.sources):
        lines += ["", _STALE_NOTE]
    return "\n".join(lines)


def _averaged(report: CompositionReport, average: AverageRecord) -> list[str]:
    """The weight of each checkpoint, and what is made of them."""
    plan = report.plan
    sources = zip(plan.assignment.sources, average.weights, strict=True)
    rows = [["checkpoint", "step", "weight"]]
    rows += [[printable(source.path.name), str(source.step), f"{weight:.6g}"] for source, weight in sources]
    made = {"none": "a model, without optimizer state", "last": "a checkpoint, with the newest moments"}
    needs_config = average.optimizer == "none" and all(file.name != CONFIG_NAME for file in plan.files)
    return [
        *_aligned(rows if len(rows) > 2 else [row[:-1] for row in rows]),
        "",
        *([f"weights     {average.scheme}"] if len(rows) > 2 else []),
        f"makes       {made.get(average.optimizer, 'a checkpoint, with averaged moments')}",
        *(f"note        {notice}" for notice in plan.notices),
        *([f"lacks       {CONFIG_NAME}, which loaders need: give --config DIR"] if needs_config else []),
        f"writes      {format_bytes(plan.output_bytes)} in {plural(len(plan.files), 'file')}, "
        f"reads {format_bytes(plan.read_bytes)}",
    ]


def _outcome(report: CompositionReport) -> list[str]:
    made = report.manifest
    if made is None:
        return []
    check = made.self_check
    compared = f"{check.thoroughness.value}: {check.elements} elements of {plural(check.states, 'state')} compared"
    return [
        f"self check  {compared}, {plural(check.copies, 'copy').replace('copys', 'copies')} of weights against masters",
        f"time        {format_seconds(report.seconds)}",
        f"composite   {made.sid}",
        f"output      {printable(str(report.out))}",
    ]


def _staleness_row(unit: UnitStaleness) -> list[str]:
    paths = ", ".join(printable(PurePosixPath(source.path).name) for source in unit.sources)
    paths += f" {unit.origin}" if unit.origin else ""
    steps = ", ".join(str(source.step) for source in unit.sources)
    ages = ", ".join(str(source.age) for source in unit.sources)
    adam = ", ".join(f"{step:g}" for step in unit.adam_steps)
    return [printable(unit.unit), paths, steps, ages, adam or "-", ", ".join(unit.step_policies) or "-"]


def composition_json(report: CompositionReport) -> str:
    """One line: the plan, staleness, and what was written if anything was."""
    plan = report.plan
    state = plan.assignment.state
    content: dict[str, JsonValue] = {
        "out": str(report.out) if report.out is not None else None,
        "sid": report.manifest.sid if report.manifest is not None else None,
        "state_from": str(state.path),
        "step": state.step,
        "read_bytes": plan.read_bytes,
        "output_bytes": plan.output_bytes,
        "files": len(plan.files),
        "seconds": round(report.seconds, 3),
        "units": encode(plan.staleness),
        **({"notices": list(plan.notices)} if plan.notices else {}),
    }
    if report.average is not None:
        checkpoints = zip(plan.assignment.sources, report.average.weights, strict=True)
        content["average"] = {
            "scheme": report.average.scheme,
            "optimizer": report.average.optimizer,
            "checkpoints": [{"path": str(c.path), "step": c.step, "weight": w} for c, w in checkpoints],
        }
    return report_json(content)


def diff_table(report: DiffReport) -> str:
    """Relative changes, unit by unit."""
    head = [
        f"from {printable(str(report.first.path))} (step {report.first.step})",
        f"to   {printable(str(report.second.path))} (step {report.second.step})",
    ]
    rows = [["unit", "weights", "exp_avg", "exp_avg_sq"]]
    rows += [
        [printable(u.unit), _relative(u.weights), _relative(u.exp_avg), _relative(u.exp_avg_sq)] for u in report.units
    ]
    return "\n".join([*head, *_aligned(rows)])


def _relative(change: Change | None) -> str:
    if change is None:
        return "-"
    return f"{change.relative:.3g}" if math.isfinite(change.relative) else "from zero"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
