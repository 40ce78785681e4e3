"""Ranks that train under DeepSpeed on processors, with gloo: starting them, the Trainer's options, leaving."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0", "ACCELERATE_TORCH_DEVICE": "cpu"}
)
_BUCKET_ELEMENTS = 5_000_000  # of gradients that are reduced together; DeepSpeed's own half a billion is for GPUs


class RanksError(Exception):
    """A process of a training failed."""


def run_ranks(n_ranks: int, module: str, *arguments: object) -> None:
    """Run `python -m module` in a process of its own, or as ranks that know each other.

    Raises:
        RanksError: one failed.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"] if n_ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **_ENVIRONMENT}, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode:
        raise RanksError(f"{module} failed\n{done.stderr.decode(errors='replace')[-4000:]}")


def engine_config(stage: int, *, bf16: bool = False) -> dict[str, Any]:
    """Return DeepSpeed's configuration for an optimizer of torch's, without building its operators."""
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": _BUCKET_ELEMENTS},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
    }


def trainer_options(stage: int, *, bf16: bool = False) -> dict[str, Any]:
    """Return the arguments that make the Trainer run DeepSpeed; accelerate would else fall back silently."""
    state: Any = import_module("accelerate.state")
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_CPU)
    training_args: Any = import_module("transformers.training_args")
    training_args.is_torch_bf16_gpu_available = lambda: True
    config = {**engine_config(stage, bf16=bf16), "train_micro_batch_size_per_gpu": "auto"}
    return {"deepspeed": config, "max_grad_norm": 1.0, "bf16": bf16}


def leave() -> None:
    """End the process when all ranks are done, past gloo's destructors, which sometimes abort."""
    import_module("torch.distributed").barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
