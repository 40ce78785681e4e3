"""What packing and unpacking did, for people."""

from __future__ import annotations

from mergepipe.report.units import format_bytes, format_rate, format_seconds, plural
from mergepipe.workflows.packing import PackedExpert, PackReport
from mergepipe.workflows.unpacking import UnpackReport


def pack_table(report: PackReport) -> str:
    """A line for each expert, and how to get replaced ones back."""
    lines = [_packed_line(expert) for expert in report.experts]
    for expert in report.experts:
        if expert.is_original_removed:
            lines.append(
                f"{expert.expert} was removed; `mergepipe unpack {expert.store} -o {expert.expert}` "
                f"brings it back and needs the base {report.base}"
            )
    return "\n".join(lines)


def _packed_line(expert: PackedExpert) -> str:
    if not expert.is_new:
        return f"{expert.store}: was packed before, left as it is"
    share = expert.store_bytes / expert.tensor_bytes if expert.tensor_bytes else 1.0
    blocks = ", ".join(f"{plural(count, 'block')} {codec}" for codec, count in expert.blocks.items())
    speed = format_rate(expert.tensor_bytes / expert.seconds) if expert.seconds else "no time"
    return (
        f"{expert.store}: {format_bytes(expert.tensor_bytes)} in {format_bytes(expert.store_bytes)} ({share:.1%}), "
        f"{format_seconds(expert.seconds)}, {speed}; {blocks or 'no blocks'}"
    )


def unpack_line(report: UnpackReport) -> str:
    """One line."""
    speed = format_rate(report.tensor_bytes / report.seconds) if report.seconds else "no time"
    return f"{report.out}: {format_bytes(report.tensor_bytes)} restored, {format_seconds(report.seconds)}, {speed}"
