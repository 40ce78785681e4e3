"""Families of large checkpoints that take no room, and scripts that may take little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.model_folders import recipe_of
from support.sparse_models import Shapes, write_sparse

# Runs the rest of the script in the address space that it has after its imports and a first merge, and so much more.
CAPPED = """
import mmap, resource, sys, time
from pathlib import Path
import mergepipe
mergepipe.merge(
    sys.argv[1], sys.argv[2], options=mergepipe.MergeOptions(threads={threads}, catalog=False)
)
def address_space(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = address_space("VmSize")
limit = before + {allowed_bytes}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
started = time.perf_counter()
{body}
print("seconds", time.perf_counter() - started)
print("grown_bytes", address_space("VmPeak") - before)
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a capped script measured of itself."""

    seconds: float
    grown_bytes: int


def write_recipe(path: Path, operator: str, base: Path, experts: Sequence[Path]) -> Path:
    parameters = {"weight": 0.5} | ({"density": 0.2} if operator in ("ties", "dare_ties") else {})
    path.write_text(json.dumps(recipe_of(operator, dict.fromkeys(experts, parameters), base)))
    return path


def write_family(root: Path, shapes: Shapes, n_experts: int, shard_bytes: int = 5_000_000_000) -> list[Path]:
    """A base and experts, sparse all of them."""
    names = ["base", *(f"expert-{i}" for i in range(n_experts))]
    return [write_sparse(root / name, shapes, shard_bytes) for name in names]


def environment(root: Path) -> dict[str, str]:
    """Of a child: one heap for all threads, since every other one reserves 64 MiB of addresses that it does not use."""
    return {**os.environ, "MERGEPIPE_HOME": str(root / "home"), "MALLOC_ARENA_MAX": "1"}


def run_capped(root: Path, operator: str, body: str, allowed_bytes: int, *, patience_seconds: float = 600) -> Figures:
    """Run `body` in a process that may take `allowed_bytes` of addresses more than it has when it begins."""
    tiny = write_family(root / "tiny", {"a.weight": (300, 100), "b": (7,)}, 2)
    recipe = write_recipe(root / "tiny.yml", operator, tiny[0], tiny[1:])
    script = CAPPED.format(allowed_bytes=allowed_bytes, body=textwrap.dedent(body), threads=2)
    done = subprocess.run(
        [sys.executable, "-c", script, str(recipe), str(root / "tiny-out")],
        capture_output=True, text=True, timeout=patience_seconds, env=environment(root), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("seconds", "grown_bytes")))
    return Figures(float(found["seconds"]), int(found["grown_bytes"]))
