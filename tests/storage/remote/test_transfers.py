"""Requests in flight are bounded, counted and charged; a failure ends a read when none of its requests is running."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mergepipe.errors import LimitError, MergePipeError, StorageError
from mergepipe.storage.contract import CONNECTIONS, RequestCounts, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote import objects, pinned_store
from mergepipe.storage.remote.pinned_store import WebStore
from mergepipe.storage.remote.retry import (
    ANSWER_SECONDS,
    REQUEST_BYTES,
    REQUEST_COST_BYTES,
    FailureKind,
    RequestFailed,
    RetryPolicy,
    Transfers,
)
from support.fault_server import Answer, BucketServer, Link, Request
from support.refusals import refuses
from support.remote_stores import PATIENT_SECONDS, Waits, remote_store, root_of, set_environment, transfers

WHERE = Location.parse("s3://bucket/file")
N_PARTS = 3
NBYTES = (N_PARTS - 1) * REQUEST_BYTES + 5


class Numbers:
    """A source of numbered bytes in memory: requests are recorded, and fail as a script says."""

    location = WHERE

    def __init__(self, *failures: RequestFailed | None) -> None:
        self.failures = list(failures)
        self.requests: list[tuple[int, int]] = []
        self.n_running = 0

    def fetch(self, offset: int, buffer: memoryview) -> None:
        self.n_running += 1
        self.requests.append((offset, len(buffer)))
        failure = self.failures.pop(0) if self.failures else None
        try:
            if failure is not None:
                raise failure
            buffer[:] = bytes([offset // REQUEST_BYTES]) * len(buffer)
        finally:
            self.n_running -= 1

    def renew(self) -> bool:
        return False


UNAVAILABLE = RequestFailed(FailureKind.STATUS, "503", 503)
FORBIDDEN = RequestFailed(FailureKind.STATUS, "403", 403)


def test_read__splits_what_is_larger_than_a_request() -> None:
    source, requests, buffer = Numbers(), transfers(), bytearray(NBYTES)
    requests.read(source, 0, memoryview(buffer), Purpose.EXPERT)
    expected = [(0, REQUEST_BYTES), (REQUEST_BYTES, REQUEST_BYTES), (2 * REQUEST_BYTES, 5)]
    assert sorted(source.requests) == expected
    assert [buffer[offset] for offset, _ in expected] == [0, 1, 2]
    assert requests.ledger.usage()[Purpose.EXPERT] == NBYTES
    assert requests.counts == RequestCounts(3, 0, 0)
    requests.close()


def test_read__that_fails_starts_no_more_requests() -> None:
    source, requests = Numbers(FORBIDDEN), transfers(connections=1)
    with refuses(StorageError, "storage.permission"):
        requests.read(source, 0, memoryview(bytearray(NBYTES)), Purpose.EXPERT)
    assert source.n_running == 0
    assert len(source.requests) < N_PARTS
    requests.close()


def test_read__that_is_interrupted_makes_no_more_attempts() -> None:
    waiting = threading.Event()

    def sleep(_seconds: float, stop: threading.Event) -> None:
        waiting.set()
        assert stop.wait(PATIENT_SECONDS)

    failures: list[RequestFailed | None] = [UNAVAILABLE, FORBIDDEN]
    source = Numbers(*failures)
    requests = Transfers(Ledger(), connections=2, sleep=sleep)
    with pytest.raises(StorageError):
        requests.read(source, 0, memoryview(bytearray(2 * REQUEST_BYTES)), Purpose.EXPERT)
    assert waiting.is_set()
    assert len(source.requests) == 2
    requests.close()


def test_refused_attempts__cost_what_the_refusal_was_long() -> None:
    ledger = Ledger()
    ledger.expert_limit_bytes = 10
    refusals = [RequestFailed(FailureKind.STATUS, "503", 503, sent_bytes=n) for n in (3, 4)]
    unreachable = RequestFailed(FailureKind.UNREACHABLE, "no route", sent_bytes=0)
    requests = transfers(ledger=ledger)
    requests.read(Numbers(*refusals, unreachable), 0, memoryview(bytearray(10)), Purpose.EXPERT)
    assert ledger.usage()[Purpose.EXPERT] == 10
    assert ledger.usage()[Purpose.METADATA] == 7
    assert requests.counts == RequestCounts(4, 3, 7)


def test_refused_attempts__with_answers_longer_than_the_range_cost_the_range() -> None:
    requests = transfers()
    long_refusal = RequestFailed(FailureKind.STATUS, "503", 503, sent_bytes=11)
    requests.read(Numbers(long_refusal), 0, memoryview(bytearray(10)), Purpose.EXPERT)
    assert requests.ledger.usage()[Purpose.EXPERT] == 20


def test_abort__ends_reads_that_wait_and_no_later_ones() -> None:
    waiting, broken = threading.Event(), threading.Event()

    def sleep(_seconds: float, stop: threading.Event) -> None:
        waiting.set()
        assert stop.wait(PATIENT_SECONDS)

    requests = Transfers(Ledger(), connections=2, sleep=sleep)
    requests.on_abort(broken.set)
    errors: list[MergePipeError] = []

    def read() -> None:
        try:
            requests.read(Numbers(*[UNAVAILABLE] * 9), 0, memoryview(bytearray(10)), Purpose.BASE)
        except MergePipeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert waiting.wait(PATIENT_SECONDS)
    requests.abort()
    thread.join(PATIENT_SECONDS)
    assert [error.code for error in errors] == ["storage.unavailable"]
    assert broken.is_set()
    requests.read(Numbers(), 0, memoryview(bytearray(10)), Purpose.BASE)


@pytest.mark.parametrize(
    ("kind", "attempt_seconds", "n_attempts"),
    [(FailureKind.STALLED, 60.0, 1), (FailureKind.STALLED, 30.0, 2), (FailureKind.CUT, 20.0, 4)],
)
def test_ask__waits_90_seconds_in_all_for_an_answer(
    kind: FailureKind, attempt_seconds: float, n_attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    begun: list[float] = []

    def request() -> None:
        begun.append(now[0])
        now[0] += attempt_seconds
        raise RequestFailed(kind, "less than 4096 bytes a second")

    def sleep(seconds: float, _stop: threading.Event) -> None:
        now[0] += seconds

    requests = Transfers(Ledger(), clock=lambda: now[0], sleep=sleep, random_fraction=lambda: 0.0)
    with pytest.raises(StorageError, match="less than 4096 bytes a second"):
        requests.ask(Location.of("https://host/listing"), request)
    assert len(begun) == n_attempts
    assert now[0] <= ANSWER_SECONDS
    assert len(caplog.messages) == (n_attempts > 1) + (n_attempts > 2)
    assert all("https://host/listing: no answer for" in message for message in caplog.messages)


def test_ask__waits_as_long_as_a_server_asks_for_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([RequestFailed(FailureKind.STATUS, "429 Too Many Requests", 429, retry_after_seconds=120.0), None])
    waits: list[float] = []

    def request() -> str:
        failure = next(answers)
        if failure is not None:
            raise failure
        return "listing"

    requests = Transfers(Ledger(), sleep=lambda seconds, _stop: waits.append(seconds))
    assert requests.ask(Location.of("https://host/listing"), request) == "listing"
    assert waits == [120.0]
    assert "429 Too Many Requests; the next attempt is in 120 s" in caplog.text


def test_abort__breaks_connections_to_silent_servers(server: BucketServer) -> None:
    store = WebStore(Transfers(Ledger(), RetryPolicy(most_attempts=1)))
    file = store.open(root_of("http", server) / "file")
    asked = threading.Event()

    def silent(_request: Request, answer: Answer) -> Answer:
        answer.cut_after_bytes, answer.stall_seconds = 100, 2 * PATIENT_SECONDS
        asked.set()
        return answer

    server.faults = [silent]
    errors: list[MergePipeError] = []

    def read() -> None:
        try:
            file.read_into(0, memoryview(bytearray(10_000)), Purpose.BASE)
        except MergePipeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert asked.wait(PATIENT_SECONDS)
    while server.sent_bytes < 100:
        asked.wait(0.01)
    store.abort()
    thread.join(PATIENT_SECONDS)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_budget__that_other_retries_used_up_says_so() -> None:
    ledger = Ledger()
    ledger.expert_limit_bytes = 30
    requests = transfers(ledger=ledger)
    requests.read(Numbers(UNAVAILABLE), 0, memoryview(bytearray(10)), Purpose.EXPERT)
    with pytest.raises(LimitError, match=r"used up by retries: 11 more bytes do not fit: failed attempts took 10"):
        requests.read(Numbers(), 0, memoryview(bytearray(11)), Purpose.EXPERT)
    requests.read(Numbers(), 0, memoryview(bytearray(10)), Purpose.EXPERT)
    assert requests.counts == RequestCounts(3, 1, 10)


def test_budget__without_retries_keeps_its_own_error() -> None:
    ledger = Ledger()
    ledger.expert_limit_bytes = 9
    with pytest.raises(LimitError, match="the plan was unsound"):
        transfers(ledger=ledger).read(Numbers(), 0, memoryview(bytearray(10)), Purpose.EXPERT)


def test_waits__follow_the_policy_and_end_with_it() -> None:
    waits = Waits()
    requests = transfers(waits, policy=RetryPolicy(most_attempts=99, most_seconds=10))
    with pytest.raises(StorageError, match=r"6 attempts in \d s"):
        requests.read(Numbers(*[UNAVAILABLE] * 99), 0, memoryview(bytearray(1)), Purpose.BASE)
    assert sum(waits.seconds) <= 10
    assert waits.seconds == sorted(waits.seconds)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    with BucketServer({"bucket/file": random.Random(1).randbytes(400_000)}, link=Link(latency_seconds=0.02)) as running:
        set_environment(monkeypatch, running.url)
        yield running


@pytest.mark.parametrize("kind", ["s3", "az", "http"])
def test_connections__bound_what_is_in_flight_from_all_threads(kind: str, server: BucketServer) -> None:
    store = remote_store(kind, transfers(connections=3))
    file = store.open(root_of(kind, server) / "file")
    server.most_at_once = 0
    full = threading.Event()

    def wait_until_full(_request: Request, answer: Answer) -> Answer:
        """Answer nothing before as many requests are in flight as may be."""
        if server.most_at_once == 3:
            full.set()
        full.wait(PATIENT_SECONDS)
        return answer

    server.faults = [wait_until_full] * 8
    parts = [bytearray(50_000) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: file.read_into(i * 50_000, memoryview(parts[i]), Purpose.EXPERT), range(8)))
    assert b"".join(parts) == server.files["bucket/file"]
    assert server.most_at_once == 3
    assert store.counts.requests >= 8


def test_open_store__keeps_its_terms() -> None:
    store = objects.open_store(Ledger(), 7)
    assert store.terms(WHERE) == StoreTerms(1, 7, REQUEST_COST_BYTES)
    assert store.pin(WHERE) == WHERE
    store.close()
    pinned_store.open_store(Ledger(), CONNECTIONS).close()
