"""Open the models that a recipe names as checkpoints, adapters and deltas included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from blake3 import blake3

from mergepipe.checkpoints.adapted_tensors import Adapted
from mergepipe.checkpoints.adapters import apply_adapter, open_adapter, with_own_head
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, TensorEntry
from mergepipe.checkpoints.directory import ADAPTER_NAMES, is_adapter, list_names, open_checkpoint, require_text_path
from mergepipe.checkpoints.quantised import refuse_quantised
from mergepipe.checkpoints.stacked_experts import in_layout_of
from mergepipe.core.blocks import DTypeKind
from mergepipe.deltastore.header import is_store
from mergepipe.errors import UnsupportedError
from mergepipe.snapshots.composite import is_composite, read_composite
from mergepipe.snapshots.manifest import MANIFEST_NAME
from mergepipe.storage.contract import Store, is_folder
from mergepipe.storage.location import Location


class NamedModel(Protocol):
    """A model as a recipe names it: its path, the adapter to apply, whether it holds deltas."""

    @property
    def path(self) -> Location: ...

    @property
    def adapter(self) -> Location | None: ...

    @property
    def is_delta(self) -> bool: ...


def open_model(
    store: Store,
    model: NamedModel,
    base: Checkpoint | None,
    *,
    as_weights: bool = False,
    allow_unapplied: Sequence[str] = (),
) -> Checkpoint:
    """Open one model of a recipe; reads headers and configurations, and a few samples of a delta's base.

    `base` is what deltas and adapters are taken against and whose layout of fused tensors is followed; None for the
    base itself, which must be full weights. An adapter that is applied to the base is taken for its differences alone,
    unless `as_weights`. What it changes and its base lacks is an error unless a pattern of `allow_unapplied` has it.
    """
    for path in (model.path, model.adapter):
        if path is not None:
            require_text_path(path)
    if model.adapter is None:
        return _open(store, model.path, base, is_delta=model.is_delta)
    if base is not None and not as_weights and _is_same(store, model.path, base) and not _is_adapted(base):
        return open_adapter(store, model.adapter, base, allow_unapplied)
    weights = _open(store, model.path, base)
    if weights.kind is not CheckpointKind.FULL:
        raise UnsupportedError.of(
            "model.unsupported", model.path, "holds differences from a base; an adapter applies to weights only"
        )
    if as_weights or base is None:
        weights = with_own_head(store, weights, model.adapter)
    return apply_adapter(weights, open_adapter(store, model.adapter, weights, allow_unapplied))


def _open(store: Store, path: Location, base: Checkpoint | None, *, is_delta: bool = False) -> Checkpoint:
    """Open what lies at one path; `is_delta`: plain weights there are differences."""
    if is_store(store, path):
        from mergepipe.deltastore.checkpoint import open_store, read_header  # compiled: only packed experts wait for it

        if base is None and not read_header(store, path).header.base:
            return open_store(store, path, None)
        return in_layout_of(base := _required(base, path, "a delta store"), open_store(store, path, base))
    if is_folder(store, path):
        names = list_names(store, path)
        _refuse_composite(store, path, names)
        if is_adapter(names):
            return open_adapter(store, path, _required(base, path, "an adapter"))
    elif path.name in ADAPTER_NAMES:
        return open_adapter(store, path.parent, _required(base, path, "an adapter"))
    opened = open_checkpoint(store, path)
    refuse_quantised(store, opened)
    if is_delta:
        _required(base, path, "a delta")
        opened = _as_delta(opened)
    return opened if base is None else in_layout_of(base, opened)


def _as_delta(weights: Checkpoint) -> Checkpoint:
    """Mark the tensors as deltas; header digests differ from those of the same files read as weights."""
    tensors = {
        name: replace(tensor, is_delta=True)
        if isinstance(tensor, TensorEntry) and tensor.dtype.kind is DTypeKind.FLOAT
        else tensor
        for name, tensor in weights.tensors.items()
    }
    files = tuple(replace(file, header_digest=_delta_digest(file.header_digest)) for file in weights.files)
    return replace(weights, tensors=MappingProxyType(tensors), files=files, kind=CheckpointKind.DELTA)


def _delta_digest(header_digest: str) -> str:
    return blake3(f"delta {header_digest}".encode()).hexdigest(length=16)


def _required(base: Checkpoint | None, path: Location, what: str) -> Checkpoint:
    if base is None:
        raise UnsupportedError.of(
            "model.unsupported", path, f"is {what}, but full weights are needed here",
            "name its base here, and it as an expert",
        )  # fmt: skip
    return base


def _refuse_composite(store: Store, path: Location, names: frozenset[str]) -> None:
    if MANIFEST_NAME in names and is_composite(store, path) and not read_composite(store, path).is_model:
        raise UnsupportedError.of(
            "model.unsupported", path, "is a composite, a training checkpoint made by `mergepipe tailor`",
            "merge the weights that are saved after training is resumed from it",
        )  # fmt: skip


def _is_same(store: Store, path: Location, base: Checkpoint) -> bool:
    real_path = store.real_path(path)
    return real_path is not None and real_path == store.real_path(base.path)


def _is_adapted(base: Checkpoint) -> bool:
    return any(isinstance(tensor, Adapted) for tensor in base.tensors.values())
