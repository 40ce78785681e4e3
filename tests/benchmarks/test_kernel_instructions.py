"""The vector loops of kernels have no more instructions than were counted: slower kernels show here, not in seconds.

LLVM chooses instructions by the processor that it compiles for. These are compiled for one processor, whatever this
machine is, in a process of their own that finds nothing compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llvmlite
import numba
import pytest
from llvmlite.binding import get_host_cpu_features

TESTS = Path(__file__).parents[1]
COUNTED_FOR = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt"}
COUNTED_WITH = ("0.68.1", "0.50.0")  # numba; llvmlite, which carries LLVM
INSTRUCTIONS = {
    "decode_tile": 355, "encode_tile": 406, "_fill_random_words": 134, "_encode_bf16": 72, "take_delta": 60,
    "_keep_large": 196, "keep_band": 209, "_keep_random": 164,
    "_add_scaled": 53, "_add_agreeing": 26, "_normalize_agreeing": 70, "variance_tile": 276, "collect_between": 136,
    "merge_overlapping": 1701, "exp_tile": 224, "log_tile": 201, "_divergence": 366, "_drop_in_row": 700,
    "count_nonzero": 34, "collect_ties": 518, "count_watched": 585, "_split_steps": 555,
    "_encode_pieces": 976, "_decode_tiles": 602,
}  # fmt: skip
"""Instructions of all vector loops of a kernel: a new one may replace some, and then these change."""

pytestmark = [
    pytest.mark.slow,  # `make test-benchmarks`, which CI runs too
    pytest.mark.skipif(
        (numba.__version__, llvmlite.__version__) != COUNTED_WITH, reason="another numba or LLVM was counted with"
    ),
    pytest.mark.skipif(not get_host_cpu_features().get("avx2", False), reason="what packs a block runs with AVX2"),
]


def test_vector_loops__have_no_more_instructions_than_were_counted(tmp_path: Path) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    settings = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    program = subprocess.run(
        [sys.executable, "-m", "support.vector_code"],
        env={**os.environ, **COUNTED_FOR, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    instructions = json.loads(program.stdout)
    assert instructions.keys() == INSTRUCTIONS.keys()
    assert {name: n for name, n in instructions.items() if n > INSTRUCTIONS[name]} == {}
