"""Rates of one core: what every operator does to blocks in memory, by stage, in GB of expert bytes a second."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import BF16, RawBlock
from mergepipe.engine.block_reductions import make_reduction
from mergepipe.operators.base import NOTHING_REDUCED, Operator, OperatorInput, Scalar
from mergepipe.operators.registry import operator_named, operator_specs
from mergepipe.operators.spec import BaseRole, Scope
from mergepipe.testing.contracts import encode_elements

BLOCK_ELEMENTS = 1 << 18
CHOSEN: Mapping[str, Scalar] = {"weight": 0.5, "density": 0.5, "t": 0.3, "select_topk": 0.3}
Rates = dict[str, float]


def made_models(n_experts: int, n_elements: int) -> NDArray[np.uint8]:
    """Raw bf16 of a base, of experts near it, and room for the result."""
    rng = np.random.default_rng(0)
    base_N = (rng.standard_normal(n_elements) * 0.02).astype(np.float32)
    experts = [base_N + (rng.standard_normal(n_elements) * 5e-4).astype(np.float32) for _ in range(n_experts)]
    stored = [encode_elements(values_N, BF16).view(np.uint8).reshape(-1) for values_N in (base_N, *experts)]
    return np.concatenate([*stored, np.zeros_like(stored[0])])


def given_to(operator: Operator, n_experts: int, shape: tuple[int, int]) -> OperatorInput:
    """Parameters: those of `CHOSEN`, else the defaults."""
    spec = operator.spec
    values = {p.name: CHOSEN.get(p.name, p.default) for p in spec.parameters}
    known = {name: value for name, value in values.items() if value is not None}
    shared = {p.name: known[p.name] for p in spec.parameters if p.scope is Scope.GLOBAL and p.name in known}
    own = {p.name: known[p.name] for p in spec.parameters if p.scope is Scope.MODEL and p.name in known}
    has_part = spec.base_role is BaseRole.OPTIONAL
    keys = tuple(range(1, n_experts + 1))
    return OperatorInput(shared, own if has_part else {}, (own,) * n_experts, shape[0] * shape[1], keys, shape=shape)


def blocks_of(raw: NDArray[np.uint8], n_experts: int, n_elements: int, step: int) -> list[RawBlock]:
    """The tensor in blocks of `step` elements."""
    everyone = np.arange(n_experts)
    codes_E = np.full(n_experts, BF16.kernel_code)
    model_bytes, out = n_elements * BF16.itemsize, raw[(n_experts + 1) * n_elements * BF16.itemsize :]
    blocks = []
    for start in range(0, n_elements, step):
        at, n = start * BF16.itemsize, min(step, n_elements - start)
        offsets_E = (everyone + 1) * model_bytes + at
        code = BF16.kernel_code
        blocks.append(RawBlock(raw, at, code, everyone, everyone, offsets_E, codes_E, start, n, out, at, code))
    return blocks


def stage_seconds(operator: Operator, given: OperatorInput, blocks: Sequence[RawBlock]) -> dict[str, float]:
    """Processor time of this thread for each reduction and for the merge."""
    known = NOTHING_REDUCED
    seconds: dict[str, float] = {}
    while (request := operator.reduction(given, known)) is not None:
        start = time.thread_time()
        reduction = make_reduction(request, given.n_elements, len(given.experts))
        _each(blocks, reduction.accumulate)
        while not reduction.finish():
            _each(blocks, reduction.refine)
        known = known.joined(reduction.result())
        seconds[f"{len(seconds) + 1} {type(request).__name__}"] = time.thread_time() - start
    start = time.thread_time()
    _each(blocks, operator.block_function(given, known))
    return {**seconds, "merge": time.thread_time() - start}


def _each(blocks: Sequence[RawBlock], step: Callable[[RawBlock], None]) -> None:
    for block in blocks:
        step(block)


def rates_of(name: str, n_experts: int, shape: tuple[int, int], repeat: int) -> Rates:
    """The best rate of each stage, and of all together."""
    operator, n_elements = operator_named(name), shape[0] * shape[1]
    given = given_to(operator, n_experts, shape)
    grain = operator.granularity(given)
    raw = made_models(n_experts, n_elements)
    blocks = blocks_of(raw, n_experts, n_elements, max(1, BLOCK_ELEMENTS // grain) * grain)
    stage_seconds(operator, given, blocks)  # compiles
    runs = [stage_seconds(operator, given, blocks) for _ in range(repeat)]
    best = {stage: min(run[stage] for run in runs) for stage in runs[0]}
    best["all"] = sum(best.values())
    return {stage: n_experts * n_elements * BF16.itemsize / spent / 1e9 for stage, spent in best.items()}


def main() -> int:
    names = [name for name, spec in operator_specs().items() if spec.max_experts != 0]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", default=names)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=2, default=(1024, 3072), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for name in options.operators:
        n_experts = min(options.experts, operator_specs()[name].max_experts or options.experts)
        rates = rates_of(name, n_experts, tuple(options.shape), options.repeat)
        print(f"{name}: " + ", ".join(f"{stage} {rate:.2f}" for stage, rate in rates.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
