"""The bytes of safetensors files, honest ones and ones that lie, built without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping


def file_bytes(header: bytes | str | Mapping[str, object], tensor_bytes: bytes = b"") -> bytes:
    """Frame any header, valid or not, with its true length and append `tensor_bytes`."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    raw = header if isinstance(header, bytes) else header.encode("utf-8")
    return len(raw).to_bytes(8, "little") + raw + tensor_bytes


def record(begin: int, end: int, *, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    """A header entry for `[begin, end)`; one-dimensional F32 unless told otherwise."""
    length = (end - begin) // 4
    return {"dtype": dtype, "shape": [length] if shape is None else shape, "data_offsets": [begin, end]}


def honest_file(*names: str) -> bytes:
    """A sound file with one F32 tensor of two elements for each name."""
    header = {name: record(8 * i, 8 * i + 8) for i, name in enumerate(names)}
    return file_bytes(header, bytes(range(8)) * len(names))
