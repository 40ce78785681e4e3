"""Count the blocks that a plan reads at each level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mergepipe.deltastore.codec.levels import Level
from mergepipe.planning.plan import Access

WHOLE = "whole"
_NAME_OF = {
    Level.HEAD: "largest roughly",
    Level.HEAD_EXACT: "largest exactly",
    Level.BODY: "all roughly",
    Level.BODY_EXACT: "all closely",
}
"""Which deltas of a block are read at a level, and how closely."""
NAMES = (*_NAME_OF.values(), WHOLE)


def level_name(level: int) -> str:
    """Return the display name of a level below the last."""
    return NAMES[level - 1] if 0 < level < len(Level) - 1 else str(level)


def blocks_by_level(accesses: Iterable[Access]) -> tuple[tuple[str, int], ...]:
    """Count blocks by level, lowest first; `whole` are those read unencoded."""
    blocks = Counter[str]()
    for access in accesses:
        blocks[WHOLE] += access.n_blocks
        for start, stop, level in access.levels:
            blocks[level_name(level)] += stop - start
            blocks[WHOLE] -= stop - start
    return tuple((name, blocks[name]) for name in NAMES if blocks[name])
