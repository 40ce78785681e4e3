"""Runs every command of an installed mergepipe once: a script for an environment with nothing but the wheel.

`python tests/wheel/every_command.py` with the environment's own interpreter; fails where a command is left out, where
one fails, or where a package that the wheel does not require can be imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mergepipe.cli.app import build_command
from mergepipe.core.blocks import F16
from support.families import TINY, write_family
from support.training_trees import decay_groups, decoder_shapes, known_states, write_trainer_files, write_zero12

NOT_REQUIRED = (
    "torch",
    "transformers",
    "safetensors",
    "ml_dtypes",
    "pytest",
    "hypothesis",
    "jsonschema",
    "peft",
    "numba",
    "llvmlite",
)
RECIPE = """merge_method: ties
base_model: family/base
models:
  - {model: family/expert-1, parameters: {weight: 0.6, density: 0.2}}
  - {model: family/expert-2, parameters: {weight: 0.4, density: 0.2}}
dtype: bfloat16
"""
MIXTURE = """base_model: family/base
gate_mode: random
experts: [{source_model: family/expert-1}, {source_model: family/expert-2}]
"""
COMPOSITION = """default: run/checkpoint-7
take:
  - {from: run/checkpoint-3, units: ["layers 0", embed]}
"""
COMMANDS = """
--version
--completion bash
check recipe.yml
analyze family/base family/expert-1 family/expert-2
merge recipe.yml merged
moe mixture.yml mixture
plan recipe.yml --budget 40% -o plan.json
run plan.json planned
status plan.json planned
explain planned
sweep recipe.yml --budgets 25%,100% --html sweep.html
search search.yml -o best --evaluate true
pack family/base family/expert-1 -o packed
unpack packed/expert-1 -o unpacked
pack family/expert-2 --base family/base -o packed
lora extract family/base family/expert-1 -o adapter --rank 2
lora apply family/base adapter -o adapted
lora check family/base adapter adapted
lora merge adapter adapter -o adapters --method ties --density 0.5
lora convert adapter --to vllm -o served
pack family/base family/expert-1 --to sparse -o patches
unpack patches/expert-1 --base family/base -o patched
ls
show merged
lineage merged
push merged s3://bucket/merged
verify merged --deep 5%
repair merged
replay merged again
without family/expert-1 merged -o remade --dry-run
diff merged planned --json
gc --dry-run
catalog stats
catalog rebuild
tailor recipe --run run --strategy parity
tailor inspect run/checkpoint-3 run/checkpoint-7
tailor check composition.yml
tailor compose composition.yml composite
tailor diff run/checkpoint-3 run/checkpoint-7
tailor average run/checkpoint-3 run/checkpoint-7 -o averaged
tailor export run/checkpoint-7 -o exported --dtype bfloat16
verify composite
""".strip()
MERGEKIT_COMMANDS = ("mergepipe-yaml --help", "mergepipe-yaml recipe.yml by-other-flags --allow-crimes")
REFUSED = {  # the exit code without the extra that each needs
    "mergepipe push merged s3://bucket/merged": 6,
    "mergepipe search search.yml -o best --evaluate true": 6,
}


def all_commands() -> set[str]:
    """Every command of the command line, as it is typed."""
    names: set[str] = set()

    def add(group: object, prefix: str) -> None:
        for name, command in getattr(group, "commands", {}).items():
            if hasattr(command, "commands"):
                add(command, f"{prefix}{name} ")
            else:
                names.add(f"{prefix}{name}")

    add(build_command(), "")
    return names


def write_inputs(root: Path) -> None:
    """Write a small model family, a recipe, and two ZeRO-2 checkpoints with tied embeddings."""
    write_family(root / "family", TINY, 2, dtype=F16)
    (root / "recipe.yml").write_text(RECIPE)
    (root / "search.yml").write_text(RECIPE.replace("0.6", "{search: [0.0, 1.0]}"))
    (root / "composition.yml").write_text(COMPOSITION)
    (root / "mixture.yml").write_text(MIXTURE)
    shapes = decoder_shapes(tied=True)
    for number, step in enumerate((3, 7)):
        folder = root / "run" / f"checkpoint-{step}"
        known = known_states(shapes, seed=number, step=step)
        write_trainer_files(folder, known, tied=True)
        write_zero12(folder / f"global_step{step}", known, decay_groups(shapes), 2)
        (folder / "latest").write_text(f"global_step{step}")


def run_all(root: Path) -> Iterator[str]:
    """Run every line by the installed programs; yield what went wrong."""
    for line in all_lines():
        program, *arguments = line.split()
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False, env={"MERGEPIPE_HOME": str(root / "home")}
        )
        print(f"{done.returncode:3d}  {line}", flush=True)
        if done.returncode != REFUSED.get(line, 0):
            yield f"{line}: exit {done.returncode}\n{done.stdout}{done.stderr}"


def all_lines() -> list[str]:
    """What is run, as it is typed in a shell."""
    return [f"mergepipe {line}" for line in COMMANDS.splitlines()] + [*MERGEKIT_COMMANDS]


def main() -> int:
    """Run everything; 1 if anything is wrong."""
    problems = [
        f"{name} is installed, and the wheel does not require it"
        for name in NOT_REQUIRED
        if importlib.util.find_spec(name)
    ]
    run_here = {name for name in all_commands() if any(line.startswith(name) for line in COMMANDS.splitlines())}
    problems += [f"mergepipe {name} is not run here" for name in sorted(all_commands() - run_here)]
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        problems += run_all(Path(folder))
    print("\n".join(problems) or f"{len(all_lines())} commands passed", file=sys.stderr if problems else sys.stdout)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
