"""Tests of models whose weights lie in folders too: modules of sentence-transformers, components of a pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, OutputError
from mergepipe.options import MergeOptions
from support.model_folders import recipe_of

Weights = Mapping[str, Mapping[str, Sequence[float]]]
NO_CATALOG = MergeOptions(catalog=False)
MODULES = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
PIPELINE = {"_class_name": "Pipeline", "unet": ["diffusers", "UNet"], "text_encoder": ["transformers", "CLIPTextModel"],
            "scheduler": ["diffusers", "Scheduler"], "safety_checker": [None, None]}  # fmt: skip


def write_model(folder: Path, weights: Weights, small: Mapping[str, object]) -> Path:
    """Write float32 tensors of one row by file, and small files."""
    for name, tensors in weights.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({tensor: np.array([row], np.float32) for tensor, row in tensors.items()}, folder / name)
    for name, content in small.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def sentence_model(folder: Path, body: float, dense: float) -> Path:
    weights = {
        "model.safetensors": {"encoder.layer.0.weight": [body, 1.0]},
        "2_Dense/model.safetensors": {"linear.weight": [dense, 2.0], "linear.bias": [dense]},
    }
    small = {"config.json": {}, "modules.json": MODULES, "1_Pooling/config.json": {}, "2_Dense/config.json": {"in": 2}}
    return write_model(folder, weights, small)


def pipeline(folder: Path, unet: float, text: float) -> Path:
    weights = {
        "unet/diffusion_pytorch_model.safetensors": {"conv.weight": [unet, 3.0]},
        "unet/diffusion_pytorch_model.fp16.safetensors": {"conv.weight": [0.0, 0.0]},
        "text_encoder/model.safetensors": {"text_model.encoder.layers.0.weight": [text, 4.0]},
    }
    small = {"model_index.json": PIPELINE, "unet/config.json": {}, "text_encoder/config.json": {},
             "scheduler/scheduler_config.json": {"beta": 1}}  # fmt: skip
    return write_model(folder, weights, small)


def recipe(folder: Path, *experts: Path, **more: object) -> Path:
    path = folder / "recipe.yml"
    models = {place: {"weight": 1.0} for place in experts}
    path.write_text(json.dumps({**recipe_of("linear", models, dtype="float32"), **more}))
    return path


def rows(file: Path) -> dict[str, list[float]]:
    return {name: tensor.ravel().tolist() for name, tensor in load_file(file).items()}


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_merge__weights_of_modules_are_merged_where_the_base_has_them(tmp_path: Path) -> None:
    sentence_model(tmp_path / "base", 0.0, 0.0)
    one, two = sentence_model(tmp_path / "one", 5.0, 11.0), sentence_model(tmp_path / "two", 7.0, 12.0)
    report = mergepipe.merge(recipe(tmp_path, one, two), tmp_path / "out", options=NO_CATALOG)
    assert report.merged_tensors == 3
    assert rows(tmp_path / "out" / "model.safetensors") == {"encoder.layer.0.weight": [6.0, 1.0]}
    dense = rows(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert dense == {"linear.weight": [11.5, 2.0], "linear.bias": [11.5]}
    assert {"2_Dense/config.json", "1_Pooling/config.json", "modules.json"} <= files_of(tmp_path / "out")
    assert mergepipe.verify(tmp_path / "out", deep_fraction=1.0, catalog=False).is_sound


def test_merge__components_of_a_pipeline_keep_their_file_names(tmp_path: Path) -> None:
    one, two = pipeline(tmp_path / "one", 1.0, 10.0), pipeline(tmp_path / "two", 3.0, 20.0)
    out = tmp_path / "out"
    mergepipe.merge(recipe(tmp_path, one, two), out, options=NO_CATALOG)
    assert rows(out / "unet" / "diffusion_pytorch_model.safetensors") == {"conv.weight": [2.0, 3.0]}
    text = rows(out / "text_encoder" / "model.safetensors")
    assert text == {"text_model.encoder.layers.0.weight": [15.0, 4.0]}
    assert json.loads((out / "scheduler" / "scheduler_config.json").read_text()) == {"beta": 1}
    weights = {name for name in files_of(out) if name.endswith(".safetensors")}
    assert weights == {"unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"}
    assert json.loads((out / "model_index.json").read_text()) == PIPELINE


def test_merge__shards_of_a_component_have_an_index_in_its_folder(tmp_path: Path) -> None:
    one, two = sentence_model(tmp_path / "one", 5.0, 11.0), sentence_model(tmp_path / "two", 7.0, 12.0)
    out = tmp_path / "out"
    mergepipe.merge(recipe(tmp_path, one, two), out, catalog=False, shard_bytes=8)
    index = json.loads((out / "2_Dense" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["linear.bias", "linear.weight"]
    assert all((out / "2_Dense" / file).exists() for file in index["weight_map"].values())
    assert not (out / "model.safetensors.index.json").exists()
    assert mergepipe.verify(out, catalog=False).is_sound
    mergepipe.merge(recipe(tmp_path, out, one), tmp_path / "again", options=NO_CATALOG)
    assert rows(tmp_path / "again" / "2_Dense" / "model.safetensors")["linear.weight"] == [11.25, 2.0]


def test_filter__names_a_component_by_its_folder(tmp_path: Path) -> None:
    base, one = sentence_model(tmp_path / "base", 0.0, 0.0), sentence_model(tmp_path / "one", 4.0, 8.0)
    weight = [{"filter": "2_Dense/", "value": 0.5}, {"value": 1.0}]
    stated = recipe_of("task_arithmetic", {one: {"weight": weight}}, base)
    mergepipe.merge(stated, tmp_path / "out", options=NO_CATALOG)
    assert rows(tmp_path / "out" / "model.safetensors")["encoder.layer.0.weight"] == [4.0, 1.0]
    assert rows(tmp_path / "out" / "2_Dense" / "model.safetensors")["linear.bias"] == [4.0]


def test_merge__into_one_file_takes_files_and_no_components(tmp_path: Path) -> None:
    one, two = sentence_model(tmp_path / "one", 5.0, 11.0), sentence_model(tmp_path / "two", 7.0, 12.0)
    with pytest.raises(OutputError, match=r"has weights in 2_Dense; name a folder, or name files as the models"):
        mergepipe.merge(recipe(tmp_path, one, two), tmp_path / "out.safetensors", options=NO_CATALOG)
    files = (one / "2_Dense" / "model.safetensors", two / "2_Dense" / "model.safetensors")
    mergepipe.merge(recipe(tmp_path, *files), tmp_path / "out.safetensors", options=NO_CATALOG)
    assert rows(tmp_path / "out.safetensors") == {"linear.weight": [11.5, 2.0], "linear.bias": [11.5]}


def test_repair__makes_a_component_again(tmp_path: Path) -> None:
    one, two = sentence_model(tmp_path / "one", 5.0, 11.0), sentence_model(tmp_path / "two", 7.0, 12.0)
    out = tmp_path / "out"
    mergepipe.merge(recipe(tmp_path, one, two), out, options=NO_CATALOG)
    before = (out / "2_Dense" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "2_Dense")
    assert not mergepipe.verify(out, catalog=False).is_sound
    mergepipe.repair(out, catalog=False)
    assert (out / "2_Dense" / "model.safetensors").read_bytes() == before


def test_pack__keeps_components(tmp_path: Path) -> None:
    base, one = sentence_model(tmp_path / "base", 0.0, 0.0), sentence_model(tmp_path / "one", 4.0, 8.0)
    mergepipe.pack(base, [one], tmp_path / "packed")
    packed = recipe(tmp_path, base, tmp_path / "packed" / "one")
    mergepipe.merge(packed, tmp_path / "out", options=NO_CATALOG)
    assert rows(tmp_path / "out" / "2_Dense" / "model.safetensors")["linear.weight"] == [4.0, 2.0]
    mergepipe.unpack(tmp_path / "packed" / "one", tmp_path / "again", base=base)
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (one / name).read_bytes()


def test_merge__an_expert_without_a_component_is_refused(tmp_path: Path) -> None:
    base, one = sentence_model(tmp_path / "base", 0.0, 0.0), sentence_model(tmp_path / "one", 4.0, 8.0)
    (one / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(MismatchError, match=r"2_Dense/\*: .* lacks these 2 tensors"):
        mergepipe.merge(recipe(tmp_path, base, one), tmp_path / "out", options=NO_CATALOG)
    assert not (tmp_path / "out").exists()


def speech_model(folder: Path, body: float, codec: float) -> Path:
    """A model with weights in folders that no list names: one is of a model of its own, the others are not."""
    weights = {
        "model.safetensors": {"talker.norm.weight": [body]},
        "speech_tokenizer/model.safetensors": {"decoder.conv.weight": [codec]},
        "checkpoint-5/model.safetensors": {"other.weight": [0.0]},
        "original/model.safetensors": {"block.0.weight": [0.0]},
        "fp16/model.safetensors": {"talker.norm.weight": [0.0]},
        "int4/model.safetensors": {"talker.norm.codes": [0.0]},
        "lora/adapter_model.safetensors": {"lora_A.weight": [0.0]},
        "metal/model.bin": {"other.weight": [0.0]},
        "split/one.safetensors": {"other.weight": [0.0]},
    }
    small = {"config.json": {"architectures": ["Talker"]}, "int4/config.json": {"architectures": ["Talker"]},
             "speech_tokenizer/config.json": {"architectures": ["Codec"]}}  # fmt: skip
    return write_model(folder, weights, small)


def test_merge__a_folder_that_no_list_names_is_a_component_unless_it_is_the_model_once_more(tmp_path: Path) -> None:
    one, two = speech_model(tmp_path / "one", 1.0, 10.0), speech_model(tmp_path / "two", 3.0, 20.0)
    out = tmp_path / "out"
    report = mergepipe.merge(recipe(tmp_path, one, two), out, options=NO_CATALOG)
    assert report.merged_tensors == 2
    assert rows(out / "speech_tokenizer" / "model.safetensors") == {"decoder.conv.weight": [15.0]}
    folders = {path.name for path in out.iterdir() if path.is_dir()}
    assert folders == {"speech_tokenizer"}
    assert json.loads((out / "speech_tokenizer" / "config.json").read_text()) == {"architectures": ["Codec"]}
    reasons = {file.name: file.reason for file in report.left_out}
    assert "adapter" in reasons["lora/adapter_model.safetensors"]
    assert {name.partition("/")[0] for name in reasons} == {
        "checkpoint-5", "original", "fp16", "int4", "lora", "metal", "split"
    }  # fmt: skip


def test_merge__components_alone_are_a_model_where_a_configuration_lies_beside_them(tmp_path: Path) -> None:
    models = [speech_model(tmp_path / name, 0.0, number) for name, number in (("one", 1.0), ("two", 3.0))]
    for model in models:
        (model / "model.safetensors").unlink()
    mergepipe.merge(recipe(tmp_path, *models), tmp_path / "out", options=NO_CATALOG)
    assert rows(tmp_path / "out" / "speech_tokenizer" / "model.safetensors") == {"decoder.conv.weight": [2.0]}
    (models[0] / "config.json").unlink()
    with pytest.raises(NotFoundError, match="no weights here"):
        mergepipe.merge(recipe(tmp_path, *models), tmp_path / "again", options=NO_CATALOG)


def test_merge__an_expert_without_an_unlisted_component_is_told_how_the_rest_is_merged(tmp_path: Path) -> None:
    one, two = speech_model(tmp_path / "one", 1.0, 10.0), speech_model(tmp_path / "two", 3.0, 20.0)
    shutil.rmtree(two / "speech_tokenizer")
    with pytest.raises(MismatchError, match=r"no speech_tokenizer tensors.*`modules:` for 'text'"):
        mergepipe.merge(recipe(tmp_path, one, two), tmp_path / "out", options=NO_CATALOG)
    assert not (tmp_path / "out").exists()
    models = json.loads(recipe(tmp_path, one, two).read_text())["models"]
    path = recipe(tmp_path, modules={"text": {"models": models}})
    path.write_text(path.read_text().replace('"models": [], ', ""))
    assert mergepipe.merge(path, tmp_path / "out", options=NO_CATALOG).copied_tensors == 1
    assert rows(tmp_path / "out" / "speech_tokenizer" / "model.safetensors") == {"decoder.conv.weight": [10.0]}


def test_merge__slices_are_of_the_model_itself_and_not_of_its_components(tmp_path: Path) -> None:
    def write(folder: Path, number: float) -> Path:
        layers = {f"layers.{layer}.weight": [number] for layer in range(3)}
        weights = {"model.safetensors": {"model.layers.0.weight": [number]}, "tower/model.safetensors": layers}
        return write_model(folder, weights, {"config.json": {"num_hidden_layers": 1}})

    sources = [{"model": str(write(tmp_path / f"m{number}", number)), "layer_range": [0, 1]} for number in (1.0, 2.0)]
    stated = {"merge_method": "passthrough", "slices": [{"sources": [each]} for each in sources]}
    mergepipe.merge(stated, tmp_path / "out", options=NO_CATALOG)
    stacked = {"model.layers.0.weight": [1.0], "model.layers.1.weight": [2.0]}
    assert rows(tmp_path / "out" / "model.safetensors") == stacked
    assert len(rows(tmp_path / "out" / "tower" / "model.safetensors")) == 3


@pytest.mark.parametrize(
    ("modules", "message"),
    [('[{"path": "../other"}]', "the folder '../other' of a module cannot be used"), ("{", "is not JSON"),
     ('{"path": 1}', "is not a list of modules")],
)  # fmt: skip
def test_open__refuses_a_list_of_modules_that_is_none(tmp_path: Path, modules: str, message: str) -> None:
    base, one = sentence_model(tmp_path / "base", 0.0, 0.0), sentence_model(tmp_path / "one", 4.0, 8.0)
    (one / "modules.json").write_text(modules)
    with pytest.raises(CorruptError, match=message):
        mergepipe.merge(recipe(tmp_path, base, one), tmp_path / "out", options=NO_CATALOG)


@pytest.mark.parametrize("shard", ["", "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"])
def test_open__finds_the_file_names_of_a_pipeline(tmp_path: Path, shard: str) -> None:
    """Variants alone are read, under the name that loaders look for; weights outside of the components are not."""
    models = [pipeline(tmp_path / name, number, number) for name, number in (("one", 1.0), ("two", 3.0))]
    for model in models:
        (model / "unet" / "diffusion_pytorch_model.safetensors").unlink()
        if shard:
            (model / "unet" / "diffusion_pytorch_model.fp16.safetensors").rename(model / "unet" / shard)
            for place in ("unet/diffusion_pytorch_model", "text_encoder/model"):
                index = model / f"{place}.safetensors.index.fp16.json"
                index.write_text(json.dumps({"weight_map": {"conv.weight": shard}}))
        save_file({"stray": np.zeros(2, np.float32)}, model / "flux.safetensors")
    report = mergepipe.merge(recipe(tmp_path, *models), tmp_path / "out", options=NO_CATALOG)
    assert report.merged_tensors == 2
    assert rows(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors") == {"conv.weight": [0.0, 0.0]}
    assert not [name for name in files_of(tmp_path / "out") if ".index." in name]


def test_merge__a_component_within_a_component_has_a_file_of_its_own(tmp_path: Path) -> None:
    weights = {"a/model.safetensors": {"w": [1.0]}, "a/b/model.safetensors": {"w": [2.0]}}
    model = write_model(tmp_path / "m", weights, {"modules.json": [{"path": "a"}, {"path": "a/b"}]})
    mergepipe.merge(recipe(tmp_path, model, model), tmp_path / "out", options=NO_CATALOG)
    assert rows(tmp_path / "out" / "a" / "b" / "model.safetensors") == {"w": [2.0]}


def test_open__refuses_a_component_that_is_a_link_to_elsewhere(tmp_path: Path) -> None:
    base, one = sentence_model(tmp_path / "base", 0.0, 0.0), sentence_model(tmp_path / "one", 4.0, 8.0)
    (one / "2_Dense").rename(tmp_path / "elsewhere")
    (one / "2_Dense").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match="outside the checkpoint"):
        mergepipe.merge(recipe(tmp_path, base, one), tmp_path / "out", options=NO_CATALOG)


def test_repair__makes_no_folder_behind_a_link(tmp_path: Path) -> None:
    weights = {"a/b/model.safetensors": {"w": [2.0]}}
    model = write_model(tmp_path / "m", weights, {"modules.json": [{"path": "a/b"}]})
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    mergepipe.merge(recipe(tmp_path, model, model), out, options=NO_CATALOG)
    shutil.rmtree(out / "a")
    elsewhere.mkdir()
    (out / "a").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="link"):
        mergepipe.repair(out, catalog=False)
    assert list(elsewhere.iterdir()) == []
