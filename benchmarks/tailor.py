"""Composition against the I/O floor: an 8B-shaped ZeRO-3 checkpoint scaled to a size, layers taken in runs or in turn.

    python -m benchmarks.tailor --size-gb 8 --scratch DIR [--ranks 4] [--repeat 3] [--json]

Each number is a cold run in a process of its own; the floor reads one checkpoint and writes as many bytes, which is
what a composition has to move however its layers are interleaved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.cold import make_cold
from benchmarks.floor import calibrate, measure_floor
from mergepipe.blocks import F32
from mergepipe.readers.inert_values import Global, PickledStorage, PickledTensor, Record
from mergepipe.storage.local import LocalStore
from mergepipe.tailor.copy_plan import CopyRange, Literal, Segment
from mergepipe.tailor.copying import Copier
from mergepipe.tailor.torch_writer import InertPickler, Size
from mergepipe.tailor.zip_layout import MemberPlan, lay_out_archive, literal_member

LAYERS, BYTES_PER_PARAMETER = 32, 12  # masters and both moments; stage 3 stores no 16-bit weights
POOL_BYTES = 64 << 20
STATES = ("exp_avg", "exp_avg_sq")
PATTERNS = {
    "consecutive": "layers 0-15",
    "parity": "layers even",
    "one layer": "layer 7",
}
RUN = (
    "import sys, json, time, resource; from mergepipe.tailor import api\n"
    "started = time.perf_counter(); report = api.compose(sys.argv[1], sys.argv[2])\n"
    "seconds = time.perf_counter() - started\n"
    "moved = report.manifest.realized\n"
    "print(json.dumps({'seconds': seconds, 'read': moved['base'] + moved['expert'], 'written': moved['output'],"
    " 'peak_rss': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One pattern: medians over the runs. `ratio` is to the floor of the same session."""

    pattern: str
    seconds: float
    floor_seconds: float
    ratio: float
    read_bytes: int
    written_bytes: int
    peak_rss_bytes: int


def scaled_shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Llama-3-8B's shapes with every width scaled so that a checkpoint has about `size_bytes`."""
    scale = 1.0
    for _ in range(60):
        shapes = _shapes(scale)
        total = sum(int(np.prod(shape)) for shape in shapes.values()) * BYTES_PER_PARAMETER
        scale *= (size_bytes / total) ** 0.5
    return shapes


def _shapes(scale: float) -> dict[str, tuple[int, ...]]:
    def width(full: int) -> int:
        return max(1, round(full * scale))

    h, ffn, kv, vocabulary = width(4096), width(14336), width(1024), width(128256)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, h)}
    for index in range(LAYERS):
        for module, shape in (
            ("self_attn.q_proj", (h, h)), ("self_attn.k_proj", (kv, h)), ("self_attn.v_proj", (kv, h)),
            ("self_attn.o_proj", (h, h)), ("mlp.gate_proj", (ffn, h)), ("mlp.up_proj", (ffn, h)),
            ("mlp.down_proj", (h, ffn)), ("input_layernorm", (h,)), ("post_attention_layernorm", (h,)),
        ):  # fmt: skip
            shapes[f"model.layers.{index}.{module}.weight"] = shape
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (vocabulary, h)}


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int, step: int, pool: Path) -> None:
    """Write a ZeRO-3 tag directory whose tensors are cut out of `pool`."""
    folder.mkdir(parents=True)
    copier = Copier(LocalStore(), 256 << 20, lambda _: None)
    groups = [[n for n in shapes if "norm" not in n], [n for n in shapes if "norm" in n]]
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        for kind, (root, members) in (
            ("optim", _optimizer(shapes, groups, ranks, step, pool)),
            ("model", _model(shapes, groups, ranks, step)),
        ):
            head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
            name = f"{prefix}_{kind}_states.pt"
            plan = lay_out_archive(name, "archive", [*head, *members, literal_member("version", b"3\n")])
            copier.write(plan, folder / name)


def _model(
    shapes: dict[str, tuple[int, ...]], groups: list[list[str]], ranks: int, step: int
) -> tuple[object, list[MemberPlan]]:
    root = {
        "module": {},
        "param_shapes": [{n: Size(shapes[n]) for n in group} for group in groups],
        "shared_params": {},
        "global_steps": step,
        "dp_world_size": ranks,
    }
    return root, []


def _optimizer(
    shapes: dict[str, tuple[int, ...]], groups: list[list[str]], ranks: int, step: int, pool: Path
) -> tuple[object, list[MemberPlan]]:
    members: list[MemberPlan] = []

    def flat(n_elements: int) -> PickledTensor:
        segments = tuple(_from_pool(pool, n_elements * 4, len(members)))
        return tensor(segments, (n_elements,))

    def tensor(segments: tuple[Segment, ...], shape: tuple[int, ...]) -> PickledTensor:
        key, n_elements = str(len(members)), int(np.prod(shape))
        members.append(MemberPlan(f"data/{key}", segments))
        return PickledTensor(PickledStorage(key, F32, n_elements), F32, 0, shape, (1,) * len(shape))

    sizes = [sum(-(-int(np.prod(shapes[n])) // ranks) for n in group) for group in groups]
    counter = (Literal(np.float32(step).tobytes()),)
    root = {
        "optimizer_state_dict": {
            "zero_stage": Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,)),
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {
                    i: {"step": tensor(counter, ()), **{k: flat(n) for k in STATES}} for i, n in enumerate(sizes)
                },
                "param_groups": [{"params": [i], "lr": 1e-4} for i in range(len(groups))],
            },
            "fp32_flat_groups": [flat(n) for n in sizes],
        }
    }
    return root, members


def _from_pool(pool: Path, nbytes: int, seed: int) -> Iterator[CopyRange]:
    start = seed * 4096 % POOL_BYTES
    while nbytes:
        take = min(nbytes, POOL_BYTES - start)
        yield CopyRange(pool, start, take, is_skeleton=True)
        nbytes, start = nbytes - take, 0


def measure(scratch: Path, patterns: dict[str, str], repeat: int) -> list[Measured]:
    """Run every pattern `repeat` times, cold, with the floor in between."""
    sources = [scratch / "old", scratch / "new"]
    inputs = sorted((scratch / "new").iterdir())
    size_bytes = sum(path.stat().st_size for path in inputs)
    floor_file = scratch / "floor"
    setting = calibrate(inputs, floor_file, size_bytes, repeat=1)
    floors: list[float] = []
    runs: dict[str, list[dict[str, float]]] = {pattern: [] for pattern in patterns}
    for _ in range(repeat):
        floors.append(measure_floor(inputs, floor_file, size_bytes, setting).seconds)
        for pattern, units in patterns.items():
            recipe = scratch / "recipe.yml"
            recipe.write_text(f"default: new\ntake: [{{from: old, units: [{units}]}}]\n")
            make_cold(sources)
            done = subprocess.run(
                [sys.executable, "-c", RUN, recipe, scratch / "out"], check=True, capture_output=True, text=True
            )
            shutil.rmtree(scratch / "out")
            runs[pattern].append(json.loads(done.stdout))
    floor = statistics.median(floors)
    return [_summary(pattern, found, floor) for pattern, found in runs.items()]


def _summary(pattern: str, runs: list[dict[str, float]], floor_seconds: float) -> Measured:
    seconds = statistics.median(run["seconds"] for run in runs)
    last = runs[-1]
    return Measured(
        pattern, round(seconds, 3), round(floor_seconds, 3), round(seconds / floor_seconds, 3),
        int(last["read"]), int(last["written"]), int(max(run["peak_rss"] for run in runs)),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.0, help="bytes of one checkpoint")
    parser.add_argument("--scratch", type=Path, required=True, help="a directory to make and remove")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    scratch: Path = options.scratch
    scratch.mkdir(parents=True)
    try:
        pool = scratch / "pool"
        pool.write_bytes(np.random.default_rng(0).standard_normal(POOL_BYTES // 4).astype(np.float32).tobytes())
        shapes = scaled_shapes(int(options.size_gb * 1e9))
        started = time.perf_counter()
        write_checkpoint(scratch / "old", shapes, options.ranks, 100, pool)
        write_checkpoint(scratch / "new", shapes, options.ranks, 200, pool)
        print(f"two checkpoints written in {time.perf_counter() - started:.1f} s", file=sys.stderr)
        for each in measure(scratch, PATTERNS, options.repeat):
            if options.json:
                print(json.dumps(asdict(each)), flush=True)
            else:
                print(
                    f"{each.pattern:<12} {each.seconds:7.2f} s  floor {each.floor_seconds:7.2f} s  {each.ratio:.2f}x  "
                    f"read {each.read_bytes / 1e9:.2f} GB  written {each.written_bytes / 1e9:.2f} GB  "
                    f"peak {each.peak_rss_bytes / 1e6:.0f} MB"
                )
    finally:
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
