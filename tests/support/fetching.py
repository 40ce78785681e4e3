"""Reads the elements of any tensor of a checkpoint, as the engine would, checking that it asks for what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Readable, TensorEntry
from mergepipe.checkpoints.open_files import decoded, read_span
from mergepipe.core.blocks import Span
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES


@dataclass(slots=True)
class AlignedFile:
    """A file in memory that serves whole pages only, fails a test that asks for anything else, and remembers."""

    location: Location
    content: bytes
    ledger: Ledger
    alignment: int = PAGE_BYTES
    version: str = ""
    requested: list[tuple[int, int, Purpose]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        if offset % PAGE_BYTES or len(buffer) % PAGE_BYTES or address % PAGE_BYTES:
            raise AssertionError(f"{len(buffer)} bytes at {offset} to {address:#x} are not whole pages")
        self.requested.append((offset, len(buffer), purpose))
        self.ledger.charge(str(self.location), purpose, len(buffer))
        piece = self.content[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Nothing to release."""


def aligned_files(tensors: Iterable[Readable]) -> tuple[Mapping[Location, AlignedFile], Ledger]:
    """The files behind some tensors, and the ledger that counts what is asked of them."""
    ledger = Ledger()
    paths = {entry.file for tensor in tensors for entry in tensor.stored}
    return {path: AlignedFile(path, path.local_path.read_bytes(), ledger) for path in paths}, ledger


def fetched(tensor: Readable, spans: Iterable[Span] | None = None) -> NDArray[np.float32]:
    """All elements (float32, in shape), fetched span by span.

    Raises:
        AssertionError: more was requested than `cost_bytes` says.
    """
    whole = tuple(spans) if spans is not None else (Span(0, tensor.n_elements),)
    files, ledger = aligned_files([tensor])
    if isinstance(tensor, TensorEntry):
        raws = [read_span(tensor, span, files, Purpose.EXPERT) for span in whole]
        cost = sum(tensor.cost_bytes(span) for span in whole)
    else:
        fetch = tensor.opened(files)
        raws = [np.empty(span.n_elements * tensor.dtype.itemsize, np.uint8) for span in whole]
        for span, raw in zip(whole, raws, strict=True):
            fetch(span, raw, Purpose.EXPERT)
        costs = [tensor.cost_bytes(span) for span in whole]
        cost = max(costs, default=0) if tensor.is_unit else sum(costs)
    if ledger.usage()[Purpose.EXPERT] > cost or ledger.total_bytes() > cost:
        raise AssertionError(f"{tensor.name}: {ledger.total_bytes()} bytes were requested, {cost} planned")
    return decoded(np.concatenate([np.empty(0, np.uint8), *raws]), tensor.dtype.kernel_code).reshape(tensor.shape)
