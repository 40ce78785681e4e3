"""Residual streams: which codes each holds, and how exceptions are stored with them.

Format: HEAD_FINE, BODY_FINE and REST in "BANDS", docs/internals/formats/delta-store.md.
"""

from __future__ import annotations

from mergepipe.deltastore.codec.tiles.element_codes import FIRST_BODY_CODE, FIRST_CELL_CODE, LAST_CELL_CODE

EXCEPTION_BITS = 32
CHUNK_ELEMENTS = 1 << 16
"""Positions of exceptions are stored within chunks of this many elements, in 16 bits."""
WIDTH_COUNTS = 17
STREAM_CODES = ((1, FIRST_BODY_CODE - 1), (FIRST_BODY_CODE, FIRST_CELL_CODE - 1), (FIRST_CELL_CODE, LAST_CELL_CODE))
"""First and last code of the streams: head, body, rest."""
