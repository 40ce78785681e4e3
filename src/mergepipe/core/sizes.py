"""Parse sizes in bytes as people write them: `4GiB`, `512MB`, `1.5G`."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_SIZE_BYTES = 2**63 - 1
LEAST_BARE_BYTES = 1 << 20  # that a number without a unit may mean

SIZE_UNITS = {"B": 1}
SIZE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", 1)}
SIZE_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
_BY_FOLDED_NAME = {"": 1} | {
    spelling.lower(): factor for name, factor in SIZE_UNITS.items() for spelling in (name, name.removesuffix("B"))
}
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
