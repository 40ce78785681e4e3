"""Merges of models on the Hub have the bytes of merges of folders, whatever happens to addresses and branches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe import api
from mergepipe.errors import NotFoundError
from support.families import TINY, FamilyPaths, write_family
from support.fault_server import Answer, Fault, Request
from support.hub_server import HubServer, hub_server

RECIPE = """merge_method: ties
base_model: {0}/base
models:
  - model: {0}/math@main
    parameters: {{weight: 0.6, density: 0.5}}
  - model: {0}/code
    parameters: {{weight: 0.4, density: 0.5}}
dtype: bfloat16
"""
NAMES = ("base", "math", "code")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyPaths:
    return write_family(tmp_path_factory.mktemp("family"), TINY, 2, shard_bytes=1 << 17)


@pytest.fixture
def hub(family: FamilyPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        for name, folder in zip(NAMES, family.models, strict=True):
            server.commit(f"org/{name}", {path.name: path.read_bytes() for path in folder.iterdir()})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield server


def merged_bytes(folder: Path, family: FamilyPaths | None) -> dict[str, bytes]:
    """The weights of a merge by the recipe, of folders or of the Hub's models."""
    folder.mkdir()
    for name, model in zip(NAMES, family.models if family else (), strict=bool(family)):
        (folder / "org").mkdir(exist_ok=True)
        (folder / "org" / name).symlink_to(model)
    (folder / "recipe.yml").write_text(RECIPE.format("org"))
    api.merge(folder / "recipe.yml", folder / "out")
    return {path.name: path.read_bytes() for path in (folder / "out").glob("*.safetensors")}


def after_reads(hub: HubServer, n_reads: int, happen: Fault) -> None:
    """Let `happen` decide the answer to the read after `n_reads` of them."""
    hub.cdn.faults = [*([lambda _request, answer: answer] * n_reads), happen]


def test_merge__has_the_bytes_of_a_merge_of_folders(hub: HubServer, family: FamilyPaths, tmp_path: Path) -> None:
    merged = merged_bytes(tmp_path / "hub", None)
    n_files = sum(len(list(folder.iterdir())) for folder in family.models)
    asked = [request.path for request in hub.requests if "/revision/" in request.path]
    assert sorted(asked) == sorted(f"api/models/org/{name}/revision/main" for name in NAMES)
    assert len(hub.resolves) <= n_files + 1
    assert merged == merged_bytes(tmp_path / "folders", family)


@pytest.mark.usefixtures("hub")
def test_pack__of_a_model_of_the_hub_is_named_as_its_repository(tmp_path: Path) -> None:
    report = api.pack("hf://org/base", ["hf://org/math"], tmp_path, home=tmp_path / "home")
    assert [str(packed.store) for packed in report.experts] == [str(tmp_path / "math")]
    assert (tmp_path / "math" / "mergepipe-store.json").exists()


def test_merge__goes_on_when_locations_expire_and_branches_move(
    hub: HubServer, family: FamilyPaths, tmp_path: Path
) -> None:
    def expire_and_move(_request: Request, _answer: Answer) -> Answer:
        hub.expire_locations()
        for name in NAMES:
            hub.commit(f"org/{name}", {"model.safetensors": b"other"})
        return Answer(403)

    after_reads(hub, 8, expire_and_move)
    merged = merged_bytes(tmp_path / "hub", None)
    assert hub.cdn.signature == 1
    assert merged == merged_bytes(tmp_path / "folders", family)


def test_check__says_which_models_are_on_the_hub(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.commit("org/code", hub.model_files("org/code"))
    (tmp_path / "recipe.yml").write_text(RECIPE.format("org"))
    report = api.check(tmp_path / "recipe.yml")
    assert [model.model for model in report.models][-1] == f"org/code (hf://org/code@{commit})"


def test_check__lists_the_files_of_a_model_without_weights(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/code", {"README.md": b"", "notes.txt": b""})
    (tmp_path / "recipe.yml").write_text(RECIPE.format("org"))
    with pytest.raises(NotFoundError, match=r"no weights here, found: 'README\.md', 'notes\.txt'"):
        api.check(tmp_path / "recipe.yml")
