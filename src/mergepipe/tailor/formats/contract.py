"""The contract of training formats: how a directory is recognised and opened, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mergepipe.checkpoints.directory import STORE_HEADER_NAME
from mergepipe.checkpoints.inert_values import PickledTensor
from mergepipe.checkpoints.torch_file import TorchArchive
from mergepipe.core.blocks import DTYPES, Span
from mergepipe.errors import unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import AdamStep, Framework, Piece, TrainingCheckpoint
from mergepipe.tailor.formats.pickle_node import Node, PicklePath, read_scalar

# --- the contract of training formats: how a directory is recognised and opened ---


@dataclass(frozen=True, slots=True)
class TrainingFormat:
    """A framework's layout of training state. `TrainingCheckpoint.format` is its name.

    `recognise` tells by the names in a directory, no file is read, or by the path being a file. `open` takes where the
    checkpoint will lie, too, and raises as `open_training_checkpoint`. `looked_for` are the files that it is recognised
    by, for the message about an unknown directory. `state_file` holds the state of the run: of partial checkpoints
    only those with it can resume, under `partial_frameworks`. `records_step` says whether the step is recorded in a
    place of its own, not only in the newest counter.
    """

    name: str
    looked_for: str
    recognise: Callable[[Store, Location], bool]
    open: Callable[[Store, Location, Location], TrainingCheckpoint]
    state_file: str = ""
    records_step: bool = False
    partial_frameworks: frozenset[Framework] = frozenset()


# --- checkpoints that are recognised and not read: each is refused by its name ---


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A format by the names in its directory, and what can be done."""

    name: str
    is_shown_by: Callable[[frozenset[str]], bool]
    hint: str


_MEGATRON_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}", re.ASCII)
_FOREIGN = (
    ForeignFormat(
        "a packed checkpoint", lambda names: STORE_HEADER_NAME in names,
        "unpack it first: mergepipe unpack PACK -o FOLDER",
    ),
    ForeignFormat(
        "a Megatron checkpoint of its format `torch`",
        lambda names: "model_optim_rng.pt" in names or any(map(_MEGATRON_RANK.fullmatch, names)),
        "convert it to torch_dist or to a Hugging Face model with Megatron's own tools",
    ),
    ForeignFormat(
        "an FSDP checkpoint of Accelerate with a file for each rank",
        lambda names: bool({"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"} & names),
        "save full or sharded state dicts: state_dict_type FULL_STATE_DICT or SHARDED_STATE_DICT",
    ),
)  # fmt: skip


def refuse_foreign(store: Store, path: Location) -> None:
    """Refuse a directory of another program's format that is not read, and say whose it is.

    Raises:
        UnsupportedError: `checkpoint.unsupported`.
    """
    names = frozenset(entry.name for entry in store.list(path))
    foreign = next((candidate for candidate in _FOREIGN if candidate.is_shown_by(names)), None)
    if foreign is not None:
        raise unsupported(path, f"is {foreign.name}, which is not read", foreign.hint)


# --- weights alone, as `save_only_model` leaves them ---


NO_OPTIMIZER = "the optimizer's state: only weights are here"
_NUMBERED = re.compile(r".*?(\d{1,12})", re.ASCII)


def step_of_name(name: str) -> int | None:
    """Return the number that a directory's name ends in, as `checkpoint-400` and `global_step400` do."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


# --- what optimizers keep

_FOREIGN_STATES = {
    "exp_avg_sq_row": "Adafactor", "exp_avg_sq_col": "Adafactor", "qmap1": "an 8-bit optimizer",
    "absmax1": "an 8-bit optimizer", "state1": "an 8-bit optimizer", "shadow": "an optimizer with shadow weights",
}  # fmt: skip


def refuse_foreign_states(kinds: frozenset[str], where: object) -> None:
    """Refuse the states of an optimizer whose states are not arrays of the parameter's shape.

    Raises:
        UnsupportedError: `checkpoint.unsupported`, with the optimizer's name.
    """
    kind = next((kind for kind in _FOREIGN_STATES if kind in kinds), None)
    if kind is not None:
        hint = "only optimizers whose states have their parameter's shape are composed, as AdamW"
        raise unsupported(where, f"holds the state {kind!r} of {_FOREIGN_STATES[kind]}", hint)


def read_counter(
    store: Store, archive: TorchArchive, node: Node, path: PicklePath, parameters: tuple[str, ...] = ()
) -> AdamStep:
    """Read the step counter at `path` of an archive's pickle: a number there, or a tensor of one element."""
    if not isinstance(node.value, PickledTensor):
        return AdamStep(float(node.integer()), parameters, DTYPES["I64"], entries=((archive.file, path),))
    tensor = archive.locate(node.value, node.path)
    if tensor.n_elements != 1:
        raise node.error(f"a step counter has shape {tensor.shape}")
    value = read_scalar(store, tensor.file, tensor.offset, tensor.dtype)
    cell = Piece(tensor.file, tensor.offset, tensor.nbytes, Span(0, 1))
    return AdamStep(value, parameters, tensor.dtype, (cell,))
