"""What callers of the public API ask for, checked: choices, sizes, threads, places."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.core.bounds import positive, shown_number
from mergepipe.errors import LimitError, RecipeError, did_you_mean

if TYPE_CHECKING:
    from mergepipe.engine.execute import EngineOptions

C = TypeVar("C", bound=StrEnum)

MOST_THREADS = 1024
MOST_BLOCK_ELEMENTS = 1 << 40


def default_memory_bytes() -> int:
    """The default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """One compute thread per processor this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_asked(seed: int) -> int:
    """A seed that 64 bits hold, signed or not.

    Raises:
        RecipeError: `option.seed`.
    """
    if not -(2**63) <= seed < 2**64:
        raise RecipeError.of("option.seed", "--seed", f"{shown_number(seed)} was given", "give an integer of 64 bits")
    return seed


def threads_asked(threads: int | None) -> int:
    """Compute threads, with the default where none were given.

    Raises:
        LimitError: a number that is not above zero.
        RecipeError: more than `MOST_THREADS`.
        LimitError: `memory.address-space`, as `check_address_space`.
    """
    n_threads = positive("--threads", default_threads() if threads is None else threads, MOST_THREADS)
    from mergepipe.kernels.address_space import check_address_space

    check_address_space(n_threads)
    return n_threads


def engine_options(threads: int | None, memory_bytes: int | None) -> EngineOptions:
    """How to run the engine, with defaults for what was not given.

    Raises:
        LimitError: a number that is not above zero.
        RecipeError: a number that is too large.
    """
    from mergepipe.engine.execute import EngineOptions

    return EngineOptions(
        threads_asked(threads),
        positive("--memory", memory_bytes if memory_bytes is not None else default_memory_bytes()),
    )


def block_elements_asked(asked: int | None) -> int:
    """Elements of a block; 256 Ki where none were given.

    Raises:
        LimitError: no multiple of what cuts fall on, or more than `MOST_BLOCK_ELEMENTS`.
    """
    from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS

    value = DEFAULT_BLOCK_ELEMENTS if asked is None else asked
    if value < 1 or value % GRAIN_ELEMENTS or value > MOST_BLOCK_ELEMENTS:
        hint = f"give a multiple of {GRAIN_ELEMENTS}, {MOST_BLOCK_ELEMENTS} at most"
        raise LimitError.of("option.block-elements", "block_elements", f"{shown_number(value)} was given", hint)
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
