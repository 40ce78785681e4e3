"""Every fault on every kind of store: the right bytes, or one precise error; every attempt charged, nothing mixed."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from itertools import zip_longest

import pytest

from mergepipe.errors import ConflictError, LimitError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import RequestCounts
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.remote.pinned_store import PinnedStore
from support.fault_server import (
    Answer,
    BucketServer,
    Fault,
    FaultServer,
    Request,
    cut,
    no_fault,
    stall,
    status,
    with_headers,
)
from support.refusals import refuses
from support.remote_stores import (
    KINDS,
    PATIENT_SECONDS,
    STALL_SECONDS,
    Waits,
    remote_store,
    root_of,
    set_environment,
    transfers,
)

NBYTES = 3_000_001
CONTENT = random.Random(0).randbytes(NBYTES)
OTHER = bytes(NBYTES)

RECOVERED: dict[str, list[Fault]] = {
    "500": [status(500)],
    "503 with Retry-After": [status(503, Retry_After="7")],
    "429": [status(429)],
    "cut at once": [cut(0)],
    "cut later": [cut(2_000_000)],
    "stalled": [stall(1_500_000, PATIENT_SECONDS)],
    "one after the other": [status(502), cut(1_200_000), cut(1_100_000), status(504)],
}


def whole_file(_request: Request, answer: Answer) -> Answer:
    return Answer(200, CONTENT, {name: value for name, value in answer.headers.items() if name != "Content-Range"})


REFUSED: dict[str, tuple[list[Fault], type[MergePipeError], str]] = {
    "401": ([status(401)], StorageError, "storage.credentials"),
    "403": ([status(403)], StorageError, "storage.permission"),
    "404": ([status(404)], NotFoundError, "storage.not-found"),
    "412": ([status(412)], ConflictError, "input.changed"),
    "416": ([status(416)], ConflictError, "input.changed"),
    "418": ([status(418)], StorageError, "storage.answer"),
    "redirect to nowhere": ([status(301)], StorageError, "storage.answer"),
    "200 for a range": ([whole_file], StorageError, "storage.answer"),
    "wrong range": ([with_headers(Content_Range=f"bytes 5-9/{NBYTES}")], StorageError, "storage.answer"),
    "no Content-Range": ([with_headers(Content_Range=None)], StorageError, "storage.answer"),
    "another ETag": ([with_headers(ETag='"other"')], ConflictError, "input.changed"),
    "always 503": ([status(503)] * 20, StorageError, "storage.unavailable"),
    "always 429": ([status(429, Retry_After="200")] * 20, StorageError, "storage.unavailable"),
    "always cut": ([cut(0)] * 20, StorageError, "storage.unreachable"),
    "always stalled": ([stall(0, PATIENT_SECONDS)] * 2, StorageError, "storage.unreachable"),
}
TRANSIENT = ("always 503", "always 429", "always cut", "always stalled")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    with BucketServer({"bucket/m/model.safetensors": CONTENT, "bucket/m/config.json": b"{}"}) as running:
        set_environment(monkeypatch, running.url)
        yield running


def read(kind: str, server: BucketServer, store: PinnedStore, start: int = 1, stop: int = NBYTES) -> bytes:
    """Read a part of the file, pinned before the faults begin."""
    faults, server.faults = server.faults, []
    file = store.open(root_of(kind, server) / "m/model.safetensors")
    server.all_sent_bytes()
    server.faults, server.sent_bytes = faults, 0
    buffer = bytearray(stop - start)
    assert file.read_into(start, memoryview(buffer), Purpose.EXPERT) == len(buffer)
    return bytes(buffer)


def stall_seconds(name: str) -> float:
    """How long a server may be silent: a busy machine is silent too, and only some tests are about that."""
    if name == "always stalled":
        return STALL_SECONDS / 4  # whatever is silent there has stalled
    return STALL_SECONDS if "stalled" in name else PATIENT_SECONDS


def costs(kind: str, server: FaultServer, faults: list[Fault]) -> int:
    """What the reads of a server cost: nothing where the client shows that they were refused, else all they ask for."""
    total = 0
    for request, fault in zip_longest(server.reads, faults[: len(server.reads)], fillvalue=no_fault):
        assert isinstance(request, Request)
        answer = fault(request, Answer(206))
        total += 0 if answer.status >= 400 and kind in ("s3", "http") else request.nbytes
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECOVERED)
def test_faults__that_pass_are_retried_and_every_attempt_is_charged(kind: str, name: str, server: BucketServer) -> None:
    waits = Waits()
    store = remote_store(kind, transfers(waits), stall_seconds(name))
    server.faults = list(RECOVERED[name])
    assert read(kind, server, store) == CONTENT[1:]
    server.stop_silence()
    charged = store.ledger.usage()[Purpose.EXPERT]
    assert len(server.reads) == len(RECOVERED[name]) + 1 == len(waits.seconds) + 1
    refusals = store.ledger.usage()[Purpose.METADATA]
    assert charged == costs(kind, server, RECOVERED[name])
    assert charged + refusals == NBYTES - 1 + store.counts.retried_bytes
    assert server.all_sent_bytes() <= charged + refusals
    assert store.counts.retries == len(RECOVERED[name])
    if name.startswith("cut later"):
        assert store.counts.retried_bytes < NBYTES - 900_000


def test_retry_after__is_waited_for_where_it_can_be_seen(server: BucketServer) -> None:
    for kind in ("s3", "http"):
        waits = Waits()
        server.faults = [status(503, Retry_After="7"), status(429, Retry_After="11")]
        read(kind, server, remote_store(kind, transfers(waits)))
        assert waits.seconds == [7, 11]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED)
def test_faults__that_stay_are_one_error(kind: str, name: str, server: BucketServer) -> None:
    faults, error, code = REFUSED[name]
    requests = transfers(Waits())
    if name == "always stalled":  # two are enough
        requests._policy = type(requests._policy)(most_attempts=2)
    store = remote_store(kind, requests, stall_seconds(name))
    server.faults = list(faults)
    with refuses(error, code) as caught:
        read(kind, server, store)
    server.stop_silence()
    assert str(caught.value).startswith(str(root_of(kind, server)))
    assert len(server.reads) == 1 or name in TRANSIENT
    assert store.ledger.usage()[Purpose.EXPERT] == costs(kind, server, faults)
    assert name == "200 for a range" or server.all_sent_bytes() <= store.ledger.total_bytes()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert not any(secret in shown for secret in ("test-secret-key", "Signature=", "X-Amz-", "AWS4-HMAC"))


@pytest.mark.parametrize("kind", KINDS)
def test_versions__are_never_mixed(kind: str, server: BucketServer) -> None:
    def replace(_request: Request, answer: Answer) -> Answer:
        server.put("bucket/m/model.safetensors", OTHER)
        answer.cut_after_bytes = 1_500_000
        return answer

    server.faults = [replace]
    with refuses(ConflictError, "input.changed"):  # resumed, when another version was there
        read(kind, server, remote_store(kind))
    assert len(server.reads) == 2
    assert read(kind, server, remote_store(kind)) == OTHER[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_budget__stops_retries_before_it_is_exceeded(kind: str, server: BucketServer) -> None:
    ledger = Ledger()
    ledger.expert_limit_bytes = NBYTES - 1
    server.faults = [cut(2_000_000)]
    with refuses(LimitError, "budget.exceeded", "used up by retries"):
        read(kind, server, remote_store(kind, transfers(ledger=ledger)))
    assert ledger.usage()[Purpose.EXPERT] == costs(kind, server, []) == NBYTES - 1


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
@pytest.mark.parametrize(("code", "expected"), [(403, "storage.permission"), (503, "storage.unavailable")])
def test_listings__fail_as_reads_do(kind: str, code: int, expected: str, server: BucketServer) -> None:
    server.listing_fault = status(code)
    with refuses(StorageError, expected) as caught:
        remote_store(kind).stat(root_of(kind, server) / "m")
    assert f"{code} " in str(caught.value)
    assert len(server.requests) == (1 if code == 403 else 8)


@pytest.mark.parametrize(
    ("code", "expected", "names"),
    [(401, "storage.credentials", []), (403, "storage.permission", []), (403, "storage.permission", ["LICENSE"])],
)
def test_web_servers__that_refuse_to_be_asked_are_no_missing_files(
    code: int, expected: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(BucketServer):
        def answer(self, request: Request) -> Answer:
            is_open = names and not request.path.endswith("config.json")
            return super().answer(request) if is_open else Answer(code)

    with Closed({f"bucket/m/{name}": b"" for name in names}) as server:
        set_environment(monkeypatch, server.url)
        folder = root_of("http", server) / "m"
        for method, place in (("list", folder), ("stat", folder), ("open", folder / "config.json")):
            with refuses(StorageError, expected):
                getattr(remote_store("http"), method)(place)


def test_web_servers__that_name_no_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Versionless(BucketServer):
        def answer(self, request: Request) -> Answer:
            return with_headers(ETag=None, Last_Modified=None)(request, super().answer(request))

    with Versionless({"bucket/m/config.json": b"{}"}) as server:
        set_environment(monkeypatch, server.url)
        with refuses(StorageError, "storage.answer", "names no version"):
            remote_store("http").open(root_of("http", server) / "m/config.json")


@pytest.mark.parametrize("kind", KINDS)
def test_hosts__that_do_not_answer_are_given_up_soon(kind: str, server: BucketServer) -> None:
    store, root = remote_store(kind, requests := transfers()), root_of(kind, server)
    server.__exit__(None, None, None)
    with refuses(StorageError, "storage.unreachable", "3 attempts"):
        store.list(root / "m")
    assert requests.counts.requests >= 3


def test_signed_locations__that_expired_are_looked_up_again(server: BucketServer) -> None:
    with FaultServer({"signed": CONTENT}, [status(403), cut(1_000_000), status(403)]) as other:
        server.redirects["bucket/m/model.safetensors"] = f"{other.url}/signed?token=secret"
        store = remote_store("http")
        file = store.open(root_of("http", server) / "m/model.safetensors")
        buffer = bytearray(NBYTES)
        file.read_into(0, memoryview(buffer), Purpose.EXPERT)
        assert bytes(buffer) == CONTENT
        assert [request.method for request in server.requests] == ["HEAD"] * 3
        assert store.counts == RequestCounts(requests=7, retries=3, retried_bytes=store.counts.retried_bytes)
        other.faults = [status(403), status(403)]
        with refuses(StorageError, "storage.permission") as caught:
            file.read_into(0, memoryview(buffer), Purpose.EXPERT)
        assert "secret" not in "".join(traceback.format_exception(caught.value))
        other.put("signed", OTHER)
        other.faults = [status(403)]
        with pytest.raises(ConflictError):
            file.read_into(0, memoryview(buffer), Purpose.EXPERT)
