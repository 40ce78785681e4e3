"""Residual streams: which codes each holds, and the exceptions that are stored with them.

Format: HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.values import dataclass
from mergepipe.deltastore.codec.entropy.rans import Bits16
from mergepipe.deltastore.codec.tiles.element_codes import FIRST_BODY_CODE, FIRST_CELL_CODE, LAST_CELL_CODE

EXCEPTION_BITS = 32
CHUNK_ELEMENTS = 1 << 16
"""Positions of exceptions are stored within chunks of this many elements, in 16 bits."""
WIDTH_COUNTS = 17
STREAM_CODES = ((1, FIRST_BODY_CODE - 1), (FIRST_BODY_CODE, FIRST_CELL_CODE - 1), (FIRST_CELL_CODE, LAST_CELL_CODE))
"""First and last code of the streams: head, body, rest."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Elements that codes and residuals cannot express: ascending positions in the block, and their bf16 bits."""

    positions: NDArray[np.uint32]
    bits: Bits16
