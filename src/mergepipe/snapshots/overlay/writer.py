"""Write only those blocks of an output that differ from the base's, and digest all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.formats.weight_files import OVERLAY_NAME
from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS
from mergepipe.snapshots.block_digests import block_digest, root_of
from mergepipe.snapshots.overlay.table import STORED, BaseFile, BlockPlace, OverlayTable
from mergepipe.snapshots.shards import ShardLayout, ShardProgress, TensorDigest, TensorSpec
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import os_error


class OverlayWriter:
    """Accepts an output sequentially as `ShardWriter` does, and stores the blocks that differ from the base.

    `references` locate the base's bytes of tensors with the same dtype and shape in `files`.
    A context manager. Memory: one block, and a digest and a location for each.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[ShardLayout],
        files: Sequence[BaseFile],
        references: Mapping[str, BlockPlace],
        ledger: Ledger,
    ) -> None:
        self._path = directory / OVERLAY_NAME
        self._specs = iter([spec for shard in shards for spec in shard.tensors])
        self._files = tuple(files)
        self._references = references
        self._ledger = ledger
        self._descriptor = self._create()
        self._stored_bytes = 0
        self._places: list[BlockPlace] = []
        self.digests: list[TensorDigest] = []
        self._spec: TensorSpec | None = None
        self._blocks: list[bytes] = []  # digests of the tensor that is being written
        self._block: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled = 0
        self._done_bytes = 0  # of the tensor, in whole blocks
        self._is_base = True
        self._next_tensor()

    @property
    def table(self) -> OverlayTable:
        """The locations of the blocks written."""
        return OverlayTable(self._files, self._stored_bytes, tuple(self._places))

    @property
    def progress(self) -> ShardProgress:
        """The bytes stored so far; how many it will be is not known before. Read from any thread."""
        return ShardProgress(OVERLAY_NAME, self._stored_bytes, self._stored_bytes)

    def refers_to(self, name: str) -> bool:
        """Whether blocks of a tensor may be taken from the base, so that `append` needs the base's bytes too."""
        return name in self._references

    def append(self, content: NDArray[np.uint8], base: NDArray[np.uint8] | None) -> None:
        """Append the next bytes (uint8) of the current tensor, with the base's bytes at the same place."""
        done = 0
        while done < len(content):
            if self._spec is None:
                raise ValueError("more bytes than the layout has tensors")
            count = min(len(self._block) - self._filled, len(content) - done)
            part = content[done : done + count]
            self._block[self._filled : self._filled + count] = part
            self._is_base &= base is not None and np.array_equal(part, base[done : done + count])
            self._filled += count
            done += count
            if self._filled == len(self._block):
                self._end_block(self._spec)

    def finish(self) -> None:
        """Make the file durable.

        Raises:
            ValueError: not all tensors were written.
        """
        if self._spec is not None:
            raise ValueError("the output was closed before all tensors were written")
        try:
            owned.sync_file(self._descriptor)
        except OSError as error:
            raise os_error(error, self._path, "making it durable") from error
        finally:
            self._close()

    def _next_tensor(self) -> None:
        """Go on to the next tensor that has bytes."""
        for spec in self._specs:
            if spec.nbytes:
                self._spec, self._done_bytes = spec, 0
                self._begin_block(spec)
                return
            self.digests.append(TensorDigest(spec.name, root_of(()), ()))
        self._spec = None

    def _begin_block(self, spec: TensorSpec) -> None:
        nbytes = min(DEFAULT_BLOCK_ELEMENTS * spec.dtype.itemsize, spec.nbytes - self._done_bytes)
        if len(self._block) != nbytes:
            self._block = np.empty(nbytes, np.uint8)
        self._filled, self._is_base = 0, spec.name in self._references

    def _end_block(self, spec: TensorSpec) -> None:
        self._blocks.append(block_digest(self._block.data))
        if self._is_base:
            start = self._references[spec.name]
            self._places.append(BlockPlace(start.source, start.offset + self._done_bytes))
        else:
            self._places.append(BlockPlace(STORED, self._stored_bytes))
            self._store()
        self._done_bytes += len(self._block)
        if self._done_bytes < spec.nbytes:
            self._begin_block(spec)
            return
        blocks, self._blocks = tuple(self._blocks), []
        self.digests.append(TensorDigest(spec.name, root_of(blocks), blocks))
        self._next_tensor()

    def _store(self) -> None:
        try:
            rest = self._block.data
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise os_error(error, self._path, f"writing at byte {self._stored_bytes}") from error
        self._ledger.charge(str(self._path), Purpose.OUTPUT, len(self._block))
        self._stored_bytes += len(self._block)

    def _create(self) -> int:
        try:
            return owned.create_file(self._path)
        except OSError as error:
            raise os_error(error, self._path, "creating it") from error

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OverlayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()  # what is not finished is in staging, which its owner removes
