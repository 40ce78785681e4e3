"""The loops of merging, cutting, dropping, packing and decoding are vector code.

Seconds say little on a shared machine. What the compiler made of a loop is the same on every run: LLVM gives the body
of each loop that it vectorised a name. How many instructions such bodies have depends on the processor that they are
made for, so that they are compared on one model only, the one on which they were counted.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16
from mergepipe.deltastore.codec.bands import Bands
from mergepipe.deltastore.codec.block import encode_block
from mergepipe.kernels import codec, merge, overlap, philox, ranked, reduce, select, transcendental
from mergepipe.kernels.compilation.compiled import Kernel

N = codec.TILE_ELEMENTS
ONE, BITS = np.float32(1), np.uint32(1)
FLOATS, WORDS, HALVES, BYTES = (np.zeros(N, dtype) for dtype in (np.float32, np.uint32, np.uint16, np.uint8))
COUNTS = np.zeros(1, np.int64)
DOUBLES, DOUBLES_2N, FLOATS_2N = np.zeros(N), np.zeros((2, N)), np.zeros((2, N), np.float32)
BOUNDS, ROWS_3N = np.zeros((2, 16), np.uint64), np.zeros((3, N), np.uint32)
FINE = (np.zeros(1, np.uint32), np.zeros(1 << 15, np.int16), np.zeros((1, 1 << 16), np.int32), COUNTS)
LOOPS: list[tuple[Any, tuple[object, ...], int]] = [
    (codec.decode_tile, (BYTES, 0, codec.CODE_BF16, 1, FLOATS), 12),
    (codec.encode_tile, (FLOATS, 1, BYTES, 0, codec.CODE_BF16), 9),
    (merge.take_delta, (FLOATS, FLOATS, 1, FLOATS), 1),
    (merge._keep_large, (FLOATS, 1, BITS), 1),  # ties
    (merge.keep_band, (FLOATS, 1, BITS, BITS), 1),  # breadcrumbs
    (merge._keep_random, (FLOATS, 1, np.uint64(1), 0, np.uint64(1), ONE, WORDS), 1),  # dare
    (merge._add_scaled, (FLOATS, 1, ONE, FLOATS), 1),  # linear
    (merge._add_agreeing, (FLOATS, 1, ONE, FLOATS, FLOATS, FLOATS), 1),
    (merge._normalize_agreeing, (FLOATS, FLOATS, FLOATS, 1, True, ONE, ONE), 3),
    (merge.variance_tile, (FLOATS_2N, 2, 2, 1, FLOATS, DOUBLES_2N), 8),  # sce
    (reduce.collect_between, (FLOATS, WORDS, COUNTS), 3),
    (overlap.merge_overlapping, (BYTES, 0, 3, COUNTS, COUNTS, ONE, FLOATS, BYTES, 0, 3, 1), 27),  # ram
    (transcendental.exp_tile, (DOUBLES, 1, DOUBLES), 1),  # arcee_fusion
    (transcendental.log_tile, (DOUBLES, 1, DOUBLES), 1),
    (select._divergence, (DOUBLES, DOUBLES, 1, 1.0, 1.0, DOUBLES), 6),
    (
        ranked._drop_in_row,  # della
        (WORDS, WORDS, WORDS, 17, ROWS_3N, np.zeros((16, 4), np.uint32), BOUNDS, BOUNDS[0], BYTES),
        11,
    ),
    (reduce.count_nonzero, (FLOATS,), 1),
    (reduce.count_from_edges, (BYTES, 0, 1, 0, 1, 1, HALVES, COUNTS), 14),
    (reduce.count_fine_bits, (WORDS, 1, HALVES, np.zeros((2, N), np.uint8), *FINE), 4),
]
PACKING = {"bytes_equal": 1, "fill_contexts": 1, "encode_pieces": 20, "decode_tiles": 18}
"""Loops of the kernels that encode a block and decode it to verify it."""

COUNTED_ON = "znver5"
INSTRUCTIONS = {
    "decode_tile": 375, "encode_tile": 406, "take_delta": 60, "_add_scaled": 53, "_keep_large": 34, "keep_band": 42,
    "_keep_random": 53, "_add_agreeing": 26, "_normalize_agreeing": 98, "variance_tile": 339, "collect_between": 136,
    "count_from_edges": 514, "count_fine_bits": 170, "exp_tile": 224, "log_tile": 201, "_divergence": 394,
    "_drop_in_row": 754, "bytes_equal": 35, "fill_contexts": 404, "encode_pieces": 2441,
    "decode_tiles": 1968,
}  # fmt: skip
"""Instructions of all vector loops of a kernel: a new one may replace some, and then these change."""

pytestmark = pytest.mark.skipif(
    not get_host_cpu_features().get("avx2", False), reason="loops are counted for AVX2 and wider vectors"
)


def optimised_text(kernel: Any, arguments: tuple[object, ...]) -> str:
    """What LLVM made of a kernel for such arguments."""
    types = tuple(kernel.dispatcher.typeof_pyval(argument) for argument in arguments)
    kernel.dispatcher.compile(types)
    return str(kernel.dispatcher.overloads[types].library._get_module_for_linking())


def vector_loops(text: str) -> int:
    """The loops that are vector code; the narrower ones for what is left at their ends are not counted."""
    return len(re.findall(r"^vector\.body[\w.]*:", text, re.MULTILINE))


def vector_instructions(text: str) -> int:
    """The instructions of the bodies of vector loops, each counted once."""
    bodies = re.findall(r"^(vector\.body[\w.]*):(.*?)br i1 [^\n]* label %\1\b", text, re.MULTILINE | re.DOTALL)
    return sum(len(re.findall(r"^  \S", body, re.MULTILINE)) for _, body in bodies)


@pytest.mark.parametrize(("kernel", "arguments", "loops"), LOOPS, ids=lambda value: getattr(value, "__name__", ""))
def test_kernel__has_its_loops_as_vector_code(kernel: Any, arguments: tuple[object, ...], loops: int) -> None:
    text = optimised_text(kernel, arguments)
    assert vector_loops(text) >= loops
    check_instructions(kernel.__name__, text)


def check_instructions(name: str, text: str) -> None:
    """Compare with what was counted; another version of LLVM may make a few more."""
    if get_host_cpu_name() == COUNTED_ON and name in INSTRUCTIONS:
        assert vector_instructions(text) <= 1.05 * INSTRUCTIONS[name], name


def test_vector_instructions__of_a_loop_with_more_to_do_are_more() -> None:
    kept, band = (
        optimised_text(k, a)
        for k, a in ((merge._keep_large, (FLOATS, 1, BITS)), (merge.keep_band, (FLOATS, 1, BITS, BITS)))
    )
    assert 0 < vector_instructions(kept) < vector_instructions(band)


def test_kernel__random_words_come_many_at_a_time() -> None:
    text = optimised_text(philox.fill_random_words, (np.uint64(1), 0, 1, WORDS))
    assert len(re.findall(r" = mul nuw nsw <\d+ x i64>| = mul [\w ]*<\d+ x i64>", text)) >= 10


def test_vector_loops__are_none_where_one_element_depends_on_others() -> None:
    assert vector_loops(optimised_text(reduce.count_bits, (WORDS, 1, COUNTS))) == 0


def test_kernels_of_a_pack__have_their_loops_as_vector_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, tuple[Kernel, tuple[object, ...]]] = {}
    call = Kernel.__call__

    def noted(kernel: Kernel, *arguments: object) -> object:
        ran.setdefault(kernel.__name__, (kernel, arguments))
        return call(kernel, *arguments)

    monkeypatch.setattr(Kernel, "__call__", noted)
    base_N, expert_N = near_pair(70_000)
    encode_block(base_N.view(np.uint8), expert_N.view(np.uint8), BF16, Bands((6e-5, 2e-5, 3e-6)))
    through_numba = [name for name, (kernel, _) in ran.items() if uses_numba(kernel)]
    assert through_numba == []  # importing it takes longer than a small merge
    texts = {name: optimised_text(*ran[name]) for name in PACKING}
    loops = {name: vector_loops(text) for name, text in texts.items()}
    assert {name: n for name, n in loops.items() if n < PACKING[name]} == {}
    for name, text in texts.items():
        check_instructions(name, text)


def uses_numba(kernel: Kernel) -> bool:
    """Whether a kernel has run through numba, as its machine code could not be kept."""
    return vars(kernel).get("dispatcher") in kernel._entries.values()


def near_pair(n: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Bf16 bits of a base, and others near most of them."""
    rng = np.random.default_rng(0)
    base_N = rng.integers(0x3800, 0x3C00, n).astype(np.uint16)
    return base_N, (base_N + rng.integers(-9, 10, n) * rng.integers(0, 2, n)).astype(np.uint16)
