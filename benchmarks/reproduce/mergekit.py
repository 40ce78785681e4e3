"""Part `mergekit`: the same recipes by mergekit: time, memory, bits, bytes over a network, and what a kill leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.floor import make_cold
from benchmarks.peers import Tool, installed_peers
from benchmarks.process import OURS, BenchmarkError, io_counters, measure_checked
from benchmarks.recipes import Case, method_cases, model_entry, recipe_text
from benchmarks.reproduce.family_recipes import SYNTHETIC_TEXT
from benchmarks.reproduce.pages import Page, Table, gb, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import SHAPES, Size
from benchmarks.reproduce.workplace import Workplace, folder_bytes
from support.families import FamilyPaths, family_bytes
from support.hub_server import hub_server

_HALVES = "passthrough, half of the layers of each"
_GRADIENTS = "slerp slices, gradients"
_RECIPES = ("linear", "ties", "dare_ties", _GRADIENTS, _HALVES)
_FROM_THE_HUB = ("ties", _HALVES)
_K, _MIB = 2, 2**20
_SAMPLED_BYTES = 1 << 30  # of an output, at the most; larger ones are compared on every n-th element
_HELD_BYTES = 8 << 30  # the stand-in of the Hub holds its models in memory
_NOTE = (
    "Two experts and their base in bf16, on cold files: by mergekit's command line with `--lazy-unpickle` once, by ours"
    " three times (medians). Peak memory is anonymous memory, without mapped files. A killed merge (`kill -9`) had"
    " written half of its output. The Hub is a stand-in on the loopback; *on disk* is what its cache and the output"
    " take at the end. The recipes say `dtype: bfloat16`: mergekit computes in it, MergePipe in float32, rounded once."
)
_SHAPES: Mapping[str, Sequence[str]] = {"8b": ("0.6b", "8b")}


def _needs(size: Size) -> Needs:
    n_bytes = family_bytes(SHAPES[size.shape], _K)
    n_models = 1.2 if n_bytes > _HELD_BYTES else 3
    return Needs(n_bytes + int(n_models * size.model_bytes), len(_RECIPES) * n_bytes / 1e9 / 10)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    for shape in _SHAPES.get(size.name, (size.shape,)):
        _Shape(place.within(shape), shape, results).measure(size)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The merges of models of one shape by every program that is installed."""

    place: Workplace
    shape: str
    results: Results

    def measure(self, size: Size) -> None:
        family = self.place.family(self.shape, _K)
        is_large = family_bytes(SHAPES[self.shape], _K) > _HELD_BYTES
        n = SHAPES[self.shape].layers
        found = (*method_cases(family), _gradients(family, n), _halves(family.experts, n))
        cases = {case.name: case for case in found}
        peers = [tool for tool in installed_peers() if tool.name == "mergekit"]
        for name in _RECIPES:
            self._key(name, "mergepipe/merged", partial(self._ours, cases[name]))
            for tool in peers:
                keep = partial(self._keep, tool.name)
                self._key(name, f"{tool.name}/merged", partial(self.place.peer, tool, cases[name], keep))
                if name != "dare_ties":  # whose random draws are other ones
                    self._key(name, "both/compared", self._compared)
        killed = "linear" if is_large else "ties"  # which takes mergekit minutes
        for tool in () if size.is_toy else (_OUR_TOOL, *peers):
            self._key(killed, f"{tool.name}/killed", partial(self._killed, tool, cases[killed]))
            for name in () if is_large else _FROM_THE_HUB:
                self._key(name, f"{tool.name}/hub", partial(self._from_the_hub, tool, cases[name]))
        self.place.remove()

    def _key(self, name: str, what: str, call: Callable[[], Entry]) -> None:
        self.results.measure(f"{self.shape}/{name}/{what}", call)

    def _ours(self, case: Case) -> dict[str, Any]:
        recipe = self.place.folder / "recipe.yml"
        recipe.write_text(case.recipe)
        return self.place.merge(
            recipe, case.models, "--no-catalog", repeats=3, has_floor=True, judge=partial(self._keep, "mergepipe")
        )

    def _keep(self, program: str, out: Path) -> dict[str, Any]:
        """Keep a sample of an output; add nothing to the result."""
        np.savez(self.place.folder / f"{program}.npz", **dict(_sample(out)))
        return {}

    def _compared(self) -> dict[str, Any]:
        samples = [np.load(self.place.folder / f"{program}.npz") for program in ("mergepipe", "mergekit")]
        names = [set(sample.files) for sample in samples]
        if names[0] != names[1]:
            raise BenchmarkError(f"one output alone has {sorted(names[0] ^ names[1])[:3]}")
        pairs = [[_numbers(sample[name]) for sample in samples] for name in sorted(names[0])]
        return {
            "n_compared": sum(len(mine) for mine, _ in pairs),
            "n_equal": sum(int((mine == theirs).sum()) for mine, theirs in pairs),
            "furthest_steps": max(float(np.abs(mine - theirs).max()) / _step(mine) for mine, theirs in pairs),
        }

    def _command(self, tool: Tool, case: Case, text: str) -> tuple[list[str], Path]:
        recipe, out = self.place.folder / "recipe.yml", self.place.folder / "out"
        recipe.write_text(text)
        shutil.rmtree(out, ignore_errors=True)
        return list(tool.command(case, recipe, out)), out

    def _killed(self, tool: Tool, case: Case) -> dict[str, Any]:
        """Kill a merge once it has written half of a model; tell what stands there, and what the same command takes."""
        command, out = self._command(tool, case, case.recipe)
        make_cold(case.files())
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **tool.environment}
        ) as process:
            while (
                process.poll() is None
                and io_counters(process.pid)["write_bytes"] < family_bytes(SHAPES[self.shape], 0) / 2
            ):
                time.sleep(0.01)
            process.kill()
        if not process.returncode:
            raise BenchmarkError(f"{tool.name}: ended before it could be killed")
        left_bytes = folder_bytes(out)
        make_cold(case.files())
        cost = measure_checked(command, log=self.place.folder / "log.txt", environment=tool.environment)
        again = {"seconds": cost.wall_seconds, "kernel_read_bytes": cost.read_bytes}
        shutil.rmtree(out)
        return {"left_bytes": left_bytes, **again}

    def _from_the_hub(self, tool: Tool, case: Case) -> dict[str, Any]:
        """Merge models of a stand-in of the Hub: the bytes that it sent, and those that lie on the disk then."""
        cache, text = self.place.folder / "cache", case.recipe
        shutil.rmtree(cache, ignore_errors=True)
        with hub_server() as hub:
            for model in case.models:
                hub.commit(f"bench/{model.name}", {file.name: file.read_bytes() for file in model.iterdir()})
                text = text.replace(str(model.absolute()), f"bench/{model.name}")
            command, out = self._command(tool, case, text)
            settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
            environment = {**settings, "TRANSFORMERS_OFFLINE": "0", "MERGEPIPE_HOME": str(cache / "home")}
            cost = measure_checked(command, log=self.place.folder / "log.txt", environment=environment)
            sent_bytes = hub.content_bytes
        files = [
            file for folder in (cache, out) for file in folder.rglob("*") if file.is_file() and not file.is_symlink()
        ]
        disk_bytes = sum(file.stat().st_size for file in files)
        shutil.rmtree(out)
        return {"seconds": cost.wall_seconds, "network_bytes": sent_bytes, "disk_bytes": disk_bytes}


_OUR_TOOL = Tool("mergepipe", lambda _, recipe, out: [*OURS, "merge", str(recipe), str(out), "--no-catalog"], {})


def _gradients(family: FamilyPaths, n_layers: int) -> Case:
    """All layers of the base and an expert, weighed by depth."""
    models = (family.base, family.experts[0])
    slices = [{"sources": [model_entry(model, layer_range=[0, n_layers]) for model in models]}]
    t: list[dict[str, object]] = [
        {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ]
    return Case(_GRADIENTS, models, recipe_text("slerp", family.base, {}, slices=slices, parameters={"t": t}))


def _halves(models: Sequence[Path], n_layers: int) -> Case:
    """The first half of the layers of one model, and the second of another: half of what both hold."""
    ranges = ([0, n_layers // 2], [n_layers // 2, n_layers])
    slices = [
        {"sources": [model_entry(model, layer_range=layers)]} for model, layers in zip(models[:2], ranges, strict=True)
    ]
    return Case(_HALVES, tuple(models[:2]), recipe_text("passthrough", None, {}, slices=slices))


def _sample(out: Path) -> Iterator[tuple[str, Any]]:
    """The bits of every n-th element of each tensor of an output of bfloat16."""
    files = sorted(out.glob("*.safetensors"))
    step = -(-sum(file.stat().st_size for file in files) // _SAMPLED_BYTES)
    for file in files:
        with safe_open(file, "pt") as tensors:
            import torch

            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name).flatten()[::step].contiguous().view(torch.int16).numpy()


def _numbers(bits: Any) -> Any:
    """The numbers of bfloat16 bits, as float32."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _step(values: Any) -> float:
    """The distance of neighbouring numbers of bfloat16 at the root mean square of a tensor, which is not 0."""
    return float(2.0 ** (np.floor(np.log2(np.sqrt(np.mean(np.square(values, dtype=np.float64))))) - 7))


# --- the page ---


def _page(results: Results) -> Page:
    keys = [key for key in results.entries if key.endswith("/mergekit/merged")]
    both = [(results[key.replace("/mergekit/", "/mergepipe/")], results[key]) for key in keys]
    times = sorted(theirs["seconds"] / ours["seconds"] for ours, theirs in both)
    memory = sorted(theirs["peak_anonymous_bytes"] / ours["peak_anonymous_bytes"] for ours, theirs in both)
    meaning = (
        f"**On this machine mergekit 0.1.5 took {times[0]:.1f} to {times[-1]:.1f} times as long for the same recipes,"
        f" and {memory[0]:.1f} to {memory[-1]:.1f} times the memory.**"
        if both
        else "mergekit was not installed where this was measured."
    )
    merges = _table(
        results, "merged", ("s", "x floor", "CPU s", "peak memory MiB", "read GB", "written GB"),
        lambda entry: (
            results.told_seconds(entry, "seconds"), results.over_floor(entry), f"{entry['cpu_seconds']:.1f}",
            f"{entry['peak_anonymous_bytes'] / _MIB:.0f}", gb(entry["kernel_read_bytes"]),
            gb(entry["kernel_written_bytes"]),
        ),
    )  # fmt: skip
    bits = _table(
        results, "compared", ("elements compared", "equal bits", "furthest, in steps of bf16 at the tensor's RMS"),
        lambda entry: (
            f"{entry['n_compared']:,}", percent(entry["n_equal"] / entry["n_compared"], 3),
            f"{entry['furthest_steps']:.1f}",
        ),
    )  # fmt: skip
    remote = _table(
        results, "hub", ("over the network GB", "on disk GB", "s"),
        lambda entry: (gb(entry["network_bytes"]), gb(entry["disk_bytes"]), f"{entry['seconds']:.1f}"),
    )  # fmt: skip
    kills = _table(
        results, "killed", ("left under the output's name, GB", "the same command again: s", "read GB"),
        lambda entry: (gb(entry["left_bytes"]), f"{entry['seconds']:.1f}", gb(entry["kernel_read_bytes"])),
    )  # fmt: skip
    return Page("Beside mergekit", meaning, (SYNTHETIC_TEXT, _NOTE, merges, bits, remote, kills))


def _table(results: Results, ending: str, header: tuple[str, ...], cells: Callable[[Entry], tuple[str, ...]]) -> Table:
    """The table of the entries whose keys end so."""
    rows = [
        (*key.split("/")[:3], *cells(entry)) for key, entry in results.entries.items() if key.endswith(f"/{ending}")
    ]
    return Table(("model", "recipe", "program", *header), tuple(rows))


PART = Part(
    "mergekit", "five recipes by mergekit and MergePipe: time, memory, bits, network, a kill", _needs, _measure, _page
)
