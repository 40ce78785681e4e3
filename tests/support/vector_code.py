"""What LLVM makes of the loops of merging, cutting, dropping, packing and decoding.

As a program, print as JSON how many instructions the vector loops of each kernel have: `python -m support.vector_code`.
"""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from tools.kernels.compiling import dispatcher_of, prepare_numba

from mergepipe.core.blocks import BF16, RawBlock
from mergepipe.deltastore.codec import encode_block
from mergepipe.kernels import codec, merge, numerics, ranked, reduce, rounding, select
from mergepipe.kernels.compiled import ExportedKernel, Kernel

N = codec.TILE_ELEMENTS
ONE = np.float32(1)
FLOATS, BYTES, WORDS = np.zeros(N, np.float32), np.zeros(N, np.uint8), np.zeros(N, np.uint32)
HALVES = np.zeros(N, np.uint16)
COUNTS = np.zeros(1, np.int64)
DOUBLES, DOUBLES_2N, FLOATS_2N = np.zeros(N), np.zeros((2, N)), np.zeros((2, N), np.float32)
BOUNDS, ROWS_3N = np.zeros(16, np.uint64), np.zeros((3, N), np.uint32)
BLOCK = RawBlock(BYTES, 0, 3, COUNTS, COUNTS, COUNTS, COUNTS, 0, 1, BYTES, 0, 3, np.uint64(0), np.empty((0, 2)), 0)
DELTAS = reduce.DeltaStretches(BYTES, 3, np.zeros((1, 5), np.int64))
RULE = merge.Rule(
    FLOATS, FLOATS, 0, ROWS_3N, ROWS_3N, BOUNDS, BOUNDS, FLOATS, np.zeros((1, 1), np.uint8), True, True, ONE, ONE, ONE
)
LOOPS: list[tuple[Any, tuple[object, ...], int]] = [
    (codec.decode_tile, (BYTES, 0, codec.CODE_BF16, 1, FLOATS), 12),
    (codec.encode_tile, (FLOATS, 1, BYTES, 0, codec.CODE_BF16), 9),
    (rounding._fill_random_words, (np.uint64(1), 0, 1, WORDS), 4),
    (rounding._encode_bf16, (FLOATS, 1, HALVES, HALVES), 2),
    (merge.take_delta, (FLOATS, FLOATS, 1, FLOATS), 1),
    (merge._keep_large, (FLOATS, 1, 0, WORDS, FLOATS), 3),  # ties
    (merge.keep_band, (FLOATS, 1, 0, WORDS, WORDS, FLOATS), 2),  # breadcrumbs
    (merge._keep_random, (FLOATS, 1, np.uint64(1), 0, np.uint64(1), ONE, WORDS), 1),  # dare
    (merge._add_scaled, (FLOATS, 1, ONE, FLOATS), 1),  # linear
    (merge._add_agreeing, (FLOATS, 1, ONE, FLOATS, FLOATS, FLOATS), 1),
    (merge._normalize_agreeing, (FLOATS, FLOATS, FLOATS, 1, RULE), 2),
    (merge.variance_tile, (FLOATS_2N, 2, 2, 1, FLOATS, DOUBLES_2N), 8),  # sce
    (reduce.collect_between, (FLOATS, WORDS, COUNTS), 3),
    (select.merge_overlapping, (BLOCK, ONE, FLOATS), 27),  # ram
    (numerics.exp_tile, (DOUBLES, 1, DOUBLES), 1),  # arcee_fusion
    (numerics.log_tile, (DOUBLES, 1, DOUBLES), 1),
    (select._divergence, (DOUBLES, DOUBLES, 1, 1.0, 1.0, DOUBLES), 6),
    (
        ranked._drop_in_row,  # della
        (WORDS, WORDS, WORDS, 17, ROWS_3N, np.zeros((16, 4), np.uint32), BOUNDS, BOUNDS, BYTES),
        10,  # one more with AVX-512: a table is looked up
    ),
    (reduce.count_nonzero, (FLOATS,), 1),
    (reduce.collect_ties, (DELTAS, ROWS_3N, ROWS_3N, np.zeros((3, 2), np.int64)), 14),
    (reduce.count_watched, (DELTAS, reduce.Watched.of({1}, {1})), 17),
]
PACKING = {"_split_steps": 10, "_encode_pieces": 1, "_decode_tiles": 4}
"""Loops of the kernels that encode a block and decode it to verify it."""


def optimised_text(kernel: Any, arguments: tuple[object, ...]) -> str:
    """What LLVM made of a kernel for such arguments."""
    prepare_numba()
    from numba.core.compiler_lock import global_compiler_lock

    dispatcher = dispatcher_of(kernel)
    types = tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
    with global_compiler_lock:
        dispatcher.compile(types)
        return str(dispatcher.overloads[types].library._get_module_for_linking())


def vector_loops(text: str) -> int:
    """The loops that are vector code; the narrower ones for what is left at their ends are not counted."""
    return len(re.findall(r"^vector\.body[\w.]*:", text, re.MULTILINE))


def vector_instructions(text: str) -> int:
    """The instructions of the bodies of vector loops, each counted once."""
    bodies = re.findall(r"^(vector\.body[\w.]*):(.*?)br i1 [^\n]* label %\1\b", text, re.MULTILINE | re.DOTALL)
    return sum(len(re.findall(r"^  \S", body, re.MULTILINE)) for _, body in bodies)


def kernels_of_a_pack() -> dict[str, tuple[Kernel, tuple[object, ...]]]:
    """Encode and verify a block; return the kernels that ran, each with the arguments of its first call."""
    ran: dict[str, tuple[Kernel, tuple[object, ...]]] = {}
    call = ExportedKernel.__call__

    def noted(kernel: ExportedKernel, *arguments: object) -> object:
        ran.setdefault(kernel.__name__, (kernel, arguments))
        return call(kernel, *arguments)

    with patch.object(ExportedKernel, "__call__", noted):
        base_N, expert_N = near_pair(70_000)
        encode_block(base_N.view(np.uint8), expert_N.view(np.uint8), BF16, 2e-5)
    return ran


def near_pair(n: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Bf16 bits of a base, and others near most of them."""
    rng = np.random.default_rng(0)
    base_N = rng.integers(0x3800, 0x3C00, n).astype(np.uint16)
    return base_N, (base_N + rng.integers(-9, 10, n) * rng.integers(0, 2, n)).astype(np.uint16)


def instructions_by_kernel() -> dict[str, int]:
    """The instructions in vector loops of all kernels of `LOOPS` and `PACKING`."""
    ran = kernels_of_a_pack()
    kernels = [(kernel, arguments) for kernel, arguments, _ in LOOPS] + [ran[name] for name in PACKING]
    return {kernel.__name__: vector_instructions(optimised_text(kernel, arguments)) for kernel, arguments in kernels}


if __name__ == "__main__":
    print(json.dumps(instructions_by_kernel()))
