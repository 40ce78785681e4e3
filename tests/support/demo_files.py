"""The files that `make demo` writes and that the commands of README and guide read.

They are a base, three fine-tunes and an adapter in `models`, a recipe `experts.yml`, and training checkpoints in `run`.
They have the same bytes each time and are written without torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from support.families import DEMO, FamilyShape, write_family, write_sidecars
from support.family_shapes import Architecture
from support.safetensors_bytes import file_bytes, record
from support.training_trees import STATES, KnownStates, decay_groups, write_trainer_files, write_zero12

EXPERTS = ("math", "code", "chat")
RECIPE = """\
merge_method: ties
base_model: models/base
models:
  - {model: models/math, parameters: {weight: 0.6, density: 0.2}}
  - {model: models/code, parameters: {weight: 0.4, density: 0.2}}
dtype: bfloat16
"""
STEPS = (300, 350, 400)
MARK = ".made-by-make-demo"
"""A file in `models` and in `run` that says who made them."""

_ADAPTER_RANK = 16
_ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FACTOR_STD = 0.02
_TRAINED = FamilyShape(
    hidden=64, layers=8, heads=4, kv_heads=2, head_dim=16, intermediate=192, vocab=512, tied=True,
    architecture=Architecture.LLAMA,
)  # fmt: skip
_WEIGHT_STD = 0.02
_UPDATE_STD = 1e-3
_N_RANKS = 2


class NotOursError(Exception):
    """Something that the demo did not make has a name that the demo needs."""


def demo_models(root: Path) -> tuple[Path, ...]:
    """Return the folders of the base and of the fine-tunes below `root`."""
    return tuple(root / "models" / name for name in ("base", *EXPERTS))


def write_demo_files(root: Path) -> None:
    """Write what is not there yet below `root`, and nothing over anything.

    Raises:
        NotOursError: `models`, `run` or `experts.yml` is there, and the demo did not make it.
    """
    for name in ("models", "run"):
        folder = root / name
        if folder.exists() and not (folder / MARK).exists():
            raise NotOursError(f"{folder} is not the demo's: move it away, or run the demo in another clone")

    recipe = root / "experts.yml"
    if recipe.exists() and recipe.read_text(encoding="utf-8") != RECIPE:
        raise NotOursError(f"{recipe} is not as the demo writes it: move it away, or run the demo in another clone")

    recipe.write_text(RECIPE, encoding="utf-8")
    _write_models(root / "models")
    _write_checkpoints(root / "run")


def remove_demo_files(root: Path) -> None:
    """Remove what `write_demo_files` wrote below `root`, and nothing else."""
    recipe = root / "experts.yml"
    if recipe.exists() and recipe.read_text(encoding="utf-8") == RECIPE:
        recipe.unlink()

    made = {
        root / "models": ("base", *EXPERTS, "adapter"),
        root / "run": tuple(f"checkpoint-{step}" for step in STEPS),
    }
    for folder, names in made.items():
        if not (folder / MARK).exists():
            continue
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / MARK).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def _write_models(folder: Path) -> None:
    """Write the family and the adapter; each becomes visible under its name when it is complete."""
    folder.mkdir(exist_ok=True)
    (folder / MARK).touch()
    if not all(model.exists() for model in demo_models(folder.parent)):
        new = _empty_folder(folder / ".new")
        family = write_family(new, DEMO, len(EXPERTS))
        for model, name in zip(family.models, ("base", *EXPERTS), strict=True):
            if not (folder / name).exists():
                model.rename(folder / name)
        shutil.rmtree(new)

    if not (folder / "adapter").exists():
        new = _empty_folder(folder / ".new")
        write_adapter(new, DEMO)
        new.rename(folder / "adapter")


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def write_adapter(folder: Path, shape: FamilyShape) -> None:
    """Write a LoRA for every linear layer of a base of this shape, as PEFT saves it, into a folder that is there."""
    generator = np.random.default_rng(1)
    header: dict[str, object] = {}
    content = b""
    for name, (n_outputs, n_inputs) in _adapted_shapes(shape):
        for factor, sizes in (("lora_A", (_ADAPTER_RANK, n_inputs)), ("lora_B", (n_outputs, _ADAPTER_RANK))):
            values = generator.normal(0, _FACTOR_STD, sizes).astype(np.float32)
            raw = values.tobytes()
            key = f"base_model.model.{name}.{factor}.weight"
            header[key] = record(len(content), len(content) + len(raw), shape=list(sizes))
            content += raw
    (folder / "adapter_model.safetensors").write_bytes(file_bytes(header, content))

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": _ADAPTER_RANK,
        "lora_alpha": 2 * _ADAPTER_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(_ADAPTED_MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _adapted_shapes(shape: FamilyShape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each adapted module of the base with the shape of its weight."""
    endings = tuple(f".{module}.weight" for module in _ADAPTED_MODULES)
    for tensor in shape.tensors():
        if tensor.name.endswith(endings):
            n_outputs, n_inputs = tensor.shape
            yield tensor.name.removesuffix(".weight"), (n_outputs, n_inputs)


def _write_checkpoints(folder: Path) -> None:
    """Write checkpoints of the Trainer under DeepSpeed ZeRO-2 on two ranks, each some updates after the one before."""
    folder.mkdir(exist_ok=True)
    (folder / MARK).touch()
    generator = np.random.default_rng(2)
    shapes = {tensor.name: tensor.shape for tensor in _TRAINED.tensors()}
    weights = {}
    for tensor in _TRAINED.tensors():
        centre = 1.0 if tensor.is_norm else 0.0
        weights[tensor.name] = generator.normal(centre, _WEIGHT_STD, tensor.shape).astype(np.float32)

    for step in STEPS:
        arrays = {}
        for name, shape in shapes.items():
            weights[name] += generator.normal(0, _UPDATE_STD, shape).astype(np.float32)
            arrays[name, "fp32"] = weights[name].copy()
            for state in STATES:
                moment = generator.normal(0, _UPDATE_STD, shape).astype(np.float32)
                arrays[name, state] = np.square(moment) if state == "exp_avg_sq" else moment

        checkpoint = folder / f"checkpoint-{step}"
        if not checkpoint.exists():
            new = _empty_folder(folder / ".new")
            states = KnownStates(shapes, arrays, step)
            write_trainer_files(new, states, tied=True)
            write_zero12(new / f"global_step{step}", states, decay_groups(shapes), _N_RANKS)
            (new / "latest").write_text(f"global_step{step}", encoding="utf-8")
            write_sidecars(new, _TRAINED)
            new.rename(checkpoint)
