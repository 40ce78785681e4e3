"""Outputs, plans, packed experts and composites are byte for byte what was recorded, and stay so.

`pytest tests/test_golden_outputs.py --update-goldens` writes the digests anew, for a change of results that is meant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mergepipe
from mergepipe.options import MergeOptions
from support.disk_families import make_models
from support.disk_families import write_family as write_odd_family
from support.families import FamilyShape, write_family
from support.goldens import Goldens
from support.places import GOLDEN
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_hf,
    write_zero3,
    write_zero12,
)

RECORD = GOLDEN / "outputs.json"
SHAPE = FamilyShape(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=192, vocab=2048, tied=True)
N_EXPERTS = 3
BLOCK_ELEMENTS = 1 << 14
NOT_COMPARED = ("mergepipe.json", "mergepipe-store.json", "README.md", "mergekit_config.yml")
"""Files that tell of places, times and versions; what they say of results stands in other files as well."""
IDENTIFYING = {"digest", "files", "path", "identity", "recipe", "mtime_ns", "format", "content_id"}
"""Fields of a plan that say which inputs are meant: these may change their form."""

DENSITIES = "{weight: 0.6, density: 0.2}", "{weight: 0.4, density: 0.35}", "{weight: -0.3, density: 0.5}"
WEIGHTS = "{weight: 0.6}", "{weight: 0.4}", "{weight: -0.3}"
NOTHING = "{}", "{}", "{}"
DELLA = tuple(text.replace("}", ", epsilon: 0.1}") for text in DENSITIES)
BREADCRUMBS = tuple(text.replace("}", ", gamma: 0.05}") for text in DENSITIES)
METHODS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "linear": (WEIGHTS, "{normalize: true}"),
    "task_arithmetic": (WEIGHTS, "{lambda: 0.9}"),
    "ties": (DENSITIES, "{normalize: true}"),
    "dare_linear": (DENSITIES, "{rescale: true}"),
    "dare_ties": (DENSITIES, "{normalize: false}"),
    "breadcrumbs": (BREADCRUMBS, "{}"),
    "breadcrumbs_ties": (BREADCRUMBS, "{}"),
    "della": (DELLA, "{lambda: 0.8}"),
    "della_linear": (DELLA, "{}"),
    "sce": (NOTHING, "{select_topk: 0.4}"),
    "model_stock": (NOTHING, "{}"),
    "karcher": (NOTHING, "{}"),
    "multislerp": (("{weight: 0.6}", "{weight: 0.4}", "{weight: 0.3}"), "{}"),
    "slerp": (("{}",), "{t: 0.35}"),
    "nuslerp": (("{weight: 0.6}", "{weight: 0.4}"), "{}"),
    "nearswap": (("{}",), "{t: 0.001}"),
    "arcee_fusion": (("{}",), "{}"),
}
BUDGETED = ("linear", "ties", "dare_ties")
ODD_RECIPE = """merge_method: ties
dtype: auto
base_model: odd/base
models:
  - {model: odd/expert1, parameters: {weight: 0.7, density: 0.4}}
  - {model: odd/expert2-bare.safetensors, parameters: {weight: 0.5, density: 0.8}}
"""
SLICES_RECIPE = """merge_method: passthrough
dtype: bfloat16
slices:
  - sources: [{model: family/expert-1, layer_range: [0, 2]}]
  - sources: [{model: family/expert-2, layer_range: [1, 3]}]
"""


def recipe_text(method: str, dtype: str = "bfloat16") -> str:
    """The recipe of one method over the family."""
    models, shared = METHODS[method]
    lines = [f"  - {{model: family/expert-{i}, parameters: {text}}}" for i, text in enumerate(models, 1)]
    return "\n".join([
        f"merge_method: {method}", "base_model: family/base", "models:", *lines, f"parameters: {shared}",
        f"dtype: {dtype}", "",
    ])  # fmt: skip


def tree(folder: Path) -> dict[str, str]:
    """A digest of every file of a folder whose content follows from the job alone."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NOT_COMPARED
    }


def without_identities(value: object) -> object:
    """A JSON tree without the fields that identify inputs."""
    if isinstance(value, dict):
        return {key: without_identities(each) for key, each in value.items() if key not in IDENTIFYING}
    if isinstance(value, list):
        return [without_identities(each) for each in value]
    return value


def all_digests(root: Path) -> dict[str, dict[str, str]]:
    """Run every job below an empty folder; what each gives, by job and file."""
    write_family(root / "family", SHAPE, N_EXPERTS)
    write_odd_family(root / "odd", make_models(2))
    for method in METHODS:
        (root / f"{method}.yml").write_text(recipe_text(method))
    return {**merges(root), **plans(root), **packs(root), **composites(root / "training")}


def merges(root: Path) -> dict[str, dict[str, str]]:
    """Merges in full of every method, of odd dtypes and of slices."""
    (root / "odd.yml").write_text(ODD_RECIPE)
    (root / "slices.yml").write_text(SLICES_RECIPE)
    (root / "float32.yml").write_text(recipe_text("ties", "float32"))
    results: dict[str, dict[str, str]] = {}

    def add(name: str, recipe: str, **options: Any) -> None:
        out = root / "out" / name.replace(" ", "-")
        common = MergeOptions(catalog=False, threads=2)
        mergepipe.merge(root / recipe, out, options=replace(common, **options))
        results[name] = tree(out)

    for method in METHODS:
        add(f"merge {method}", f"{method}.yml")
    for name in ("odd", "slices", "float32"):
        add(f"merge {name}", f"{name}.yml")
    add("merge in shards", "linear.yml", shard_bytes=200_000)
    return results


def plans(root: Path) -> dict[str, dict[str, str]]:
    """Plans of three methods under two budgets, with statistics, and the merges that they lead to."""
    home = root / "home"
    mergepipe.analyze(root / "family/base", [root / f"family/expert-{i}" for i in (1, 2, 3)], home=home)
    results = {}
    for method in BUDGETED:
        for budget in ("20%", "55%"):
            plan = mergepipe.plan(
                root / f"{method}.yml", budget=budget, home=home, select="norm", block_elements=BLOCK_ELEMENTS
            )
            text = json.dumps(without_identities(json.loads(plan.to_json())), sort_keys=True)
            out = root / "out" / f"{method}-{budget}"
            mergepipe.run(plan, out, catalog=False)
            digest = hashlib.sha256(text.replace(str(root), "").encode()).hexdigest()[:32]
            results[f"plan {method} {budget}"] = {"plan": digest, **tree(out)}
    return results


def packs(root: Path) -> dict[str, dict[str, str]]:
    """Packed experts, what is unpacked of one, and a merge that reads them."""
    experts = [root / f"family/expert-{i}" for i in (1, 2)]
    mergepipe.pack(root / "family/base", experts, root / "packed")
    mergepipe.unpack(root / "packed/expert-1", root / "unpacked")
    text = recipe_text("ties").replace("family/expert-1", "packed/expert-1")
    (root / "packed.yml").write_text(text.replace("family/expert-2", "packed/expert-2"))
    out = root / "out" / "packed"
    mergepipe.merge(root / "packed.yml", out, catalog=False)
    found = {"pack": tree(root / "packed"), "unpack": tree(root / "unpacked"), "merge packed": tree(out)}
    if found["merge packed"] != tree(root / "out" / "merge-ties"):
        raise AssertionError("packed experts are merged to other bytes than the originals")
    return found


def composites(root: Path) -> dict[str, dict[str, str]]:
    """One composite of each training format, from two checkpoints."""
    shapes = decoder_shapes()
    results = {}
    writers: dict[str, Callable[[Path, KnownStates], None]] = {
        "hf": write_hf,
        "zero2": lambda folder, known: write_zero12(folder, known, decay_groups(shapes), 2),
        "zero3": lambda folder, known: write_zero3(folder, known, decay_groups(shapes), 2),
        "dcp": lambda folder, known: write_dcp(folder, known, 2),
    }
    for kind, write in writers.items():
        for number, step in enumerate((3, 7)):
            write(root / kind / f"checkpoint-{step}", known_states(shapes, seed=number, step=step))
        recipe = root / f"{kind}.yml"
        units = f"{{from: {kind}/checkpoint-3, units: ['layers 0-1', embed]}}"
        recipe.write_text(f"default: {kind}/checkpoint-7\ntake:\n  - {units}\n")
        out = root / "out" / kind
        mergepipe.tailor.compose(recipe, out)
        results[f"composite {kind}"] = tree(out)
    return results


def test_golden_outputs__every_job_gives_the_recorded_bytes(tmp_path: Path, goldens: Goldens) -> None:
    found = all_digests(tmp_path)
    if goldens.is_updating:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    assert list(found) == list(recorded)
    assert {job: files for job, files in found.items() if files != recorded[job]} == {}
