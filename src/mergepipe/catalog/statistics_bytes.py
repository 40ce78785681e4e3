"""Encode one tensor's statistics as bytes with a checksum: `unpack(pack(s, subject), subject) == s`.

Layout, little-endian, no padding: header (24 bytes: version, density encoding, number of densities, bytes per block
record, block elements, elements), 3 products (f8), the bits of D cuts (u4), B block records, D densities (u2
ten-thousandths if that is exact, else f8), where any cut is tied a bit for each that is (big-endian, whole bytes) and
the key and last hash of those (2 u4), checksum (BLAKE3-128 of everything before it, keyed by the BLAKE3 of the
subject). Nothing is compressed: hashes, norms and sketches are close to random bytes, and decompression would cost more
than it saves.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.core.blocks import BlockGrid
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.operators.statistics import BLOCK_RECORD, Cut, TensorStatistics

PACKING_VERSION = 2
CHECKSUM_BYTES = 16
_HEAD = struct.Struct("<BBHIQQ")
HEADER_BYTES = _HEAD.size
_N_PRODUCTS = 3
_DENSITY_UNIT = 10_000
_DENSITY_DTYPES = (np.dtype("<f8"), np.dtype("<u2"))  # by encoding
_MAX_DENSITIES = 0xFFFF


def pack(statistics: TensorStatistics, subject: str) -> bytes:
    """Pack one tensor's statistics. `subject` identifies the tensor: `unpack` needs the same."""
    densities = _encode_densities(statistics.densities_D)
    if len(densities) > _MAX_DENSITIES:
        raise ValueError(f"{len(densities)} densities, at most {_MAX_DENSITIES} can be packed")
    head = _HEAD.pack(
        PACKING_VERSION,
        _DENSITY_DTYPES.index(densities.dtype),
        len(densities),
        BLOCK_RECORD.itemsize,
        statistics.grid.block_elements,
        statistics.grid.n_elements,
    )
    content = b"".join(
        (
            head,
            statistics.products_3.astype("<f8").tobytes(),
            statistics.cuts_D3[:, 0].astype("<u4").tobytes(),
            statistics.blocks_B.tobytes(),
            densities.tobytes(),
            _encode_ties(statistics.cuts_D3),
        )
    )
    return content + _checksum(subject, content)


def unpack(packed: bytes, subject: str) -> TensorStatistics:
    """Unpack statistics without copying the block records; the arrays are read-only.

    Raises:
        CorruptError: these bytes are not what `pack` returned for this subject.
        UnsupportedError: a newer version wrote them.
    """
    if len(packed) < HEADER_BYTES + CHECKSUM_BYTES:
        raise _corrupt(subject, f"{len(packed)} bytes are less than a header and a checksum")
    if packed[-CHECKSUM_BYTES:] != _checksum(subject, memoryview(packed)[:-CHECKSUM_BYTES]):
        raise _corrupt(subject, "the checksum does not match")
    version, encoding, n_densities, record_bytes, block_elements, n_elements = _HEAD.unpack_from(packed)
    if version != PACKING_VERSION:
        raise UnsupportedError.of(
            "catalog.newer", subject, f"statistics of format {version}, {PACKING_VERSION} is known", "update mergepipe"
        )
    if record_bytes != BLOCK_RECORD.itemsize or encoding >= len(_DENSITY_DTYPES) or block_elements == 0:
        raise _corrupt(subject, "the header contradicts the format")
    return _arrays(packed, BlockGrid(n_elements, block_elements), n_densities, _DENSITY_DTYPES[encoding], subject)


def _arrays(
    packed: bytes, grid: BlockGrid, n_densities: int, density_dtype: np.dtype[np.generic], subject: str
) -> TensorStatistics:
    cuts = HEADER_BYTES + 8 * _N_PRODUCTS
    blocks = cuts + 4 * n_densities
    densities = blocks + BLOCK_RECORD.itemsize * grid.n_blocks
    end = densities + density_dtype.itemsize * n_densities
    if len(packed) < end + CHECKSUM_BYTES:
        raise _corrupt(subject, f"{len(packed)} bytes for {grid.n_blocks} blocks and {n_densities} densities")
    cuts_D3 = np.full((n_densities, 3), (0, *Cut(0)[1:]), np.uint32)
    cuts_D3[:, 0] = np.frombuffer(packed, "<u4", n_densities, cuts)
    if not _decode_ties(packed[end:-CHECKSUM_BYTES], cuts_D3):
        raise _corrupt(subject, f"{len(packed)} bytes for {grid.n_blocks} blocks and {n_densities} densities")
    return TensorStatistics(
        grid=grid,
        blocks_B=np.frombuffer(packed, BLOCK_RECORD, grid.n_blocks, blocks),
        densities_D=_stored_densities(packed[densities:end], density_dtype),
        cuts_D3=cuts_D3,
        products_3=np.frombuffer(packed, "<f8", _N_PRODUCTS, HEADER_BYTES),
    )


def _encode_ties(cuts_D3: NDArray[np.uint32]) -> bytes:
    """Encode which cuts are tied, and at which hashes; nothing where none is."""
    is_tied_D = (cuts_D3[:, 1:] != Cut(0)[1:]).any(axis=1)
    return np.packbits(is_tied_D).tobytes() + cuts_D3[is_tied_D, 1:].astype("<u4").tobytes() if is_tied_D.any() else b""


def _decode_ties(stored: bytes, cuts_D3: NDArray[np.uint32]) -> bool:
    """Complete cuts by what `_encode_ties` gave; return whether it can be that. They are read-only then."""
    mask = np.frombuffer(stored, np.uint8)[: -(-len(cuts_D3) // 8)]
    is_tied_D = np.zeros(len(cuts_D3), np.bool_)
    is_tied_D[: 8 * len(mask)] = np.unpackbits(mask)[: len(cuts_D3)]
    is_complete = len(stored) == len(mask) + 8 * np.count_nonzero(is_tied_D)
    if is_complete:
        cuts_D3[is_tied_D, 1:] = np.frombuffer(stored[len(mask) :], "<u4").reshape(-1, 2)
    cuts_D3.flags.writeable = False
    return is_complete


def _encode_densities(densities_D: NDArray[np.float64]) -> NDArray[np.generic]:
    with np.errstate(over="ignore", invalid="ignore"):
        units_D = np.clip(np.nan_to_num(np.rint(densities_D * _DENSITY_UNIT)), 0, 0xFFFF).astype("<u2")
    same = _decode_densities(units_D).tobytes() == densities_D.astype("<f8").tobytes()
    return units_D if same else densities_D.astype("<f8")


@functools.lru_cache(maxsize=256)
def _stored_densities(stored: bytes, dtype: np.dtype[np.generic]) -> NDArray[np.float64]:
    """Decode densities to one read-only array, shared by all tensors with the same densities."""
    densities_D = _decode_densities(np.frombuffer(stored, dtype))
    densities_D.flags.writeable = False
    return densities_D


def _decode_densities(stored_D: NDArray[np.generic]) -> NDArray[np.float64]:
    if stored_D.dtype.kind == "u":
        return stored_D.astype(np.float64) / _DENSITY_UNIT
    return stored_D.astype(np.float64)


def _checksum(subject: str, content: bytes | memoryview) -> bytes:
    """Hash in one call: BLAKE3 is twice as fast on these sizes as in parts."""
    return blake3(content, key=blake3(subject.encode()).digest()).digest(CHECKSUM_BYTES)


def _corrupt(subject: str, message: str) -> MergePipeError:
    return CorruptError.of("catalog.corrupt-statistics", subject, message, "run `mergepipe catalog rebuild`")
