"""No text file that is written or published names a path of this machine, whatever the inputs' files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from mergepipe import tailor
from mergepipe.options import RunOptions
from mergepipe.snapshots.manifest import file_without_paths
from support.bucket_outputs import files_below, new_prefix, objects_below
from support.families import FamilyShape, write_family
from support.model_folders import write_adapter
from support.s3_server import S3Server
from support.training_trees import decoder_shapes, known_states, write_hf

SHAPE = FamilyShape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=True)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS = {"5": {"content": "/usr/bin", "special": False}}
OPTIONS = RunOptions(catalog=False, threads=2)


def write_settings(root: Path, folder: Path) -> None:
    """Files of a model that name paths in many forms, beside tokens and texts that look like paths."""
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    config |= {
        "_name_or_path": str(folder),
        "text": {"_name_or_path": f"file://{folder}", "vision_tower": f"{root}/towers/clip/"},
        "calibration": [f"{root}/data/first.json", "c4"],
        "quantizer": {"base": f"{root}/hub/models--org--name/snapshots/{COMMIT}"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    settings = {
        "name_or_path": str(folder),
        "tokenizer_file": f"{folder}/tokenizer.json",
        "added_tokens_decoder": TOKENS,
        "chat_template": "/think {{ messages }}",
        "extra": {"pad_token": "/pad/"},
    }
    escaped = json.dumps(settings).replace(str(folder), str(folder).replace("/", "\\/"), 1)
    (folder / "tokenizer_config.json").write_text(escaped)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family with a recipe, and checkpoints of a run, all named absolutely."""
    root = tmp_path_factory.mktemp("machine")
    write_family(root, SHAPE, 1)
    for name in ("base", "expert-1"):
        write_settings(root, root / name)
    models = f"[{{model: {root}/expert-1, parameters: {{weight: 0.6}}}}]"
    recipe = f"# of {root}/expert-1\nmerge_method: linear\nbase_model: {root}/base\nmodels: {models}\n"
    (root / "recipe.yml").write_text(recipe)
    for step in (100, 200):
        folder = root / f"checkpoint-{step}"
        write_hf(folder, known_states(decoder_shapes(), seed=step, step=step))
        write_settings(root, folder)
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": str(folder)}))
    factors = {}
    for name, shape in (("lora_A", (4, SHAPE.hidden)), ("lora_B", (SHAPE.hidden, 4))):
        factors[f"model.layers.0.self_attn.q_proj.{name}.weight"] = np.ones(shape, np.float32)
    write_adapter(root / "adapter", factors)
    (root / "adapted.yml").write_text(recipe.replace("expert-1,", f"expert-1+{root}/adapter,"))
    takes = f"take: [{{from: {root}/checkpoint-100, units: [embed]}}]\nstate_from: {root}/checkpoint-200\n"
    (root / "mixed.yml").write_text(f"default: {root}/checkpoint-200\n{takes}")
    return root


@pytest.fixture(scope="module")
def outputs(root: Path) -> Path:
    out = root / "out"
    mergepipe.merge(root / "recipe.yml", out / "merged", home=root / "home", threads=2)
    mergepipe.merge(root / "adapted.yml", out / "adapted", home=root / "home", threads=2)
    mergepipe.merge(root / "adapted.yml", out / "budgeted", home=root / "home", threads=2, budget="60%")
    with chdir(root):  # names in its recipe are relative to the working folder
        mergepipe.apply_lora(root / "base", [root / "adapter"], out / "applied", home=root / "home", threads=2)
    mergepipe.pack(root / "base", [root / "expert-1"], out / "packs", threads=2)
    mergepipe.extract_lora(root / "base", root / "expert-1", out / "lora", rank=2)
    tailor.compose(root / "mixed.yml", out / "mixed")
    checkpoints = [root / "checkpoint-100", root / "checkpoint-200"]
    tailor.average(checkpoints, out / "average", config=checkpoints[0])
    tailor.average(checkpoints, out / "resumable", optimizer="last")
    return out


def naming(root: Path, files: Mapping[str, bytes]) -> list[str]:
    """The files that name a path below `root`."""
    forms = [str(root).encode(), str(root).replace("/", "\\/").encode()]
    return [name for name, raw in files.items() if any(form in raw for form in forms)]


@pytest.mark.parametrize("name", ["merged", "adapted", "budgeted", "applied", "lora", "mixed", "average", "resumable"])
def test_outputs__name_no_path_of_this_machine(root: Path, outputs: Path, name: str) -> None:
    """But where a trainer that resumes looks for its best checkpoint: that one is followed."""
    followed = ["trainer_state.json"] if name in ("mixed", "resumable") else []
    assert naming(root, files_below(outputs / name)) == followed
    settings = files_below(outputs / name).get("tokenizer_config.json")
    assert settings is None or json.loads(settings) == {
        "name_or_path": json.loads(settings)["name_or_path"],
        "tokenizer_file": "tokenizer.json",
        "added_tokens_decoder": TOKENS,
        "chat_template": "/think {{ messages }}",
        "extra": {"pad_token": "/pad/"},
    }


def test_pack__names_no_path_but_in_files_kept_bit_for_bit(root: Path, outputs: Path) -> None:
    pack = outputs / "packs" / "expert-1"
    files, originals = files_below(pack), files_below(root / "expert-1")
    assert naming(root, {name: raw for name, raw in files.items() if originals.get(name) != raw}) == []
    record = json.loads(files["mergepipe-store.json"])
    assert (record["base"], record["expert"]) == ("../../../base", "../../../expert-1")
    mergepipe.unpack(pack, outputs / "back", threads=2)  # the base is found
    assert files_below(outputs / "back") == originals


@pytest.mark.thorough
def test_push__publishes_no_path_of_this_machine(
    server: S3Server, root: Path, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("merged", "adapted", "budgeted", "applied", "mixed", "average", "resumable")
    places = {name: outputs / name for name in names}
    places["pack"] = outputs / "packs" / "expert-1"
    prefix = new_prefix(server, monkeypatch)
    for name, path in places.items():
        report = mergepipe.push(path, f"{prefix}/{name}")
        published = objects_below(f"{prefix}/{name}")
        assert (published.keys(), naming(root, published)) == (files_below(path).keys(), [])
        if name != "pack":
            assert mergepipe.verify(f"{prefix}/{name}", options=OPTIONS).is_sound
    mergepipe.unpack(f"{prefix}/pack", tmp_path / "back", base=root / "base", threads=2)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["_name_or_path"], config["quantizer"]) == ("expert-1", {"base": "org/name"})
    assert report.files > 0


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"_name_or_path": "/models"}, {"_name_or_path": "models"}),
        ({"path": "~/a/b"}, {"path": "b"}),
        ({"path": "C:\\Users\\me\\model"}, {"path": "model"}),
        ({"path": "file:///a/ä"}, {"path": "ä"}),
        ({"tower": "/a"}, {"tower": "/a"}),
        ({"prompts": {"query": "/a/b"}}, {"prompts": {"query": "b"}}),
        ({"id2label": {"0": "/m/09x"}, "eos_token": "/a/b"}, {"id2label": {"0": "/m/09x"}, "eos_token": "/a/b"}),
        ({"name_or_path": "org/name", "url": "https://host/a"}, {"name_or_path": "org/name", "url": "https://host/a"}),
        (
            {"additional_special_tokens": ["/a/b", "/"], "path": "/"},
            {"additional_special_tokens": ["/a/b", "/"], "path": "/"},
        ),
    ],
)
def test_file_without_paths__replaces_absolute_paths_alone(document: Any, expected: Any) -> None:
    assert json.loads(file_without_paths("config.json", json.dumps(document).encode())) == expected


def test_file_without_paths__leaves_other_bytes_and_what_is_no_json() -> None:
    raw = b'{ "path" : "/a/b",\n "x": 1.0E-5, "x": NaN, "broken": "\\ud800 /a" '
    assert file_without_paths("config.json", raw) == raw.replace(b"/a/b", b"b", 1)
    for strange in (b'"' * 5, b'{"path": "/a/b', b"\xff\xfe", b'"\\"' * 100_000, b'"x"' + b" " * 100_000):
        assert len(file_without_paths("config.json", strange)) == len(strange)
    assert file_without_paths("tokenizer.json", b'{"path": "/a/b"}') == b'{"path": "/a/b"}'
