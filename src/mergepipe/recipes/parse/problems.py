"""Collect every problem of a recipe, so that all are reported at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from mergepipe.errors import MergePipeError, Problem

MAX_LISTED = 50


class Findings:
    """Collects problems by error class; `raise_any` raises them all as one error of the first class in `precedence`.

    At most `MAX_LISTED` are kept of each class and listed in all, so a hint given as a function is not computed for
    the rest.
    """

    def __init__(self, *precedence: type[MergePipeError]) -> None:
        self._precedence = precedence
        self._kept: dict[type[MergePipeError], list[Problem]] = defaultdict(list)
        self._count = 0

    def add(
        self, kind: type[MergePipeError], code: str, where: str, message: str, hint: str | Callable[[], str] = ""
    ) -> None:
        """Add one problem. `kind` must be one of the classes in the precedence."""
        if kind not in self._precedence:
            raise ValueError(f"{kind.__name__} has no place in the precedence")
        self._count += 1
        kept = self._kept[kind]
        if len(kept) < MAX_LISTED:
            kept.append(Problem(code, where, message, hint if isinstance(hint, str) else hint()))

    def raise_any(self) -> None:
        """Raise all problems, sorted by precedence, then by time of report; do nothing if there are none."""
        if not self._count:
            return
        kinds = [kind for kind in self._precedence if self._kept[kind]]
        listed = [problem for kind in kinds for problem in self._kept[kind]][:MAX_LISTED]
        if self._count > len(listed):
            listed.append(Problem("listing.more", "", f"and {self._count - len(listed)} more"))
        raise kinds[0](*listed)
