"""The libraries of all levels of the instruction set give the same bits, those of numba in a process that runs kernels.

Calls are those of the jobs of `tests/test_golden_outputs.py`, and of blocks of every dtype, length, place and number.
"""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tools.kernels.building import build

from mergepipe.core.blocks import DELTA_FLAG, GRAIN_ELEMENTS, ITEMSIZE_BY_KERNEL_CODE, RawBlock
from mergepipe.kernels import library, merge
from mergepipe.kernels.compiled import EXPORTED, ExportedKernel
from support.kernel_calls import Call, outcome, recorded_calls
from test_golden_outputs import all_digests

pytestmark = pytest.mark.slow

CALLS_OF_EACH = 6
N_EXPERTS = 3
LENGTHS = (0, 1, 3, 64, 2047, 2048, 2049, 6144)
CONSENSUS_KEEPS = (merge.KEEP_ALL, merge.KEEP_LARGE, merge.KEEP_RANDOM, merge.KEEP_BAND)
KEEPS = (*CONSENSUS_KEEPS, merge.KEEP_NEAR, merge.KEEP_VARIED, merge.KEEP_MARKED)


def rule_of(keep: int, consensus: bool, rng: np.random.Generator) -> merge.Rule:
    """A rule with cuts, keys and marks that keep some of any numbers."""
    weights_E = rng.normal(size=N_EXPERTS).astype(np.float32)
    lower_E3 = np.array([[0x3F000000, 5, 0x7FFFFFFF]] * N_EXPERTS, np.uint32)
    upper_E3 = np.array([[0x40000000, 9, 0xFFFFFFFF]] * N_EXPERTS, np.uint32)
    keys_E = rng.integers(0, 2**63, N_EXPERTS).astype(np.uint64)
    limits_E = np.full(N_EXPERTS, 1 << 31, np.uint64)
    marks_MB = rng.integers(0, 256, (1, 2048)).astype(np.uint8)
    scale = np.float32(0.9)
    return merge.Rule(
        weights_E, weights_E, keep, lower_E3, upper_E3, keys_E, limits_E, np.abs(weights_E), marks_MB,
        consensus, consensus, np.float32(0), np.float32(1), scale,
    )  # fmt: skip


def block_of(code: int, n: int, offset: int, rng: np.random.Generator) -> RawBlock:
    """A block of any bits: infinities, NaN and subnormal numbers are among them. Some are rounded stochastically."""
    nbytes = n * ITEMSIZE_BY_KERNEL_CODE[code]
    raw = rng.integers(0, 256, offset + (N_EXPERTS + 1) * nbytes).astype(np.uint8)
    experts_E = np.arange(N_EXPERTS)
    codes_E = np.full(N_EXPERTS, code)
    codes_E[-1] |= DELTA_FLAG
    offsets_E = offset + (1 + experts_E) * nbytes
    out = np.zeros(offset + nbytes, np.uint8)
    rounding_key = np.uint64(0 if offset % 2 else 67)
    sums_G2 = np.zeros((1 + (128 + n) // GRAIN_ELEMENTS, 2))
    return RawBlock(
        raw, offset, code, experts_E, experts_E, offsets_E, codes_E, 128, n, out, offset, code, rounding_key, sums_G2, 0
    )


def calls_with_any_numbers() -> list[Call]:
    """Merges, conversions and decodings of blocks of every dtype, length and place."""
    rng = np.random.default_rng(67)
    calls = []
    for code in ITEMSIZE_BY_KERNEL_CODE:
        for place, n in enumerate(LENGTHS):
            block = block_of(code, n, place % 4, rng)
            values = rng.integers(0, 2**32, n, np.uint32).view(np.float32)
            calls.append(Call("encode_all", (values, block.out.copy(), code)))
            calls.append(Call("decode_all", (block.raw, code, n, np.zeros(n, np.float32))))
            keep = KEEPS[(place + code) % len(KEEPS)]
            for one_keep in {keep, CONSENSUS_KEEPS[place % 4]}:
                is_consensus = one_keep in CONSENSUS_KEEPS and place % 2 == 0
                calls.append(Call("merge_block", (block, rule_of(one_keep, is_consensus, rng))))
            calls.append(Call("merge_largest", (block, np.float32(0.5))))
            scales_E = rng.uniform(0.5, 1.5, N_EXPERTS).astype(np.float32)
            calls.append(Call("merge_overlapping", (block, np.float32(1e-6), scales_E)))
            calls.append(Call("merge_agreed", (block, scales_E, np.zeros(N_EXPERTS, np.float32), 2, np.float32(0.5))))
            calls.append(Call("scale_change", (block, 0.7, 64, 1e-9)))
            calls.append(Call("encode_array", (block, values)))
            deltas_EN = np.zeros((N_EXPERTS, n), np.float32)
            calls.append(Call("decode_arrays", (block, np.zeros(n, np.float32), deltas_EN)))
            raw = np.zeros(n * ITEMSIZE_BY_KERNEL_CODE[code], np.uint8)
            calls.append(Call("encode_all_by", (values, 128 + place, np.uint64(67), raw, code)))
    return calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    with recorded_calls(CALLS_OF_EACH) as recorded:
        all_digests(tmp_path_factory.mktemp("jobs"))
    return recorded + calls_with_any_numbers()


@pytest.fixture(scope="module")
def expected(calls: list[Call], tmp_path_factory: pytest.TempPathFactory) -> list[list[bytes]]:
    """What numba gives, in a process of its own."""
    folder = tmp_path_factory.mktemp("jitted")
    recorded, results = folder / "calls", folder / "results"
    recorded.write_bytes(pickle.dumps(calls))
    subprocess.run([sys.executable, "-m", "support.jitted_kernels", str(recorded), str(results)], check=True)
    outcomes: list[list[bytes]] = pickle.loads(results.read_bytes())
    return outcomes


def test_jobs__call_nearly_every_exported_kernel(calls: list[Call]) -> None:
    called = {call.kernel for call in calls}
    uncalled = sorted({kernel.__name__ for kernel in EXPORTED} - called)
    assert len(uncalled) <= 16, " ".join(uncalled)


@pytest.mark.parametrize("level", library.usable_levels())
def test_library__of_each_level_gives_the_bits_of_numba(
    level: str, calls: list[Call], expected: list[list[bytes]], tmp_path: Path
) -> None:
    (built,) = build(tmp_path, [level])
    loaded = ctypes.CDLL(str(built))
    kernels = {kernel.__name__: kernel for kernel in EXPORTED}
    found = [outcome(call, partial(run_in, loaded, kernels[call.kernel])) for call in calls]
    differing = {call.kernel for call, one, other in zip(calls, found, expected, strict=True) if one != other}
    assert differing == set()


def run_in(loaded: ctypes.CDLL, kernel: ExportedKernel, *arguments: object) -> object:
    """Run a kernel in a library."""
    return kernel.specialization_of(arguments).call(arguments, loaded)
