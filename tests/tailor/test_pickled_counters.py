"""Step counters that are numbers in the pickle itself, as fused optimizers keep them: written like any other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from composing import Pair, checkpoint_at, edit, make_pair, wrong_values

from mergepipe.checkpoints.torch_file import read_torch_zip
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import PicklePath
from mergepipe.tailor.formats.contract import Node
from mergepipe.tailor.formats.deepspeed import base_optimizer_path
from support.stores import MetadataStore
from support.training_trees import KnownStates, decay_groups, write_hf, write_zero3, write_zero12

TAKE_NORMS = "default: new\ntake: [{from: old, units: [layers all, norm, embed]}]\n"


def write_hf_with_numbers(folder: Path, known: KnownStates) -> None:
    write_hf(folder, known)
    edit(folder / "optimizer.pt", {("state", i, "step"): known.step for i in range(len(known.shapes))})


def write_fused(folder: Path, known: KnownStates, stage: int) -> None:
    """ZeRO around a fused optimizer: the counter is an option of the parameter group."""
    groups = decay_groups(known.shapes)
    if stage == 3:
        write_zero3(folder, known, groups, 2)
    else:
        write_zero12(folder, known, groups, 2, stage=stage)
    for path in folder.glob("*optim_states.pt"):
        edit(
            path, dict(fused(Node(read_torch_zip(MetadataStore(), Location.local(path)).root, path.name), known, stage))
        )


def fused(root: Node, known: KnownStates, stage: int) -> Iterator[tuple[PicklePath, object]]:
    base = base_optimizer_path(stage)
    for number, entry in root.at((*base, "state")).items():
        assert isinstance(number, int)
        yield (*base, "state", number), {k: v for k, v in entry.mapping().items() if k != "step"}
    options = [{"lr": 0.1, "step": known.step, "params": [i]} for i in range(2)]
    yield (*base, "param_groups"), options


def counters(pair: Pair) -> dict[str, float]:
    made = checkpoint_at(pair.out)
    return {name: step.value for step in made.steps for name in step.parameters}


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_compose__writes_counters_of_optimizer_pt_and_of_fused_optimizers(tmp_path: Path, stage: int | None) -> None:
    pair = make_pair(tmp_path, write_hf_with_numbers if stage is None else partial(write_fused, stage=stage))
    pair.compose(TAKE_NORMS)
    old = [name for name in pair.old.shapes if name != "lm_head.weight"]
    assert wrong_values(pair.out, pair, old) == []
    taken = old if stage is None else [name for name in old if "norm" in name]  # others share a counter with lm_head
    assert counters(pair) == {name: 7.0 if name in taken else 9.0 for name in pair.old.shapes}
