"""The loops of merging, cutting, dropping, packing and decoding are vector code.

Seconds say little on a shared machine. What the compiler made of a loop is the same on every run: LLVM gives the body
of each loop that it vectorised a name.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from llvmlite.binding import Target, get_host_cpu_features, parse_assembly

from mergepipe.kernels import merge, numerics
from mergepipe.kernels.compiled import Doubles, kernel
from support.vector_code import (
    LOOPS,
    PACKING,
    WORDS,
    kernels_of_a_pack,
    optimised_text,
    vector_instructions,
    vector_loops,
)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not get_host_cpu_features().get("avx2", False), reason="loops are counted for AVX2 and wider vectors"
    ),
]


@pytest.mark.parametrize(("kernel", "arguments", "loops"), LOOPS, ids=lambda value: getattr(value, "__name__", ""))
def test_kernel__has_its_loops_as_vector_code(kernel: Any, arguments: tuple[object, ...], loops: int) -> None:
    assert vector_loops(optimised_text(kernel, arguments)) >= loops


@pytest.mark.thorough
def test_kernels__store_whole_vectors() -> None:
    """What is selected in place becomes a store of single lanes, which is many times slower with AMD's AVX2."""
    texts = {kernel.__name__: optimised_text(kernel, arguments) for kernel, arguments, _ in LOOPS}
    machine = Target.from_default_triple().create_target_machine(cpu="haswell", opt=3)
    code = {name: machine.emit_assembly(parse_assembly(text)) for name, text in texts.items()}
    assert [name for name in code if re.search(r"maskmov\w+\s+%\w+, %\w+, .*\(", code[name])] == []


def test_vector_instructions__of_a_loop_with_more_to_do_are_more() -> None:
    kept, band = (optimised_text(k, a) for k, a, _ in LOOPS if k in (merge._keep_large, merge.keep_band))
    assert 0 < vector_instructions(kept) < vector_instructions(band)


def test_kernel__random_words_come_many_at_a_time() -> None:
    text = optimised_text(numerics.fill_random_words, (np.uint64(1), 0, 1, WORDS))
    assert len(re.findall(r" = mul nuw nsw <\d+ x i64>| = mul [\w ]*<\d+ x i64>", text)) >= 10


@kernel
def add_up(values: Doubles) -> None:
    """Replace each value by the sum of those up to it."""
    for i in range(1, values.shape[0]):
        values[i] += values[i - 1]


def test_vector_loops__are_none_where_one_element_depends_on_others() -> None:
    assert vector_loops(optimised_text(add_up, (np.zeros(1),))) == 0


def test_kernels_of_a_pack__have_their_loops_as_vector_code() -> None:
    ran = kernels_of_a_pack()
    loops = {name: vector_loops(optimised_text(*ran[name])) for name in PACKING}
    assert {name: n for name, n in loops.items() if n < PACKING[name]} == {}
