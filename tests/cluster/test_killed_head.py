"""The head of a Ray cluster is killed while a merge runs there: one clear error, and the same command goes on."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import mergepipe
from support.disk_families import make_models, weights_digest, write_family
from support.ray_merges import SHARD_BYTES, merge_options, write_recipe

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None and not os.environ.get("MERGEPIPE_REQUIRE_RAY"),
    reason="Ray is not installed: make test-ray",
)
COMMAND = "import sys; from mergepipe.cli import main; from mergepipe.jobs import merge_on_ray as m\n"
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

resources = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=resources)
print(cluster.address, *(p.process.pid for ps in cluster.head_node.all_processes.values() for p in ps), flush=True)
sys.stdin.read()
"""


@contextmanager
def cluster() -> Iterator[tuple[str, list[int], subprocess.Popen[str]]]:
    """A cluster of one node: its address, its processes, and the process that holds it."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        address, *processes = holder.stdout.readline().split()
        yield address, list(map(int, processes)), holder
        holder.communicate()  # the end of its input ends it


def command(recipe: Path, out: Path, address: str, task: str = "") -> list[str]:
    """The command that merges on a cluster, by another task than its own."""
    patched = f"m._TASK = '{task}'; " if task else ""
    arguments = ["merge", recipe, out, "--executor", "ray", "--address", address, "--shard-size", f"{SHARD_BYTES}B"]
    code = f"{COMMAND}{patched}sys.exit(main())"
    return [sys.executable, "-c", code, *map(str, arguments), "--allow-dropped", "*", "--no-catalog"]


def test_merge__whose_head_is_killed_ends_in_one_error_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place := tmp_path / "place").mkdir()
    monkeypatch.setenv("MERGEPIPE_TEST_PLACE", str(place))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    family = write_family(tmp_path / "family", make_models(2))
    recipe, out = write_recipe(tmp_path / "r.yml", family, "ties"), tmp_path / "out"
    with cluster() as (address, processes, holder):
        slow = command(recipe, out, address, "cluster.slow_parts:make_slowly")
        with subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as merge:
            while merge.poll() is None and not list(place.glob("at-*")):
                time.sleep(0.05)
            for process in processes:
                os.kill(process, signal.SIGKILL)
            holder.kill()
            _, told = merge.communicate()
        assert merge.returncode == 8, told
        (line,) = (line for line in told.splitlines() if "[ray.lost]" in line)
        assert "does not answer any more" in line
        assert "Traceback" not in told
        assert not out.exists()
        refused = subprocess.run(command(recipe, out, address), capture_output=True, text=True, check=False)
        assert (refused.returncode, "[ray.unreachable]" in refused.stderr) == (3, True)
    with cluster() as (address, _, _):
        subprocess.run(command(recipe, out, address), check=True)
    mergepipe.merge(recipe, tmp_path / "alone", options=merge_options("threads"))
    assert weights_digest(out) == weights_digest(tmp_path / "alone")
    assert not list(tmp_path.glob(".out.*"))
