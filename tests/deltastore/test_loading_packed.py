"""Tensors of packed experts and of plain checkpoints by name, outside merges: the bits of the original, lazily."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packing_cases import N_WIDE, PackFamily, make_family, relabel

import mergepipe
from mergepipe.deltastore.index import HEADER_NAME
from mergepipe.errors import ConflictError, CorruptError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from mergepipe.storage.local import LocalStore
from support.safetensors_bytes import file_bytes, record


@pytest.fixture(scope="module", name="family")
def make_packed_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    family = make_family(tmp_path_factory.mktemp("family"), 1)
    mergepipe.pack(family.base, family.experts, family.root / "packed")
    return family


def test_load_file__of_a_store_gives_the_tensors_of_the_original(family: PackFamily) -> None:
    plain = mergepipe.load_file(family.experts[0])
    packed = mergepipe.load_file(family.root / "packed" / "expert-1", threads=2)
    assert list(packed) == list(plain)
    assert len(packed) == 4
    for name in plain:
        assert packed[name].dtype == np.float32
        assert packed[name].shape == packed.shape(name) == plain.shape(name)
        assert packed[name].tobytes() == plain[name].tobytes()
    assert packed.dtype("b.norm") == "BF16"
    assert "b.norm" in packed
    assert "absent" not in packed
    with pytest.raises(KeyError):
        packed["absent"]
    assert "4 tensors" in repr(packed)


def test_load_file__opens_nothing_but_what_the_asked_tensor_needs(
    family: PackFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real_open = LocalStore.open

    def watched(store: LocalStore, location: object, **options: bool) -> object:
        opened.append(Path(str(location)).name)
        return real_open(store, location, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "open", watched)
    tensors = mergepipe.load_file(family.experts[0])
    assert "model.safetensors" not in opened
    tensors["b.norm"]
    assert opened.count("model.safetensors") == 1


def test_load_file__gives_every_dtype_in_numpy_or_says_what_can(tmp_path: Path) -> None:
    halves = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    contents = {
        "bf16": ("BF16", [3], halves.tobytes()),
        "f8": ("F8_E4M3", [2], bytes([0x38, 0xB8])),
        "i32": ("I32", [2, 1], np.array([5, -6], np.int32).tobytes()),
        "flag": ("BOOL", [], b"\1"),
        "none": ("F16", [0, 4], b""),
        "scale": ("F8_E8M0", [1], b"\x7f"),
    }
    header, at = {}, 0
    for name, (dtype, shape, content) in contents.items():
        header[name] = record(at, at + len(content), dtype=dtype, shape=shape)
        at += len(content)
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(header, b"".join(content for _, _, content in contents.values())))
    tensors = mergepipe.load_file(path)
    assert tensors["bf16"].tolist() == [1.0, -2.0, np.inf]
    assert tensors["f8"].tolist() == [1.0, -1.0]
    assert tensors["i32"].tolist() == [[5], [-6]]
    assert tensors["flag"].dtype == np.bool_
    assert tensors["flag"].shape == ()
    assert tensors["none"].shape == (0, 4)
    mergepipe.pack(None, [path], tmp_path / "packed")
    packed = mergepipe.load_file(tmp_path / "packed" / "model")
    assert packed["none"].shape == (0, 4)
    assert packed["i32"].tolist() == [[5], [-6]]
    with pytest.raises(UnsupportedError, match="numpy has no dtype for F8_E8M0") as caught:
        tensors["scale"]
    assert caught.value.code == "model.unsupported"


def test_load_file__finds_a_moved_base_by_its_name_and_refuses_another(family: PackFamily, tmp_path: Path) -> None:
    base = shutil.copytree(family.base, tmp_path / "base")
    mergepipe.pack(base, family.experts, tmp_path / "packed")
    moved = base.rename(tmp_path / "moved")
    store = tmp_path / "packed" / "expert-1"
    with pytest.raises(NotFoundError) as missing:
        mergepipe.load_file(store)
    assert missing.value.code == "input.not-found"
    wanted = mergepipe.load_file(family.experts[0])["c.square"]
    assert mergepipe.load_file(store, base=moved)["c.square"].tobytes() == wanted.tobytes()
    with pytest.raises(MismatchError):
        mergepipe.load_file(store, base=family.experts[0])["c.square"]


def test_load_file__refuses_a_file_that_changed_since_it_was_opened(family: PackFamily, tmp_path: Path) -> None:
    model = shutil.copytree(family.experts[0], tmp_path / "model")
    tensors = mergepipe.load_file(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConflictError) as caught:
        tensors["b.norm"]
    assert caught.value.code == "input.changed"


def test_load_file__refuses_what_it_cannot_give(family: PackFamily, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as framework:
        mergepipe.load_file(family.base, framework="jax")
    assert framework.value.code == "option.invalid"
    with pytest.raises(RecipeError) as pair:
        mergepipe.load_file(family.base, base=family.base)
    assert pair.value.code == "option.conflict"
    mergepipe.pack(None, [family.base], tmp_path / "packed")
    with pytest.raises(RecipeError, match="was packed without a base"):
        mergepipe.load_file(tmp_path / "packed" / family.base.name, base=family.base)


@pytest.mark.parametrize(("key", "value"), [("name", "a.wider"), ("shape", [N_WIDE, 1]), ("header_blake3", "0" * 32)])
def test_store__that_says_something_else_than_the_original_headers_is_refused(
    family: PackFamily, tmp_path: Path, key: str, value: object
) -> None:
    def lie(document: dict[str, Any]) -> None:
        document["files" if key == "header_blake3" else "tensors"][0][key] = value

    mergepipe.pack(None, [family.base], tmp_path / "alone")
    store = relabel(shutil.copytree(tmp_path / "alone" / "base", tmp_path / "lying"), lie)
    with pytest.raises(CorruptError, match="the header of"):
        mergepipe.load_file(store)
    damages = mergepipe.verify(store).damages
    assert any("the header of" in damage.message for damage in damages)
    with pytest.raises(CorruptError, match="the header of"):
        mergepipe.unpack(store, tmp_path / "out")


def test_verify__tells_a_content_id_that_is_not_that_of_the_tensors(family: PackFamily, tmp_path: Path) -> None:
    packed = family.root / "packed" / "expert-1"
    store = shutil.copytree(packed, tmp_path / "lying")
    relabel(store, lambda document: document.update(content_id="0" * 32))
    assert [damage.file for damage in mergepipe.verify(store, base=family.base).damages] == [HEADER_NAME]
    assert mergepipe.verify(packed).is_sound
