"""Find the first of many regular expressions that matches the end of a name, in time that the expressions cannot raise.

`re` tries one path after another, which a few repeats make as slow as they like. Here all expressions are followed at
once, through the set of places that each may have got to; sets that were met before are remembered.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from mergepipe.core.strict_json import shown

MOST_CHARACTERS = 1024
"""Of one expression."""
_MOST_PLACES = 20_000
_MOST_WORK = 2_000_000  # some ten seconds; names of models need a hundredth
_MOST_REMEMBERED = 50_000
_PLAIN = re.compile(r"[\w.\-]*", re.ASCII)
_CATEGORIES: dict[object, Callable[[str], bool]] = {
    code.CATEGORY_DIGIT: str.isdecimal,
    code.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    code.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    code.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
    code.CATEGORY_SPACE: str.isspace,
    code.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
}
_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT)
_AT_START = (code.AT_BEGINNING, code.AT_BEGINNING_STRING)
_AT_END = (code.AT_END, code.AT_END_STRING)

Takes = Callable[[str], bool]
"""Whether a step takes a character."""


class PatternError(ValueError):
    """An expression that is not followed: of a kind, length or number that names do not need."""


class EndPatterns:
    """Regular expressions, each of the whole end of a name from its start or behind a dot.

    Law: `first(name)` is the first index with `re.match(rf"(.*\\.)?({expression})$", name)`.

    Expressions may have literals, classes, groups, alternatives, anchors, and repeats of what holds no repeat.
    Memory: some hundred bytes for each character of the expressions.

    Raises:
        re.error: when it is made, an expression is none.
        PatternError: when it is made, an expression is of another kind; in `first`, the work of all calls exceeds a
            bound that names of models do not come near.
    """

    def __init__(self, expressions: Iterable[str]) -> None:
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        self._automaton = _Automaton()
        self._work = 0
        self._known: dict[str, int | None] = {}
        for index, expression in enumerate(expressions):
            if _PLAIN.fullmatch(expression):
                dots = tuple(at for at, character in enumerate(expression) if character == ".")
                self._plain[len(expression)][dots].setdefault(expression, index)
                continue
            try:
                self._automaton.add(index, expression)
            except PatternError as error:
                raise PatternError(f"{shown(expression)} {error}") from error

    def first(self, name: str) -> int | None:
        """Return the index of the first expression that matches the end of a name; None if none does."""
        if name not in self._known:
            indices = [index for index in (self._first_plain(name), self._automaton.first(name)) if index is not None]
            self._known[name] = min(indices, default=None)
        return self._known[name]

    def _first_plain(self, name: str) -> int | None:
        """Look up the ends of a name among expressions of letters and dots, of which a dot is any character."""
        indices = []
        starts = [0, *(at + 1 for at, character in enumerate(name) if character == ".")]
        for start in starts if self._plain else ():
            end = name[start:]
            for dots, index_of in self._plain.get(len(end), {}).items():
                self._work += len(dots) + 1
                characters = list(end)
                for at in dots:
                    characters[at] = "."
                index = index_of.get("".join(characters))
                if index is not None:
                    indices.append(index)
        if self._work > _MOST_WORK:
            raise PatternError("takes too long, with so many patterns and names")
        return min(indices, default=None)


class _Automaton:
    """All expressions as steps between places; a name is followed through the set of places that it may be at."""

    def __init__(self) -> None:
        self._steps: list[list[tuple[Takes, int]]] = []  # by place
        self._jumps: list[list[tuple[object, int]]] = []  # by place: taken without a character, by an anchor or always
        self._accepts: dict[int, int] = {}  # the expression that ends at a place
        self._starts: list[int] = []
        self._remembered: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._work = 0

    def add(self, index: int, expression: str) -> None:
        """Add an expression."""
        if len(expression) > MOST_CHARACTERS:
            raise PatternError(f"has {len(expression)} characters, and {MOST_CHARACTERS} at most are matched")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of what will mean something else one day
                tree = parser.parse(expression)
        except (RecursionError, OverflowError, Warning) as error:
            raise PatternError(f"is not followed: {error}") from error
        if tree.state.flags & ~re.UNICODE:
            raise PatternError("sets flags, which is not supported")
        start = self._place()
        self._starts.append(start)
        self._accepts[self._sequence(tree, start, is_repeated=False)] = index

    def first(self, name: str) -> int | None:
        """Return the first expression that matches the end of a name."""
        if not self._starts:
            return None
        at_start = self._reached(self._starts, is_start=True, is_end=not name)
        behind_dot = self._reached(self._starts, is_start=False, is_end=False)
        places = at_start
        for position, character in enumerate(name):
            is_end = position == len(name) - 1
            places = self._after(places, character, is_end=is_end)
            if character == "." and not is_end:
                places |= behind_dot
            elif character == ".":
                places |= self._reached(self._starts, is_start=False, is_end=True)
        return min((self._accepts[place] for place in places & self._accepts.keys()), default=None)

    def _after(self, places: frozenset[int], character: str, *, is_end: bool) -> frozenset[int]:
        key = (places, character)
        after = None if is_end else self._remembered.get(key)
        if after is None:
            steps = (step for place in places for step in self._steps[place])
            after = self._reached((to for takes, to in steps if takes(character)), is_start=False, is_end=is_end)
            self._count(len(places) + len(after))
            if not is_end:
                if len(self._remembered) >= _MOST_REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = after
        return after

    def _reached(self, places: Iterable[int], *, is_start: bool, is_end: bool) -> frozenset[int]:
        """Add the places that are reached without a character."""
        reached: set[int] = set()
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place in reached:
                continue
            reached.add(place)
            for anchor, to in self._jumps[place]:
                if anchor is None or (is_start and anchor in _AT_START) or (is_end and anchor in _AT_END):
                    waiting.append(to)
        return frozenset(reached)

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise PatternError("takes too long, with so many patterns and names")

    def _place(self) -> int:
        if len(self._steps) >= _MOST_PLACES:
            raise PatternError(f"is too long with the others: {_MOST_PLACES} places at most are followed")
        self._steps.append([])
        self._jumps.append([])
        return len(self._steps) - 1

    def _sequence(self, items: Sequence[tuple[Any, Any]], place: int, *, is_repeated: bool) -> int:
        """Add items one after the other from a place on; return the place behind them."""
        for operation, argument in items:
            place = self._item(operation, argument, place, is_repeated=is_repeated)
        return place

    def _item(self, operation: Any, argument: Any, place: int, *, is_repeated: bool) -> int:
        if operation is code.AT:
            if argument not in (*_AT_START, *_AT_END):
                raise PatternError("asks for the border of a word, which is not supported")
            return self._jump(place, self._place(), argument)
        if operation is code.SUBPATTERN:
            _, set_flags, unset_flags, inner = argument
            if set_flags or unset_flags:
                raise PatternError("sets flags, which is not supported")
            return self._sequence(inner, place, is_repeated=is_repeated)
        if operation is code.BRANCH:
            behind = self._place()
            for branch in argument[1]:
                inside = self._jump(place, self._place())
                self._jump(self._sequence(branch, inside, is_repeated=is_repeated), behind)
            return behind
        if operation in _REPEATS:
            if is_repeated:
                raise PatternError("repeats what repeats already, which is not supported")
            least, most, inner = argument
            return self._repeat(least, most, inner, place)
        behind = self._place()
        self._steps[place].append((_takes(operation, argument), behind))
        return behind

    def _repeat(self, least: int, most: Any, inner: Sequence[tuple[Any, Any]], place: int) -> int:
        for _ in range(least):
            place = self._sequence(inner, place, is_repeated=True)
        behind = self._place()
        if most is code.MAXREPEAT:
            loop = self._jump(place, self._place())
            self._jump(self._sequence(inner, loop, is_repeated=True), loop)
            return self._jump(loop, behind)
        for _ in range(most - least):
            self._jump(place, behind)
            place = self._sequence(inner, place, is_repeated=True)
        return self._jump(place, behind)

    def _jump(self, place: int, to: int, anchor: object = None) -> int:
        self._jumps[place].append((anchor, to))
        return to


def _takes(operation: Any, argument: Any) -> Takes:
    """Return the test of a single character."""
    if operation is code.LITERAL:
        literal = chr(argument)
        return lambda character: character == literal
    if operation is code.NOT_LITERAL:
        excluded = chr(argument)
        return lambda character: character != excluded
    if operation is code.ANY:
        return lambda character: character != "\n"
    if operation is code.RANGE:
        first, last = map(chr, argument)
        return lambda character: first <= character <= last
    if operation is code.CATEGORY and argument in _CATEGORIES:
        return _CATEGORIES[argument]
    if operation is code.IN:
        is_negated = argument[0][0] is code.NEGATE
        tests = [_takes(*item) for item in (argument[1:] if is_negated else argument)]
        return lambda character: any(takes(character) for takes in tests) != is_negated
    raise PatternError(f"has {str(operation).lower().replace('_', ' ')}, which is not supported")
