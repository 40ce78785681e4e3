"""Write files to a repository of the Hub in one commit, which takes its parent's place or is refused."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, OutputError, StorageError, library
from mergepipe.storage.contract import EXTRA
from mergepipe.storage.location import Location
from mergepipe.storage.remote.http_client import retry_after_seconds
from mergepipe.storage.remote.hub_api import TOO_MANY_REQUESTS, hub_settings
from mergepipe.storage.remote.retry import (
    ANSWER_SECONDS,
    LONG_WAIT_SECONDS,
    REPORT_SECONDS,
    REQUEST_BYTES,
    TRANSIENT_STATUSES,
    RetryPolicy,
)

_MOVED: Final = (409, 412)
_RESET: Final = re.compile(r"\bt=([0-9]{1,9})\b")  # seconds until a rate limit begins anew, in the Hub's own header
_LOG: Final = logging.getLogger("mergepipe")
_LOG_IN: Final = "set HF_TOKEN, or run `hf auth login`"


class HubRepository:
    """One branch of a model repository, written to with the token of the Hugging Face tools.

    Every method raises NotFoundError (`model.not-found`), ConflictError (`output.changed`) or StorageError; their
    texts hold neither the token nor signed addresses. Without a token none is made: StorageError,
    `storage.credentials`. Offline neither: NotFoundError, `hub.offline`.
    """

    def __init__(self, location: Location) -> None:
        settings = hub_settings()
        if settings.is_offline:
            message = "HF_HUB_OFFLINE is set, and an output is sent to the Hub over the network"
            hint = "write a folder, and `mergepipe push` it where there is a network"
            raise NotFoundError.of("hub.offline", location, message, hint)
        if not settings.token:
            message = "writing to the Hub needs a token, and there is none"
            raise StorageError.of("storage.credentials", location, message, _LOG_IN)
        self.location = location
        self._endpoint = settings.endpoint
        self.branch = location.revision or "main"
        self._package = library("huggingface_hub", location, EXTRA)
        self._api: Any = self._package.HfApi(endpoint=settings.endpoint, token=settings.token)
        self._large: dict[str, Any] = {}  # what the next commit adds of files that are there already, by name

    def create(self, *, is_private: bool) -> None:
        """Create the repository, unless it is there."""
        with self._errors():
            self._api.create_repo(self.location.root, private=is_private, exist_ok=True)

    def head(self) -> str:
        """The commit that the branch leads to."""
        with self._errors():
            return str(self._api.model_info(self.location.root, revision=self.branch).sha)

    def check_writable(self) -> None:
        """Fail early without write permission: the Hub says only to writers how it would store a file."""
        self._upload(self._package.CommitOperationAdd(self._path("README.md"), b"-"))

    def upload(self, name: str, path: Path) -> str:
        """Upload a file that the next commit adds, unless the Hub has it; return its SHA-256.

        The file may go then: what the Hub keeps among small files, which come with the commit, is held in memory.
        """
        addition = self._large[name] = self._package.CommitOperationAdd(self._path(name), str(path))
        self._upload(addition)
        if addition._should_ignore:
            message, hint = f"its .gitignore leaves {name} out of a commit", "remove that line on the Hub"
            raise OutputError.of("output.place", self.location, message, hint)
        digest = str(addition.upload_info.sha256.hex())
        if addition.path_or_fileobj != b"":  # the package has let go of large files
            addition.path_or_fileobj = path.read_bytes()
        return digest

    def holds(self, name: str, sha256: str, size_bytes: int) -> bool:
        """Whether the Hub has a large file that an earlier process uploaded; if so, the next commit adds it."""
        addition = self._package.CommitOperationAdd(self._path(name), b"")
        lfs = self._package.lfs
        addition.upload_info = lfs.UploadInfo(size=size_bytes, sample=b"", sha256=bytes.fromhex(sha256))
        with self._errors():
            wanted, refused = lfs.post_lfs_batch_info(
                [addition.upload_info], self._api.token, "model", self.location.root, endpoint=self._endpoint
            )[:2]
        if refused or any(answer.get("actions") for answer in wanted):
            return False
        addition._upload_mode, addition._is_uploaded = "lfs", True
        self._large[name] = addition
        return True

    def commit(self, files: Mapping[str, bytes], deleted: Sequence[str], parent: str, message: str) -> str:
        """Commit small files and what was uploaded after `parent`; return the commit. Before, nothing is visible."""
        add, delete = self._package.CommitOperationAdd, self._package.CommitOperationDelete
        operations = [
            *self._large.values(),
            *(add(self._path(name), content) for name, content in files.items()),
            *(delete(self._path(name)) for name in deleted),
        ]
        with self._errors(), _no_bars(self._package):
            made = self._api.create_commit(
                self.location.root, operations, commit_message=message, revision=self.branch, parent_commit=parent
            )
        return str(made.oid)

    def _path(self, name: str) -> str:
        return (self.location / name).key

    def _upload(self, addition: Any) -> None:
        with self._errors(), _no_bars(self._package):
            self._api.preupload_lfs_files(self.location.root, [addition], revision=self.branch)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert the errors of the Hub's package, whose requests have a bound on what they wait for."""
        try:
            with _WAITS.active(self._package):
                yield
        except MergePipeError:
            raise
        except Exception as error:  # of the system, or of classes that only the Hub's package knows
            wait = _long_wait_of(error)
            if wait is not None:
                raise self._asked_to_wait(wait) from None
            raise (self._refusal(error) if hasattr(error, "response") else self._unreachable(error)) from None

    def _asked_to_wait(self, wait: _LongWaitError) -> MergePipeError:
        message = f"{wait.host} answers {wait.status}, and asks to wait {wait.seconds:g} s"
        return StorageError.of("storage.unavailable", self.location, message, "run again later: what is uploaded stays")

    def _refusal(self, error: Exception) -> MergePipeError:
        name, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", 0)
        model = self.location.root
        if name == "RevisionNotFoundError":
            message, hint = f"the model has no branch '{self.branch}'", "create it on the Hub, or name another"
            return NotFoundError.of("model.not-found", self.location, message, hint)
        if name in ("RepositoryNotFoundError", "GatedRepoError") or status == 404:
            message = f"the Hub has no model '{model}' that this token may see ({status})"
            hint = f"check the name and `hf auth login`, or create it: `hf repos create {model} --private`"
            return NotFoundError.of("model.not-found", self.location, message, hint)
        if status in _MOVED:
            message = f"its branch '{self.branch}' has moved meanwhile ({status}): nothing was committed"
            return ConflictError.of("output.changed", self.location, message, "see what is there, then run again")
        if status in (401, 403):
            hint = f"use a token that may write: {_LOG_IN}"
            message = f"the Hub does not let this token write ({status})"
            return StorageError.of("storage.credentials", self.location, message, hint)
        message = f"{self._host_of(error)} answers {status}"
        return StorageError.of(
            "storage.unavailable", self.location, message, "run again later: uploaded files are kept"
        )

    def _unreachable(self, error: Exception) -> MergePipeError:
        message = f"could not be written: {self._host_of(error)}: {_cause_of(error)}"
        hint = "check the network, then run again: uploaded files are kept"
        return StorageError.of("storage.unreachable", self.location, message, hint)

    def _host_of(self, error: Exception) -> str:
        """Name the host that a request was made to: the endpoint, unless the error knows of another one."""
        try:
            address = str(error.request.url)  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # the package's errors raise it where they have no request
            address = self._endpoint
        return urlsplit(address).netloc.rpartition("@")[2]


class _LongWaitError(Exception):
    """The server of a request asks for a wait of more than `RetryPolicy.most_seconds`."""

    def __init__(self, host: str, status: int, seconds: float) -> None:
        super().__init__(f"{host} answers {status}")
        self.host = host
        self.status = status
        self.seconds = seconds


def _long_wait_of(error: BaseException | None) -> _LongWaitError | None:
    """Find the long wait that an error of the package is about: its threads wrap the errors of their requests."""
    while error is not None and not isinstance(error, _LongWaitError):
        error = error.__cause__ or error.__context__
    return error


@dataclass(slots=True)
class _Wait:
    """What one thread waits for: an answer of `host` since `begun`, until `ends`."""

    host: str
    begun: float
    ends: float
    next_report: float


class _BoundedWaits:
    """Bounds what the requests of the Hub's package wait for, while calls of ours are made; used from many threads.

    The package has one client, shared by its threads and by other users in this process, so that the bounds are hooks
    of that client. A wait that a server asks for has the bound of `RetryPolicy`, one for an answer `ANSWER_SECONDS`,
    over all attempts, or over one whose request has a large body. Timeouts of the client are about silence alone, so
    that connections are told to us as they are made, and each read of them has the time that is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_calls = 0
        self._begun: dict[tuple[str, str], float] = {}
        self._here = threading.local()

    @contextmanager
    def active(self, package: Any) -> Iterator[None]:
        """Bound the waits of the calls in this context."""
        with self._lock:
            self._n_calls += 1
            client = package.get_session()  # which the package makes anew after some failures
            hooks = client.event_hooks
            if self._check_answer not in hooks["response"]:
                client.event_hooks = {
                    "request": [*hooks["request"], self._bound_request],
                    "response": [*hooks["response"], self._check_answer],
                }
        try:
            yield
        finally:
            with self._lock:
                self._n_calls -= 1
                if not self._n_calls:
                    self._begun.clear()

    def _bound_request(self, request: Any) -> None:
        """Give an attempt the time that those before it left."""
        self._here.wait = None
        if not self._n_calls:
            return
        begun = now = time.monotonic()
        nbytes = int(request.headers.get("Content-Length", 0))
        is_large = "Transfer-Encoding" in request.headers or nbytes > REQUEST_BYTES
        if not is_large:
            with self._lock:
                begun = self._begun.setdefault((request.method, str(request.url)), now)
        left_seconds = begun + ANSWER_SECONDS - now
        if left_seconds <= 0:
            raise TimeoutError
        self._here.wait = _Wait(_host_of(request), begun, begun + ANSWER_SECONDS, begun + LONG_WAIT_SECONDS)
        timeouts = request.extensions.get("timeout", {})
        stated = timeouts.get("read")
        read_seconds = left_seconds if stated is None else min(stated, left_seconds)
        request.extensions = {
            **request.extensions,
            "timeout": {**timeouts, "read": read_seconds},
            "trace": partial(self._watch, is_large=is_large),
        }

    def _watch(self, event: str, facts: Mapping[str, Any], *, is_large: bool) -> None:
        """Bound the reads of a connection that is made; count from the end of a large request."""
        wait = self._here.wait
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            stream = facts["return_value"]
            stream.read = partial(self._read, stream.read)
        elif event.endswith(".receive_response_headers.started") and is_large and wait is not None:
            now = time.monotonic()
            self._here.wait = _Wait(wait.host, now, now + ANSWER_SECONDS, now + LONG_WAIT_SECONDS)

    def _read(self, read: Callable[..., bytes], most_bytes: int, timeout: float | None = None) -> bytes:
        """Read from a connection for as long as its thread may wait."""
        wait = getattr(self._here, "wait", None)
        if wait is None:
            return read(most_bytes, timeout)
        started = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= wait.next_report:
                _LOG.warning("%s: no complete answer for %.0f s", wait.host, now - wait.begun)
                wait.next_report = now + REPORT_SECONDS
            if now >= wait.ends:
                raise TimeoutError
            seconds = min(wait.ends, wait.next_report) - now
            silent_seconds = seconds if timeout is None else started + timeout - now
            try:
                return read(most_bytes, max(0.001, min(seconds, silent_seconds)))
            except Exception as error:  # of a class that only the package's client knows
                if "Timeout" not in type(error).__name__ or silent_seconds < seconds:
                    raise

    def _check_answer(self, response: Any) -> None:
        """Refuse an answer of which the next attempt is too far away."""
        if not self._n_calls:
            return
        with self._lock:
            self._begun.pop((response.request.method, str(response.request.url)), None)
        status = response.status_code
        if status not in TRANSIENT_STATUSES:
            return
        seconds = retry_after_seconds(response.headers.get("Retry-After", ""))
        reset = _RESET.search(response.headers.get("ratelimit", ""))
        if reset is not None and status == TOO_MANY_REQUESTS:
            seconds = max(seconds, float(reset[1]))
        if seconds > RetryPolicy().most_seconds:
            raise _LongWaitError(_host_of(response.request), status, seconds)


def _host_of(request: Any) -> str:
    """Name the host of a request, without the name and password of a user."""
    return urlsplit(str(request.url)).netloc.rpartition("@")[2]


_WAITS: Final = _BoundedWaits()


def _cause_of(error: BaseException | None) -> str:
    """Say why a request got no answer, by the first error that tells; the errors' texts may hold signed addresses."""
    name = type(error).__name__
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return "the connection was refused"
        if isinstance(error, socket.gaierror):
            return "no such host is known"
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return "no answer came in time"
        if isinstance(error, ssl.SSLError):
            return f"no encrypted connection ({error.reason})"
        error = error.__cause__ or error.__context__
    return name


@contextmanager
def _no_bars(package: Any) -> Iterator[None]:
    """Keep the package from drawing progress bars of its own."""
    utils = package.utils
    was_disabled = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            utils.enable_progress_bars()
