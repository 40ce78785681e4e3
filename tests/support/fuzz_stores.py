"""Delta stores that are fuzzed: header, index, and the pieces of single blocks behind all checksums."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mergepipe import pack
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.open_files import open_files
from mergepipe.core.blocks import BF16, F16, F32, DType, Span
from mergepipe.deltastore.bands import MANTISSA_BITS, encode_bands
from mergepipe.deltastore.checkpoint import open_store
from mergepipe.deltastore.codec import BlockContext, decode_block, decode_deltas, encode_block, encode_converted
from mergepipe.deltastore.encode_pass import choose_cut
from mergepipe.deltastore.index import PIECE_NAMES, ROW_BYTES, StoreIndex, index_digest
from mergepipe.deltastore.pieces import BANDED_FROM_ELEMENTS, Codec, EncodedBlock, Level, Piece, RawBytes
from mergepipe.deltastore.tensor import EncodedTensor, PackedTensor
from mergepipe.errors import MergePipeError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support import fuzz_seals as seals
from support.fuzzing import Target
from support.local_models import open_local
from support.mutations import Shape
from support.public_names import HEADER_NAME, INDEX_NAME
from support.rounding import decode, encode

_LENGTHS = struct.Struct(f"<BB{len(Piece)}I")  # number of the block, level, length of each piece
_MOST_FILE_BYTES = 1 << 24
LEVELS = (Level.HEAD, Level.LOSSLESS)


def store_targets(folder: Path, golden: Path) -> tuple[Target, ...]:
    """Targets over stores of the golden expert, packed anew, and over blocks in memory."""
    base = open_local(golden / "base.safetensors")
    pack(golden / "base.safetensors", [golden / "expert.safetensors"], folder / "stores", threads=1)
    place = folder / "stores" / "expert"
    indexed = shutil.copytree(place, folder / "indexed")
    header, index = place / HEADER_NAME, place / INDEX_NAME

    def read_header(raw: bytes) -> object:
        header.write_bytes(raw)
        return _fetch_all(place, base)

    sound_header = header.read_bytes()
    return (
        Target("store-header", read_header, Shape((sound_header,), seals.seal_store_header, is_json=True)),
        Target("store-index", _index_reader(indexed, base),
               Shape((index.read_bytes(),), split=seals.fixed(ROW_BYTES))),
        _block_target(),
    )  # fmt: skip


def _index_reader(place: Path, base: Checkpoint) -> Callable[[bytes], object]:
    """Put an index in a store whose header knows its digest, and whose files have the sizes that it says."""
    document = json.loads((place / HEADER_NAME).read_bytes())

    def read(raw: bytes) -> object:
        (place / INDEX_NAME).write_bytes(raw)
        sealed = seals.seal_store_header(json.dumps({**document, "index_blake3": index_digest(raw)}).encode())
        (place / HEADER_NAME).write_bytes(sealed)
        try:
            index = StoreIndex.parse(raw, "fuzzed")
        except MergePipeError:
            return open_store(LocalStore(), Location.local(place), base)
        for piece in Piece:
            os.truncate(place / PIECE_NAMES[piece], min(index.file_bytes(piece), _MOST_FILE_BYTES))
        return _fetch_all(place, base)

    return read


def _fetch_all(place: Path, base: Checkpoint) -> int:
    """Open a store and fetch every tensor at every level; the number of bytes."""
    store, fetched = LocalStore(), 0
    for tensor in open_store(store, Location.local(place), base).tensors.values():
        if not isinstance(tensor, EncodedTensor):
            continue
        levels: Sequence[EncodedTensor] = [tensor]
        if isinstance(tensor, PackedTensor):
            levels = [tensor.at_level(level) for level in (Level.HEAD, Level.LOSSLESS)]
        for leveled in levels:
            out = np.zeros(leveled.n_elements * leveled.dtype.itemsize, np.uint8)
            bases = [] if leveled.base is None else [leveled.base]
            with open_files(store, {entry.file for entry in (*leveled.stored, *bases)}) as files:
                leveled.opened(files)(Span(0, leveled.n_elements), out, Purpose.EXPERT)
            fetched += len(out)
    return fetched


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A block as it was encoded, and what it is decoded beside."""

    codec: Codec
    context: BlockContext
    nbytes: int
    pieces: Mapping[Piece, RawBytes]

    def content(self, number: int, level: Level) -> bytes:
        """The pieces as one input, with the number of this case and the level that is decoded."""
        stored = [self.pieces.get(piece, np.empty(0, np.uint8)).tobytes() for piece in Piece]
        return _LENGTHS.pack(number, LEVELS.index(level), *map(len, stored)) + b"".join(stored)


def block_cases() -> list[BlockCase]:
    """Blocks of every codec: those of bands in both dtypes, short (most bytes are tables) and of many streams."""
    rng, cases = np.random.default_rng(0), []
    blocks = (
        (4096, BF16, 1e-4), (5000, BF16, 1e-2), (4099, F16, 1e-3), (17000, BF16, 3e-6), (40000, BF16, 1e-4),
        (20000, F16, 1e-4), (700, BF16, 1e-4), (900, F32, 1e-5),
    )  # fmt: skip
    for n, dtype, step in blocks:
        base_N = (rng.standard_normal(n) * 0.02).astype(np.float32)
        expert_N = base_N + (rng.standard_normal(n) * step).astype(np.float32)
        base, expert = _stored(base_N, dtype), _stored(expert_N, dtype)
        cut = choose_cut(np.asarray(_values(expert, dtype) - _values(base, dtype)), is_sample=False)
        beside, alone = BlockContext(base, dtype, "fuzzed"), BlockContext(None, dtype, "fuzzed")
        encoded = [(encode_block(base, expert, dtype, cut), beside), (encode_block(None, expert, dtype, None), alone)]
        if dtype in MANTISSA_BITS and n >= BANDED_FROM_ELEMENTS:
            banded = encode_bands(base.view(np.uint16), expert.view(np.uint16), cut, dtype)
            assert banded is not None
            encoded.append((EncodedBlock(Codec.BANDS, banded.pieces), beside))
        if dtype is F32:
            shorter = _stored(base_N, BF16)
            converted = BlockContext(shorter, F32, "fuzzed", BF16)
            raw = EncodedBlock(Codec.RAW, {Piece.WHOLE: expert})
            encoded += [(encode_converted(shorter, BF16, expert, F32), converted), (raw, alone)]
            encoded.append((EncodedBlock(Codec.SAME, {}), beside))
        cases += [BlockCase(block.codec, context, len(expert), block.pieces) for block, context in encoded]
    return cases


def _stored(values_N: np.ndarray[tuple[int], np.dtype[np.float32]], dtype: DType) -> RawBytes:
    return np.frombuffer(encode(values_N, dtype).tobytes(), np.uint8)


def _values(stored: RawBytes, dtype: DType) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return decode(stored.tobytes(), dtype)


def _block_target() -> Target:
    cases = block_cases()

    def read(raw: bytes) -> object:
        if len(raw) < _LENGTHS.size:
            return None
        number, level, *lengths = _LENGTHS.unpack_from(raw)
        case, at, pieces = cases[number % len(cases)], _LENGTHS.size, dict[Piece, RawBytes]()
        for piece, length in zip(Piece, lengths, strict=True):
            pieces[piece] = np.frombuffer(raw[at : at + length], np.uint8)
            at += min(length, len(raw))
        return _decode(case, LEVELS[level % len(LEVELS)], pieces)

    seeds = tuple(case.content(n, level) for n, case in enumerate(cases) for level in LEVELS)
    return Target("store-block", read, Shape(seeds, split=_parts_of))


def _decode(case: BlockCase, level: Level, pieces: dict[Piece, RawBytes]) -> int:
    out = np.zeros(case.nbytes, np.uint8)
    if level is Level.LOSSLESS:
        decode_block(case.codec, pieces, case.context, out)
    if case.context.base is not None:
        deltas_N = np.zeros(case.nbytes // case.context.dtype.itemsize, np.float32)
        decode_deltas(case.codec, level, pieces, case.context, deltas_N)
    return len(out)


def _parts_of(content: bytes) -> Sequence[bytes]:
    head = content[: _LENGTHS.size]
    if len(head) < _LENGTHS.size:
        return [content]
    parts, at = [head], _LENGTHS.size
    for length in _LENGTHS.unpack(head)[2:]:
        parts.append(content[at : at + length])
        at += min(length, len(content))
    return [*parts, content[at:]]
