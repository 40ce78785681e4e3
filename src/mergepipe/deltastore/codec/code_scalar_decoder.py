"""Decode the codes of BANDS on any machine, both stages of symbols in one loop."""

from __future__ import annotations

import numpy as np

from mergepipe.deltastore.codec.element_codes import FIRST_BODY_CODE
from mergepipe.deltastore.codec.rans import LANES, LOWEST_STATE, PRECISION_BITS, SKIPPED, TOTAL
from mergepipe.kernels.compiled import Bits32, Bits64, Bytes, kernel, template


@template
def _entry_of(table: Bits32, context: np.uint8, state: np.uint32) -> np.uint32:
    """The entry of a decode table (`rans.fill_decode_row`) for a state in a context."""
    slot = np.uint64(state & np.uint32(TOTAL - 1))
    return np.uint32(table[(np.uint64(context) << np.uint64(PRECISION_BITS)) + slot])


@template
def _without(entry: np.uint32, state: np.uint32) -> np.uint32:
    """The state without the symbol of its entry, before it is refilled."""
    offset = (entry >> np.uint32(8)) & np.uint32(0xFFF)
    return np.uint32((entry >> np.uint32(20)) * (state >> np.uint32(PRECISION_BITS)) + offset)


@template
def _refilled(state: np.uint32, stored: Bytes, position: np.uint64) -> np.uint32:
    """The state, with the word at `position` behind it where it is low."""
    word = np.uint32(stored[position]) | (np.uint32(stored[position + np.uint64(1)]) << np.uint32(8))
    return np.uint32((state << np.uint32(16)) | word) if state < np.uint32(LOWEST_STATE) else state


@template
def _taken_bytes(state: np.uint32) -> np.uint64:
    """The bytes of the word that refills a state."""
    return np.uint64(state < np.uint32(LOWEST_STATE)) << np.uint64(1)


@kernel
def decode_codes_scalar(
    stored: Bytes, positions: Bits64, states: Bits32, contexts: Bytes, n: int, head_table: Bits32, body_table: Bits32,
    codes: Bytes,
) -> None:  # fmt: skip
    """Decode the codes of `n` (padded) elements; skipped ones get the code of their zero symbols, `FIRST_BODY_CODE`.

    `positions` are the offsets in `stored` of the next words of head and body, `states` those of both; all change.
    Tables are filled by `fill_decode_row` and `fill_skipped_row`. `stored` is readable for `n + 1` words from both
    positions on: an element consumes at most one of each, so that no content makes it read outside.
    """
    head_states, body_states = states[:LANES], states[LANES : 2 * LANES]
    head_position, body_position = positions[0], positions[1]
    for i in range(0, n, LANES):
        for lane in range(LANES):
            j = np.uint64(i + lane)
            context, head_state, body_state = contexts[j], head_states[lane], body_states[lane]
            entry = _entry_of(head_table, context, head_state)
            symbol = np.uint8(entry)
            head_state = _without(entry, head_state)
            head_states[lane] = _refilled(head_state, stored, head_position)
            head_position += _taken_bytes(head_state)
            entry = _entry_of(body_table, context if symbol == np.uint8(0) else np.uint8(SKIPPED), body_state)
            body_state = _without(entry, body_state)
            body_states[lane] = _refilled(body_state, stored, body_position)
            body_position += _taken_bytes(body_state)
            codes[j] = symbol if symbol != np.uint8(0) else np.uint8(np.uint8(entry) + np.uint8(FIRST_BODY_CODE))
    positions[0], positions[1] = head_position, body_position
