"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.display import printable
from mergepipe.core.units import format_bytes, format_percent, format_rate, format_seconds, plural


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_191_000_000, "1.19 GB"),
        (5 * 10**12, "5.00 TB"),
        (12_000 * 10**15, "12000 PB"),
    ],
)
def test_format_bytes__has_three_digits(nbytes: int, expected: str) -> None:
    assert format_bytes(nbytes) == expected
    assert format_rate(nbytes) == f"{expected}/s"


@given(nbytes=st.integers(1, 10**17))
def test_format_bytes__is_right_to_one_percent(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    factor = 1000 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert float(number) * factor == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0.00 s"),
        (0.423, "0.42 s"),
        (7.94, "7.9 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125.2, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_format_seconds__suits_the_length(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_plural__counts() -> None:
    assert [plural(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


@given(text=st.text())
def test_printable__leaves_nothing_that_commands_a_terminal(text: str) -> None:
    assert printable(text).isprintable()
    assert printable("ä 漢 weight.0") == "ä 漢 weight.0"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0, "0 %"), (1, "100 %"), (0.12345, "12.3 %"), (9.994, "999 %"), (9.996, "1000 %"), (52.2, "5220 %")),
        *((1.5e-5, "0.0015 %"), (1e-5, "0.001 %"), (9e-6, "< 0.001 %"), (1e7, "1000000000 %"), (-0.5, "-50 %")),
    ],
)
def test_format_percent__has_three_digits_and_no_exponent(share: float, text: str) -> None:
    assert format_percent(share) == text
