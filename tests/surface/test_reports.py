"""Reports (`--json`) of every command, and the manifests and plans that it writes, are what was recorded.

The records are tests/golden/surface/reports/COMMAND.txt. Digests, times, places and this version have names in them.
Where a change of them is meant, write them anew and read the diff:

    pytest tests/surface --update-goldens && git diff tests/golden/surface
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from workplace import BLOCK_ELEMENTS, RECIPES, recipe_text, workplace

from support.command_line import command_names, run_command
from support.goldens import Goldens, layout, steady_text, steady_value
from support.remote_stores import set_environment
from support.s3_server import s3_server

BLOCKS = f"--block-elements {BLOCK_ELEMENTS}"
ENGINE = "--threads 2 --memory 64MiB"
BASE, EXPERTS = "family/base", "family/expert-1 family/expert-2"
SESSION = (
    "check linear.yml",
    "check ties.yml --shard-size 60KB",
    f"plan linear.yml --budget 50% {BLOCKS} -o unanalyzed.plan.json",
    f"analyze {BASE} {EXPERTS} {BLOCKS} --density 0.3 --density 0.5 {ENGINE}",
    f"analyze {BASE} {EXPERTS} {BLOCKS} {ENGINE}",
    f"plan linear.yml --budget 50% {BLOCKS}",
    f"plan ties.yml --budget 30% {BLOCKS} -o ties.plan.json",
    f"plan dare.yml --budget 100KB {BLOCKS} --seed 5 -o dare.plan.json",
    f"plan linear.yml --budget 30% --select conflict --where-omitted renormalize {BLOCKS}",
    f"plan linear.yml --budget 30% --select random --seed 3 {BLOCKS}",
    f"plan ties.yml --budget 50% --select sample {BLOCKS} -o sample.plan.json",
    f"plan ties.yml --budget 30% --min-density 0.1 {BLOCKS}",
    "plan linear.yml --all -o all.plan.json",
    f"merge linear.yml out {ENGINE}",
    f"merge ties.yml budgeted --budget 40% {BLOCKS} {ENGINE} --shard-size 60KB",
    f"merge --plan dare.plan.json planned {ENGINE}",
    f"merge linear.yml out --force {ENGINE}",
    f"run ties.plan.json run {ENGINE}",
    f"run sample.plan.json sampled {ENGINE}",
    f"run all.plan.json parted --part 1/2 --shard-size 60KB {ENGINE}",
    "status all.plan.json parted --parts 2",
    f"run all.plan.json parted --part 2/2 --shard-size 60KB {ENGINE}",
    "explain out",
    "explain budgeted",
    "explain ties.plan.json",
    "explain budgeted --tensor model.layers.0.mlp.*",
    f"sweep linear.yml --budgets 25%,100% {BLOCKS} {ENGINE} --work .",
    f"search search.yml -o best --evaluate ./one --trials 2 --sampler random {ENGINE}",
    "ls",
    "show out",
    "show budgeted",
    "lineage budgeted",
    "diff out budgeted",
    "diff out budgeted --fast",
    "verify out",
    "verify out --deep 100%",
    f"replay budgeted again {ENGINE}",
    f"without {EXPERTS.split()[0]} budgeted -o remade --dry-run {ENGINE}",
    f"without {EXPERTS.split()[0]} budgeted -o remade {ENGINE}",
    f"pack {BASE} {EXPERTS} -o packed --threads 2",
    f"merge packed.yml merged-of-packed --budget 60% {BLOCKS} {ENGINE}",
    "verify packed/expert-1",
    "unpack packed/expert-1 -o unpacked --threads 2",
    "moe mixture.yml mixture --threads 2",
    f"lora extract {BASE} family/expert-1 -o lora --rank 4",
    f"lora apply {BASE} lora -o adapted {ENGINE}",
    f"lora check {BASE} lora adapted",
    f"lora check {BASE} lora",
    "lora merge lora lora -o lora-cat --weight 0.5 --weight 0.25",
    "lora convert lora --to vllm -o lora-vllm",
    "lora merge lora lora -o lora-svd --method svd --rank 2",
    "lora merge lora lora -o lora-ties --method ties --density 0.5",
    f"lora apply {BASE} lora lora -o adapted-twice --weight 0.5 --weight 0.25 --dtype float32 {ENGINE}",
    "tailor inspect global_step7 global_step9",
    "tailor inspect checkpoint-7",
    "tailor recipe --run . --strategy parity --at 9",
    "tailor check compose.yml",
    "tailor compose compose.yml composed",
    "tailor average checkpoint-7 checkpoint-9 -o averaged",
    "tailor average global_step7 global_step9 -o resumable --optimizer average --weights 1,3",
    "tailor export global_step9 -o exported --dtype bfloat16",
    "tailor diff checkpoint-7 checkpoint-9",
    "catalog stats",
    "catalog rebuild . --home rebuilt",
    "damage out",
    "verify out",
    f"repair out {ENGINE}",
    "push out s3://reports/out",
    "gc . --dry-run",
)
"""Commands in their order; `damage` is ours."""
WITHOUT_JSON = {"tailor recipe"}
STORED = {
    "budgeted": "merge", "merged-of-packed": "merge", "parted": "run",
    "packed/expert-1": "pack", "composed": "tailor compose", "resumable": "tailor average",
    "exported": "tailor export",
}  # fmt: skip
"""Outputs whose manifests are recorded, and the command that made them."""
MANIFESTS = "mergepipe.json", "mergepipe-store.json"


def command_name(line: str) -> str:
    """The command of a line: one word, or two."""
    words = line.split()
    return " ".join(words[: 2 if words[0] in ("tailor", "catalog", "lora") else 1])


def damage(folder: Path) -> None:
    """Change a byte of the first weight file."""
    path = min(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def ran_text(line: str, places: Mapping[str, str]) -> str:
    """Run a command; its exit code and what it printed, as it is recorded."""
    has_json = command_name(line) not in WITHOUT_JSON
    ran = run_command([*line.split(), *(["--json"] if has_json else [])])
    printed = layout(steady_value(json.loads(ran.out), places)) if has_json else steady_text(ran.out, places)
    return f"=== {line}: exit code {ran.exit_code}\n{steady_text(ran.err, places)}{printed}\n"


def session_texts(root: Path, url: str) -> dict[str, str]:
    """Run the session; what its commands printed and wrote, by command."""
    places = {str(root): "<root>", url: "<server>"}
    found: dict[str, list[str]] = {command_name(line): [] for line in SESSION if not line.startswith("damage ")}
    for line in SESSION:
        if line.startswith("damage "):
            damage(root / line.removeprefix("damage "))
        else:
            found[command_name(line)].append(ran_text(line, places))
    for name, command in STORED.items():
        for path in (root / name / manifest for manifest in MANIFESTS):
            if path.is_file():
                value = steady_value(json.loads(path.read_text()), places)
                found[command].append(f"=== {name}/{path.name}\n{layout(value)}\n")
    return {command: "\n".join(parts) for command, parts in found.items()}


def test_reports__are_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goldens: Goldens) -> None:
    with s3_server() as server, workplace(tmp_path):
        server.make_bucket("reports")
        set_environment(monkeypatch, server.url)
        (tmp_path / "packed.yml").write_text(recipe_text(*RECIPES["ties.yml"], folder="packed"))
        (tmp_path / "one").write_text("#!/bin/sh\necho 1.25\n")
        (tmp_path / "one").chmod(0o755)
        texts = session_texts(tmp_path, server.url)
    assert set(texts) == set(command_names())
    goldens.check("reports", texts)
