"""Weights saved by torch.save, as byte ranges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.torch_file import TorchWeights, read_torch_weights
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from support.stores import MetadataStore
from support.torch_bytes import Call, Named, View, torch_bytes

A: NDArray[np.float32] = np.arange(24, dtype=np.float32)
STATE: dict[object, object] = {"a": View(A, 0, (4, 6)), "b": View(A, 6, (6,))}


def weights(tmp_path: Path, value: object, name: str = "w.bin") -> TorchWeights:
    (tmp_path / name).write_bytes(torch_bytes(value))
    return read_torch_weights(MetadataStore(), Location.local(tmp_path / name))


def values(entry: TensorEntry) -> list[float]:
    raw = entry.file.local_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    return [float(value) for value in np.frombuffer(raw, np.float32)]


@pytest.mark.parametrize(
    "wrapped",
    [
        STATE,
        {"state_dict": STATE, "epoch": 3},
        {"module": STATE},
        {"model": {"state_dict": STATE}},
        {**STATE, "x": None},
    ],
    ids=["plain", "lightning", "deepspeed", "twice", "with-nothing"],
)
def test_read_torch_weights__finds_the_state(tmp_path: Path, wrapped: object) -> None:
    found = {entry.name: entry for entry in weights(tmp_path, wrapped).entries}
    assert {name: values(entry) for name, entry in found.items()} == {"a": A.tolist(), "b": A[6:12].tolist()}
    assert (found["a"].shape, found["a"].offset + 24) == ((4, 6), found["b"].offset)


def test_read_torch_weights__digests_places_and_checksums(tmp_path: Path) -> None:
    first = weights(tmp_path, STATE, "1.bin").digest
    assert weights(tmp_path, STATE, "2.bin").digest == first
    changed = A.copy()
    changed[20] = -1  # seen through the checksum in the directory, without reading the tensor
    assert weights(tmp_path, {"a": View(changed, 0, (4, 6)), "b": View(changed, 6, (6,))}).digest != first


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1, 2], UnsupportedError, "holds no mapping of names to tensors"),
        ({"optimizer": {"state": {}}}, UnsupportedError, "holds no mapping of names to tensors"),
        ({**STATE, "step": 3}, UnsupportedError, "'step' holds a 'int', which is no tensor"),
        ({**STATE, 7: View(A, 0, (2,))}, CorruptError, "7 cannot be a tensor's name"),
        ({"a": View(A, 0, (4, 6), (1, 4))}, UnsupportedError, "is not contiguous; call .contiguous()"),
        ({"a": View(A, 20, (6,))}, CorruptError, "of a storage of 96"),
        (
            {"a": Call(Named("collections", "OrderedDict")), "b": Call(Named("os", "system"), ("true",))},
            UnsupportedError, "'os.system', which is not on the list",
        ),
    ],
)  # fmt: skip
def test_read_torch_weights__refuses_what_it_cannot_place(
    tmp_path: Path, value: object, error: type[MergePipeError], words: str
) -> None:
    with pytest.raises(error) as caught:
        weights(tmp_path, value)
    assert words in str(caught.value)


def test_read_torch_weights__refuses_the_unzipped_format(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(UnsupportedError, match=r"older, unzipped format; load and save it again"):
        read_torch_weights(MetadataStore(), Location.local(tmp_path / "old.pt"))


def test_open_checkpoint__reads_sharded_pickles(tmp_path: Path) -> None:
    shards = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    for shard, name in shards.items():
        (tmp_path / shard).write_bytes(torch_bytes({name: STATE[name]}))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard, name in shards.items()}}))
    (tmp_path / "training_args.bin").write_bytes(b"not looked at")
    checkpoint = open_checkpoint(MetadataStore(), Location.local(tmp_path))
    assert list(checkpoint.tensors) == ["a", "b"]
    assert [file.name for file in checkpoint.files] == sorted(shards)
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    with pytest.raises(CorruptError, match=r"must be a plain file name ending in \.bin or"):
        open_checkpoint(MetadataStore(), Location.local(tmp_path))


@pytest.mark.transformers
@pytest.mark.parametrize("nested", [False, True])
def test_open_checkpoint__reads_what_torch_saves(tmp_path: Path, *, nested: bool) -> None:
    torch: Any = pytest.importorskip("torch")
    first = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    state = {"w": torch.nn.Parameter(first), "tied": first, "row": first[1], "buffer": torch.tensor([True, False])}
    torch.save({"state_dict": state, "step": 1} if nested else state, tmp_path / "pytorch_model.bin")
    tensors = open_checkpoint(MetadataStore(), Location.local(tmp_path)).tensors
    places = {name: (t.dtype.name, t.shape, t.stored[0].offset) for name, t in tensors.items()}
    start = places["w"][2]
    assert places["w"] == ("BF16", (3, 4), start)
    assert places["tied"] == places["w"]
    assert places["row"] == ("BF16", (4,), start + 8)
    assert places["buffer"][:2] == ("BOOL", (2,))
