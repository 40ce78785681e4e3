"""moto's S3 on the loopback: the true conditions of object stores, in threads of this process."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection
from typing import Final
from urllib.parse import urlsplit

ACCESS_KEY: Final = "test-access-key"
SECRET_KEY: Final = "test-secret-key"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server, and how files get there."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """The settings by which the tools of AWS find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def make_bucket(self, bucket: str) -> None:
        self._ask("PUT", f"/{bucket}")

    def unfinished(self, bucket: str, prefix: str) -> list[str]:
        """The keys of uploads that have not ended, by name below a prefix."""
        keys = re.findall(b"<Key>(.*?)</Key>", self._ask("GET", f"/{bucket}?uploads"))
        return sorted(key.decode().removeprefix(prefix) for key in keys if key.decode().startswith(prefix))

    def _ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        scope = f"{ACCESS_KEY}/20200101/us-east-1/s3/aws4_request"
        signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"}
        connection.request(method, target, body, signed)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status == 200, (answer.status, content)
        return content

    def keys(self, bucket: str) -> list[str]:
        """The keys of all objects of a bucket, looked up in this process: moto takes long to list many."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return sorted(s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys)

    def put(self, bucket: str, files: Mapping[str, bytes]) -> None:
        """Store objects by their keys, or other versions of them."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            bucket,
            endpoint=self.url,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
        )
        for key, content in files.items():
            obstore.put(store, key, content)


@cache
def _remember_services() -> None:
    """Let moto find out once which of its services a host is: at every request that takes longer than the answer."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Dispatcher

    Dispatcher.get_backend_for_host = cache(Dispatcher.get_backend_for_host)


@cache
def _write_one_at_a_time() -> None:
    """Make conditional writes atomic, as object stores have them: moto looks, and writes later, in many threads."""
    from moto.s3.responses import S3Response

    lock = threading.RLock()

    def alone(method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> object:
            with lock:
                return method(*arguments, **keywords)

        return call

    for name in ("_key_response_put", "_key_response_post"):
        setattr(S3Response, name, alone(getattr(S3Response, name)))


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run moto's S3 on a free port of 127.0.0.1."""
    from moto.server import ThreadedMotoServer

    _remember_services()
    _write_one_at_a_time()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()
