"""Command that measures a merge by two workers, each behind a limited link of its own, against one worker."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.make_family import SHAPES
from benchmarks.remote import MappedServer, s3_environment, ties_recipe
from support.families import write_family
from support.fault_server import Link

N_SHARDS = 24
TARGET_SHARE = 0.55


def mergepipe(url: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start a command that finds its bucket at `url`."""
    command = [sys.executable, "-m", "mergepipe", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **s3_environment(url)}, stdout=subprocess.DEVNULL)


def seconds_of(work: Path, urls: Sequence[str], shard_bytes: int) -> float:
    """Return how long the workers of these links take to make and publish the output."""
    out = work / f"out-{len(urls)}"
    started = time.perf_counter()
    workers = [
        mergepipe(
            url, "run", work / "plan.json", out, "--part", f"{number}/{len(urls)}", "--shard-size", str(shard_bytes),
            "--no-catalog", "--quiet",
        )
        for number, url in enumerate(urls, 1)
    ]  # fmt: skip
    codes = [worker.wait() for worker in workers]
    if any(codes) or not (out / "mergepipe.json").exists():
        raise SystemExit("a worker failed")
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the times of one and of two workers, and fail above `TARGET_SHARE`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="what the bytes take over one link")
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--work", type=Path, default=None)
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(dir=chosen.work))
    try:
        family = write_family(work / "family", SHAPES[chosen.shape], chosen.experts)
        folders = (family.base, *family.experts)
        n_bytes = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
        link = Link(chosen.latency, n_bytes / chosen.seconds)
        names = [f"s3://bucket/{folder.relative_to(work)}" for folder in folders]
        (work / "recipe.yml").write_text(ties_recipe(names[0], names[1:]))
        with MappedServer(work, folders, link) as first, MappedServer(work, folders, link) as second:
            second._modified = first._modified  # one bucket behind two links
            plan = ("plan", work / "recipe.yml", "--all", "--out", work / "plan.json", "--home", work / "home")
            if mergepipe(first.url, *plan).wait():
                raise SystemExit("the plan failed")
            shard_bytes = n_bytes // len(folders) // N_SHARDS
            one = seconds_of(work, [first.url], shard_bytes)
            two = seconds_of(work, [first.url, second.url], shard_bytes)
        print(f"{n_bytes / 2**20:.0f} MiB over links of {n_bytes / chosen.seconds / 1e6:.1f} MB/s")
        print(f"one worker {one:.1f} s, two workers {two:.1f} s: {two / one:.3f} of it")
        if two > TARGET_SHARE * one:
            raise SystemExit(f"that is more than {TARGET_SHARE}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
