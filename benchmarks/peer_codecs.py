"""Public ways to keep an expert beside its base, each with its sizes and processor time; what they restore is checked.

zstandard at level 3; the same of the pair's bits XORed and split into byte planes, as BitX does; ZipNN, of the XORed
pair where there is a base; lmz, whose archive of both less that of the base alone is what the expert takes.
"""

from __future__ import annotations

import importlib
import json
import resource
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.codec_pairs import Pair, Stored
from support.safetensors_bytes import file_bytes

ZSTD_LEVEL = 3
ZIPNN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """The bytes that a codec keeps of an expert, and its processor seconds."""

    nbytes: int
    pack_seconds: float
    unpack_seconds: float


Measure = Callable[[Any, Pair, int], Measured]


def installed_codecs() -> dict[str, Callable[[Pair, int], Measured]]:
    """The codecs whose packages are installed, by name: each takes a pair and a number of repetitions."""
    known: dict[str, tuple[str, Measure]] = {
        "zstd": ("zstandard", measure_zstd),
        "XOR, split, zstd": ("zstandard", measure_xor),
        "ZipNN": ("zipnn", measure_zipnn),
        "lmz": ("lmz", measure_lmz),
    }
    modules = {name: _imported(module) for name, (module, _) in known.items()}
    return {name: partial(known[name][1], module) for name, module in modules.items() if module is not None}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def processor_seconds(action: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The processor time of the fastest repetition, threads and child processes included, and the last result."""
    best = float("inf")
    for _ in range(repeats):
        started = _processor_time()
        result = action()
        best = min(best, _processor_time() - started)
    return best, result


def _processor_time() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _round_trip(
    expert: Stored, pack: Callable[[], list[bytes]], unpack: Callable[[list[bytes]], Stored], repeats: int
) -> Measured:
    pack_seconds, packed = processor_seconds(pack, repeats)
    unpack_seconds, restored = processor_seconds(lambda: unpack(packed), repeats)
    if not np.array_equal(restored, expert):
        raise AssertionError("a codec did not restore the expert")
    return Measured(sum(map(len, packed)), pack_seconds, unpack_seconds)


def measure_zstd(zstandard: Any, pair: Pair, repeats: int) -> Measured:
    """The expert's bytes as they are, compressed."""
    expert = pair.expert

    def pack() -> list[bytes]:
        return [zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(expert.data)]

    def unpack(packed: list[bytes]) -> Stored:
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed[0]), np.uint8)

    return _round_trip(expert, pack, unpack, repeats)


def measure_xor(zstandard: Any, pair: Pair, repeats: int) -> Measured:
    """The bits XORed with the base's, if any, in byte planes, each compressed."""
    expert, base, size = pair.expert, pair.base if pair.has_base else None, pair.dtype.itemsize

    def pack() -> list[bytes]:
        xored = expert if base is None else expert ^ base
        planes = np.ascontiguousarray(xored.reshape(-1, size).T)
        return [zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plane.data) for plane in planes]

    def unpack(packed: list[bytes]) -> Stored:
        planes = [np.frombuffer(zstandard.ZstdDecompressor().decompress(plane), np.uint8) for plane in packed]
        xored = np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1)
        return xored if base is None else xored ^ base

    return _round_trip(expert, pack, unpack, repeats)


def measure_zipnn(zipnn: Any, pair: Pair, repeats: int) -> Measured:
    """ZipNN of bytes of the dtype, with its own XOR where there is a base."""
    delta = {"delta_compressed_type": "byte"} if pair.has_base else {}
    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype=ZIPNN_DTYPES[pair.dtype.name], threads=1, **delta)
    expert, base = pair.expert, pair.base if pair.has_base else None

    def second() -> dict[str, bytes]:
        return {} if base is None else {"delta_second_data": base.tobytes()}

    def pack() -> list[bytes]:
        return [codec.compress(expert.tobytes(), **second())]  # copies: it reorders its input in place

    def unpack(packed: list[bytes]) -> Stored:
        return np.frombuffer(codec.decompress(packed[0], **second()), np.uint8)

    return _round_trip(expert, pack, unpack, repeats)


def measure_lmz(lmz: Any, pair: Pair, repeats: int) -> Measured:
    """One worker, from file to file in memory: an archive of base and expert, less one of the base alone."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as place:
        folder = Path(place)
        files = {"2-expert.safetensors": _safetensors(pair, [expert for _, expert in pair.tensors])}
        both = _archive(lmz, folder / "both", files, repeats)
        if not pair.has_base:
            return both
        base = [base for base, _ in pair.tensors]
        alone = {"1-base.safetensors": _safetensors(pair, base)}
        both = _archive(lmz, folder / "pair", alone | files, repeats)
        without = _archive(lmz, folder / "alone", alone, repeats)
        return Measured(
            both.nbytes - without.nbytes,
            both.pack_seconds - without.pack_seconds,
            both.unpack_seconds - without.unpack_seconds,
        )


def _archive(lmz: Any, folder: Path, files: Mapping[str, bytes], repeats: int) -> Measured:
    source, archive, restored = folder / "source", folder / "archive.lmz", folder / "restored"
    source.mkdir(parents=True)
    restored.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    pack_seconds, _ = processor_seconds(lambda: lmz.compress(str(source), str(archive), workers=1), repeats)
    unpack_seconds, _ = processor_seconds(
        lambda: lmz.decompress(str(archive), str(restored), workers=1, overwrite=True), repeats
    )
    for name, content in files.items():
        if next(restored.rglob(name)).read_bytes() != content:
            raise AssertionError(f"lmz did not restore {name}")
    return Measured(archive.stat().st_size, pack_seconds, unpack_seconds)


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
