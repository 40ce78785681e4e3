"""Command that measures merges of remote experts behind a link of given speed, against bytes / bandwidth."""

from __future__ import annotations

import argparse
import json
import mmap
import os
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

import yaml

from mergepipe.api import pack
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote.web import open_store
from mergepipe.storage.traffic import RemoteSettings
from support.families import DEMO, QWEN3_0_6B, FamilyPaths, write_family
from support.fault_server import BucketServer, Link
from support.hub_server import hub_server

SHAPES = {"demo": DEMO, "0.6b": QWEN3_0_6B}
DENSITY = 0.2
LOOPBACK_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One merge: `share` is its time beside that of its remote bytes at the link's bandwidth."""

    name: str
    seconds: float
    read_bytes: int
    floor_seconds: float
    requests: int
    retries: int

    @property
    def share(self) -> float:
        return self.seconds / self.floor_seconds


class MappedServer(BucketServer):
    """Serves files without reading them into memory; their tags are their sizes."""

    def __init__(self, root: Path, folders: Sequence[Path], link: Link) -> None:
        super().__init__({}, link=link)
        for folder in folders:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                self.put(f"bucket/{file.relative_to(root)}", _mapped(file))

    def etag(self, path: str) -> str:
        """The tag of a file that never changes."""
        return f'"{len(self.files[path])}"'


def _mapped(file: Path) -> bytes:
    """The content of a file, as far as a server asks for it: a memory map, which slices as bytes do."""
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b""  # type: ignore[return-value]


def recipe_text(base: str, experts: Sequence[str]) -> str:
    """A recipe of TIES over models."""
    weight = round(1 / len(experts), 6)
    models = [{"model": expert, "parameters": {"weight": weight, "density": DENSITY}} for expert in experts]
    return yaml.safe_dump({"merge_method": "ties", "base_model": base, "models": models, "dtype": "bfloat16"})


@dataclass(frozen=True, slots=True)
class Bench:
    """Where merges are run, and the link that they are measured against."""

    folder: Path
    bandwidth: float
    connections: int

    def merge(self, name: str, recipe: str, options: Sequence[str], environment: Mapping[str, str]) -> Measured:
        """Merge in a process of its own, with a catalog that is its own; the output is deleted."""
        path, out = self.folder / f"{name}.yml", self.folder / f"{name}-out"
        path.write_text(recipe)
        home = self.folder / f"{name}-home"
        command = [
            sys.executable, "-m", "mergepipe", "merge", str(path), str(out), "--json", "--home", str(home),
            "--connections", str(self.connections), *options,
        ]  # fmt: skip
        started = time.perf_counter()
        ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if ran.returncode:
            raise SystemExit(f"{name}: the merge failed: {ran.stderr}")
        report = json.loads(ran.stdout)
        shutil.rmtree(out)
        remote_bytes = sum(report["traffic"]["bytes_by_host"].values())
        counts = report["traffic"]["counts"]
        floor = remote_bytes / self.bandwidth
        return Measured(name, seconds, remote_bytes, floor, counts["requests"], counts["retries"])


def over_the_link(bench: Bench, family: FamilyPaths, budget: str, latency: float) -> list[Measured]:
    """Full and budgeted merges over HTTP, raw and packed, at one link."""
    packed = bench.folder / "packed"
    stores = [expert.store for expert in pack(family.base, family.experts, packed).experts]
    with MappedServer(bench.folder, [*family.models, *stores], Link(latency, bench.bandwidth)) as server:
        at, packed_at = (str(folder.relative_to(bench.folder)) for folder in (family.base.parent, packed))
        environment = s3_environment(server.url)
        base = f"s3://bucket/{at}/{family.base.name}"
        raw = recipe_text(base, [f"s3://bucket/{at}/{expert.name}" for expert in family.experts])
        small = recipe_text(base, [f"s3://bucket/{packed_at}/{store.name}" for store in stores])
        return [
            bench.merge("full", raw, (), environment),
            bench.merge("budget", raw, ("--budget", budget), environment),
            bench.merge("packed", small, (), environment),
        ]


def s3_environment(url: str) -> dict[str, str]:
    """The variables that lead the tools of S3 to a server, without credentials."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip


def over_the_hub(bench: Bench, family: FamilyPaths, budget: str, latency: float) -> tuple[Measured, int, int]:
    """Merge from the Hub's stand-in under a budget; return it, the number of resolves and that of weight files."""
    with hub_server(link=Link(latency, bench.bandwidth)) as hub:
        for model in family.models:
            hub.commit(f"org/{model.name}", {file.name: _mapped(file) for file in sorted(model.iterdir())})
        recipe = recipe_text(f"hf://org/{family.base.name}", [f"hf://org/{expert.name}" for expert in family.experts])
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(bench.folder / "hf"), "HF_HUB_OFFLINE": "0"}
        measured = bench.merge("hub-budget", recipe, ("--budget", budget), environment)
        n_files = sum(1 for model in family.models for _ in model.iterdir())
        return measured, len(hub.resolves), n_files


def loopback_bytes_per_second(family: FamilyPaths, connections: int) -> float:
    """Read all experts over the loopback without a limit, with as many threads as connections; bytes a second."""
    with MappedServer(family.base.parent, family.experts, Link()) as server:
        code = (
            "import sys; from benchmarks.remote import read_everything; "
            "print(read_everything(sys.argv[1:-1], int(sys.argv[-1])))"
        )
        files = [f"{server.url}/{name}" for name in server.files if name.endswith(".safetensors")]
        command = [sys.executable, "-c", code, *files, str(connections)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read_everything(addresses: Sequence[str], connections: int) -> float:
    """Read files through the store of web servers; return bytes a second."""
    store = open_store("http", Ledger(), RemoteSettings(connections))
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
    store.close()
    return total / (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything once and print a table and, with --json, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--bandwidth", type=float, default=100e6, help="bytes a second")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergepipe-remote-")))
        family = write_family(folder / "family", SHAPES[given.shape], given.experts, shard_bytes=500_000_000)
        bench = Bench(folder, given.bandwidth, given.connections)
        rows = over_the_link(bench, family, given.budget, given.latency)
        hub, n_resolves, n_files = over_the_hub(bench, family, given.budget, given.latency)
        loopback = loopback_bytes_per_second(family, given.connections)
    print(
        "| merge | read | time | bytes / bandwidth | time by that | requests | retries |\n|---|---|---|---|---|---|---|"
    )
    for row in (*rows, hub):
        print(
            f"| {row.name} | {row.read_bytes / 1e6:.0f} MB | {row.seconds:.1f} s | {row.floor_seconds:.1f} s | "
            f"{row.share:.2f} | {row.requests} | {row.retries} |"
        )
    print(f"\nresolves: {n_resolves} for {n_files} files; loopback: {loopback / 1e9:.2f} GB/s")
    if given.json is not None:
        numbers = {"merges": [asdict(row) for row in (*rows, hub)], "resolves": n_resolves, "files": n_files}
        given.json.write_text(json.dumps({**numbers, "loopback_bytes_per_second": loopback}))


if __name__ == "__main__":
    main()
