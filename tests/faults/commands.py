"""The commands of the tests of crashes: what each makes undisturbed, and what must hold after it was stopped."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mergepipe
from mergepipe import Plan, tailor
from mergepipe.errors import OutputError
from mergepipe.options import MergeOptions, OutputOptions, PlanOptions
from mergepipe.reports import MergeReport, PackReport, PartReport
from mergepipe.runs import progress
from mergepipe.snapshots import work_log
from mergepipe.tailor.composition import CompositionReport
from support.bucket_outputs import files_below
from support.coded_weights import COLUMNS, ROWS, SCHEMES
from support.families import TINY, write_family
from support.model_folders import recipe_of, write_adapter, write_model
from support.public_names import MANIFEST_NAME
from support.training_trees import decay_groups, decoder_shapes, known_states, write_hf, write_zero12

SHARD_BYTES = 30_000
RECIPE = """\
merge_method: {method}
base_model: family/base
models:
- {{model: family/expert-1, parameters: {{weight: 0.6}}}}
- {{model: family/expert-2, parameters: {{weight: 0.4}}}}
dtype: bfloat16
"""
Report = MergeReport | PackReport | PartReport | CompositionReport | bool
Outputs = dict[str, dict[str, bytes]]


@contextlib.contextmanager
def recording_often() -> Iterator[None]:
    """Record every few kilobytes, whatever the time."""
    before = work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS
    work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = 10_000, 4096, math.inf
    try:
        yield
    finally:
        work_log.UNIT_BYTES, progress.READ_AHEAD_BYTES, work_log.UNIT_SECONDS = before


def made(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without the manifest, which tells of the run."""
    return {name: content for name, content in files.items() if name != MANIFEST_NAME}


def outputs_below(folder: Path) -> Outputs:
    """The visible outputs in a folder: folders with their files, and files."""
    found = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    return {path.name: made(files_below(path)) if path.is_dir() else {path.name: path.read_bytes()} for path in found}


def weights_of(outputs: Outputs) -> list[list[bytes]]:
    """The weight files alone: others tell of the recipe as it is written."""
    return [[raw for name, raw in files.items() if name.endswith(".safetensors")] for files in outputs.values()]


def is_resumed(report: Report) -> bool:
    match report:
        case MergeReport():
            return any("resumed" in notice for notice in report.notices)
        case PackReport():
            return any(expert.resumed_bytes for expert in report.experts)
        case PartReport():
            return len(report.made_shards) < report.n_shards
        case CompositionReport() | bool():
            return False


@dataclass(frozen=True, slots=True)
class Command:
    """A command that makes outputs below `results`, what it makes undisturbed, and what it may read in one run.

    Beforehand lies there what is in the folder `old`, if there is one.
    """

    root: Path
    run: Callable[..., Report]
    wanted: Outputs
    most_bytes: int = 0
    old: Path | None = None

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def out(self) -> Path:
        return self.results / "out"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def made(self) -> Outputs:
        """The visible outputs."""
        return outputs_below(self.results)

    def prepare(self) -> None:
        """Leave nothing but what is to be replaced."""
        shutil.rmtree(self.results, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
        if self.old is not None:
            shutil.copytree(self.old, self.results)

    def undisturbed(self) -> Command:
        """The same with what it makes when nothing interferes; that is removed again."""
        self.prepare()
        report = self.run()
        merge = report.merge if isinstance(report, PartReport) else report
        most_bytes = self.most_bytes
        if isinstance(merge, MergeReport):
            most_bytes = most_bytes or merge.budget_bytes or merge.expert_bytes + merge.analysis_bytes
        known = replace(self, wanted=self.made(), most_bytes=most_bytes)
        self.prepare()
        return known

    def merge(self, **fields: object) -> MergeReport:
        """Run a merge."""
        report = self.run(**fields)
        assert isinstance(report, MergeReport)
        return report

    def check_whole(self) -> None:
        """What is visible is the new output, its weights to the byte, and sound."""
        assert weights_of(self.made()) == weights_of(self.wanted)
        report = mergepipe.verify(self.out, catalog=False)
        assert (report.damages, report.notices) == ((), ())


def check_finished(command: Command) -> bool:
    """After a crash what is visible is whole, old or new; the same command finishes; whether it resumed."""
    visible = command.made()
    old = {} if command.old is None else outputs_below(command.old)
    assert [name for name, files in visible.items() if files not in (command.wanted[name], old.get(name))] == []
    went_on = False
    if visible != command.wanted or command.old is not None:
        report = command.run()
        went_on = is_resumed(report)
        merge = report.merge if isinstance(report, PartReport) else report
        if isinstance(merge, MergeReport):
            read_bytes = merge.expert_bytes + merge.analysis_bytes
            assert merge.earlier_expert_bytes <= read_bytes <= merge.earlier_expert_bytes + command.most_bytes
    assert command.made() == command.wanted
    for path in command.results.glob(".*"):  # of a process that was killed while it removed it; not just made
        for each in (path, *path.rglob("*")):
            os.utime(each, (time.time() - 60,) * 2)
    if command.old is None:
        with contextlib.suppress(OutputError):  # which says that the output exists
            command.run()
    else:
        mergepipe.gc([command.results], home=command.root / "no-home")
    assert list(command.results.glob(".*")) == []
    return went_on


def merge_command(
    root: Path, method: str = "linear", *, budget: str | None = None, force: bool = False, name: str = "out"
) -> Command:
    """A merge of several files or into one, by force where a snapshot is or not, under a budget or not."""
    write_family(root / "family", TINY, 2)
    parameters = "" if method == "linear" else "parameters: {density: 0.4}\n"
    (root / "recipe.yml").write_text(RECIPE.format(method=method) + parameters)
    shard_bytes = None if name.endswith(".safetensors") else SHARD_BYTES
    options = MergeOptions(threads=2, shard_bytes=shard_bytes, home=root / "home", budget=budget, force=force)
    old = root / "old" if force else None
    if old is not None:
        (root / "other.yml").write_text((root / "recipe.yml").read_text().replace("0.6", "0.1"))
        mergepipe.merge(root / "other.yml", old / name, catalog=False)
    run = partial(mergepipe.merge, root / "recipe.yml", root / "results" / name, options=options)
    return Command(root, run, {}, old=old)


def merge_of(root: Path, models: Mapping[Path, Mapping[str, object]], method: str = "linear", **more: Any) -> Command:
    """A merge of the models in a folder `root/models`, of several shards."""
    recipe = recipe_of(method, models, **more)
    options = MergeOptions(threads=2, shard_bytes=SHARD_BYTES, home=root / "home")
    return Command(root, partial(mergepipe.merge, recipe, root / "results" / "out", options=options), {})


def layers_of(seed: int) -> Mapping[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    return {name: random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for name in names}


def quantised_command(root: Path, scheme: str) -> Command:
    """A merge of a plain base with weights of codes."""
    base = write_model(root / "models/base", layers_of(0), {"model_type": "x"})
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(4):
        made_tensors, _ = SCHEMES[scheme](layer)
        prefix = f"model.layers.{layer}.mlp.up_proj."
        tensors |= {name.replace("l.", prefix, 1): tensor for name, tensor in made_tensors.items()}
    stated = {"quant_method": "gptq", "bits": 4}
    coded = write_model(root / "models/coded", tensors, {"model_type": "x", "quantization_config": stated})
    return merge_of(root, {coded: {"weight": 0.5}}, "task_arithmetic", base=base)


def adapters_command(root: Path) -> Command:
    """A merge of an adapter, of another one on the base, and of full weights."""
    base = write_model(root / "models/base", layers_of(0), {"model_type": "x"})
    other = write_model(root / "models/other", layers_of(1), {"model_type": "x"})
    adapters = []
    for seed in (1, 2):
        random = np.random.default_rng(seed)
        factors: dict[str, NDArray[Any]] = {}
        for name in layers_of(0):
            module = name.removesuffix(".weight")
            factors[f"{module}.lora_A.weight"] = random.normal(size=(4, COLUMNS)).astype(np.float32)
            factors[f"{module}.lora_B.weight"] = random.normal(size=(ROWS, 4)).astype(np.float32)
        adapters.append(write_adapter(root / f"models/adapter-{seed}", factors, target_modules=["up_proj"]))
    half: Mapping[str, object] = {"weight": 0.5, "density": 0.5}
    models = {adapters[0]: half, Path(f"{base}+{adapters[1]}"): half, other: half}
    return merge_of(root, models, "ties", base=base)


def documents_command(root: Path) -> Command:
    """A merge of two documents: what the first one makes is written before."""
    base = write_model(root / "models/base", layers_of(0), {"model_type": "x"})
    expert = write_model(root / "models/expert", layers_of(1), {"model_type": "x"})
    half = {"weight": 0.5}
    first = {**recipe_of("task_arithmetic", {expert: half}, base), "name": "first"}
    second = recipe_of("task_arithmetic", {"first": half, expert: half}, base)
    (root / "recipe.yml").write_text("\n---\n".join(map(json.dumps, (first, second))))
    options = MergeOptions(threads=2, shard_bytes=SHARD_BYTES, home=root / "home")
    return Command(root, partial(mergepipe.merge, root / "recipe.yml", root / "results/out", options=options), {})


def pack_command(root: Path) -> Command:
    write_family(root / "family", TINY, 2)
    experts = [root / "family/expert-1", root / "family/expert-2"]
    return Command(root, partial(mergepipe.pack, root / "family/base", experts, root / "results", threads=2), {})


def make_plan(root: Path, budget: str | None, *, is_packed: bool = False) -> Plan:
    """The plan of a family below `root`, plain or packed."""
    merge_command(root, "dare_ties")
    if is_packed:
        family, recipe = root / "family", root / "recipe.yml"
        mergepipe.pack(family / "base", [family / "expert-1", family / "expert-2"], root / "packed")
        recipe.write_text(recipe.read_text().replace("family/expert", "packed/expert"))
    options = PlanOptions(block_elements=16384)
    return mergepipe.plan(root / "recipe.yml", budget, everything=budget is None, home=root / "plans", options=options)


def part_command(root: Path, *, budget: str | None = None, is_packed: bool = False) -> Command:
    plan = make_plan(root, budget, is_packed=is_packed)
    options = OutputOptions(catalog=False, threads=2, shard_bytes=SHARD_BYTES)
    run = partial(mergepipe.run_part, plan, root / "results/out", (1, 1), options=options)
    return Command(root, run, {}, most_bytes=plan.planned_bytes)


def compose_command(root: Path) -> Command:
    """A composition of two DeepSpeed checkpoints, compared with them."""
    for step in (7, 9):
        known = known_states(decoder_shapes(), seed=step, step=step)
        write_zero12(root / "family" / f"at-{step}", known, decay_groups(known.shapes), 3)
    (root / "recipe.yml").write_text("default: family/at-9\ntake: [{from: family/at-7, units: [layers even, embed]}]\n")
    run = partial(tailor.compose, root / "recipe.yml", root / "results/out", self_check="full")
    return Command(root, run, {})


def fold_command(root: Path) -> Command:
    """A checkpoint that is folded into a running average, which is replaced."""
    for step in (3, 5):
        write_hf(root / "family" / f"at-{step}", known_states(decoder_shapes(), seed=step, step=step))

    def fold(out: Path, step: int) -> bool:
        with tailor.Averager(out) as averager:
            return averager.fold(root / "family" / f"at-{step}").result()

    fold(root / "old/out", 3)
    return Command(root, partial(fold, root / "results/out", 5), {}, old=root / "old")


COMMANDS: dict[str, Callable[[Path], Command]] = {
    "merge": merge_command,
    "merge of ties": lambda root: merge_command(root, "ties"),
    "merge --budget": lambda root: merge_command(root, budget="60%"),
    "merge --force": lambda root: merge_command(root, force=True),
    "merge --force --budget": lambda root: merge_command(root, force=True, budget="60%"),
    "merge of one file": lambda root: merge_command(root, name="out.safetensors"),
    "merge --force of one file": lambda root: merge_command(root, force=True, name="out.safetensors"),
    "merge of GPTQ": lambda root: quantised_command(root, "GPTQ of 4 bits"),
    "merge of NF4": lambda root: quantised_command(root, "bitsandbytes NF4"),
    "merge of NVFP4": lambda root: quantised_command(root, "NVFP4"),
    "merge of adapters": adapters_command,
    "merge of documents": documents_command,
    "pack": pack_command,
    "compose": compose_command,
    "fold": fold_command,
    "part": lambda root: part_command(root, is_packed=True),
    "part --budget": lambda root: part_command(root, budget="60%"),
}
