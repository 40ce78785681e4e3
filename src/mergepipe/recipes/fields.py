"""Check the kinds and the keys of recipe values, and collect every problem and notice of a recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from typing import TypeVar

from mergepipe.core.display import shortened
from mergepipe.core.outcome import Notice, notice_at, told_once
from mergepipe.errors import MergePipeError, Problem, RecipeError, did_you_mean
from mergepipe.operators.registry import operator_specs
from mergepipe.recipes.yaml_source import KeyPath, Value, YamlSource
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

T = TypeVar("T")

# --- collect every problem and every notice of a recipe, so that all are reported at once ---


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
        more = (Notice("problems.more", "", 0, "", f"and {n_more} more notices"),) if n_more > 0 else ()
        return notices[:MAX_LISTED] + more

    def raise_any(self) -> None:
        """Raise all problems, sorted by precedence, then by time of report; do nothing if there are none."""
        if not self._count:
            return
        kinds = [kind for kind in self._precedence if self._kept[kind]]
        listed = [problem for kind in kinds for problem in self._kept[kind]][:MAX_LISTED]
        if self._count > len(listed):
            listed.append(Problem("problems.more", "", f"and {self._count - len(listed)} more"))
        raise kinds[0](*listed)


def near_miss(name: str, *real_names: str) -> str | None:
    """Return the real name that `name` is most likely a misspelling of; None if it resembles none."""
    name = name.lower()
    if name in real_names:
        return name
    swapped = [real_name for real_name in real_names if len(name) > 2 and sorted(real_name) == sorted(name)]
    return next(iter(swapped or get_close_matches(name, real_names, n=1, cutoff=NEAR_MISS)), None)


def refuse_notices(notices: tuple[Notice, ...]) -> None:
    """Raise all notices as one error; do nothing if there are none."""
    if notices:
        raise RecipeError(*(Problem(notice.code, notice.where, notice.text) for notice in notices))


# --- say what a key or a parameter that has no effect where it stands means elsewhere ---


CONTENT_KEYS = ("models", "slices", "modules")  # a recipe has exactly one of them
RECIPE_KEYS = (
    "merge_method", "base_model", *CONTENT_KEYS, "parameters", "dtype", "out_dtype",
    "rounding", "tokenizer_source", "tokenizer", "adapter_tokenizer", "adapter_names", "chat_template", "name", "post",
)  # fmt: skip
_PAST = "mergekit does not use it either: an option of older versions, or of a fork"
_OTHER_KEYS = {
    "revision": "write the version of a Hub model as `model: NAME@REVISION`",
    "merge_method": "the one at the top level applies to the whole recipe",
    "layer_range": "layers are chosen under 'slices:'",
    "residual_weight": _PAST,
    "allow_negative_weights": _PAST,
    "embed_slerp": _PAST,
}


def key_elsewhere(key: str) -> str:
    """Return what a key means at another place of a recipe; empty for a key of no meaning."""
    if key in _OTHER_KEYS:
        return _OTHER_KEYS[key]
    return "it belongs at the top level of the recipe" if key in RECIPE_KEYS else ""


def parameter_elsewhere(name: str) -> str:
    """Return what a parameter means to other merge methods; empty for one that no method has."""
    methods = [spec.name for spec in operator_specs().values() if spec.parameter(name)]
    if not methods:
        return ""
    parameter = operator_specs()[methods[0]].parameter(name)
    more = f" and {len(methods) - 1} more" if len(methods) > 1 else ""
    return f"to {methods[0]}{more} it is: {parameter.help if parameter else ''}"


def parameter_names() -> tuple[str, ...]:
    """List the names of the parameters of all merge methods, each once."""
    return tuple(dict.fromkeys(p.name for spec in operator_specs().values() for p in spec.parameters))


# --- check the kind and the keys of recipe values, and report problems and notices with their position ---


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """A recipe document that is being parsed: its values, and the problems found so far."""

    source: YamlSource
    findings: Findings
    store: Store  # looks up the models that the document names
    model_paths: Mapping[str, str] = field(default_factory=dict)  # overrides the paths of models in the recipe
    documents: frozenset[str] = frozenset()  # names of the other recipes in the file
    places: dict[Location, Location] = field(default_factory=dict)  # resolved path -> the spelling first used for it

    def refuse(self, code: str, key_path: KeyPath, message: str, hint: str | Callable[[], str] = "") -> None:
        """Report that the recipe is wrong at `key_path`."""
        self.findings.add(RecipeError, code, self.source.where(*key_path), message, hint)

    def mapping(self, value: Value, key_path: KeyPath, hint: str = "") -> dict[str, Value] | None:
        """Return `value` if it is a mapping (null counts as empty); else report it and return None."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.wrong_kind(value, key_path, "names with values", hint)
        return None

    def text(self, value: Value, key_path: KeyPath) -> str | None:
        """Return `value` if it is text that is not blank; else report it and return None."""
        if isinstance(value, str) and value.strip():
            return value
        is_bare = isinstance(value, bool | int | float)
        self.wrong_kind(value, key_path, "text", "put it in quotes if it is meant as text" if is_bare else "")
        return None

    def whole(self, value: Value, key_path: KeyPath, least: int) -> int | None:
        """Return a whole number of at least `least`, and of 32 bits; report any other value, and return None."""
        number = whole_number(value)
        if number is not None and least <= number < 1 << 32:
            return number
        if value is not None:
            self.wrong_kind(value, key_path, f"a whole number of at least {least}")
        return None

    def wrong_kind(self, value: Value, key_path: KeyPath, needed: str, hint: str = "") -> None:
        """Report that `value` is not of the `needed` kind."""
        self.refuse("recipe.value", key_path, f"needs {needed}, found {describe(value)}", hint)

    def notice(self, code: str, key_path: KeyPath, message: str, elsewhere: str = "") -> None:
        """Report that something has no effect."""
        self.findings.add_notice(code, self.source.where(*key_path), message, elsewhere)

    def warning(self, code: str, key_path: KeyPath, message: str, elsewhere: str = "") -> None:
        """Report that something has another effect than it asks for."""
        self.findings.add_notice(code, self.source.where(*key_path), message, elsewhere, changes_result=True)

    def misspelt(self, code: str, key_path: KeyPath, message: str, hint: str) -> None:
        """Report a name that is nearly a real one: an error, unless the recipe is read leniently."""
        self.findings.add_misspelt(code, self.source.where(*key_path), message, hint)

    def unknown_keys(
        self,
        entry: Mapping[str, Value],
        real_keys: Sequence[str],
        key_path: KeyPath,
        elsewhere: Callable[[str], str] = key_elsewhere,
        further_names: Sequence[str] = (),
    ) -> None:
        """Report every key of `entry` not in `real_keys`: near misses of these or `further_names`, and the rest.

        `elsewhere` says what a key means at another place; a key that means something is no near miss.
        """
        for key in entry:
            if key in real_keys:
                continue
            name, meaning = shortened(key), elsewhere(key)
            real_name = None if meaning else near_miss(name, *real_keys, *further_names)
            if real_name is not None:
                message, hint = f"unknown key '{name}'", f"did you mean '{real_name}'?"
                self.misspelt("recipe.unknown-name", (*key_path, key), message, hint)
            else:
                self.notice("recipe.no-effect", (*key_path, key), f"the key '{name}' has no effect here", meaning)

    def refuse_unknown_keys(self, entry: Mapping[str, Value], known: Sequence[str], key_path: KeyPath) -> None:
        """Report every key of `entry` not in `known` as a problem: in recipes where nothing may be without effect."""
        for key in entry:
            if key not in known:
                name = shortened(key)
                message, hint = f"unknown key '{name}'", did_you_mean(name, known)
                self.refuse("recipe.unknown-name", (*key_path, key), message, hint)


def all_or_none(read: Sequence[T | None]) -> tuple[T, ...] | None:
    """Return what was read of the entries of a list; None if one of them was refused."""
    sound = tuple(item for item in read if item is not None)
    return sound if len(sound) == len(read) else None


def unquoted(value: Value) -> Value:
    """Return the number that a text spells; any other value as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def whole_number(value: Value) -> int | None:
    """Return a whole number, also if it is quoted or written as `8.0`."""
    number = unquoted(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or number % 1 != 0:
        return None
    return int(number)


def describe(value: Value) -> str:
    """Describe a value for an error message: its kind, and the value itself if it is short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not isfinite(value):
        return f"{value}"
    if isinstance(value, int | float):
        return f"the number {value:g}" if abs(value) < 1e300 else "a number that large"
    if isinstance(value, str):
        return f"the text {shortened(value)!r}" if value.strip() else "empty text"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "a mapping"
