"""Bytes, speeds and times as people read them."""

from __future__ import annotations

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
