"""Sends GET and HEAD over kept connections, and stores the bytes of a range straight into the caller's memory.

The standard library's client is used because it shows what decides a retry (status, `Retry-After`, how much of a body
arrived), times out on each silence instead of on a whole transfer, and takes a third of the processor time that copying
out of another client's buffers takes. Proxies are those of the environment, as `urllib` finds them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import select
import socket
import ssl
import string
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead, RemoteDisconnected
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from mergepipe.storage.remote.retry import TRANSIENT_STATUSES, FailureKind, RequestFailed

STALL_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
SLOWEST_BYTES_PER_SECOND: Final = 4 << 10
_PATIENCE_STALLS: Final = 2  # the time beyond which an answer must keep that pace, in silences that are allowed
_FRAME_BYTES: Final = 1 << 20  # of headers, chunks and trailers around a body
_MOST_TEXT: Final = 1000  # characters of a header that are kept
_CHUNK_BYTES: Final = 512 << 10
_ERROR_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")
_MOST_REDIRECTS: Final = 5
_MOST_DRAINED_BYTES: Final = 64 << 10
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_BROKEN: Final = (OSError, HTTPException, ValueError, OverflowError)
"""Exceptions that the standard library raises where an answer breaks off or is not HTTP."""
_PRIVATE_HEADERS: Final = frozenset({"authorization", "cookie", "x-amz-security-token"})
_HEADERS: Final = {"Accept-Encoding": "identity", "User-Agent": "mergepipe"}


@dataclass(frozen=True, slots=True)
class Address:
    """The target of a request. Never shown: the URL may be signed, the headers may hold a token."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Pin:
    """The version of a file that every answer must be of. Empty texts are unknown."""

    size_bytes: int
    etag: str = ""
    last_modified: str = ""

    @property
    def version(self) -> str:
        """The opaque text that `FileStatus.version` shows."""
        return f"etag:{self.etag}" if self.etag else f"modified:{self.last_modified}/{self.size_bytes}"

    @property
    def if_match(self) -> str:
        """The value of `If-Match`, empty where the server compares none: weak tags never match there."""
        return "" if not self.etag or self.etag.startswith("W/") else f'"{bare_etag(self.etag)}"'

    @property
    def names_version(self) -> bool:
        """Whether anything but the size tells the version."""
        return bool(self.etag or self.last_modified)

    def difference(self, other: Pin) -> str:
        """Say how `other` shows another version than this one, or none at all; empty where it shows the same."""
        if self.size_bytes != other.size_bytes:
            return f"it had {self.size_bytes} bytes, now {other.size_bytes}"
        if self.etag and other.etag:
            return "" if bare_etag(self.etag) == bare_etag(other.etag) else "its ETag is another one"
        if self.last_modified and other.last_modified:
            is_same = self.last_modified == other.last_modified
            return "" if is_same else f"last modified {self.last_modified}, now {other.last_modified}"
        return "an answer names no version (ETag), as the first did" if self.names_version else ""


@dataclass(frozen=True, slots=True)
class HeadAnswer:
    """The successful answer to a HEAD: the version of the file, and the address that redirects led to."""

    pin: Pin
    address: Address
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """An answer of any status with its body. Names of `headers` are in lower case.

    `address` is where it came from, `elsewhere` where it redirects to, if it does.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    address: Address
    elsewhere: Address | None = None


class HttpClient:
    """A pool of kept connections, used from many threads; one request at a time on each.

    An answer of which nothing arrives for `stall_seconds` has failed, and one that is not complete by twice that time
    and comes by less than `SLOWEST_BYTES_PER_SECOND`.
    """

    def __init__(
        self,
        stall_seconds: float = STALL_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stall_seconds = stall_seconds
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._made: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        self._tls: ssl.SSLContext | None = None
        weakref.finalize(self, _close_all, self._idle)

    def head(self, address: Address) -> HeadAnswer:
        """Ask for size and version of a file."""
        answer, _ = self._request("HEAD", address)
        answer.discard()
        answer.check_status(200)
        is_folder = urlsplit(answer.address.url).path.endswith("/")
        return HeadAnswer(answer.pin(0 if is_folder else answer.length()), answer.address, is_folder)

    def read_range(
        self,
        address: Address,
        offset: int,
        buffer: memoryview,
        pin: Pin,
        difference: Callable[[Pin], str] | None = None,
    ) -> None:
        """Fill `buffer` with the bytes of a file at `offset`, all of which lie inside the file that `pin` names.

        The version that the answer names is held against the pin, or given to `difference`, before a byte is taken.
        """
        last = offset + len(buffer) - 1
        headers = {**address.headers, "Range": f"bytes={offset}-{last}"}
        if pin.if_match:
            headers["If-Match"] = pin.if_match
        answer, _ = self._request("GET", Address(address.url, headers))
        try:
            changed = (difference or pin.difference)(answer.check_range(offset, last, pin.size_bytes))
            if changed:
                raise RequestFailed(FailureKind.CHANGED, changed)
            answer.receive(buffer)
        finally:
            answer.discard()

    def exchange(self, method: str, address: Address, limit_bytes: int) -> Exchange:
        """Send a request whose refusals the caller understands; only relative redirects are followed."""
        answer, elsewhere = self._request(method, address, within_host=True)
        return answer.exchange(limit_bytes, elsewhere)

    def abort(self) -> None:
        """Break all connections, so that requests in flight fail now and not when their server has been silent."""
        with self._lock:
            connections = list(self._made)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            _close_all(self._idle)

    def _request(self, method: str, address: Address, *, within_host: bool = False) -> tuple[_Answer, Address | None]:
        """Send a request and follow its redirects; credentials never follow to another host.

        With `within_host`, one that names a host is not followed, and its target is returned with it.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._ask(method, address)
            target = answer.redirect_target()
            if target is None:
                return answer, None
            try:
                address = _redirected(address, target)
                if within_host and urlsplit(target).netloc:
                    return answer, address
            except RequestFailed:
                answer.discard()
                raise
            answer.discard()
        raise RequestFailed(FailureKind.UNUSABLE, f"more than {_MOST_REDIRECTS} redirects")

    def _ask(self, method: str, address: Address) -> _Answer:
        parts = urlsplit(address.url)
        proxy = _proxy_for(parts)
        key = (f"{parts.scheme}://{parts.netloc}", proxy)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {**_HEADERS, **address.headers}
        if proxy and parts.scheme == "http":
            target, headers = address.url, {**headers, **_proxy_authorization(proxy)}
        while True:
            connection, is_reused = self._take(key, parts, proxy)
            try:
                connection.request(method, target, headers=headers)
                return _Answer(self, key, connection, connection.getresponse(), address)
            except _BROKEN as error:
                connection.close()
                # A server may close a kept connection at any time. It sent nothing, so nothing is charged again.
                if not (is_reused and isinstance(error, RemoteDisconnected | ConnectionResetError | BrokenPipeError)):
                    raise _transfer_failure(error, 0) from None

    def _take(self, key: tuple[str, str], parts: SplitResult, proxy: str) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        while True:
            with self._lock:
                idle = self._idle.get(key)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._connect(parts, proxy), False
            if connection.sock is not None and not _is_readable(connection.sock):
                return connection, True
            connection.close()

    def _connect(self, parts: SplitResult, proxy: str) -> HTTPConnection:
        try:
            connection = self._new_connection(parts, proxy)
        except (ValueError, HTTPException):
            raise RequestFailed(FailureKind.UNUSABLE, "not the address of a web server") from None
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            detail = (
                f"the server's certificate is not valid ({error.verify_message}); SSL_CERT_FILE names others to trust"
            )
            raise RequestFailed(FailureKind.UNUSABLE, detail) from None
        except _BROKEN as error:
            connection.close()
            via = "the proxy" if proxy else f"{parts.hostname}"
            detail = f"no connection to {via}: {_reason(error)}"
            raise RequestFailed(FailureKind.UNREACHABLE, detail, sent_bytes=0) from None
        connection.sock.settimeout(self.stall_seconds)
        connection.response_class = partial(_PacedResponse, clock=self._clock)  # type: ignore[assignment]
        with self._lock:
            self._made.add(connection)
        return connection

    def _new_connection(self, parts: SplitResult, proxy: str) -> HTTPConnection:
        seconds = self._connect_seconds
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else parts
        host, port = through.hostname or "", through.port
        if parts.scheme == "http":
            return HTTPConnection(host, port or 80, timeout=seconds)
        with self._lock:
            self._tls = self._tls or ssl.create_default_context()
        secure = HTTPSConnection(host, port or (80 if proxy else 443), timeout=seconds, context=self._tls)
        if proxy:
            secure.set_tunnel(parts.hostname or "", parts.port or 443, headers=_proxy_authorization(proxy))
        return secure

    def give_back(self, key: tuple[str, str], connection: HTTPConnection) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            self._idle.setdefault(key, []).append(connection)


class _Answer:
    """An answer whose body is not read yet."""

    def __init__(
        self,
        client: HttpClient,
        key: tuple[str, str],
        connection: HTTPConnection,
        response: HTTPResponse,
        address: Address,
    ) -> None:
        assert isinstance(response, _PacedResponse)
        self._client = client
        self._key = key
        self._connection = connection
        self._response = response
        self.address = address

    def redirect_target(self) -> str | None:
        if self._response.status not in _REDIRECTS:
            return None
        return self._response.getheader("Location")

    def length(self) -> int:
        """The size of the body that a GET would have."""
        text = self._response.getheader("Content-Length", "")
        if not _NUMBER.fullmatch(text):
            raise RequestFailed(FailureKind.UNUSABLE, "its server sends no size (Content-Length)")
        return int(text)

    def pin(self, size_bytes: int) -> Pin:
        etag, date = (self._response.getheader(name, "") for name in ("ETag", "Last-Modified"))
        if not all(text.isprintable() and len(text) <= _MOST_TEXT for text in (etag, date)):
            raise RequestFailed(FailureKind.UNUSABLE, "its ETag or Last-Modified header is malformed")
        return Pin(size_bytes, etag, date)

    def check_status(self, *good: int) -> None:
        status = self._response.status
        if status not in good:
            detail = f"{status} {_short(self._response.reason)}".strip() + self._error_code()
            wait = retry_after_seconds(self._response.getheader("Retry-After", ""))
            raise RequestFailed(FailureKind.STATUS, detail, status, wait, self._sent_bytes())

    def _sent_bytes(self) -> int | None:
        """The length of the body of an error, where the server states it."""
        text = self._response.getheader("Content-Length", "")
        return int(text) if _NUMBER.fullmatch(text) and self._response.status >= 400 else None

    def _error_code(self) -> str:
        """The code that object stores put into the body of an error: it tells an expired token from a wrong key."""
        try:
            match = _ERROR_CODE.search(self._response.read(_MOST_DRAINED_BYTES))
        except _BROKEN:
            return ""
        return f" ({match[1].decode()})" if match else ""

    def check_range(self, first: int, last: int, size_bytes: int) -> Pin:
        """Refuse an answer that is not the bytes `first` to `last` of a file; return the version that it names."""
        self.check_status(200, 206)
        if self._response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise RequestFailed(FailureKind.UNUSABLE, "its server compresses what it sends (Content-Encoding)")
        if self._response.status == 200:
            is_whole = first == 0 and last + 1 == size_bytes
            if not is_whole:
                raise RequestFailed(FailureKind.NOT_PARTIAL, f"200 for bytes {first}-{last}")
            return self.pin(self.length())
        text = self._response.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None:
            raise RequestFailed(FailureKind.WRONG_RANGE, "its Content-Range is missing or malformed")
        answered = self.pin(size_bytes if match[3] == "*" else int(match[3]))
        length = self._response.getheader("Content-Length", str(last - first + 1))
        is_asked_range = (int(match[1]), int(match[2])) == (first, last) and length == str(last - first + 1)
        if answered.size_bytes == size_bytes and not is_asked_range:
            detail = f"bytes {first}-{last} asked for, {match[1]}-{match[2]} sent, {_short(length)} bytes long"
            raise RequestFailed(FailureKind.WRONG_RANGE, detail)
        return answered

    def receive(self, buffer: memoryview) -> None:
        """Fill `buffer` from the body."""
        self._response.expect(len(buffer))
        done = 0
        while done < len(buffer):
            try:
                count = self._response.readinto(buffer[done : done + _CHUNK_BYTES])
            except _BROKEN as error:
                raise _transfer_failure(error, done) from None
            if count == 0:
                raise RequestFailed(FailureKind.CUT, "the connection ended before the answer did", received_bytes=done)
            done += count

    def exchange(self, limit_bytes: int, elsewhere: Address | None) -> Exchange:
        """Read the whole body, of at most `limit_bytes`."""
        try:
            self.refuse_transient()
            self._response.expect(limit_bytes)
            body = self._response.read(limit_bytes + 1)
            missing_bytes = self._response.length
        except _BROKEN as error:
            raise _transfer_failure(error, 0) from None
        finally:
            self.discard()
        if len(body) > limit_bytes:
            raise RequestFailed(FailureKind.UNUSABLE, f"an answer of more than {limit_bytes} bytes")
        if missing_bytes:
            raise RequestFailed(FailureKind.CUT, "the connection ended before the answer did")
        headers = {name.lower(): value for name, value in self._response.getheaders()}
        return Exchange(self._response.status, headers, body, self.address, elsewhere)

    def refuse_transient(self) -> None:
        """Raise RequestFailed where the server asks to come again later."""
        if self._response.status in TRANSIENT_STATUSES:
            self.check_status()

    def discard(self) -> None:
        """Keep the connection if little of the body is left, else close it."""
        response = self._response
        try:
            if not response.isclosed():
                response.read(_MOST_DRAINED_BYTES if response.status >= 300 else 1)
        except _BROKEN:
            self._connection.close()
            return
        if response.isclosed() and not response.will_close:
            self._client.give_back(self._key, self._connection)
        else:
            self._connection.close()


class _PacedResponse(HTTPResponse):
    """An answer that has failed when it comes too slowly, or is longer than what is expected of it."""

    def __init__(
        self,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        self._pace = _Pace(self.fp.detach(), sock, clock)
        self.fp = io.BufferedReader(self._pace)

    def expect(self, nbytes: int) -> None:
        """Take a body of `nbytes` from now on."""
        self._pace.left_bytes = nbytes + _FRAME_BYTES


class _Pace(io.RawIOBase):
    """The bytes of one answer as they come from a socket: `left_bytes` more, none of them after their time."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, clock: Callable[[], float]) -> None:
        self.left_bytes = _FRAME_BYTES
        self._raw = raw
        self._sock = sock
        self._stall_seconds = sock.gettimeout() or STALL_SECONDS
        self._clock = clock
        self._received_bytes = 0
        self._patience_ends = clock() + _PATIENCE_STALLS * self._stall_seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        """Read as from a socket."""
        if self.left_bytes <= 0:
            raise _TooLongError("the answer continues past its end")
        seconds = self._patience_ends + self._received_bytes / SLOWEST_BYTES_PER_SECOND - self._clock()
        if seconds <= 0:
            raise TimeoutError(f"its server sends less than {SLOWEST_BYTES_PER_SECOND} bytes a second")
        is_short = seconds < self._stall_seconds
        if is_short:
            self._sock.settimeout(seconds)
        try:
            count = self._raw.readinto(buffer)
        finally:
            if is_short:
                self._sock.settimeout(self._stall_seconds)
        self._received_bytes += count or 0
        self.left_bytes -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TooLongError(HTTPException):
    """An answer has more bytes than what is expected of it can have."""


def _close_all(idle: dict[tuple[str, str], list[HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
    idle.clear()


def bare_etag(etag: str) -> str:
    """The tag without quotes and the mark of a weak one: listings and answers of one store write it differently."""
    return etag.removeprefix("W/").strip('"')


def _transfer_failure(error: Exception, received_bytes: int) -> RequestFailed:
    if isinstance(error, TimeoutError):
        detail = "nothing arrived for too long" if "bytes a second" not in str(error) else str(error)
        return RequestFailed(FailureKind.STALLED, detail, received_bytes=received_bytes)
    if isinstance(error, _TooLongError):
        return RequestFailed(FailureKind.UNUSABLE, str(error), received_bytes=received_bytes)
    if isinstance(error, OSError):
        detail = f"the connection broke: {_reason(error)}"
        return RequestFailed(FailureKind.CUT, detail, received_bytes=received_bytes)
    if received_bytes == 0 and not isinstance(error, IncompleteRead):
        detail = f"the answer is not HTTP ({type(error).__name__})"
        return RequestFailed(FailureKind.UNUSABLE, detail, received_bytes=received_bytes)
    return RequestFailed(FailureKind.CUT, "the connection ended before the answer did", received_bytes=received_bytes)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, RemoteDisconnected):
        return "closed without an answer"
    return getattr(error, "strerror", None) or type(error).__name__


def _redirected(address: Address, target: str) -> Address:
    """The address that a redirect leads to; what is no ASCII in it is escaped, as browsers do."""
    try:
        escaped = quote(target.encode("latin-1"), safe=string.printable)
        url = urljoin(address.url, escaped)
        before, after = urlsplit(address.url), urlsplit(url)
        is_address = after.scheme in ("http", "https") and bool(after.hostname) and after.port != 0
    except ValueError:
        raise RequestFailed(FailureKind.UNUSABLE, "redirected to something that is not an address") from None
    if not is_address or (before.scheme == "https" and after.scheme == "http"):
        raise RequestFailed(FailureKind.UNUSABLE, f"redirected from {before.scheme} to {_short(after.scheme)}")
    if (before.scheme, before.netloc) == (after.scheme, after.netloc):
        return Address(url, address.headers)
    headers = {name: value for name, value in address.headers.items() if name.lower() not in _PRIVATE_HEADERS}
    return Address(url, headers)


def _proxy_for(parts: SplitResult) -> str:
    """The proxy that the environment names for an address, empty for none."""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    if not proxy or proxy_bypass(parts.netloc) or _is_in_networks(parts, proxies.get("no", "")):
        return ""
    scheme, has_scheme, _ = proxy.partition("://")
    if has_scheme and scheme.lower() != "http":
        detail = f"its proxy is one of {_short(scheme)}://, and only http:// ones are used"
        raise RequestFailed(FailureKind.UNREACHABLE, detail, sent_bytes=0)
    return proxy


def _is_in_networks(parts: SplitResult, networks: str) -> bool:
    """Whether an address is in one of the networks of `NO_PROXY`, as 10.0.0.0/8, which only other clients look for."""
    for network in networks.split(","):
        with contextlib.suppress(ValueError):  # one of the two is a name
            if ip_address(parts.hostname or "") in ip_network(network.strip(), strict=False):
                return True
    return False


def _proxy_authorization(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.username:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(user.encode()).decode()}


def retry_after_seconds(text: str) -> float:
    """The seconds of a `Retry-After` header, a number or a date; 0 where it is missing or malformed."""
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _short(text: str) -> str:
    """Return a server's text shortened to its printable characters, for a message."""
    return "".join(character for character in text[:80] if character.isprintable())


def _is_readable(connection: socket.socket) -> bool:
    """Whether an idle connection was closed by the server (or holds bytes that nobody asked for)."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
