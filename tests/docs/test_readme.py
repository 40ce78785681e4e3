"""The README's commands run one after another, and print what the README shows, but for numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mergepipe.cli import main
from support.families import TINY, FamilyShape, write_family
from support.training_trees import decay_groups, decoder_shapes, known_states, write_trainer_files, write_zero12

README = Path(__file__).resolve().parents[2] / "README.md"
ADAPTER = "lora extract models/base models/code -o models/adapter --rank 16 --quiet"
VARIES = re.compile(r"\b[0-9a-f]{32}\b|\d[\d.,]*( ?[kMG]?B\b| s\b| ?%|/s\b)*")


def write_inputs(root: Path, shape: FamilyShape, *, layers: int, width: int, vocabulary: int) -> None:
    """Write what the README's commands read below `root`: `models`, `experts.yml`, and the checkpoints in `run`."""
    family = write_family(root / "models", shape, 2)
    for model, name in zip(family.experts, ("math", "code"), strict=True):
        model.rename(root / "models" / name)
    (root / "experts.yml").write_text(blocks("yaml")[0], encoding="utf-8")
    shapes = decoder_shapes(layers, width, vocabulary, tied=True)
    for number, step in enumerate((300, 400)):
        known = known_states(shapes, seed=number, step=step)
        folder = root / "run" / f"checkpoint-{step}"
        write_trainer_files(folder, known, tied=True)
        write_zero12(folder / f"global_step{step}", known, decay_groups(shapes), 2)
        (folder / "latest").write_text(f"global_step{step}", encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def shown() -> list[tuple[str, list[str]]]:
    """The README's commands and the lines that each prints there."""
    text = "\n".join(blocks("console"))
    return [(part.splitlines()[0], part.splitlines()[1:]) for part in re.split(r"^\$ mergepipe ", text, flags=re.M)[1:]]


def arguments(command: str) -> list[str]:
    """The words of a command line, with the names that its patterns stand for in this folder."""
    here = Path()
    return [
        name for word in shlex.split(command) for name in (sorted(map(str, here.glob(word))) if "*" in word else [word])
    ]


def without_numbers(lines: list[str]) -> list[str]:
    return [" ".join(VARIES.sub("N", line).split()) for line in lines if line.strip()]


def test_readme__commands_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    write_inputs(tmp_path, TINY, layers=2, width=16, vocabulary=32)
    assert main(shlex.split(ADAPTER)) == 0
    assert len(shown()) > 4
    for command, lines in shown():
        capsys.readouterr()
        assert main(arguments(command)) == 0, command
        printed = without_numbers(capsys.readouterr().out.splitlines())
        assert [line for line in without_numbers(lines) if line != "..." and line not in printed] == [], command
