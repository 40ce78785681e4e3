"""Whole jobs whose inputs are objects: what they make is byte for byte what they make of files of this machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mergepipe
from mergepipe.options import MergeOptions, RunOptions
from mergepipe.storage.location import Location
from mergepipe.tailor import api as tailor
from support.families import FamilyShape, write_family
from support.stores import InMemoryStore, StoreRequest, memory_scheme
from support.training_trees import decoder_shapes, known_states, write_hf

SHAPE = FamilyShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=192, vocab=1024, tied=True)
BUCKET = Location.parse("memory://bucket")
EXPERTS = ("expert-1", "expert-2")
RECIPE = """merge_method: ties
base_model: {root}/base
models:
  - {{model: {root}/expert-1, parameters: {{weight: 0.6, density: 0.4}}}}
  - {{model: {root}/expert-2, parameters: {{weight: 0.5, density: 0.3}}}}
dtype: bfloat16
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """One family twice: as files in `folder`, and as objects of `store` below `BUCKET`."""

    folder: Path
    store: InMemoryStore

    @property
    def local(self) -> str:
        return str(self.folder)

    def recipe(self, root: str, text: str = RECIPE) -> Path:
        path = self.folder / ("remote.yml" if "://" in root else "local.yml")
        path.write_text(text.format(root=root))
        return path

    def run_options(self, root: str) -> RunOptions:
        return RunOptions(home=self.folder / ("home-remote" if "://" in root else "home-local"), threads=2)

    def options(self, root: str) -> MergeOptions:
        return MergeOptions(home=self.run_options(root).home, threads=2)

    def out(self, name: str) -> Path:
        return self.folder / "out" / name


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    write_family(tmp_path, SHAPE, len(EXPERTS))
    store = InMemoryStore()
    for name in ("base", *EXPERTS):
        store.put_tree(tmp_path / name, BUCKET / name)
    with memory_scheme(store):
        yield Bench(tmp_path, store)


NAMING_INPUTS = {"mergepipe.json", "README.md", "mergekit_config.yml", "mergepipe-store.json"}


def weights(folder: Path) -> dict[str, bytes]:
    """The files of weights and of block digests in a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NAMING_INPUTS
    }


def slow_now_and_then(request: StoreRequest) -> None:
    """Answer some requests late, so that they come back in another order than they were made in."""
    if request.offset % 3 == 0:
        time.sleep(0.001)


def test_merge__of_objects_is_that_of_files_and_records_locations(bench: Bench) -> None:
    mergepipe.merge(bench.recipe(bench.local), bench.out("local"), options=bench.options(bench.local))
    bench.store.script = slow_now_and_then
    mergepipe.merge(bench.recipe(str(BUCKET)), bench.out("remote"), options=bench.options(str(BUCKET)))
    assert weights(bench.out("remote")) == weights(bench.out("local"))
    record = json.loads((bench.out("remote") / "mergepipe.json").read_bytes())
    assert [each["path"] for each in record["inputs"]] == [f"{BUCKET}/{name}" for name in ("base", *EXPERTS)]
    versions = {file["version"] for each in record["inputs"] for file in each["files"]}
    assert versions == {_version(bench, name) for name in ("base", *EXPERTS)}
    replayed = bench.out("replayed")
    mergepipe.replay(bench.out("remote"), replayed, options=bench.run_options(str(BUCKET)))
    assert weights(replayed) == weights(bench.out("local"))


def _version(bench: Bench, model: str) -> str:
    status = bench.store.stat(BUCKET / model / "model.safetensors")
    assert status is not None
    return status.version


def test_pack__of_objects_and_merge_of_packed_objects(bench: Bench) -> None:
    for root, name in ((bench.local, "local"), (str(BUCKET), "remote")):
        mergepipe.pack(f"{root}/base", [f"{root}/{expert}" for expert in EXPERTS], bench.folder / f"packs-{name}")
    remote = bench.folder / "packs-remote"
    assert weights(remote) == weights(bench.folder / "packs-local")
    shutil.rmtree(bench.folder / "expert-1")
    for expert in EXPERTS:
        bench.store.put_tree(remote / expert, BUCKET / "packs" / expert)
    text = RECIPE.replace("{root}/expert", "{root}/packs/expert")
    mergepipe.merge(bench.recipe(str(BUCKET), text), bench.out("packed"), options=bench.options(str(BUCKET)))
    mergepipe.merge(bench.recipe(str(BUCKET)), bench.out("plain"), options=bench.options(str(BUCKET)))
    assert weights(bench.out("packed")) == weights(bench.out("plain"))


def test_compose__of_objects_is_that_of_files(tmp_path: Path) -> None:
    store = InMemoryStore()
    for name, step in (("checkpoint-7", 7), ("checkpoint-9", 9)):
        write_hf(tmp_path / name, known_states(decoder_shapes(), seed=step, step=step))
        store.put_tree(tmp_path / name, BUCKET / "run" / name)
    text = "default: {root}/checkpoint-9\ntake: [{{from: {root}/checkpoint-7, units: [layers 0]}}]\n"
    with memory_scheme(store):
        report = tailor.inspect(f"{BUCKET}/run/checkpoint-9")
        assert [str(each.path) for each in report.checkpoints] == [f"{BUCKET}/run/checkpoint-9"]
        for name, root in (("local", str(tmp_path)), ("remote", f"{BUCKET}/run")):
            (tmp_path / f"{name}.yml").write_text(text.format(root=root))
            tailor.compose(tmp_path / f"{name}.yml", tmp_path / "out" / name, self_check="full")
        assert tailor.recipe(f"{BUCKET}/run", strategy="latest") == f"default: {BUCKET}/run/checkpoint-9\n"
    assert weights(tmp_path / "out" / "remote") == weights(tmp_path / "out" / "local")
