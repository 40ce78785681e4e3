"""What a recipe may name as a model, and what it may not."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from small_models import opened, random, write_composite_manifest

from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.checkpoints.torch_file import SUFFIXES, WRAPPERS
from mergepipe.errors import UnsupportedError
from mergepipe.runs.inputs import open_model
from mergepipe.storage.location import Location
from support.model_folders import write_model
from support.named_models import named
from support.places import DOCS
from support.refusals import refuses
from support.stores import MetadataStore

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
        ({"l.weight": FP8, "l.scale": W}, "F8_E4M3 with scales"),
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
