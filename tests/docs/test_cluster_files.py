"""The files that the guide shows for clusters are sound, and their workers make all parts, each once."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "many-machines.md"
STUBS = 'srun() { "$@"; }; mergepipe() { echo "$@"; }; '


def shown(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def printed(script: str, **variables: str) -> list[str]:
    """What a script prints, a command that it runs in each line."""
    subprocess.run(["bash", "-n", "-c", script], check=True)
    environment = {"PATH": "/usr/bin:/bin", **variables}
    ran = subprocess.run(["bash", "-eu", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def part_of(command: str) -> str:
    words = shlex.split(command)
    assert words[:1] == ["run"]
    return words[words.index("--part") + 1]


def test_slurm_array__makes_every_part_once() -> None:
    script, *lines_for_packs = shown("bash")
    (array,) = re.findall(r"#SBATCH --array=1-(\d+)\n", script)
    commands = [printed(STUBS + script, SLURM_ARRAY_TASK_ID=str(i)) for i in range(1, int(array) + 1)]
    assert [part_of(command) for (command,) in commands] == [f"{i}/{array}" for i in range(1, int(array) + 1)]
    for lines in lines_for_packs:
        printed_lines = printed(STUBS + lines, SLURM_ARRAY_TASK_ID="3", TMPDIR="/tmp")
        assert {shlex.split(line)[0] for line in printed_lines} == {"pack", "analyze"}
        assert all(f"--part 3/{array}" in line for line in printed_lines)


def test_kubernetes_job__makes_every_part_once() -> None:
    job = yaml.safe_load(shown("yaml")[0])
    n_parts = job["spec"]["completions"]
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    shell, flag, line = container["command"]
    assert (shell, flag) == ("sh", "-c")
    commands = [printed(STUBS + line, JOB_COMPLETION_INDEX=str(i)) for i in range(n_parts)]
    assert [part_of(command) for (command,) in commands] == [f"{i}/{n_parts}" for i in range(1, n_parts + 1)]
