"""Decides what follows a failed request: wait and try again, or give up with one precise error. Makes no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.location import Location


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


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request. `detail` is shown to users: it never holds an address, a header or a credential.

    `sent_bytes` is known where it is proved that no byte of the file was sent: the request was never made, or the
    answer is an error whose body has a stated length.
    """

    kind: FailureKind
    detail: str
    status: int = 0
    retry_after_seconds: float = 0.0
    sent_bytes: int | None = None

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        if self.kind is FailureKind.STATUS:
            return self.status in TRANSIENT_STATUSES
        return self.kind in _TRANSIENT_KINDS


class RequestFailed(Exception):  # noqa: N818 (it reports to the retrying code and never reaches a user)
    """A request failed after `received_bytes` of its answer were stored."""

    def __init__(self, failure: Failure, received_bytes: int = 0) -> None:
        super().__init__(failure.detail)
        self.failure = failure
        self.received_bytes = received_bytes


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
    failure: Failure,
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


def error_of(failure: Failure, location: Location, n_failures: int, elapsed_seconds: float) -> MergePipeError:
    """Return the error that tells a user why reading `location` was given up."""
    if failure.kind is FailureKind.STATUS:
        return _status_error(failure, location, n_failures, elapsed_seconds)
    if failure.kind is FailureKind.CHANGED:
        return _changed(location, failure.detail)
    if failure.kind is FailureKind.NOT_PARTIAL:
        message = f"its server sends no byte ranges: {failure.detail}"
        return StorageError.of("storage.no-ranges", location, message, "copy the files to a server that does, or here")
    if failure.kind is FailureKind.WRONG_RANGE:
        message = f"its server sent another range than was asked for: {failure.detail}"
        return StorageError.of("storage.wrong-range", location, message, "report this to whoever runs the server")
    if failure.kind is FailureKind.UNUSABLE:
        return StorageError.of("storage.answer", location, failure.detail, "check the address and the settings")
    text = f"could not be read: {failure.detail} ({_tries(n_failures, elapsed_seconds)})"
    return StorageError.of("storage.connection", location, text, "check the network and the address, then run again")


def _status_error(failure: Failure, location: Location, n_failures: int, elapsed_seconds: float) -> MergePipeError:
    status, answer = failure.status, failure.detail
    if status in (404, 410):
        return NotFoundError.of("storage.not-found", location, f"no such file: {answer}", "check the location")
    if status == 401:
        message = f"credentials are needed, or those in use are not valid: {answer}"
        return StorageError.of("storage.credentials", location, message, "log in as the store's own tools ask for")
    if status == 403:
        message = f"reading it is not allowed: {answer}"
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
