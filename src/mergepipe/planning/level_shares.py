"""How much of the experts a plan reads in which form: blocks by level, errors by layer and expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mergepipe.deltastore.codec.levels import Level
from mergepipe.planning.plan import Access

WHOLE = "whole"
NAMES = (*(level.name.lower().replace("_", " ") for level in Level if Level.NOTHING < level < Level.LOSSLESS), WHOLE)


def level_name(level: int) -> str:
    """What people call a level below the last."""
    return NAMES[level - 1] if 0 < level < len(Level) - 1 else str(level)


def blocks_by_level(accesses: Iterable[Access]) -> tuple[tuple[str, int], ...]:
    """Blocks read in each form, from the least on; `whole` are those read as they are."""
    found = Counter[str]()
    for access in accesses:
        found[WHOLE] += access.n_blocks
        for start, stop, level in access.levels:
            found[level_name(level)] += stop - start
            found[WHOLE] -= stop - start
    return tuple((name, found[name]) for name in NAMES if found[name])
