"""Command that packs pairs of base and expert and prints sizes of our codec beside those of public ones, and its speed.

Pairs: one synthetic tensor at growing distances from its base, and weights that packages ship (`--weights`). Shares
are of the expert's bytes. Codecs whose packages are not installed are left out; `make bench-codecs` has all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.codec_pairs import Pair, Stored, public_pairs, synthetic_pairs
from benchmarks.peer_codecs import installed_codecs
from benchmarks.reproduce.pages import Table, percent
from mergepipe.core.blocks import DTYPES
from mergepipe.deltastore.codec import BlockContext, decode_block, decode_deltas, encode_block
from mergepipe.deltastore.encode_pass import cut_of, sample_of
from mergepipe.deltastore.index import ROW_BYTES
from mergepipe.deltastore.pieces import BANDED_DTYPES, BLOCK_ELEMENTS, PIECES_OF, Codec, Level

OURS, OURS_FOR_TIES = "ours", "of ours, TIES at density 0.2 needs"


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: how far the expert is from its base, what every codec makes of it, and the speed of ours."""

    pair: Pair
    n_bytes: int
    packed_bytes: Mapping[str, int]
    codecs: tuple[str, ...]  # of our blocks
    nanoseconds: tuple[float, ...]  # of a processor for each element: to encode, to decode, to decode what TIES needs

    def cells(self) -> tuple[str, ...]:
        norm = self.pair.relative_norm
        distance = "" if norm is None else f"{100 * norm:.3g} %"
        shares = (percent(n_bytes / self.n_bytes, 1) for n_bytes in self.packed_bytes.values())
        speeds = ", ".join(f"{value:.1f}" for value in self.nanoseconds)
        about = (self.pair.name, self.pair.dtype.name, f"{self.n_bytes / 1e6:.1f} MB", distance)
        return (*about, *shares, speeds, ", ".join(self.codecs))


def measure(pair: Pair, repeats: int) -> Row:
    """Pack a pair with every codec, with ours block by block, without digests, and unpack it."""
    n_bytes = sum(len(expert) for _, expert in pair.tensors)
    packed = {name: codec(pair) for name, codec in installed_codecs().items()}
    packed |= {OURS: 0, OURS_FOR_TIES: 0}
    seconds, counts = [0.0, 0.0, 0.0], dict[str, int]()
    for content, context, cut in _blocks(pair):
        block = encode_block(context.base, content, context.dtype, cut)
        packed[OURS] += block.nbytes + ROW_BYTES
        packed[OURS_FOR_TIES] += sum(len(block.pieces.get(piece, ())) for piece in PIECES_OF[Level.HEAD]) + ROW_BYTES
        counts[block.codec.name] = counts.get(block.codec.name, 0) + len(content)
        out, deltas = np.empty(len(content), np.uint8), np.empty(len(content) // pair.dtype.itemsize, np.float32)
        ways: list[Callable[[], object]] = [
            partial(encode_block, context.base, content, context.dtype, cut),
            partial(decode_block, block.codec, block.pieces, context, out),
        ]
        if block.codec is Codec.BANDS:
            ways.append(partial(decode_deltas, block.codec, Level.HEAD, block.pieces, context, deltas))
        for number, way in enumerate(ways):
            seconds[number] += _thread_seconds(way, repeats)
        if not np.array_equal(out, content):
            raise AssertionError("a block was not restored")
    codecs = sorted(counts, key=lambda name: -counts[name])
    nanoseconds = tuple(1e9 * each * pair.dtype.itemsize / n_bytes for each in seconds if each)
    return Row(pair, n_bytes, packed, tuple(name.lower() for name in codecs), nanoseconds)


def _blocks(pair: Pair) -> Iterator[tuple[Stored, BlockContext, float | None]]:
    size = BLOCK_ELEMENTS * pair.dtype.itemsize
    for base, expert in pair.tensors:
        cut = None
        if base is not None and len(expert) and pair.dtype in BANDED_DTYPES:
            cut = cut_of(sample_of(base, pair.dtype), sample_of(expert, pair.dtype), len(expert) // pair.dtype.itemsize)
        for start in range(0, len(expert), size):
            beside = None if base is None else base[start : start + size]
            yield expert[start : start + size], BlockContext(beside, pair.dtype, "benchmark"), cut


def _thread_seconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time of the fastest repetition."""
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best


def table(rows: Sequence[Row]) -> Table:
    """The share of the expert's bytes that each codec keeps, and the speed of ours."""
    header = ("weights", "dtype", "size", "delta / base", *rows[0].packed_bytes)
    return Table(
        (*header, "ns to encode, decode, decode for TIES", "codec of ours"), tuple(row.cells() for row in rows)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", default=["BF16", "F16", "F32", "F8_E4M3"], choices=sorted(DTYPES))
    parser.add_argument("--weights", type=Path, help="the folder into which `make bench-codecs` installs packages")
    options = parser.parse_args(arguments)
    synthetic = chain.from_iterable(synthetic_pairs(options.elements, DTYPES[name]) for name in options.dtypes)
    rows = []
    for pair in chain(synthetic, () if options.weights is None else public_pairs(options.weights)):
        rows.append(measure(pair, options.repeats))
        print(", ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    print(table(rows).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
