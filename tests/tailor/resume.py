"""Resumes checkpoints with their own framework: what it loads, and the losses of its next steps. Run by a test.

    python resume.py KIND RUN STEP...

For every STEP of the run, `resumed-STEP.npz` holds the loaded states (`fp32/NAME`, ...), then the losses of two more
steps of every rank (`loss/RANK`) and the weights after them (`after/NAME`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import make_checkpoints as frameworks

N_STEPS = 2
WORLD_SIZE_VARIABLE = "MERGEPIPE_TEST_RANKS"


def save(out: Path, step: int, arrays: dict[str, Any], losses: list[Any]) -> None:
    """Rank 0 writes everything; losses of all ranks are gathered first."""
    import torch

    mine = torch.stack([loss.detach().float() for loss in losses])
    everyone = [mine]
    if torch.distributed.is_initialized():
        everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, mine)
    arrays |= {f"loss/{rank}": each for rank, each in enumerate(everyone)}
    if int(os.environ.get("RANK", "0")) == 0:
        frameworks.write_truth(out / f"resumed-{step}.npz", arrays)


def resume_deepspeed(kind: str, out: Path, step: int, rank: int) -> None:
    engine = frameworks.deepspeed_engine(kind)
    found, _ = engine.load_checkpoint(str(out), tag=f"global_step{step}")
    assert found is not None
    stage = int(kind[4])
    arrays = {k: v.detach().clone() for k, v in frameworks._zero_states(engine, stage)}
    arrays["global_steps"] = import_module("torch").tensor(engine.global_steps)
    losses = []
    for number in range(engine.global_steps + 1, engine.global_steps + 1 + N_STEPS):
        tokens = frameworks.batch(number, rank)
        losses.append(engine(input_ids=tokens, labels=tokens).loss)
        engine.backward(losses[-1])
        engine.step()
    arrays |= {f"after/{k}": v.detach().clone() for k, v in frameworks._zero_states(engine, stage)}
    save(out, step, arrays, losses)


def resume_dcp(kind: str, out: Path, step: int, rank: int) -> None:
    model, optimizer = frameworks.load_dcp(kind, out / f"step-{step}")
    arrays = {}
    for name, parameter in model.named_parameters():
        arrays[f"weight/{name}"] = parameter.full_tensor().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            arrays[f"{key}/{name}"] = optimizer.state[parameter][key].full_tensor().clone()
        arrays[f"step/{name}"] = optimizer.state[parameter]["step"].clone()
    losses = []
    for number in range(10, 10 + N_STEPS):
        tokens = frameworks.batch(number, rank)
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    arrays |= {f"after/{name}": parameter.full_tensor() for name, parameter in model.named_parameters()}
    save(out, step, arrays, losses)


def resume_accelerate(kind: str, out: Path, step: int, rank: int) -> None:
    model, optimizer, arrays = frameworks.load_accelerate(kind, out / f"step-{step}")
    losses = []
    for number in range(10, 10 + N_STEPS):
        losses.append(frameworks.plain_step(model, optimizer, frameworks.batch(number, rank)))
    save(out, step, arrays, losses)


def resume_loop(kind: str, out: Path, step: int, rank: int) -> None:
    """Go on with everything that a loop of one's own had saved with `save_partial`."""
    import torch
    from torch.distributed.checkpoint.state_dict import set_state_dict

    dcp: Any = import_module("torch.distributed.checkpoint")
    model, trained, optimizer = frameworks.loop_model(kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, frameworks.rate_of_step)
    folder = out / f"step-{step}"
    state = {**frameworks.dcp_state(model, optimizer), "step": 0, "scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    import_module("mergepipe.tailor.saving").restore_random_state(folder)
    arrays = loop_arrays(model, optimizer)
    arrays["global_steps"] = torch.tensor(state["step"])
    arrays["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    following = range(state["step"] + 1, state["step"] + 1 + N_STEPS)
    losses = [
        frameworks.noisy_step(trained, optimizer, scheduler, frameworks.batch(number, rank)) for number in following
    ]
    arrays |= {f"after/{key}": value for key, value in loop_arrays(model, optimizer).items()}
    save(out, step, arrays, losses)


def loop_arrays(model: Any, optimizer: Any) -> dict[str, Any]:
    arrays = {}
    for name, parameter in model.named_parameters():
        held = {"weight": parameter} | {
            key: optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")
        }
        for key, value in held.items():
            arrays[f"{key}/{name}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return arrays


def resume_hf(kind: str, out: Path, step: int) -> None:
    """Let the Trainer resume, plain or with DeepSpeed."""
    import torch

    transformers: Any = import_module("transformers")
    is_plain = kind in ("hf", "hf-fp16")
    arrays: dict[str, Any] = {}
    losses: list[Any] = []

    def on_train_begin(*_: Any, **kwargs: Any) -> None:
        groups = kwargs["optimizer"].param_groups
        arrays["lr"] = torch.tensor([group["lr"] for group in groups], dtype=torch.float32)
        arrays["scheduled"] = torch.tensor(kwargs["lr_scheduler"].last_epoch)
        if not is_plain:
            arrays["global_steps"] = torch.tensor(trainer.model_wrapped.global_steps)
            arrays["global_samples"] = torch.tensor(trainer.model_wrapped.global_samples)
        if "fp16" in kind:
            scaler = trainer.accelerator.scaler
            scale = scaler.get_scale() if is_plain else trainer.model_wrapped.optimizer.loss_scaler.cur_scale
            arrays["loss_scale"] = torch.tensor(scale)
        arrays.update(held())

    def held() -> dict[str, Any]:
        if not is_plain:
            stage = int(kind.removeprefix("hf-zero")[0])
            return {k: v.detach().clone() for k, v in frameworks._zero_states(trainer.model_wrapped, stage)}
        found = {}
        for name, parameter in trainer.model.named_parameters():
            found[f"weight/{name}"] = parameter.clone()
            for key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{key}/{name}"] = torch.as_tensor(trainer.optimizer.state[parameter][key]).clone()
        return found

    spy = type("Spy", (transformers.TrainerCallback,), {"on_train_begin": on_train_begin})
    folder = out / f"checkpoint-{step}"
    resumed_at = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
    options = {"max_steps": resumed_at + N_STEPS, "save_strategy": "no"}
    if is_plain:
        rows = [{"input_ids": t, "labels": t} for t in torch.cat([frameworks.batch(s, 0) for s in range(8)])]
        arguments = transformers.TrainingArguments(
            output_dir=str(out / "scratch"), per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
            use_cpu=True, weight_decay=0.1, learning_rate=1e-2, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(model=frameworks.tiny_model(kind), args=arguments, train_dataset=rows)
        frameworks.scale_loss(trainer, kind)
    else:
        trainer = frameworks.hf_zero_trainer(kind, out / "scratch", **options)
    compute_loss = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = noted
    trainer.add_callback(spy())
    trainer.train(resume_from_checkpoint=str(folder))
    assert len(losses) == N_STEPS
    arrays |= {f"after/{key}": value for key, value in held().items()}
    save(out, step, arrays, losses)


def run_rank(kind: str, out: Path, steps: list[int]) -> None:
    """One rank's part. Leaves without interpreter teardown."""
    import torch

    rank = int(os.environ["RANK"])
    for step in steps:
        if kind.startswith("accelerate"):
            resume_accelerate(kind, out, step, rank)
        elif kind.startswith("dcp"):
            resume_dcp(kind, out, step, rank)
        elif kind.startswith(("fsdp2", "plain")):
            resume_loop(kind, out, step, rank)
        elif kind.startswith("hf"):
            resume_hf(kind, out, step)
        else:
            resume_deepspeed(kind, out, step, rank)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    steps = [int(each) for each in sys.argv[3:]]
    if "RANK" in os.environ:
        run_rank(kind, out, steps)
    if kind in ("hf", "hf-fp16"):
        for step in steps:
            resume_hf(kind, out, step)
        return
    ranks = os.environ.get(WORLD_SIZE_VARIABLE, str(frameworks.WORLD_SIZE))
    environment = dict(
        os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_BUILD_OPS="0", ACCELERATE_TORCH_DEVICE="cpu"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    one_each = kind.startswith(
        ("accelerate", "dcp", "fsdp2", "hf", "plain")
    )  # process groups and the Trainer are set up once a process
    groups = [[step] for step in steps] if one_each else [steps]
    for group in groups:
        subprocess.run([*command, __file__, kind, str(out), *map(str, group)], env=environment, check=True)


if __name__ == "__main__":
    main()
