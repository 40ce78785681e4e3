"""Command that measures merges of remote experts behind a link of given speed, against bytes / bandwidth."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.make_family import SHAPES
from benchmarks.process import ProcessCost, measure_checked
from benchmarks.recipes import DENSITY, recipe_text
from mergepipe import pack
from mergepipe.storage.contract import RemoteSettings
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote.web import open_store
from support.families import FamilyPaths, family_paths, write_family
from support.fault_server import BucketServer, Link, _Handler

PARTS = ("full", "budget", "packed", "loopback")
LOOPBACK_PIECE_BYTES = 32 << 20
LEAST_SENT_BYTES, MOST_SENT_BYTES = 64 << 10, 512 << 10
QUEUE_SECONDS = 0.005
SHARD_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One merge beside its remote bytes at the link's bandwidth.

    `read_bytes` is what the merge counted, `sent_bytes` what the server sent of files. Time begins with the process.
    """

    name: str
    seconds: float
    seconds_to_first_request: float
    read_bytes: int
    sent_bytes: int
    floor_seconds: float
    requests: int
    retries: int
    peak_memory_bytes: int
    client_cpu_seconds: float
    server_cpu_seconds: float
    load_average: float

    @property
    def share(self) -> float:
        return self.seconds / self.floor_seconds

    @property
    def network_share(self) -> float:
        """The same without the start of the process."""
        return (self.seconds - self.seconds_to_first_request) / self.floor_seconds


class MappedServer(BucketServer):
    """Serves files without reading them into memory; their tags are their sizes.

    Senders run ahead of the link by a few milliseconds, as they do into the queues of a real one, so that a thread that
    wakes late does not slow the link down.
    """

    def __init__(self, root: Path, folders: Sequence[Path], link: Link) -> None:
        super().__init__({}, link=link)
        self.first_request_at: float | None = None
        for folder in folders:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                self.put(f"bucket/{file.relative_to(root)}", _mapped(file))

    def etag(self, path: str) -> str:
        """The tag of a file that never changes."""
        return f'"{len(self.files[path])}"'

    def serve(self, handler: _Handler) -> None:
        """Answer one request, and note when the first came."""
        with self._lock:
            self.first_request_at = self.first_request_at or time.perf_counter()
        super().serve(handler)

    def count_afresh(self) -> None:
        """Forget what was counted so far."""
        self.all_sent_bytes()
        self.sent_bytes, self.first_request_at = 0, None

    def _send_body(self, handler: _Handler, body: memoryview) -> None:
        step = int(max(LEAST_SENT_BYTES, min(MOST_SENT_BYTES, self._link.bytes_per_second * QUEUE_SECONDS / 8)))
        for start in range(0, len(body), step):
            part = body[start : start + step]
            self._wait_for_link(len(part))
            handler.wfile.write(part)
        with self._lock:
            self.sent_bytes += len(body)

    def _wait_for_link(self, nbytes: int) -> None:
        with self._lock:
            begins = max(self._link_free_at, time.monotonic())
            self._link_free_at = begins + nbytes / self._link.bytes_per_second
            sleep_seconds = self._link_free_at - time.monotonic() - QUEUE_SECONDS
        if sleep_seconds > 0:
            time.sleep(sleep_seconds)


def _mapped(file: Path) -> bytes:
    """The content of a file, as far as a server asks for it: a memory map, which slices as bytes do."""
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b""  # type: ignore[return-value]


def ties_recipe(base: str, experts: Sequence[str]) -> str:
    """A recipe of TIES over models."""
    each = {"weight": round(1 / len(experts), 6), "density": DENSITY}
    return recipe_text("ties", base, experts, each, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where merges are run, and the link that they are measured against."""

    folder: Path
    link: Link
    connections: int

    def merge(
        self, name: str, recipe: str, options: Sequence[str], environment: Mapping[str, str], server: MappedServer
    ) -> Measured:
        """Merge in a process of its own, with a catalog that is its own; output and catalog are deleted."""
        server.count_afresh()
        server_cpu, load = _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF)), os.getloadavg()[0]
        started = time.perf_counter()
        report, cost = self.run(name, recipe, options, environment)
        sent_bytes = server.all_sent_bytes()
        counts = report["traffic"]["counts"]
        return Measured(
            name=name,
            seconds=cost.wall_seconds,
            seconds_to_first_request=(server.first_request_at or started) - started,
            read_bytes=sum(report["traffic"]["bytes_by_host"].values()),
            sent_bytes=sent_bytes,
            floor_seconds=sent_bytes / self.link.bytes_per_second,
            requests=counts["requests"],
            retries=counts["retries"],
            peak_memory_bytes=cost.peak_rss_bytes,
            client_cpu_seconds=cost.cpu_seconds,
            server_cpu_seconds=_cpu_seconds(resource.getrusage(resource.RUSAGE_SELF)) - server_cpu,
            load_average=load,
        )

    def run(
        self, name: str, recipe: str, options: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[dict[str, Any], ProcessCost]:
        """Run the merge; return its report, and what the process used.

        Raises:
            BenchmarkError: the merge failed.
        """
        path, out, home, log = (self.folder / f"{name}{ending}" for ending in (".yml", "-out", "-home", ".log"))
        path.write_text(recipe)
        command = [
            sys.executable, "-m", "mergepipe", "merge", str(path), str(out), "--json", "--quiet", "--home", str(home),
            "--connections", str(self.connections), *options,
        ]  # fmt: skip
        cost = measure_checked(command, log=log, environment=environment)
        shutil.rmtree(out)
        shutil.rmtree(home)
        text = log.read_text()
        report: dict[str, Any] = json.loads(text[text.index("{") :])
        return report, cost


def _cpu_seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def over_the_link(bench: Bench, family: FamilyPaths, budget: str, rounds: int, only: Sequence[str]) -> list[Measured]:
    """Full and budgeted merges of a bucket, raw and packed, at one link; the median of some rounds of each."""
    packed = bench.folder / "packed"
    stores = [expert.folder for expert in pack(family.base, family.experts, packed).experts] if "packed" in only else []
    with MappedServer(bench.folder, [*family.models, *stores], bench.link) as server:
        at, packed_at = (str(folder.relative_to(bench.folder)) for folder in (family.base.parent, packed))
        environment = s3_environment(server.url)
        base = f"s3://bucket/{at}/{family.base.name}"
        raw = ties_recipe(base, [f"s3://bucket/{at}/{expert.name}" for expert in family.experts])
        small = ties_recipe(base, [f"s3://bucket/{packed_at}/{store.name}" for store in stores]) if stores else ""
        merges: dict[str, tuple[str, tuple[str, ...]]] = {
            "full": (raw, ()), "budget": (raw, ("--budget", budget)), "packed": (small, ()),
        }  # fmt: skip
        return [
            median_of([bench.merge(name, *merges[name], environment, server) for _ in range(rounds)])
            for name in merges
            if name in only
        ]


def median_of(rounds: Sequence[Measured]) -> Measured:
    """The round whose time is the median, the lower one of two."""
    return sorted(rounds, key=lambda measured: measured.seconds)[(len(rounds) - 1) // 2]


def s3_environment(url: str) -> dict[str, str]:
    """The variables that lead the tools of S3 to a server, without credentials."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loopback:
    """Reading into memory at a link: bytes a second, and processor seconds by GB of the reader and of the server."""

    bytes_per_second: float
    client_cpu_seconds_by_gb: float
    server_cpu_seconds_by_gb: float


def read_loopback(family: FamilyPaths, connections: int, link: Link) -> Loopback:
    """Read all experts over a link in a process of its own, and throw them away."""
    with MappedServer(family.base.parent, family.experts, link) as server:
        code = (
            "import sys; from benchmarks.remote import read_everything; "
            "print(*read_everything(sys.argv[1:-1], int(sys.argv[-1])))"
        )
        files = [f"{server.url}/{name}" for name in server.files if name.endswith(".safetensors")]
        before = _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF))
        command = [sys.executable, "-c", code, *files, str(connections)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        speed, cpu_seconds, nbytes = map(float, printed.split())
        server_seconds = _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF)) - before
        return Loopback(speed, cpu_seconds / (nbytes / 1e9), server_seconds / (nbytes / 1e9))


def read_everything(addresses: Sequence[str], connections: int) -> tuple[float, float, int]:
    """Read files through the store of web servers; return bytes a second, processor seconds, and bytes."""
    store = open_store(Ledger(), RemoteSettings(connections))
    cpu_seconds = _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF))
    started, total, lock = time.perf_counter(), 0, threading.Lock()
    pieces = []
    for location in map(Location.parse, addresses):
        file = store.open(location)
        pieces += [(file, offset) for offset in range(0, file.size_bytes, LOOPBACK_PIECE_BYTES)]

    def work() -> None:
        nonlocal total
        buffer = memoryview(bytearray(LOOPBACK_PIECE_BYTES))
        while True:
            with lock:
                if not pieces:
                    return
                file, offset = pieces.pop()
            nbytes = file.read_into(offset, buffer, Purpose.EXPERT)
            with lock:
                total += nbytes

    threads = [threading.Thread(target=work) for _ in range(max(1, connections // 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    store.close()
    return total / seconds, _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF)) - cpu_seconds, total


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything that is wanted and print a table and, with --json, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--bandwidth", type=float, default=100e6, help="bytes a second")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds")
    parser.add_argument("--fast-bandwidth", type=float, default=1e9, help="bytes a second of the loopback reading")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--rounds", type=int, default=1, help="of each merge; the median is shown")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--root", type=Path, help="keep the family there for the next run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = given.root or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergepipe-remote-")))
        family = family_paths(folder / f"family-{given.shape}", given.experts)
        if not family.experts[-1].exists():
            write_family(family.base.parent, SHAPES[given.shape], given.experts, shard_bytes=SHARD_BYTES)
        bench = Bench(folder, Link(given.latency, given.bandwidth), given.connections)
        rows = over_the_link(bench, family, given.budget, given.rounds, given.only)
        fast = Link(given.latency, given.fast_bandwidth)
        loopback = read_loopback(family, given.connections, fast) if "loopback" in given.only else None
        shutil.rmtree(folder / "packed", ignore_errors=True)
    if rows:
        print(table(rows))
    if loopback is not None:
        print(
            f"\nloopback: {loopback.bytes_per_second / 1e9:.2f} GB/s of {given.fast_bandwidth / 1e9:.2f}; CPU s by GB: "
            f"reader {loopback.client_cpu_seconds_by_gb:.2f}, server {loopback.server_cpu_seconds_by_gb:.2f}"
        )
    if given.json is not None:
        numbers = {"merges": [asdict(row) for row in rows], "loopback": loopback and asdict(loopback)}
        given.json.write_text(json.dumps(numbers))


def table(rows: Sequence[Measured]) -> str:
    """The merges as a table of Markdown."""
    titles = (
        "merge", "read MB", "sent MB", "time s", "bytes / bandwidth s", "time by that", "from 1st request",
        "requests", "retries", "peak RSS MB", "CPU s client", "CPU s server", "load",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        numbers = (
            row.name, f"{row.read_bytes / 1e6:.1f}", f"{row.sent_bytes / 1e6:.1f}",
            f"{row.seconds:.1f}", f"{row.floor_seconds:.1f}", f"{row.share:.2f}", f"{row.network_share:.2f}",
            str(row.requests), str(row.retries), f"{row.peak_memory_bytes / 1e6:.0f}",
            f"{row.client_cpu_seconds:.1f}", f"{row.server_cpu_seconds:.1f}", f"{row.load_average:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
