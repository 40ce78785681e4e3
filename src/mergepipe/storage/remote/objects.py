"""Buckets: `s3://`, `gs://` and `az://`, listed once a folder, read by pinned ranges, written to. Alone knows obstore.

S3 signs by a computation on this machine, whatever the credentials: obstore signs an address, and our own client sends
the request, because it shows `Retry-After` and stores bytes without a copy. Google and Azure sign addresses only with
permissions that many credentials lack, so there obstore sends the requests itself. Its own retries are switched off
where files are read: they would be neither charged nor reported. Writes are retried by it, part by part.
"""

from __future__ import annotations

import configparser
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, StorageError, library
from mergepipe.storage.contract import EXTRA, Entry, FileKind, FileStatus
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.remote.http_client import CONNECT_SECONDS, STALL_SECONDS, Address, HttpClient, Pin
from mergepipe.storage.remote.pinned_store import PinnedStore, status_of
from mergepipe.storage.remote.retry import FailureKind, RequestFailed, Source, Transfers, error_of

SIGNED_FOR: Final = timedelta(minutes=15)
_CHUNK_BYTES: Final = 1 << 20
_PART_BYTES: Final = 16 << 20
_PARTS_AT_ONCE: Final = 8
_EXISTS: Final = 412
_IS_THERE: Final = (409, _EXISTS)
_OWN_MARK: Final = ".mergepipe-"  # of objects that no user named
_DIGEST_ATTRIBUTE: Final = "mergepipedigest"  # Azure takes names of letters and digits only
Settings: TypeAlias = Mapping[str, Any]  # of obstore
_NO_RETRIES: Final[Settings] = {"max_retries": 0}
_WRITE_RETRIES: Final[Settings] = {"max_retries": 8, "retry_timeout": timedelta(minutes=5)}
_WRITE_WAITS_SECONDS: Final = (0.2, 1.0, 5.0)
_LONGEST_READ: Final = timedelta(minutes=15)  # of one request, 8 MiB at most
_LONGEST_WRITE: Final = timedelta(hours=1)
_WRITE_STALL_SECONDS: Final = 300.0  # it begins with a request: eight parts together take that at 450 kB/s
_METADATA_SERVICE: Final = ("169.254.169.254", 80)
_STATUS: Final = re.compile(r"status(?: code)?: (\d{3})(?: ([A-Za-z -]{1,40}))?")
_ADDRESS: Final = re.compile(r"https?://[^/\s]\S*")
_HOST: Final = re.compile(r"https?://(?:[^/\s@]*@)?([^/\s?@,]+)")
_CAUSES: Final = (("ConnectionRefused", "the connection was refused"), ("dns error", "no such host is known"))
_ERROR_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_CLASS_STATUS: Final = {
    "FileNotFoundError": (404, "Not Found"),
    "UnauthenticatedError": (401, "Unauthorized"),
    "PermissionDeniedError": (403, "Forbidden"),
    "PreconditionError": (412, "Precondition Failed"),
    "AlreadyExistsError": (412, "Precondition Failed"),
}
_KINDS: Final = (
    ("non-partial response", FailureKind.NOT_PARTIAL, "200 for a range"),
    ("Content-Range", FailureKind.WRONG_RANGE, "its Content-Range is missing or malformed"),
    ("but object was only", FailureKind.CHANGED, "it is shorter than it was"),
    ("UnexpectedRange", FailureKind.WRONG_RANGE, "its Content-Range is another one"),
    ("BareRedirect", FailureKind.UNUSABLE, "it lies in another region than the one in use: set the region"),
    ("TimedOut", FailureKind.STALLED, "nothing arrived for too long"),
    ("kind: Timeout", FailureKind.STALLED, "nothing arrived for too long"),
    ("kind: Connect", FailureKind.UNREACHABLE, ""),
    ("kind: Request", FailureKind.UNREACHABLE, ""),
    ("error sending request", FailureKind.UNREACHABLE, ""),
    ("kind: Interrupted", FailureKind.CUT, "the connection ended before the answer did"),
    ("kind: Decode", FailureKind.CUT, "the connection ended before the answer did"),
    ("error decoding response body", FailureKind.CUT, "the connection ended before the answer did"),
    ("request or response body error", FailureKind.CUT, "the connection ended before the answer did"),
)


# --- reading ---


def open_store(ledger: Ledger, connections: int) -> ObjectStore:
    """Return the store of all buckets of a scheme; a bucket's client is made when it is first named."""
    return ObjectStore(Transfers(ledger, connections=connections))


class ObjectStore(PinnedStore):
    """Objects by bucket and key. A folder is what keys have before a slash; an empty one does not exist."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        super().__init__(transfers, http)
        self._lock = threading.Lock()
        self._clients: dict[str, ObjectClient] = {}
        self._folders: dict[Location, dict[str, Pin | FileKind]] = {}

    def list(self, location: Location) -> tuple[Entry, ...]:
        """Return the entries directly below a folder; see `Store.list`. One request a folder in the store's life."""
        listing = {} if "\0" in location.key else self._listing(location)
        named = self._folders.get(location.parent, {}).get(location.name)  # by an object with the name of a folder
        if not listing and location.key and named is not FileKind.FOLDER:
            raise NotFoundError.of("storage.not-found", location, "no such folder", "check the bucket and the prefix")
        return tuple(
            Entry(name, FileKind.FILE if isinstance(listing[name], Pin) else FileKind.FOLDER)
            for name in sorted(listing)
        )

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up; see `Store.stat`."""
        return None if "\0" in location.key else status_of(self._look_up(location))

    def _look_up(self, location: Location) -> Pin | FileKind | None:
        try:
            if location.key and location.parent in self._folders:
                return self._folders[location.parent].get(location.name)
            if self._listing(location) or not location.key:
                return FileKind.FOLDER
            return self._listing(location.parent).get(location.name)
        except NotFoundError:  # there is no such bucket
            return None

    def _source(self, location: Location) -> Source:
        pin = self._look_up(location)
        assert isinstance(pin, Pin)
        return _ObjectSource(location, pin, self._client(location), self._http)

    def _listing(self, folder: Location) -> dict[str, Pin | FileKind]:
        """The pins and folders below a folder by name, empty where there is no such folder."""
        if folder not in self._folders:
            client = self._client(folder)
            objects, folders = self._transfers.ask(folder, lambda: client.list_folder(folder.key))
            listing: dict[str, Pin | FileKind] = {key.rpartition("/")[2]: FileKind.FOLDER for key in folders}
            listing |= {key.rpartition("/")[2]: pin for key, pin in objects.items()}
            with self._lock:  # another thread may have listed it meanwhile: the first pins stay
                self._folders.setdefault(folder, listing)
        return self._folders[folder]

    def _client(self, location: Location) -> ObjectClient:
        with self._lock:
            if location.root not in self._clients:
                self._clients[location.root] = open_bucket(location, self._http.stall_seconds)
            return self._clients[location.root]


class _ObjectSource:
    """One pinned object."""

    def __init__(self, location: Location, pin: Pin, client: ObjectClient, http: HttpClient) -> None:
        self.location = location
        self._pin = pin
        self._client = client
        self._http = http

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Make one request, signed for itself. Raises RequestFailed."""
        key = self.location.key
        if self._client.signs_addresses:
            self._http.read_range(self._client.address(key), offset, buffer, self._pin)
        else:
            self._client.read_range(key, offset, buffer, self._pin)

    def renew(self) -> bool:
        """Every request is signed anew already."""
        return False


# --- one bucket ---


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object as it is now: `digest` is what its writer said of its content, empty for none."""

    size_bytes: int
    modified: datetime
    etag: str
    version: str
    digest: str = ""

    def age_seconds(self, now: datetime) -> float:
        """Return how long ago it was written."""
        return max(0.0, (now - self.modified).total_seconds())


class ObjectClient:
    """One bucket, by the credentials that the ecosystem's usual places hold; anonymous where there are none."""

    def __init__(self, store: object, sign: Callable[[str], str] | None) -> None:
        self.store = store
        self._sign = sign

    @property
    def signs_addresses(self) -> bool:
        """Whether `address` works: else `read_range` makes the requests."""
        return self._sign is not None

    def list_folder(self, prefix: str) -> tuple[Mapping[str, Pin], tuple[str, ...]]:
        """List the pins of objects by key, and folders, directly below `prefix`, empty for the whole bucket."""
        with _failures():
            answer = _obstore().list_with_delimiter(self.store, prefix or None)
            objects = {item["path"]: _pin(item) for item in answer["objects"] if item["path"] != prefix}
        return objects, tuple(folder.rstrip("/") for folder in answer["common_prefixes"])

    def address(self, key: str) -> Address:
        """Return an address of an object that is good for `SIGNED_FOR`. Makes no request to the store."""
        assert self._sign is not None
        with _failures():
            return Address(self._sign(key))

    def read_range(self, key: str, offset: int, buffer: memoryview, pin: Pin) -> None:
        """Fill `buffer` with the bytes of an object at `offset`, all of which lie inside the pinned object."""
        options = {"range": (offset, offset + len(buffer))} | ({"if_match": pin.if_match} if pin.if_match else {})
        done = 0
        try:
            answer = _obstore().get(self.store, key, options=options)
            difference = pin.difference(_pin(answer.meta))
            if difference:
                raise RequestFailed(FailureKind.CHANGED, difference)
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                part = memoryview(chunk)
                buffer[done : done + len(part)] = part
                done += len(part)
        except RequestFailed:
            raise
        except Exception as error:  # of classes that only obstore knows
            raise replace(failure_of(error), received_bytes=done) from None
        if done < len(buffer):
            raise RequestFailed(FailureKind.CUT, "the connection ended before the answer did", received_bytes=done)


class BucketFolder:
    """The objects below a prefix, read and written as they are now, by the same credentials as `ObjectClient`.

    Requests are retried by obstore. A file is sent in parts, of which `_PARTS_AT_ONCE` are in memory: it may be larger
    than memory, and than what a store takes in one request. What `on_bytes` raises while it is sent ends the transfer,
    and the parts are given up. Every method raises NotFoundError where there is no such bucket, and StorageError where
    the store refuses or cannot be reached.
    """

    def __init__(self, location: Location, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Open the folder; makes no request. Raises as `open_bucket` does."""
        self.location = location
        self._on_bytes = on_bytes
        self._store = _opened(location, _connections(_WRITE_STALL_SECONDS, _WRITE_RETRIES, _LONGEST_WRITE)).store

    def create(self, name: str, content: bytes | Path, digest: str = "") -> bool:
        """Write an object of which there is none; False where there is one, which stays.

        That is the store's own condition for what one request takes. obstore puts no condition on parts: before a
        larger file is sent, and again before its parts are joined, it is looked whether something is there.
        """
        if isinstance(content, Path) and content.stat().st_size > _PART_BYTES:
            return self.look(name) is None and self._put_parts(name, content, digest, is_new=True)
        raw = content if isinstance(content, bytes) else content.read_bytes()
        return self._put(name, raw, digest, mode="create", use_multipart=False)

    def overwrite(self, name: str, content: bytes | Path, digest: str = "") -> None:
        """Write an object, whatever is there."""
        if isinstance(content, Path):
            is_sent = self._put_parts(name, content, digest, is_new=False)
        else:
            is_sent = self._put(name, content, digest, mode="overwrite", use_multipart=False)
        if not is_sent:
            raise ConflictError.of("output.changed", self.location / name, "was written meanwhile", "run again")

    def exchange(self, name: str, content: bytes, facts: ObjectFacts) -> bool:
        """Replace an object if it is still the one that `facts` describe; False where it is not."""
        conditions = {"e_tag": facts.etag, "version": facts.version}
        mode = {condition: value for condition, value in conditions.items() if value}
        return self._put(name, content, "", mode=mode, use_multipart=False)

    def look(self, name: str) -> ObjectFacts | None:
        """Describe an object; None where there is none."""
        with suppress(NotFoundError), self._errors(name):
            answer = _obstore().get(self._store, self._key(name), options={"head": True})
            return _facts(answer.meta, str(answer.attributes.get(_DIGEST_ATTRIBUTE, "")))
        return None

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """The first bytes of an object, at most `limit_bytes` of them; None where there is none."""
        with suppress(NotFoundError), self._errors(name):
            answer = _obstore().get(self._store, self._key(name))  # one request: it may be replaced at any moment
            if answer.meta["size"] <= limit_bytes:
                return bytes(answer.bytes())
            return bytes(_obstore().get_range(self._store, self._key(name), start=0, end=limit_bytes))
        return None

    def list_all(self) -> dict[str, ObjectFacts]:
        """All objects by name, at any depth; their digests are not told."""
        with self._errors():
            chunks = _obstore().list(self._store, self.location.key or None)
            start = len(self.location.key) + 1 if self.location.key else 0
            return {item["path"][start:]: _facts(item) for item in chain.from_iterable(chunks)}

    def delete(self, name: str) -> None:
        """Delete an object; it may be gone already."""
        with self._errors(name), suppress(FileNotFoundError):
            _obstore().delete(self._store, self._key(name))

    def below(self, name: str) -> BucketFolder:
        """A folder below this one."""
        folder = copy(self)
        folder.location = self.location / name
        return folder

    def _key(self, name: str) -> str:
        return (self.location / name).key

    def _put(self, name: str, content: bytes | Iterator[bytes], digest: str, **how: object) -> bool:
        """Send an object; False where the condition on what is there does not hold.

        obstore does not send again what has a condition and got no answer: it may be there.
        """
        attributes = {_DIGEST_ATTRIBUTE: digest} if digest else {}
        waits_seconds = iter(_WRITE_WAITS_SECONDS)
        while True:
            try:
                with _failures():
                    _obstore().put(self._store, self._key(name), content, attributes=attributes, **how)
                return True
            except RequestFailed as error:
                has_no_answer = error.is_transient and not error.status
                if error.status in _IS_THERE:
                    return False
                wait_seconds = next(waits_seconds, None)
                if wait_seconds is None or not has_no_answer or not isinstance(content, bytes):
                    raise self._error(error, name) from None
            time.sleep(wait_seconds)
            if self.read(name, len(content) + 1) == content:
                return True

    def _put_parts(self, name: str, path: Path, digest: str, *, is_new: bool) -> bool:
        """Send a file in parts; what is raised while they are read gives them up."""

        def parts() -> Iterator[bytes]:
            with path.open("rb") as file:
                while part := file.read(_PART_BYTES):
                    self._on_bytes(len(part))
                    yield part
            if is_new:  # in a thread of its own: this one waits for obstore, which waits for the next part
                with ThreadPoolExecutor(1) as pool:
                    if pool.submit(self.look, name).result() is not None:
                        raise RequestFailed(FailureKind.STATUS, "an object of that name is there", _EXISTS)

        how = {"use_multipart": True, "chunk_size": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE}
        return self._put(name, parts(), digest, **how)

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        try:
            with _failures():
                yield
        except RequestFailed as error:
            raise self._error(error, name) from None

    def _error(self, failure: RequestFailed, name: str) -> MergePipeError:
        is_named = bool(name) and not name.startswith(_OWN_MARK)
        place = self.location / name if is_named else self.location
        detail = failure.detail
        if failure.kind is FailureKind.STATUS and failure.status == 404:  # missing objects are no errors here
            bucket, hint = f"{self.location.scheme}://{self.location.root}", "check the name, or create it"
            return NotFoundError.of("storage.not-found", bucket, f"there is no such bucket: {detail}", hint)
        if failure.refuses_credentials or failure.status == 403:
            return error_of(failure, place, 1, 0.0)
        message = f"could not be written: {detail}"
        return StorageError.of("storage.unavailable", place, message, "run again: uploaded files are kept")


def open_bucket(location: Location, stall_seconds: float = STALL_SECONDS) -> ObjectClient:
    """Return the client of the bucket of `location`."""
    return _opened(location, _connections(stall_seconds, _NO_RETRIES, _LONGEST_READ))


def _opened(location: Location, connections: Settings) -> ObjectClient:
    _obstore(location)
    try:
        return _OPENERS[location.scheme](location.root, connections)
    except MergePipeError:
        raise
    except Exception as error:  # its text may repeat the settings
        message = f"the settings of the environment cannot be used ({type(error).__name__})"
        raise StorageError.of("storage.settings", location, message, "check the store's variables") from None


def failure_of(error: BaseException) -> RequestFailed:
    """Tell how a request that obstore made failed; of its text the status, the store's code and the host are kept."""
    text = str(error)
    host = match[1] if (match := _HOST.search(text)) else "the store"
    code = _ERROR_CODE.search(text)
    suffix = f" ({code[1]})" if code else ""
    status, reason = _CLASS_STATUS.get(type(error).__name__, (0, ""))
    match = _STATUS.search(text)
    if match is not None:
        status, reason = int(match[1]), (match[2] or reason).strip()
    if status:
        answered = f" from {host}" if status >= 500 else ""
        return RequestFailed(FailureKind.STATUS, f"{status} {reason}".strip() + suffix + answered, status)
    if type(error).__name__ == "InvalidPathError":
        detail = "a key there has control characters or empty parts, which cannot be read"
        return RequestFailed(FailureKind.UNUSABLE, detail)
    for mark, kind, detail in _KINDS:
        if mark in text:
            if kind is FailureKind.UNREACHABLE:
                cause = next((f": {cause}" for word, cause in _CAUSES if word in text), "")
                detail = f"no connection to {host}{cause}"
            return RequestFailed(kind, detail)
    return RequestFailed(FailureKind.UNUSABLE, f"the store's client failed ({type(error).__name__})")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (RequestFailed, MergePipeError):
        raise
    except BaseException as error:  # of classes that only obstore knows; its panics are no Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise failure_of(error) from None


def _obstore(place: object = "object stores") -> Any:
    library("obstore.store", place, EXTRA)  # which the package does not import by itself
    return library("obstore", place, EXTRA)


def _pin(item: Mapping[str, Any]) -> Pin:
    modified: datetime = item["last_modified"]
    return Pin(item["size"], item["e_tag"] or "", format_datetime(modified.astimezone(UTC), usegmt=True))


def _facts(item: Mapping[str, Any], digest: str = "") -> ObjectFacts:
    modified: datetime = item["last_modified"]
    return ObjectFacts(item["size"], modified, item["e_tag"] or "", item["version"] or "", digest)


def _connections(stall_seconds: float, retries: Settings, longest: timedelta) -> Settings:
    """Settings of a store's connections; its own retries are settings of obstore, `longest` bounds each request."""
    read_timeout, connect_timeout = timedelta(seconds=stall_seconds), timedelta(seconds=CONNECT_SECONDS)
    client = {"connect_timeout": connect_timeout, "read_timeout": read_timeout, "timeout": longest}
    return {"client_options": client, "retry_config": dict(retries)}


def _for_endpoint(endpoint: str, connections: Settings) -> dict[str, Any]:
    client = {**connections["client_options"], "allow_http": endpoint.startswith("http://")}
    return {**connections, "client_options": client}


def _open_s3(bucket: str, connections: Settings) -> ObjectClient:
    obstore, endpoint = _obstore(), _endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    for name in (name for name, value in os.environ.items() if name.startswith("AWS_") and not value.isprintable()):
        message = "holds a line end or another control character"
        raise StorageError.of("storage.settings", name, message, "set it again without")
    settings: dict[str, Any] = {**_for_endpoint(endpoint, connections), **_aws_profile()}
    settings |= {"endpoint": endpoint} if endpoint else {}

    def signer(store: object) -> Callable[[str], str]:
        return lambda key: str(obstore.sign(store, "GET", key, SIGNED_FOR))

    store = obstore.store.S3Store(bucket, **settings)
    if not _is_set("AWS_SKIP_SIGNATURE"):
        if "access_key_id" in settings or _env(*_AWS_CREDENTIALS):
            return ObjectClient(store, signer(store))
        if not _is_set("AWS_EC2_METADATA_DISABLED") and _has_metadata_service() and _succeeds(signer(store)):
            return ObjectClient(store, signer(store))
    anonymous = obstore.store.S3Store(bucket, **settings, skip_signature=True)
    unsigned = {"access_key_id": "none", "secret_access_key": "none"}
    sign = signer(obstore.store.S3Store(bucket, **(settings | unsigned)))
    return ObjectClient(anonymous, lambda key: urlunsplit(urlsplit(sign(key))._replace(query="")))


_AWS_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


def _aws_profile() -> dict[str, str]:
    """Keys and region of the profile in use, from the files of the AWS tools; the environment's come first."""
    home, profile = Path.home() / ".aws", os.environ.get("AWS_PROFILE", "default")
    parser = configparser.RawConfigParser()
    config = os.environ.get("AWS_CONFIG_FILE") or home / "config"
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"
    parser.read([config, credentials], encoding="utf-8")
    sections = [name for name in (f"profile {profile}", profile) if parser.has_section(name)]
    values = {key: value for name in sections for key, value in parser.items(name)}
    settings = {}
    if not _env(*_AWS_CREDENTIALS) and "aws_access_key_id" in values and "aws_secret_access_key" in values:
        settings = {"access_key_id": values["aws_access_key_id"], "secret_access_key": values["aws_secret_access_key"]}
        if "aws_session_token" in values:
            settings["session_token"] = values["aws_session_token"]
    if not _env("AWS_REGION", "AWS_DEFAULT_REGION") and "region" in values:
        settings["region"] = values["region"]
    return settings


def _open_google(bucket: str, connections: Settings) -> ObjectClient:
    settings = _for_endpoint(_endpoint("GOOGLE_BASE_URL"), connections)
    is_anonymous = _is_set("GOOGLE_SKIP_SIGNATURE") or not (
        _env(*_GOOGLE_CREDENTIALS)
        or (Path.home() / ".config/gcloud/application_default_credentials.json").exists()
        or _has_metadata_service()
    )
    return ObjectClient(_obstore().store.GCSStore(bucket, **settings, skip_signature=is_anonymous), None)


_GOOGLE_CREDENTIALS: Final = (
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)  # fmt: skip


def _open_azure(container: str, connections: Settings) -> ObjectClient:
    endpoint = _endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    account = _env("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    if not account:
        hint = "set AZURE_STORAGE_ACCOUNT_NAME"
        raise StorageError.of("storage.settings", f"az://{container}", "its storage account is not known", hint)
    settings = _for_endpoint(endpoint, connections) | ({"endpoint": endpoint} if endpoint else {})
    has_credentials = _env(*_AZURE_CREDENTIALS) or _is_set("AZURE_USE_AZURE_CLI") or _has_metadata_service()
    is_anonymous = _is_set("AZURE_SKIP_SIGNATURE") or not has_credentials
    store = _obstore().store.AzureStore(container, **settings, account_name=account, skip_signature=is_anonymous)
    return ObjectClient(store, None)


_AZURE_CREDENTIALS: Final = (
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN", "AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE", "IDENTITY_ENDPOINT",
)  # fmt: skip

_OPENERS: Final[Mapping[str, Callable[[str, Settings], ObjectClient]]] = {
    "s3": _open_s3,
    "gs": _open_google,
    "az": _open_azure,
}


def _env(*names: str) -> str:
    """The first of some environment variables that is set and not empty."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _endpoint(*names: str) -> str:
    """The address that the first of some variables holds, empty for none; not shown where it is none."""
    name = next((name for name in names if os.environ.get(name)), "")
    if name and not _ADDRESS.fullmatch(os.environ[name]):
        hint = "write it like https://host:9000, or unset it"
        raise StorageError.of("storage.settings", name, "is not the address of a web server", hint)
    return os.environ.get(name, "")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _has_metadata_service() -> bool:
    """Whether this machine stands in a cloud that hands out credentials."""
    try:
        socket.create_connection(_METADATA_SERVICE, timeout=0.3).close()
    except OSError:
        return False
    return True


def _succeeds(sign: Callable[[str], str]) -> bool:
    try:
        sign("key")
    except Exception:  # of classes that only obstore knows
        return False
    return True
