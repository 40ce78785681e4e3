"""Other programs that merge, run as their users run them: a script with torch, and mergekit by its command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recipes import Case

PEER_VENV = Path(".venv-peer")
_NAIVE = Path(__file__).with_name("naive_torch.py")


@dataclass(frozen=True, slots=True)
class Tool:
    """One program, and how to call it for a case, a recipe file and an output directory."""

    name: str
    command: Callable[[Case, Path, Path], Sequence[str]]
    environment: Mapping[str, str]


def installed_peers(venv: Path = PEER_VENV) -> list[Tool]:
    """Return the whole-tensor torch script and mergekit, where `make test-peers` installed what they need."""
    mergekit = venv.absolute() / "bin/mergekit-yaml"
    if not mergekit.exists():
        return []

    def naive(case: Case, _recipe: Path, out: Path) -> Sequence[str]:
        return [str(mergekit.with_name("python")), str(_NAIVE), case.name, str(out), *map(str, case.models)]

    def by_mergekit(_case: Case, recipe: Path, out: Path) -> Sequence[str]:
        return [str(mergekit), str(recipe), str(out), "--lazy-unpickle", "--random-seed", "0", "--quiet"]

    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return [Tool("naive torch", naive, {}), Tool("mergekit", by_mergekit, offline)]
