"""Blocks of a base and of the experts packed relative to it, together in memory, and their encoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe.checkpoints.contract import Readable, TensorEntry
from mergepipe.core.blocks import BlockGrid, Span
from mergepipe.deltastore.band_sample import Sample, bands_of, fetch_sample, read_sample, sample_of
from mergepipe.deltastore.codec.block import (
    EncodedBlock,
    RawBytes,
    base_contexts,
    encode_block,
    encode_converted,
    raw_block,
)
from mergepipe.deltastore.codec.encode import BaseContexts
from mergepipe.deltastore.codec.levels import BLOCK_ELEMENTS
from mergepipe.deltastore.index import digest, make_row
from mergepipe.deltastore.pack.builder import Place, StoreBuilder
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


@dataclass(frozen=True, slots=True)
class Member:
    """Bytes of tensor number `number` of one expert, whose store is built by `builder`."""

    builder: StoreBuilder
    number: int
    content: RawBytes

    @property
    def place(self) -> Place:
        return self.builder.job.places[self.number]

    @property
    def entry(self) -> TensorEntry:
        return self.place.entry


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The elements `span` of tensors of the same name and shape: the base's bytes and those of each expert.

    `span` begins and ends at block boundaries. Without a base both are None.
    """

    span: Span
    base_entry: Readable | None
    base: RawBytes | None
    members: tuple[Member, ...]

    @property
    def blocks(self) -> range:
        """The numbers of the blocks in it."""
        return range(self.span.start // BLOCK_ELEMENTS, -(-self.span.stop // BLOCK_ELEMENTS))

    def encode(self, block: int) -> None:
        """Encode one block of every expert and hand it to its builder; called from many threads.

        The part of the encoding that depends on the base alone is computed once.

        Raises:
            StorageError: a block could not be written.
        """
        base = None
        if self.base is not None and self.base_entry is not None:
            base = self._part(self.base, self.base_entry, block)
        base_digest = None if base is None else digest(base)
        same_dtype = [m for m in self.members if self.base_entry and m.entry.dtype is self.base_entry.dtype]
        prepared = base_contexts(base, same_dtype[0].entry.dtype) if len(same_dtype) > 1 else None
        for member in self.members:
            content = self._part(member.content, member.entry, block)
            encoded = self._encoded(base, member, content, prepared)
            row = make_row(encoded, base_digest, content)
            member.builder.put(member.number, block, content, encoded, row)

    def _encoded(
        self, base: RawBytes | None, member: Member, content: RawBytes, prepared: BaseContexts | None
    ) -> EncodedBlock:
        dtype = member.entry.dtype
        if member.place.stays_plain:
            return raw_block(content)
        if base is not None and self.base_entry is not None and self.base_entry.dtype is not dtype:
            return encode_converted(base, self.base_entry.dtype, content, dtype)
        return encode_block(base, content, dtype, member.builder.bands(member.number), prepared)

    def _part(self, content: RawBytes, entry: Readable, block: int) -> RawBytes:
        block_span = BlockGrid(entry.n_elements, BLOCK_ELEMENTS).span(block)
        first, size = self.span.start, entry.dtype.itemsize
        return content[(block_span.start - first) * size : (block_span.stop - first) * size]


class BandChooser:
    """Chooses the bands of tensors before their first blocks are encoded. Safe to use from many threads.

    Tensors that are not in memory as a whole are sampled from `files`, the base's tensor once for all experts.
    """

    def __init__(self, files: Mapping[Location, RangeFile]) -> None:
        self._files = files
        self._lock = threading.Lock()

    def choose(self, blocks: BlockGroup) -> None:
        """Make sure that the builders of a `BlockGroup` have the bands of their tensors.

        Raises:
            StorageError, CorruptError: a sample could not be read.
        """
        with self._lock:
            lacking = [member for member in blocks.members if member.builder.lacks_bands(member.number)]
            if not lacking or blocks.base_entry is None or blocks.base is None:
                return
            base = self._sample(blocks.base_entry, blocks.base, Purpose.BASE)
            for member in lacking:
                expert = self._sample(member.entry, member.content, Purpose.ANALYSIS)
                member.builder.set_bands(member.number, bands_of(base, expert))

    def _sample(self, entry: Readable, content: RawBytes, purpose: Purpose) -> Sample:
        if len(content) == entry.n_elements * entry.dtype.itemsize:
            return sample_of(content, entry.dtype)
        if isinstance(entry, TensorEntry):
            return read_sample(entry, self._files[entry.file], purpose)
        return fetch_sample(entry, entry.opened(self._files), purpose)


def block_bytes(entry: Readable) -> int:
    """The size of a whole block of a tensor."""
    return BLOCK_ELEMENTS * entry.dtype.itemsize
