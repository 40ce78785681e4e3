"""Parts of an output as text tables for people."""

from __future__ import annotations

from mergepipe.cli.render.layout import columns_text, facts_text
from mergepipe.cli.render.merges import merge_table
from mergepipe.core.units import format_bytes, format_seconds
from mergepipe.reports import PartReport, PartsStatus


def part_table(report: PartReport) -> str:
    """Show the shards that a worker made, and whether the output is complete."""
    if report.merge is not None:
        return (
            f"part {report.part}: the last one\n{merge_table(report.merge)}"
            if report.part
            else merge_table(report.merge)
        )
    state = "published" if report.is_published else f"{report.done_shards} of {report.n_shards} shards are done"
    return facts_text(
        [
            ("part", report.part or "-"),
            ("shards made", str(len(report.made_shards))),
            ("done before", str(len(report.found_shards))),
            ("base read", format_bytes(report.base_bytes)),
            ("experts read", format_bytes(report.expert_bytes)),
            ("written", format_bytes(report.output_bytes)),
            ("time", format_seconds(report.seconds)),
            ("whole output", state),
            ("output", str(report.out)),
        ]
    )


def status_table(status: PartsStatus) -> str:
    """Show the state of an output, shard by shard."""
    limit = "no limit" if status.limit_bytes is None else f"a budget of {format_bytes(status.limit_bytes)}"
    read = f"{format_bytes(status.read_bytes)} of {format_bytes(status.planned_bytes)} planned, {limit}"
    state = "published" if status.is_published else f"{status.done_shards} of {len(status.shards)} shards are done"
    facts = [("output", str(status.out)), ("state", state)]
    if not status.is_published:
        facts.append(("experts read", read))
    if status.n_parts is not None:
        missing = ", ".join(f"{number}/{status.n_parts}" for number in status.missing_parts)
        facts.append(("missing parts", missing or "none"))
    if not status.shards:
        return facts_text(facts)
    rows = [[s.name, s.state, s.part or "-", s.worker or "-", format_bytes(s.size_bytes)] for s in status.shards]
    return facts_text(facts) + "\n\n" + columns_text(("shard", "state", "part", "worker", "size"), rows, left=4)
