"""A merge takes every kind of expert, and comes to what the same experts in full weights come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file
from small_models import lora, opened, product, random, write_composite_manifest, write_recipe

import mergepipe
from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.checkpoints.torch_file import SUFFIXES, WRAPPERS
from mergepipe.errors import UnsupportedError
from mergepipe.options import MergeOptions
from mergepipe.runs.inputs import open_model
from mergepipe.storage.location import Location
from support.model_folders import recipe_of, write_adapter, write_model
from support.named_models import named
from support.places import DOCS
from support.refusals import refuses
from support.stores import MetadataStore
from support.torch_bytes import View, torch_bytes

MODULES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in (("q", (96, 64)), ("up", (160, 64)))}
Tensors = dict[str, NDArray[Any]]


def base_tensors() -> Tensors:
    weights: Tensors = {f"{m}.weight": random(*shape, seed=i) for i, (m, shape) in enumerate(MODULES.items())}
    return {**weights, "norm.weight": random(64), "embed.weight": random(50, 64)}


def tuned(seed: int) -> Tensors:
    return {
        n: (t + np.float32(0.01) * random(*t.shape, seed=seed)).astype(np.float32) for n, t in base_tensors().items()
    }


def merged(root: Path, experts: Mapping[str, float], method: str = "task_arithmetic") -> Tensors:
    """Merge directories of `root` into the float32 result."""
    density = {} if method == "task_arithmetic" else {"density": 0.4}
    models = {root / name: {"weight": weight, **density} for name, weight in experts.items()}
    recipe = recipe_of(method, models, root / "base", dtype="float32")
    out = root / "-".join([*experts, method])
    mergepipe.merge(recipe, out, force=True)
    return dict(load_file(out / "model.safetensors"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "base", base_tensors())
    write_model(tmp_path / "full", tuned(20))
    return tmp_path


def same_bits(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_merge__a_pickle_merges_as_safetensors_do(root: Path, method: str) -> None:
    (root / "pt").mkdir()
    views = {n: View(t.ravel(), 0, t.shape) for n, t in tuned(21).items()}
    (root / "pt" / "pytorch_model.bin").write_bytes(torch_bytes(views))
    write_model(root / "st", tuned(21))
    first, second = (merged(root, {"full": 0.4, name: 0.7}, method) for name in ("pt", "st"))
    assert same_bits(first, second)


def marked_recipe(root: Path, model: object, method: str = "task_arithmetic") -> Path:
    return write_recipe(root, method, model, weight=0.7, base_model=str(root / "base"), dtype="float32")


def test_merge__a_recipe_can_say_that_weights_are_differences(root: Path) -> None:
    base, own = base_tensors(), tuned(22)
    write_model(root / "vector", {name: own[name] - base[name] for name in own if name != "norm.weight"})
    recipe = marked_recipe(root, {"path": str(root / "vector"), "delta": True})
    report = mergepipe.merge(recipe, root / "marked")
    out = load_file(root / "marked" / "model.safetensors")
    assert report.dropped_tensors == 0
    for name, value in base.items():
        delta = own[name] - value if name != "norm.weight" else 0 * value
        np.testing.assert_allclose(out[name], value + np.float32(0.7) * delta, rtol=1e-6, atol=1e-7)
    assert mergepipe.verify(root / "marked", deep_fraction=1.0).is_sound
    mergepipe.replay(root / "marked", root / "again")
    assert same_bits(dict(load_file(root / "again" / "model.safetensors")), dict(out))
    mergepipe.run(mergepipe.plan(recipe, "100%"), root / "planned")
    assert same_bits(dict(load_file(root / "planned" / "model.safetensors")), dict(out))


def test_merge__the_same_files_as_weights_share_no_statistics_with_differences(root: Path) -> None:
    as_weights = marked_recipe(root, str(root / "full"))
    mergepipe.analyze(root / "base", [root / "full"])
    mergepipe.merge(as_weights, root / "first")
    as_differences = marked_recipe(root, {"path": str(root / "full"), "delta": True})
    mergepipe.merge(as_differences, root / "second", budget="100%")
    out = load_file(root / "second" / "model.safetensors")
    for name, value in base_tensors().items():
        np.testing.assert_allclose(out[name], value + np.float32(0.7) * tuned(20)[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_merge__an_adapter_merges_as_what_it_makes_of_the_base(root: Path, method: str) -> None:
    factors: Tensors = {}
    for module, (rows, columns) in MODULES.items():
        factors |= {n: (0.1 * t).astype(np.float32) for n, t in lora(module, rows, columns).items()}
    write_adapter(root / "adapter", factors)
    made = {n: t.astype(np.float64) for n, t in base_tensors().items()}
    for module in MODULES:
        made[f"{module}.weight"] += 2 * product(factors, module)
    write_model(root / "expert", {n: t.astype(np.float32) for n, t in made.items()})
    first, second = (merged(root, {"full": 0.4, name: 0.7}, method) for name in ("adapter", "expert"))
    wrong = sum(int(np.count_nonzero(~np.isclose(first[n], second[n], rtol=0, atol=3e-6))) for n in first)
    # a threshold of TIES may fall between two elements that the two ways round differently
    assert wrong <= (0 if method == "task_arithmetic" else 0.002 * sum(t.size for t in first.values()))


def test_merge__base_and_adapter_is_an_expert_of_another_base(root: Path) -> None:
    factors = lora("model.layers.1.q", 96, 64)
    write_adapter(root / "adapter", factors)
    made = tuned(20)
    made["model.layers.1.q.weight"] = (
        made["model.layers.1.q.weight"] + 2 * product(factors, "model.layers.1.q")
    ).astype(np.float32)
    write_model(root / "expert", made)
    outs: list[Tensors] = []
    for name in (f"{root / 'full'}+{root / 'adapter'}", str(root / "expert")):
        recipe = write_recipe(root, "task_arithmetic", name, weight=0.5, base_model=str(root / "base"))
        mergepipe.merge(recipe, root / "out", force=True)
        outs.append(dict(load_file(root / "out" / "model.safetensors")))
    assert all(np.allclose(outs[0][n], outs[1][n], rtol=0, atol=2e-5) for n in outs[0])
    assert not np.allclose(outs[0]["model.layers.1.q.weight"], base_tensors()["model.layers.1.q.weight"], atol=0.1)


def test_merge__experts_in_another_layout_merge_as_in_the_bases(root: Path) -> None:
    singles = {
        f"l.0.mlp.experts.{e}.{r}_proj.weight": random(*((24, 16) if r != "down" else (16, 24)), seed=e)
        for e in range(4) for r in ("gate", "up", "down")
    }  # fmt: skip
    fused = {
        "l.0.mlp.experts.gate_up_proj": np.stack(
            [
                np.concatenate([singles[f"l.0.mlp.experts.{e}.{r}_proj.weight"] for r in ("gate", "up")])
                for e in range(4)
            ]
        ),
        "l.0.mlp.experts.down_proj": np.stack([singles[f"l.0.mlp.experts.{e}.down_proj.weight"] for e in range(4)]),
    }
    write_model(root / "base", {n: t * 2 for n, t in fused.items()})
    write_model(root / "single", singles)
    write_model(root / "fused", fused)
    assert same_bits(merged(root, {"single": 0.3}), merged(root, {"fused": 0.3}))


def test_merge__an_adapter_under_a_budget_is_read_or_left_out(root: Path) -> None:
    big = {"a.weight": random(1024, 1024), "b.weight": random(1024, 1024, seed=1)}
    write_model(root / "base", {n: t.astype(ml_dtypes.bfloat16) for n, t in big.items()})
    factors: Tensors = {**lora("a", 1024, 1024, rank=8), **lora("b", 1024, 1024, rank=8)}
    write_adapter(root / "adapter", factors, r=8)
    stored = sum(t.nbytes for t in factors.values())
    more = {"base_model": str(root / "base"), "dtype": "float32"}
    recipe = write_recipe(root, "task_arithmetic", root / "adapter", weight=0.5, **more)
    by_norm = MergeOptions(select="norm")  # a sample reads parts, an adapter has none
    report = mergepipe.merge(recipe, root / "out", budget=f"{stored * 6 // 10}B", options=by_norm)
    manifest = json.loads((root / "out" / "mergepipe.json").read_text())
    assert 0 < manifest["realized"]["expert"] + manifest["realized"]["analysis"] <= stored * 6 // 10
    out = load_file(root / "out" / "model.safetensors")
    changed = [n for n, t in big.items() if not np.array_equal(out[n], t.astype(ml_dtypes.bfloat16).astype(np.float32))]
    assert len(changed) == 1
    assert report.expert_bytes < stored


def sliced(method: str, *pieces: list[tuple[str, int, int]], **more: object) -> dict[str, Any]:
    """A recipe of slices; a model `base+part` is the adapter `part` applied to the base."""
    slices = [{"sources": [{"model": m, "layer_range": [a, b]} for m, a, b in piece]} for piece in pieces]
    return {"merge_method": method, "slices": slices, "dtype": "float32", **more}


SLICED = {
    "adapted last": sliced("passthrough", [("base", 0, 1)], [("base+part", 0, 2)]),
    "adapted first": sliced("passthrough", [("base+part", 0, 2)], [("base", 0, 2)]),
    "same layers": sliced("task_arithmetic", [("base", 0, 2), ("base+part", 0, 2)], base_model="base",
                          parameters={"weight": 0.5}),
    "other layers": sliced("task_arithmetic", [("base", 0, 1), ("base+part", 1, 2)],
                           [("base", 1, 2), ("base+part", 0, 1)], base_model="base", parameters={"weight": 0.5}),
    "modules": {"merge_method": "passthrough", "dtype": "float32", "modules": {
        "text_decoder": {"slices": sliced("", [("base", 0, 1)], [("base+part", 0, 2)])["slices"]}}},
}  # fmt: skip


@pytest.mark.parametrize("case", SLICED)
def test_merge__slices_of_an_adapted_base_are_those_of_its_weights(
    root: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "model.layers.1.q"  # layer 0 has no adapter
    factors = lora(module, *MODULES[module])
    write_adapter(root / "part", factors)
    applied = base_tensors()
    applied[f"{module}.weight"] = (applied[f"{module}.weight"] + 2 * product(factors, module)).astype(np.float32)
    write_model(root / "applied", applied)
    monkeypatch.chdir(root)
    text = yaml.safe_dump(SLICED[case])
    for name, recipe in (("one", text), ("other", text.replace("base+part", "applied"))):
        (root / f"{name}.yml").write_text(recipe)
        mergepipe.merge(root / f"{name}.yml", root / name, catalog=False)
    one, other = (load_file(root / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("pieces", [[("base", 0, 1)], [("part", 0, 2)]])
def test_merge__slices_of_a_bare_adapter_are_refused(
    root: Path, pieces: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(root / "part", lora("model.layers.1.q", *MODULES["model.layers.1.q"]))
    monkeypatch.chdir(root)
    recipe = sliced("passthrough", [("base", 0, 1)], [("part", 0, 2)], pieces)
    with refuses(UnsupportedError, "model.unsupported"):
        mergepipe.merge(recipe, root / "out", catalog=False)


# --- what a recipe may name as a model, and what it may not


W: NDArray[np.float32] = random(6, 8)
FP8 = W.astype(ml_dtypes.float8_e4m3fn)


def test_open_model__reads_no_tensor_byte_of_plain_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"a.weight": W})
    store = MetadataStore()
    first = open_model(store, named(Location.local(path)), None)
    assert open_model(store, named(Location.local(path)), first) == first


def test_open_model__opens_snapshots_as_any_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"a": W})
    (path / "mergepipe.json").write_text('{"format": "mergepipe-manifest/1"}')
    assert opened(path).kind is CheckpointKind.FULL


def test_open_model__refuses_a_composite(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"a": W})
    write_composite_manifest(path, optimizer="kept")
    with refuses(UnsupportedError, "model.unsupported", "is a composite, a training checkpoint"):
        opened(path)
    write_composite_manifest(path, optimizer="none")
    assert opened(path).kind is CheckpointKind.FULL


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"l.qweight": W.astype(np.int32), "l.qzeros": W.astype(np.int32), "l.scales": W}, "GPTQ or AWQ"),
        ({"l.weight_packed": W.astype(np.int32), "l.weight_scale": W}, "compressed-tensors, packed"),
        ({"l.weight": FP8, "l.scales": W}, "F8_E4M3 with scales"),
        ({"l.weight": W.astype(np.int8), "l.weight_scale": W}, "I8 with scales"),
        ({"l.weight": W.astype(np.uint8), "l.weight.absmax": W, "l.weight.quant_map": W}, "bitsandbytes, 4 bits"),
        ({"l.weight": W, "l.SCB": W[:, 0]}, "bitsandbytes, 8 bits"),
        ({"e.gate_up_proj_blocks": W.astype(np.uint8), "e.gate_up_proj_scales": W.astype(np.uint8)}, "MXFP4 blocks"),
    ],
)
def test_open_model__refuses_quantised_weights(
    tmp_path: Path, tensors: dict[str, NDArray[np.generic]], what: str
) -> None:
    with refuses(UnsupportedError, "model.unsupported", what):
        opened(write_model(tmp_path / "m", tensors))


def test_open_model__refuses_codes_that_the_configuration_declares(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", {"l.weight": FP8})
    assert opened(path).tensors.keys() == {"l.weight"}
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(UnsupportedError, match="declares the quantisation 'fp8'"):
        opened(path)


def test_open_model__plain_weights_may_use_such_names(tmp_path: Path) -> None:
    names = ("l.weight", "l.weight_scale", "logit_scale", "a.scales", "b.blocks", "c_blocks", "position.scale")
    config = {"quantization_config": {"quant_method": "left over"}}
    path = write_model(tmp_path / "m", dict.fromkeys(names, W), config)
    assert opened(path).tensors.keys() == set(names)


def test_experts_doc__states_wrappers_and_suffixes() -> None:
    text = (DOCS / "guide" / "kinds-of-models.md").read_text(encoding="utf-8")
    stated = (*SUFFIXES, *WRAPPERS)
    assert [word for word in stated if f"`{word}`" not in text] == []
