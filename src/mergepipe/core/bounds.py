"""Check numbers from callers against their allowed range."""

from __future__ import annotations

from mergepipe.core.sizes import MAX_SIZE_BYTES
from mergepipe.errors import LimitError, RecipeError

_MOST_DIGITS = 40


def positive(option: str, value: int, most: int = MAX_SIZE_BYTES) -> int:
    """Return `value` if it is above zero and at most `most` (default: the largest file size)."""
    if value < 1:
        raise LimitError.of(
            "option.out-of-range", option, f"{shown_number(value)} was given", "give a number above zero"
        )
    if value > most:
        raise RecipeError.of("option.invalid", option, f"{shown_number(value)} was given", f"give {most} at most")
    return value


def shown_number(value: int) -> str:
    """Format a number for an error; thousands of digits, which Python refuses to print, are described."""
    return str(value) if abs(value) < 10**_MOST_DIGITS else f"a number of more than {_MOST_DIGITS} digits"
