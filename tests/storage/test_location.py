"""Locations: names of inputs, on this machine and in stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.storage.location import Location, location_of

PARTS = st.lists(st.text(st.characters(exclude_characters="/\0"), min_size=1), min_size=1).map("/".join)


@given(st.sampled_from(["file", "s3", "hf", "https", "memory"]), PARTS)
def test_location__is_read_back_from_its_text(scheme: str, path: str) -> None:
    location = Location.parse(f"{scheme}://{path}")
    assert Location.parse(str(location)) == location


@pytest.mark.parametrize("text", ["models/base", "/models/base", "../base", ".", "base:1", "hf:/x"])
def test_location__of_a_plain_path_is_local_and_keeps_its_text(text: str) -> None:
    assert str(Location.parse(text)) == text
    assert Location.parse(text).local_path == Path(text)
    assert Location.parse(text) == Location.local(text) == location_of(Path(text)) == location_of(text)


def test_location__names_what_is_beside_and_below_it() -> None:
    model = Location.parse("s3://bucket/models/base")
    assert str(model / "model.safetensors") == "s3://bucket/models/base/model.safetensors"
    assert str(model.with_name("expert")) == "s3://bucket/models/expert"
    assert [str(each) for each in model.parents] == ["s3://bucket/models", "s3://bucket", "s3://."]
    assert (model / "a" / "b").relative_to(model) == "a/b"
    assert (model.name, (model / "x.json").suffix) == ("base", ".json")


def test_location__of_another_scheme_is_not_below() -> None:
    model = Location.parse("s3://bucket/base")
    assert not model.is_relative_to(Location.parse("bucket"))
    with pytest.raises(ValueError, match="not below"):
        model.relative_to(Location.local("bucket"))
    with pytest.raises(ValueError, match="not a path of this machine"):
        _ = model.local_path
