"""Weights of codes of every scheme, with the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from support.model_folders import write_model

Tensors = dict[str, NDArray[Any]]
ROWS, COLUMNS, GROUP = 96, 256, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code lies at each nibble of a word


def uniform(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(1e-3, 2e-3, shape).astype(np.float32)


def codes_of(seed: int, most: int, *shape: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, most, shape, dtype=np.uint32)


def in_words(codes: NDArray[np.uint32], n_bits: int, axis: int) -> NDArray[np.int32]:
    """Put the codes along an axis into words of 32 bits, the first in the low bits."""
    if n_bits == 3:  # the bits of 32 codes, one after the other, in three words
        bits = (np.moveaxis(codes, axis, -1)[..., None] >> np.arange(3, dtype=np.uint32)) & 1
        octets = np.packbits(bits.reshape(*bits.shape[:-2], -1).astype(np.uint8), axis=-1, bitorder="little")
        return np.ascontiguousarray(np.moveaxis(octets.view(np.uint32), -1, axis)).view(np.int32)
    per = 32 // n_bits
    moved = np.moveaxis(codes, axis, -1)
    moved = moved.reshape(*moved.shape[:-1], -1, per)
    words = sum(moved[..., k].astype(np.uint64) << np.uint64(n_bits * k) for k in range(per))
    return np.ascontiguousarray(np.moveaxis(np.asarray(words).astype(np.uint32), -1, axis)).view(np.int32)


def spread(scales: NDArray[Any], width: int) -> NDArray[np.float64]:
    return np.repeat(scales.astype(np.float64), width, axis=1)


def packed(seed: int, n_bits: int, *, has_zeros: bool) -> tuple[Tensors, NDArray[np.float64]]:
    most, groups = 1 << n_bits, COLUMNS // GROUP
    codes, scales = codes_of(seed, most, ROWS, COLUMNS), uniform(seed, ROWS, groups).astype(ml_dtypes.bfloat16)
    tensors = {
        "l.weight_packed": in_words(codes, n_bits, 1), "l.weight_scale": scales,
        "l.weight_shape": np.array([ROWS, COLUMNS], np.int64),
    }  # fmt: skip
    zeros: NDArray[Any] = np.full((ROWS, groups), most // 2, np.uint32)
    if has_zeros:
        zeros = codes_of(seed + 1, most, ROWS, groups)
        tensors["l.weight_zero_point"] = in_words(zeros, n_bits, 0)
    return tensors, (codes - spread(zeros, GROUP)) * spread(scales, GROUP)


def grouped(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    """Columns whose groups do not lie side by side."""
    tensors, _ = packed(seed, 4, has_zeros=True)
    order = np.random.default_rng(seed).permutation(np.arange(COLUMNS) // GROUP).astype(np.int32)
    codes = codes_of(seed, 16, ROWS, COLUMNS).astype(np.float64)
    zeros, scales = codes_of(seed + 1, 16, ROWS, COLUMNS // GROUP), tensors["l.weight_scale"].astype(np.float64)
    return tensors | {"l.weight_g_idx": order}, (codes - zeros[:, order]) * scales[:, order]


def modelopt(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    tensors, numbers = nvfp4(seed)
    factor = np.array(0.25, np.float32)
    parts: Tensors = {"l.weight": tensors["l.weight_packed"], "l.weight_scale": tensors["l.weight_scale"]}
    more: Tensors = {"l.weight_scale_2": factor, "l.input_scale": np.ones((), np.float32)}
    return parts | more, numbers * float(tensors["l.weight_global_scale"][0]) * 0.25


def nvfp4(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    codes = codes_of(seed, 16, ROWS, COLUMNS)
    scales = (uniform(seed, ROWS, COLUMNS // 16) * 1e5).astype(ml_dtypes.float8_e4m3fn)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    divisor = np.array([1 << 17], np.float32)
    tensors: Tensors = {"l.weight_packed": pairs, "l.weight_scale": scales, "l.weight_global_scale": divisor}
    return tensors, E2M1[codes] * spread(scales, 16) / float(divisor[0])


def mxfp4(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    codes = codes_of(seed, 16, ROWS, COLUMNS)
    scales = codes_of(seed + 1, 16, ROWS, COLUMNS // 32).astype(np.uint8) + 110
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {"l.weight_packed": pairs, "l.weight_scale": scales}, E2M1[codes] * 2.0 ** (spread(scales, 32) - 127)


def exponents(seed: int, *shape: int) -> NDArray[Any]:
    """Scales that are powers of two."""
    return (codes_of(seed, 20, *shape) + 110).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def deepseek_experts(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    """What DeepSeek-V4 stores of experts."""
    codes, scales = codes_of(seed, 16, ROWS, COLUMNS), exponents(seed + 1, ROWS, COLUMNS // 32)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    return {"l.weight": pairs, "l.scale": scales}, E2M1[codes] * spread(scales, 32)


def deepseek_blocks(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    """What DeepSeek-V4 stores of other matrices: a scale for each block of 128 rows and columns, the last one cut."""
    values = np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)) * 40
    codes, scales = values.astype(ml_dtypes.float8_e4m3fn), exponents(seed + 1, -(-ROWS // 128), COLUMNS // 128)
    of_rows = np.repeat(scales.astype(np.float64), 128, axis=0)[:ROWS]
    return {"l.weight": codes, "l.scale": scales}, codes.astype(np.float64) * spread(of_rows, 128)


def gptq(seed: int, n_bits: int = 4, *, is_in_order: bool = False) -> tuple[Tensors, NDArray[np.float64]]:
    most, groups = 1 << n_bits, COLUMNS // GROUP
    codes, zeros = codes_of(seed, most, COLUMNS, ROWS), codes_of(seed + 1, most - 1, groups, ROWS)
    scales = uniform(seed, groups, ROWS).astype(np.float16)
    order = (np.arange(COLUMNS) // GROUP).astype(np.int32)
    order = order if is_in_order else np.random.default_rng(seed).permutation(order)
    tensors: Tensors = {
        "l.qweight": in_words(codes, n_bits, 0), "l.qzeros": in_words(zeros, n_bits, 1), "l.scales": scales,
    }  # fmt: skip
    tensors |= {} if is_in_order else {"l.g_idx": order}
    return tensors, ((codes - (zeros + 1.0)[order]) * scales.astype(np.float64)[order]).T


def awq(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    groups = COLUMNS // GROUP
    codes, zeros = codes_of(seed, 16, COLUMNS, ROWS), codes_of(seed + 1, 16, groups, ROWS)
    scales = uniform(seed, groups, ROWS).astype(np.float16)
    ordered = [one.reshape(len(one), -1, 8)[..., AWQ_PLACES].reshape(one.shape) for one in (codes, zeros)]
    tensors: Tensors = {
        "l.qweight": in_words(ordered[0], 4, 1), "l.qzeros": in_words(ordered[1], 4, 1), "l.scales": scales,
    }  # fmt: skip
    group = np.arange(COLUMNS) // GROUP
    return tensors, ((codes - zeros.astype(np.float64)[group]) * scales.astype(np.float64)[group]).T


def bnb8(seed: int) -> tuple[Tensors, NDArray[np.float64]]:
    codes, largest = codes_of(seed, 255, ROWS, COLUMNS).astype(np.int64) - 127, uniform(seed, ROWS)
    tensors: Tensors = {"l.weight": codes.astype(np.int8), "l.SCB": largest, "l.weight_format": np.zeros((), np.uint8)}
    return tensors, codes * largest.astype(np.float64)[:, None] / 127


def bnb4(seed: int, kind: str = "nf4", *, is_nested: bool = False) -> tuple[Tensors, NDArray[np.float64]]:
    codes, table = codes_of(seed, 16, ROWS * COLUMNS), np.linspace(-1, 1, 16).astype(np.float32)
    n = ROWS * COLUMNS // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    tensors: Tensors = {
        "l.weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "l.weight.absmax": uniform(seed, n), "l.weight.quant_map": table,
    }  # fmt: skip
    largest: NDArray[Any] = tensors["l.weight.absmax"].astype(np.float64)
    if is_nested:
        inner, outer = codes_of(seed + 1, 256, n).astype(np.uint8), uniform(seed, -(-n // 256))
        values = np.linspace(-1, 1, 256).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0015}
        more: Tensors = {"absmax": inner, "nested_absmax": outer, "nested_quant_map": values}
        tensors |= {f"l.weight.{name}": tensor for name, tensor in more.items()}
        largest = values[inner].astype(np.float64) * np.repeat(outer.astype(np.float64), 256)[:n] + 0.0015
    described = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"l.weight.quant_state.bitsandbytes__{kind}"] = described
    return tensors, (table.astype(np.float64)[codes].reshape(-1, 64) * largest[:, None]).reshape(ROWS, COLUMNS)


SCHEMES: Mapping[str, Callable[[int], tuple[Tensors, NDArray[np.float64]]]] = {
    "packed integers of 4 bits": lambda seed: packed(seed, 4, has_zeros=False),
    "packed integers of 4 bits, zeros": lambda seed: packed(seed, 4, has_zeros=True),
    "packed integers of 8 bits": lambda seed: packed(seed, 8, has_zeros=True),
    "packed integers of 4 bits, in another order": grouped,
    "NVFP4": nvfp4,
    "NVFP4, of ModelOpt": modelopt,
    "MXFP4": mxfp4,
    "MXFP4, of DeepSeek-V4": deepseek_experts,
    "FP8 with scales that are powers of two, of DeepSeek-V4": deepseek_blocks,
    "GPTQ of 4 bits": gptq,
    "GPTQ of 4 bits, no order named": lambda seed: gptq(seed, is_in_order=True),  # of auto-round
    "GPTQ of 3 bits": lambda seed: gptq(seed, 3),
    "GPTQ of 8 bits": lambda seed: gptq(seed, 8),
    "AWQ of 4 bits": awq,
    "bitsandbytes int8": bnb8,
    "bitsandbytes NF4": bnb4,
    "bitsandbytes FP4": lambda seed: bnb4(seed, "fp4", is_nested=True),
}


def model(folder: Path, tensors: Tensors, method: str = "gptq", **more: Any) -> Path:
    config = {"model_type": "x", "quantization_config": {"quant_method": method, "bits": 4} | more}
    return write_model(folder, tensors | {"norm.weight": np.ones(COLUMNS, ml_dtypes.bfloat16)}, config)
