"""Command that loads one checkpoint as a framework does, and tells the seconds without those of imports.

Run by the part `compose` with the interpreter of requirements/train.txt, by a way, a checkpoint, its size in GB, a
number of ranks and a JSON file to write:

    torch           torch.load of every file in turn, in one process
    deepspeed-save  ranks that write a ZeRO-3 checkpoint of that size, as `benchmarks.tailor_tree` writes without them
    deepspeed       ranks with an engine of that size, which loads it
    zero_to_fp32    DeepSpeed's script, which turns it into a file of weights
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import deepspeed_cpu
from benchmarks.tailor_tree import scaled_shapes

_TAG = "global_step100"
_STAGE = 3


def _timed(call: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def _torch_load(directory: Path) -> None:
    torch: Any = import_module("torch")
    for path in sorted(directory.rglob("*.pt")):
        torch.load(path, map_location="cpu", weights_only=False)  # as DeepSpeed does


def _engine(size_bytes: int) -> Any:
    """Return a ZeRO-3 engine whose parameters have `scaled_shapes`; its loss is the sum of their squares."""
    torch: Any = import_module("torch")
    deepspeed: Any = import_module("deepspeed")
    module = type("Weight", (torch.nn.Module,), {"forward": lambda weight: weight.weight.float().square().sum()})
    model = type("Model", (torch.nn.Module,), {"forward": lambda model: sum(part() for part in model.children())})()
    for name, shape in scaled_shapes(size_bytes).items():
        part = module()
        part.weight = torch.nn.Parameter(torch.randn(shape))
        model.add_module(name.replace(".", "_"), part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {**deepspeed_cpu.engine_config(_STAGE, bf16=True), "train_micro_batch_size_per_gpu": 1}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _rank(way: str, directory: Path, size_gb: float, result: Path) -> None:
    distributed: Any = import_module("torch.distributed")
    torch: Any = import_module("torch")
    engine = _engine(int(size_gb * 1e9))
    if way == "deepspeed-save":
        engine.backward(engine())
        engine.step()  # the moments are there after the first
        engine.save_checkpoint(str(directory), tag=_TAG)
        deepspeed_cpu.leave()

    def load() -> None:
        distributed.barrier()
        engine.load_checkpoint(str(directory), tag=_TAG)
        distributed.barrier()

    loaded = _timed(load)
    cpu_seconds = torch.tensor(loaded["cpu_seconds"])
    distributed.all_reduce(cpu_seconds)
    if distributed.get_rank() == 0:
        _tell({**loaded, "cpu_seconds": float(cpu_seconds)}, result)
    deepspeed_cpu.leave()


def _tell(loaded: dict[str, float], result: Path) -> None:
    result.write_text(json.dumps(loaded))


def main(way: str, folder: str, size_gb: str, n_ranks: str, out: str) -> None:
    directory, result = Path(folder), Path(out)
    if way == "torch":
        import_module("deepspeed.runtime.zero.config")  # whose classes the files name
        _tell(_timed(lambda: _torch_load(directory)), result)
    elif way == "zero_to_fp32":
        script: Any = import_module("deepspeed.utils.zero_to_fp32")
        weights = directory / "weights"
        _tell(_timed(lambda: script.convert_zero_checkpoint_to_fp32_state_dict(directory, weights)), result)
        shutil.rmtree(weights)
    elif "RANK" in os.environ:
        _rank(way, directory, float(size_gb), result)
    else:
        deepspeed_cpu.run_ranks(int(n_ranks), "benchmarks.load_one", way, folder, size_gb, n_ranks, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
