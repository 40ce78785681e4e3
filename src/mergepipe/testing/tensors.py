"""Drawn tensors of a base and its experts, as stored elements, for tests of operators. Needs nothing but numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType

STORED_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),  # numpy has none: the upper half of a float32
}
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, -3e-40, 6e-8, -6e-8, 1.0, -1.0, 65504.0, 1e30, -1e30],
    np.float32,
)
_QUIET_NAN = np.uint32(0x7FC0)


@dataclass(frozen=True, slots=True)
class Family:
    """One tensor in a base and in experts, as stored elements and as float32 numbers."""

    base_dtype: DType
    expert_dtypes: tuple[DType, ...]
    base: NDArray[Any]
    experts: tuple[NDArray[Any], ...]

    @property
    def base_N(self) -> NDArray[np.float32]:
        return decode_elements(self.base, self.base_dtype)

    @property
    def experts_EN(self) -> NDArray[np.float32]:
        rows = [decode_elements(e, d) for e, d in zip(self.experts, self.expert_dtypes, strict=True)]
        return np.stack(rows) if rows else np.zeros((0, len(self.base)), np.float32)


def make_family(
    rng: np.random.Generator, n: int, base_dtype: DType, expert_dtypes: tuple[DType, ...], special_share: float
) -> Family:
    """A base, and experts near it: some elements are equal, some far off, `special_share` of them special."""
    base_N = _with_specials(rng, (rng.standard_normal(n) * 0.05).astype(np.float32), special_share)
    base = encode_elements(base_N, base_dtype)
    base_N = decode_elements(base, base_dtype)
    experts = []
    for dtype in expert_dtypes:
        step = 10.0 ** rng.uniform(-4, -1)
        with np.errstate(all="ignore"):
            moved_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
        moved_N = np.where(rng.random(n) < 0.2, base_N, moved_N)
        moved_N = np.where(rng.random(n) < 0.05, np.float32(2) * base_N, moved_N)
        experts.append(encode_elements(_with_specials(rng, moved_N, special_share), dtype))
    return Family(base_dtype, expert_dtypes, base, tuple(experts))


def _with_specials(rng: np.random.Generator, values: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    return np.where(rng.random(len(values)) < share, rng.choice(SPECIAL, len(values)), values).astype(np.float32)


def decode_elements(stored: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """The stored elements of `dtype` as float32."""
    elements = np.frombuffer(stored.tobytes(), STORED_DTYPES[dtype.name])
    if dtype.name == "BF16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return elements.astype(np.float32)


def encode_elements(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Float32 numbers rounded to nearest even into `dtype`; NaN becomes the quiet one of its sign in bfloat16."""
    if dtype.name != "BF16":
        with np.errstate(all="ignore"):
            return values.astype(STORED_DTYPES[dtype.name])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    nan = (upper & np.uint32(0x8000)) | _QUIET_NAN
    return np.where(np.isnan(values), nan, rounded).astype(np.uint16)
