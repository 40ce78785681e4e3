"""Read the files of every Hugging Face Trainer directory, whatever keeps its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.tokenizers.vocabulary_files import CONFIG_NAME
from mergepipe.core.blocks import Span
from mergepipe.core.strict_json import JsonValue, parse_object
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import TRAINER_JSON_BYTES
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import Piece, StoredState

TRAINER_STATE_NAME = "trainer_state.json"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
LOSS_SCALER_NAME = "loss_scaler.pt"
"""Of partial checkpoints: the fields of DeepSpeed's loss scaler, which it keeps in its own files."""


def read_json(store: Store, path: Location) -> dict[str, JsonValue]:
    """Read a JSON object of the checkpoint directory, strictly."""
    return parse_object(store.read_small(path, TRAINER_JSON_BYTES), where=path, code="tailor.not_json")


def read_config(store: Store, folder: Location) -> dict[str, JsonValue]:
    """Read the model's configuration; empty where there is none."""
    return read_json(store, folder / CONFIG_NAME) if is_file(store, folder / CONFIG_NAME) else {}


def read_global_step(store: Store, folder: Location) -> int:
    """The step the Trainer resumes at."""
    path = folder / TRAINER_STATE_NAME
    step = read_json(store, path).get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CorruptError.of("tailor.hf.step", path, "'global_step' is not a count")
    return step


def weight_state(tensor: TensorEntry, kind: str) -> StoredState:
    """A safetensors entry as a state."""
    piece = Piece(tensor.file, tensor.offset, tensor.nbytes, Span(0, tensor.n_elements))
    return StoredState(tensor.name, kind, tensor.dtype, tensor.shape, (piece,) if tensor.n_elements else ())


def tied_aliases(config: Mapping[str, JsonValue], parameters: Mapping[str, object]) -> dict[str, str]:
    """The head of a model that shares its input embedding, by the names both usually have."""
    if config.get("tie_word_embeddings") is False or "lm_head.weight" in parameters:
        return {}
    embeddings = ("model.embed_tokens.weight", "transformer.wte.weight")
    owner = next((name for name in embeddings if name in parameters), None)
    return {"lm_head.weight": owner} if owner is not None else {}
