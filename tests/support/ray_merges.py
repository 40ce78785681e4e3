"""Merges of tiny families, as a cluster and as one machine make them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mergepipe.options import MergeOptions
from support.disk_families import DiskFamily
from support.model_folders import recipe_of

SHARD_BYTES = 30_000
PARAMETERS: dict[str, dict[str, float]] = {
    "linear": {"weight": 0.4},
    "ties": {"weight": 0.4, "density": 0.3},
    "dare_ties": {"weight": 0.4, "density": 0.6},
}


def write_recipe(path: Path, family: DiskFamily, operator: str, experts: tuple[Path, ...] = ()) -> Path:
    """Write a recipe over a family, or over its base and other experts."""
    models = dict.fromkeys(experts or family.places[1:], PARAMETERS[operator])
    path.write_text(json.dumps(recipe_of(operator, models, family.places[0])))
    return path


def merge_options(executor: str, address: str | None = None) -> MergeOptions:
    """Return the options of a merge into small files that takes nothing from elsewhere."""
    return MergeOptions(
        executor=executor, address=address, catalog=False, shard_bytes=SHARD_BYTES, allow_dropped=("*",),
        block_elements=16384,
    )  # fmt: skip


NEEDS_RAY = [
    pytest.mark.skipif(
        find_spec("ray") is None and not os.environ.get("MERGEPIPE_REQUIRE_RAY"),
        reason="Ray is not installed: make test-ray",
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
"""Marks of tests that start a cluster."""
_TOKEN = secrets.token_hex(32)
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a cluster of two nodes with a processor each, to which this process is connected.

    Its tasks have the environment of this process as it is now.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", _TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray  # which reads them
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()
