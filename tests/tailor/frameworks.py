"""Train tiny models under real frameworks, in full or with partial saves, and resume their checkpoints. Run by tests.

Run with the interpreter of requirements/train.txt and PYTHONPATH=src; it starts its own ranks.

    frameworks.py train KIND OUT            the framework saves at steps 2 and 4
    frameworks.py resume KIND OUT STEP...   `resumed-STEP.npz`: what it loads from a checkpoint (`kind/parameter`), the
                                            losses of two more steps (`loss/RANK`), the states after them (`after/...`)
    frameworks.py partial KIND OUT [--strategy S] [--background] [--crash-at STEP [--crash-in PLACE]]
                                            saves `OUT/run` in full at step 2, in part at 4 and 6, and what the
                                            framework held (`truth-STEP.npz`); with --crash-at a rank dies in that save
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SAVED_STEPS = (2, 4)
AFTER = (5, 6)
LAST_PARTIAL = 6
WORLD_SIZE = int(os.environ.get("MERGEPIPE_TEST_RANKS", "2"))
N_LAYERS = int(os.environ.get("MERGEPIPE_TEST_LAYERS", "3"))
ONE_RANK = ("hf", "hf-fp16")
RATE = 1e-2


def folder_name(kind: str, step: int) -> str:
    """Name the folder of a checkpoint as its framework does."""
    if kind.startswith("zero"):
        return f"global_step{step}"
    return f"checkpoint-{step}" if kind.startswith("hf") else f"step-{step}"


def stage_of(kind: str) -> int:
    """Return the stage of ZeRO; 0 without it."""
    found = re.search(r"zero(\d)", kind)
    return int(found[1]) if found else 0


def tiny_model(kind: str) -> Any:
    """A Llama with shapes that divide by nothing in particular."""
    import torch

    torch.manual_seed(1)
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=15, head_dim=4, intermediate_size=21, num_hidden_layers=N_LAYERS,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=kind.endswith("-tied"), pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch(step: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, 37, (2, 9), generator=generator)


def parameter_groups(model: Any, kind: str) -> list[dict[str, Any]]:
    """Two groups, as the Trainer makes them; of `-layers` kinds those of LLMTailor: 2 a layer, 1 each for the rest.

    That of verl is one.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if kind == "verl":
        return [{"params": [p for _, p in named]}]
    groups: dict[str, list[Any]] = {}
    for name, parameter in named:
        is_plain = "norm" in name or name.endswith("bias")
        layer = re.search(r"layers\.\d+\.", name)
        key = f"{layer[0]}{is_plain}" if layer else name
        groups.setdefault(key if "-layers" in kind else str(is_plain), []).append((name, parameter))
    return [
        {"params": [p for _, p in members], "weight_decay": 0.0 if "norm" in members[0][0] else 0.1}
        for members in groups.values()
    ]


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays from rank 0."""
    import numpy as np

    if int(os.environ.get("RANK", "0")) == 0:
        np.savez(path, **{k: v.detach().to("cpu").float().numpy() for k, v in arrays.items()})


def whole(value: Any) -> Any:
    """Copy a tensor or a number, gathered from all ranks, whichever class cuts it."""
    import torch

    if hasattr(value, "full_tensor"):
        return value.full_tensor().clone()
    if not hasattr(value, "local_shards"):
        return torch.as_tensor(value).detach().clone()
    gathered = torch.empty(value.size()) if torch.distributed.get_rank() == 0 else None
    value.gather(0, gathered)
    return gathered if gathered is not None else torch.empty(0)


def held(model: Any, optimizer: Any) -> dict[str, Any]:
    """Copy every parameter, and the states that its optimizer keeps."""
    return {
        f"{key}/{name}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items()
    }


# --- DeepSpeed ---


def deepspeed_config(kind: str) -> dict[str, Any]:
    stage = stage_of(kind)
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


def run_deepspeed_on_a_cpu() -> None:
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True


class Engine:
    """An engine of DeepSpeed."""

    def __init__(self, kind: str) -> None:
        import torch

        deepspeed: Any = import_module("deepspeed")
        run_deepspeed_on_a_cpu()
        self.stage = stage_of(kind)
        model = tiny_model(kind)
        optimizer = torch.optim.AdamW(parameter_groups(model, kind), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of_step)
        config = deepspeed_config(kind)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

    def step(self, tokens: Any) -> Any:
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def states(self) -> dict[str, Any]:
        return zero_states(self.engine, self.stage)

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state={"note": "tiny"})

    def load(self, folder: Path) -> dict[str, Any]:
        import torch

        loaded, _ = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        assert loaded is not None
        return {"global_steps": torch.tensor(self.engine.global_steps)}


def zero_states(engine: Any, stage: int) -> dict[str, Any]:
    """Copy what DeepSpeed's own accessors give."""
    return {key: value.detach().clone() for key, value in _zero_states(engine, stage)}


def _zero_states(engine: Any, stage: int) -> Iterator[tuple[str, Any]]:
    utils: Any = import_module("deepspeed.utils")
    if engine.zero_round_robin_gradients() and stage != 3:
        yield from _round_robin_states(engine)
        return
    for name, parameter in engine.module.named_parameters():
        yield f"fp32/{name}", utils.safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            if stage == 3:
                yield f"{state}/{name}", utils.safe_get_full_optimizer_state(parameter, state)
            else:
                yield f"{state}/{name}", _gathered_fragment(engine, parameter, state)
        if stage != 3:
            yield f"weight/{name}", parameter


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
            gathered, start = torch.cat(parts), 0
            for parameter in ordered:
                stop = start + parameter.numel()
                yield f"{kind}/{names[id(parameter)]}", gathered[start:stop].view(parameter.shape)
                start = stop
    for name, parameter in engine.module.named_parameters():
        yield f"weight/{name}", parameter


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


# --- Hugging Face Trainer, plain or with DeepSpeed inside ---


def make_trainer(kind: str, out: Path, **options: Any) -> Any:
    """A Trainer; with DeepSpeed it really runs that on a CPU, where accelerate would fall back without a word."""
    import torch

    transformers: Any = import_module("transformers")
    n_batches = 8 if kind in ONE_RANK else 16
    rows = [{"input_ids": t, "labels": t} for t in torch.cat([batch(s, 0) for s in range(n_batches)])]
    half = {}
    if stage_of(kind):
        state: Any = import_module("accelerate.state")
        state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_CPU)
        run_deepspeed_on_a_cpu()
        config = deepspeed_config(kind) | {"train_micro_batch_size_per_gpu": "auto"}
        half = {"fp16": config.pop("fp16")} if "fp16" in config else {}  # which the Trainer refuses on a CPU
        options |= {"deepspeed": config}
    else:
        options |= {"use_cpu": True}
    if "bf16" in kind:
        import_module("transformers.training_args").__dict__["is_torch_bf16_gpu_available"] = lambda: True
        options |= {"bf16": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(out), save_steps=2, per_device_train_batch_size=2, learning_rate=RATE, weight_decay=0.1,
        report_to=[], disable_tqdm=True, max_grad_norm=1.0, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=tiny_model(kind), args=arguments, train_dataset=rows)
    if stage_of(kind):
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config.update(half)
        run_deepspeed_on_a_cpu()
    if kind == "hf-fp16":  # the loss is scaled as on a GPU; on a CPU the values stay in fp32
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return trainer


def add_callback(trainer: Any, **methods: Callable[..., None]) -> None:
    """Add a callback of some methods."""
    base = import_module("transformers").TrainerCallback
    wrapped = {name: lambda *given, m=method, **_: m(given[2]) for name, method in methods.items()}  # of `state`
    trainer.add_callback(type("Spy", (base,), wrapped)())


def trainer_states(trainer: Any, kind: str) -> dict[str, Any]:
    if not stage_of(kind):
        return held(trainer.model, trainer.optimizer)
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    return zero_states(trainer.model_wrapped, stage_of(kind))


def resume_trainer(kind: str, out: Path, step: int) -> None:
    import torch

    transformers: Any = import_module("transformers")
    folder = out / folder_name(kind, step)
    resumed_at = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
    trainer = make_trainer(kind, out / "scratch", max_steps=resumed_at + len(AFTER), save_strategy="no")
    arrays: dict[str, Any] = {}
    losses: list[Any] = []

    def look(_: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        arrays["lr"] = torch.tensor(rates, dtype=torch.float32)
        arrays["scheduled"] = torch.tensor(trainer.lr_scheduler.last_epoch)
        scaler = trainer.accelerator.scaler
        if stage_of(kind):
            arrays["global_steps"] = torch.tensor(trainer.model_wrapped.global_steps)
            arrays["global_samples"] = torch.tensor(trainer.model_wrapped.global_samples)
        if "fp16" in kind:
            is_engine = bool(stage_of(kind))
            scale = trainer.model_wrapped.optimizer.loss_scaler.cur_scale if is_engine else scaler.get_scale()
            arrays["loss_scale"] = torch.tensor(scale)
        arrays.update(trainer_states(trainer, kind))

    compute_loss = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Any:
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    trainer.compute_loss = noted
    add_callback(trainer, on_train_begin=look)
    trainer.train(resume_from_checkpoint=str(folder))
    save_resumed(out, step, arrays, losses, trainer_states(trainer, kind))


def train_trainer_partially(kind: str, out: Path, chosen: str, *, background: bool) -> None:
    saving: Any = import_module("mergepipe.tailor.saving")
    trainer = make_trainer(kind, out / "run", max_steps=LAST_PARTIAL, save_strategy="no", logging_steps=1)

    def look(state: Any) -> None:
        if state.global_step % 2 == 0:
            save_arrays(out / f"truth-{state.global_step}.npz", trainer_states(trainer, kind))

    add_callback(trainer, on_step_end=look)
    trainer.add_callback(saving.PartialCheckpointCallback(2, strategy(chosen), background=background))
    trainer.train()


# --- loops of one's own: FSDP2, DDP, and FSDP1, saved by torch DCP, as verl does, by Accelerate, or in part ---


def rate_of_step(step: int) -> float:
    """Another learning rate every step."""
    return 1.0 / (1 + step)


class Loop:
    """A model, what is trained of it (wrapped in DDP or FSDP1), its optimizer and its schedule."""

    def __init__(self, kind: str) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        torch.distributed.init_process_group("gloo")
        self.kind = kind
        self.rank = torch.distributed.get_rank()
        self.model = self.trained = tiny_model(kind)
        layers = self.model.model.layers
        if kind == "plain":
            self.trained = torch.nn.parallel.DistributedDataParallel(self.model)
        elif kind == "accelerate-sharded":  # full ones are FSDP2's: what FSDP1 gathers on a CPU overwrites itself
            fsdp: Any = import_module("torch.distributed.fsdp")
            self.model = self.trained = fsdp.FullyShardedDataParallel(
                self.model, auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}), device_id=torch.device("cpu"),
                use_orig_params=True,
            )  # fmt: skip
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, kind), lr=RATE)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate_of_step)

    def step(self, tokens: Any) -> Any:
        """Make a step that depends on the learning rate and on this rank's random state; return the loss."""
        import torch

        loss = self.trained(input_ids=tokens, labels=tokens).loss * (1 + torch.rand(()))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss

    def states(self) -> dict[str, Any]:
        if self.kind != "accelerate-sharded":
            return held(self.model, self.optimizer)
        utils: Any = import_module("accelerate.utils.fsdp_utils")
        plugin, _ = self._accelerate()
        weights = utils._get_model_state_dict(self.model, sd_options=utils._prepare_sd_options(plugin))
        shards = (plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config)
        with type(self.model).state_dict_type(self.model, *shards):
            states = type(self.model).optim_state_dict(self.model, self.optimizer)["state"]
        arrays = {f"weight/{name}": whole(value) for name, value in weights.items()}
        return arrays | {f"{key}/{name}": whole(v) for name, state in states.items() for key, v in state.items()}

    def save(self, folder: Path) -> None:
        import torch

        if self.kind == "verl":
            folder.mkdir(exist_ok=True)
            torch.save(self.model.state_dict(), self._verl(folder, "model"))
            torch.save(self.optimizer.state_dict(), self._verl(folder, "optim"))
        elif self.kind.startswith("accelerate"):
            utils: Any = import_module("accelerate.utils.fsdp_utils")
            utils.save_fsdp_model(*self._accelerate(), self.model, str(folder))
            utils.save_fsdp_optimizer(*self._accelerate(), self.optimizer, self.model, str(folder))
        else:
            import_module("torch.distributed.checkpoint").save(self._dcp_state(), checkpoint_id=str(folder))

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint; return what else a loop of one's own has saved."""
        import torch

        if self.kind == "verl":
            self.model.load_state_dict(torch.load(self._verl(folder, "model"), weights_only=False))
            self.optimizer.load_state_dict(torch.load(self._verl(folder, "optim"), weights_only=False))
            return {}
        if self.kind.startswith("accelerate"):
            utils: Any = import_module("accelerate.utils.fsdp_utils")
            self.step(batch(0, 0))  # of an optimizer without state, Accelerate 1.15 restores no shards
            utils.load_fsdp_model(*self._accelerate(), self.model, str(folder))
            utils.load_fsdp_optimizer(*self._accelerate(), self.optimizer, self.model, str(folder))
            return {}
        is_own = not self.kind.startswith("dcp")
        state = self._dcp_state() | ({"step": 0, "scheduler": self.scheduler.state_dict()} if is_own else {})
        import_module("torch.distributed.checkpoint").load(state, checkpoint_id=str(folder))
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict = import_module("torch.distributed.checkpoint.state_dict").set_state_dict
        set_state_dict(self.model, self.optimizer, **loaded, options=self._dcp_options())
        if not is_own:
            return {}
        self.scheduler.load_state_dict(state["scheduler"])
        import_module("mergepipe.tailor.saving").restore_random_state(folder)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"global_steps": torch.tensor(state["step"]), "lr": torch.tensor(rates)}

    def _dcp_state(self) -> dict[str, Any]:
        get_state_dict = import_module("torch.distributed.checkpoint.state_dict").get_state_dict
        weights, states = get_state_dict(self.model, self.optimizer, options=self._dcp_options())
        return {"model": weights, "optim": states}

    def _dcp_options(self) -> Any:
        """The options of `dcp-flat` keep those of the optimizer by parameter, as torchtitan does."""
        state_dict: Any = import_module("torch.distributed.checkpoint.state_dict")
        return state_dict.StateDictOptions(flatten_optimizer_state_dict=self.kind.endswith("-flat"))

    def _verl(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}_world_size_{WORLD_SIZE}_rank_{self.rank}.pt"

    def _accelerate(self) -> tuple[Any, Any]:
        """The plugin and the accelerator that Accelerate's functions ask."""
        import torch

        fsdp: Any = import_module("torch.distributed.fsdp")
        import_module("accelerate").PartialState(cpu=True)
        is_full = self.kind.endswith("full")
        name = "Full" if is_full else "Sharded"
        plugin = SimpleNamespace(
            state_dict_type=getattr(fsdp.StateDictType, f"{name.upper()}_STATE_DICT"),
            state_dict_config=getattr(fsdp, f"{name}StateDictConfig")(),
            optim_state_dict_config=getattr(fsdp, f"{name}OptimStateDictConfig")(),
            fsdp_version=2 if is_full else 1,
            cpu_ram_efficient_loading=False,
        )
        accelerator = SimpleNamespace(
            num_processes=WORLD_SIZE, process_index=self.rank, is_main_process=True, is_fsdp2=is_full,
            wait_for_everyone=torch.distributed.barrier,
        )  # fmt: skip
        return plugin, accelerator


def train_loop_partially(kind: str, out: Path, chosen: str, *, background: bool) -> None:
    import torch

    saving: Any = import_module("mergepipe.tailor.saving")
    loop = Loop(kind)
    tracker, writer = saving.ChangeTracker(), saving.BackgroundWriter() if background else None
    torch.manual_seed(loop.rank)
    for step in range(1, LAST_PARTIAL + 1):
        loop.step(batch(step, loop.rank))
        if step % 2 == 0:
            save_arrays(out / f"truth-{step}.npz", loop.states())
            saving.save_partial(
                out / "run", loop.trained, loop.optimizer, step=step, strategy=strategy(chosen), tracker=tracker,
                state={"step": step, "scheduler": loop.scheduler.state_dict()}, writer=writer,
            )  # fmt: skip
    if writer is not None:
        writer.wait()


# --- what is asked for ---


def train(kind: str, out: Path) -> None:
    if kind.startswith("hf"):
        make_trainer(kind, out, max_steps=max(SAVED_STEPS)).train()
        return
    training = Engine(kind) if kind.startswith("zero") else Loop(kind)
    for step in range(1, max(SAVED_STEPS) + 1):
        training.step(batch(step, int(os.environ["RANK"])))
        if step in SAVED_STEPS:
            training.save(out / folder_name(kind, step))


def resume(kind: str, out: Path, steps: list[int]) -> None:
    if kind.startswith("hf"):
        for step in steps:
            resume_trainer(kind, out, step)
        return
    training = Engine(kind) if kind.startswith("zero") else Loop(kind)
    for step in steps:
        arrays = training.load(out / folder_name(kind, step)) | training.states()
        losses = [training.step(batch(number, int(os.environ["RANK"]))) for number in AFTER]
        save_resumed(out, step, arrays, losses, training.states())


def save_resumed(out: Path, step: int, arrays: dict[str, Any], losses: list[Any], after: dict[str, Any]) -> None:
    """Write all from rank 0, with the losses of all ranks."""
    import torch

    assert len(losses) == len(AFTER)
    own = torch.stack([loss.detach().float() for loss in losses])
    gathered = [own]
    if torch.distributed.is_initialized():
        gathered = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, own)
    arrays |= {f"loss/{rank}": loss for rank, loss in enumerate(gathered)}
    save_arrays(out / f"resumed-{step}.npz", arrays | {f"after/{key}": value for key, value in after.items()})


def strategy(name: str) -> Any:
    saving: Any = import_module("mergepipe.tailor.saving")
    return {
        "parity": saving.Schedule("parity"),
        "filter": saving.Schedule("filter", edge_layers=1, every=2),
        "latest-changed": saving.LatestChanged(budget_bytes=60_000),
        "everything": saving.Schedule("filter", edge_layers=3, every=1),
    }[name]


def crash_at(step: int, place: str) -> None:
    """Make rank 1 die without a word half way through its shard of `step`, or rank 0 when all is written."""
    saving: Any = import_module("mergepipe.tailor.saving.partial_run")
    append, publish = saving.ShardWriter.append, saving.Staging.publish

    def dying_append(self: Any, content: Any) -> None:
        append(self, content)
        is_second = os.environ.get("RANK") == "1"
        if place == "shard" and is_second and f"partial-{step}." in str(self._directory) and self.digests:
            os._exit(9)

    def dying_publish(self: Any) -> None:
        if place == "publish" and f"partial-{step}." in str(self.path):
            os._exit(9)
        publish(self)

    saving.ShardWriter.append, saving.Staging.publish = dying_append, dying_publish


def run_rank(arguments: argparse.Namespace) -> None:
    """Do one rank's part, and leave without the teardown of the interpreter: gloo sometimes aborts in it."""
    import torch

    kind, out = arguments.kind, arguments.out
    if arguments.crash_at:
        crash_at(arguments.crash_at, arguments.crash_in)
    if arguments.action == "train":
        train(kind, out)
    elif arguments.action == "resume":
        resume(kind, out, arguments.steps)
    else:
        run = train_trainer_partially if kind.startswith("hf") else train_loop_partially
        run(kind, out, arguments.strategy, background=arguments.background)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("train", "resume", "partial"))
    parser.add_argument("kind")
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int, nargs="*")
    parser.add_argument("--strategy", default="parity")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--crash-at", type=int, default=0)
    parser.add_argument("--crash-in", choices=("shard", "publish"), default="shard")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ or arguments.kind in ONE_RANK:
        run_rank(arguments)
    environment = dict(
        os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", DS_BUILD_OPS="0", ACCELERATE_TORCH_DEVICE="cpu"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
    is_set_up_once = not arguments.kind.startswith("zero")  # process groups and the Trainer, in a process
    steps = [str(step) for step in arguments.steps]
    given = [argument for argument in sys.argv[1:] if argument not in steps]
    for group in [[step] for step in steps] if is_set_up_once and steps else [steps]:
        finished = subprocess.run([*launcher, __file__, *given, *group], env=environment, check=False)
        if finished.returncode:
            sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
