"""Write weights of codes with the libraries that define them, and what these read: `write_codes.py FOLDER`.

Each scheme is a model folder `FOLDER/NAME` and the numbers of its library, `FOLDER/NAME.safetensors`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from compressed_tensors import compressors
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

SHAPE = (96, 512)
INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
NUMBERS = {"num_bits": 4, "type": "float"}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("PackedQuantizationCompressor", {**INTEGERS, "symmetric": True}),
    "int4-zeros": ("PackedQuantizationCompressor", {**INTEGERS, "symmetric": False}),
    "int8": ("PackedQuantizationCompressor", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "nvfp4": ("NVFP4PackedCompressor", {**NUMBERS, "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("MXFP4PackedCompressor", {**NUMBERS, "strategy": "group", "group_size": 32}),
    "mxfp8": ("MXFP8QuantizationCompressor", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
}


def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def save(folder: Path, name: str, stored: dict[str, torch.Tensor], read: torch.Tensor) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text('{"quantization_config": {"quant_method": "x"}}')
    save_file({part: one.contiguous() for part, one in stored.items()}, folder / name / "model.safetensors")
    save_file({"l.weight": read.contiguous()}, folder / f"{name}.safetensors")


def write_bitsandbytes(folder: Path) -> None:
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            codes, state = functional.quantize_4bit(weight(), quant_type=kind, compress_statistics=is_nested)
            more = {f"l.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
            name = f"{kind}-nested" if is_nested else kind
            save(folder, name, {"l.weight": codes, **more}, functional.dequantize_4bit(codes, state))
    codes, largest, _ = functional.int8_vectorwise_quant(weight().half())
    read = functional.int8_vectorwise_dequant(codes, largest)
    save(folder, "bnb8", {"l.weight": codes, "l.SCB": largest}, read)


def write_compressed(folder: Path, name: str) -> None:
    kind, stated = COMPRESSED[name]
    arguments = QuantizationArgs(**stated)
    groups = weight().float().reshape(SHAPE[0], -1, stated.get("group_size", SHAPE[1]))
    parts, largest = {"weight": weight()}, groups.abs().amax(-1)
    if name in ("mxfp4", "mxfp8"):
        parts["weight_scale"] = 2.0 ** torch.ceil(torch.log2(largest / (6 if name == "mxfp4" else 448)))
    elif name == "nvfp4":
        parts["weight_global_scale"] = torch.tensor([448 * 6 / 8.0])
        scale = largest / 6 * parts["weight_global_scale"]
        parts["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
    else:
        parts["weight_scale"] = (largest / 7).to(torch.bfloat16)
        zeros = torch.randint(-5, 5, groups.shape[:2], generator=torch.Generator().manual_seed(1)).to(torch.int8)
        parts["weight_zero_point"] = zeros * (not arguments.symmetric)
    scheme, compressor = QuantizationScheme(targets=["Linear"], weights=arguments), getattr(compressors, kind)
    stored = compressor.compress(parts, scheme)
    read = compressor.decompress(stored, scheme)["weight"]
    save(folder, name, {f"l.{part}": one for part, one in stored.items() if one is not None}, read)


if __name__ == "__main__":
    write_bitsandbytes(Path(sys.argv[1]))
    for compressed in COMPRESSED:
        write_compressed(Path(sys.argv[1]), compressed)
