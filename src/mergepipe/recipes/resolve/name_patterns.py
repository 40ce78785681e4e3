"""Group tensor names that differ only by layer number, for one message per group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def group_by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only by numbers between dots under a pattern with `*`; a single name keeps its own."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_NUMBER.sub("*", name)].append(name)
    return {
        pattern if len(names_of_pattern) > 1 else names_of_pattern[0]: names_of_pattern
        for pattern, names_of_pattern in groups.items()
    }


def count_text(names: list[str]) -> str:
    """`this tensor` or `count_text 3 tensors`."""
    return "this tensor" if len(names) == 1 else f"these {len(names)} tensors"
