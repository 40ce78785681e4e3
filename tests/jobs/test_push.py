"""Snapshots pushed to the Hub and to buckets: whole or not at all, and without paths of this machine."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

import mergepipe
from mergepipe import tailor
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, OutputError, StorageError
from mergepipe.options import MergeOptions
from mergepipe.snapshots.manifest import parse_manifest
from mergepipe.storage.remote import hub_commit, objects
from mergepipe.tailor.composition import _recipe_without_paths
from support.bucket_outputs import files_below, new_prefix, objects_below, watch_buckets
from support.families import FamilyShape, write_family
from support.fault_server import Answer, Request, stall, status
from support.hub_server import HubServer, written_hub
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.refusals import refuses
from support.remote_stores import set_environment
from support.s3_server import S3Server
from support.training_trees import decoder_shapes, known_states, write_hf

SHAPE = FamilyShape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=True)
MODEL = "user/merged"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of several shards whose recipe names absolute paths."""
    folder = tmp_path_factory.mktemp("family")
    family = write_family(folder, SHAPE, 1)
    recipe = recipe_of("linear", {family.experts[0]: {"weight": 0.6}}, family.base, dtype="bfloat16")
    (folder / "recipe.yml").write_text(json.dumps(recipe))
    options = MergeOptions(home=folder / "home", threads=2, shard_bytes=48 << 10)
    mergepipe.merge(folder / "recipe.yml", folder / "merged", budget="60%", options=options)
    return folder / "merged"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with written_hub(monkeypatch, tmp_path / "hf") as server:
        yield server


def push(snapshot: Path, destination: str, *, create: bool = False, private: bool = False) -> mergepipe.PushReport:
    return mergepipe.push(snapshot, destination, create=create, private=private, home=snapshot.parent / "home")


def check_copy(snapshot: Path, files: dict[str, bytes]) -> None:
    """The copy is the snapshot, sound by its own manifest, and no path of this machine stands in it."""
    wanted = files_below(snapshot)
    assert files.keys() == wanted.keys()
    assert [name for name in files if name.endswith(".safetensors") and files[name] != wanted[name]] == []
    assert [name for name, content in files.items() if str(snapshot.parent).encode() in content] == []
    manifest, source = (parse_manifest(held[MANIFEST_NAME]) for held in (files, wanted))
    assert (manifest.files, manifest.tensors, manifest.blocks) == (source.files, source.tensors, source.blocks)
    assert manifest.sid == source.sid
    assert [record.path for record in manifest.inputs] == ["../base", "../expert-1"]


# --- the Hub ---


def test_push__to_the_hub_is_one_commit(snapshot: Path, hub: HubServer, tmp_path: Path) -> None:
    report = push(snapshot, f"hf://{MODEL}", create=True, private=True)
    assert hub.n_commits(MODEL) == 2
    assert report.commit == hub.head(MODEL)
    assert MODEL in hub.private
    files = dict(hub.model_files(MODEL))
    del files[".gitattributes"]
    check_copy(snapshot, files)
    assert hub.token.encode() not in b"".join(files.values())
    copy = tmp_path / "copy"
    for name, content in files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    assert mergepipe.verify(copy, home=tmp_path / "home", threads=2).is_sound
    for name in ("base", "expert-1"):
        (tmp_path / name).symlink_to(snapshot.parent / name)
    assert mergepipe.verify(copy, deep_fraction=1.0, catalog=False, threads=2).is_sound


def test_push__to_a_hub_that_failed_names_it_and_uploads_nothing_again(snapshot: Path, hub: HubServer) -> None:
    hub.commit(MODEL, {"README.md": b"mine"})
    hub.refuse = lambda request: Answer(500) if "/commit/" in request.path else None
    head = hub.head(MODEL)
    with pytest.raises(StorageError, match=rf"{hub.url.partition('//')[2]} answers 500"):
        push(snapshot, f"hf://{MODEL}")
    assert hub.head(MODEL) == head
    hub.refuse = lambda _: None
    hub.requests.clear()
    push(snapshot, f"hf://{MODEL}")
    assert [request for request in hub.requests if request.method == "PUT"] == []
    check_copy(snapshot, dict(hub.model_files(MODEL)))


def test_push__whose_answer_was_lost_is_published(snapshot: Path, hub: HubServer) -> None:
    hub.commit(MODEL, {"README.md": b"mine"})

    def is_lost(request: Request, answer: Answer) -> Answer:
        return Answer(502) if "/commit/" in request.path else answer

    hub.fault = is_lost
    assert push(snapshot, f"hf://{MODEL}").commit == hub.head(MODEL)
    check_copy(snapshot, dict(hub.model_files(MODEL)))


def test_push__whose_branch_moved_commits_nothing(snapshot: Path, hub: HubServer) -> None:
    hub.commit(MODEL, {"README.md": b"mine"})

    def moves(request: Request, answer: Answer) -> Answer:
        if "/preupload/" in request.path and hub.n_commits(MODEL) == 1:
            hub.commit(MODEL, {"README.md": b"theirs"})
        return answer

    hub.fault = moves
    with refuses(ConflictError, "output.changed"):
        push(snapshot, f"hf://{MODEL}")
    assert hub.model_files(MODEL) == {"README.md": b"theirs"}


def test_push__that_the_hub_answers_with_a_conflict_commits_nothing(snapshot: Path, hub: HubServer) -> None:
    hub.commit(MODEL, {"README.md": b"mine"})
    hub.refuse = lambda request: Answer(409, b"{}") if "/commit/" in request.path else None
    with refuses(ConflictError, "output.changed"):
        push(snapshot, f"hf://{MODEL}")
    assert hub.model_files(MODEL) == {"README.md": b"mine"}


def test_push__of_one_snapshot_by_two_at_once_commits_it_once(snapshot: Path, hub: HubServer) -> None:
    """The second is refused, and finds there what it was to push."""
    hub.commit(MODEL, {"README.md": b"mine"})
    both = threading.Barrier(2)

    def wait_for_both(request: Request) -> None:
        if "/commit/" in request.path:
            both.wait(60)

    hub.refuse = wait_for_both
    with ThreadPoolExecutor(2) as threads:
        pushes = [threads.submit(push, snapshot, f"hf://{MODEL}") for _ in range(2)]
    assert {job.result().commit for job in pushes} == {hub.head(MODEL)}
    assert hub.n_commits(MODEL) == 2
    check_copy(snapshot, dict(hub.model_files(MODEL)))


def test_push__among_weights_of_others_is_refused(snapshot: Path, hub: HubServer) -> None:
    hub.commit(MODEL, {"model.safetensors": b"theirs"})
    with refuses(OutputError, "output.not-ours"):
        push(snapshot, f"hf://{MODEL}")
    assert hub.n_commits(MODEL) == 1


@pytest.mark.parametrize(
    ("destination", "token", "error", "code"),
    [
        ("hf://user/nothing", "hf_right", NotFoundError, "model.not-found"),
        ("hf://user/merged@no-branch", "hf_right", NotFoundError, "model.not-found"),
        ("hf://user/merged", "hf_wrong", StorageError, "storage.credentials"),
        ("https://host/folder", "hf_right", OutputError, "output.place"),
    ],
)
def test_push__that_cannot_be_is_refused_by_name(
    snapshot: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, destination: str, token: str,
    error: type[MergePipeError], code: str,
) -> None:  # fmt: skip
    hub.commit(MODEL, {"README.md": b"mine"})
    monkeypatch.setenv("HF_TOKEN", token)
    with refuses(error, code) as caught:
        push(snapshot, destination)
    assert token not in str(caught.value)
    assert hub.n_commits(MODEL) == 1


def test_push__without_a_token_says_how_to_give_one(
    snapshot: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StorageError) as caught:
        push(snapshot, f"hf://{MODEL}")
    (problem,) = caught.value.problems
    assert (problem.code, hub.requests) == ("storage.credentials", [])
    assert "HF_TOKEN" in problem.hint
    assert "hf auth login" in problem.hint


def closed_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("destination", [f"hf://{MODEL}", "s3://bucket/merged"])
def test_push__to_a_host_that_refuses_names_it_and_why(
    snapshot: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, destination: str
) -> None:
    host = f"127.0.0.1:{closed_port()}"
    monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
    set_environment(monkeypatch, f"http://{host}")
    monkeypatch.setattr(objects, "_WRITE_RETRIES", {"max_retries": 0})
    with pytest.raises(StorageError, match=rf"{host}: the connection was refused") as caught:
        push(snapshot, destination)
    assert hub.token not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (socket.gaierror(-2, "Name or service not known"), "no such host is known"),
        (TimeoutError(), "no answer came in time"),
        (ValueError("signed=secret"), "ValueError"),
    ],
)
def test_push__names_the_cause_behind_the_errors_of_the_hubs_package(
    snapshot: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("wrapped") from error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    with pytest.raises(StorageError) as caught:
        push(snapshot, f"hf://{MODEL}")
    assert f"{hub.url.partition('//')[2]}: {cause if cause != 'ValueError' else 'RuntimeError'}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_push__takes_a_plain_name_for_the_hub_unless_there_is_such_a_path(
    snapshot: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = push(snapshot, MODEL, create=True)
    assert (str(report.destination), hub.n_commits(MODEL)) == (f"hf://{MODEL}", 2)
    (tmp_path / MODEL).mkdir(parents=True)
    for place in (MODEL, "./other/name"):
        with pytest.raises(OutputError, match="where this output cannot be written"):
            push(snapshot, place)


def test_push__of_a_damaged_snapshot_is_refused(snapshot: Path, tmp_path: Path) -> None:
    shutil.copytree(snapshot, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_bytes(b"{}")
    with refuses(CorruptError, "snapshot.damaged"):
        mergepipe.push(tmp_path / "copy", "s3://bucket/never", home=tmp_path / "home")


# --- buckets ---


def test_push__to_a_bucket_resumes_and_shows_nothing_early(
    server: S3Server, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = new_prefix(server, monkeypatch)
    requests = watch_buckets(monkeypatch)
    requests.error = lambda: StorageError.of("storage.unavailable", out, "the store is away", "run again")
    requests.fails_at = 6
    with pytest.raises(StorageError, match="away"):
        push(snapshot, out)
    requests.fails_at, requests.is_dead = None, False
    there = [name for name in objects_below(out) if name.endswith(".safetensors")]
    assert there
    assert MANIFEST_NAME not in objects_below(out)
    requests.changes.clear()
    report = push(snapshot, out)
    assert not set(there) & set(requests.made("create") + requests.made("overwrite"))
    assert report.kept_bytes > 0
    check_copy(snapshot, objects_below(out))
    assert mergepipe.verify(out, home=tmp_path / "home", threads=2).is_sound
    with pytest.raises(OutputError):
        push(snapshot, out)


def test_push__of_a_packed_expert_to_the_hub_is_one_commit(snapshot: Path, hub: HubServer, tmp_path: Path) -> None:
    base, expert = snapshot.parent / "base", snapshot.parent / "expert-1"
    mergepipe.pack(base, [expert], tmp_path / "packs", threads=2)
    report = mergepipe.push(tmp_path / "packs" / "expert-1", f"hf://{MODEL}", create=True)
    assert (hub.n_commits(MODEL), report.commit) == (2, hub.head(MODEL))
    mergepipe.unpack(f"hf://{MODEL}", tmp_path / "back", base=base, threads=2)
    assert files_below(tmp_path / "back") == files_below(expert)
    mergepipe.push(tmp_path / "packs" / "expert-1", f"hf://{MODEL}")  # replaces itself
    push(snapshot, f"hf://{MODEL}")
    assert [name for name in hub.model_files(MODEL) if name.startswith("mergepipe-store")] == []


# --- averages of checkpoints ---


@pytest.fixture(name="average")
def make_average(tmp_path: Path) -> Path:
    for step in (100, 200):
        write_hf(tmp_path / f"checkpoint-{step}", known_states(decoder_shapes(), seed=step, step=step))
    paths = [tmp_path / f"checkpoint-{step}" for step in (100, 200)]
    tailor.average(paths, tmp_path / "average", config=paths[0])
    tailor.average(paths, tmp_path / "resumable", optimizer="last")
    return tmp_path / "average"


def check_average(average: Path, files: dict[str, bytes]) -> None:
    """The copy is the average, and no path of this machine stands in it."""
    wanted = files_below(average)
    assert files.keys() == wanted.keys()
    assert [name for name in files if name != MANIFEST_NAME and files[name] != wanted[name]] == []
    assert [name for name, content in files.items() if str(average.parent).encode() in content] == []
    record = json.loads(files[MANIFEST_NAME])
    assert [source["path"] for source in record["inputs"]] == ["../checkpoint-100", "../checkpoint-200"]
    assert "config: ../checkpoint-100" in record["recipe"]


def test_push__of_an_average_to_the_hub_is_one_commit(average: Path, snapshot: Path, hub: HubServer) -> None:
    report = mergepipe.push(average, f"hf://{MODEL}", create=True)
    assert (hub.n_commits(MODEL), report.commit) == (2, hub.head(MODEL))
    files = {name: content for name, content in hub.model_files(MODEL).items() if name != ".gitattributes"}
    check_average(average, files)
    push(snapshot, f"hf://{MODEL}")  # replaces it, and is replaced
    mergepipe.push(average, f"hf://{MODEL}")
    assert [name for name in hub.model_files(MODEL) if "safetensors" in name] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_push__of_a_damaged_average_is_refused(average: Path, name: str) -> None:
    content = (average / name).read_bytes()
    (average / name).write_bytes(content[:-1] if name != "config.json" else content.replace(b"{", b"[", 1))
    with refuses(CorruptError, "snapshot.damaged"):
        mergepipe.push(average, "s3://bucket/never")


@pytest.mark.parametrize(
    "recipe",
    [
        "default: private/first\ntake:\n- {from: private/second, units: [embed]}\nstate_from: private/third\n",
        "slices:\n- sources: [{model: private/first, layer_range: [0, 2]}]\npre_weights:\n"
        "- {name: embed, model: private/second}\nbase_model: private/third\nmerge_method: passthrough\n",
        "default: {model: {path: private/first, revision: main}}\ntake:\n"
        "- {from: {path: private/second}, units: [embed]}\nstate_from: private/third\n",
        "average: {checkpoints: [private/first, private/second], config: private/third}\n",
    ],
)
def test_push__of_a_recipe_leaves_last_names_of_relative_paths(recipe: str) -> None:
    """Whatever the form of the recipe, its checkpoints' folders are not told."""
    pushed = _recipe_without_paths(recipe)
    assert "private" not in pushed
    assert re.findall(r"\.\./(\w+)", pushed) == ["first", "second", "third"]


@pytest.mark.parametrize("headers", [{"Retry_After": "86400"}, {"ratelimit": '"api";r=0;t=86400'}])
@pytest.mark.parametrize("n_answers", [0, 1, 3, 4])  # the third request is one of our own reader
def test_push__does_not_wait_a_day_for_the_hub(
    snapshot: Path, hub: HubServer, n_answers: int, headers: dict[str, str]
) -> None:
    answered: list[str] = []

    def asks_to_wait(request: Request, answer: Answer) -> Answer:
        answered.append(request.path)
        return answer if len(answered) <= n_answers else status(429, **headers)(request, answer)

    hub.fault = asks_to_wait
    with refuses(StorageError, "storage.unavailable") as caught:
        push(snapshot, f"hf://{MODEL}", create=True)
    assert "answers 429" in str(caught.value)
    assert "asks to wait 86400 s" in str(caught.value)
    assert len(answered) == n_answers + 1


def test_push__gives_up_a_silent_hub(snapshot: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_commit, "ANSWER_SECONDS", 0.5)
    hub.fault = stall(0, 20)
    with refuses(StorageError, "storage.unreachable") as caught:
        push(snapshot, f"hf://{MODEL}", create=True)
    hub.stop_silence()
    assert "no answer came in time" in str(caught.value)


@contextmanager
def trickling(before: bytes, seconds: float) -> Iterator[str]:
    """Serve answers that never end: what comes `before` at once, then a byte now and then. Yields the address."""
    server = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(before)
            while not is_over.wait(seconds):
                connection.sendall(b"x")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        is_over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "before", [b"", HEADERS + b"x-more: ", HEADERS + b"Content-Length: 9999\r\n\r\n{"], ids=["status", "header", "body"]
)
@pytest.mark.usefixtures("hub")  # whose environment is led to another server
def test_push__gives_up_a_hub_that_answers_byte_by_byte(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: bytes
) -> None:
    monkeypatch.setattr(hub_commit, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(hub_commit, "LONG_WAIT_SECONDS", 0.2)
    with trickling(before, 0.05) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with refuses(StorageError, "storage.unreachable", "no answer came in time"):
            push(snapshot, f"hf://{MODEL}", create=True)
    assert f"{url.removeprefix('http://')}: no complete answer for" in caplog.text


def test_push__leaves_other_requests_of_the_package_alone(snapshot: Path, hub: HubServer) -> None:
    push(snapshot, f"hf://{MODEL}", create=True)
    hub.fault = status(503, Retry_After="86400")
    answer = huggingface_hub.get_session().get(f"{hub.url}/api/models/{MODEL}")
    assert answer.status_code == 503
