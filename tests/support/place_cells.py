"""Run one cell of the table of verbs and places: a command whose input or output is of one kind, beside stand-ins."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from support.command_line import Ran, run_command
from support.families import TINY_LLAMA, write_family
from support.model_folders import write_adapter, write_model
from support.placed_models import PlacedModels, files_of
from support.training_trees import known_states, write_hf

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
MODEL_VERBS = ("check", "merge", "plan", "run", "search", "sweep", "moe")
"""Verbs that read a model by a recipe that names it."""
ENDS = (".safetensors", ".gguf")


def write_subjects(root: Path) -> None:
    """Write what the cells read into folders of `root`: models, an adapter, a snapshot, a pack, checkpoints."""
    family = write_family(root / "family", TINY_LLAMA, 2)
    for name, folder in (("base", family.base), ("expert", family.experts[0]), ("other", family.experts[1])):
        shutil.copytree(folder, root / name)
        tokenizer = root / name / "tokenizer.json"  # which splits texts as that of GPT-2, as files of GGUF need it
        tokenizer.write_text(tokenizer.read_text().replace('"use_regex": false', '"use_regex": true'))
    shutil.copy(root / "expert" / "model.safetensors", root / "expert.safetensors")
    random = np.random.default_rng(5)
    for name in ("adapter", "second"):
        factors: dict[str, NDArray[np.float32]] = {}
        for module in MODULES:
            rows, columns = load_file(root / "base" / "model.safetensors")[f"{module}.weight"].shape
            down = random.standard_normal((4, columns)).astype(np.float32)
            up = random.standard_normal((rows, 4)).astype(np.float32)
            factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        write_adapter(root / name, factors)
    _write_quantised(root / "expert", root / "quantised")
    shapes = {tensor.name: tensor.shape for tensor in TINY_LLAMA.tensors()}
    for step in (7, 9):
        write_hf(root / "run" / f"checkpoint-{step}", known_states(shapes, seed=step, step=step))
    (root / "recipe.yml").write_text(recipe(root / "base", root / "expert"))
    (root / "other.yml").write_text(recipe(root / "base", root / "other"))
    (root / "compose.yml").write_text("default: run/checkpoint-9\ntake: [{from: run/checkpoint-7, units: [embed]}]\n")
    expect(run_command(["merge", str(root / "recipe.yml"), str(root / "snapshot")]))
    expect(run_command(["merge", str(root / "other.yml"), str(root / "other-snapshot")]))
    expect(run_command(["pack", str(root / "base"), str(root / "expert"), "--out", str(root / "packs")]))


def _write_quantised(source: Path, folder: Path) -> None:
    """Write a model with its matrices in float8, scaled by blocks."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name] = tensor.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.ones((-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)), np.float32)
        else:
            tensors[name] = tensor
    config = json.loads((source / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    write_model(folder, tensors, {**config, "quantization_config": method})


def expect(ran: Ran) -> Ran:
    """Return what a command left, which must have worked."""
    assert ran.exit_code == 0, ran.err
    return ran


def recipe(base: object, expert: object) -> str:
    """A recipe of one expert that is added to its base."""
    models = [{"model": str(expert), "parameters": {"weight": 0.5}}]
    return json.dumps({"merge_method": "task_arithmetic", "base_model": str(base), "models": models})


@dataclass(frozen=True, slots=True)
class Work:
    """The folder in which a cell runs, and the subjects that all cells share."""

    models: PlacedModels
    folder: Path

    def subject(self, verb: str, kind: str) -> str:
        """Return the name of the thing that a verb reads: of a kind, in a folder, or at a place."""
        root = self.models.root
        own = OWN_SUBJECTS.get(verb, "expert")
        special = {
            "file": root / "expert.safetensors", "snapshot": root / "snapshot", "packed": root / "packs" / "expert",
            "quantised": root / "quantised", "training": root / "run" / "checkpoint-9",
        }  # fmt: skip
        if kind == "adapted":
            return f"{root / 'expert'}+{root / 'adapter'}"
        if kind in special:
            return str(special[kind])
        return self.models.put(root / own, kind)

    def command(self, verb: str, subject: str, out: str) -> list[str]:
        """Return the command of a verb that reads `subject` and writes `out`."""
        root = self.models.root
        base, adapter = str(root / "base"), str(root / "adapter")
        if verb in MODEL_VERBS:
            written = self.folder / "recipe.yml"
            written.write_text(mixture(base, subject, root) if verb == "moe" else recipe(base, subject))
        match verb:
            case "check":
                return ["check", str(written)]
            case "merge" | "moe":
                return [verb, str(written), out]
            case "plan":
                return ["plan", str(written), "--budget", "50%", "--out", out]
            case "run":
                plan = self.folder / "plan.json"
                planned = run_command(["plan", str(written), "--all", "--out", str(plan)])
                return ["run", str(plan), out] if planned.exit_code == 0 else ["plan", str(written), "--all"]
            case "search":
                text = written.read_text().replace("0.5", '{"search": [0.25, 0.5]}')
                written.write_text(text)
                loss = ["--evaluate", "sh -c 'echo 1' {}", "--trials", "1"]
                return ["search", str(written), "--out", out, *loss]
            case "sweep":
                page = ["--html", out] if out else []
                return ["sweep", str(written), "--budgets", "50%", *page]
            case "analyze":
                return ["analyze", base, subject, *(["--home", out] if out else [])]
            case "pack":
                return ["pack", base, subject, "--out", out]
            case "unpack":
                return ["unpack", subject, "--base", base, "--out", out]
            case "replay":
                return ["replay", subject, out]
            case "without":
                both = json.loads(recipe(base, subject))
                both["models"].append({"model": str(root / "other"), "parameters": {"weight": 0.5}})
                (self.folder / "both.yml").write_text(json.dumps(both))
                merged = str(self.folder / "merged")
                expect(run_command(["merge", str(self.folder / "both.yml"), merged]))
                return ["without", subject, merged, "-o", out]
            case "verify" | "repair" | "show" | "lineage":
                return [verb, subject]
            case "explain":
                return ["explain", subject, *(["--html", out] if out else [])]
            case "diff":
                return ["diff", subject, str(root / "other-snapshot")]
            case "push":
                return ["push", subject, out, *(["--create"] if out.startswith("hf://") else [])]
            case "lora apply":
                return ["lora", "apply", subject, adapter, "-o", out]
            case "lora check":
                return ["lora", "check", base, adapter, subject]
            case "lora merge":
                return ["lora", "merge", subject, str(root / "second"), "-o", out]
            case "lora convert":
                return ["lora", "convert", subject, "--to", "vllm", "-o", out]
            case "lora extract":
                return ["lora", "extract", base, subject, "--rank", "2", "-o", out]
            case "tailor inspect":
                return ["tailor", "inspect", subject]
            case "tailor check" | "tailor compose":
                text = f"default: {subject}\ntake: [{{from: {root}/run/checkpoint-7, units: [embed]}}]\n"
                (self.folder / "compose.yml").write_text(text)
                return [*verb.split(), str(self.folder / "compose.yml"), *([out] if verb == "tailor compose" else [])]
            case "tailor export":
                return ["tailor", "export", subject, "-o", out]
            case "tailor average":
                return ["tailor", "average", f"{root}/run/checkpoint-7", subject, "-o", out]
            case "tailor recipe":
                return ["tailor", "recipe", "--run", subject, "--strategy", "latest"]
        raise ValueError(verb)


OWN_SUBJECTS = {
    **dict.fromkeys(("verify", "repair", "diff", "explain", "show", "lineage", "push", "replay"), "snapshot"),
    "unpack": "packs/expert",
    "lora apply": "base",
    "lora merge": "adapter",
    "lora convert": "adapter",
    **dict.fromkeys(
        ("tailor inspect", "tailor check", "tailor export", "tailor average", "tailor compose"), "run/checkpoint-9"
    ),
    "tailor recipe": "run",
}
"""What a verb reads that is no model."""


def mixture(base: str, expert: str, root: Path) -> str:
    """A recipe of a mixture of two experts."""
    experts = [{"source_model": expert}, {"source_model": str(root / "other")}]
    return json.dumps({"base_model": base, "gate_mode": "random", "experts": experts})


def weights_below(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The weights and indices of them among files: what has the same bytes wherever the inputs lay."""
    ends = (*ENDS, ".pt", ".stats", ".bin")
    return {name: content for name, content in files.items() if name.endswith(ends)}


_OF_PLACES = re.compile(
    r"seconds|bytes|read|path|place|home|version|created|files|inputs|recorded|time|source|base|model"
)


def steady(value: object) -> object:
    """Return what a report says that does not depend on where its inputs lay: numbers and words, but for places."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if not _OF_PLACES.search(key)}
    if isinstance(value, list):
        return [steady(item) for item in value]
    return None if isinstance(value, str) and "/" in value else value


def run_in(folder: Path, command: Sequence[str]) -> Ran:
    """Run a command in a working folder of its own."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_command(list(command))
    finally:
        os.chdir(before)


__all__ = ["Work", "expect", "files_of", "run_in", "steady", "weights_below", "write_subjects"]
