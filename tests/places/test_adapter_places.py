"""Adapters and the weights they are applied to, each at a place of its own: the bytes of the local merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import mergepipe
from mergepipe.errors import ConflictError
from mergepipe.options import MergeOptions, VerifyOptions
from support.bucket_outputs import objects_below
from support.fuzz_seals import seal_manifest
from support.model_folders import recipe_of, write_adapter, write_model
from support.placed_models import PLACES, PlacedModels, placed_models

MODULES = ("model.layers.0.q_proj", "model.layers.1.q_proj")
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedModels]:
    """A base, an expert and two adapters in folders of this machine."""
    root = tmp_path_factory.mktemp("placed")
    random = np.random.default_rng(3)

    def values(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    for name in ("base", "expert"):
        write_model(root / name, {f"{module}.weight": values(12, 8) for module in MODULES}, CONFIG)
    for name in ("first", "second"):
        factors: dict[str, NDArray[np.float32]] = {}
        for module in MODULES:
            factors |= {f"{module}.lora_A.weight": values(4, 8), f"{module}.lora_B.weight": values(12, 4)}
        write_adapter(root / name, factors)
    with placed_models(root) as placed:
        yield placed


@pytest.fixture(autouse=True)
def _servers(models: PlacedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    models.lead(monkeypatch)


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize(("base", "adapter"), [*zip(PLACES, PLACES[1:] + PLACES[:1], strict=True), ("hub", "hub")])
def test_lora_apply__makes_the_same_bytes_wherever_base_and_adapter_are(
    models: PlacedModels, tmp_path: Path, base: str, adapter: str
) -> None:
    mergepipe.apply_lora(models.root / "base", [models.root / "first"], tmp_path / "local")
    mergepipe.apply_lora(
        models.put(models.root / "base", base), [models.put(models.root / "first", adapter)], tmp_path / "out"
    )
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "local")
    assert mergepipe.verify(tmp_path / "out", options=VerifyOptions(deep_fraction=1.0)).is_sound
    mergepipe.replay(tmp_path / "out", tmp_path / "again")
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "local")


@pytest.mark.parametrize("places", [("hub", "bucket", "folder"), ("folder", "hub", "web"), ("bucket", "folder", "hub")])
def test_lora_apply__takes_adapters_of_several_places(
    models: PlacedModels, tmp_path: Path, places: tuple[str, str, str]
) -> None:
    local = [models.root / name for name in ("base", "first", "second")]
    mergepipe.apply_lora(local[0], local[1:], tmp_path / "local")
    base, *adapters = (models.put(folder, place) for folder, place in zip(local, places, strict=True))
    mergepipe.apply_lora(base, adapters, tmp_path / "out")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "local")


@pytest.mark.parametrize(("place", "other"), [("hub", "hub"), ("hub", "folder"), ("folder", "hub"), ("bucket", "web")])
def test_merge__takes_a_model_with_an_adapter_from_any_places(
    models: PlacedModels, tmp_path: Path, place: str, other: str
) -> None:
    root = models.root

    def merged(name: str, base: str, expert: str, adapter: str) -> Path:
        recipe = recipe_of("task_arithmetic", {f"{expert}+{adapter}": {"weight": 0.5}}, base)
        path = tmp_path / f"{name}.yml"
        path.write_text(json.dumps(recipe))
        mergepipe.merge(path, tmp_path / name, options=MergeOptions(budget="60%"))
        return tmp_path / name

    local = merged("local", str(root / "base"), str(root / "expert"), str(root / "first"))
    base, expert = (models.put(root / name, place) for name in ("base", "expert"))
    out = merged("out", base, expert, models.put(root / "first", other))
    assert weights_of(out) == weights_of(local)
    assert mergepipe.explain(out).path == out


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "other"), [("hub", "bucket"), ("folder", "hub"), ("bucket", "web")])
def test_analyze__of_a_model_with_an_adapter_serves_plans_of_the_two_wherever_they_are(
    models: PlacedModels, tmp_path: Path, place: str, other: str
) -> None:
    root, home = models.root, tmp_path / "home"
    local = mergepipe.analyze(root / "base", [f"{root}/expert+{root}/first"], home=tmp_path / "local")
    expert, adapter = models.put(root / "expert", place), models.put(root / "first", other)
    report = mergepipe.analyze(models.put(root / "base", other), [f"{expert}+{adapter}"], home=home)
    (made,) = report.experts
    (wanted,) = local.experts
    assert made.statistics is not None
    assert wanted.statistics is not None
    assert made.statistics.name == wanted.statistics.name
    assert made.statistics.read_bytes() == wanted.statistics.read_bytes()
    again = mergepipe.analyze(root / "base", [f"{root}/expert+{root}/first"], home=tmp_path / "local")
    assert (again.experts[0].analyzed_tensors, again.expert_bytes) == (0, 0)
    mergepipe.apply_lora(root / "expert", [root / "first"], tmp_path / "applied", catalog=False)
    of_applied = mergepipe.analyze(root / "base", [tmp_path / "applied"], home=home)
    assert of_applied.experts[0].comparable_tensors == made.comparable_tensors == len(MODULES)


def test_replay__of_a_model_with_an_adapter_works_where_all_was_moved_to(models: PlacedModels, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for name in ("base", "expert", "first"):
        shutil.copytree(models.root / name, before / name)
    recipe = recipe_of("task_arithmetic", {"expert+first": {"weight": 0.5}}, "base")
    (before / "recipe.yml").write_text(json.dumps(recipe))
    mergepipe.merge(before / "recipe.yml", before / "out", catalog=False)
    record = json.loads((before / "out" / "mergepipe.json").read_text())
    names = [file["name"] for file in record["inputs"][1]["files"]]
    assert names == ["model.safetensors", "../adapter_model.safetensors", "../adapter_config.json"]
    before.rename(after)
    mergepipe.replay(after / "out", tmp_path / "again", catalog=False)
    assert weights_of(tmp_path / "again") == weights_of(after / "out")
    config = after / "first" / "adapter_config.json"
    config.write_text(config.read_text().replace("8", "9"))
    with pytest.raises(ConflictError, match=r"first/adapter_config.json: is not what the snapshot was made from"):
        mergepipe.replay(after / "out", tmp_path / "other", catalog=False)


def test_record__of_an_older_version_with_whole_paths_of_an_adapter_is_replayed_and_pushed_without_them(
    models: PlacedModels, tmp_path: Path
) -> None:
    root = models.root
    recipe = recipe_of("task_arithmetic", {f"{root}/expert+{root}/first": {"weight": 0.5}}, root / "base")
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    mergepipe.merge(tmp_path / "recipe.yml", tmp_path / "out", catalog=False)
    record = tmp_path / "out" / "mergepipe.json"
    content = json.loads(record.read_text())
    for file in content["inputs"][1]["files"]:
        file["name"] = file["name"].replace("../", f"{root}/first/")
    record.write_bytes(seal_manifest(json.dumps(content).encode()))
    mergepipe.replay(tmp_path / "out", tmp_path / "again", catalog=False)
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "out")
    mergepipe.push(tmp_path / "out", "s3://bucket/older")
    assert str(root).encode() not in objects_below("s3://bucket/older")["mergepipe.json"]


def test_merge_lora__on_the_hub_names_the_file_of_kohya_as_the_model(models: PlacedModels, tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    adapters = []
    for name in ("first", "second"):
        factors = {
            "lora_unet_a.lora_down.weight": random.standard_normal((2, 8)).astype(np.float32),
            "lora_unet_a.lora_up.weight": random.standard_normal((8, 2)).astype(np.float32),
        }
        adapters.append(tmp_path / f"{name}.safetensors")
        save_file(factors, adapters[-1])
    models.hub.commit("user/kohya", {"README.md": b"mine"})
    mergepipe.merge_lora(adapters, "hf://user/kohya")
    assert "kohya.safetensors" in models.hub.model_files("user/kohya")
