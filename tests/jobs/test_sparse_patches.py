"""Sparse patches: bit for bit, as the readers of RL weight sync take them, read as experts, restored on their base."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, MismatchError
from support.model_folders import recipe_of, write_model

SHAPES = {"model.a.weight": (300, 400), "model.b.weight": (7,), "model.same.weight": (5, 5)}
Tensors = dict[str, NDArray[Any]]


def write_family(folder: Path, *, share: float = 0.02, dtype: Any = ml_dtypes.bfloat16) -> tuple[Path, Path]:
    """A base, and an expert that differs from it in a share of the elements, in signs of zero and in NaN too."""
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    base["model.b.weight"][0] = 0.0
    expert = {name: values.copy() for name, values in base.items()}
    flat = expert["model.a.weight"].reshape(-1)
    changed = rng.choice(flat.size, int(share * flat.size), replace=False)
    flat[changed] = rng.standard_normal(len(changed)).astype(dtype)
    expert["model.b.weight"][:2] = np.array([-0.0, np.nan], dtype)
    return write_model(folder / "base", base, {"model_type": "x"}), write_model(folder / "expert", expert)


def read_as_servers_do(path: Path, base: Tensors) -> Tensors:
    """Apply a patch as TRL's receiver does: positions from gaps, whose width is that of their dtype."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
    assert (metadata["format"], metadata["version"], metadata["sparse"]) == ("sparse_weight_patch", "1", "True")
    assert metadata["encoding"] in ("raw", "gap_delta")
    stored = load_file(path)
    patched = {name: values.copy() for name, values in base.items()}
    for name in sorted(key.removesuffix(".val") for key in stored if key.endswith(".val")):
        positions = stored[f"{name}.idx"].astype(np.int64)
        if metadata["encoding"] == "gap_delta":
            positions = np.cumsum(positions + 1) - 1
        patched[name].reshape(-1)[positions] = stored[f"{name}.val"]
    assert int(metadata["total_elements"]) == sum(values.size for values in base.values())
    return patched


def assert_same_bits(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_pack__to_sparse_is_restored_bit_for_bit_by_servers_and_by_unpack(tmp_path: Path, dtype: Any) -> None:
    base, expert = write_family(tmp_path, dtype=dtype)
    report = mergepipe.pack(base, [expert], tmp_path / "packed", form="sparse")
    patch = tmp_path / "packed" / "expert"
    [packed] = report.experts
    assert packed.store == patch
    assert packed.store_bytes < packed.tensor_bytes / 5
    assert mergepipe.verify(patch).is_sound
    tensors = load_file(expert / "model.safetensors")
    assert_same_bits(tensors, read_as_servers_do(patch / "patch.safetensors", load_file(base / "model.safetensors")))
    assert not any(name.startswith("model.same") for name in load_file(patch / "patch.safetensors"))
    for number, place in enumerate((patch, patch / "patch.safetensors")):
        mergepipe.unpack(place, tmp_path / f"out{number}", base=base)
        assert_same_bits(tensors, load_file(tmp_path / f"out{number}" / "model.safetensors"))


@pytest.mark.parametrize("form", ["raw", "first version", "wide gaps"])
def test_unpack__reads_the_forms_that_trainers_write(tmp_path: Path, form: str) -> None:
    base, expert = write_family(tmp_path)
    start, end = (load_file(folder / "model.safetensors") for folder in (base, expert))
    ends = (".indices", ".values") if form == "first version" else (".idx", ".val")
    stored: Tensors = {}
    for name, values in end.items():
        bits = [tensor.reshape(-1).view(np.uint16) for tensor in (values, start[name])]
        positions = np.flatnonzero(bits[0] != bits[1])
        if len(positions):
            gaps = np.diff(positions, prepend=-1) - 1
            stored[name + ends[0]] = gaps.astype(np.uint32) if form == "wide gaps" else positions.astype(np.int32)
            stored[name + ends[1]] = values.reshape(-1)[positions]
    encoding = {"raw": {"encoding": "raw"}, "first version": {}, "wide gaps": {"encoding": "gap_delta"}}[form]
    save_file(stored, tmp_path / "step.safetensors", {"sparse": "True", **encoding})
    mergepipe.unpack(tmp_path / "step.safetensors", tmp_path / "out", base=base)
    assert_same_bits(end, load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize("place", ["packed/expert", "packed/expert/patch.safetensors"])
def test_merge__reads_a_sparse_patch_as_the_expert_that_it_was_made_from(tmp_path: Path, place: str) -> None:
    base, expert = write_family(tmp_path, dtype=np.float32)
    for folder in (base, expert):  # what is not finite is another matter
        tensors = load_file(folder / "model.safetensors")
        tensors["model.b.weight"] = np.nan_to_num(tensors["model.b.weight"], nan=2.0)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    mergepipe.pack(base, [expert], tmp_path / "packed", form="sparse")
    made = []
    for number, model in enumerate((expert, tmp_path / place)):
        recipe = tmp_path / f"{number}.yml"
        recipe.write_text(json.dumps(recipe_of("ties", {model: {"weight": 0.7, "density": 0.5}}, base)))
        mergepipe.merge(recipe, tmp_path / f"out{number}", catalog=False)
        made.append(load_file(tmp_path / f"out{number}" / "model.safetensors"))
    assert_same_bits(*made)


def test_pack__to_sparse_refuses_what_a_patch_cannot_hold(tmp_path: Path) -> None:
    base, _ = write_family(tmp_path)
    tensors = load_file(base / "model.safetensors")
    larger = write_model(tmp_path / "larger", {**tensors, "model.new.weight": np.ones(3, np.float32)})
    wider = write_model(tmp_path / "wider", {**tensors, "model.b.weight": np.ones(9, ml_dtypes.bfloat16)})
    for expert, words in ((larger, "has no 'model.new.weight'"), (wider, r"\[9\], in the base BF16 \[7\]")):
        with pytest.raises(MergePipeError, match=words):
            mergepipe.pack(base, [expert], tmp_path / "packed", form="sparse")
    with pytest.raises(MergePipeError, match="made on one base"):
        mergepipe.pack([base, larger], [wider], tmp_path / "packed", form="sparse")
    with pytest.raises(MergePipeError, match="each made on the base"):
        mergepipe.pack(base, [wider], tmp_path / "packed", form="sparse", chain=2)
    assert not (tmp_path / "packed" / "larger").exists()


def test_unpack__of_a_sparse_patch_refuses_a_base_with_other_values(tmp_path: Path) -> None:
    base, expert = write_family(tmp_path)
    mergepipe.pack(base, [expert], tmp_path / "packed", form="sparse")
    patch = tmp_path / "packed" / "expert"
    with pytest.raises(MismatchError, match=r"it was made on .*base, and .*expert holds other values"):
        mergepipe.unpack(patch, tmp_path / "out", base=expert)
    assert not (tmp_path / "out").exists()
    shutil.move(base, tmp_path / "copy")
    mergepipe.unpack(patch, tmp_path / "out", base=tmp_path / "copy")


def test_unpack__of_a_sparse_patch_refuses_another_base_and_a_damaged_file(tmp_path: Path) -> None:
    base, expert = write_family(tmp_path)
    mergepipe.pack(base, [expert], tmp_path / "packed", form="sparse")
    patch = tmp_path / "packed" / "expert"
    with pytest.raises(MergePipeError, match="holds the values that differ, and no base"):
        mergepipe.unpack(patch, tmp_path / "out")
    other, _ = write_family(tmp_path / "other", dtype=np.float16)
    with pytest.raises(MismatchError, match="is BF16, in the base F16"):
        mergepipe.unpack(patch / "patch.safetensors", tmp_path / "out", base=other)
    stored = load_file(patch / "patch.safetensors")
    for name, positions, words in (
        ("outside", np.array([1 << 30], np.uint32), "are outside its 120000 elements"),
        ("twice", np.array([3, 3], np.int32), "occur twice"),
        ("uneven", np.array([3, 4, 5], np.int32), "the positions and values of 'model.a.weight' are"),
        ("packed", np.array([3], np.int32), "in the encoding 'nvcomp_cascaded'"),
    ):
        values = stored["model.a.weight.val"][: 2 if name in ("twice", "uneven") else 1]
        encoding = "nvcomp_cascaded" if name == "packed" else "raw"
        file = tmp_path / f"{name}.safetensors"
        save_file({"model.a.weight.idx": positions, "model.a.weight.val": values}, file, {"encoding": encoding})
        with pytest.raises(MergePipeError, match=words):
            mergepipe.unpack(file, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()
