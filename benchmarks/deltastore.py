"""Command that packs a family into delta stores and measures sizes, speeds, and the error of merges by level."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.api import pack
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.core.blocks import BF16, Span
from mergepipe.deltastore.band_sample import choose_bands
from mergepipe.deltastore.checkpoint import open_store
from mergepipe.deltastore.codec.block import decode_band_deltas, decode_band_values, encode_bands
from mergepipe.deltastore.codec.byte_planes import decode_bytewise, encode_bytewise
from mergepipe.deltastore.codec.element_codes import Bands
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS, PIECES_OF, Level
from mergepipe.deltastore.tensor import PackedTensor
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import FamilyPaths, FamilyShape, write_family

# Six of the 28 layers of Qwen3-0.6B with a fifth of its vocabulary: the same tensors, the same share of embeddings.
SLICE = FamilyShape(
    hidden=1024, layers=6, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=30720, tied=True
)
BUDGETS = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25)
TIES_BAND = 1
TIES_DENSITY = 0.2
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shares of the experts' tensor bytes: whole stores, and what TIES reads; tensors for which that is exact."""

    store: float
    pieces: float
    ties: float
    ties_exact_tensors: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Point:
    """One budget: the share that was read, the error of the average that was measured, and that of dropping blocks."""

    budget: float
    read: float
    error: float
    dropping: float


@dataclass(frozen=True, slots=True)
class Speed:
    """One codec on one block: share of its bytes; processor nanoseconds an element on one thread."""

    codec: str
    share: float
    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing a family: GB of experts a second, GB a processor second, processor nanoseconds an element."""

    threads: int
    gb_a_second: float
    gb_a_cpu_second: float
    cpu_ns_an_element: float


def packed_tensors(checkpoint: Checkpoint) -> list[PackedTensor]:
    return [tensor for tensor in checkpoint.tensors.values() if isinstance(tensor, PackedTensor)]


def measure_sizes(stores: Sequence[Checkpoint]) -> Sizes:
    tensors = [tensor for store in stores for tensor in packed_tensors(store)]
    total = sum(tensor.n_elements * tensor.stored_dtype.itemsize for tensor in tensors)
    files = sum(file.size_bytes for store in stores for file in store.files)
    exact = [t.elements_above(TIES_BAND) >= int(TIES_DENSITY * t.n_elements) or _is_whole(t) for t in tensors]
    return Sizes(
        store=files / total,
        pieces=sum(tensor.nbytes for tensor in tensors) / total,
        ties=sum(tensor.at_level(Level.HEAD_EXACT).nbytes for tensor in tensors) / total,
        ties_exact_tensors=sum(exact),
        tensors=len(tensors),
    )


def _is_whole(tensor: PackedTensor) -> bool:
    """Whether no more is stored than what TIES reads: unchanged tensors, and those without levels."""
    return tensor.nbytes == tensor.at_level(Level.HEAD_EXACT).nbytes


def level_tables(stores: Sequence[Checkpoint]) -> tuple[Floats, Floats]:
    """Bytes and squared error of each block (B, over all experts and tensors) at each level (L)."""
    costs, errors = [], []
    for store in stores:
        for tensor in packed_tensors(store):
            rows = range(tensor.first_row, tensor.first_row + tensor.n_blocks)
            costs += [[tensor.index.bytes_of(PIECES_OF[level], row, row + 1) for level in Level] for row in rows]
            errors += np.stack([tensor.squared_errors(level) for level in Level], axis=1).tolist()
    return np.array(costs, np.float64), np.array(errors, np.float64)


def choose_levels(costs_BL: Floats, errors_BL: Floats, budget_bytes: float) -> NDArray[np.int64]:
    """Steps along the lower hull of each block, steepest first, while they fit."""
    steps = []
    for block in range(len(costs_BL)):
        at = 0
        while True:
            gains_L, prices_L = errors_BL[block, at] - errors_BL[block], costs_BL[block] - costs_BL[block, at]
            open_L = (gains_L > 0) & (prices_L > 0)
            if not open_L.any():
                break
            slopes_L = np.where(open_L, gains_L / np.maximum(prices_L, 1), 0)
            best = int(slopes_L.argmax())
            steps.append((float(slopes_L[best]), block, best, float(prices_L[best])))
            at = best
    levels_B = np.zeros(len(costs_BL), np.int64)
    left = budget_bytes
    for _, block, level, price in sorted(steps, key=lambda step: (-step[0], step[1])):
        if price > left:
            break
        levels_B[block] = level
        left -= price
    return levels_B


def dropping_error(stores: Sequence[Checkpoint], errors_BL: Floats, budget_bytes: float) -> float:
    """The expected error of the average where whole blocks of raw experts are read, largest norm a byte first."""
    raw_B = np.array(
        [2.0 * t.block_span(b).n_elements for s in stores for t in packed_tensors(s) for b in range(t.n_blocks)]
    )
    order_B = np.argsort(-errors_BL[:, 0] / raw_B, kind="stable")
    read_B = np.cumsum(raw_B[order_B]) <= budget_bytes
    return float(np.sqrt(errors_BL[order_B, 0][~read_B].sum() / errors_BL[:, 0].sum()))


def measure_average(
    stores: Sequence[Checkpoint], files: Mapping[Location, RangeFile], levels_B: NDArray[np.int64], threads: int
) -> float:
    """Decode every block at its level, average, and compare with the exact average: the honest relative error."""
    firsts, at = [], 0
    for store in stores:
        firsts.append(at)
        at += sum(tensor.n_blocks for tensor in packed_tensors(store))
    jobs = []
    offset = 0
    for rows in zip(*(packed_tensors(store) for store in stores), strict=True):
        jobs += [
            (rows, block, [int(levels_B[f + offset + block]) for f in firsts]) for block in range(rows[0].n_blocks)
        ]
        offset += rows[0].n_blocks

    def one(job: tuple[tuple[PackedTensor, ...], int, list[int]]) -> tuple[float, float]:
        tensors, block, levels = job
        span = tensors[0].block_span(block)
        exact_N, rough_N = np.zeros(span.n_elements), np.zeros(span.n_elements)
        for tensor, level in zip(tensors, levels, strict=True):
            full_N = _deltas(tensor, files, span, Level.LOSSLESS)
            exact_N += full_N
            rough_N += full_N if level == Level.LOSSLESS else _deltas(tensor, files, span, Level(level))
        return float(((exact_N - rough_N) ** 2).sum()), float((exact_N**2).sum())

    with ThreadPoolExecutor(threads) as pool:
        sums = np.array(list(pool.map(one, jobs)))
    left, whole = sums.sum(axis=0)
    return float(np.sqrt(left / whole))


def _deltas(tensor: PackedTensor, files: Mapping[Location, RangeFile], span: Span, level: Level) -> NDArray[np.float32]:
    """Deltas of one block; at LOSSLESS those of the decoded expert."""
    if level is Level.NOTHING:
        return np.zeros(span.n_elements, np.float32)
    read = tensor.at_level(level)
    out = np.empty(span.n_elements * read.dtype.itemsize, np.uint8)
    read.opened(files)(span, out, Purpose.EXPERT)
    if read.is_delta:
        return out.view(np.float32)
    raw = np.empty(2 * span.n_elements, np.uint8)
    start = tensor.base.offset + 2 * span.start
    with tensor.base.file.local_path.open("rb") as stream:
        stream.seek(start)
        raw[:] = np.frombuffer(stream.read(len(raw)), np.uint8)
    return np.asarray(_f32(out.view(np.uint16)) - _f32(raw.view(np.uint16)))


def _f32(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _bf16(values_N: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values_N.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measure_speeds(step: float, repeats: int) -> list[Speed]:
    """Every codec on the same block: N(0, 0.02²) weights, N(0, step²) deltas."""
    rng = np.random.default_rng(0)
    base = _bf16((rng.standard_normal(BLOCK_ELEMENTS) * 0.02).astype(np.float32))
    expert = _bf16((_f32(base) + rng.standard_normal(BLOCK_ELEMENTS) * step).astype(np.float32))
    bands = choose_bands(np.asarray(_f32(expert) - _f32(base)), is_sample=False)
    speeds = _our_speeds(base, expert, bands, repeats)
    plain = encode_bytewise(base.view(np.uint8), expert.view(np.uint8), BF16)
    speeds.append(
        Speed(
            "bytes", len(plain) / expert.nbytes,
            _nanoseconds(lambda: encode_bytewise(base.view(np.uint8), expert.view(np.uint8), BF16), repeats),
            _nanoseconds(lambda: decode_bytewise(plain, base.view(np.uint8), BF16, "benchmark"), repeats),
        )
    )  # fmt: skip
    return speeds + _peer_speeds(base, expert, repeats)


def _our_speeds(base: NDArray[np.uint16], expert: NDArray[np.uint16], bands: Bands, repeats: int) -> list[Speed]:
    block = encode_bands(base, expert, bands)
    assert block is not None
    encode_ns = _nanoseconds(lambda: encode_bands(base, expert, bands), repeats)
    deltas, values = np.empty(len(base), np.float32), np.empty(len(base), np.uint16)
    speeds = []
    for level in (Level.HEAD, Level.HEAD_EXACT, Level.BODY, Level.LOSSLESS):
        size = sum(len(block.pieces.get(piece, ())) for piece in PIECES_OF[level])

        def decode(level: Level = level) -> None:
            if level is Level.LOSSLESS:
                decode_band_values(block.pieces, base, bands, "benchmark", values)
            else:
                decode_band_deltas(block.pieces, level, base, bands, "benchmark", deltas)

        speeds.append(Speed(f"bands, {level.name}", size / expert.nbytes, encode_ns, _nanoseconds(decode, repeats)))
    return speeds


def _peer_speeds(base: NDArray[np.uint16], expert: NDArray[np.uint16], repeats: int) -> list[Speed]:
    """Library codecs on differences in the order of values, where they are installed; without adding the base again."""
    differences = (_places(expert) - _places(base)).astype(np.int16)
    folded = ((differences.astype(np.int32) << 1) ^ (differences.astype(np.int32) >> 31)).astype(np.uint16)
    split = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 2).T).tobytes()
    speeds = []
    zstandard, pcodec = _imported("zstandard"), _imported("pcodec.standalone")
    if zstandard is not None:
        coded = zstandard.ZstdCompressor(level=3).compress(split)
        speeds.append(Speed(
            "zstandard 3, folded, split", len(coded) / expert.nbytes,
            _nanoseconds(lambda: zstandard.ZstdCompressor(level=3).compress(split), repeats),
            _nanoseconds(lambda: zstandard.ZstdDecompressor().decompress(coded), repeats),
        ))  # fmt: skip
    if pcodec is not None:
        config = importlib.import_module("pcodec").ChunkConfig()
        whole = pcodec.simple_compress(differences, config)
        speeds.append(Speed(
            "pcodec", len(whole) / expert.nbytes,
            _nanoseconds(lambda: pcodec.simple_compress(differences, config), repeats),
            _nanoseconds(lambda: pcodec.simple_decompress(whole), repeats),
        ))  # fmt: skip
        by_exponent = [differences[((base >> 7) & 255) == e] for e in np.unique((base >> 7) & 255)]
        parts = [pcodec.simple_compress(part, config) for part in by_exponent]
        speeds.append(Speed(
            "pcodec by exponent", sum(map(len, parts)) / expert.nbytes,
            _nanoseconds(lambda: [pcodec.simple_compress(part, config) for part in by_exponent], repeats),
            _nanoseconds(lambda: [pcodec.simple_decompress(part) for part in parts], repeats),
        ))  # fmt: skip
    return speeds


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _places(halves: NDArray[np.uint16]) -> NDArray[np.int32]:
    magnitudes = (halves & 0x7FFF).astype(np.int32)
    return np.where(halves >> 15, -magnitudes, magnitudes)


def _nanoseconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time an element, the best of some runs after one that compiles."""
    action()
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best / BLOCK_ELEMENTS * 1e9


def measure_pack(family: FamilyPaths, out: Path, threads: int) -> Packing:
    """Pack a whole family from its files."""
    started, started_cpu = time.perf_counter(), time.process_time()
    report = pack(family.base, family.experts, out, threads=threads)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    raw_bytes = sum(expert.tensor_bytes for expert in report.experts)
    return Packing(threads, raw_bytes / seconds / 1e9, raw_bytes / cpu_seconds / 1e9, cpu_seconds / raw_bytes * 2e9)


def measure_family(family: FamilyPaths, out: Path, threads: int) -> dict[str, object]:
    """Pack a family into `out`, and measure."""
    pack(family.base, family.experts[:1], out / "compiling", threads=threads)
    alone = measure_pack(family, out / "alone", 1)
    packing = [alone] if threads == 1 else [alone, measure_pack(family, out / "together", threads)]
    report = pack(family.base, family.experts, out / "alone", threads=threads)  # they are there
    raw_bytes = sum(expert.tensor_bytes for expert in report.experts)
    store = LocalStore()
    base = open_checkpoint(store, Location.local(family.base))
    stores = [open_store(store, Location.local(expert.folder), base) for expert in report.experts]
    costs_BL, errors_BL = level_tables(stores)
    points = []
    paths = {entry.file for each in stores for t in packed_tensors(each) for entry in t.stored}
    with open_files(store, paths | {base.root / file.name for file in base.files}) as files:
        for budget in BUDGETS:
            levels_B = choose_levels(costs_BL, errors_BL, budget * raw_bytes)
            read = float(costs_BL[np.arange(len(levels_B)), levels_B].sum()) / raw_bytes
            error = measure_average(stores, files, levels_B, threads)
            points.append(Point(budget, read, error, dropping_error(stores, errors_BL, budget * raw_bytes)))
    return {
        "experts": len(report.experts),
        "tensor_bytes": raw_bytes,
        "packing": [asdict(each) for each in packing],
        "sizes": asdict(measure_sizes(stores)),
        "average": [asdict(point) for point in points],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a directory for the family and the stores; emptied")
    parser.add_argument("--family", type=Path, help="measure this family (base, expert-1, ...) instead of making one")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args(arguments)
    shutil.rmtree(asked.work, ignore_errors=True)
    asked.work.mkdir(parents=True)
    if asked.family is None:
        family = write_family(asked.work / "family", SLICE, asked.experts, threads=asked.threads)
    else:
        experts = tuple(asked.family / f"expert-{i}" for i in range(1, asked.experts + 1))
        family = FamilyPaths(asked.family / "base", experts)
    result = measure_family(family, asked.work / "stores", asked.threads)
    result["speeds"] = {str(step): [asdict(s) for s in measure_speeds(step, asked.repeats)] for step in (1e-4, 3e-4)}
    print(json.dumps(result, indent=1))
    shutil.rmtree(asked.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
