"""One file of `torch.save`, as loops under torchrun and Lightning leave it: its weights, by their names."""

from __future__ import annotations

from mergepipe.checkpoints.torch_file import SUFFIXES, read_torch_weights, read_torch_zip
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import NO_OPTIMIZER, TrainingFormat, step_of_name
from mergepipe.tailor.selection import model_units

ONE_FILE_FORMAT = "torch-file"
_STEPS = ("global_step", "step", "iter_num", "iteration")


def read_one_file(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read a file with a state dict, by itself or under `model`, `state_dict` and the like; of tensors, nothing.

    Its optimizer, if there is one, numbers parameters in an order that the file does not tell: it gives weights alone.
    """
    entries = read_torch_weights(store, path).entries
    named = {entry.name: entry for entry in entries}
    in_order = [named[name] for name in model_units(named).names]  # embeddings own what a head is tied to
    owners = {(entry.offset, entry.nbytes): entry.name for entry in reversed(in_order) if entry.nbytes}
    owner_of = {entry.name: owners.get((entry.offset, entry.nbytes), entry.name) for entry in in_order}
    parameters = {name: named[name].shape for name, owner in owner_of.items() if owner == name}
    tied = {name: owner for name, owner in owner_of.items() if owner != name}
    return TrainingCheckpoint(
        path=path,
        root=path,
        format=ONE_FILE_FORMAT,
        step=_step(read_torch_zip(store, path).root, home),
        units=model_units(parameters, tied),
        parameters=parameters,
        states={(name, WEIGHT): StoredState.whole(name, WEIGHT, named[name]) for name in parameters},
        missing=(NO_OPTIMIZER,),
        has_state=False,
        lender=path.parent,
    )


def _step(root: object, home: Location) -> int:
    """Return the step that the file or its name tells; 0 where neither does."""
    told = (root.get(key) for key in _STEPS) if isinstance(root, dict) else ()
    stem = home.name.rpartition(".")[0] or home.name
    return next((step for step in told if type(step) is int and step >= 0), step_of_name(stem) or 0)


ONE_FILE = TrainingFormat(
    ONE_FILE_FORMAT, f"a file of torch.save ({', '.join(SUFFIXES)})", is_file, read_one_file
)  # fmt: skip
