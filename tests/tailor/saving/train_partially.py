"""Train a tiny model under a real framework with partial saving, and dump what the framework held at each step.

Run with the interpreter of requirements/train.txt and PYTHONPATH=src: `train_partially.py KIND OUT [--strategy S]
[--background] [--crash-at STEP [--crash-in PLACE]]`. It starts its own ranks. `OUT/truth-STEP.npz` maps
`kind/parameter` to the whole array the framework held after STEP; the run is `OUT/run`. With `--crash-at`, a rank dies
while that step is saved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
make: Any = import_module("make_checkpoints")

KINDS = (
    "hf", "hf-fp16", "hf-ddp", "hf-zero1", "hf-zero2", "hf-zero3", "hf-zero2-bf16", "hf-zero2-fp16", "hf-zero2-tied",
    "plain", "fsdp2", "fsdp2-tied",
)  # fmt: skip
ONE_RANK = ("hf", "hf-fp16")
EVERY, LAST = 2, 6


def strategy(name: str) -> Any:
    train: Any = import_module("mergepipe.tailor.saving")
    return {
        "parity": train.Schedule("parity"),
        "filter": train.Schedule("filter", edge_layers=1, every=2),
        "latest-changed": train.LatestChanged(budget_bytes=60_000),
        "everything": train.Schedule("filter", edge_layers=3, every=1),
    }[name]


def trainer_of(kind: str, out: Path) -> Any:
    import torch

    options: dict[str, Any] = {"max_steps": LAST, "save_strategy": "no", "logging_steps": 1}
    if "bf16" in kind:
        training_arguments: Any = import_module("transformers.training_args")
        training_arguments.is_torch_bf16_gpu_available = lambda: True
        options["bf16"] = True
    if "zero" in kind:
        return make.hf_zero_trainer(kind, out / "run", **options)
    transformers: Any = import_module("transformers")
    n_batches = 8 if kind in ONE_RANK else 16  # as `resume.py` has them: the order depends on it
    rows = [{"input_ids": t, "labels": t} for t in torch.cat([make.batch(s, 0) for s in range(n_batches)])]
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "run"), per_device_train_batch_size=2, learning_rate=1e-2, weight_decay=0.1,
        report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=make.tiny_model(kind), args=arguments, train_dataset=rows)
    make.scale_loss(trainer, kind)
    return trainer


def optimizer_arrays(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole arrays of a model and its plain optimizer; DTensors are gathered by all ranks."""
    import torch

    arrays = {}
    for name, parameter in model.named_parameters():
        held = {"weight": parameter} | {k: torch.as_tensor(v) for k, v in optimizer.state[parameter].items()}
        for kind, value in held.items():
            arrays[f"{kind}/{name}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return arrays


def train_trainer(kind: str, out: Path, chosen: str, *, background: bool) -> None:
    train: Any = import_module("mergepipe.tailor.saving")
    transformers: Any = import_module("transformers")
    trainer = trainer_of(kind, out)

    def on_step_end(_: Any, __: Any, state: Any, ___: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY:
            return
        if "zero" in kind:
            assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
            arrays = dict(make._zero_states(trainer.model_wrapped, int(kind.removeprefix("hf-zero")[0])))
        else:
            arrays = optimizer_arrays(kwargs["model"], kwargs["optimizer"].optimizer)
        if trainer.args.process_index == 0:
            make.write_truth(out / f"truth-{state.global_step}.npz", arrays)

    spy = type("Spy", (transformers.TrainerCallback,), {"on_step_end": on_step_end})
    trainer.add_callback(spy())
    trainer.add_callback(train.PartialCheckpointCallback(EVERY, strategy(chosen), background=background))
    trainer.train()


def train_by_hand(kind: str, out: Path, chosen: str, rank: int, *, background: bool) -> None:
    import torch

    train: Any = import_module("mergepipe.tailor.saving")
    inner, model, optimizer = make.loop_model(kind)
    tracker, writer = train.ChangeTracker(), train.BackgroundWriter() if background else None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, make.rate_of_step)
    torch.manual_seed(rank)
    for step in range(1, LAST + 1):
        make.noisy_step(model, optimizer, scheduler, make.batch(step, rank))
        if step % EVERY == 0:
            arrays = optimizer_arrays(inner, optimizer)
            if rank == 0:
                make.write_truth(out / f"truth-{step}.npz", arrays)
            state = {"step": step, "scheduler": scheduler.state_dict()}
            train.save_partial(
                out / "run", model, optimizer, step=step, strategy=strategy(chosen), tracker=tracker, state=state,
                writer=writer,
            )  # fmt: skip
    if writer is not None:
        writer.wait()


def crash_at(step: int, place: str, rank: int) -> None:
    """Make rank 1 die without a word half way through its shard of `step`, or rank 0 when all is written."""
    saving: Any = import_module("mergepipe.tailor.saving.partial_run")
    append, publish = saving.ShardWriter.append, saving.Staging.publish

    def dying_append(self: Any, content: Any) -> None:
        append(self, content)
        if place == "shard" and rank == 1 and f"partial-{step}." in str(self._directory) and self.digests:
            os._exit(9)

    def dying_publish(self: Any) -> None:
        if place == "publish" and f"partial-{step}." in str(self.path):
            os._exit(9)
        publish(self)

    saving.ShardWriter.append, saving.Staging.publish = dying_append, dying_publish


def run_rank(arguments: argparse.Namespace) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if arguments.crash_at:
        crash_at(arguments.crash_at, arguments.crash_in, rank)
    if arguments.kind.startswith("hf"):
        train_trainer(arguments.kind, arguments.out, arguments.strategy, background=arguments.background)
    else:
        train_by_hand(arguments.kind, arguments.out, arguments.strategy, rank, background=arguments.background)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts in its destructors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", default="parity")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--crash-at", type=int, default=0)
    parser.add_argument("--crash-in", choices=("shard", "publish"), default="shard")
    parser.add_argument("--is-rank", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.is_rank or arguments.kind in ONE_RANK:
        run_rank(arguments)
    environment = dict(
        os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_BUILD_OPS="0", ACCELERATE_TORCH_DEVICE="cpu"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={make.WORLD_SIZE}"]
    finished = subprocess.run([*launcher, __file__, *sys.argv[1:], "--is-rank"], env=environment, check=False)
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
