"""Recipes of layers, filters and gradients mean the same here and in mergekit, on models of many architectures."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from safetensors import safe_open

from mergepipe.recipes.layer_names import is_before_layers, layer_lists, longest, module_tensors

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
REQUIRED = "MERGEPIPE_REQUIRE_PEERS"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
N_LAYERS = 4
# float32 sums of a few terms differ by their order; where they cancel, that is more than the last place of the result.
ROUNDING_FRACTION = 4e-7

Recipe = dict[str, object]


@dataclass(frozen=True, slots=True)
class Words:
    """What the names of an architecture's attention and feed-forward tensors have in common."""

    attention: str
    feed_forward: str


WORDS = {
    "llama": Words("self_attn", "mlp"),
    "qwen2": Words("self_attn", "mlp"),
    "qwen3": Words("self_attn", "mlp"),
    "mixtral": Words("self_attn", "experts"),
    "gpt2": Words("attn", "mlp"),
    "bert": Words("attention", "intermediate"),
}


def passthrough_slices(path: str, words: Words) -> Recipe:  # noqa: ARG001
    return {
        "slices": [
            {"sources": [{"model": f"{path}/a", "layer_range": [0, 3]}]},
            {"sources": [{"model": f"{path}/b", "layer_range": [1, 4]}]},
        ],
        "merge_method": "passthrough",
        "dtype": "float32",
    }


def scaled_slices(path: str, words: Words) -> Recipe:
    scale = [{"filter": words.attention, "value": 0.5}, {"filter": words.feed_forward, "value": [1, 2]}, {"value": 1.0}]
    source = {"model": f"{path}/a", "layer_range": [0, 4], "parameters": {"scale": scale}}
    return {"slices": [{"sources": [source]}], "merge_method": "passthrough", "dtype": "float32"}


def slerp_slices(path: str, words: Words) -> Recipe:
    """The shape of mergekit's own slerp example."""
    sources = [{"model": f"{path}/{name}", "layer_range": [0, N_LAYERS]} for name in ("base", "a")]
    t = [
        {"filter": words.attention, "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": words.feed_forward, "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ]
    return {
        "slices": [{"sources": sources}],
        "merge_method": "slerp",
        "base_model": f"{path}/base",
        "parameters": {"t": t},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


def shifted_slices(path: str, words: Words) -> Recipe:  # noqa: ARG001
    """Layers of different depths, a slice of one layer, parameters at every level, a base of its own."""
    return {
        "slices": [
            {
                "sources": [
                    {"model": f"{path}/base", "layer_range": [0, 2]},
                    {"model": f"{path}/a", "layer_range": [2, 4], "parameters": {"weight": [0.2, 0.8]}},
                    {"model": f"{path}/b", "layer_range": [1, 3]},
                ],
                "parameters": {"weight": 0.25},
            },
            {
                "sources": [
                    {"model": f"{path}/b", "layer_range": [3, 4]},
                    {"model": f"{path}/a", "layer_range": [0, 1], "parameters": {"weight": [0.0, 0.75]}},
                ],
                "base_model": f"{path}/b",
            },
        ],
        "merge_method": "task_arithmetic",
        "base_model": f"{path}/base",
        "parameters": {"weight": 1.0, "lambda": [0.5, 1.5]},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


def linear_gradients(path: str, words: Words) -> Recipe:
    weight = [{"filter": words.feed_forward, "value": [0.1, 0.9]}, {"value": 0.6}]
    return {
        "models": [
            {"model": f"{path}/base", "parameters": {"weight": [0.9, 0.2, 0.7]}},
            {"model": f"{path}/a", "parameters": {"weight": weight}},
            {"model": f"{path}/b", "parameters": {"weight": 0.3}},
        ],
        "merge_method": "linear",
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


def linear_slices(path: str, words: Words) -> Recipe:  # noqa: ARG001
    """No base: the first source of a slice is as good as any other."""
    pairs = (("a", "b", 0, 2), ("b", "base", 1, 4))
    return {
        "slices": [
            {
                "sources": [
                    {"model": f"{path}/{first}", "layer_range": [start, stop], "parameters": {"weight": 0.3}},
                    {"model": f"{path}/{second}", "layer_range": [start, stop], "parameters": {"weight": [0.4, 0.8]}},
                ]
            }
            for first, second, start, stop in pairs
        ],
        "merge_method": "linear",
        "parameters": {"normalize": [True, False]},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


def ties_gradients(path: str, words: Words) -> Recipe:
    """The shape of mergekit's own ties example. No density here rounds to nothing: mergekit keeps one element then."""
    conditional = [{"filter": words.feed_forward, "value": 0.5}, {"value": 0}]
    return {
        "models": [
            {"model": f"{path}/a", "parameters": {"density": [1, 0.7, 0.2], "weight": 1.0}},
            {"model": f"{path}/b", "parameters": {"density": 0.33, "weight": conditional}},
        ],
        "merge_method": "ties",
        "base_model": f"{path}/base",
        "parameters": {"normalize": True, "int8_mask": False},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


def modules(path: str) -> Recipe:
    """Parts of a model of two: slices of the one, models in the other."""
    sources = [
        {"model": f"{path}/a", "layer_range": [0, 2], "parameters": {"weight": [0.2, 0.8]}},
        {"model": f"{path}/b", "layer_range": [0, 2], "parameters": {"weight": 0.5}},
    ]
    models = [
        {"model": f"{path}/a", "parameters": {"weight": 0.5}},
        {"model": f"{path}/b", "parameters": {"weight": [0.1, 0.9]}},
    ]
    return {
        "modules": {"encoder": {"slices": [{"sources": sources}]}, "decoder": {"models": models}},
        "merge_method": "linear",
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }


RECIPES: dict[str, Callable[[str, Words], Recipe]] = {
    each.__name__: each
    for each in (
        passthrough_slices,
        scaled_slices,
        slerp_slices,
        shifted_slices,
        linear_gradients,
        linear_slices,
        ties_gradients,
    )
}


def run_peer(script: str, directory: Path, *options: str) -> None:
    command = [str(PEER_PYTHON), str(Path(__file__).with_name(script)), str(directory), *options]
    ran = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, all recipes, and what mergekit made of them."""
    if not PEER_PYTHON.exists() and not os.environ.get(REQUIRED):
        pytest.skip("no .venv-peer: run `make test-peers`")
    root = tmp_path_factory.mktemp("architectures")
    run_peer("make_architectures.py", root)
    for architecture, words in WORDS.items():
        for name, recipe in RECIPES.items():
            content = recipe(f"{root}/{architecture}", words)
            (root / f"{architecture}-{name}.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    (root / "t5-modules.yml").write_text(yaml.safe_dump(modules(f"{root}/t5"), sort_keys=False))
    run_peer("run_mergekit.py", root, "--tensors-only")
    return root


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("architecture", WORDS)
def test_recipe__means_the_same_in_mergekit(made: Path, architecture: str, name: str, tmp_path: Path) -> None:
    import mergepipe

    mergepipe.merge(made / f"{architecture}-{name}.yml", tmp_path / "out")
    ours, theirs = dict(tensors(tmp_path / "out")), dict(tensors(made / f"{architecture}-{name}-mergekit"))
    assert ours.keys() == theirs.keys()
    scale = max(float(np.abs(each).max()) for _, each in tensors(made / architecture / "b"))
    assert {key: far for key in ours if (far := n_different(ours[key], theirs[key], scale))} == {}


def test_recipe__of_modules_means_the_same_in_mergekit_and_loses_nothing(made: Path, tmp_path: Path) -> None:
    import mergepipe

    mergepipe.merge(made / "t5-modules.yml", tmp_path / "out")
    ours, theirs = dict(tensors(tmp_path / "out")), dict(tensors(made / "t5-modules-mergekit"))
    assert ours.keys() - theirs.keys() == {"shared.weight"}  # in no module: copied here, forgotten there
    assert theirs.keys() <= ours.keys()
    assert {key: far for key in theirs if (far := n_different(ours[key], theirs[key], 2.0))} == {}


def n_different(ours: NDArray[np.generic], theirs: NDArray[np.generic], scale: float) -> int:
    """How many elements differ by more than one unit in the last place of their dtype, and than rounding explains."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    wide, other = ours.astype(np.float64), theirs.astype(np.float64)
    relative = 2.0**-23 if ours.dtype == np.float32 else 2.0**-7
    allowed = np.maximum(np.maximum(np.abs(wide), np.abs(other)) * relative, scale * ROUNDING_FRACTION)
    return int(np.count_nonzero(np.abs(wide - other) > allowed))


def test_n_different__tells_one_unit_from_two() -> None:
    ones = np.ones(3, np.float32)
    others = np.array([1.0, 1.0 + 2.0**-23, 1.0 + 3 * 2.0**-23], np.float32)
    assert n_different(ones, others, 1e-9) == 1


def tensors(model: Path) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Every tensor of a model."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


Names = tuple[list[str], list[str], list[str]]
DEPTH = 5  # of the layers that names are made up for; other parts of a model have fewer


def architectures() -> dict[str, dict[str, Names]]:
    """What mergekit knows of architectures: for each module the tensors before, in and behind its layers."""
    found: dict[str, dict[str, Names]] = {}
    for file in sorted(ROOT.glob(".venv-peer/lib/python3*/site-packages/mergekit/_data/architectures/*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        modules = content.get("modules", {"default": {"architecture": content}})
        found[file.stem] = {name: names_of(name, module) for name, module in modules.items()}
    found.pop("whisper", None)  # its decoder's prefix lacks a dot there
    return found


def names_of(module: str, content: Mapping[str, Any]) -> Names:
    """The names of one module's tensors."""
    prefix, architecture = content.get("weight_prefix") or "", content["architecture"]
    depth = DEPTH - 2 if module == "vision_tower" else DEPTH
    before, behind = (
        [prefix + w["name"] for w in architecture.get(key) or ()] for key in ("pre_weights", "post_weights")
    )
    templates = [prefix + w["name"] for w in (architecture.get("layer_templates") or {}).get("weights", ())]
    return before, [t.replace("${layer_index}", str(i)) for i in range(depth) for t in templates], behind


@pytest.mark.parametrize(("architecture", "modules"), architectures().items(), ids=lambda value: str(value)[:24])
def test_layers__are_found_by_name_where_mergekit_knows_them(architecture: str, modules: dict[str, Names]) -> None:
    names = [name for module in modules.values() for names in module for name in names]
    for module, (before, inside, behind) in modules.items():
        if len(modules) == 1:
            assert [found.n_layers for found in longest(layer_lists(names))] == [DEPTH]
            assert [name for name in before if not is_before_layers(name)] == []
        else:
            assert set(module_tensors(module, names)) == {*before, *inside, *behind}, architecture
        assert [name for name in behind if is_before_layers(name)] == []
