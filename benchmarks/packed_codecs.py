"""Command that packs one synthetic tensor at growing distances from its base, beside public ways to keep a pair.

Shares are of the expert's bytes. XOR: the pair's bits XORed, split into byte planes, each compressed by zstandard at
level 3, as BitX does. Without the `zstandard` package that column is empty.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.deltastore import _imported
from mergepipe.core.blocks import DTYPES, DType
from mergepipe.deltastore.band_sample import choose_bands
from mergepipe.deltastore.codec.block import BlockContext, EncodedBlock, decode_block, encode_block
from mergepipe.deltastore.codec.levels import BANDED_DTYPES, BLOCK_ELEMENTS
from mergepipe.deltastore.index import CHECK_BYTES, ROW_BYTES, digest, make_row
from support.rounding import decode, encode

STEPS = (0.0015, 0.005, 0.015, 0.05, 0.2, 0.5)
WEIGHT_SIZE = 0.02
Stored = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: shares of the expert's bytes, the codecs of its blocks, GB of the expert a processor second."""

    dtype: DType
    pair: str
    xor: float | None
    ours: float
    codecs: str
    encode_gb: float
    decode_gb: float


def pairs(n: int, dtype: DType) -> list[tuple[str, Stored | None, Stored]]:
    """Pairs of base and expert by distance, an unrelated one, and the base alone."""
    rng = np.random.default_rng(0)
    base_N = (rng.standard_normal(n) * WEIGHT_SIZE).astype(np.float32)
    base = _stored(base_N, dtype)
    base_N = decode(base.tobytes(), dtype)
    made: list[tuple[str, Stored | None, Stored]] = [
        (
            f"{100 * step:g} %",
            base,
            _stored(base_N + (rng.standard_normal(n) * WEIGHT_SIZE * step).astype(np.float32), dtype),
        )
        for step in STEPS
    ]
    made.append(("unrelated", base, _stored((rng.standard_normal(n) * WEIGHT_SIZE).astype(np.float32), dtype)))
    return [*made, ("base alone", None, base)]


def _stored(values_N: NDArray[np.float32], dtype: DType) -> Stored:
    return np.frombuffer(encode(values_N, dtype).tobytes(), np.uint8).copy()


def measure(name: str, base: Stored | None, expert: Stored, dtype: DType, repeats: int) -> Row:
    """Pack a pair block by block, with proof and digests, and decode it with the digests that a reader checks."""
    size = BLOCK_ELEMENTS * dtype.itemsize
    bands = None
    if base is not None and dtype in BANDED_DTYPES:
        deltas = decode(expert.tobytes(), dtype) - decode(base.tobytes(), dtype)
        bands = choose_bands(np.asarray(deltas[: 1 << 17]), is_sample=True)
    stored, codecs, encode_seconds, decode_seconds = 0, set[str](), 0.0, 0.0
    for start in range(0, len(expert), size):
        content = expert[start : start + size]
        beside = None if base is None else base[start : start + size]

        block = encode_block(beside, content, dtype, bands)
        stored += block.nbytes + ROW_BYTES
        codecs.add(block.codec.name)
        context = BlockContext(beside, dtype, bands, "benchmark")
        encode_seconds += _seconds(partial(_pack_block, content, context), repeats)
        decode_seconds += _seconds(partial(_unpack_block, block, context, np.empty(len(content), np.uint8)), repeats)
    gb = len(expert) / 1e9
    return Row(
        dtype, name, _xor_share(base, expert, dtype), stored / len(expert), ", ".join(sorted(codecs)),
        gb / encode_seconds, gb / decode_seconds,
    )  # fmt: skip


def _pack_block(content: Stored, context: BlockContext) -> None:
    block = encode_block(context.base, content, context.dtype, context.bands)
    make_row(block, None if context.base is None else digest(context.base), content)


def _unpack_block(block: EncodedBlock, context: BlockContext, out: Stored) -> None:
    if context.base is not None:
        digest(context.base)
    for piece in block.pieces.values():
        digest(piece, CHECK_BYTES)
    decode_block(block.codec, block.pieces, context, out)
    digest(out)


def _seconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time of the fastest repetition."""
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best


def _xor_share(base: Stored | None, expert: Stored, dtype: DType) -> float | None:
    zstandard = _imported("zstandard")
    if zstandard is None:
        return None
    xored = expert if base is None else expert ^ base
    planes = np.ascontiguousarray(xored.reshape(-1, dtype.itemsize).T)
    sizes = [len(zstandard.ZstdCompressor(level=3).compress(plane.tobytes())) for plane in planes]
    return sum(sizes) / len(expert)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each pair."""
    lines = ["| dtype | delta/weights | XOR, split, zstd | ours | codec | pack GB/s | unpack GB/s |", "|---" * 7 + "|"]
    for row in rows:
        xor = "" if row.xor is None else f"{row.xor:.1%}"
        lines.append(
            f"| {row.dtype.name} | {row.pair} | {xor} | {row.ours:.1%} | {row.codecs.lower()} "
            f"| {row.encode_gb:.2f} | {row.decode_gb:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["BF16", "F16", "F32", "F8_E4M3"], choices=sorted(DTYPES))
    options = parser.parse_args(arguments)
    rows = []
    for name in options.dtypes:
        for pair, base, expert in pairs(options.elements, DTYPES[name]):
            rows.append(measure(pair, base, expert, DTYPES[name], options.repeats))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
