"""Part `tasks`: perplexity and tasks of lm-evaluation-harness of families from the Hub, merged in full and by samples.

It is for a machine with a GPU, with `DEVICE=cuda`: what it says of time and memory is estimated. At size `toy` it runs
anywhere, on a family that it makes, without tasks.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tiny_lm
from benchmarks.local_text import gather
from benchmarks.process import BenchmarkError
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.trained import MERGES, RULES, TOY_SHAPE
from benchmarks.reproduce.workplace import Workplace
from mergepipe.jobs.evaluate import loss_on_text, tasks_of_lm_eval

TASKS = ("arc_easy", "hellaswag", "piqa")
FAMILIES = {"1.7b": ("allenai/OLMo-2-0425-1B", 1.5e9), "8b": ("allenai/OLMo-2-1124-7B", 7.3e9)}  # and its parameters
STAGES = ("SFT", "DPO", "Instruct")  # of fine-tuning that base, each a model of that name
_SHARES, _TOY_SHARES = (100, 25, 10), (100, 75)  # % of the expert bytes
_TEXT_CHARACTERS, _TOY_CHARACTERS = 1_000_000, 2_000
_GPU_SECONDS = 200e-9  # of an H100 for the tasks, in batches of 1, and the text, for each parameter: an estimate


def _needs(size: Size) -> Needs:
    n_parameters = FAMILIES[size.name][1] if size.name in FAMILIES else 0
    n_scored = 1 + len(STAGES) + len(MERGES) * len(_SHARES)
    return Needs(round(2 * n_parameters) * (len(STAGES) + 2), n_scored * n_parameters * _GPU_SECONDS / 60)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    wanted = os.environ.get("DEVICE", "cpu")
    if wanted not in ("cpu", tiny_lm.device()):
        raise BenchmarkError(f"DEVICE={wanted}: torch finds no such device here")
    if not size.is_toy and size.name not in FAMILIES:
        raise BenchmarkError(f"the part tasks has no family of size {size.name}; choose toy, {', '.join(FAMILIES)}")
    if not size.is_toy and wanted == "cpu":
        told = f"{4.3e-9 * FAMILIES[size.name][1]:.0f} GB of its memory"  # weights in float32
        raise BenchmarkError(f"the part tasks needs a GPU at size {size.name}, {told}: give DEVICE=cuda")
    place = place.within("tasks")
    base, *experts = _made(place) if size.is_toy else _downloaded(place, FAMILIES[size.name][0])
    text = place.folder / "text.txt"
    text.write_text(gather(0)[0].heldout[: _TOY_CHARACTERS if size.is_toy else _TEXT_CHARACTERS])
    score = partial(_score, text=text, has_tasks=not size.is_toy)
    results.measure("gpu", lambda: {"name": tiny_lm.gpu_name()})
    for model in (base, *experts):
        results.measure(f"model/{model.name}", partial(score, model))
    for name in MERGES:
        for share in _TOY_SHARES if size.is_toy else _SHARES:
            recipe = RULES[name].recipe(base, experts)
            results.measure(f"{name}/{share}", partial(_merged, place, recipe, share, score))


def _downloaded(place: Workplace, base: str) -> list[Path]:
    from huggingface_hub import snapshot_download

    names = (base, *(f"{base}-{stage}" for stage in STAGES))
    folders = [place.folder / name.rpartition("/")[2] for name in names]
    for name, folder in zip(names, folders, strict=True):
        snapshot_download(name, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.txt"])
    return folders


def _made(place: Workplace) -> list[Path]:
    """Make a tiny base, and experts whose weights differ from its."""
    import torch

    folders = [place.folder / name for name in ("base", "expert-1", "expert-2")]
    tokenizer = tiny_lm.make_tokenizer([gather(0)[0].training], TOY_SHAPE.vocab)
    for seed, folder in enumerate(folders):
        model = tiny_lm.new_model(TOY_SHAPE, 0)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters() if seed else ():
                parameter += 0.01 * torch.randn_like(parameter)
        tiny_lm.save_model(model, tokenizer, folder)
    return folders


def _score(model: Path, text: Path, *, has_tasks: bool) -> dict[str, Any]:
    tasks: Mapping[str, float] = tasks_of_lm_eval(model, ",".join(TASKS)) if has_tasks else {}
    return {**loss_on_text(model, str(text)), **{name: tasks[name] for name in TASKS if name in tasks}}


def _merged(place: Workplace, recipe: str, share: int, score: Any) -> dict[str, Any]:
    file, out = place.folder / "recipe.yml", place.folder / "out"
    file.write_text(recipe)
    shutil.rmtree(out, ignore_errors=True)
    budget = ("--budget", f"{share}%", "--select", "sample") if share < 100 else ()
    report, _ = place.ours("merge", file, out, *budget, "--no-catalog")
    return {**score(out), "expert_bytes": report["expert_bytes"]}


def _page(results: Results) -> Page:
    rows = []
    for key, entry in results.entries.items():
        name, _, what = key.partition("/")
        if "loss" in entry:
            label, read = (MERGES[name], f"{what} %") if name in MERGES else (what, "")
            tasks = (f"{entry[task]:.3f}" if task in entry else "" for task in TASKS)
            rows.append((label, read, f"{math.exp(entry['loss']):.3f}", *tasks))
    meaning = "**What merges of published models keep of what they can do, in full and by samples of the experts.**"
    about = (
        "Perplexity of held-out Python, in float32; accuracies of lm-evaluation-harness, without examples."
        f" GPU: {results['gpu']['name'] or 'none'}."
    )
    table = Table(("model or merge", "of the expert bytes", "perplexity", *TASKS), tuple(rows))
    return Page("Tasks of published families", meaning, (about, table))


PART = Part(
    "tasks", "perplexity and harness tasks of families from the Hub, on a GPU (DEVICE=cuda): time is estimated",
    _needs, _measure, _page, needs_gpu=True,
)  # fmt: skip
