"""Sizes in bytes as users write them: `4GiB`, `512MB`, `1.5G`."""

from __future__ import annotations

import re
from decimal import Decimal

from mergepipe.errors import RecipeError, did_you_mean

MAX_SIZE_BYTES = 2**63 - 1

_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
_BY_FOLDED_NAME = {"": 1} | {
    spelling.lower(): factor for name, factor in _UNITS.items() for spelling in (name, name.removesuffix("B"))
}
_FORM = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([A-Za-z]{0,20})\s*")
_EXAMPLES = "write it as 4GiB, 512MB or a number of bytes"


def parse_size(text: str, option: str) -> int:
    """Bytes in `text`; fractions of a byte are cut off.

    Units are B, kB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (of 1024), in any case; the B may be
    left out. A bare number is bytes.

    Raises:
        RecipeError: it is not a size; the message names `option`.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise RecipeError.of("option.size", option, f"'{text}' is not a size", _EXAMPLES)
    number, unit = form.groups()
    factor = _BY_FOLDED_NAME.get(unit.lower())
    if factor is None:
        raise RecipeError.of(
            "option.size", option, f"'{text}': unknown unit '{unit}'", did_you_mean(unit, list(_UNITS))
        )
    size = int(Decimal(number) * factor)
    if size > MAX_SIZE_BYTES:
        raise RecipeError.of("option.size", option, f"'{text}' is more than {MAX_SIZE_BYTES} bytes", _EXAMPLES)
    return size
