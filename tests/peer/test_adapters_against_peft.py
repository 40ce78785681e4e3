"""An adapter opened against its base makes the weights that peft's merge_and_unload makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.core.blocks import BF16
from mergepipe.runs.inputs import open_model
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.fetching import fetched
from support.named_models import named
from support.rounding import decode, encode

pytestmark = pytest.mark.peer

PEER_PYTHON = Path(__file__).parents[2] / ".venv-peer" / "bin" / "python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CASES = {  # and how many tensors the adapter touches
    "plain": 12, "bfloat16": 10, "rank-stabilised": 8, "patterns": 8, "embedding": 3, "head": 8, "bias-all": 10,
    "bias-lora": 4, "transposed": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let peft make and merge every case once."""
    if not PEER_PYTHON.exists() and not os.environ.get("MERGEPIPE_REQUIRE_PEERS"):
        pytest.skip("no .venv-peer: run `make test-peers`")
    root = tmp_path_factory.mktemp("peft")
    command = [str(PEER_PYTHON), str(Path(__file__).with_name("run_peft.py")), str(root)]
    ran = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return root


def merged_value(base: Readable, change: Readable | None) -> NDArray[np.float32]:
    if change is None:
        return fetched(base)
    return fetched(base) + fetched(change) if change.is_delta else fetched(change)


def assert_agrees(found: NDArray[np.float32], expected: Readable) -> None:
    """Float32 to a small tolerance; bf16 to one unit in the last place."""
    theirs = fetched(expected)
    if expected.dtype != BF16:
        np.testing.assert_allclose(found, theirs, rtol=2e-6, atol=2e-7, err_msg=expected.name)
        return
    ours = decode(encode(found, BF16), BF16).reshape(found.shape)
    ulp = np.spacing(np.maximum(np.abs(ours), np.abs(theirs)).astype(np.float32)) * 2.0**16
    assert np.all(np.abs(ours - theirs) <= ulp), expected.name


@pytest.mark.parametrize("case", CASES)
def test_open_adapter__makes_what_peft_makes(cases: Path, case: str) -> None:
    store = LocalStore()
    base = open_model(store, named(Location.local(cases / case / "base")), None)
    merged = open_model(store, named(Location.local(cases / case / "merged")), None)
    adapter = open_model(store, named(Location.local(cases / case / "adapter")), base)
    assert (adapter.kind, len(adapter.tensors)) == (CheckpointKind.ADAPTER, CASES[case])
    assert set(adapter.tensors) <= set(base.tensors)
    for name, expected in merged.tensors.items():
        assert_agrees(merged_value(base.tensors[name], adapter.tensors.get(name)), expected)
    changed = [n for n in adapter.tensors if not np.array_equal(fetched(base.tensors[n]), fetched(merged.tensors[n]))]
    assert len(changed) >= CASES[case] // 2


@pytest.mark.parametrize("case", ["plain", "embedding", "transposed"])
def test_open_model__base_and_adapter_are_what_peft_makes(cases: Path, case: str) -> None:
    store = LocalStore()
    merged = open_model(store, named(Location.local(cases / case / "merged")), None)
    for anchor in (None, merged):
        both = open_model(
            store, named(Location.local(cases / case / "base"), Location.local(cases / case / "adapter")), anchor
        )
        assert (both.kind, list(both.tensors)) == (CheckpointKind.FULL, list(merged.tensors))
        for name, expected in merged.tensors.items():
            assert not both.tensors[name].is_delta
            assert_agrees(fetched(both.tensors[name]), expected)


def test_open_model__an_adapter_of_the_anchor_itself_is_a_delta(cases: Path) -> None:
    store = LocalStore()
    base = open_model(store, named(Location.local(cases / "plain" / "base")), None)
    both: Checkpoint = open_model(
        store, named(Location.local(cases / "plain" / "base"), Location.local(cases / "plain" / "adapter")), base
    )
    assert (both.kind, len(both.tensors)) == (CheckpointKind.ADAPTER, CASES["plain"])
