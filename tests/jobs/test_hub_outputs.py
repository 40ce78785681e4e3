"""Merges whose output goes to the Hub: the local merge in one commit, by a shard on this machine, or two."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError, NotFoundError, OutputError, StorageError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.snapshots.staging import SPARE_BYTES
from support.bucket_outputs import check_published, files_below
from support.families import FamilyShape, write_family
from support.fault_server import Answer, Request
from support.hub_server import HubServer, written_hub
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.refusals import refuses
from support.training_trees import decoder_shapes, known_states, write_hf

SHAPE = FamilyShape(hidden=64, layers=6, heads=4, kv_heads=2, head_dim=16, intermediate=192, vocab=300, tied=True)
MODEL = "user/merged"
SHARD_BYTES = 64 << 10


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family with a recipe, and the merge on this machine."""
    folder = tmp_path_factory.mktemp("family")
    models = write_family(folder, SHAPE, 1)
    own = {models.experts[0]: {"weight": 0.6, "density": 0.4}}
    (folder / "recipe.yml").write_text(json.dumps(recipe_of("ties", own, models.base, dtype="bfloat16")))
    merge(folder, folder / "local")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The stand-in, with an empty repository."""
    with written_hub(monkeypatch, tmp_path / "hf") as server:
        server.commit(MODEL, {"README.md": b"mine"})
        yield server


def merge(family: Path, out: str | Path, home: Path | None = None, *, force: bool = False) -> mergepipe.MergeReport:
    options = MergeOptions(home=home or family / "home", threads=2, shard_bytes=SHARD_BYTES, force=force)
    return mergepipe.merge(family / "recipe.yml", out, options=options)


def uploaded(hub: HubServer) -> list[str]:
    return [request.path for request in hub.requests if request.method == "PUT"]


def allocated_bytes(folder: Path) -> int:
    """The space that the weight files below a folder take."""
    sizes = []
    for directory, _, names in os.walk(folder):  # unlike rglob it goes on where a directory has just gone
        for name in names:
            if name.endswith(".safetensors"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append((Path(directory) / name).stat().st_blocks * 512)
    return sum(sizes)


def test_merge__to_the_hub_is_the_local_merge_in_one_commit(family: Path, hub: HubServer, tmp_path: Path) -> None:
    report = merge(family, f"hf://{MODEL}", tmp_path)
    assert (str(report.out), hub.n_commits(MODEL)) == (f"hf://{MODEL}", 2)
    check_published(hub.model_files(MODEL), family / "local")
    assert list((tmp_path / "uploads").rglob("*.safetensors")) == []
    assert mergepipe.verify(f"hf://{MODEL}", home=tmp_path, threads=2).is_sound


@pytest.mark.thorough
@pytest.mark.parametrize("n_shards", [1, 2])
def test_merge__to_the_hub_has_two_shards_on_the_disk_at_most_and_one_where_two_have_no_room(
    family: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_shards: int
) -> None:
    """Every upload waits until the merge stands still; what lies on the disk is counted all the while."""
    most, stop = [0], threading.Event()
    sizes = sorted(path.stat().st_blocks * 512 for path in (family / "local").glob("*.safetensors"))
    room = sum(sizes[-n_shards:]) + (16 << 10)  # of the small files
    free_bytes = SPARE_BYTES + room

    def disk_usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(total=1 << 40, free=free_bytes - allocated_bytes(tmp_path))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)

    def count() -> None:
        while not stop.wait(0.001):
            most[0] = max(most[0], allocated_bytes(tmp_path))

    def is_slow(request: Request) -> Answer | None:
        if request.method == "PUT":
            threading.Event().wait(0.1)
        return None

    hub.refuse = is_slow
    watch = threading.Thread(target=count)
    watch.start()
    try:
        merge(family, f"hf://{MODEL}", tmp_path)
    finally:
        stop.set()
        watch.join()
    assert len(sizes) > 6
    assert sum(sizes[: n_shards - 1]) < most[0] <= room


@pytest.mark.thorough
def test_merge__that_was_killed_uploads_no_shard_twice(family: Path, hub: HubServer, tmp_path: Path) -> None:
    script = (
        "import sys, mergepipe\n"
        "from mergepipe.options import MergeOptions\n"
        "recipe, out, home = sys.argv[1:]\n"
        f"mergepipe.merge(recipe, out, options=MergeOptions(home=home, threads=2, shard_bytes={SHARD_BYTES}))\n"
    )
    reached = threading.Event()
    killed = threading.Event()

    def hangs(request: Request) -> Answer | None:
        if request.method == "PUT" and len(uploaded(hub)) > 3:
            reached.set()
            killed.wait(120)
            return Answer(500)
        return None

    hub.refuse = hangs
    command = [sys.executable, "-c", script, str(family / "recipe.yml"), f"hf://{MODEL}", str(tmp_path)]
    process = subprocess.Popen(command)
    try:
        assert reached.wait(120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.set()
    assert hub.n_commits(MODEL) == 1
    sent = set(hub.uploads)
    assert len(sent) >= 3
    hub.refuse = lambda _: None
    hub.requests.clear()
    report = merge(family, f"hf://{MODEL}", tmp_path)
    assert any("resumed" in notice for notice in report.notices)
    assert not sent & {path.removeprefix("lfs/") for path in uploaded(hub)}
    check_published(hub.model_files(MODEL), family / "local")


def test_merge__whose_uploaded_shards_the_hub_forgot_starts_over(family: Path, hub: HubServer, tmp_path: Path) -> None:
    hub.refuse = lambda request: Answer(500) if "/commit/" in request.path else None
    with pytest.raises(StorageError):
        merge(family, f"hf://{MODEL}", tmp_path)
    hub.uploads.clear()
    hub.refuse = lambda _: None
    report = merge(family, f"hf://{MODEL}", tmp_path)
    assert any("started over" in notice for notice in report.notices)
    check_published(hub.model_files(MODEL), family / "local")


def test_merge__replaces_an_output_on_the_hub_with_force_alone(family: Path, hub: HubServer, tmp_path: Path) -> None:
    mergepipe.push(family / "local", f"hf://{MODEL}", home=tmp_path)
    with refuses(OutputError, "output.exists"):
        merge(family, f"hf://{MODEL}", tmp_path)
    mergepipe.merge(family / "recipe.yml", f"hf://{MODEL}", home=tmp_path, threads=2, force=True)
    assert [name for name in hub.model_files(MODEL) if "safetensors" in name] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("place", "token", "error", "code"),
    [
        ("hf://user/nothing", "hf_right", NotFoundError, "model.not-found"),
        (f"hf://{MODEL}", "", StorageError, "storage.credentials"),
        (f"hf://{MODEL}", "hf_wrong", StorageError, "storage.credentials"),
        (f"hf://{MODEL}", "read-only", StorageError, "storage.credentials"),
        ("hf://user/theirs", "hf_right", OutputError, "output.not-ours"),
    ],
)
def test_merge__that_the_hub_would_refuse_ends_before_it_uploads(
    family: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    place: str, token: str, error: type[MergePipeError], code: str,
) -> None:  # fmt: skip
    hub.commit("user/theirs", {"model.safetensors": b"theirs"})
    if token == "read-only":
        hub.refuse = lambda request: Answer(403, b"{}") if request.method == "POST" else None
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with refuses(error, code):
        merge(family, place, tmp_path)
    assert uploaded(hub) == []
    assert hub.n_commits(MODEL) == 1


def test_lora_apply__to_the_hub_is_the_local_result(family: Path, hub: HubServer, tmp_path: Path) -> None:
    base, expert, adapter = family / "base", family / "expert-1", tmp_path / "adapter"
    mergepipe.extract_lora(base, expert, adapter, rank=4)
    options = OutputOptions(home=tmp_path, threads=2, shard_bytes=SHARD_BYTES)
    mergepipe.apply_lora(base, [adapter], tmp_path / "applied", options=options)
    mergepipe.apply_lora(base, [adapter], f"hf://{MODEL}", options=options)
    check_published(hub.model_files(MODEL), tmp_path / "applied")


def test_export__to_the_hub_is_one_commit(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_hf(tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    tailor.export(tmp_path / "at-9", tmp_path / "local")
    tailor.export(tmp_path / "at-9", f"hf://{MODEL}")
    assert hub.n_commits(MODEL) == 2
    files, wanted = dict(hub.model_files(MODEL)), files_below(tmp_path / "local")
    assert [name for name in wanted if name != MANIFEST_NAME and files[name] != wanted[name]] == []


@pytest.mark.parametrize(("mode", "is_ignored"), [("regular", False), ("lfs", True)])
def test_merge__loses_no_shard_that_the_hub_stores_otherwise(
    family: Path, hub: HubServer, tmp_path: Path, mode: str, is_ignored: bool
) -> None:
    """A repository may keep small weights among its small files; its .gitignore may leave weights out of commits."""

    def answers(request: Request, answer: Answer) -> Answer:
        if "/preupload/" not in request.path:
            return answer
        paths = [file["path"] for file in json.loads(request.body)["files"]]
        files = [
            {"path": path, "uploadMode": mode if is_shard else "regular", "shouldIgnore": is_ignored and is_shard}
            for path, is_shard in ((path, path.endswith(".safetensors")) for path in paths)
        ]
        return Answer(200, json.dumps({"files": files}).encode(), {"Content-Type": "application/json"})

    hub.fault = answers
    if is_ignored:
        with refuses(OutputError, "output.place"):
            merge(family, f"hf://{MODEL}", tmp_path)
        assert hub.n_commits(MODEL) == 1
    else:
        merge(family, f"hf://{MODEL}", tmp_path)
        check_published(hub.model_files(MODEL), family / "local")
