"""What fine pieces are made of: streams of numbers by code, their widths, and exceptions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.deltastore.codec.rans import Halves
from mergepipe.deltastore.codec.symbols import FIRST_BODY_CODE, FIRST_REST_CODE, LAST_REST_CODE

EXCEPTION_BITS = 32
CHUNK_ELEMENTS = 1 << 16
"""Positions of exceptions are within so many elements: 16 bits."""
WIDTH_COUNTS = 17
STREAM_CODES = ((1, FIRST_BODY_CODE - 1), (FIRST_BODY_CODE, FIRST_REST_CODE - 1), (FIRST_REST_CODE, LAST_REST_CODE))
"""First and last code of the streams: head, body, rest."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Elements that codes and fine numbers do not give: where in the block, ascending, and their bits."""

    positions: NDArray[np.uint32]
    bits: Halves
