"""Mixture-of-experts weights in either layout, fused or expert by expert, as stacked tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.architectures import Architecture
from mergepipe.checkpoints.codes import CodedTensor
from mergepipe.checkpoints.contract import Checkpoint, ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded_into
from mergepipe.core.blocks import F32, DType, Span, element_count
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

# --- put tensors together into one: those of one shape along its first dimensions, or pieces of any length ---


@dataclass(frozen=True, slots=True)
class Stacked(ComputedTensor):
    """The elements of `parts` in order, seen in `shape`; float32 where the parts' dtypes differ.

    Law: fetching a span gives the bytes that it has in the concatenation of the parts.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Readable, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        if any(part.is_delta != first.is_delta for part in self.parts):
            raise ValueError(f"{self.name}: parts of different kinds")
        if element_count(self.shape) != sum(part.n_elements for part in self.parts):
            raise ValueError(f"{self.name}: {len(self.parts)} parts, the first of {first.shape}, are not {self.shape}")

    @property
    def dtype(self) -> DType:
        first = self.parts[0].dtype
        return first if all(part.dtype == first for part in self.parts) else F32

    @property
    def stored_dtype(self) -> DType:
        first = self.parts[0].stored_dtype
        return first if all(part.stored_dtype == first for part in self.parts) else F32

    @property
    def is_delta(self) -> bool:
        return self.parts[0].is_delta

    @property
    def is_unit(self) -> bool:
        return any(part.is_unit for part in self.parts)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for part in self.parts for entry in part.stored)

    def pieces(self, span: Span) -> Iterator[tuple[Readable, Span]]:
        """Yield the parts that `span` touches, in order, with the span inside each."""
        start = 0
        for part in self.parts:
            stop = start + part.n_elements
            if start < span.stop and span.start < stop:
                yield part, Span(max(span.start, start) - start, min(span.stop, stop) - start)
            start = stop

    def cost_bytes(self, span: Span) -> int:
        wanted = Span(0, self.n_elements) if self.is_unit and span.n_elements else span
        return sum(part.cost_bytes(inside) for part, inside in self.pieces(wanted))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans, part by part; keeps what its parts keep."""
        dtype, fetches = self.dtype, {id(part): part.opened(files) for part in self.parts}

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            done = 0
            for part, inside in self.pieces(span):
                target = out[done : done + inside.n_elements * dtype.itemsize]
                is_alike = part.dtype == dtype
                raw = target if is_alike else np.empty(inside.n_elements * part.dtype.itemsize, np.uint8)
                fetches[id(part)](inside, raw, purpose)
                if not is_alike:
                    decoded_into(raw, part.dtype.kernel_code, target.view(np.float32))
                done += len(target)

        return fetch


# --- convert mixture-of-experts weights between layouts: fused, or expert by expert ---


_Part = TensorEntry | CodedTensor
ROUTER = -1
_MOST_EXPERTS = 1 << 16
# How the three matrices of one expert are named: by role, as most families do, and by number, as Mixtral does.
_ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_FUSED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_BLOCK = r"(?P<layer>.+)\.(?:mlp|block_sparse_moe|feed_forward|ffn)"
_SINGLE = re.compile(rf"{_BLOCK}\.experts\.(?P<expert>\d{{1,6}})\.(?P<role>{'|'.join(_ROLES)})\.weight")
_FUSED_NAME = re.compile(rf"{_BLOCK}\.experts\.(?P<roles>{'|'.join(_FUSED)})")
_ROUTER_NAME = re.compile(rf"{_BLOCK}\.gate\.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix of one expert of one layer, or the layer's router."""

    layer: str
    expert: int
    role: str


def in_names_of(base: Checkpoint, checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """Return the checkpoint with the names of `base` for weights that loading renames in one of the two."""
    missing = {name for name in base.tensors if name not in checkpoint.tensors}
    changes = {}
    for name in missing:
        stored = architecture.stored_name(name, checkpoint.tensors)
        if stored is not None and stored not in base.tensors:
            changes[stored] = name
    tensors: dict[str, Readable] = {}
    for name, tensor in checkpoint.tensors.items():
        changed = changes.get(name)
        if changed is None and name not in base.tensors:
            changed = architecture.stored_name(name, missing)
        if changed is not None and isinstance(tensor, _Part):
            tensor = replace(tensor, name=changed)
        tensors[tensor.name] = tensor
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def in_layout_of(base: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with expert tensors in the layout of `base`.

    A fused tensor is `Stacked` from the experts' matrices, a matrix is a stretch of the fused tensor; nothing is
    copied. Tensors that do not fit stay as they are.
    """
    missing = [tensor for name, tensor in base.tensors.items() if name not in checkpoint.tensors]
    wanted = {tensor.name: pieces for tensor in missing if (pieces := pieces_of(tensor.name, tensor.shape))}
    if not wanted:
        return checkpoint
    spare = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in base.tensors}
    stock = dict(_stock(spare))
    made: dict[str, Readable] = {}
    used: set[Piece] = set()
    for name, pieces in wanted.items():
        tensor = _made_of(base.tensors[name], [stock[piece] for piece in pieces if piece in stock], len(pieces))
        if tensor is not None:
            made[name] = tensor
            used.update(pieces)
    return replace(checkpoint, tensors=MappingProxyType(_replaced(checkpoint.tensors, spare, made, used)))


def pieces_of(name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """List the pieces of a tensor of this name and shape, in order; empty if it is no matrix of experts."""
    if match := _SINGLE.fullmatch(name):
        return (Piece(match["layer"], int(match["expert"]), _ROLES[match["role"]]),)
    if match := _ROUTER_NAME.fullmatch(name):
        return (Piece(match["layer"], ROUTER, "router"),)
    layer, roles = fused_name(name) or ("", ())
    if roles and len(shape) == 3 and 0 < shape[0] <= _MOST_EXPERTS and shape[1] % len(roles) == 0:
        return tuple(Piece(layer, expert, role) for expert in range(shape[0]) for role in roles)
    return ()


def fused_name(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the layer of a name of fused experts, and the roles of the matrices in it; None for any other name."""
    match = _FUSED_NAME.fullmatch(name)
    return (match["layer"], _FUSED[match["roles"]]) if match else None


def inputs_first(name: str, names: Collection[str]) -> bool:
    """Whether stacked experts have inputs before outputs: those of gpt-oss, which alone have biases among `names`."""
    return fused_name(name) is not None and f"{name}_bias" in names


def _stock(spare: Mapping[str, Readable]) -> Iterator[tuple[Piece, _Part]]:
    """Return every piece of the stored tensors as a tensor of its own; of codes those that are one piece."""
    for tensor in spare.values():
        pieces = pieces_of(tensor.name, tensor.shape)
        if len(pieces) == 1 and isinstance(tensor, CodedTensor):
            yield pieces[0], tensor
        elif pieces and (entry := tensor.entry()) is not None:
            shape, nbytes = _piece_shape(entry.shape, len(pieces)), entry.nbytes // len(pieces)
            for index, piece in enumerate(pieces):
                yield piece, replace(entry, shape=shape, offset=entry.offset + index * nbytes, nbytes=nbytes)


def _piece_shape(shape: tuple[int, ...], n_pieces: int) -> tuple[int, ...]:
    if len(shape) != 3 or not n_pieces:
        return shape
    return (shape[1] * shape[0] // n_pieces, shape[2])


def _made_of(wanted: Readable, pieces: list[_Part], n_needed: int) -> Readable | None:
    """Assemble a tensor from its pieces; None if one is missing or has another shape."""
    shape = _piece_shape(wanted.shape, n_needed)
    if len(pieces) != n_needed or any(piece.shape != shape for piece in pieces):
        return None
    if len(wanted.shape) != 3:
        return replace(pieces[0], name=wanted.name)
    if any(piece.is_delta != pieces[0].is_delta for piece in pieces):
        return None
    return Stacked(wanted.name, wanted.shape, tuple(pieces))


def _replaced(
    tensors: Mapping[str, Readable], spare: Mapping[str, Readable], made: Mapping[str, Readable], used: set[Piece]
) -> dict[str, Readable]:
    """Replace the tensors that were used up by those that were assembled, in storage order."""
    pieces = {name: pieces_of(name, tensor.shape) for name, tensor in spare.items()}
    unused = (t for name, t in tensors.items() if not pieces.get(name) or not used.issuperset(pieces[name]))
    return {tensor.name: tensor for tensor in sorted([*unused, *made.values()], key=_place)}


def _place(tensor: Readable) -> tuple[str, int]:
    """Return the position of a tensor's first stored byte, as a sort key; files are ordered by name."""
    first = next(iter(tensor.stored), None)
    return ("", 0) if first is None else (str(first.file), first.offset)
