"""Show what packing and unpacking did, as commands or as part of a merge."""

from __future__ import annotations

from mergepipe.cli.render.layout import Fact, columns_text, facts_text
from mergepipe.core.escaping import printable
from mergepipe.core.units import format_bytes, format_percent, format_rate, format_seconds, plural
from mergepipe.reports import PackedExpert, PackReport, UnpackReport

_CODEC_WORDS = {
    "same": "equal to the base",
    "bands": "in levels",
    "bytes": "without levels",
    "raw": "unencoded",
    "standalone": "without the base",
}


def pack_table(report: PackReport) -> str:
    """A row for each expert, and how to get replaced ones back."""
    head = ("store", "blocks", "expert", "packed", "of it", "time", "speed")
    table = columns_text(head, [_packed_row(expert) for expert in report.experts], left=2)
    facts = [fact for expert in report.experts for fact in _base_of_choice(expert)]
    for expert in report.experts:
        if expert.is_original_removed:
            base = report.base if expert.match is None else expert.match.base
            place = str(expert.expert).removesuffix(".safetensors")  # a bare file comes back in a directory
            command = f"`mergepipe unpack {expert.store} -o {place}`"
            needs = "" if base is None else f" and needs the base {base}"
            facts.append(("removed", f"{expert.expert}; {command} brings it back{needs}"))
    return f"{table}\n\n{facts_text(facts)}" if facts else table


def _base_of_choice(expert: PackedExpert) -> list[Fact]:
    """Show the base that was chosen among several for an expert, and how sure that is."""
    match = expert.match
    if match is None or match.next_base is None or match.next_delta is None:
        return []
    sure = "" if match.is_sure else "; not sure"
    text = (
        f"{expert.store}: {match.base}, deltas of {format_percent(match.relative_delta)} of the weights, nearest at "
        f"{format_percent(match.nearest_fraction)} of {match.n_samples} samples; next is {match.next_base} with "
        f"{format_percent(match.next_delta)}{sure}"
    )
    return [("base", text)]


def _packed_row(expert: PackedExpert) -> tuple[str, ...]:
    """Return the store, how its blocks can be read, sizes, time and speed."""
    sizes = (format_bytes(expert.tensor_bytes), format_bytes(expert.store_bytes), f"{expert.share:.1%}")
    if not expert.is_new:
        return (str(expert.store), "was packed before, left as it is", *sizes, "-", "-")
    speed = format_rate(expert.tensor_bytes / expert.seconds) if expert.seconds else "-"
    before = f"; {format_bytes(expert.resumed_bytes)} by an interrupted run" if expert.resumed_bytes else ""
    return (str(expert.store), _blocks_text(expert) + before, *sizes, format_seconds(expert.seconds), speed)


def _size_text(expert: PackedExpert) -> str:
    """Return the store's size and share, and its blocks."""
    sizes = f"{format_bytes(expert.tensor_bytes)} in {format_bytes(expert.store_bytes)} ({expert.share:.1%})"
    return f"{sizes}; {_blocks_text(expert)}"


def _blocks_text(expert: PackedExpert) -> str:
    """Return how the blocks can be read, and why some have no levels."""
    blocks = ", ".join(f"{plural(count, 'block')} {_CODEC_WORDS[codec]}" for codec, count in expert.blocks.items())
    reasons = ", ".join(f"{count} {reason}" for reason, count in expert.outside_bands.items())
    return (blocks or "no blocks") + (f" (without levels: {reasons})" if reasons else "")


def unpack_line(report: UnpackReport) -> str:
    """Show the restored files in one line."""
    speed = format_rate(report.tensor_bytes / report.seconds) if report.seconds else "no time"
    out = printable(str(report.out))
    return f"{out}: {format_bytes(report.tensor_bytes)} restored, {format_seconds(report.seconds)}, {speed}"
