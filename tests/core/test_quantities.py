"""Sizes as users write them, and numbers as they read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.units import (
    LEAST_BARE_BYTES,
    MAX_SIZE_BYTES,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
    parse_size,
    plural,
)
from mergepipe.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("123B", 123),
        ("1kB", 1000),
        ("1KB", 1000),
        ("512MB", 512_000_000),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("1.5G", 1_500_000_000),
        ("2T", 2_000_000_000_000),
        ("1KiB", 1024),
        ("4GiB", 4 << 30),
        ("4 GiB ", 4 << 30),
        ("1.5Gi", 3 << 29),
        (".5KiB", 512),
        ("5.MB", 5_000_000),
        ("0.3B", 0),
        ("0.1GB", 100_000_000),
    ],
)
def test_parse_size__reads_decimal_and_binary_units(text: str, expected: int) -> None:
    assert parse_size(text, "--memory") == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "-1GB", "+1GB", "1e9", "1,5GB", "1 2", "0x10", "nan", "inf", "1.2.3GB", "1GB/s", "½GB", "٣GB", "."],
)
def test_parse_size__refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_size(text, "--memory")
    problem = caught.value.problems[0]
    assert (problem.code, problem.where) == ("option.invalid", "--memory")
    assert f"'{text}' is not a size" in problem.message


def test_parse_size__names_an_unknown_unit_and_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match=r"'4GiBB': unknown unit 'GiBB'; did you mean 'GiB'\?"):
        parse_size("4GiBB", "--memory")


@pytest.mark.parametrize("text", ["9223372036854775808", "9000000PB", "9" * 30 + "PiB"])
def test_parse_size__refuses_what_no_file_can_hold(text: str) -> None:
    with pytest.raises(RecipeError, match="is more than"):
        parse_size(text, "--shard-size")


@pytest.mark.parametrize(("text", "meant"), [("5", "5GB"), ("1.5", "1.5GB"), (" 64 ", "64GB"), ("30000", "30000MB")])
def test_parse_size__refuses_few_bytes_without_a_unit(text: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=rf" without a unit would be [0-9]+ bytes; did you mean {meant}\?"):
        parse_size(text, "--shard-size")


@given(size=st.integers(LEAST_BARE_BYTES, MAX_SIZE_BYTES) | st.just(0))
def test_parse_size__bare_numbers_are_bytes(size: int) -> None:
    assert parse_size(str(size), "--memory") == parse_size(f"{size}B", "--memory") == size


@given(count=st.integers(0, 999), unit=st.sampled_from(["k", "M", "G", "T", "P"]), spaces=st.sampled_from(["", " "]))
def test_parse_size__case_and_the_letter_b_do_not_matter(count: int, unit: str, spaces: str) -> None:
    plain = parse_size(f"{count}{spaces}{unit}", "--memory")
    assert (
        plain == parse_size(f"{count}{unit.upper()}B", "--memory") == parse_size(f"{count}{unit.lower()}b", "--memory")
    )


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


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0, "0 %"), (1, "100 %"), (0.12345, "12.3 %"), (9.994, "999 %"), (9.996, "1000 %"), (52.2, "5220 %")),
        *((1.5e-5, "0.0015 %"), (1e-5, "0.001 %"), (9e-6, "< 0.001 %"), (1e7, "1000000000 %"), (-0.5, "-50 %")),
    ],
)
def test_format_percent__has_three_digits_and_no_exponent(share: float, text: str) -> None:
    assert format_percent(share) == text
