"""Collect every problem and every notice of a recipe, so that all are reported at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from mergepipe.core.notices import Notice, notice_at, told_once
from mergepipe.errors import MergePipeError, Problem, RecipeError

MAX_LISTED = 50
NEAR_MISS = 0.75  # likeness from which an unknown name is taken for a misspelt one: `densty`, `wieght`, `lamda`


@dataclass(frozen=True, slots=True)
class Strictness:
    """The judgement of recipes: `strict` refuses keys without effect, `lenient` takes even misspelt names for such.

    `lenient` also takes a share that looks like a percentage (`density: 40`) as 1.
    """

    strict: bool = False
    lenient: bool = False


USUAL = Strictness()
LENIENT = Strictness(lenient=True)  # for recipes that were accepted before


class Findings:
    """Collects problems by error class; `raise_any` raises them all as one error of the first class in `precedence`.

    At most `MAX_LISTED` are kept of each class and listed in all, so a hint given as a function is not computed for
    the rest. Notices are collected beside them, at most `MAX_LISTED` different ones.
    """

    def __init__(self, *precedence: type[MergePipeError], strictness: Strictness = USUAL) -> None:
        self._precedence = precedence
        self.strictness = strictness
        self._kept: dict[type[MergePipeError], list[Problem]] = defaultdict(list)
        self._count = 0
        self._notices: list[Notice] = []

    def add(
        self, kind: type[MergePipeError], code: str, where: str, message: str, hint: str | Callable[[], str] = ""
    ) -> None:
        """Add one problem. `kind` must be one of the classes in the precedence."""
        if kind not in self._precedence:
            raise ValueError(f"{kind.__name__} has no place in the precedence")
        self._count += 1
        listed = self._kept[kind]
        if len(listed) < MAX_LISTED:
            listed.append(Problem(code, where, message, hint if isinstance(hint, str) else hint()))

    def add_notice(
        self, code: str, where: str, message: str, elsewhere: str = "", *, changes_result: bool = False
    ) -> None:
        """Add one notice, a warning if what it says changes the result."""
        self._notices.append(notice_at(code, where, message, elsewhere, changes_result=changes_result))

    def add_misspelt(self, code: str, where: str, message: str, hint: str) -> None:
        """Add a name that is a near miss of a real one: a problem, a warning where misspelt names are tolerated."""
        if self.strictness.lenient:
            self.add_notice(code, where, f"{message} and has no effect", hint, changes_result=True)
        else:
            self.add(RecipeError, code, where, message, hint)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The notices so far, each once."""
        notices = told_once(self._notices)
        n_more = len(notices) - MAX_LISTED
        more = (Notice("listing.more", "", 0, "", f"and {n_more} more notices"),) if n_more > 0 else ()
        return notices[:MAX_LISTED] + more

    def raise_any(self) -> None:
        """Raise all problems, sorted by precedence, then by time of report; do nothing if there are none."""
        if not self._count:
            return
        kinds = [kind for kind in self._precedence if self._kept[kind]]
        listed = [problem for kind in kinds for problem in self._kept[kind]][:MAX_LISTED]
        if self._count > len(listed):
            listed.append(Problem("listing.more", "", f"and {self._count - len(listed)} more"))
        raise kinds[0](*listed)


def near_miss(name: str, *real_names: str) -> str | None:
    """Return the real name that `name` is most likely a misspelling of; None if it resembles none."""
    name = name.lower()
    if name in real_names:
        return name
    swapped = [real_name for real_name in real_names if len(name) > 2 and sorted(real_name) == sorted(name)]
    return next(iter(swapped or get_close_matches(name, real_names, n=1, cutoff=NEAR_MISS)), None)


def refuse_notices(notices: tuple[Notice, ...]) -> None:
    """Raise all notices as one error; do nothing if there are none.

    Raises:
        RecipeError: one problem for each notice, with its code.
    """
    if notices:
        raise RecipeError(*(Problem(notice.code, notice.where, notice.text) for notice in notices))
