"""Bytes, speeds and times as people read and write them, and checks of numbers against their range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

from mergepipe.errors import LimitError, RecipeError, did_you_mean

MAX_SIZE_BYTES = 2**63 - 1
LEAST_BARE_BYTES = 1 << 20  # that a number without a unit may mean

SIZE_UNITS = {"B": 1}
SIZE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", 1)}
SIZE_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
_BY_FOLDED_NAME = {"": 1} | {
    spelling.lower(): factor for name, factor in SIZE_UNITS.items() for spelling in (name, name.removesuffix("B"))
}
_EXAMPLES = "write it as 4GiB, 512MB or a number of bytes"
_QUANTITY = re.compile(r"\s*([+-]?)([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([A-Za-z]{0,20}|%)\s*")


def split_quantity(text: str) -> tuple[Fraction, str] | None:
    """The number in `text`, exactly, and its unit as written (letters or `%`, may be empty); None if it is neither."""
    form = _QUANTITY.fullmatch(text)
    if form is None or not text.isascii():
        return None
    sign, number, unit = form.groups()
    value = Fraction(number)
    return (-value if sign == "-" else value), unit


def unit_bytes(unit: str) -> int | None:
    """Bytes of one `unit`, in any case and with or without its B (`GiB`, `g`, `MB`); 1 for none; None if unknown."""
    return _BY_FOLDED_NAME.get(unit.lower())


def parse_size(text: str, option: str) -> int:
    """Bytes in `text`; fractions of a byte are cut off.

    Units are B, kB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (of 1024), in any case; the B may be
    left out. A bare number is bytes, and is refused below 1 MiB: nobody means files of 5 bytes.
    """
    written = " ".join(text.split())
    quantity = split_quantity(written)
    if quantity is None or quantity[1] == "%" or written.startswith(("+", "-")):
        raise RecipeError.of("option.invalid", option, f"'{text}' is not a size", _EXAMPLES)
    number, unit = quantity
    factor = unit_bytes(unit)
    if factor is None:
        message = f"'{text}': unknown unit '{unit}'"
        raise RecipeError.of("option.invalid", option, message, did_you_mean(unit, list(SIZE_UNITS)))
    size = int(number * factor)
    if not unit and 0 < number < LEAST_BARE_BYTES:
        message = f"'{text}' without a unit would be {size} bytes"
        meant = f"{written}GB?" if number < 1000 else f"{written}MB? ({size / 1000:g}kB are that few bytes)"
        raise RecipeError.of("option.invalid", option, message, f"did you mean {meant}")
    if size > MAX_SIZE_BYTES:
        raise RecipeError.of("option.invalid", option, f"'{text}' is more than {MAX_SIZE_BYTES} bytes", _EXAMPLES)
    return size


_MOST_DIGITS = 40


def whole(option: str, value: float) -> int:
    """Return `value`, an integer of Python or numpy or a float that equals one, as Python's: 1.5 and "2" are none."""
    with suppress(TypeError, ValueError, OverflowError):
        if value == int(value):
            return int(value)
    raise RecipeError.of("option.invalid", option, f"{value!r} was given", "give a whole number")


def positive(option: str, value: int, most: int = MAX_SIZE_BYTES) -> int:
    """Return `value` if it is above zero and at most `most` (default: the largest file size)."""
    if not value > 0:  # NaN is refused too
        message = f"{shown_number(value)} was given"
        raise LimitError.of("option.out-of-range", option, message, "give a number above zero")
    if value > most:
        raise RecipeError.of("option.invalid", option, f"{shown_number(value)} was given", f"give {most} at most")
    return value


def share(option: str, value: float) -> float:
    """Return `value` if it is in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise RecipeError.of("option.invalid", option, f"{value:g} was given", "give a share in (0, 1]")
    return value


def one_of(option: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise RecipeError.of("option.invalid", option, f"'{value}' was given", did_you_mean(value, choices))
    return value


def shown_number(value: int) -> str:
    """Format a number for an error; thousands of digits, which Python refuses to print, are described."""
    return f"a number of more than {_MOST_DIGITS} digits" if abs(value) >= 10**_MOST_DIGITS else str(value)


SMALLEST_PERCENT = 0.001
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(nbytes: float) -> str:
    """Three significant digits, in powers of 1000: `1.19 GB`."""
    value, unit = float(nbytes), 0
    while round(value) >= 1000 and unit < len(_BYTE_UNITS) - 1:
        value /= 1000
        unit += 1
    if unit == 0:
        return f"{value:.0f} B"
    digits = max(0, 3 - len(str(int(value))))
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def size_option(nbytes: int) -> str:
    """Write a size as an option takes it, in whole MiB that hold `nbytes`: `129MiB`."""
    return f"{-(-nbytes // 2**20)}MiB"


def format_rate(bytes_per_second: float) -> str:
    """A speed: `1.85 GB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """A duration: `0.42 s`, `7.9 s`, `2 min 05 s`, `1 h 02 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def format_percent(share: float) -> str:
    """A share with three significant digits and no exponent: `0.0123 %`, `12.5 %`, `5220 %`; `< 0.001 %`."""
    percent = 100 * share
    if 0 < abs(percent) < SMALLEST_PERCENT:
        return f"< {SMALLEST_PERCENT:g} %"
    return f"{percent:.0f} %" if abs(percent) >= 999.5 else f"{percent:.3g} %"


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_names(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 16 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
