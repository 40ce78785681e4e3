"""Train a tiny model under a real framework, save several steps, dump what the framework itself loads from each.

Run with the interpreter of requirements/train.txt: `make_checkpoints.py KIND OUT`; KIND is one of `KINDS`. It starts
its own ranks. Every `OUT/truth-STEP.npz` maps `kind/parameter` to the full array the framework holds after loading.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KINDS = (
    "zero1", "zero2", "zero3", "zero3-whole", "zero1-bf16", "zero2-bf16", "zero3-bf16", "zero2-tied", "zero2-robin",
    "zero2-fp16", "zero3-fp16", "zero2-offload", "zero3-offload", "zero2-layers", "zero3-layers", "hf", "dcp",
    "dcp-tied", "dcp-flat", "hf-zero2", "hf-zero3", "accelerate-full", "accelerate-sharded", "verl",
)  # fmt: skip
SAVED_STEPS = (2, 4)
WORLD_SIZE = 2


def tiny_config(kind: str) -> Any:
    """A Llama with shapes that divide by nothing in particular."""
    transformers: Any = import_module("transformers")
    return transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=15,
        head_dim=4,
        intermediate_size=21,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=kind.endswith("-tied"),
        pad_token_id=0,
    )


def tiny_model(kind: str) -> Any:
    import torch

    torch.manual_seed(1)
    return import_module("transformers").LlamaForCausalLM(tiny_config(kind))


def batch(step: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, 37, (2, 9), generator=generator)


def parameter_groups(model: Any, kind: str = "") -> list[dict[str, Any]]:
    """Two groups, as the Trainer makes them; of `-layers` kinds, those of LLMTailor: 2 a layer, 1 each for the rest."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if "-layers" in kind:
        groups: dict[str, list[Any]] = {}
        for name, parameter in named:
            layer = re.search(r"layers\.\d+\.", name)
            groups.setdefault(f"{layer[0]}{'norm' in name}" if layer else name, []).append(parameter)
        return [
            {"params": p, "weight_decay": 0.0 if "norm" in n or n.endswith("True") else 0.1} for n, p in groups.items()
        ]
    plain = [p for n, p in named if "norm" in n or n.endswith("bias")]
    decayed = [p for n, p in named if not ("norm" in n or n.endswith("bias"))]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def write_truth(path: Path, arrays: dict[str, Any]) -> None:
    import numpy as np

    np.savez(path, **{k: v.detach().to("cpu").float().numpy() for k, v in arrays.items()})


# --- DeepSpeed ---------------------------------------------------------------------------------------------------


def deepspeed_config(kind: str) -> dict[str, Any]:
    stage = int(kind[4])
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2000, "round_robin_gradients": "robin" in kind}
    if stage == 3:
        zero |= {"sub_group_size": 10**9 if "whole" in kind else 1200, "stage3_param_persistence_threshold": 10}
    if "offload" in kind:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }
    if "bf16" in kind:
        config["bf16"] = {"enabled": True}
    if "MERGEPIPE_TEST_UNIVERSAL" in os.environ:
        config["checkpoint"] = {"load_universal": True}
    if "fp16" in kind:  # the scale doubles after every second step
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return config


def deepspeed_engine(kind: str) -> Any:
    import torch

    deepspeed: Any = import_module("deepspeed")
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True
    config = deepspeed_config(kind)
    model = tiny_model(kind)
    optimizer = torch.optim.AdamW(parameter_groups(model, kind), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0 / (1 + s))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def train_deepspeed(kind: str, out: Path, rank: int) -> None:
    engine = deepspeed_engine(kind)
    for step in range(1, max(SAVED_STEPS) + 1):
        tokens = batch(step, rank)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if step in SAVED_STEPS:
            engine.save_checkpoint(str(out), tag=f"global_step{step}", client_state={"note": "tiny"})


def dump_deepspeed(kind: str, out: Path, step: int, rank: int) -> None:
    """Load one step into a fresh engine and write what every parameter became."""
    engine = deepspeed_engine(kind)
    engine.load_checkpoint(str(out), tag=f"global_step{step}")
    arrays = dict(_zero_states(engine, int(kind[4])))
    if rank == 0:
        write_truth(out / f"truth-{step}.npz", arrays)


def _zero_states(engine: Any, stage: int) -> Iterator[tuple[str, Any]]:
    utils: Any = import_module("deepspeed.utils")
    if engine.zero_round_robin_gradients() and stage != 3:
        yield from _round_robin_states(engine)
        return
    for name, parameter in engine.module.named_parameters():
        yield f"fp32/{name}", utils.safe_get_full_fp32_param(parameter).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            if stage == 3:
                yield f"{state}/{name}", utils.safe_get_full_optimizer_state(parameter, state).clone()
            else:
                yield f"{state}/{name}", _gathered_fragment(engine, parameter, state)
        if stage != 3:
            yield f"weight/{name}", parameter.clone()


def _round_robin_states(engine: Any) -> Iterator[tuple[str, Any]]:
    """DeepSpeed's own accessors mix parameters up here: cut its flat partitions in the order it flattened them."""
    import torch

    zero = engine.optimizer
    names = {id(p): n for n, p in engine.module.named_parameters()}
    for flat, ordered in zip(zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, strict=True):
        tensors = {"fp32": flat, **{k: zero.optimizer.state[flat][k] for k in ("exp_avg", "exp_avg_sq")}}
        for kind, partition in tensors.items():
            parts = [torch.empty_like(partition) for _ in range(WORLD_SIZE)]
            torch.distributed.all_gather(parts, partition.detach())
            whole, start = torch.cat(parts), 0
            for parameter in ordered:
                yield f"{kind}/{names[id(parameter)]}", whole[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
    for name, parameter in engine.module.named_parameters():
        yield f"weight/{name}", parameter.clone()


def _gathered_fragment(engine: Any, parameter: Any, state: str) -> Any:
    """Sum over ranks of this rank's fragment of an optimizer state, at its place in the parameter."""
    import torch

    full = torch.zeros(parameter.numel())
    mapping = parameter._hp_mapping
    if mapping is not None:
        place = mapping.lp_fragment_address
        group = engine.optimizer.optimizer
        flat = next(f for f in group.state if f.data_ptr() == _owner_pointer(engine, mapping.hp_fragment))
        inside = (mapping.hp_fragment.data_ptr() - flat.data_ptr()) // flat.element_size()
        full[place.start : place.start + place.numel] = group.state[flat][state][inside : inside + place.numel]
    torch.distributed.all_reduce(full)
    return full.view(parameter.shape)


def _owner_pointer(engine: Any, fragment: Any) -> int:
    for flat in engine.optimizer.single_partition_of_fp32_groups:
        start = flat.data_ptr()
        if start <= fragment.data_ptr() < start + flat.numel() * flat.element_size():
            return int(start)
    raise LookupError("a fragment outside every flat group")


# --- Hugging Face Trainer ----------------------------------------------------------------------------------------


def scale_loss(trainer: Any, kind: str) -> None:
    """Let the Trainer scale the loss of `hf-fp16` as on a GPU; on a CPU the values stay in fp32."""
    torch: Any = import_module("torch")
    if kind == "hf-fp16":
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def train_hf(kind: str, out: Path) -> None:
    import torch

    transformers: Any = import_module("transformers")
    rows = [{"input_ids": t, "labels": t} for t in torch.cat([batch(s, 0) for s in range(8)])]
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=max(SAVED_STEPS),
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    transformers.Trainer(model=tiny_model(kind), args=arguments, train_dataset=rows).train()


def dump_hf(kind: str, out: Path, step: int) -> None:
    """Let the Trainer resume from one step and write what its optimizer and model hold before any further step."""
    import torch

    transformers: Any = import_module("transformers")
    arrays: dict[str, Any] = {}

    def on_train_begin(*_: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        for name, parameter in kwargs["model"].named_parameters():
            arrays[f"weight/{name}"] = parameter.clone()
            for key in ("exp_avg", "exp_avg_sq", "step"):
                arrays[f"{key}/{name}"] = torch.as_tensor(optimizer.state[parameter][key]).clone()

    spy = type("Spy", (transformers.TrainerCallback,), {"on_train_begin": on_train_begin})

    rows = [{"input_ids": t, "labels": t} for t in torch.cat([batch(s, 0) for s in range(8)])]
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "scratch"), max_steps=step + 1, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no", weight_decay=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=tiny_model(kind), args=arguments, train_dataset=rows, callbacks=[spy()])
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{step}"))
    write_truth(out / f"truth-{step}.npz", arrays)


# --- Hugging Face Trainer with DeepSpeed inside ------------------------------------------------------------------


def hf_zero_trainer(kind: str, out: Path, **options: Any) -> Any:
    """A Trainer that really runs DeepSpeed on CPU and gloo; accelerate would else fall back without a word."""
    import torch

    transformers: Any = import_module("transformers")
    state: Any = import_module("accelerate.state")
    state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_CPU)
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    rows = [{"input_ids": t, "labels": t} for t in torch.cat([batch(s, 0) for s in range(16)])]
    config = deepspeed_config(kind.removeprefix("hf-")) | {"train_micro_batch_size_per_gpu": "auto"}
    half = {"fp16": config.pop("fp16")} if "fp16" in config else {}  # which the Trainer refuses on a CPU
    arguments = transformers.TrainingArguments(
        output_dir=str(out), save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, weight_decay=0.1,
        report_to=[], disable_tqdm=True, deepspeed=config, max_grad_norm=1.0, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=tiny_model(kind), args=arguments, train_dataset=rows)
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config.update(half)
    import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True
    return trainer


def train_hf_zero(kind: str, out: Path) -> None:
    trainer = hf_zero_trainer(kind, out, max_steps=max(SAVED_STEPS))
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"


def dump_hf_zero(kind: str, out: Path, step: int, rank: int) -> None:
    """Let the Trainer resume, and write what the engine holds before any further step."""
    transformers: Any = import_module("transformers")
    trainer = hf_zero_trainer(kind, out / "scratch", max_steps=step + 1, save_strategy="no")
    arrays: dict[str, Any] = {}

    def on_train_begin(*_: Any, **__: Any) -> None:
        arrays.update(_zero_states(trainer.model_wrapped, int(kind.removeprefix("hf-zero")[0])))

    trainer.add_callback(type("Spy", (transformers.TrainerCallback,), {"on_train_begin": on_train_begin})())
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{step}"))
    if rank == 0:
        write_truth(out / f"truth-{step}.npz", arrays)


# --- FSDP2 with torch.distributed.checkpoint ---------------------------------------------------------------------


def fsdp_model(kind: str) -> tuple[Any, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = tiny_model(kind)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(parameter_groups(model), lr=1e-2)


def rate_of_step(step: int) -> float:
    """Another learning rate every step."""
    return 1.0 / (1 + step)


def noisy_step(model: Any, optimizer: Any, scheduler: Any, tokens: Any) -> Any:
    """One step that depends on the learning rate and on this rank's random state; returns the loss."""
    import torch

    loss = model(input_ids=tokens, labels=tokens).loss * (1 + torch.rand(()))
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss


def loop_model(kind: str) -> tuple[Any, Any, Any]:
    """A model for a loop of one's own: itself, what is trained (wrapped in DDP unless it is FSDP2's), its optimizer."""
    import torch

    if kind.startswith("fsdp2"):
        model, optimizer = fsdp_model(kind)
        return model, model, optimizer
    torch.distributed.init_process_group("gloo")
    inner = tiny_model(kind)
    wrapped = torch.nn.parallel.DistributedDataParallel(inner)
    return inner, wrapped, torch.optim.AdamW(parameter_groups(inner), lr=1e-2)


def dcp_state(model: Any, optimizer: Any, kind: str = "") -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer, options=dcp_options(kind))
    return {"model": weights, "optim": states}


def dcp_options(kind: str) -> Any:
    """The options of `dcp-flat` keep those of the optimizer by parameter, as torchtitan does."""
    state_dict: Any = import_module("torch.distributed.checkpoint.state_dict")
    return state_dict.StateDictOptions(flatten_optimizer_state_dict=kind.endswith("-flat"))


def load_dcp(kind: str, folder: Path) -> tuple[Any, Any]:
    """The model and its optimizer as loaded."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    state_dict: Any = import_module("torch.distributed.checkpoint.state_dict")
    model, optimizer = fsdp_model(kind)
    state = dcp_state(model, optimizer, kind)
    dcp.load(state, checkpoint_id=str(folder))
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
    state_dict.set_state_dict(model, optimizer, **loaded, options=dcp_options(kind))
    return model, optimizer


def train_dcp(kind: str, out: Path, rank: int) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")
    model, optimizer = fsdp_model(kind)
    for step in range(1, max(SAVED_STEPS) + 1):
        tokens = batch(step, rank)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SAVED_STEPS:
            dcp.save(dcp_state(model, optimizer, kind), checkpoint_id=str(out / f"step-{step}"))


def dump_dcp(kind: str, out: Path, step: int, rank: int) -> None:
    model, optimizer = load_dcp(kind, out / f"step-{step}")
    arrays = {}
    for name, parameter in model.named_parameters():
        arrays[f"weight/{name}"] = parameter.full_tensor()
        for key in ("exp_avg", "exp_avg_sq"):
            arrays[f"{key}/{name}"] = optimizer.state[parameter][key].full_tensor()
        arrays[f"step/{name}"] = optimizer.state[parameter]["step"]
    if rank == 0:
        write_truth(out / f"truth-{step}.npz", arrays)


# --- FSDP2 as verl saves it: a file of every rank for the model, one for an optimizer with one group -----------------


def verl_path(out: Path, step: int, kind: str, rank: int) -> Path:
    return out / f"step-{step}" / f"{kind}_world_size_{WORLD_SIZE}_rank_{rank}.pt"


def train_verl(kind: str, out: Path, rank: int) -> None:
    import torch

    model, _ = fsdp_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, max(SAVED_STEPS) + 1):
        plain_step(model, optimizer, batch(step, rank))
        if step in SAVED_STEPS:
            (out / f"step-{step}").mkdir(exist_ok=True)
            torch.save(model.state_dict(), verl_path(out, step, "model", rank))
            torch.save(optimizer.state_dict(), verl_path(out, step, "optim", rank))


def dump_verl(kind: str, out: Path, step: int, rank: int) -> None:
    import torch

    model, _ = fsdp_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(torch.load(verl_path(out, step, "model", rank), weights_only=False))
    optimizer.load_state_dict(torch.load(verl_path(out, step, "optim", rank), weights_only=False))
    arrays = {}
    for name, parameter in model.named_parameters():
        arrays[f"weight/{name}"] = parameter.full_tensor()
        arrays |= {f"{key}/{name}": whole(value) for key, value in optimizer.state[parameter].items()}
    if rank == 0:
        write_truth(out / f"truth-{step}.npz", arrays)


# --- FSDP as Accelerate saves it ---------------------------------------------------------------------------------


def accelerate_model(kind: str) -> tuple[Any, Any, Any, Any]:
    """The model, its optimizer, and the plugin and accelerator that Accelerate's functions ask.

    Shards are FSDP1's. Full state dicts are FSDP2's: what FSDP1 gathers of an optimizer on a CPU overwrites itself.
    """
    import torch
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    fsdp: Any = import_module("torch.distributed.fsdp")
    is_full = kind.endswith("full")
    if is_full:
        model, optimizer = fsdp_model(kind)
    else:
        torch.distributed.init_process_group("gloo")
        inner = tiny_model(kind)
        policy = ModuleWrapPolicy({type(inner.model.layers[0])})
        model = fsdp.FullyShardedDataParallel(
            inner, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2)
    import_module("accelerate").PartialState(cpu=True)
    name = "Full" if is_full else "Sharded"
    plugin = SimpleNamespace(
        state_dict_type=getattr(fsdp.StateDictType, f"{name.upper()}_STATE_DICT"),
        state_dict_config=getattr(fsdp, f"{name}StateDictConfig")(),
        optim_state_dict_config=getattr(fsdp, f"{name}OptimStateDictConfig")(),
        fsdp_version=2 if is_full else 1,
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        num_processes=WORLD_SIZE, process_index=torch.distributed.get_rank(), is_main_process=True, is_fsdp2=is_full,
        wait_for_everyone=torch.distributed.barrier,
    )  # fmt: skip
    return model, optimizer, plugin, accelerator


def plain_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_accelerate(kind: str, out: Path, rank: int) -> None:
    utils: Any = import_module("accelerate.utils.fsdp_utils")
    model, optimizer, plugin, accelerator = accelerate_model(kind)
    for step in range(1, max(SAVED_STEPS) + 1):
        plain_step(model, optimizer, batch(step, rank))
        if step in SAVED_STEPS:
            utils.save_fsdp_model(plugin, accelerator, model, str(out / f"step-{step}"))
            utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out / f"step-{step}"))


def load_accelerate(kind: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The model and its optimizer as loaded, and all they hold."""
    utils: Any = import_module("accelerate.utils.fsdp_utils")
    model, optimizer, plugin, accelerator = accelerate_model(kind)
    plain_step(model, optimizer, batch(0, 0))  # of an optimizer without state, Accelerate 1.15 restores no shards
    utils.load_fsdp_model(plugin, accelerator, model, str(folder))
    utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    weights = utils._get_model_state_dict(model, sd_options=utils._prepare_sd_options(plugin))
    arrays = {f"weight/{name}": whole(value) for name, value in weights.items()}
    if plugin.fsdp_version == 2:
        states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    else:
        shards = (plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config)
        with type(model).state_dict_type(model, *shards):
            states = type(model).optim_state_dict(model, optimizer)["state"]
    arrays |= {f"{key}/{name}": whole(value) for name, state in states.items() for key, value in state.items()}
    return model, optimizer, arrays


def whole(value: Any) -> Any:
    """A tensor gathered from all ranks, whichever class cuts it."""
    import torch

    if hasattr(value, "full_tensor"):
        return value.full_tensor().clone()
    if not hasattr(value, "local_shards"):
        return value.clone()
    gathered = torch.empty(value.size()) if torch.distributed.get_rank() == 0 else None
    value.gather(0, gathered)
    return gathered if gathered is not None else torch.empty(0)


def dump_accelerate(kind: str, out: Path, step: int, rank: int) -> None:
    _, _, arrays = load_accelerate(kind, out / f"step-{step}")
    if rank == 0:
        write_truth(out / f"truth-{step}.npz", arrays)


# --- ranks -------------------------------------------------------------------------------------------------------


def run_rank(kind: str, out: Path, step: int) -> None:
    """One rank's part: train when `step` is 0, else dump that step. Leaves without interpreter teardown."""
    import torch

    rank = int(os.environ["RANK"])
    if kind.startswith("accelerate"):
        train_accelerate(kind, out, rank) if step == 0 else dump_accelerate(kind, out, step, rank)
    elif kind == "verl":
        train_verl(kind, out, rank) if step == 0 else dump_verl(kind, out, step, rank)
    elif kind.startswith("dcp"):
        train_dcp(kind, out, rank) if step == 0 else dump_dcp(kind, out, step, rank)
    elif kind.startswith("hf-"):
        train_hf_zero(kind, out) if step == 0 else dump_hf_zero(kind, out, step, rank)
    else:
        train_deepspeed(kind, out, rank) if step == 0 else dump_deepspeed(kind, out, step, rank)
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def launch(kind: str, out: Path, step: int) -> None:
    environment = dict(
        os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_BUILD_OPS="0", ACCELERATE_TORCH_DEVICE="cpu"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
    subprocess.run([*command, __file__, kind, str(out), f"--rank-step={step}"], env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank-step", type=int)
    arguments = parser.parse_args()
    kind, out = arguments.kind, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.rank_step is not None:
        run_rank(kind, out, arguments.rank_step)
    elif kind == "hf":
        train_hf(kind, out)
        for step in SAVED_STEPS:
            dump_hf(kind, out, step)
    else:
        for step in (0, *SAVED_STEPS):
            launch(kind, out, step)


if __name__ == "__main__":
    main()
