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
from mergepipe.snapshots.manifest import parse_manifest
from support.families import TINY, write_family
from support.public_names import MANIFEST_NAME
from support.refusals import refuses

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


def test_manifest__of_the_golden_snapshot_is_read_and_written_byte_for_byte() -> None:
    raw = (GOLDEN / "manifest-5" / MANIFEST_NAME).read_bytes()
    manifest = parse_manifest(raw)
    assert json.loads(raw)["format"] == "mergepipe-manifest/5"
    assert manifest.sid == json.loads(raw)["sid"]
    assert manifest.to_json() == raw


def edited(change: Callable[[Content], object]) -> Callable[[Content], bytes]:
    """The manifest with a change of its content."""

    def changed(content: Content) -> bytes:
        found = copy.deepcopy(content)
        change(found)
        return json.dumps(found).encode()

    return changed


DAMAGED = CorruptError, "format.damaged"
REFUSED: list[tuple[Callable[[Content], bytes], tuple[type[MergePipeError], str], str]] = [
    (edited(lambda c: c["tensors"][0].update(shape=[8, -8])), DAMAGED, "tensors[0].shape[1]: an integer from 0 on is"),
    (edited(lambda c: c["run"].update(seconds=None)), DAMAGED, "run.seconds: "),
    (edited(lambda c: c["inputs"][0].update(paht="x")), DAMAGED, "inputs[0]: unknown key 'paht'; did you mean 'path'?"),
    (edited(lambda c: c.update(recipe="another")), DAMAGED, "its sid is"),
    (edited(lambda c: c["inputs"][0].update(path="x")), DAMAGED, "its digest is"),
    (edited(lambda c: c.update(format="mergepipe-plan/1")), DAMAGED, "its format is 'mergepipe-plan/1'"),
    (edited(lambda c: c.update(format="mergepipe-manifest/6")), (UnsupportedError, "format.version"), ""),
    (lambda _: b'{"format": "mergepipe-manifest/5", "kind": "composite"}', (UnsupportedError, "format.kind"), ""),
]


@pytest.mark.parametrize(("raw", "refusal", "words"), REFUSED)
def test_manifest__that_lies_or_is_none_is_refused(
    content: Content, raw: Callable[[Content], bytes], refusal: tuple[type[MergePipeError], str], words: str
) -> None:
    with refuses(*refusal) as caught:
        parse_manifest(raw(content), "there")
    (problem,) = caught.value.problems
    assert (problem.where, words in problem.message) == ("there", True)
