"""What commands say of wrong arguments and of files that lie: exit code, error codes and lines, as they were recorded.

The records are tests/golden/surface/bad-inputs/COMMAND.txt: the command line, its exit code, and its lines on standard
error. A case is added by a line `COMMAND ARGUMENTS: 0`. Where a change of them is meant, write them anew and read the
diff:

    pytest tests/surface --update-goldens && git diff tests/golden/surface
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workplace import BLOCK_ELEMENTS, workplace

from mergepipe import errors
from mergepipe.errors import MergePipeError
from support.command_line import command_names, run_command
from support.goldens import Goldens, steady_text
from support.model_folders import write_adapter
from support.safetensors_bytes import file_bytes, honest_file, record

MODELS = "base_model: family/base\nmodels:\n  - {model: family/expert-1}\n  - {model: family/expert-2}\n"
LINEAR = f"merge_method: linear\n{MODELS}dtype: bfloat16\nparameters: {{weight: 0.5}}\n"
TIES = LINEAR.replace("linear", "ties").replace("{weight: 0.5}", "{weight: 0.5, density: 0.5, lambda: 1}")
RECIPES: Mapping[str, str] = {
    "unknown-parameter": LINEAR.replace("{weight", "{wieght"),
    "unsupported-dtype": LINEAR.replace("bfloat16", "int4"),
    "model-gone": LINEAR.replace("family/expert-2", "family/expert-9"),
    "model-file": LINEAR.replace("family/expert-2", "linear.yml"),
    "model-no-weights": LINEAR.replace("family/expert-2", "empty-folder"),
    "model-twice": LINEAR.replace("expert-2", "expert-1"),
    "model-url": LINEAR.replace("family/expert-2", "ftp://host/model"),
    "model-training": LINEAR.replace("family/expert-2", "global_step7"),
    "base-gone": LINEAR.replace("family/base", "family/basis"),
    "weight-flag": LINEAR.replace("expert-1}", "expert-1, parameters: {weight: true}}"),
    "filter-unused": LINEAR.replace(
        "expert-1}", "expert-1, parameters: {weight: [{filter: nothing, value: 1}, {value: 0.5}]}}"
    ),
    "slice-range": "merge_method: passthrough\nslices: [{sources: [{model: family/base, layer_range: [0, 9]}]}]\n",
    "tokenizer": LINEAR + "tokenizer_source: nobody\n",
    "chat-template": LINEAR + "chat_template: '{% if %}'\n",
    "chat-template-name": LINEAR + "chat_template: chatlm\n",
    "weight-nan": LINEAR.replace("weight: 0.5", "weight: .nan"),
    "weight-nan-text": LINEAR.replace("weight: 0.5", "weight: NAN"),
    "weight-nan-alone": LINEAR.replace("base_model: family/base\n", "").replace("weight: 0.5", "weight: nan"),
    "post-zero": LINEAR + "post: {svc: 0}\n",
    "post-name": LINEAR + "post: {scv: 1}\n",
    "post-text": LINEAR + "post: svc\n",
    "post-no-base": LINEAR.replace("base_model: family/base\n", "") + "post: {svc: 1}\n",
    "lines-one": TIES.replace("lambda: 1", "lambda: {lines: [1.0]}"),
    "lines-number": TIES.replace("lambda: 1", "lambda: {lines: 2}"),
    "lines-text": TIES.replace("lambda: 1", "lambda: {lines: [a, 1]}"),
    "lines-filter": TIES.replace("lambda: 1", "lambda: {lines: [1, 2], filter: mlp}"),
    "search-nothing": LINEAR,
    "search-number": LINEAR.replace("0.5", "{search: 0.5}"),
    "search-falls": LINEAR.replace("0.5", "{search: [1.0, 0.0]}"),
    "search-infinite": LINEAR.replace("0.5", "{search: [0.0, .inf]}"),
    "search-log": LINEAR.replace("0.5", "{search: [0.0, 1.0], log: true}"),
    "search-step": LINEAR.replace("0.5", "{search: [0.0, 1.0], step: 2}"),
    "search-texts": LINEAR.replace("0.5", "{search: [a, b], log: true}"),
    "delta-text": LINEAR.replace("family/expert-2", "{path: family/expert-2, delta: maybe}"),
    "delta-adapter": LINEAR.replace("family/expert-2", "{path: family/expert-2, delta: true, lora: odd/adapter}"),
    "delta-plus": LINEAR.replace("family/expert-2", "{model: family/base+lora, delta: true}"),
    "delta-base": LINEAR.replace("base_model: family/base", "base_model: {path: family/base, delta: true}"),
    "documents": f"name: made\n{LINEAR}---\n{LINEAR.replace('family/expert-2', 'made')}",
    "other-shape": LINEAR.replace("family/expert-2", "odd/other-shape"),
    "other-names": LINEAR.replace("family/expert-2", "odd/other-names"),
    "other-dtype": LINEAR.replace("family/expert-2", "odd/other-dtype"),
    "adapter": LINEAR.replace("family/expert-2", "odd/adapter"),
}
"""Recipes, as `bad/NAME.yml`; each is given to `check`."""

TRUNCATED = file_bytes({"w": record(0, 8)}, bytes(4))


def expert_recipe(folder: str) -> str:
    """A recipe with this folder as an expert."""
    return LINEAR.replace("family/expert-2", folder)


def write_recipes(root: Path) -> None:
    """Write all recipes at the root, where their paths begin."""
    for name, text in RECIPES.items():
        (root / f"bad-{name}.yml").write_text(text)
    (root / "weights-truncated.yml").write_text(expert_recipe("odd/weights-truncated"))
    (root / "moving.yml").write_text(expert_recipe("odd/moving"))
    (root / "latin1.yml").write_bytes("merge_method: linéar\n".encode("latin-1"))


def write_odd_models(root: Path) -> None:
    """Write checkpoints that lie or do not fit, below `odd`."""
    (root / "odd/weights-truncated").mkdir(parents=True)
    (root / "odd/weights-truncated/model.safetensors").write_bytes(TRUNCATED)
    expert = root / "family" / "expert-2"
    for name in ("other-shape", "other-names", "other-dtype", "moving"):
        shutil.copytree(expert, root / "odd" / name)
    header = {"model.norm.weight": record(0, 12)}
    (root / "odd/other-shape/model.safetensors").write_bytes(file_bytes(header, bytes(12)))
    (root / "odd/other-names/model.safetensors").write_bytes(honest_file("transformer.wte.weight"))
    header = {"model.norm.weight": record(0, 32, dtype="U8", shape=[32])}
    (root / "odd/other-dtype/model.safetensors").write_bytes(file_bytes(header, bytes(32)))
    adapter = root / "odd" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT", "r": 4}))
    (adapter / "adapter_model.safetensors").write_bytes(honest_file("base_model.model.x.lora_A.weight"))
    (root / "empty-folder").mkdir()
    write_adapters(root)


def write_adapters(root: Path) -> None:
    """Write an adapter of the base, and such as are cut, hold no numbers, or are of another base."""
    module, weight = "model.layers.0.self_attn.q_proj", np.ones((4, 32), np.float32)
    factors = {"lora_A.weight": weight, "lora_B.weight": weight.T.copy()}
    for name, stem, down in (
        ("lora", module, weight),
        ("lora-nan", module, np.full_like(weight, np.nan)),
        ("lora-cut", module, weight),
        ("lora-renamed", "model.layers.0.self_attn.query_proj", weight),
        ("lora-saved", module, weight),
    ):
        tensors: dict[str, Any] = {f"{stem}.{part}": value for part, value in factors.items()}
        tensors[f"{stem}.lora_A.weight"] = down
        if name == "lora-saved":
            tensors["model.norm.weight"] = np.ones(32, np.float32)
        write_adapter(root / name, tensors)
    path = root / "lora-cut" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def changed_json(path: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Store a JSON object with a change elsewhere."""
    content = json.loads(path.read_text())
    change(content)
    out.write_text(json.dumps(content))


def flip_last_byte(path: Path) -> None:
    """Change a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def become_newer(content: dict[str, Any]) -> None:
    """Give a stored object a format that is not known yet."""
    content["format"] = f"{content['format'][:-1]}99"


def write_outputs(root: Path) -> None:
    """Make what other commands begin with: a snapshot, plans, a pack, a composite; and copies of them that lie."""
    blocks = ["--block-elements", str(BLOCK_ELEMENTS)]
    for line in (
        ["analyze", "family/base", "family/expert-1", "family/expert-2", *blocks],
        ["merge", "linear.yml", "out", "--threads", "2"],
        ["plan", "linear.yml", "--budget", "50%", *blocks, "-o", "good.plan.json"],
        ["plan", "linear.yml", "--all", "-o", "all.plan.json"],
        ["plan", "moving.yml", "--budget", "50%", *blocks, "-o", "stale.plan.json"],
        ["merge", "moving.yml", "of-moving", "--threads", "2"],
        ["pack", "family/base", "family/expert-1", "-o", "packed"],
        ["tailor", "compose", "compose.yml", "composed"],
    ):
        ran = run_command([*line, "--quiet"] if line[0] != "plan" else line)
        assert ran.exit_code == 0, ran.err
    flip_last_byte(root / "odd/moving/model.safetensors")
    plan = root / "good.plan.json"
    changed_json(plan, root / "newer.plan.json", become_newer)
    changed_json(plan, root / "digest.plan.json", lambda content: content.update(seed=77))
    changed_json(plan, root / "field.plan.json", lambda content: content.update(colour="red"))
    (root / "text.plan.json").write_text("not JSON")
    (root / "list.plan.json").write_text("[]")
    for name in ("no-manifest", "newer", "lie", "no-json", "damaged", "extra"):
        shutil.copytree(root / "out", root / f"out-{name}")
    (root / "out-no-manifest/mergepipe.json").unlink()
    manifest = root / "out/mergepipe.json"
    changed_json(manifest, root / "out-newer/mergepipe.json", become_newer)
    changed_json(manifest, root / "out-lie/mergepipe.json", lambda content: content.update(sid="0" * 64))
    (root / "out-no-json/mergepipe.json").write_text("{")
    (root / "out-extra/mine.txt").write_text("mine")
    flip_last_byte(root / "out-damaged/model.safetensors")
    for name in ("cut", "newer", "no-header"):
        shutil.copytree(root / "packed/expert-1", root / f"packed-{name}")
    header = root / "packed/expert-1/mergepipe-store.json"
    changed_json(header, root / "packed-newer/mergepipe-store.json", become_newer)
    (root / "packed-no-header/mergepipe-store.json").write_text("{")
    data = max((root / "packed-cut").iterdir(), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-100])


TAILOR_RECIPES: Mapping[str, str] = {
    "empty": "",
    "unknown-key": "default: global_step9\ntkae: []\n",
    "no-default": "take: []\n",
    "gone": "default: global_step8\n",
    "unit": "default: global_step9\ntake: [{from: global_step7, units: [layer x]}]\n",
    "layers": "default: global_step9\ntake: [{from: global_step7, units: [layers 7-9]}]\n",
    "overlap": "default: global_step9\ntake: [{from: global_step7, units: [layers 0-1]}, "
    "{from: global_step7, units: [layers 1-2]}]\n",
    "formats": "default: global_step9\ntake: [{from: checkpoint-7, units: [embed]}]\n",
    "model": "default: family/base\n",
    "rank-gone": "default: step-lacks-a-rank\n",
    "cut": "default: step-cut\n",
}


def write_tailor_inputs(root: Path) -> None:
    """Write recipes of compositions, and checkpoints that lie."""
    for name, text in TAILOR_RECIPES.items():
        (root / f"tailor-{name}.yml").write_text(text)
    shutil.copytree(root / "global_step7", root / "step-lacks-a-rank")
    max((root / "step-lacks-a-rank").glob("*optim*")).unlink()
    shutil.copytree(root / "global_step7", root / "step-cut")
    path = max((root / "step-cut").glob("*optim*"))
    path.write_bytes(path.read_bytes()[:-50])
    shutil.copytree(root / "checkpoint-7", root / "hf-no-weights")
    (root / "hf-no-weights/model.safetensors").unlink()
    np.save(root / "array.npy", np.zeros(3))


RECORDS = Path(__file__).parents[1] / "golden/surface/bad-inputs"
N_CASES = 326
PROGRESS = re.compile(r"\w+: +\d+%, ")
FAULTS: Mapping[str, Callable[[int], BaseException | None]] = {
    "no-space": lambda _: OSError(errno.ENOSPC, "No space left on device"),
    "published": lambda fd: OSError(errno.EIO, "I/O error") if _is_beside("published", fd) else None,
    "interrupted": lambda _: KeyboardInterrupt(),
    "defect": lambda _: KeyError("x"),
}
"""What `os.fsync` raises while an output of this name is made."""


def _is_beside(name: str, fd: int) -> bool:
    return Path(name).exists() and os.path.samestat(os.fstat(fd), Path().stat())


def recorded_cases() -> dict[str, list[str]]:
    """The command lines that are recorded, by the name of the file: each fails, or says what is wrong."""
    texts = {path.stem: path.read_text() for path in RECORDS.glob("*.txt") if path.stem != "faults"}
    return {name: re.findall(r"^((?! ).*): \d+$", text, re.MULTILINE) for name, text in texts.items()}


def failure_text(arguments: list[str], places: Mapping[str, str]) -> str:
    """Run a command that is to fail; its exit code and its lines."""
    ran = run_command(arguments)
    assert ran.exit_code != 0, arguments
    lines = [line for line in steady_text(ran.err, places).splitlines() if not PROGRESS.match(line)]
    return "".join([f"{' '.join(arguments)}: {ran.exit_code}\n", *(f"    {line}\n" for line in lines)])


def fault_text(arguments: list[str], error_of: Callable[[int], BaseException | None], places: Mapping[str, str]) -> str:
    """The same where `os.fsync` fails."""

    def fail(fd: int) -> None:
        error = error_of(fd)
        if error is not None:
            raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        return failure_text(arguments, places)


def test_bad_inputs__fail_as_was_recorded(tmp_path: Path, goldens: Goldens) -> None:
    texts: dict[str, str] = {}
    cases = recorded_cases()
    with workplace(tmp_path):
        write_recipes(tmp_path)
        write_odd_models(tmp_path)
        write_tailor_inputs(tmp_path)
        write_outputs(tmp_path)
        before = {path.name for path in tmp_path.iterdir()}
        places = {str(tmp_path): "<root>"}
        for title, lines in cases.items():
            texts[title] = "\n".join(failure_text(line.split(), places) for line in lines)
        assert {path.name for path in tmp_path.iterdir()} - before == set()
        texts["faults"] = "\n".join(
            fault_text(["merge", "linear.yml", name, "-q"], error_of, places) for name, error_of in FAULTS.items()
        )
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MergePipeError)]
    exit_codes = re.findall(r"^\S.*: (\d+)$", "\n".join(texts.values()), re.MULTILINE)
    assert len(exit_codes) >= N_CASES
    words = {word for lines in cases.values() for line in lines for word in line.split()}
    assert {*(f"bad-{name}.yml" for name in RECIPES), *(f"tailor-{name}.yml" for name in TAILOR_RECIPES)} <= words
    assert {str(kind.exit_code) for kind in kinds} - {str(MergePipeError.exit_code)} <= set(exit_codes)
    assert {*(name.replace(" ", "-") for name in command_names()), "mergepipe"} == set(cases)
    goldens.check("bad-inputs", texts)
