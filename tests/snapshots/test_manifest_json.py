"""Manifests survive a round trip, and lies in them are found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME, parse_manifest
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


@pytest.mark.parametrize("budget", [None, "0", "80%", "100%"])
@pytest.mark.parametrize("operator", ["ties", "dare_linear"])
def test_manifest__survives_a_round_trip(family: Path, tmp_path: Path, operator: str, budget: str | None) -> None:
    raw = merged(family, tmp_path / "out", operator, budget)
    manifest = parse_manifest(raw)
    assert manifest.to_json() == raw
    assert parse_manifest(manifest.to_json()) == manifest
    content = json.loads(raw)
    assert (content["plan"] is None) == (budget is None)
    if budget is not None:
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


Lie = Callable[[Content], None]
LIES: list[tuple[Lie, str]] = [
    (set_seed, "seed: an integer is needed, found True"),
    (set_size, "files[0].size_bytes: an integer from 0 on is needed, found -1"),
    (set_shape, "tensors[0].shape[1]: an integer from 0 on is needed, found -8"),
    (set_run, "run.seconds: "),
    (set_realized, "realized: an object is needed, found []"),
    (add_key, "inputs[0]: unknown key 'paht'; did you mean 'path'?"),
    (drop_key, "coverage: 'touched' is missing"),
]


@pytest.mark.parametrize(("lie", "place"), LIES)
def test_manifest__a_lie_is_refused_with_its_place(content: Content, lie: Lie, place: str) -> None:
    changed = copy.deepcopy(content)
    lie(changed)
    with pytest.raises(CorruptError) as caught:
        parse_manifest(json.dumps(changed).encode(), "there")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("format.damaged", "there")
    assert problem.message.startswith(place)


def test_manifest__another_content_than_its_sid_says_is_refused(content: Content) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_manifest(json.dumps(content | {"recipe": "another"}).encode())
    assert "its sid is" in str(caught.value)


def test_manifest__any_other_change_is_refused(content: Content) -> None:
    changed = copy.deepcopy(content)
    changed["inputs"][0]["path"] += "x"
    with pytest.raises(CorruptError) as caught:
        parse_manifest(json.dumps(changed).encode())
    assert "its digest is" in str(caught.value)


def test_manifest__of_the_golden_snapshot_is_read_and_written_byte_for_byte() -> None:
    raw = (GOLDEN / "manifest-5" / MANIFEST_NAME).read_bytes()
    manifest = parse_manifest(raw)
    assert json.loads(raw)["format"] == "mergepipe-manifest/5"
    assert manifest.sid == json.loads(raw)["sid"]
    assert manifest.to_json() == raw


@pytest.mark.parametrize(
    ("raw", "kind", "code"),
    [
        (b"", CorruptError, "format.damaged"),
        (b"\xff", CorruptError, "format.damaged"),
        (b'{"a": 1, "a": 2}', CorruptError, "format.damaged"),
        (b'{"a": NaN}', CorruptError, "format.damaged"),
        (b"[" * 100_000, CorruptError, "format.damaged"),
        (b"[]", CorruptError, "format.damaged"),
        (b"{}", CorruptError, "format.damaged"),
        (b'{"format": "mergepipe-plan/1"}', CorruptError, "format.damaged"),
        (b'{"format": "mergepipe-manifest/x"}', CorruptError, "format.damaged"),
        (b'{"format": "mergepipe-manifest/1"}', UnsupportedError, "format.version"),
        (b'{"format": "mergepipe-manifest/6"}', UnsupportedError, "format.version"),
        (b'{"format": "mergepipe-manifest/5", "kind": "composite"}', UnsupportedError, "format.kind"),
    ],
)
def test_manifest__what_is_none_is_refused(raw: bytes, kind: type[MergePipeError], code: str) -> None:
    with pytest.raises(kind) as caught:
        parse_manifest(raw)
    assert caught.value.code == code
