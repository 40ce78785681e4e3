"""The local Hub cache is read as the Hugging Face tools write it; their settings are understood."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from mergepipe.errors import RecipeError
from mergepipe.storage.contract import Entry, FileKind
from mergepipe.storage.location import Location
from mergepipe.storage.remote.hub import HubCache
from mergepipe.storage.remote.hub_api import HubSettings, hub_settings
from mergepipe.storage.remote.hub_listing import HubFile, ModelListing, is_contained, parse_model_info
from support.hub_cache_files import git_blob_id, write_hub_cache
from support.refusals import refuses

MODEL = Location.parse("hf://org/name")
COMMIT, OTHER = "a" * 40, "b" * 40
WEIGHTS = b"weights"
SHA = hashlib.sha256(WEIGHTS).hexdigest()
FILE = HubFile("model.safetensors", len(WEIGHTS), f"sha256:{SHA}")


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    files = {"model.safetensors": WEIGHTS, "sub/config.json": b"{}"}
    write_hub_cache(tmp_path, "org/name", COMMIT, files, refs=("main", "refs/pr/1"))
    return HubCache(tmp_path)


def test_commit_of__follows_branches_and_takes_commits_that_are_there(cache: HubCache) -> None:
    assert [cache.commit_of("org/name", name) for name in ("main", "refs/pr/1", COMMIT)] == [COMMIT] * 3
    assert [cache.commit_of("org/name", name) for name in ("other", OTHER, "../refs/main")] == [None] * 3
    assert cache.commit_of("org/none", "main") is None


def test_listing__describes_files_by_their_blobs(cache: HubCache) -> None:
    listing = cache.listing("org/name", COMMIT)
    assert listing is not None
    assert listing.files == {
        "model.safetensors": FILE, "sub/config.json": HubFile("sub/config.json", 2, f"git:{git_blob_id(b'{}')}")
    }  # fmt: skip
    assert listing.folders[""] == (Entry("model.safetensors", FileKind.FILE), Entry("sub", FileKind.FOLDER))
    assert cache.listing("org/name", OTHER) is None


def test_path_of__takes_a_blob_of_another_commit(cache: HubCache) -> None:
    path = cache.path_of("org/name", OTHER, FILE)
    assert path is not None
    assert path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("version", [f"sha256:{'0' * 64}", f"git:{'0' * 40}"])
def test_path_of__passes_over_other_content_at_the_same_place(cache: HubCache, version: str) -> None:
    assert cache.path_of("org/name", COMMIT, HubFile("model.safetensors", len(WEIGHTS), version)) is None


def test_path_of__passes_over_a_blob_of_another_size(cache: HubCache) -> None:
    assert cache.path_of("org/name", COMMIT, HubFile("model.safetensors", 6, f"sha256:{SHA}")) is None


def test_path_of__follows_blobs_that_models_share(cache: HubCache) -> None:
    blob = cache.folder / "models--org--name" / "blobs" / SHA
    shared = cache.folder / "blobs" / "ab" / "abcdef"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert cache.path_of("org/name", COMMIT, FILE) is not None
    listing = cache.listing("org/name", COMMIT)
    assert listing is not None
    assert listing.files["model.safetensors"] == FILE


def test_cache__knows_models_that_were_downloaded_by_their_bare_name(tmp_path: Path) -> None:
    write_hub_cache(tmp_path, "gpt2", COMMIT, {"config.json": b"{}"})
    assert HubCache(tmp_path).commit_of("openai-community/gpt2", "main") == COMMIT
    assert HubCache(tmp_path).commit_of("someone/gpt2", "main") is None
    write_hub_cache(tmp_path, "openai-community/gpt2", OTHER, {"config.json": b"{}"})
    assert HubCache(tmp_path).commit_of("openai-community/gpt2", "main") == OTHER


def test_cache__takes_plain_files_where_there_are_no_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(WEIGHTS)
    cache = HubCache(tmp_path)
    listing = cache.listing("org/name", COMMIT)
    assert listing is not None
    assert listing.files["model.safetensors"].version.startswith("file:")
    assert cache.path_of("org/name", COMMIT, FILE) == snapshot / "model.safetensors"
    assert cache.path_of("org/name", COMMIT, listing.files["model.safetensors"]) == snapshot / "model.safetensors"


def test_listing__leaves_out_links_to_nothing(cache: HubCache) -> None:
    (cache.folder / "models--org--name" / "blobs" / SHA).unlink()
    listing = cache.listing("org/name", COMMIT)
    assert listing is not None
    assert set(listing.files) == {"sub/config.json"}


INFO = {"sha": COMMIT, "siblings": [{"rfilename": "a/b", "size": 2, "blobId": "1" * 40}]}
LARGE = {"rfilename": "m", "size": 9, "blobId": "1" * 40, "lfs": {"sha256": SHA, "size": 9, "pointerSize": 134}}


def test_parse_model_info__prefers_the_sha256_of_large_files() -> None:
    listing = parse_model_info("org/name", MODEL, json.dumps({**INFO, "siblings": [*INFO["siblings"], LARGE]}).encode())
    assert {path: file.version for path, file in listing.files.items()} == {
        "a/b": f"git:{'1' * 40}", "m": f"sha256:{SHA}"
    }  # fmt: skip
    assert listing.folders["a"] == (Entry("b", FileKind.FILE),)


def test_is_contained__allows_odd_names_but_no_way_out() -> None:
    assert all(is_contained(path) for path in ("a", "a b/c#?", "..a/b", "line\nbreak"))
    assert not any(is_contained(path) for path in ("", ".", "a/..", "a/./b", "/a", "a/", "nul\0"))


def test_status__of_a_folder_has_the_commit_as_version() -> None:
    listing = ModelListing.of("org/name", COMMIT, [HubFile("a/b", 2, f"git:{'1' * 40}")])
    folder = listing.status("a")
    assert folder is not None
    assert (folder.is_folder, folder.version, listing.status("b")) == (True, COMMIT, None)


def settings(home: Path, **variables: str) -> HubSettings:
    return hub_settings({"HOME": str(home), **variables})


def test_settings__find_cache_and_token_where_the_tools_put_them(tmp_path: Path) -> None:
    assert settings(tmp_path) == HubSettings("https://huggingface.co", tmp_path / ".cache/huggingface/hub")
    assert settings(tmp_path, XDG_CACHE_HOME="/x").cache_folder == Path("/x/huggingface/hub")
    assert settings(tmp_path, HF_HOME="~/h").cache_folder == tmp_path / "h/hub"
    assert settings(tmp_path, HF_HOME="/h", HF_HUB_CACHE="/c").cache_folder == Path("/c")
    (tmp_path / "token").write_text("hf_file\n")
    assert settings(tmp_path, HF_HOME=str(tmp_path)).token == "hf_file"
    assert settings(tmp_path, HF_TOKEN_PATH=str(tmp_path / "token")).token == "hf_file"
    assert settings(tmp_path, HF_HOME=str(tmp_path), HF_TOKEN=" hf_env\n").token == "hf_env"
    assert settings(tmp_path, HF_TOKEN="hf_env", HF_HUB_DISABLE_IMPLICIT_TOKEN="1").token == ""
    assert settings(tmp_path, HF_TOKEN="not\x07sendable").token == ""


def test_settings__show_no_token(tmp_path: Path) -> None:
    assert "hf_secret" not in repr(settings(tmp_path, HF_TOKEN="hf_secret"))


@pytest.mark.parametrize(("value", "is_offline"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_settings__know_offline_mode(tmp_path: Path, value: str, is_offline: bool) -> None:
    assert settings(tmp_path, HF_HUB_OFFLINE=value).is_offline is is_offline


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://host", "https://user:secret@host", "https://h?x=1"])
def test_settings__refuse_an_endpoint_that_is_no_address_without_showing_it(tmp_path: Path, endpoint: str) -> None:
    with refuses(RecipeError, "location.invalid") as caught:
        settings(tmp_path, HF_ENDPOINT=endpoint)
    assert "secret" not in str(caught.value)
    assert settings(tmp_path, HF_ENDPOINT="http://host:80/hub/").endpoint == "http://host:80/hub"
