"""What callers of the public API ask for, checked: choices, sizes, threads, places."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.errors import LimitError, RecipeError, did_you_mean

if TYPE_CHECKING:
    from mergepipe.engine.execute import EngineOptions

C = TypeVar("C", bound=StrEnum)


def default_memory_bytes() -> int:
    """The default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """One compute thread per processor this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive(option: str, value: int) -> int:
    """`value`, which is above zero.

    Raises:
        LimitError: it is not.
    """
    if value < 1:
        raise LimitError.of("option.not-positive", option, f"{value} was given", "give a number above zero")
    return value


def threads_asked(threads: int | None) -> int:
    """Compute threads, with the default where none were given.

    Raises:
        LimitError: a number that is not above zero.
    """
    return positive("--threads", default_threads() if threads is None else threads)


def engine_options(threads: int | None, memory_bytes: int | None) -> EngineOptions:
    """How to run the engine, with defaults for what was not given.

    Raises:
        LimitError: a number that is not above zero.
    """
    from mergepipe.engine.execute import EngineOptions

    return EngineOptions(
        threads_asked(threads),
        positive("--memory", memory_bytes if memory_bytes is not None else default_memory_bytes()),
    )


def block_elements_asked(asked: int | None) -> int:
    """Elements of a block; 256 Ki where none were given.

    Raises:
        LimitError: no multiple of what cuts fall on.
    """
    from mergepipe.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS

    value = DEFAULT_BLOCK_ELEMENTS if asked is None else asked
    if value < 1 or value % GRAIN_ELEMENTS:
        hint = f"give a multiple of {GRAIN_ELEMENTS}"
        raise LimitError.of("option.block-elements", "block_elements", f"{value} was given", hint)
    return value


def choice(option: str, value: str, choices: type[C]) -> C:
    """One of some choices by its name.

    Raises:
        RecipeError: there is none of that name.
    """
    try:
        return choices(value)
    except ValueError:
        hint = did_you_mean(value, [each.value for each in choices])
        raise RecipeError.of("option.choice", option, f"'{value}' was given", hint) from None


def home_asked(home: str | Path | None) -> Path:
    """The catalog's home; where none was given, $MERGEPIPE_HOME or the platform's user data folder."""
    from mergepipe.catalog.home import resolve_home

    return resolve_home(Path(home) if home is not None else None)
