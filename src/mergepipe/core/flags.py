"""Options declared once: a field of an `Options` class has the default, the check, and the form on command lines.

The keywords of the public calls, the command line, its help, the completion of shells and the reference pages follow
from these declarations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import Parameter, get_annotations, signature
from typing import Any, Self, TypeVar

from mergepipe.core.outcome import warn_of
from mergepipe.core.units import one_of, positive
from mergepipe.errors import RecipeError, did_you_mean

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Options")
F = TypeVar("F", bound=Callable[..., Any])
Reader = Callable[[str, str], object]
"""Reads the text of an option. Takes the text, and the option's name for errors."""
Check = Callable[[str, Any], object]
"""Raises a typed error for a value out of its range. Takes the option's name, and the value."""
_TUPLE = re.compile(r"tuple\[(\w+), \.\.\.\]")


@dataclass(frozen=True, slots=True)
class Argument:
    """The form of an argument on a command line: the name that the help has for it, and what it is.

    A parameter with a default may be left out. One of a list takes several: at least one, unless it has a default.
    """

    metavar: str
    help: str


@dataclass(frozen=True, slots=True)
class Flag:
    """The form of an option on a command line.

    `name` is written there (by default the field's, without its unit), or `short`. `metavar` stands for the value in
    the help, and `default` says in words what holds without it. `choices` are completed. Of a field of bytes the text
    is a size, unless there is another `read`. Values are checked by `check`, those of a tuple one by one; without one a
    field of bytes is above 0, and one with `choices` is one of them, unless it `is_open`.
    """

    help: str
    name: str = ""
    short: str = ""
    metavar: str = ""
    default: str = ""
    panel: str = ""
    choices: tuple[str, ...] = ()
    is_open: bool = False
    read: Reader | None = None
    check: Check | None = None


def option(default: T, flag: Flag | str, /, **form: Any) -> T:
    """Declare a field of an options class: its default, and its form on command lines: a flag, or the fields of one."""
    declared: T = field(default=default, metadata={"flag": flag if isinstance(flag, Flag) else Flag(flag, **form)})
    return declared


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option: the name of its field or parameter, its type as written, its default, and its form."""

    field: str
    kind: str
    default: Any
    flag: Flag

    @property
    def name(self) -> str:
        """The name on command lines: `--memory` of `memory_bytes`, `--no-catalog` of one that is on by default."""
        bare = self.field.rstrip("_").removesuffix("_bytes").replace("_", "-")
        return self.flag.name or f"--{'no-' if self.default is True else ''}{bare}"

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes, which may be written as a size: `"4GiB"`."""
        return self.field.endswith("_bytes")

    @property
    def size_keyword(self) -> str:
        """The keyword of calls that takes a size as on the command line: `memory` of `memory_bytes`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_many(self) -> bool:
        """Whether it may be given several times."""
        return self.kind.startswith(("tuple", "list"))

    @property
    def is_read_here(self) -> bool:
        """Whether `read` makes more of the text than the text."""
        return self.flag.read is not None or self.is_size

    def read(self, text: str) -> object:
        """Return the value that a text stands for."""
        if self.flag.read is not None:
            return self.flag.read(text, self.name)
        if self.is_size:
            from mergepipe.core.units import parse_size

            return parse_size(text, self.name)
        return text

    def check(self, value: object) -> None:
        """Refuse a value out of its range; None stands for the default."""
        if value is None:
            return
        if self.flag.check is not None:
            for part in value if isinstance(value, tuple) else (value,):
                self.flag.check(self.name, part)
        elif self.is_size:
            positive(self.name, value)  # type: ignore[arg-type]  # the field is a number
        elif self.flag.choices and not self.flag.is_open:
            one_of(self.name, str(value), self.flag.choices)


def declared_options(kind: type) -> Iterator[Option]:
    """List the options that a class declares: its own, then those of its bases."""
    by_name = {declared.name: declared for declared in fields(kind)}
    for owner in kind.__mro__:
        for name in get_annotations(owner):
            declared = by_name.pop(name, None)
            flag = None if declared is None else declared.metadata.get("flag")
            if declared is not None and flag is not None:
                yield Option(name, str(declared.type), declared.default, flag)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a call: an immutable value whose fields are checked when it is made.

    A field of bytes may be given as a size, too: `memory_bytes="4GiB"`.

    Raises:
        LimitError, RecipeError: a value out of its range, or two that exclude each other.
    """

    def __post_init__(self) -> None:
        for declared in declared_options(type(self)):
            value = _plain(getattr(self, declared.field), declared.kind)
            if declared.is_size and isinstance(value, str):
                value = declared.read(value)
            object.__setattr__(self, declared.field, value)
        for entry in fields(self):
            _check_kind(entry.name, getattr(self, entry.name), str(entry.type))
        for declared in declared_options(type(self)):
            declared.check(getattr(self, declared.field))

    @classmethod
    def of(cls, options: object, changes: Mapping[str, object]) -> Self:
        """Return the options of a call: the fields of `options` that this class has too, with `changes`.

        A size may be given under its name on the command line: `memory="4GiB"`.

        Raises:
            TypeError: a change of a field that this class has not, or a field of `options` that would be ignored.
        """
        if options is not None and not isinstance(options, Options):
            hint = f"give {cls.__name__}(...), or its fields as keywords of the call"
            raise TypeError(f"options: a {type(options).__name__} was given; {hint}")
        changes = _with_sizes(cls, changes)
        names = [declared.name for declared in fields(cls)]
        own = () if options is None else fields(options)
        ignored = [
            declared.name
            for declared in own
            if declared.name not in names and getattr(options, declared.name) != declared.default
        ]
        for name in (*changes, *ignored):
            if name not in names:
                raise TypeError(f"{cls.__name__} has no option '{name}'; {did_you_mean(name, names)}")
        return cls(**changes) if options is None else options.common(cls, **changes)

    def common(self, kind: type[Kind], **changes: Any) -> Kind:
        """Return options of another class: the fields that both have, with `changes`."""
        own = {declared.name for declared in fields(self)}
        values = {declared.name: getattr(self, declared.name) for declared in fields(kind) if declared.name in own}
        return kind(**values | changes)


def _with_sizes(kind: type[Options], keywords: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords of a call with sizes under the names of their fields."""
    changes = dict(keywords)
    for declared in declared_options(kind):
        if declared.is_size and declared.size_keyword in changes:
            size = changes.pop(declared.size_keyword)
            if size is None:
                continue
            if declared.field in changes:
                raise TypeError(f"give one of {declared.size_keyword} and {declared.field}: they are the same option")
            changes[declared.field] = size
    return changes


def keywords_of(kind: type[Options]) -> list[Parameter]:
    """Return the keyword parameters that a call with these options has: a field each, and the names of sizes."""
    flagged = {declared.field: declared for declared in declared_options(kind)}
    parameters = []
    for declared in fields(kind):
        form = flagged.get(declared.name)
        if form is not None and form.is_size:
            size = Parameter(form.size_keyword, Parameter.KEYWORD_ONLY, default=None, annotation="int | str | None")
            parameters.append(size)
        accepted = _TUPLE.sub(r"\1 | Sequence[\1]", str(declared.type))
        parameters.append(
            Parameter(declared.name, Parameter.KEYWORD_ONLY, default=declared.default, annotation=accepted)
        )
    return parameters


def public_call(kind: type[Options]) -> Callable[[F], F]:
    """Make a function with `**fields` a public call.

    Its signature, which `help` and editors show, names the fields of `kind`. If its report has notices that the result
    is not what the recipe asks for, they are Python warnings, too.
    """

    def make_public(function: F) -> F:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            report = function(*arguments, **keywords)
            warn_of(getattr(report, "recipe_notices", ()))
            return report

        written = signature(function)
        own = [parameter for parameter in written.parameters.values() if parameter.kind != Parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        named = [parameter for parameter in keywords_of(kind) if parameter.name not in names]
        vars(call)["__signature__"] = written.replace(parameters=[*own, *named])
        return call  # type: ignore[return-value]  # it takes and returns the same

    return make_public


def several(values: Any) -> list[Any]:
    """Return the values as a list, one that stands by itself too: a text is many texts, which no caller means."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


_TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "int": (int | float, "a number"),
    "float": (int | float, "a number"),
    "str": (str, "a text"),
    "Path": (os.PathLike, "a path"),
}
"""The types in annotations of fields: what their values are, and how errors call it."""


def _check_kind(name: str, value: object, kind: str) -> None:
    """Refuse a value of another type than the field's, which is written as its annotation; None stands for the default.

    Raises:
        RecipeError: `option.invalid`.
    """
    types = dict(_TYPES[word] for word in re.findall(r"[A-Za-z]+", kind) if word in _TYPES)
    for part in value if isinstance(value, tuple) else (value,):
        is_allowed = not isinstance(part, bool) and isinstance(part, tuple(types))
        if part is None or is_allowed or (isinstance(part, bool) and bool in types):
            continue
        hint = f"give {' or '.join(types.values())}"
        raise RecipeError.of("option.invalid", name, f"{str(part)[:40]!r} was given", hint)


def _plain(value: Any, kind: str) -> Any:
    """Return the value of an option as Python's own: a tuple where its field is one, and no number of numpy."""
    if kind.startswith("tuple") or ("tuple" in kind and not isinstance(value, str)):
        return tuple(_plain(part, "") for part in several(value))
    return value.item() if hasattr(value, "item") and not isinstance(value, type) else value
