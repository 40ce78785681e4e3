"""Part `remote`: merges of a bucket, raw and packed, and plain reading behind a link of given speed."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.process import ProcessCost, measure_checked
from benchmarks.recipes import DENSITY, recipe_text
from benchmarks.reproduce.family_recipes import SYNTHETIC_TEXT
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.remote.pinned_store import open_store
from support.families import FamilyPaths
from support.fault_server import BucketServer, Link

_K = 6
_CONNECTIONS = 32
_LINK, _TOY_LINK = Link(0.02, 100e6), Link(0.002, 20e6)
_FAST_LINK = Link(0.02, 1.25e9)
_MERGES: Mapping[str, tuple[str, ...]] = {"full": (), "budget 10 %": ("--budget", "10%")}
_PACKED, _READING = "full, packed", "reading alone, 10 Gbit/s"
_PIECE_BYTES = 32 << 20
_SENT_BYTES = 64 << 10
_QUEUE_SECONDS = 0.005


class MappedServer(BucketServer):
    """Serves models without reading them into memory; the tags of files are their sizes.

    Senders run ahead of the link by a few milliseconds, as they do into the queues of a real one, so that a thread that
    wakes late does not slow the link down.
    """

    def __init__(self, models: tuple[Path, ...], link: Link) -> None:
        super().__init__({}, link=link)
        for model in models:
            for file in sorted(model.iterdir()):
                self.put(f"bucket/{model.name}/{file.name}", _mapped(file))

    def etag(self, path: str) -> str:
        """The tag of a file that never changes."""
        return f'"{len(self.files[path])}"'

    def _send_body(self, handler: Any, body: memoryview) -> None:
        for start in range(0, len(body), _SENT_BYTES):
            part = body[start : start + _SENT_BYTES]
            self._wait_for_link(len(part))
            handler.wfile.write(part)
        with self._lock:
            self.sent_bytes += len(body)
        if isinstance(body.obj, mmap.mmap):  # a merge that this process starts inherits its peak memory
            body.obj.madvise(mmap.MADV_DONTNEED)

    def _wait_for_link(self, nbytes: int) -> None:
        with self._lock:
            begins = max(self._link_free_at, time.monotonic())
            self._link_free_at = begins + nbytes / self._link.bytes_per_second
            sleep_seconds = self._link_free_at - time.monotonic() - _QUEUE_SECONDS
        time.sleep(max(0.0, sleep_seconds))


def _mapped(file: Path) -> bytes:
    """The content of a file, as far as a server asks for it: a memory map, which slices as bytes do."""
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return b""
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)  # type: ignore[return-value]


def _needs(size: Size) -> Needs:
    return Needs((2 * _K + 2) * size.model_bytes, 2.5 * (_K + 1) * size.model_bytes / _LINK.bytes_per_second / 60)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, _K)
    link, fast_link = (_TOY_LINK, _TOY_LINK) if size.is_toy else (_LINK, _FAST_LINK)
    for name, options in _MERGES.items():
        results.measure(name, partial(_merge, place, family, link, options))
    results.measure(_PACKED, partial(_merge_packed, place, family, link))
    results.measure(_READING, partial(_read, place, family, fast_link))


def _merge_packed(place: Workplace, family: FamilyPaths, link: Link) -> dict[str, Any]:
    packs = place.folder / "packs"
    shutil.rmtree(packs, ignore_errors=True)
    place.ours("pack", *family.experts, "--base", family.base, "-o", packs)
    packed = FamilyPaths(family.base, tuple(packs / expert.name for expert in family.experts))
    return _merge(place, packed, link, ())


def _read(place: Workplace, family: FamilyPaths, link: Link) -> dict[str, Any]:
    """Read all weights through the store of web servers in another process, and throw them away."""
    with MappedServer(family.models, link) as server:
        files = [f"{server.url}/{name}" for name in server.files if name.endswith(".safetensors")]
        code = f"from benchmarks.reproduce.remote import read_everything; read_everything({files!r})"
        cost = measure_checked([sys.executable, "-c", code], log=place.folder / "log.txt")
        sent_bytes = server.all_sent_bytes()
    return _told(cost, sent_bytes, link)


def read_everything(addresses: Sequence[str]) -> None:
    """Read files of a web server in large pieces from a few threads, by as many connections as merges have."""
    store = open_store(Ledger(), _CONNECTIONS)
    files = [store.open(Location.parse(address)) for address in addresses]
    pieces = SimpleQueue[tuple[RangeFile, int]]()
    for file in files:
        for offset in range(0, file.size_bytes, _PIECE_BYTES):
            pieces.put((file, offset))

    def read_some(_: int) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with contextlib.suppress(Empty):
            while True:
                file, offset = pieces.get_nowait()
                file.read_into(offset, buffer, Purpose.EXPERT)

    with ThreadPoolExecutor(_CONNECTIONS // 4) as threads:
        list(threads.map(read_some, range(_CONNECTIONS // 4)))
    store.close()


def _merge(place: Workplace, family: FamilyPaths, link: Link, options: tuple[str, ...]) -> dict[str, Any]:
    """Merge a bucket by TIES with a catalog that is its own."""
    recipe, out, home = (place.folder / name for name in ("remote.yml", "out", "home-remote"))
    models = {
        f"s3://bucket/{expert.name}": {"weight": round(1 / _K, 6), "density": DENSITY} for expert in family.experts
    }
    recipe.write_text(recipe_text("ties", "s3://bucket/base", models, dtype="bfloat16"))
    for left in (out, home):
        shutil.rmtree(left, ignore_errors=True)
    with MappedServer(family.models, link) as server:
        environment = {
            "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip
        places = ("--home", home, "--connections", _CONNECTIONS)
        report, cost = place.ours("merge", recipe, out, *places, *options, environment=environment)
        sent_bytes = server.all_sent_bytes()
    shutil.rmtree(out)
    traffic = report["traffic"]
    return {
        **_told(cost, sent_bytes, link), "read_bytes": sum(traffic["bytes_by_host"].values()),
        "requests": traffic["counts"]["requests"],
    }  # fmt: skip


def _told(cost: ProcessCost, sent_bytes: int, link: Link) -> dict[str, Any]:
    """Return what a process took that was sent so many bytes over a link."""
    return {
        "seconds": cost.wall_seconds, "cpu_seconds": cost.cpu_seconds, "peak_rss_bytes": cost.peak_rss_bytes,
        "read_bytes": sent_bytes, "sent_bytes": sent_bytes, "link_seconds": sent_bytes / link.bytes_per_second,
    }  # fmt: skip


def _page(results: Results) -> Page:
    over = {name: f"{entry['seconds'] / entry['link_seconds']:.2f}" for name, entry in results.entries.items()}
    meaning = (
        f"**A merge of remote experts takes the time in which its bytes come over the link**: times over that are"
        f" {' and '.join(over[name] for name in _MERGES)}; of packed ones, which are decoded, {over[_PACKED]}."
    )
    about = (
        f"TIES of {_K} experts; a server on the loopback answers after {_LINK.latency_seconds * 1000:.0f} ms and sends"
        f" at {_LINK.bytes_per_second / 1e6:.0f} MB/s. *Reading alone* throws away what comes, at 10 Gbit/s from"
        f" a server on the same processors. {SYNTHETIC_TEXT}"
    )
    rows = tuple(
        (
            name, f"{entry['read_bytes'] / 1e6:.0f}", f"{entry['seconds']:.1f}", over[name],
            str(entry.get("requests", "")), f"{entry['peak_rss_bytes'] / 1e6:.0f}",
        )
        for name, entry in results.entries.items()
    )  # fmt: skip
    header = ("merge", "read, MB", "seconds", "over bytes / bandwidth", "requests", "peak memory, MB")
    return Page("Remote experts", meaning, (about, Table(header, rows)))


PART = Part(
    "remote", "merges of a bucket over a link of 100 MB/s, raw and packed; reading at 10 Gbit/s",
    _needs, _measure, _page,
)  # fmt: skip
