"""What the frameworks load equals what our byte ranges hold. Needs the environment of requirements/train.txt."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Packing, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.dcp import unpack_piece
from mergepipe.tailor.formats.hf_trainer import ORDERS, defined_order, trainer_order
from mergepipe.tailor.formats.registry import open_training_checkpoint
from support.adam_steps import step_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("MERGEPIPE_TRAIN_PYTHON", HERE.parents[1] / ".venv-train" / "bin" / "python"))
NUMPY_TYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
STEPS = (2, 4)
FOLDERS = {
    "hf": "checkpoint-{}", "dcp": "step-{}", "dcp-tied": "step-{}", "accelerate-full": "step-{}",
    "accelerate-sharded": "step-{}", "verl": "step-{}", "hf-zero2": "checkpoint-{}", "hf-zero3": "checkpoint-{}",
}  # fmt: skip
KINDS = (
    "zero1", "zero2", "zero3", "zero1-bf16", "zero2-bf16", "zero3-bf16", "zero2-tied", "zero2-robin", "zero2-fp16",
    "zero3-fp16", "zero2-offload", "zero3-offload", "zero2-layers", "zero3-layers", "hf", "dcp", "dcp-tied",
    "hf-zero2", "hf-zero3", "accelerate-full", "accelerate-sharded", "verl",
)  # fmt: skip
needs_frameworks = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no environment for training: requirements/train.txt"
)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run really trained by the framework, with what it loads from each checkpoint beside it."""
    kind = str(request.param)
    out = tmp_path_factory.mktemp("runs") / kind
    subprocess.run([PYTHON, HERE / "make_checkpoints.py", kind, out], check=True, capture_output=True, timeout=600)
    return kind, out


def opened(kind: str, out: Path, step: int) -> tuple[TrainingCheckpoint, LocalStore]:
    store = LocalStore()
    return open_training_checkpoint(store, Location.local(out / FOLDERS.get(kind, "global_step{}").format(step))), store


def stored_values(state: StoredState, store: LocalStore) -> npt.NDArray[np.float32]:
    flat = np.full(state.n_elements, np.nan, np.float32)
    for piece in state.pieces:
        found = unpack_piece(store, piece, state.dtype) if piece.packing is Packing.TORCH_ZIP else piece
        raw = found.file.local_path.read_bytes()[found.offset : found.offset + found.nbytes]
        flat[found.span.start : found.span.stop] = np.frombuffer(raw, NUMPY_TYPES[state.dtype.name]).astype(np.float32)
    return flat.reshape(state.shape)


@needs_frameworks
@pytest.mark.parametrize("step", STEPS)
def test_open_training_checkpoint__holds_what_the_framework_loads(run: tuple[str, Path], step: int) -> None:
    checkpoint, store = opened(*run, step)
    truth = np.load(run[1] / f"truth-{step}.npz")
    compared, wrong = 0, []
    for key in truth.files:
        kind, _, name = key.partition("/")
        owner = checkpoint.units.tied.get(name, name)
        if kind == "step":
            counter = step_of(checkpoint, owner)
            matches = counter is not None and counter.value == truth[key]
        elif (owner, kind) in checkpoint.states:
            matches = np.array_equal(stored_values(checkpoint.states[owner, kind], store), truth[key])
        else:
            matches = kind == WEIGHT and checkpoint.stage == 3  # stage 3 computes them from the masters
        compared += 1
        wrong += [] if matches else [key]
    assert (wrong, compared >= 87, checkpoint.step, checkpoint.missing) == ([], True, step, ())


@needs_frameworks
def test_open_training_checkpoint__masters_cast_to_the_stored_weights(run: tuple[str, Path]) -> None:
    checkpoint, store = opened(*run, STEPS[-1])
    pairs = [(checkpoint.states[n, FP32], checkpoint.states[n, WEIGHT]) for n in checkpoint.parameters
             if (n, FP32) in checkpoint.states and (n, WEIGHT) in checkpoint.states]  # fmt: skip
    wrong = []
    for master, weight in pairs:
        cast = stored_values(master, store).astype(NUMPY_TYPES[weight.dtype.name]).astype(np.float32)
        wrong += [] if np.array_equal(cast, stored_values(weight, store)) else [weight.parameter]
    stages_with_both = run[0].startswith(("zero1", "zero2", "hf-zero2"))
    assert (wrong, bool(pairs)) == ([], stages_with_both)


@needs_frameworks
def test_open_training_checkpoint__finds_every_unit(run: tuple[str, Path]) -> None:
    checkpoint, _ = opened(*run, STEPS[0])
    tied = run[0].endswith("-tied")
    expected = ["embed", "layer 0", "layer 1", "layer 2", "norm", *([] if tied else ["lm_head"])]
    assert [str(u) for u in checkpoint.units.parameters] == expected
    assert bool(checkpoint.units.tied) == tied


@needs_frameworks
def test_trainer_order__is_that_of_transformers() -> None:
    found = subprocess.run(
        [PYTHON, HERE / "list_parameters.py"], check=True, capture_output=True, text=True, timeout=300
    )
    orders = json.loads(found.stdout)
    for case, (decayed, plain, model_type) in orders.items():
        defined = defined_order(model_type, sorted(decayed + plain))
        assert defined is not None, case
        assert trainer_order(defined) == (tuple(decayed), tuple(plain)), case
    assert {model_type for _, _, model_type in orders.values()} == set(ORDERS)


@needs_frameworks
def test_unknown_architecture__is_asked_from_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from mergepipe.tailor.formats.hf_trainer import ask_transformers as ask;"
        "print(*map(len, ask(Path(sys.argv[1]), 'gpt_neox')))"
    )
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": 2,
              "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1] / "src"))
    asked = subprocess.run(
        [PYTHON, "-c", script, tmp_path], check=True, capture_output=True, text=True, env=environment, timeout=300
    )
    assert asked.stdout.split() == [
        "10",
        "18",
    ]  # 4 matrices a layer, both embeddings; 4 biases and 2 norms a layer, the last norm
