"""The name of a model is a path where that exists, an address by its scheme, and else a Hub id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import RecipeError
from mergepipe.recipes.references import ModelName, resolve_model_name
from mergepipe.storage.location import Location
from support.refusals import refuses


def resolve(text: str, *paths: str) -> ModelName:
    return resolve_model_name(text, lambda path: path in paths)


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("org/name", "hf://org/name"),
        ("org/name@main", "hf://org/name@main"),
        ("org/name@refs/pr/7", "hf://org/name@refs/pr/7"),
        ("org/name:sub/folder", "hf://org/name/sub/folder"),
        ("org/name@v1.0:sub", "hf://org/name@v1.0/sub"),
        ("gpt2", "hf://openai-community/gpt2"),
        ("gpt2@main:sub", "hf://openai-community/gpt2@main/sub"),
        ("TheOrg/Some-Model_7B.v2", "hf://TheOrg/Some-Model_7B.v2"),
    ],
)
def test_resolve_model_name__takes_a_hub_id_where_no_such_path_exists(text: str, location: str) -> None:
    assert resolve(text) == ModelName(remote=Location.parse(location), is_hub_id=True)
    assert resolve(text, text) == ModelName(path=text)


@pytest.mark.parametrize(
    ("text", "path", "revision"),
    [
        ("org/name@main", "org/name", "main"),
        ("org/name:sub", "org/name/sub", ""),
        ("/data/model@abc", "/data/model", "abc"),
        ("./model@v1:sub", "./model/sub", "v1"),
        ("mo@del@v1", "mo@del", "v1"),
    ],
)
def test_resolve_model_name__ignores_the_revision_of_a_path(text: str, path: str, revision: str) -> None:
    assert resolve(text, path.removesuffix("/sub")) == ModelName(path=path, ignored_revision=revision)


@pytest.mark.parametrize(
    "text", ["./org/name", "/org/name", "~/name", "name", "a/b/c", "../a", "org/name@", "org/na me"]
)
def test_resolve_model_name__leaves_what_is_no_hub_id_a_path(text: str) -> None:
    assert resolve(text) == ModelName(path=text)


@pytest.mark.parametrize("text", ["hf://org/name@v1/sub", "s3://bucket/prefix", "https://host/folder"])
def test_resolve_model_name__takes_addresses_whatever_exists(text: str) -> None:
    assert resolve(text, text) == ModelName(remote=Location.parse(text))


def test_resolve_model_name__refuses_a_subfolder_that_leads_out() -> None:
    with refuses(RecipeError, "location.invalid"):
        resolve("org/name:../other")


@given(st.text(alphabet="ab/@:.~+ ", max_size=12))
def test_resolve_model_name__a_path_that_exists_is_that_path(text: str) -> None:
    assert resolve(text, text) == ModelName(path=text or ".")
