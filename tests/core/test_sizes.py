"""Sizes as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.units import LEAST_BARE_BYTES, MAX_SIZE_BYTES, parse_size
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
