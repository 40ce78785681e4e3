"""Show an extracted LoRA adapter."""

from __future__ import annotations

from mergepipe.cli.render.layout import facts_text
from mergepipe.cli.render.merges import grouped_names
from mergepipe.core.units import format_bytes, format_percent, format_seconds, plural
from mergepipe.reports import ExtractLoraReport


def extraction_table(report: ExtractLoraReport) -> str:
    """Ranks, errors, and what was left out."""
    ranks = sorted({tensor.rank for tensor in report.tensors})
    span = "-" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    worst = max(report.tensors, key=lambda tensor: tensor.relative_error, default=None)
    worst_fact = [] if worst is None else [("largest error", f"{format_percent(worst.relative_error)} of {worst.name}")]
    return facts_text(
        [
            ("adapted", plural(len(report.tensors), "tensor")),
            ("rank", span),
            ("error", f"{format_percent(report.relative_error)} of the difference's norm is not in the adapter"),
            *worst_fact,
            *([("saved whole", ", ".join(report.saved_modules))] if report.saved_modules else []),
            *(("not held", line) for line in grouped_names((skipped.reason, skipped.name) for skipped in report.left)),
            ("base model", report.base_model_id or "unknown on the Hub; --base-model-id names it"),
            ("read", f"{format_bytes(report.base_bytes + report.model_bytes)} in {format_seconds(report.seconds)}"),
            ("adapter", f"{format_bytes(report.adapter_bytes)}, {report.out}"),
        ]
    )
