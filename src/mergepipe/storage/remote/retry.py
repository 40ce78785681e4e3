"""Makes requests again after failures by one policy, charges every attempt, and bounds how many are in flight."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Final, Protocol, TypeVar

from mergepipe.errors import ConflictError, LimitError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.contract import CONNECTIONS, RequestCounts
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location

REQUEST_BYTES: Final = 8 << 20
MOST_REFUSAL_BYTES: Final = 64 << 10
REQUEST_COST_BYTES: Final = 3_000_000  # 30 ms at 100 MB/s
ANSWER_SECONDS: Final = 90.0
"""The longest wait for an answer that carries no bytes of a file, over all attempts; a server may ask for more."""
LONG_WAIT_SECONDS: Final = 10.0
"""A wait that is reported, and at most once in `REPORT_SECONDS` again."""
REPORT_SECONDS: Final = 30.0
_RENEWABLE_STATUSES: Final = frozenset({401, 403, 404, 410})

T = TypeVar("T")
_LOG: Final = logging.getLogger("mergepipe")


# --- failures, and what follows from them ---


class FailureKind(Enum):
    """The way in which a request failed."""

    STATUS = "the server answered with an error status"
    UNREACHABLE = "no connection could be made"
    CUT = "the connection ended before the answer did"
    STALLED = "nothing arrived for too long"
    NOT_PARTIAL = "the whole file was sent instead of a range"
    WRONG_RANGE = "another range was sent than was asked for"
    CHANGED = "another version was sent than the pinned one"
    UNUSABLE = "the answer cannot be used"


@dataclass(eq=False)
class RequestFailed(Exception):  # noqa: N818 (it reports to the retrying code and never reaches a user)
    """One failed request, after `received_bytes` of its answer were stored.

    `detail` is shown to users: it never holds an address, a header or a credential. `sent_bytes` is known where it is
    proved that no byte of the file was sent: the request was never made, or the answer is an error whose body has a
    stated length.
    """

    kind: FailureKind
    detail: str
    status: int = 0
    retry_after_seconds: float = 0.0
    sent_bytes: int | None = None
    received_bytes: int = 0

    @property
    def refuses_credentials(self) -> bool:
        """Whether the credentials are not valid: S3 answers 400 to a token that has expired."""
        return self.status == 401 or (self.status == 400 and "Token" in self.detail)

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        if self.kind is FailureKind.STATUS:
            return self.status in TRANSIENT_STATUSES
        return self.kind in _TRANSIENT_KINDS


TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_KINDS: Final = frozenset({FailureKind.UNREACHABLE, FailureKind.CUT, FailureKind.STALLED})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of trying a request again: how often and how long.

    Waits double from `first_wait_seconds` up to `longest_wait_seconds`; a host that never answered yet is given up
    after `most_first_contacts` attempts, so that a wrong name or a missing network is told within seconds.
    """

    most_attempts: int = 8
    most_seconds: float = 300.0
    first_wait_seconds: float = 0.25
    longest_wait_seconds: float = 30.0
    most_first_contacts: int = 3

    def __post_init__(self) -> None:
        if self.most_attempts < 1 or self.most_first_contacts < 1 or self.first_wait_seconds <= 0:
            raise ValueError(f"not a policy of retries: {self}")


def wait_before_retry(
    policy: RetryPolicy,
    failure: RequestFailed,
    *,
    n_failures: int,
    elapsed_seconds: float,
    has_answered: bool,
    random_fraction: float,
) -> float | None:
    """Return the seconds to wait before the next attempt, or None to give up.

    A wait is between half and all of the backoff, by `random_fraction` in [0, 1), and never shorter than the server's
    `Retry-After`. No wait is begun that would end more than `policy.most_seconds` after the first attempt began.
    """
    contacts = policy.most_attempts if has_answered else min(policy.most_attempts, policy.most_first_contacts)
    most_attempts = contacts if failure.kind is FailureKind.UNREACHABLE else policy.most_attempts
    if not failure.is_transient or n_failures >= most_attempts:
        return None
    backoff = min(policy.longest_wait_seconds, policy.first_wait_seconds * 2.0 ** (n_failures - 1))
    wait = max(backoff * (1 + random_fraction) / 2, failure.retry_after_seconds)
    return None if elapsed_seconds + wait > policy.most_seconds else wait


def error_of(failure: RequestFailed, location: Location, n_failures: int, elapsed_seconds: float) -> MergePipeError:
    """Return the error that tells a user why reading `location` was given up."""
    if failure.kind is FailureKind.STATUS:
        return _status_error(failure, location, n_failures, elapsed_seconds)
    if failure.kind is FailureKind.CHANGED:
        return _changed(location, failure.detail)
    if failure.kind is FailureKind.NOT_PARTIAL:
        message = f"its server sends no byte ranges: {failure.detail}"
        return StorageError.of("storage.answer", location, message, "copy the files to a server that does, or here")
    if failure.kind is FailureKind.WRONG_RANGE:
        message = f"its server sent another range than was asked for: {failure.detail}"
        return StorageError.of("storage.answer", location, message, "report this to the operator of the server")
    if failure.kind is FailureKind.UNUSABLE:
        return StorageError.of("storage.answer", location, failure.detail, "check the address and the settings")
    text = f"could not be read: {failure.detail} ({_tries(n_failures, elapsed_seconds)})"
    return StorageError.of("storage.unreachable", location, text, "check the network and the address, then run again")


def _status_error(
    failure: RequestFailed, location: Location, n_failures: int, elapsed_seconds: float
) -> MergePipeError:
    status, answer = failure.status, failure.detail
    if status in (404, 410):
        return NotFoundError.of("storage.not-found", location, f"no such file: {answer}", "check the location")
    if failure.refuses_credentials:
        message = f"credentials are needed, or those in use are not valid: {answer}"
        return StorageError.of("storage.credentials", location, message, "log in with the store's own tools")
    if status == 403:
        message = f"access to it is not allowed: {answer}"
        return StorageError.of("storage.permission", location, message, "check the credentials and their permissions")
    if status in (412, 416):
        return _changed(location, answer)
    if not failure.is_transient:
        message = f"an answer that cannot be used: {answer}"
        return StorageError.of("storage.answer", location, message, "check the location, the region and the endpoint")
    wait_text = f", and asks to wait {failure.retry_after_seconds:g} s" if failure.retry_after_seconds else ""
    text = f"its server answered {answer}{wait_text} ({_tries(n_failures, elapsed_seconds)})"
    return StorageError.of("storage.unavailable", location, text, "run again later, or with fewer connections")


def _changed(location: Location, detail: str) -> MergePipeError:
    return ConflictError.of("input.changed", location, f"changed while it was being read: {detail}", "run again")


def _tries(n_failures: int, elapsed_seconds: float) -> str:
    attempts = "1 attempt" if n_failures == 1 else f"{n_failures} attempts"
    return f"{attempts} in {elapsed_seconds:.0f} s"


# --- requests ---


class Source(Protocol):
    """One pinned file of a server."""

    @property
    def location(self) -> Location: ...

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Make one request for the bytes at `offset` that fill `buffer`. Raises RequestFailed."""
        ...

    def renew(self) -> bool:
        """Find the file's address anew; False where there is no other. Raises RequestFailed."""
        ...


class Transfers:
    """The requests of one store: at most `connections` at once, from any number of threads.

    A read of more than `REQUEST_BYTES` is split and its parts are requested concurrently. Every attempt is charged
    before it is made. When it has failed, that is taken back of which the answer proves that it was not sent; since the
    next attempt of the same range is charged after that, no failure makes a budget look fuller than it is.

    `clock`, `random_fraction` and `sleep` (seconds, and an event that ends it early) decide nothing but when attempts
    are made.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: RetryPolicy | None = None,
        connections: int = CONNECTIONS,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float, threading.Event], object] = lambda seconds, stop: stop.wait(seconds),
        random_fraction: Callable[[], float] | None = None,
    ) -> None:
        self.ledger = ledger
        self.connections = connections
        self._policy = policy or RetryPolicy()
        self._clock = clock
        self._sleep = sleep
        self._random_fraction = random_fraction or random.Random().random
        self._slots = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._counts = RequestCounts()
        self._has_answered = False
        self._next_report = float("-inf")
        self._stops: set[_Stop] = set()
        self._on_abort: list[Callable[[], None]] = []

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far."""
        with self._lock:
            return self._counts

    def read(self, source: Source, offset: int, buffer: memoryview, purpose: Purpose) -> None:
        """Fill `buffer` with the bytes at `offset`, all of which lie inside the file.

        Nothing writes to `buffer` after it returns or raises.
        """
        starts = range(0, len(buffer), REQUEST_BYTES)
        with self._stoppable(source.location) as stop:
            if len(starts) <= 1:
                self._read_part(source, offset, buffer, purpose, stop)
                return
            pool = self._pool()
            ends = [(start, buffer[start : start + REQUEST_BYTES]) for start in starts]
            parts = [pool.submit(self._read_part, source, offset + start, part, purpose, stop) for start, part in ends]
            self._finish(parts, stop)

    def ask(self, location: Location, request: Callable[[], T]) -> T:
        """Make a request that transfers no bytes of a file. Raises as `read` does.

        No attempt is begun that would end after `ANSWER_SECONDS` if it took as long as the last one.
        """
        silence = replace(self._policy, most_seconds=min(self._policy.most_seconds, ANSWER_SECONDS))
        with self._stoppable(location) as stop:
            attempts = _Attempts(self._clock(), stop)
            while not stop.event.is_set():
                begun = self._clock()
                try:
                    return self._attempt(request, attempts)
                except RequestFailed as error:
                    is_answer = error.kind is FailureKind.STATUS
                    policy = self._policy if is_answer else silence
                    attempt_seconds = 0.0 if is_answer else self._clock() - begun
                    self._recover(location, error, attempts, policy, attempt_seconds)
        raise _aborted(location)

    def run_all(self, jobs: list[Callable[[], T]]) -> list[T]:
        """The results of some jobs that make requests, run concurrently."""
        pool = self._pool()
        futures = [pool.submit(job) for job in jobs]
        self._finish(futures, _Stop())
        return [future.result() for future in futures]

    def on_abort(self, break_connections: Callable[[], None]) -> None:
        """Register a function that `abort` calls."""
        self._on_abort.append(break_connections)

    def abort(self) -> None:
        """Fail the reads in flight, without waiting for their servers; later ones are made as ever."""
        with self._lock:
            for stop in self._stops:
                stop.is_aborted = True
                stop.event.set()
        for break_connections in self._on_abort:
            break_connections()

    def close(self) -> None:
        """Let the workers end."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()

    def _read_part(self, source: Source, offset: int, buffer: memoryview, purpose: Purpose, stop: _Stop) -> None:
        done, attempts = 0, _Attempts(self._clock(), stop)
        while done < len(buffer) and not stop.event.is_set():
            nbytes = len(buffer) - done
            self._charge(source.location, purpose, nbytes, attempts)
            try:
                self._attempt(partial(source.fetch, offset + done, buffer[done:]), attempts)
                return
            except RequestFailed as error:
                self._settle(source.location, purpose, nbytes, error)
                done += error.received_bytes
                attempts.is_renewed = attempts.is_renewed and not error.received_bytes
                if not self._renew(source, error, attempts):
                    self._recover(source.location, error, attempts, self._policy)

    def _attempt(self, request: Callable[[], T], attempts: _Attempts) -> T:
        with self._lock:
            retries = self._counts.retries + (attempts.n_failures > 0)
            self._counts = replace(self._counts, requests=self._counts.requests + 1, retries=retries)
        try:
            with self._slots:
                result = request()
        except RequestFailed as error:
            self._has_answered |= error.kind is not FailureKind.UNREACHABLE
            raise
        self._has_answered = True
        return result

    def _charge(self, location: Location, purpose: Purpose, nbytes: int, attempts: _Attempts) -> None:
        """Charge an attempt before it is made."""
        try:
            self.ledger.charge(str(location), purpose, nbytes)
        except LimitError as error:
            retried_bytes = self.counts.retried_bytes
            if not retried_bytes and not attempts.n_failures:
                raise
            message = f"{nbytes} more bytes do not fit: failed attempts took {retried_bytes}"
            hint = "raise the budget a little, or run again when the network is better"
            raise LimitError.of(error.code, location, f"the budget was used up by retries: {message}", hint) from None

    def _settle(self, location: Location, purpose: Purpose, nbytes: int, error: RequestFailed) -> None:
        """Take back the charge of a failed attempt if its answer proves that nothing of the file was sent.

        The answer itself is then charged as metadata. One that is longer than refusals are leaves the charge as it is.
        """
        lost_bytes = nbytes - error.received_bytes
        sent_bytes = error.sent_bytes
        if sent_bytes is not None and sent_bytes <= min(nbytes, MOST_REFUSAL_BYTES):
            self.ledger.refund(str(location), purpose, nbytes)
            self.ledger.charge(str(location), Purpose.METADATA, sent_bytes)
            lost_bytes = sent_bytes
        with self._lock:
            self._counts = replace(self._counts, retried_bytes=self._counts.retried_bytes + lost_bytes)

    def _renew(self, source: Source, failure: RequestFailed, attempts: _Attempts) -> bool:
        """Find another address for a source whose address may have expired; once between bytes that arrived."""
        if attempts.is_renewed or failure.status not in _RENEWABLE_STATUSES:
            return False
        attempts.is_renewed = self.ask(source.location, source.renew)
        attempts.n_failures += attempts.is_renewed
        return attempts.is_renewed

    def _recover(
        self,
        location: Location,
        failure: RequestFailed,
        attempts: _Attempts,
        policy: RetryPolicy,
        attempt_seconds: float = 0.0,
    ) -> None:
        """Wait before the next attempt, or give up where that would end too late if it lasted `attempt_seconds`."""
        attempts.n_failures += 1
        elapsed = self._clock() - attempts.started
        seconds = wait_before_retry(
            policy,
            failure,
            n_failures=attempts.n_failures,
            elapsed_seconds=elapsed + attempt_seconds,
            has_answered=self._has_answered,
            random_fraction=self._random_fraction(),
        )
        if seconds is None:
            raise error_of(failure, location, attempts.n_failures, elapsed) from None
        self._report_wait(location, failure, elapsed, seconds)
        self._sleep(seconds, attempts.stop.event)

    def _report_wait(self, location: Location, failure: RequestFailed, elapsed: float, seconds: float) -> None:
        """Log that an answer takes long, at most once in `REPORT_SECONDS`."""
        now = self._clock()
        with self._lock:
            if elapsed + seconds < LONG_WAIT_SECONDS or now < self._next_report:
                return
            self._next_report = now + REPORT_SECONDS
        _LOG.warning(
            "%s: no answer for %.0f s: %s; the next attempt is in %.0f s", location, elapsed, failure.detail, seconds
        )

    @contextmanager
    def _stoppable(self, location: Location) -> Iterator[_Stop]:
        """Let `abort` end what is done in this context."""
        stop = _Stop()
        with self._lock:
            self._stops.add(stop)
        try:
            yield stop
        finally:
            with self._lock:
                self._stops.discard(stop)
        if stop.is_aborted:
            raise _aborted(location)

    def _finish(self, futures: list[Future[T]], stop: _Stop) -> None:
        """Wait for all; after the first error, `stop` the others. Returns or raises when none is running.

        Of several errors, one of the budget is raised, else the first in order.
        """
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: nobody waits for a silent server
            self.abort()
            raise
        finally:
            stop.event.set()
            ended = [future for future in futures if not future.cancel()]
            wait(ended)
        errors = [error for future in ended if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, LimitError)), errors[0])

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(self.connections, thread_name_prefix="transfer")
            return self._workers


@dataclass(slots=True, eq=False)
class _Stop:
    """Ends the attempts of one read: because another of its parts failed, or because the read is aborted."""

    event: threading.Event = field(default_factory=threading.Event)
    is_aborted: bool = False


@dataclass(slots=True)
class _Attempts:
    """The attempts of one request."""

    started: float
    stop: _Stop
    n_failures: int = 0
    is_renewed: bool = False


def _aborted(location: Location) -> MergePipeError:
    return StorageError.of("storage.unavailable", location, "its reading was given up", "run again")
