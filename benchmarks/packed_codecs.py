"""Command that packs pairs of base and expert and prints sizes and speeds of our codec beside those of public ones.

Pairs: one synthetic tensor at growing distances from its base, and weights that packages ship (`--weights`). Shares
are of the expert's bytes. Codecs whose packages are not installed are left out; `make bench-codecs` has all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.codec_pairs import Pair, Stored, public_pairs, synthetic_pairs
from benchmarks.peer_codecs import Measured, installed_codecs
from mergepipe.core.blocks import DTYPES, DType
from mergepipe.deltastore.codec import BlockContext, decode_block, encode_block
from mergepipe.deltastore.encode_pass import cut_of, sample_of
from mergepipe.deltastore.index import CHECK_BYTES, ROW_BYTES, digest, make_row
from mergepipe.deltastore.pieces import BANDED_DTYPES, BLOCK_ELEMENTS, EncodedBlock

OURS = "ours"
SMALLEST_TIMED_BYTES = 4 << 20
"""Of smaller experts no speed is printed: it would be that of tables and calls."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: how far the expert is from its base, and what every codec makes of it."""

    pair: str
    dtype: str
    expert_bytes: int
    relative_norm: float | None
    codecs: tuple[str, ...]  # of our blocks
    measured: Mapping[str, Measured]


def measure(pair: Pair, repeats: int) -> Row:
    """Pack and unpack a pair with every codec."""
    ours, codecs = measure_ours(pair, repeats)
    peers = {name: codec(pair, repeats) for name, codec in installed_codecs().items()}
    n_bytes = sum(len(expert) for _, expert in pair.tensors)
    return Row(pair.name, pair.dtype.name, n_bytes, pair.relative_norm, codecs, peers | {OURS: ours})


def measure_ours(pair: Pair, repeats: int) -> tuple[Measured, tuple[str, ...]]:
    """Pack a pair block by block, with proof and digests, and decode it with the digests that a reader checks.

    The other result is the codecs of the blocks, by falling share.
    """
    nbytes, pack_seconds, unpack_seconds, counts = 0, 0.0, 0.0, dict[str, int]()
    for content, context, cut in _blocks(pair):
        block = encode_block(context.base, content, context.dtype, cut)
        nbytes += block.nbytes + ROW_BYTES
        counts[block.codec.name] = counts.get(block.codec.name, 0) + len(content)
        out = np.empty(len(content), np.uint8)
        pack_seconds += _thread_seconds(partial(_pack_block, content, context, cut), repeats)
        unpack_seconds += _thread_seconds(partial(_unpack_block, block, context, out), repeats)
        if not np.array_equal(out, content):
            raise AssertionError("a block was not restored")
    codecs = sorted(counts, key=lambda name: -counts[name])
    return Measured(nbytes, pack_seconds, unpack_seconds), tuple(name.lower() for name in codecs)


def _blocks(pair: Pair) -> Iterator[tuple[Stored, BlockContext, float | None]]:
    size = BLOCK_ELEMENTS * pair.dtype.itemsize
    for base, expert in pair.tensors:
        cut = None
        if base is not None and len(expert) and pair.dtype in BANDED_DTYPES:
            cut = cut_of(sample_of(base, pair.dtype), sample_of(expert, pair.dtype))
        for start in range(0, len(expert), size):
            beside = None if base is None else base[start : start + size]
            yield expert[start : start + size], BlockContext(beside, pair.dtype, "benchmark"), cut


def _pack_block(content: Stored, context: BlockContext, cut: float | None) -> None:
    block = encode_block(context.base, content, context.dtype, cut)
    make_row(block, None if context.base is None else digest(context.base), content)


def _unpack_block(block: EncodedBlock, context: BlockContext, out: Stored) -> None:
    if context.base is not None:
        digest(context.base)
    for piece in block.pieces.values():
        digest(piece, CHECK_BYTES)
    decode_block(block.codec, block.pieces, context, out)
    digest(out)


def _thread_seconds(action: Callable[[], object], repeats: int) -> float:
    """Processor time of the fastest repetition."""
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best


def size_table(rows: Sequence[Row]) -> str:
    """Markdown: the share of the expert's bytes that each codec keeps."""
    names = list(rows[0].measured) if rows else []
    lines = [_line("weights", "dtype", "size", "delta / base", *names, "codec of ours")]
    lines.append("|---" * (len(names) + 5) + "|")
    lines += [
        _line(
            row.pair,
            row.dtype,
            f"{row.expert_bytes / 1e6:.1f} MB",
            "" if row.relative_norm is None else f"{100 * row.relative_norm:.3g} %",
            *(f"{100 * row.measured[name].nbytes / row.expert_bytes:.1f} %" for name in names),
            ", ".join(row.codecs),
        )
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def speed_table(rows: Sequence[Row]) -> str:
    """Markdown: GB of the expert that a second of processor time packs and unpacks."""
    timed = [row for row in rows if row.expert_bytes >= SMALLEST_TIMED_BYTES]
    names = list(timed[0].measured) if timed else []
    lines = [_line("weights", "dtype", *(f"{name}: pack, unpack" for name in names))]
    lines.append("|---" * (len(names) + 2) + "|")
    lines += [_line(row.pair, row.dtype, *(_speeds(row, row.measured[name]) for name in names)) for row in timed]
    return "\n".join(lines) + "\n"


def _speeds(row: Row, measured: Measured) -> str:
    return ", ".join(
        f"{row.expert_bytes / 1e9 / seconds:.2f}" if seconds > 0 else "?"
        for seconds in (measured.pack_seconds, measured.unpack_seconds)
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _pairs(options: argparse.Namespace) -> Iterator[Pair]:
    dtypes: list[DType] = [DTYPES[name] for name in options.dtypes]
    synthetic = chain.from_iterable(synthetic_pairs(options.elements, dtype) for dtype in dtypes)
    return chain(synthetic, () if options.weights is None else public_pairs(options.weights))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", default=["BF16", "F16", "F32", "F8_E4M3"], choices=sorted(DTYPES))
    parser.add_argument("--weights", type=Path, help="the folder into which `make bench-codecs` installs packages")
    parser.add_argument("--json", type=Path, help="write everything measured")
    options = parser.parse_args(arguments)
    rows = []
    for pair in _pairs(options):
        rows.append(measure(pair, options.repeats))
        print(size_table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"{size_table(rows)}\nGB/s a core\n\n{speed_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
