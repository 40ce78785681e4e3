"""Models and snapshots of this machine, opened as commands open them."""

from __future__ import annotations

from pathlib import Path

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.jobs.snapshots import read_manifest_value
from mergepipe.runs.inputs import Inputs, open_inputs
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage.contract import Store
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats import open_training_checkpoint
from support.stores import MetadataStore


def open_local(path: Path, store: Store | None = None) -> Checkpoint:
    """Open a checkpoint of this machine, through a store that watches what is read, if one is given."""
    return open_checkpoint(LocalStore() if store is None else store, Location.local(path))


def open_recipe(recipe: Path, store: Store | None = None) -> Inputs:
    """Open what a recipe names."""
    return open_inputs(Location.local(recipe), LocalStore() if store is None else store)


def open_training(checkpoint: Path, store: Store | None = None) -> TrainingCheckpoint:
    """Open a training checkpoint."""
    return open_training_checkpoint(LocalStore() if store is None else store, Location.local(checkpoint))


def torch_archive(file: Path) -> TorchArchive:
    """Read what a file of `torch.save` holds, without its tensors."""
    return read_torch_zip(MetadataStore(), Location.local(file))


def manifest_of(snapshot: Path) -> Manifest:
    """Read the manifest of a snapshot."""
    return read_manifest_value(LocalStore(), Location.local(snapshot))
