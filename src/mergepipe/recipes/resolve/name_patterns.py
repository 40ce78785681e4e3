"""Tensors that one model has and another has not, told in one line for all layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ by numbers between dots only, under one pattern with `*` for those; a lone one is its own."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_NUMBER.sub("*", name)].append(name)
    return {pattern if len(found) > 1 else found[0]: found for pattern, found in groups.items()}


def these(names: list[str]) -> str:
    """`this tensor` or `these 3 tensors`."""
    return "this tensor" if len(names) == 1 else f"these {len(names)} tensors"
