"""Writing objects larger than memory: conditions, parts and bounded buffers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest

from mergepipe.storage.location import Location
from mergepipe.storage.remote import objects
from mergepipe.storage.remote.objects import BucketFolder
from support.bucket_outputs import bucket_server, new_prefix
from support.remote_stores import set_environment

PART_BYTES = 5 << 20  # the smallest that S3 takes
LARGE_BYTES = 256 << 20
HELD_BYTES = 192 << 20  # eight parts of 16 MiB, the one that is read, and what the client allocates beside them


class Sink(BaseHTTPRequestHandler):
    """An S3 that forgets what it is sent, and in which nothing is."""

    protocol_version = "HTTP/1.1"
    received_bytes = 0
    largest_bytes = 0

    def do_HEAD(self) -> None:
        self._answer(404)

    def do_POST(self) -> None:
        self._drain()
        self._answer(200, b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId><ETag>e</ETag></R>")

    def do_PUT(self) -> None:
        nbytes = self._drain()
        type(self).received_bytes += nbytes
        type(self).largest_bytes = max(self.largest_bytes, nbytes)
        self._answer(200)

    do_GET = do_HEAD

    def _drain(self) -> int:
        left = nbytes = int(self.headers["Content-Length"] or 0)
        while left:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        return nbytes

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def sink() -> Iterator[str]:
    Sink.received_bytes = Sink.largest_bytes = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def own_bytes() -> int:
    """The memory of this process that no file backs."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


@contextmanager
def largest_growth() -> Iterator[list[int]]:
    """The most that `own_bytes` grows while the context lasts."""
    before, growth, ended = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            growth[0] = max(growth[0], own_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        ended.set()
        watcher.join()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["create", "overwrite"])
def test_file__larger_than_a_request_is_sent_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    large = tmp_path / "large"
    with large.open("xb") as file:
        file.truncate(LARGE_BYTES)
    with sink() as url:
        set_environment(monkeypatch, url)
        folder = BucketFolder(Location.parse("s3://bucket/a"))
        with largest_growth() as growth:
            getattr(folder, how)("large", large)
    assert Sink.received_bytes == LARGE_BYTES
    assert Sink.largest_bytes <= 16 << 20
    assert growth[0] < HELD_BYTES


def test_file__of_many_parts_is_created_only_where_nothing_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "_PART_BYTES", PART_BYTES)
    large, content = tmp_path / "large", bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"
    large.write_bytes(content)
    with bucket_server() as server:
        folder = BucketFolder(Location.parse(new_prefix(server, monkeypatch)))
        assert folder.create("a", large, "digest")
        facts = folder.look("a")
        assert facts is not None
        assert (facts.size_bytes, facts.digest) == (len(content), "digest")
        assert folder.read("a", len(content)) == content
        assert not folder.create("a", large, "other")
        assert folder.look("a") == facts
        put, calls = obstore.put, []

        def losing(*arguments: Any, **options: Any) -> None:
            calls.append(arguments)
            if len(calls) > 1:  # nothing arrives, then no answer does
                put(*arguments, **options)
            if len(calls) < 3:
                raise RuntimeError("error sending request")

        monkeypatch.setattr(obstore, "put", losing)
        assert [folder.create("b", b"ours"), folder.create("b", b"theirs")] == [True, False]
        assert (folder.read("b", 100), len(calls)) == (b"ours", 3)


def test_file__that_appears_while_its_parts_are_sent_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "_PART_BYTES", PART_BYTES)
    large = tmp_path / "large"
    large.write_bytes(bytes(2 * PART_BYTES))
    with bucket_server() as server:
        prefix = new_prefix(server, monkeypatch)
        location = Location.parse(prefix)
        folder = BucketFolder(location)

        def put_theirs(_: int) -> None:
            other = threading.Thread(target=folder.overwrite, args=("a", b"theirs"))
            other.start()
            other.join()

        assert not BucketFolder(location, put_theirs).create("a", large)
        assert folder.read("a", 100) == b"theirs"
        for _ in range(6000):  # a minute at most
            if not (left := server.unfinished("bucket", f"{location.key}/")):
                break
            time.sleep(0.01)
        assert left == []
