"""The Hugging Face Hub as it is asked: its settings in the environment, its requests, and what its refusals mean."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from mergepipe.errors import MergePipeError, NotFoundError, RecipeError, StorageError
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import WaitingRoom
from mergepipe.storage.remote.http_client import Address, Exchange, HttpClient, Pin, bare_etag
from mergepipe.storage.remote.hub_listing import (
    HubFile,
    ModelListing,
    WholeFileCheck,
    changed,
    no_answer,
    parse_model_info,
)
from mergepipe.storage.remote.retry import RequestFailed, Transfers

DEFAULT_ENDPOINT = "https://huggingface.co"
TRUE_TEXTS = ("1", "ON", "YES", "TRUE")
TOKEN_LIMIT_BYTES = 1 << 16
ANSWER_LIMIT_BYTES: Final = 8 << 20  # 300 bytes a file: 25,000 files; parsing takes up to 30 times as much memory
RENEWED_BEFORE_SECONDS: Final = 60
_WAITING_BYTES: Final = 64 << 20  # of pieces of files that are checked as a whole
TOO_MANY_REQUESTS: Final = 429
_FOUND: Final = (301, 302, 303, 307, 308)

_INVALID_TOKEN = "Invalid credentials in Authorization header"
_LOG_IN = "`hf auth login`"


# --- settings ---


@dataclass(frozen=True, slots=True)
class HubSettings:
    """The Hub's settings in the environment. The token shows in no text of this value."""

    endpoint: str
    cache_folder: Path
    token: str = field(default="", repr=False)
    is_offline: bool = False


def hub_settings(environment: Mapping[str, str] | None = None) -> HubSettings:
    """Read the settings as the Hugging Face tools do, from their variables and the token of `hf auth login`."""
    variables = os.environ if environment is None else environment
    home = _home(variables)
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE")
    return HubSettings(
        _endpoint(variables.get("HF_ENDPOINT") or DEFAULT_ENDPOINT),
        _expanded(cache, variables) if cache else home / "hub",
        _token(variables, home),
        any(_is_true(variables.get(name)) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")),
    )


def _home(variables: Mapping[str, str]) -> Path:
    if home := variables.get("HF_HOME"):
        return _expanded(home, variables)
    caches = variables.get("XDG_CACHE_HOME")
    return (_expanded(caches, variables) if caches else _expanded("~/.cache", variables)) / "huggingface"


def _expanded(text: str, variables: Mapping[str, str]) -> Path:
    """Replace `~` by the user's home."""
    if (text == "~" or text.startswith("~/")) and variables.get("HOME"):
        return Path(variables["HOME"]) / text[2:]
    return Path(os.path.expandvars(text)).expanduser()


def _endpoint(text: str) -> str:
    """Check an endpoint. The error does not show it: it may hold a password."""
    try:
        parts = urlsplit(text)
        is_address = bool(parts.hostname) and not parts.query and not parts.fragment and "@" not in parts.netloc
    except ValueError:
        is_address = False
    if not is_address or parts.scheme not in ("http", "https"):
        hint = f"write it like {DEFAULT_ENDPOINT}, or unset it"
        raise RecipeError.of("location.invalid", "HF_ENDPOINT", "is not the address of a web server", hint)
    return text.rstrip("/")


def _token(variables: Mapping[str, str], home: Path) -> str:
    """The token of the environment, else that of `hf auth login`; empty where there is none or it is switched off."""
    if _is_true(variables.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return ""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := _cleaned(variables.get(name, "")):
            return token
    path = variables.get("HF_TOKEN_PATH")
    file = _expanded(path, variables) if path else home / "token"
    if token := _refreshed_token(file):
        return token
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if file.stat().st_size <= TOKEN_LIMIT_BYTES:
            return _cleaned(file.read_text(encoding="utf-8"))
    return ""


def _refreshed_token(file: Path) -> str:
    """The token of a file as the Hub's own package gives it, which renews those of a login by browser."""
    if not file.is_file():
        return ""
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return ""
    if Path(constants.HF_TOKEN_PATH) != file:  # it was imported under other settings
        return ""
    return _cleaned(get_token() or "")


def _cleaned(token: str) -> str:
    """A token without the line ends that editors leave; empty where it could not be sent in a header."""
    stripped = token.replace("\r", "").replace("\n", "").strip()
    return stripped if stripped.isascii() and stripped.isprintable() else ""


def _is_true(text: str | None) -> bool:
    return text is not None and text.upper() in TRUE_TEXTS


# --- requests ---


class HubApi:
    """Asks the Hub at the endpoint of the settings, with their token, which goes to no other host."""

    def __init__(self, settings: HubSettings, transfers: Transfers, client: HttpClient) -> None:
        self._endpoint = settings.endpoint
        self._has_token = bool(settings.token)
        self._headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        self._transfers = transfers
        self._client = client
        self.waiting_room = WaitingRoom(_WAITING_BYTES)

    def model_info(self, location: Location, revision: str) -> ModelListing:
        """Ask for the commit of a revision, and all its files with sizes and digests."""
        url = f"{self._endpoint}/api/models/{location.root}/revision/{quote(revision, safe='')}?blobs=true"
        answer = self._transfers.ask(location, lambda: self._exchange("GET", url))
        if answer.status != 200:
            raise self._refusal(location, answer)
        return parse_model_info(location.root, location, answer.body)

    def resolve(self, location: Location, commit: str, file: HubFile) -> Address:
        """Ask where the bytes of a file of a commit are, and hold the answer against the pin. Makes one attempt."""
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
            if error.status != TOO_MANY_REQUESTS:
                raise
            detail = f"{error.detail} (the Hub's rate limit is reached; it is higher with a token)"
            raise replace(error, detail=detail) from None

    def _refusal(self, location: Location, answer: Exchange) -> MergePipeError:
        return refusal(location, answer.status, answer.headers, has_token=self._has_token)


class HubSource:
    """A pinned file of the Hub on the network, resolved at its first read, and again when its address has expired.

    One value serves all that read the file, from many threads: each address is asked for once.
    """

    def __init__(self, api: HubApi, client: HttpClient, location: Location, commit: str, file: HubFile) -> None:
        self.location = location
        self.file = file
        self._commit = commit
        self._api = api
        self._client = client
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
        return address is not None and expires_at(address.url) > time.time() + RENEWED_BEFORE_SECONDS

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


# --- refusals ---


def refusal(location: Location, status: int, headers: Mapping[str, str], *, has_token: bool) -> MergePipeError:
    """Make the error for an answer of the Hub that is no success. `headers` has names in lower case."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    model = location.root
    if code == "GatedRepo":
        hint = f"accept its terms at hf.co/{model}, then {_LOG_IN}"
        why = "your account has not been granted access" if has_token else "no token was sent"
        return StorageError.of("hub.gated", location, f"is a gated model, and {why}", hint)
    if code == "RevisionNotFound":
        text = f"the model has no branch, tag or commit '{location.revision}'"
        hint = f"see hf.co/{model}/tree/main for what there is"
        if location.key:
            written = f"{location.revision}/{location.key}"
            hint = f"{hint}; if '{written}' is the revision, write hf://{model}@{quote(written, safe='')}"
        return NotFoundError.of("model.not-found", location, text, hint)
    if code == "EntryNotFound":
        return NotFoundError.of("storage.not-found", location, "no such file", f"see hf.co/{model}/tree/main")
    if status == 401 and message == _INVALID_TOKEN:
        hint = f"renew it by {_LOG_IN}, or correct HF_TOKEN"
        return StorageError.of("storage.credentials", location, "the Hub does not accept the token (401)", hint)
    if status in (401, 404) and code in ("", "RepoNotFound"):
        return _no_model(location, status, has_token)
    if status == 403:
        text, hint = f"the Hub refuses access (403): {_shown(message)}", "see that the token has the right to read it"
        return StorageError.of("storage.credentials", location, text, hint)
    message = f"the Hub answers {status}: {_shown(message)}"
    return StorageError.of("storage.unavailable", location, message, "run again later")


def offline(location: Location, why: str) -> MergePipeError:
    """Make the error for a model that is needed from the network where there is none."""
    model, name = location.root, location.root.rpartition("/")[2]
    revision = f" --revision {location.revision}" if location.revision else ""
    hint = f"where there is a network, run `hf download {model}{revision} --local-dir {name}`, and name that folder"
    return NotFoundError.of("hub.offline", location, f"{why}, and it is not in the local cache of the Hub", hint)


def _no_model(location: Location, status: int, has_token: bool) -> MergePipeError:
    hint = f"check the name at hf.co/{location.root}; a folder of this machine is written with ./ or / before it"
    if not has_token:
        hint = f"{hint}; for a private model, {_LOG_IN}"
    message = f"the Hub has no model '{location.root}' that this token may see ({status})"
    if not has_token:
        message = f"the Hub has no public model '{location.root}' ({status})"
    return NotFoundError.of("model.not-found", location, message, hint)


def _shown(message: str) -> str:
    printable = "".join(character for character in message if character.isprintable())
    return printable[:200] or "no reason given"
