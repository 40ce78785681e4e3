"""The Hub as a store: pinned by one request, read by ranges, never of another version; each refusal is precise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import CONNECTIONS, Entry, FileKind, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import WaitingRoom, read_exact
from mergepipe.storage.remote import hub_api
from mergepipe.storage.remote.hub import CACHED_TERMS, HubStore, open_store
from mergepipe.storage.remote.hub_api import HubSettings, expires_at
from mergepipe.storage.remote.retry import REQUEST_COST_BYTES, RetryPolicy, Transfers
from support.fault_server import Answer, Fault, Request, cut, no_fault, status, with_headers
from support.hub_cache_files import write_hub_cache
from support.hub_server import HubServer, hub_server, token_of
from support.refusals import refusal

WEIGHTS = bytes(range(256)) * 40
FILES = {"model.safetensors": WEIGHTS, "config.json": b'{"a": 1}', "sub/other.safetensors": b"other"}
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
MODEL = Location.parse("hf://org/name")
FILE = MODEL / "model.safetensors"


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(running: HubServer) -> HubServer:
    running.reset()
    running.commit("org/name", FILES)
    return running


def store_of(hub: HubServer, cache: Path, token: str = "", *, is_offline: bool = False) -> HubStore:
    """A store that waits for nothing between attempts."""
    ledger = Ledger()
    settings = HubSettings(hub.url, cache, token, is_offline)
    return HubStore(settings, Transfers(ledger, RetryPolicy(most_attempts=3), sleep=lambda *_: None))


@pytest.fixture
def store(hub: HubServer, tmp_path: Path) -> HubStore:
    return store_of(hub, tmp_path)


def read(store: HubStore, location: Location, start: int, stop: int) -> bytes:
    return read_exact(store.open(location), start, stop, Purpose.EXPERT).tobytes()


def test_pin__takes_one_request_for_everything_but_bytes(hub: HubServer, store: HubStore) -> None:
    pinned = store.pin(MODEL)
    assert (len(pinned.revision), pinned.with_revision("")) == (40, MODEL)
    for location in (MODEL, pinned):
        assert store.list(location) == (
            Entry("config.json", FileKind.FILE), Entry("model.safetensors", FileKind.FILE),
            Entry("sub", FileKind.FOLDER),
        )  # fmt: skip
        status = store.stat(location / "model.safetensors")
        assert status is not None
        assert (status.size_bytes, status.version) == (len(WEIGHTS), f"sha256:{SHA256}")
        assert store.size_bytes(location / "config.json") == 8
    config = store.stat(MODEL / "config.json")
    assert config is not None
    assert config.version.startswith("git:")
    assert [(r.path, r.query) for r in hub.requests] == [("api/models/org/name/revision/main", {"blobs": "true"})]
    assert store.ledger.total_bytes() == 0


def test_read__resolves_a_file_once_and_reads_ranges_exactly(hub: HubServer, store: HubStore) -> None:
    pinned = store.pin(MODEL)
    for start, stop in ((0, 10), (100, 1000), (len(WEIGHTS) - 1, len(WEIGHTS))):
        assert read(store, pinned / "model.safetensors", start, stop) == WEIGHTS[start:stop]
    assert read(store, pinned / "sub/other.safetensors", 0, 5) == b"other"
    assert (len(hub.resolves), len(hub.cdn.requests)) == (2, 4)
    usage = store.ledger.usage()
    assert usage.by_file == {
        (f"{pinned}/model.safetensors", Purpose.EXPERT): 911, (f"{pinned}/sub/other.safetensors", Purpose.EXPERT): 5
    }  # fmt: skip
    assert hub.content_bytes == 916


def test_read__many_threads_resolve_a_file_once(hub: HubServer, store: HubStore) -> None:
    file = store.open(FILE)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: read_exact(file, i, i + 9, Purpose.BASE).tobytes(), range(8)))
    assert results == [WEIGHTS[i : i + 9] for i in range(8)]
    assert len(hub.resolves) == 1


def test_read__goes_on_when_the_location_expires(hub: HubServer, store: HubStore) -> None:
    file = store.open(FILE)
    assert read_exact(file, 0, 10, Purpose.EXPERT).tobytes() == WEIGHTS[:10]
    hub.expire_locations()
    assert read_exact(file, 10, 30, Purpose.EXPERT).tobytes() == WEIGHTS[10:30]
    assert (len(hub.resolves), len(hub.cdn.requests)) == (2, 3)
    assert store.ledger.usage()[Purpose.EXPERT] == 10 + 2 * 20


def test_read__renews_a_location_before_the_time_that_it_names(hub: HubServer, store: HubStore) -> None:
    hub.expires = "1000"
    assert read(store, FILE, 0, 10) == WEIGHTS[:10]
    assert read(store, FILE, 0, 10) == WEIGHTS[:10]
    assert len(hub.resolves) == 2
    assert store.ledger.usage()[Purpose.EXPERT] == 20


@pytest.mark.parametrize(
    ("query", "time"),
    [
        ("Expires=17&a=b", 17.0),
        ("Expires=soon", float("inf")),
        ("X-Amz-Date=19700101T000100Z&X-Amz-Expires=3600", 3660.0),
        ("X-Amz-Date=19700101T000100Z", float("inf")),
        ("X-Amz-Date=today&X-Amz-Expires=3600", float("inf")),
    ],
)
def test_expires_at__reads_the_time_that_an_address_names(query: str, time: float) -> None:
    assert expires_at(f"http://h/x?{query}") == time


def test_read__of_a_moved_branch_is_of_the_pinned_commit(hub: HubServer, store: HubStore, tmp_path: Path) -> None:
    pinned = store.pin(MODEL)
    hub.commit("org/name", {"model.safetensors": b"new" * 100})
    for location in (MODEL, pinned):
        assert read(store, location / "model.safetensors", 0, 50) == WEIGHTS[:50]
    again = store_of(hub, tmp_path)
    assert read(again, pinned / "model.safetensors", 0, 50) == WEIGHTS[:50]
    assert again.pin(MODEL) != pinned
    assert read(again, MODEL / "model.safetensors", 0, 3) == b"new"


def test_read_small__checks_the_content_against_its_digest(hub: HubServer, store: HubStore) -> None:
    assert store.read_small(MODEL / "config.json", 100) == b'{"a": 1}'
    assert store.read_small(FILE, 1 << 20) == WEIGHTS
    for name in ("config.json", "model.safetensors"):
        hub.fault, hub.cdn.faults = changed_body, [changed_body]
        error = refusal(lambda name=name: store.read_small(MODEL / name, 1 << 20))  # type: ignore[misc]
        assert (type(error), error.code) == (ConflictError, "input.changed")


def changed_body(request: Request, answer: Answer) -> Answer:
    """Other bytes of the same length, in answers about the content of a file."""
    return answer if request.path.startswith("api/models/") else replace(answer, body=b"x" * len(answer.body))


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("X-Repo-Commit", "0" * 40, "input.changed"),
        ("X-Repo-Commit", None, "hub.answer"),
        ("X-Linked-ETag", '"' + "0" * 64 + '"', "input.changed"),
        ("X-Linked-ETag", None, "input.changed"),
        ("X-Linked-Size", "10241", "input.changed"),
        ("Content-Range", "bytes 0-9/10241", "input.changed"),
        ("Content-Range", "bytes 1-10/10240", "storage.answer"),
        ("Content-Range", None, "storage.answer"),
    ],
)
def test_read__refuses_answers_that_disagree_with_the_pin(
    hub: HubServer, store: HubStore, header: str, value: str | None, code: str
) -> None:
    store.pin(MODEL)
    fault = with_headers(**{header.replace("-", "_"): value})
    hub.fault, hub.cdn.faults = (no_fault, [fault]) if header == "Content-Range" else (fault, [])
    assert refusal(lambda: read(store, FILE, 0, 10)).code == code


@pytest.mark.parametrize(
    "faults",
    [
        [no_fault, with_headers(ETag='"other"')],
        [cut(3), with_headers(ETag='"other"')],
        [no_fault, status(403), with_headers(ETag='"other"')],
        [no_fault, with_headers(ETag=None, Last_Modified="Thu, 01 Jan 1970 00:00:00 GMT")],
        [no_fault, with_headers(ETag=None, Last_Modified=None)],
    ],
)
def test_read__refuses_ranges_of_another_version_than_the_first(
    hub: HubServer, store: HubStore, faults: list[Fault]
) -> None:
    hub.cdn.faults = list(faults)
    file = store.open(FILE)
    error = refusal(lambda: [read_exact(file, at, at + 10, Purpose.EXPERT) for at in (0, 10)])
    assert (type(error), error.code, hub.cdn.faults) == (ConflictError, "input.changed", [])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (1, 0, 3, 2)])
def test_read__of_a_whole_file_in_any_order_is_held_to_its_digest(
    hub: HubServer, store: HubStore, order: tuple[int, ...]
) -> None:
    part = len(WEIGHTS) // 4
    for name, server in (("model.safetensors", hub.cdn), ("config.json", hub)):
        step = part if server is hub.cdn else 2
        hub.fault, hub.cdn.faults = no_fault, []
        file = store.open(MODEL / name)
        pieces = [read_exact(file, step * at, step * (at + 1), Purpose.EXPERT).tobytes() for at in range(4)]
        assert b"".join(pieces) == FILES[name]
        hub.fault, hub.cdn.faults = changed_body, [no_fault, changed_body, no_fault, no_fault]
        file = store.open(MODEL / name)
        for at in order[:3]:
            read_exact(file, step * at, step * (at + 1), Purpose.EXPERT)
        error = refusal(lambda: read_exact(file, step * order[3], step * (order[3] + 1), Purpose.EXPERT))  # noqa: B023
        assert (type(error), error.code) == (ConflictError, "input.changed")


def test_read__of_a_whole_file_waits_for_the_piece_whose_turn_it_is(
    hub: HubServer, store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many threads read at once and there is no room for pieces before their turn: the file is checked all the same."""
    monkeypatch.setattr(WaitingRoom, "take", lambda _room, nbytes: nbytes <= 0)
    file, part = store.open(FILE), len(WEIGHTS) // 8
    all_ask = Barrier(8)

    def wait_for_all(_request: Request, answer: Answer) -> Answer:
        all_ask.wait(60)
        return replace(answer, body=bytes(len(answer.body)))

    hub.cdn.faults = [wait_for_all] * 8
    with ThreadPoolExecutor(8) as threads:
        pieces = [threads.submit(read_exact, file, part * i, part * (i + 1), Purpose.BASE) for i in reversed(range(8))]
    errors = [piece.exception() for piece in pieces]
    assert [error.code for error in errors if isinstance(error, MergePipeError)] == ["input.changed"]


def test_token__goes_to_the_hub_and_to_no_other_host(hub: HubServer, tmp_path: Path) -> None:
    hub.private.add("org/name")
    store = store_of(hub, tmp_path, "hf_right")
    assert read(store, FILE, 0, 10) == WEIGHTS[:10]
    assert store.read_small(MODEL / "config.json", 100) == FILES["config.json"]
    assert {token_of(request) for request in hub.requests} == {"hf_right"}
    assert [token_of(request) for request in hub.cdn.requests] == [""]


def test_read__gives_up_where_new_locations_are_refused_and_shows_no_secret(hub: HubServer, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path, "hf_right")
    hub.cdn.faults = [status(403)] * 9
    error = refusal(lambda: read(store, FILE, 0, 10))
    assert (error.code, len(hub.resolves), len(hub.cdn.requests)) == ("storage.permission", 2, 2)
    assert not any(secret in str(error) for secret in ("hf_right", "signature", hub.cdn.host))


@pytest.mark.parametrize(
    ("model", "token", "kind", "expected"),
    [
        ("hf://org/none", "", NotFoundError,
         "model.not-found | hf://org/none: the Hub has no public model 'org/none' (401); check the name at "
         "hf.co/org/none; "
         "a folder of this machine is written with ./ or / before it; for a private model, `hf auth login`"),
        ("hf://org/none", "hf_right", NotFoundError,
         "model.not-found | hf://org/none: the Hub has no model 'org/none' that this token may see (404); "
         "check the name "
         "at hf.co/org/none; a folder of this machine is written with ./ or / before it"),
        ("hf://org/name@v9", "", NotFoundError,
         "model.not-found | hf://org/name@v9: the model has no branch, tag or commit 'v9'; see "
         "hf.co/org/name/tree/main "
         "for what there is"),
        ("hf://org/name", "hf_wrong", StorageError,
         "storage.credentials | hf://org/name: the Hub does not accept the token (401); renew it by `hf auth "
         "login`, or correct "
         "HF_TOKEN"),
    ],
)  # fmt: skip
def test_pin__tells_why_the_hub_refuses(
    hub: HubServer, tmp_path: Path, model: str, token: str, kind: type[MergePipeError], expected: str
) -> None:
    error = refusal(lambda: store_of(hub, tmp_path, token).pin(Location.parse(model)))
    assert (type(error), f"{error.code} | {error}") == (kind, expected)


@pytest.mark.parametrize(
    ("token", "why"), [("", "no token was sent"), ("hf_right", "your account has not been granted access")]
)
def test_gated__model_is_pinned_but_reading_says_what_to_accept(
    hub: HubServer, tmp_path: Path, token: str, why: str
) -> None:
    hub.gated.add("org/name")
    store = store_of(hub, tmp_path, token)
    error = refusal(lambda: read(store, store.pin(MODEL).with_revision("") / "model.safetensors", 0, 10))
    assert f"{error.code} | {error}" == (
        f"hub.gated | hf://org/name/model.safetensors: is a gated model, and {why}; accept its terms at hf.co/org/name"
        ", then `hf auth login`"
    )


def test_forbidden__shows_what_the_hub_says(hub: HubServer, store: HubStore) -> None:
    hub.fault = status(403, X_Error_Message="Access to this resource is disabled.")
    error = refusal(lambda: store.pin(MODEL))
    assert (error.code, "Access to this resource is disabled." in str(error)) == ("storage.credentials", True)


def once(fault: Fault) -> Fault:
    """A fault of the first answer only."""
    faults = iter([fault])

    def change(request: Request, answer: Answer) -> Answer:
        return next(faults, no_fault)(request, answer)

    return change


def test_rate_limit__is_waited_for_and_told(hub: HubServer, store: HubStore) -> None:
    hub.fault = once(status(429, Retry_After="7"))
    assert store.pin(MODEL).revision
    hub.fault = status(429, Retry_After="7")
    error = refusal(lambda: read(store, FILE, 0, 10))
    assert isinstance(error, StorageError)
    assert all(part in str(error) for part in ("429", "the Hub's rate limit is reached", "asks to wait 7 s"))
    assert store.ledger.total_bytes() == 0


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]"])
def test_pin__refuses_an_answer_that_is_not_of_a_hub(hub: HubServer, store: HubStore, body: bytes) -> None:
    hub.fault = lambda _request, _answer: Answer(200, body)
    error = refusal(lambda: store.pin(MODEL))
    assert (type(error), error.code) == (CorruptError, "hub.answer")


def test_pin__refuses_an_answer_without_end(hub: HubServer, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fault = lambda request, _answer: Answer(307, headers={"Location": f"/{request.path}"})
    error = refusal(lambda: store.pin(MODEL))
    assert (error.code, "more than 5 redirects" in str(error)) == ("storage.answer", True)
    hub.fault = no_fault
    monkeypatch.setattr(hub_api, "ANSWER_LIMIT_BYTES", 10)
    error = refusal(lambda: store.pin(MODEL))
    assert (error.code, "more than 10 bytes" in str(error)) == ("storage.answer", True)


def test_cache__serves_what_it_holds_without_the_network(hub: HubServer, tmp_path: Path) -> None:
    write_hub_cache(tmp_path, "org/name", "c" * 40, {"old-name.safetensors": WEIGHTS})
    store = store_of(hub, tmp_path)
    assert store.terms(MODEL) == StoreTerms(1, CONNECTIONS, REQUEST_COST_BYTES)
    pinned = store.pin(MODEL)
    file = store.open(pinned / "model.safetensors", direct=True)
    assert (file.version, file.size_bytes) == (f"sha256:{SHA256}", len(WEIGHTS))
    assert read_exact(file, 5, 500, Purpose.EXPERT).tobytes() == WEIGHTS[5:500]
    file.close()
    assert store.ledger.usage().by_file == {(f"{pinned}/model.safetensors", Purpose.EXPERT): 495}
    assert len(hub.requests) == 1
    assert store.terms(pinned / "model.safetensors") == CACHED_TERMS
    assert store.terms(pinned) == StoreTerms(1, CONNECTIONS, REQUEST_COST_BYTES)
    assert read(store, pinned / "sub/other.safetensors", 0, 5) == b"other"
    assert len(hub.cdn.requests) == 1


def test_cache__content_that_was_changed_is_refused(hub: HubServer, tmp_path: Path) -> None:
    write_hub_cache(tmp_path, "org/name", "c" * 40, {"model.safetensors": WEIGHTS})
    blob = tmp_path / "models--org--name" / "blobs" / SHA256
    blob.write_bytes(WEIGHTS[::-1])
    store = store_of(hub, tmp_path)
    assert refusal(lambda: store.read_small(FILE, 1 << 20)).code == "input.changed"


@pytest.mark.parametrize("is_offline", [True, False])
def test_offline__pins_and_reads_from_the_cache(running: HubServer, tmp_path: Path, is_offline: bool) -> None:
    commit = "c" * 40
    write_hub_cache(tmp_path, "org/name", commit, FILES)
    running.reset()
    ledger = Ledger()
    endpoint = running.url if is_offline else "http://127.0.0.1:9"
    transfers = Transfers(ledger, RetryPolicy(most_first_contacts=1))
    store = HubStore(HubSettings(endpoint, tmp_path, "", is_offline), transfers)
    for revision in ("", "main", commit):
        pinned = store.pin(MODEL.with_revision(revision))
        assert pinned.revision == commit
    notices = [f"commit {commit[:12]} of the local cache is used, which 'main' led to when it was downloaded"]
    told = [text.partition("reached: ")[2] for text in store.notices if "which alone is read, holds no tok" not in text]
    assert (told, len(store.notices)) == ([] if is_offline else notices, 1 + len(told))
    assert store.read_small(pinned / "config.json", 100) == FILES["config.json"]
    assert read(store, pinned / "sub/other.safetensors", 0, 5) == b"other"
    assert running.requests == []


def test_offline__says_how_to_get_what_the_cache_lacks(hub: HubServer, tmp_path: Path) -> None:
    error = refusal(lambda: store_of(hub, tmp_path, is_offline=True).pin(MODEL.with_revision("v1")))
    assert f"{error.code} | {error}" == (
        "hub.offline | hf://org/name@v1: HF_HUB_OFFLINE is set, and it is not in the local cache of the Hub; where "
        "there is a network, run `hf download org/name --revision v1 --local-dir name`, and name that folder"
    )
    ledger = Ledger()
    transfers = Transfers(ledger, RetryPolicy(most_first_contacts=1))
    unreachable = HubStore(HubSettings("http://127.0.0.1:9", tmp_path), transfers)
    error = refusal(lambda: unreachable.pin(MODEL))
    assert str(error).startswith("hf://org/name: could not be read: no connection to 127.0.0.1: ")
    assert str(error).endswith("run `hf download org/name --local-dir name`, and name that folder")


def test_open_store__reads_the_environment(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("hf_right")
    hub.private.add("org/name")
    assert read(open_store(Ledger(), CONNECTIONS), FILE, 0, 10) == WEIGHTS[:10]
