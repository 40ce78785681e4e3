"""Locations read from text, joined, ordered, written again."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import RecipeError
from mergepipe.storage.location import Location, is_remote
from support.refusals import refuses

NAMES = st.text("abcXYZ019._- é%", min_size=1, max_size=8).filter(lambda name: name.strip("."))
FOLDERS = st.lists(NAMES, max_size=3).map("/".join)
ROOTS = st.sampled_from(
    [
        "s3://bucket",
        "gs://b",
        "az://box",
        "https://host:8080",
        "http://host/%20",
        "hf://org/name",
        "hf://o/n@v1",
        "/data",
        ".",
    ]
)


@given(ROOTS, FOLDERS)
def test_location__parses_what_it_writes(root: str, folder: str) -> None:
    location = Location.parse(f"{root}/{folder}" if folder else root)
    assert Location.parse(str(location)) == location
    assert pickle.loads(pickle.dumps(location)) == location


@given(ROOTS, FOLDERS, NAMES)
def test_location__a_name_below_it_has_it_as_parent(root: str, folder: str, name: str) -> None:
    location = Location.parse(f"{root}/{folder}" if folder else root)
    assert (location / name).parent == location
    assert (location / name).name == name
    assert (location / name).relative_to(location).as_posix() == name


@pytest.mark.parametrize(
    ("text", "scheme", "root", "revision", "key"),
    [
        ("s3://bucket", "s3", "bucket", "", ""),
        ("S3://bucket/a//b/", "s3", "bucket", "", "a/b"),
        ("https://host/dir/x.safetensors", "https", "host", "", "dir/x.safetensors"),
        ("https://host/my%20model/a%2Bb", "https", "host", "", "my model/a+b"),
        ("s3://bucket/my%20model", "s3", "bucket", "", "my%20model"),
        ("hf://org/name", "hf", "org/name", "", ""),
        ("hf://org/name@main/sub/folder", "hf", "org/name", "main", "sub/folder"),
        ("hf://org/name@refs/pr/7/sub", "hf", "org/name", "refs/pr/7", "sub"),
        ("hf://org/name@refs%2Fpr%2F7", "hf", "org/name", "refs/pr/7", ""),
        ("file:///data/my%20model", "", "", "", "/data/my model"),
        ("models/base", "", "", "", "models/base"),
    ],
)
def test_parse__takes_the_parts_apart(text: str, scheme: str, root: str, revision: str, key: str) -> None:
    location = Location.parse(text)
    assert (location.scheme, location.root, location.revision, location.key) == (scheme, root, revision, key)


@pytest.mark.parametrize(
    "text",
    [
        "s3://", "hf://org", "hf://org/name@", "hf:///name", "hf://org/na me", "https://user:secret@host/x",
        "https://host/x?token=1", "s3://bucket/../other",
    ],
)  # fmt: skip
def test_parse__refuses_what_names_nothing_or_holds_credentials(text: str) -> None:
    with refuses(RecipeError, "location.invalid"):
        Location.parse(text)


def test_local__is_the_path_itself() -> None:
    location = Location.local(Path("/data/model"))
    assert (str(location / "x"), (location / "x").local_path) == ("/data/model/x", Path("/data/model/x"))
    assert location / "/elsewhere" == Location.local(Path("/elsewhere"))
    assert [is_remote(text) for text in ("/data", "file:///data", "s3://bucket/x")] == [False, False, True]
    with pytest.raises(RecipeError, match="not on this machine"):
        _ = Location.parse("s3://bucket/x").local_path


def test_locations__sort_by_store_and_path() -> None:
    texts = ["hf://org/name", "/b", "s3://a/x", "/a", "s3://a"]
    assert [str(location) for location in sorted(map(Location.parse, texts))] == [
        "/a", "/b", "hf://org/name", "s3://a", "s3://a/x",
    ]  # fmt: skip
