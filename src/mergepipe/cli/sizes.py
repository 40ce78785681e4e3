"""Sizes in bytes as users write them: `4GiB`, `512MB`, `1.5G`."""

from __future__ import annotations

from mergepipe.core.sizes import LEAST_BARE_BYTES, MAX_SIZE_BYTES, SIZE_UNITS, split_quantity, unit_bytes
from mergepipe.errors import RecipeError, did_you_mean

_EXAMPLES = "write it as 4GiB, 512MB or a number of bytes"


def parse_size(text: str, option: str) -> int:
    """Bytes in `text`; fractions of a byte are cut off.

    Units are B, kB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (of 1024), in any case; the B may be
    left out. A bare number is bytes, and is refused below 1 MiB: nobody means files of 5 bytes.

    Raises:
        RecipeError: it is not a size; the message names `option`.
    """
    written = " ".join(text.split())
    quantity = split_quantity(written)
    if quantity is None or quantity[1] == "%" or written.startswith(("+", "-")):
        raise RecipeError.of("option.size", option, f"'{text}' is not a size", _EXAMPLES)
    number, unit = quantity
    factor = unit_bytes(unit)
    if factor is None:
        raise RecipeError.of(
            "option.size", option, f"'{text}': unknown unit '{unit}'", did_you_mean(unit, list(SIZE_UNITS))
        )
    size = int(number * factor)
    if not unit and 0 < number < LEAST_BARE_BYTES:
        message = f"'{text}' without a unit would be {size} bytes"
        meant = f"{written}GB?" if number < 1000 else f"{written}MB? ({size / 1000:g}kB are that few bytes)"
        raise RecipeError.of("option.size", option, message, f"did you mean {meant}")
    if size > MAX_SIZE_BYTES:
        raise RecipeError.of("option.size", option, f"'{text}' is more than {MAX_SIZE_BYTES} bytes", _EXAMPLES)
    return size


def optional_size(text: str | None, option: str) -> int | None:
    """Return the bytes that `text` says, None for None.

    Raises:
        RecipeError: it is not a size.
    """
    return None if text is None else parse_size(text, option)
