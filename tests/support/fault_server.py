"""A web server on the loopback with a script of faults, a link of given speed, and a count of what it sent.

Serves a dictionary of files with ranges, ETags and conditions, as HTTP says. Other protocols derive from `FaultServer`
and answer their own requests in `answer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_SEND_BYTES: Final = 256 << 10
_SLOW_SEND_BYTES: Final = 16 << 10
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True)
class Link:
    """The link that all connections share: each answer waits for the latency, all bodies together keep to the rate."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was received."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def range(self) -> tuple[int, int | None] | None:
        """First and last byte of the range that is asked for."""
        match = _RANGE.fullmatch(self.headers.get("range", ""))
        return (int(match[1]), int(match[2]) if match[2] else None) if match else None

    @property
    def nbytes(self) -> int:
        """How many bytes a range asks for that has an end."""
        match self.range:
            case (int(first), int(last)):
                return last + 1 - first
        raise AssertionError(f"not a range with an end: {self.headers.get('range')}")


@dataclass(slots=True)
class Answer:
    """An answer. `cut_after_bytes` closes the connection there; `stall_seconds` of silence come before the cut."""

    status: int
    body: bytes | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    stall_seconds: float = 0.0


Fault = Callable[[Request, Answer], Answer]
"""Turns the right answer to a request into a wrong one."""


def status(code: int, **headers: str) -> Fault:
    """An error status instead of the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _request, _answer: Answer(code, b"<Error><Code>Scripted</Code></Error>", named)


def cut(after_bytes: int) -> Fault:
    """The connection closes within the body."""

    def change(_request: Request, answer: Answer) -> Answer:
        answer.cut_after_bytes = after_bytes
        return answer

    return change


def stall(after_bytes: int, seconds: float) -> Fault:
    """Nothing more is sent for some time within the body; then the connection closes."""

    def change(_request: Request, answer: Answer) -> Answer:
        answer.cut_after_bytes, answer.stall_seconds = after_bytes, seconds
        return answer

    return change


def with_headers(**headers: str | None) -> Fault:
    """Some headers replaced, or left out where they are None: a wrong `Content-Range`, another `ETag`."""

    def change(_request: Request, answer: Answer) -> Answer:
        for name, value in headers.items():
            answer.headers.pop(name.replace("_", "-"), None)
            if value is not None:
                answer.headers[name.replace("_", "-")] = value
        return answer

    return change


def no_fault(_request: Request, answer: Answer) -> Answer:
    """The right answer."""
    return answer


class FaultServer:
    """Serves `files` by their paths without a leading slash, on a port of its own, until the context ends.

    Each GET of a file takes the next of `faults`; none are left: right answers. `requests` and `sent_bytes` (bodies
    only, as far as they were handed to the system) say what was asked and sent, `most_at_once` how many requests were
    being answered at the same time, `clients` from where. `raw_answer` replaces whole answers; `raw` does where it
    returns pieces, which may have no end.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        faults: Iterable[Fault] = (),
        link: Link | None = None,
        *,
        has_etags: bool = True,
    ) -> None:
        self.files: MutableMapping[str, bytes] = dict(files)
        self.faults: list[Fault] = list(faults)
        self.redirects: dict[str, str] = {}
        self.requests: list[Request] = []
        self.sent_bytes = 0
        self.sent_by_path: Counter[str] = Counter()
        self.most_at_once = 0
        self.clients: set[tuple[str, int]] = set()
        self.hang_up_on_next_request = False
        self.raw_answer = b""
        self.raw: Callable[[Request], Iterable[bytes] | None] = lambda _: None
        self.has_etags = has_etags
        self._n_active = 0
        self._modified = {path: time.time() - 1000 for path in self.files}
        self._etags: dict[tuple[str, int], str] = {}
        self._link = link or Link()
        self._lock = threading.Lock()
        self._link_free_at = 0.0
        self._silences = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._silences.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def reads(self) -> list[Request]:
        """The GET requests for ranges."""
        return [request for request in self.requests if request.method == "GET" and request.range is not None]

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return self._n_active > 0

    def stop_silence(self) -> None:
        """End all silences that are under way."""
        self._silences.set()
        while self.is_answering:
            time.sleep(0.001)
        self._silences.clear()

    def all_sent_bytes(self) -> int:
        """Return `sent_bytes` once no answer is under way."""
        while self._n_active:
            time.sleep(0.001)
        return self.sent_bytes

    def put(self, path: str, content: bytes) -> None:
        """Replace a file by another version."""
        with self._lock:
            self.files[path] = content
            self._modified[path] = self._modified.get(path, time.time() - 1000) + 1

    def answer(self, request: Request) -> Answer:
        """The right answer to a request; protocols override it."""
        return self.file_answer(request, request.path)

    def file_answer(self, request: Request, path: str) -> Answer:
        """Answer a GET or HEAD of a file as HTTP says."""
        if path in self.redirects:
            return Answer(302, headers={"Location": self.redirects[path]})
        content = self.files.get(path)
        if content is None:
            is_folder = not path.endswith("/") and any(name.startswith(f"{path}/") for name in self.files)
            return Answer(301, headers={"Location": f"/{quote(path)}/"}) if is_folder else Answer(404, b"nothing there")
        headers = self._version_headers(path, content)
        condition = request.headers.get("if-match", "")
        if condition and condition != headers.get("ETag"):
            return Answer(412, b"another version")
        if request.range is None:
            return Answer(200, content, headers)
        first, last = request.range
        last = len(content) - 1 if last is None else min(last, len(content) - 1)
        if first > last:
            return Answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return Answer(206, memoryview(content)[first : last + 1], headers)

    def etag(self, path: str) -> str:
        """The tag of a file's version, as a header has it."""
        content = self.files[path]
        if (path, id(content)) not in self._etags:
            self._etags[path, id(content)] = f'"{hashlib.md5(content).hexdigest()}"'
        return self._etags[path, id(content)]

    def _version_headers(self, path: str, content: bytes) -> dict[str, str]:
        del content
        headers = {"Last-Modified": formatdate(self._modified[path], usegmt=True), "Accept-Ranges": "bytes"}
        return headers | ({"ETag": self.etag(path)} if self.has_etags else {})

    def serve(self, handler: _Handler) -> None:
        """Answer one request, with the next fault if it is for the bytes of a file."""
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in handler.headers.items()}
        path = handler.path if parts.netloc else unquote(parts.path.lstrip("/"))  # whole where it is asked as a proxy
        body = handler.rfile.read(int(headers.get("content-length", "0")))
        request = Request(handler.command, path, query, headers, body)
        with self._lock:
            self.requests.append(request)
            self.clients.add(handler.client_address)
            hangs_up, self.hang_up_on_next_request = self.hang_up_on_next_request, False
            takes_fault = self.faults and request.method == "GET" and request.range is not None
            fault = self.faults.pop(0) if takes_fault else no_fault
            self._n_active += 1
            self.most_at_once = max(self.most_at_once, self._n_active)
        try:
            pieces = [self.raw_answer] if hangs_up or self.raw_answer else self.raw(request)
            if pieces is not None:
                handler.close_connection = True
                for piece in pieces:
                    handler.wfile.write(piece)
            else:
                self._respond(handler, request, fault)
        finally:
            with self._lock:
                self._n_active -= 1

    def _respond(self, handler: _Handler, request: Request, fault: Fault) -> None:
        if self._link.latency_seconds:
            time.sleep(self._link.latency_seconds)
        self._send(handler, request, fault(request, self.answer(request)))

    def _send(self, handler: _Handler, request: Request, answer: Answer) -> None:
        body = memoryview(answer.body)
        answer.headers.setdefault("Content-Length", str(len(body)))
        lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Scripted')}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        handler.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        if request.method == "HEAD":
            return
        end = len(body) if answer.cut_after_bytes is None else min(answer.cut_after_bytes, len(body))
        self._send_body(handler, body[:end])
        with self._lock:
            self.sent_by_path[request.path] += end
        if answer.cut_after_bytes is not None:
            self._silences.wait(answer.stall_seconds)
            handler.close_connection = True

    def _send_body(self, handler: _Handler, body: memoryview) -> None:
        is_slow = self._link.bytes_per_second != float("inf")
        step = _SLOW_SEND_BYTES if is_slow else _SEND_BYTES
        for start in range(0, len(body), step):
            part = body[start : start + step]
            if is_slow:
                self._wait_for_link(len(part))
            handler.wfile.write(part)
            with self._lock:
                self.sent_bytes += len(part)

    def _wait_for_link(self, nbytes: int) -> None:
        with self._lock:
            begins = max(self._link_free_at, time.monotonic())
            self._link_free_at = begins + nbytes / self._link.bytes_per_second
            ends = self._link_free_at
        time.sleep(max(0.0, ends - time.monotonic()))


class BucketServer(FaultServer):
    """Speaks the reads of S3, Google Cloud Storage and Azure: files lie at `bucket/key`, listings are XML.

    Every listing takes `listing_fault`.
    """

    listing_fault: Fault = staticmethod(no_fault)

    def answer(self, request: Request) -> Answer:
        if request.query.get("list-type") == "2":
            return self._list(request, _S3_LISTING)
        if request.query.get("comp") == "list":
            return self._list(request, _AZURE_LISTING)
        return self.file_answer(request, request.path)

    def _list(self, request: Request, form: Mapping[str, str]) -> Answer:
        answer = Answer(200, self._listing(request, form), {"Content-Type": "application/xml"})
        return self.listing_fault(request, answer)

    def _listing(self, request: Request, form: Mapping[str, str]) -> bytes:
        bucket, prefix = request.path.strip("/"), request.query.get("prefix", "")
        keys = [path.removeprefix(f"{bucket}/") for path in sorted(self.files) if path.startswith(f"{bucket}/")]
        names = [(key, key.removeprefix(prefix)) for key in keys if key.startswith(prefix)]
        folders = sorted({f"{prefix}{name.split('/')[0]}/" for _, name in names if "/" in name})
        objects = [key for key, name in names if "/" not in name]
        parts = [form["head"]]
        for key in objects:
            path = f"{bucket}/{key}"
            moment, size = self._modified[path], len(self.files[path])
            iso = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(moment))
            times = {"iso": iso, "http": formatdate(moment, usegmt=True)}
            parts.append(form["object"].format(key=escape(key), size=size, etag=escape(self.etag(path)), **times))
        parts += [form["folder"].format(key=escape(folder)) for folder in folders]
        return "".join([*parts, form["tail"]]).encode()


_S3_LISTING: Final = {
    "head": '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>false</IsTruncated>',
    "object": (
        "<Contents><Key>{key}</Key><LastModified>{iso}</LastModified><ETag>{etag}</ETag><Size>{size}</Size></Contents>"
    ),
    "folder": "<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>",
    "tail": "</ListBucketResult>",
}
_AZURE_LISTING: Final = {
    "head": '<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>',
    "object": (
        "<Blob><Name>{key}</Name><Properties><Last-Modified>{http}</Last-Modified><Etag>{etag}</Etag>"
        "<Content-Length>{size}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
        "<BlobType>BlockBlob</BlobType></Properties></Blob>"
    ),
    "folder": "<BlobPrefix><Name>{key}</Name></BlobPrefix>",
    "tail": "</Blobs><NextMarker/></EnumerationResults>",
}
_REASONS: Final = {
    200: "OK", 206: "Partial Content", 301: "Moved Permanently", 302: "Found", 401: "Unauthorized", 403: "Forbidden",
    404: "Not Found", 409: "Conflict",
    412: "Precondition Failed", 416: "Range Not Satisfiable", 429: "Too Many Requests",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: FaultServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self.server.owner.serve(self)

    do_HEAD = do_CONNECT = do_POST = do_PUT = do_DELETE = do_GET

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
