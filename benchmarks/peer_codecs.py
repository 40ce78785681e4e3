"""Public ways to keep an expert beside its base, each with its size; what they restore is checked.

zstandard at level 3; the same of the pair's bits XORed and split into byte planes, as BitX does; ZipNN, of the XORed
pair where there is a base; lmz, whose archive of both less that of the base alone is what the expert takes.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec_pairs import Pair, Stored
from support.safetensors_bytes import file_bytes

ZSTD_LEVEL = 3
ZIPNN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}


def installed_codecs() -> dict[str, Callable[[Pair], int]]:
    """The codecs whose packages are installed, by name: each returns the bytes that it keeps of a pair's expert."""
    known: dict[str, tuple[str, Callable[[Any, Pair], int]]] = {
        "zstd": ("zstandard", zstd_bytes),
        "XOR, split, zstd": ("zstandard", xor_bytes),
        "ZipNN": ("zipnn", zipnn_bytes),
        "lmz": ("lmz", lmz_bytes),
    }
    modules = {name: _imported(module) for name, (module, _) in known.items()}
    return {name: partial(known[name][1], module) for name, module in modules.items() if module is not None}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _checked_bytes(expert: Stored, restored: Stored, *packed: bytes) -> int:
    if not np.array_equal(restored, expert):
        raise AssertionError("a codec did not restore the expert")
    return sum(map(len, packed))


def zstd_bytes(zstandard: Any, pair: Pair) -> int:
    """The expert's bytes as they are, compressed."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(pair.expert.data)
    restored = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8)
    return _checked_bytes(pair.expert, restored, packed)


def xor_bytes(zstandard: Any, pair: Pair) -> int:
    """The bits XORed with the base's, if any, in byte planes, each compressed."""
    xored = pair.expert ^ pair.base  # a base that is not there is all zeros
    planes = np.ascontiguousarray(xored.reshape(-1, pair.dtype.itemsize).T)
    packed = [zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plane.data) for plane in planes]
    restored = [np.frombuffer(zstandard.ZstdDecompressor().decompress(plane), np.uint8) for plane in packed]
    return _checked_bytes(xored, np.stack(restored, axis=1).reshape(-1), *packed)


def zipnn_bytes(zipnn: Any, pair: Pair) -> int:
    """ZipNN of bytes of the dtype, with its own XOR where there is a base."""
    delta = {"delta_compressed_type": "byte"} if pair.has_base else {}
    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype=ZIPNN_DTYPES[pair.dtype.name], threads=1, **delta)
    second = {"delta_second_data": pair.base.tobytes()} if pair.has_base else {}
    packed = codec.compress(pair.expert.tobytes(), **second)  # a copy: it reorders its input in place
    second = {"delta_second_data": pair.base.tobytes()} if pair.has_base else {}
    return _checked_bytes(pair.expert, np.frombuffer(codec.decompress(packed, **second), np.uint8), packed)


def lmz_bytes(lmz: Any, pair: Pair) -> int:
    """From file to file in memory: an archive of base and expert, less one of the base alone."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as place:
        folder = Path(place)
        files = {"2-expert.safetensors": _safetensors(pair, [expert for _, expert in pair.tensors])}
        if not pair.has_base:
            return _archive_bytes(lmz, folder / "expert", files)
        base = {"1-base.safetensors": _safetensors(pair, [base for base, _ in pair.tensors])}
        return _archive_bytes(lmz, folder / "both", base | files) - _archive_bytes(lmz, folder / "base", base)


def _archive_bytes(lmz: Any, folder: Path, files: Mapping[str, bytes]) -> int:
    source, archive, restored = folder / "source", folder / "archive.lmz", folder / "restored"
    source.mkdir(parents=True)
    restored.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    lmz.compress(str(source), str(archive), workers=1)
    lmz.decompress(str(archive), str(restored), workers=1, overwrite=True)
    for name, content in files.items():
        if next(restored.rglob(name)).read_bytes() != content:
            raise AssertionError(f"lmz did not restore {name}")
    return archive.stat().st_size


def _safetensors(pair: Pair, tensors: list[Stored] | list[Stored | None]) -> bytes:
    header: dict[str, object] = {}
    contents: list[bytes] = []
    end = 0
    for number, content in enumerate(tensors):
        if content is not None:
            shape = [len(content) // pair.dtype.itemsize]
            offsets = [end, end + len(content)]
            header[f"layers.{number}.weight"] = {"dtype": pair.dtype.name, "shape": shape, "data_offsets": offsets}
            contents.append(content.tobytes())
            end += len(content)
    return file_bytes(json.dumps(header), b"".join(contents))
