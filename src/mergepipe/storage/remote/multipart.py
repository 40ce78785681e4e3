"""Parts of objects on S3 whose upload never ended: no listing of objects shows them, and they are billed.

obstore neither lists nor gives up uploads that it does not make itself. These requests are signed here (AWS Signature 4
in the query), from an address that obstore has signed for the same bucket and the secret key of the environment: a role
of the machine, whose key only obstore knows, cannot be used.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit
from xml.sax.saxutils import unescape

from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.remote.http_client import Address, Exchange, HttpClient
from mergepipe.storage.remote.retry import Failure, FailureKind, RequestFailed, Transfers

_ANSWER_BYTES: Final = 4 << 20
_MOST_PAGES: Final = 1000
_UPLOAD: Final = re.compile(rb"<Upload>(.*?)</Upload>", re.DOTALL)
_PART_SIZE: Final = re.compile(rb"<Size>([0-9]{1,18})</Size>")
_ENTITIES: Final = {"&quot;": '"', "&apos;": "'"}
_GONE: Final = 404


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    """An upload of an object in parts that has not ended."""

    key: str
    upload_id: str
    initiated: datetime


@dataclass(frozen=True, slots=True)
class SignedBucket:
    """A bucket on S3: an address of its object `x` that obstore signed, and the secret key that goes with it."""

    signed_url: str = field(repr=False)
    secret: str = field(repr=False)

    def address(self, method: str, key: str = "", **query: str) -> Address:
        """Sign a request for the bucket or one of its keys, for as long as the other address is good."""
        parts = urlsplit(self.signed_url)
        path = parts.path.removesuffix("x") + quote(key)
        path = path if key else path.rstrip("/") or "/"
        signing = {name: value for name, value in parse_qsl(parts.query) if name != "X-Amz-Signature"}
        pairs = sorted((quote(name, safe=""), quote(value, safe="")) for name, value in {**signing, **query}.items())
        canonical = "&".join(f"{name}={value}" for name, value in pairs)
        request = f"{method}\n{path}\n{canonical}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
        scope = signing["X-Amz-Credential"].partition("/")[2]
        digest = sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{signing['X-Amz-Date']}\n{scope}\n{digest}"
        secret = f"AWS4{self.secret}".encode()
        for step in scope.split("/"):
            secret = hmac.digest(secret, step.encode(), "sha256")
        signature = hmac.digest(secret, text.encode(), "sha256").hex()
        return Address(urlunsplit(parts._replace(path=path, query=f"{canonical}&X-Amz-Signature={signature}")))


class MultipartUploads:
    """The unfinished uploads of one bucket. Every method raises as `Transfers.ask`."""

    def __init__(self, location: Location, bucket: SignedBucket) -> None:
        self._location = location
        self._bucket = bucket
        self._client = HttpClient()
        self._transfers = Transfers(Ledger())

    def list_all(self) -> Iterator[MultipartUpload]:
        """All whose keys lie below the location."""
        prefix = f"{self._location.key}/" if self._location.key else ""
        markers: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            body = self._ask("GET", "", uploads="", prefix=prefix, **markers).body
            uploads = [_parse(match[1]) for match in _UPLOAD.finditer(body)]
            yield from (upload for upload in uploads if upload is not None and upload.key.startswith(prefix))
            following = {
                "key-marker": _text(body, "NextKeyMarker"),
                "upload-id-marker": _text(body, "NextUploadIdMarker"),
            }
            if _text(body, "IsTruncated") != "true" or following == markers:
                return
            markers = following

    def size_bytes(self, upload: MultipartUpload) -> int:
        """The bytes of its parts; of the first thousand parts where it has more."""
        answer = self._ask("GET", upload.key, uploadId=upload.upload_id)
        return sum(int(match[1]) for match in _PART_SIZE.finditer(answer.body))

    def abort(self, upload: MultipartUpload) -> None:
        """Remove its parts; it may have ended already."""
        self._ask("DELETE", upload.key, uploadId=upload.upload_id)

    def _ask(self, method: str, key: str, **query: str) -> Exchange:
        def request() -> Exchange:
            answer = self._client.exchange(method, self._bucket.address(method, key, **query), _ANSWER_BYTES)
            is_gone = answer.status == _GONE and bool(key)
            if answer.status not in (200, 204) and not is_gone:
                raise RequestFailed(Failure(FailureKind.STATUS, f"{answer.status}{_code(answer.body)}", answer.status))
            return answer

        return self._transfers.ask(self._location, request)


def _parse(block: bytes) -> MultipartUpload | None:
    """Read an entry of the listing; None where it is not complete."""
    key, upload_id, initiated = (_text(block, name) for name in ("Key", "UploadId", "Initiated"))
    try:
        moment = datetime.fromisoformat(initiated)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return MultipartUpload(key, upload_id, moment) if key and upload_id else None


def _text(block: bytes, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>".encode(), block)
    return unescape(match[1].decode("utf-8", "replace"), _ENTITIES) if match else ""


def _code(body: bytes) -> str:
    code = _text(body, "Code")
    return f" ({code[:60]})" if code.isalnum() else ""
