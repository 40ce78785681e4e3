"""Makes checksums hold again in damaged files, so that readers are tested behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from blake3 import blake3

from mergepipe.core.strict_json import digest_of
from mergepipe.operators.statistics import BLOCK_RECORD
from support.torch_bytes import Member, zip_bytes

_OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,6})\s*\]')
_COUNTS = [
    re.compile(rb'"%b":\s*\[?\s*(\d{1,6}(?:,\s*\d{1,6})*)\s*[\],}]' % name)
    for name in (b"block_elements", b"elements", b"cuts")
]
_CHECK_DIGITS = 16


def safetensors_file(header: bytes) -> bytes:
    """A file with this header, and as many bytes of tensors as it seems to speak of."""
    stops = [int(found) for found in _OFFSETS.findall(header)]
    return len(header).to_bytes(8, "little") + header + bytes(min(max(stops, default=0), 1 << 18))


def torch_file(pickled: bytes) -> bytes:
    """An archive around a pickle, with some storages."""
    storages = [Member(f"archive/data/{i}", bytes(range(48))) for i in range(3)]
    head = [Member("archive/data.pkl", pickled), Member("archive/byteorder", b"little")]
    return zip_bytes([*head, *storages, Member("archive/version", b"3\n")])


def _sealed(change: Callable[[dict[str, Any]], None], indent: int | None = 1) -> Callable[[bytes], bytes]:
    def seal(raw: bytes) -> bytes:
        try:
            document = json.loads(raw)
            change(document)
            return json.dumps(document, indent=indent).encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return raw  # too damaged to have a digest

    return seal


def _digest_plan(document: dict[str, Any]) -> None:
    content = {key: value for key, value in document.items() if key != "digest"}
    content["models"] = [{**model, "path": "", "files": []} for model in content["models"]]
    document["digest"] = digest_of(content)


def _digest_manifest(document: dict[str, Any]) -> None:
    identity = {key: document[key] for key in ("version", "recipe", "seed", "files")}
    document["sid"] = digest_of(identity)
    _digest_all(document)


def _digest_all(document: dict[str, Any]) -> None:
    document["digest"] = digest_of({key: value for key, value in document.items() if key != "digest"})


seal_plan = _sealed(_digest_plan)
seal_manifest = _sealed(_digest_manifest)
seal_store_header = _sealed(_digest_all)


def seal_log(payloads: bytes) -> bytes:
    """Lines with a chained checksum in front of each."""
    check, lines = "", []
    for payload in payloads.split(b"\n"):
        check = blake3(check.encode() + payload).hexdigest(_CHECK_DIGITS // 2)
        lines.append(check.encode() + b" " + payload + b"\n")
    return b"".join(lines)


def log_payloads(raw: bytes) -> bytes:
    """The inverse of `seal_log`."""
    return b"\n".join(line[_CHECK_DIGITS + 1 :] for line in raw.splitlines())


def seal_statistics_file(content: bytes) -> bytes:
    """Append the checksum that a file of statistics ends with."""
    return content + blake3(content).digest()


def statistics_file(header: bytes) -> bytes:
    """A file of statistics with this header, and as many bytes of rows as it seems to speak of."""
    block_elements, elements, cuts = (
        [int(number) for found in pattern.findall(header) for number in found.split(b",")] for pattern in _COUNTS
    )
    n_blocks = sum(-(-n // max([1, *block_elements[:1]])) for n in elements)
    rows = bytes(min(len(elements) * 24 + sum(cuts) * 20 + n_blocks * BLOCK_RECORD.itemsize, 1 << 18))
    return seal_statistics_file(b"MPSTATS\n" + len(header).to_bytes(8, "little") + header + rows)


def lines_of(content: bytes) -> Sequence[bytes]:
    """Lines with their ends."""
    return content.splitlines(keepends=True)


def fixed(size: int, head: int = 0) -> Callable[[bytes], Sequence[bytes]]:
    """Cut into a head and records of `size` bytes."""

    def split(content: bytes) -> Sequence[bytes]:
        return [content[:head], *(content[at : at + size] for at in range(head, len(content), size))]

    return split


def instructions_of(pickled: bytes) -> Sequence[bytes]:
    """The instructions of a pickle; what cannot be read as some is one piece."""
    import pickletools

    starts = []
    try:
        starts += [place for _, _, place in pickletools.genops(pickled) if place is not None]
    except Exception:
        starts = starts or [0]
    return [pickled[a:b] for a, b in zip(starts, [*starts[1:], len(pickled)], strict=True)]


def messages_of(content: bytes) -> Sequence[bytes]:
    """The fields of a protobuf message, as far as they can be read."""
    at, found = 0, []
    while at + 2 <= len(content) and content[at] & 7 == 2 and content[at + 1] < 0x80:
        stop = at + 2 + content[at + 1]
        found.append(content[at:stop])
        at = stop
    return [*found, content[at:]]
