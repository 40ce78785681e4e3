"""Options declared once: a field of a frozen dataclass says how the command line writes it, and what it does.

The command line, its help, the completion of shells and the reference pages follow from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[str, str], object]
"""Reads the text of an option. Takes the text, and the option's name for errors."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The form of an option on a command line.

    `name` is written there (by default the field's, without its unit), or `short`. `metavar` stands for the value in
    the help, and `default` says in words what holds without it. `choices` are completed. Of a field of bytes the text
    is a size, unless there is another `read`.
    """

    help: str
    name: str = ""
    short: str = ""
    metavar: str = ""
    default: str = ""
    panel: str = ""
    choices: tuple[str, ...] = ()
    read: Reader | None = None


def option(default: T, flag: Flag) -> T:
    """Declare a field of an options class: its default, and its form on command lines."""
    declared: T = field(default=default, metadata={"flag": flag})
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
    def is_read_here(self) -> bool:
        """Whether `read` makes more of the text than the text."""
        return self.flag.read is not None or self.field.endswith("_bytes")

    def read(self, text: str) -> object:
        """Return the value that a text stands for."""
        if self.flag.read is not None:
            return self.flag.read(text, self.name)
        if self.field.endswith("_bytes"):
            from mergepipe.core.sizes import parse_size

            return parse_size(text, self.name)
        return text


def declared_options(kind: type) -> Iterator[Option]:
    """List the options that a class declares, those of options classes in it too, each name once."""
    names: set[str] = set()
    for declared in fields(kind):
        nested, flag = nested_options(kind, declared.name), declared.metadata.get("flag")
        own = [] if flag is None else [Option(declared.name, str(declared.type), declared.default, flag)]
        for declared_option in own if nested is None else declared_options(nested):
            if declared_option.field not in names:
                names.add(declared_option.field)
                yield declared_option


def nested_options(kind: type, name: str) -> type | None:
    """Return the options class that a field holds a value of; None where it holds none."""
    factory: object = next(declared.default_factory for declared in fields(kind) if declared.name == name)
    return factory if isinstance(factory, type) and is_dataclass(factory) else None
