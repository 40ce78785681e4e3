"""The requests that the Hub is sent: what a revision holds, and where the bytes of a file are to be read now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NoReturn
from urllib.parse import parse_qs, quote, urlsplit

from mergepipe.core.canonical_json import parse_digestible
from mergepipe.errors import MergePipeError
from mergepipe.storage.location import Location
from mergepipe.storage.remote.http_client import Address, Exchange, HttpClient, Pin, bare_etag
from mergepipe.storage.remote.hub_errors import changed, no_answer, refusal
from mergepipe.storage.remote.hub_listing import HubFile, ModelListing, WaitingRoom, WholeFileCheck, parse_model_info
from mergepipe.storage.remote.hub_settings import HubSettings
from mergepipe.storage.remote.retry import RequestFailed
from mergepipe.storage.remote.transfers import Transfers

ANSWER_LIMIT_BYTES: Final = 8 << 20  # 300 bytes a file: 25,000 files; parsing takes up to 30 times as much memory
RENEWED_BEFORE_SECONDS: Final = 60
TOO_MANY_REQUESTS: Final = 429
_FOUND: Final = (301, 302, 303, 307, 308)


class HubApi:
    """Asks the Hub at the endpoint of the settings, with their token, which goes to no other host."""

    def __init__(self, settings: HubSettings, transfers: Transfers, client: HttpClient) -> None:
        self._endpoint = settings.endpoint
        self._has_token = bool(settings.token)
        self._headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        self._transfers = transfers
        self._client = client
        self.waiting_room = WaitingRoom()

    def model_info(self, location: Location, revision: str) -> ModelListing:
        """Ask for the commit of a revision, and all its files with sizes and digests.

        Raises:
            NotFoundError, StorageError, CorruptError: as `HubStore.pin` does.
        """
        url = f"{self._endpoint}/api/models/{location.root}/revision/{quote(revision, safe='')}?blobs=true"
        answer = self._transfers.ask(location, lambda: self._exchange("GET", url))
        if answer.status != 200:
            raise self._refusal(location, answer)

        def refuse(why: str) -> NoReturn:
            raise no_answer(location, why)

        return parse_model_info(location.root, location, parse_digestible(answer.body, refuse))

    def resolve(self, location: Location, commit: str, file: HubFile) -> Address:
        """Ask where the bytes of a file of a commit are, and hold the answer against the pin. Makes one attempt.

        Raises:
            RequestFailed: the request failed.
            StorageError, NotFoundError: the Hub refuses.
            ConflictError: `input.changed`, it is another file than the pinned one.
        """
        url = f"{self._endpoint}/{location.root}/resolve/{commit}/{quote(file.path)}"
        answer = self._exchange("HEAD", url)
        if answer.status not in (200, *_FOUND):
            raise self._refusal(location, answer)
        _check_resolved(location, commit, file, answer)
        return answer.address if answer.elsewhere is None else answer.elsewhere

    def _exchange(self, method: str, url: str) -> Exchange:
        """Make one request. Raises RequestFailed, which says what the Hub's rate limit is about."""
        try:
            return self._client.exchange(method, Address(url, self._headers), ANSWER_LIMIT_BYTES)
        except RequestFailed as error:
            if error.failure.status != TOO_MANY_REQUESTS:
                raise
            detail = f"{error.failure.detail} (the Hub's rate limit is used up, which is higher with a token)"
            raise RequestFailed(replace(error.failure, detail=detail)) from None

    def _refusal(self, location: Location, answer: Exchange) -> MergePipeError:
        return refusal(location, answer.status, answer.headers, has_token=self._has_token)


class HubSource:
    """A pinned file of the Hub on the network, resolved at its first read, and again when its address has expired.

    One value serves all that read the file, from many threads: each address is asked for once.
    """

    def __init__(
        self,
        api: HubApi,
        client: HttpClient,
        location: Location,
        commit: str,
        file: HubFile,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.location = location
        self.file = file
        self._commit = commit
        self._api = api
        self._client = client
        self._clock = clock
        self.whole = WholeFileCheck(location, file, api.waiting_room)
        self._pin = Pin(file.size_bytes)
        self._pin_lock = threading.Lock()
        self._address: Address | None = None
        self._used = threading.local()
        self._lock = threading.Lock()

    @property
    def has_address(self) -> bool:
        """Whether an address is known that stays valid for some time."""
        address = self._address
        return address is not None and expires_at(address.url) > self._clock() + RENEWED_BEFORE_SECONDS

    def resolve(self) -> Address:
        """Find an address, unless one is known that stays valid for some time. Raises as `HubApi.resolve` does."""
        with self._lock:
            if self._address is None or not self.has_address:
                self._address = self._api.resolve(self.location, self._commit, self.file)
            return self._address

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Make one request for the bytes at `offset` that fill `buffer`. Raises RequestFailed."""
        address = self._address or self.resolve()
        self._used.address = address
        self._client.read_range(address, offset, buffer, Pin(self.file.size_bytes), self._difference)

    def _difference(self, answered: Pin) -> str:
        """Say how an answer is of another version than the first was, wherever addresses that were found anew lead.

        The server that holds the bytes has ETags of its own, so that the first answer tells which one is the file's.
        """
        with self._pin_lock:
            if not self._pin.names_version and self._pin.size_bytes == answered.size_bytes:
                self._pin = answered
            return self._pin.difference(answered)

    def renew(self) -> bool:
        """Find the address anew, unless another thread did since this one used it. Raises as `HubApi.resolve` does."""
        with self._lock:
            if self._address is self._used.address:
                self._address = self._api.resolve(self.location, self._commit, self.file)
        return True


def expires_at(url: str) -> float:
    """The time at which a signed address says that it expires, in seconds since the epoch; infinity if it does not.

    As `Expires`, or as `X-Amz-Expires` seconds after `X-Amz-Date`.
    """
    query = {key: values[0] for key, values in parse_qs(urlsplit(url).query).items()}
    if query.get("Expires", "").isdecimal():
        return float(query["Expires"])
    try:
        signed = datetime.strptime(query.get("X-Amz-Date", ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return signed.timestamp() + int(query.get("X-Amz-Expires", ""))
    except (ValueError, OverflowError):
        return float("inf")


def _check_resolved(location: Location, pinned_commit: str, file: HubFile, answer: Exchange) -> None:
    headers = answer.headers
    commit = headers.get("x-repo-commit", "")
    if not commit:
        raise no_answer(location, "it names no commit (X-Repo-Commit)")
    if commit != pinned_commit:
        raise changed(location, "its commit", pinned_commit, commit)
    etag = bare_etag(headers.get("x-linked-etag") or headers.get("etag", ""))
    if etag != file.content_id:
        raise changed(location, "its ETag", file.content_id, etag or "missing")
    size = headers.get("x-linked-size") or (headers.get("content-length", "") if answer.status == 200 else "")
    if size and size != str(file.size_bytes):
        raise changed(location, "its size", file.size_bytes, size)
