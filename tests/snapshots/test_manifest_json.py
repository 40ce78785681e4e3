"""Manifests survive a round trip, validate against their schema, and lies in them are found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import mergepipe
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.snapshots.manifest_json import manifest_of_json
from support.families import TINY, write_family

Content = dict[str, Any]
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
RECIPE = """\
merge_method: {operator}
base_model: base
models:
- {{model: expert-1, parameters: {{weight: 0.6, density: 0.5}}}}
- {{model: expert-2, parameters: {{weight: 0.4, density: 0.5}}}}
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    write_family(root, TINY, 2)
    return root


def merged(family: Path, out: Path, operator: str, budget: str | None) -> bytes:
    """The manifest of a merge."""
    recipe = family / f"{operator}.yml"
    recipe.write_text(RECIPE.format(operator=operator))
    mergepipe.merge(recipe, out, budget=budget)
    return (out / MANIFEST_NAME).read_bytes()


def schema(name: str) -> Content:
    text = resources.files("mergepipe").joinpath(f"schemas/{name}.schema.json").read_text(encoding="utf-8")
    content: Content = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(content)
    return content


@pytest.mark.parametrize("budget", [None, "0", "40%", "100%"])
@pytest.mark.parametrize("operator", ["ties", "dare_linear"])
def test_manifest__survives_a_round_trip_and_validates(
    family: Path, tmp_path: Path, operator: str, budget: str | None
) -> None:
    raw = merged(family, tmp_path / "out", operator, budget)
    manifest = manifest_of_json(raw)
    assert manifest.to_json() == raw
    assert manifest_of_json(manifest.to_json()) == manifest
    content = json.loads(raw)
    jsonschema.validate(content, schema("manifest"))
    assert (content["plan"] is None) == (budget is None)
    if budget is not None:
        jsonschema.validate(content["plan"], schema("plan"))
        assert content["plan"]["digest"] == content["plan_digest"]


@pytest.fixture(scope="module")
def content(family: Path) -> Content:
    loaded: Content = json.loads(merged(family, family / "out", "ties", "40%"))
    return loaded


def set_seed(found: Content) -> None:
    found["seed"] = True


def set_size(found: Content) -> None:
    found["files"][0]["size_bytes"] = -1


def set_shape(found: Content) -> None:
    found["tensors"][0]["shape"] = [8, -8]


def set_run(found: Content) -> None:
    found["run"]["seconds"] = None


def set_realized(found: Content) -> None:
    found["realized"] = []


def add_key(found: Content) -> None:
    found["inputs"][0]["paht"] = "x"


def drop_key(found: Content) -> None:
    del found["coverage"]["touched"]


LIES = [set_seed, set_size, set_shape, set_run, set_realized, add_key, drop_key]


@pytest.mark.parametrize("lie", LIES)
def test_manifest__a_lie_is_refused_by_the_reader_and_by_the_schema(
    content: Content, lie: Callable[[Content], None]
) -> None:
    changed = copy.deepcopy(content)
    lie(changed)
    with pytest.raises(CorruptError) as caught:
        manifest_of_json(json.dumps(changed).encode(), "there")
    assert caught.value.code == "manifest.damaged"
    assert caught.value.problems[0].where == "there"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema("manifest"))


def test_manifest__another_content_than_its_sid_says_is_refused(content: Content) -> None:
    with pytest.raises(CorruptError) as caught:
        manifest_of_json(json.dumps(content | {"recipe": "another"}).encode())
    assert caught.value.code == "manifest.damaged"


def test_manifest__any_other_change_is_refused(content: Content) -> None:
    changed = copy.deepcopy(content)
    changed["inputs"][0]["path"] += "x"
    with pytest.raises(CorruptError) as caught:
        manifest_of_json(json.dumps(changed).encode())
    assert caught.value.code == "manifest.damaged"


def test_manifest__of_the_golden_snapshot_is_read_and_written_byte_for_byte() -> None:
    raw = (GOLDEN / "manifest-4" / MANIFEST_NAME).read_bytes()
    manifest = manifest_of_json(raw)
    assert json.loads(raw)["format"] == "mergepipe-manifest/4"
    assert manifest.sid == json.loads(raw)["sid"]
    assert manifest.to_json() == raw


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b"", CorruptError, "not JSON: Expecting value: line 1 column 1"),
        (b"\xff", CorruptError, "not JSON: 'utf-8' codec can't decode byte"),
        (b'{"a": 1, "a": 2}', CorruptError, "an object has the same key twice"),
        (b'{"a": NaN}', CorruptError, "NaN is not a valid JSON number"),
        (b"[" * 100_000, CorruptError, "not JSON: maximum recursion depth exceeded"),
        (b"[]", CorruptError, "an object is needed"),
        (b"{}", CorruptError, "'format' is missing"),
        (b'{"format": "mergepipe-plan/1"}', CorruptError, "its format is 'mergepipe-plan/1',"),
        (b'{"format": "mergepipe-manifest/0"}', CorruptError, "its format is 'mergepipe-manifest/0',"),
        (b'{"format": "mergepipe-manifest/1"}', UnsupportedError, "its format is 'mergepipe-manifest/1', this"),
        (b'{"format": "mergepipe-manifest/5"}', UnsupportedError, "its format is 'mergepipe-manifest/5', this"),
    ],
)
def test_manifest__what_is_none_is_refused(raw: bytes, kind: type[MergePipeError], words: str) -> None:
    with pytest.raises(kind) as caught:
        manifest_of_json(raw)
    assert words in str(caught.value)
