"""How long planning takes, and what memory: synthetic statistics of an 8B-parameter model and 20 experts.

`python -m benchmarks.planning [--experts 20] [--parameters 8e9] [--repeats 3]` prints one JSON line per operator and
policy: wall and processor seconds for the plan (bound and construction included), seconds for its digest and its JSON,
and the peak resident memory of the process, and by how much planning raised it. Each case runs in a process of its own.
1.5 million candidates are `--parameters 2e10`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np

from mergepipe.checkpoints.contract import Checkpoint, TensorEntry
from mergepipe.core.blocks import BF16, DEFAULT_BLOCK_ELEMENTS, BlockGrid
from mergepipe.operators.registry import operator_specs
from mergepipe.operators.statistics import BLOCK_RECORD, COMMON_DENSITIES, N_OCTAVES, N_SKETCH, Cut, TensorStatistics
from mergepipe.planning.budget import PlanningChoices, Policy, ShareBudget
from mergepipe.planning.planner import plan_merge
from mergepipe.planning.problem import PlanningModel, PlanningProblem
from mergepipe.recipes.recipe import ModelInput, Recipe
from mergepipe.recipes.resolution import resolve
from mergepipe.storage.location import Location

CASES = (
    ("task_arithmetic", Policy.NORM),
    ("ties", Policy.NORM),
    ("dare_linear", Policy.NORM),
    ("task_arithmetic", Policy.RANDOM),
    ("task_arithmetic", Policy.CONFLICT),
)
PARAMETERS = {
    "task_arithmetic": {"weight": 0.3},
    "ties": {"weight": 1.0, "density": 0.2},
    "dare_linear": {"weight": 0.3, "density": 0.5},
}
BUDGET = ShareBudget(Fraction(1, 4))
LAYERS = 36


def llama_like(parameters: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder with `LAYERS` layers and about `parameters` weights."""
    width = round((parameters / (LAYERS * 12.5 + 40)) ** 0.5 / 64) * 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20 * width, width)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{each}_proj.weight": (width, width) for each in "qo"}
        shapes |= {f"{prefix}self_attn.{each}_proj.weight": (width // 4, width) for each in "kv"}
        shapes |= {f"{prefix}mlp.{each}_proj.weight": (10 * width // 3, width) for each in ("gate", "up", "down")}
        shapes |= {f"{prefix}{each}_layernorm.weight": (width,) for each in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (20 * width, width)}


def checkpoint(name: str, shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    entries, offset = {}, 1000
    for tensor, shape in shapes.items():
        entry = TensorEntry(
            tensor, BF16, shape, Location.local(Path("/") / name), offset, int(np.prod(shape)) * BF16.itemsize
        )
        entries[tensor] = entry
        offset += entry.nbytes
    return Checkpoint(Location.local(Path("/") / name), Location.local(Path("/")), entries, (), ())


def random_statistics(n_elements: int, rng: np.random.Generator) -> TensorStatistics:
    """One tensor's statistics, every field filled."""
    grid = BlockGrid(n_elements, DEFAULT_BLOCK_ELEMENTS)
    blocks = np.zeros(grid.n_blocks, BLOCK_RECORD)
    blocks["hash"] = rng.integers(0, 256, blocks["hash"].shape)
    blocks["norm"] = rng.lognormal(0.0, 0.5, grid.n_blocks)
    blocks["largest"] = blocks["norm"] / 50
    blocks["changed"] = rng.integers(0, 20, grid.n_blocks)
    blocks["octaves"] = rng.integers(150, 240, (grid.n_blocks, N_OCTAVES))
    blocks["sketch"] = rng.standard_normal((grid.n_blocks, N_SKETCH)) / N_SKETCH**0.5
    bits = np.linspace(0.02, 0.0001, len(COMMON_DENSITIES), dtype=np.float32).view(np.uint32)
    cuts_D3 = np.array([Cut(cut) for cut in bits.tolist()], np.uint32)
    return TensorStatistics(grid, blocks, np.array(COMMON_DENSITIES), cuts_D3, np.ones(3))


def make_problem(operator: str, n_experts: int, parameters: float) -> PlanningProblem:
    """A merge of `n_experts` experts, all analysed."""
    shapes = llama_like(parameters)
    models = [checkpoint(f"expert-{e}", shapes) for e in range(n_experts)]
    base = checkpoint("base", shapes)
    inputs = tuple(ModelInput(f"expert-{e}", m.path, PARAMETERS[operator], "") for e, m in enumerate(models))
    spec = operator_specs()[operator]
    recipe = Recipe(Location.local(Path("/r")), "", spec, ModelInput("base", base.path, {}, ""), inputs, {}, None, None)
    rng = np.random.default_rng(0)
    known = tuple(
        {name: random_statistics(entry.n_elements, rng) for name, entry in model.tensors.items()} for model in models
    )
    experts = tuple(PlanningModel(each.text, model) for each, model in zip(inputs, models, strict=True))
    return PlanningProblem(
        operator,
        "",
        0,
        DEFAULT_BLOCK_ELEMENTS,
        resolve(recipe, (base, *models)),
        (PlanningModel("base", base), *experts),
        known,
    )


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(operator: str, policy: Policy, n_experts: int, parameters: float, repeats: int) -> dict[str, object]:
    """Plan `repeats` times in this process."""
    problem = make_problem(operator, n_experts, parameters)
    before = peak_rss_bytes()
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        plan = plan_merge(problem, BUDGET, policy, PlanningChoices())
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    peak = peak_rss_bytes()
    start = time.perf_counter()
    digest = plan.digest
    digest_seconds = time.perf_counter() - start
    start = time.perf_counter()
    raw = plan.to_json()
    return {
        "operator": operator,
        "policy": policy.value,
        "candidates": sum(-(-tensor.n_elements // plan.block_elements) for tensor in plan.tensors) * n_experts,
        "plan_seconds": round(statistics.median(seconds), 3),
        "plan_cpu_seconds": round(statistics.median(cpu_seconds), 3),
        "first_plan_seconds": round(seconds[0], 3),
        "digest_seconds": round(digest_seconds, 3),
        "json_seconds": round(time.perf_counter() - start, 3),
        "json_bytes": len(raw),
        "runs": sum(len(access.blocks) for tensor in plan.tensors for access in tensor.access),
        "peak_rss_bytes": peak,
        "planning_rss_bytes": peak - before,
        "digest": digest,
    }


def main() -> None:
    """Measure every case, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--parameters", type=float, default=8e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=2, metavar=("OPERATOR", "POLICY"))
    given = parser.parse_args()
    if given.case:
        operator, policy = given.case
        found = measure(operator, Policy(policy), given.experts, given.parameters, given.repeats)
        print(json.dumps(found), flush=True)
        return
    for operator, policy in CASES:
        command = [sys.executable, "-m", "benchmarks.planning", *sys.argv[1:], "--case", operator, policy.value]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
