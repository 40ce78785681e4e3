"""Merges of models in object stores and on web servers: the bytes of the local merge within the budget, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mergepipe
from mergepipe.errors import MergePipeError
from support.families import TINY, write_family
from support.fault_server import BucketServer, Fault, cut, status, with_headers
from support.refusals import refuses
from support.remote_stores import set_environment

RECIPE = """\
merge_method: {operator}
base_model: {at}/base
models:
- {{model: "{at}/expert-1", parameters: {{weight: 0.7}}}}
- {{model: "{at}/expert-2", parameters: {{weight: 0.5}}}}
dtype: float32
"""
SHARD_BYTES = 40_000


@dataclass(frozen=True, slots=True)
class Remote:
    """A family of models, here and on a server."""

    folder: Path
    server: BucketServer

    def recipe(self, kind: str, operator: str = "task_arithmetic") -> Path:
        at = {"local": str(self.folder), "http": f"{self.server.url}/bucket"}.get(kind, f"{kind}://bucket")
        path = self.folder / f"{kind}.yml"
        path.write_text(RECIPE.format(operator=operator, at=at))
        return path


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    paths = write_family(tmp_path, TINY, 2, shard_bytes=SHARD_BYTES)
    files = {f"bucket/{path.relative_to(tmp_path)}": path for model in paths.models for path in model.rglob("*")}
    with BucketServer({name: path.read_bytes() for name, path in files.items()}) as server:
        set_environment(monkeypatch, server.url)
        yield Remote(tmp_path, server)


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


@pytest.mark.parametrize("kind", ["s3", "gs", "az", "http"])
def test_merge__of_remote_models_is_the_local_merge(kind: str, remote: Remote, tmp_path: Path) -> None:
    faults: list[Fault] = [cut(1000), status(503)]
    mergepipe.merge(remote.recipe("local"), tmp_path / "here")
    remote.server.faults = faults
    mergepipe.merge(remote.recipe(kind), tmp_path / "there")
    assert remote.server.faults == []
    assert weights(tmp_path / "there") == weights(tmp_path / "here")


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_merge__reads_no_more_of_remote_experts_than_the_budget(kind: str, remote: Remote, tmp_path: Path) -> None:
    report = mergepipe.merge(remote.recipe(kind), tmp_path / "out", budget="30%")
    tensor_reads = [r for r in remote.server.reads if "/expert-" in r.path and r.path.endswith(".safetensors")]
    of_tensors = [r for r in tensor_reads if r.range is not None and r.range[0] > 0]  # headers are read from the start
    assert report.budget_bytes is not None
    assert 0 < report.expert_bytes <= report.budget_bytes
    assert len(of_tensors) < len(tensor_reads)
    assert sum(request.nbytes for request in of_tensors) <= report.budget_bytes


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_merge__that_fails_publishes_nothing(kind: str, remote: Remote, tmp_path: Path) -> None:
    remote.server.faults = [with_headers()] * 30 + [with_headers(ETag='"other"')] * 10_000
    with refuses(MergePipeError, "input.changed"):
        mergepipe.merge(remote.recipe(kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()
